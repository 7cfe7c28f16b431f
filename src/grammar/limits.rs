//! Limits on the work and memory of one grammar.
//!
//! Invariant: no limit depends on time, so the same specification is accepted or refused on every machine.

use llguidance::api::ParserLimits;

/// Limits on the size of a specification, and on the work of compiling it and of computing one mask.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most bytes of a specification's text.
    pub text_bytes: usize,
    /// Most schemas within a JSON schema.
    pub schemas: usize,
    /// Most references within a JSON schema. Each may nest the work of resolving it by one level.
    pub references: usize,
    /// Most levels of schemas within schemas, multiplied by the number of schemas that are referred to: the
    /// levels of resolving all references, at most.
    pub levels: usize,
    /// Most properties of one object of a JSON schema.
    pub properties: usize,
    /// Most pairs of properties of the same object, all objects together: properties may be left out in any
    /// combination.
    pub property_pairs: usize,
    /// Most patterns and formats within a JSON schema. Each may need an automaton of its own.
    pub patterns: usize,
    /// Most pairs of patterns of the properties of one object, all objects together: each pair is compared.
    pub pattern_pairs: usize,
    /// Most characters that a schema may count in one string.
    pub string_characters: u64,
    /// Most rules of a grammar. Each may nest the work of compiling it by one level.
    pub rules: usize,
    /// Most bytes of one regular expression.
    pub regex_bytes: usize,
    /// Most strings of a choice, values of an `enum`, or alternative calls.
    pub choices: usize,
    /// Work of building regular expressions while a grammar is compiled, in nodes.
    pub compile_nodes: u64,
    /// Work of regular expressions for one mask, in nodes.
    pub mask_nodes: u64,
    /// Work of the parser for one mask, in items.
    pub mask_items: usize,
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
            references: 500,
            levels: 3_000,
            properties: 1_000,
            property_pairs: 1_000_000,
            patterns: 100,
            pattern_pairs: 50,
            string_characters: 1_000_000,
            rules: 1_000,
            regex_bytes: 16 << 10,
            choices: 10_000,
            compile_nodes: 500_000,
            mask_nodes: 200_000,
            mask_items: 200_000,
            symbols: 200_000,
            lexer_states: 50_000,
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
            max_grammar_size: self.symbols,
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}
