//! Limits on the work and memory of one grammar.
//!
//! Limits hold for a whole specification, however many schemas and grammars it has, unless they are of a
//! part.
//!
//! Invariant: no limit depends on time, so the same specification is accepted or refused on every machine.

use crate::GrammarError;
use llguidance::api::ParserLimits;
use std::cell::Cell;

/// Limits on the size of a specification, and on the work of compiling it and of computing one mask.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most bytes of a specification's text.
    pub text_bytes: usize,
    /// Most schemas, those within schemas included.
    pub schemas: usize,
    /// Most references. Each may nest the work of resolving it by one level.
    pub references: usize,
    /// Most values within the targets of references, counted once per reference: llguidance copies targets.
    pub referenced: usize,
    /// Most levels of schemas within schemas, multiplied by the number of schemas that are referred to: the
    /// levels of resolving all references, at most.
    pub levels: usize,
    /// Most properties of one object of a JSON schema.
    pub properties: usize,
    /// Most properties of all objects together.
    pub all_properties: usize,
    /// Most bytes of a property's name.
    pub name_bytes: usize,
    /// Most pairs of properties of the same object, all objects together: properties may be left out in any
    /// combination.
    pub property_pairs: usize,
    /// Most patterns and formats of JSON schemas. Each may need an automaton of its own.
    pub patterns: usize,
    /// Most pairs of patterns of the properties of one object, all objects together: each pair is compared.
    pub pattern_pairs: usize,
    /// Work of matching the names of properties with the patterns of names, in bytes and nodes.
    pub name_matches: usize,
    /// Most JSON schemas within a grammar.
    pub embedded: usize,
    /// Work of cutting GBNF into lexemes, in members of the sets that are compared.
    pub cutting: usize,
    /// Most characters that a schema may count in one string.
    pub string_characters: u64,
    /// Most rules of a grammar. Each may nest the work of compiling it by one level.
    pub rules: usize,
    /// Most bytes of one regular expression.
    pub regex_bytes: usize,
    /// Most bytes of all regular expressions of a grammar or JSON schema together.
    pub all_regex_bytes: usize,
    /// Most tokens of a grammar in Lark.
    pub tokens: usize,
    /// Most strings of a choice, values of an `enum`, or alternative calls.
    pub choices: usize,
    /// Work of building regular expressions while a grammar is compiled, in nodes.
    pub compile_nodes: u64,
    /// Work of regular expressions for one mask, in nodes.
    pub mask_nodes: u64,
    /// Work of the parser for one mask, in items.
    pub mask_items: usize,
    /// Most items of the parser at one byte of the text: several for each property that may come next.
    pub row_items: usize,
    /// Most symbols of a compiled grammar.
    pub symbols: usize,
    /// Most states of a sequence's lexer, of one to two kilobytes each.
    pub lexer_states: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            text_bytes: 1 << 20,
            schemas: 10_000,
            references: 1_000,
            referenced: 200_000,
            levels: 3_000,
            properties: 1_000,
            all_properties: 3_000,
            name_bytes: 1_000,
            property_pairs: 1_000_000,
            patterns: 300,
            pattern_pairs: 50,
            name_matches: 200_000,
            embedded: 200,
            cutting: 1_000_000,
            string_characters: 1_000_000,
            rules: 1_000,
            regex_bytes: 16 << 10,
            all_regex_bytes: 256 << 10,
            tokens: 100_000,
            choices: 10_000,
            compile_nodes: 500_000,
            mask_nodes: 200_000,
            mask_items: 200_000,
            row_items: 10_000,
            symbols: 200_000,
            lexer_states: 5_000,
        }
    }
}

impl Limits {
    /// Returns the limits of llguidance's parser.
    pub(crate) fn parser(&self) -> ParserLimits {
        ParserLimits {
            initial_lexer_fuel: self.compile_nodes,
            step_lexer_fuel: self.mask_nodes,
            step_max_items: self.mask_items,
            max_lexer_states: self.lexer_states,
            max_items_in_row: self.row_items,
            max_grammar_size: self.symbols,
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}

/// Amounts of the limits that a specification has used so far. All parts of a specification share it.
pub(crate) struct Budget<'a> {
    pub limits: &'a Limits,
    pub schemas: usize,
    pub references: usize,
    pub referenced: usize,
    pub all_properties: usize,
    pub property_pairs: usize,
    pub patterns: usize,
    pub all_regex_bytes: usize,
    pub tokens: usize,
    pub pattern_pairs: usize,
    pub name_matches: usize,
    pub rules: usize,
    pub embedded: usize,
    cutting: Cell<usize>,
}

impl<'a> Budget<'a> {
    /// Creates the budget of a specification.
    pub fn new(limits: &'a Limits) -> Budget<'a> {
        Budget {
            limits,
            schemas: 0,
            references: 0,
            referenced: 0,
            all_properties: 0,
            property_pairs: 0,
            patterns: 0,
            all_regex_bytes: 0,
            tokens: 0,
            pattern_pairs: 0,
            name_matches: 0,
            rules: 0,
            embedded: 0,
            cutting: Cell::new(0),
        }
    }

    /// Adds work of cutting GBNF. Fails if it was too much, and from then on.
    pub fn cutting(&self, work: usize) -> Result<(), GrammarError> {
        let total = self.cutting.get().saturating_add(work);
        self.cutting.set(total);
        if total > self.limits.cutting {
            return Err(GrammarError::refused("grammar", "too complex"));
        }
        Ok(())
    }
}
