//! The parser of GBNF.
//!
//! Invariant: the depth of a rule's tree is bounded, so that functions over trees may recurse.

use super::characters::Characters;
use crate::limits::Budget;
use crate::{GrammarError, lark};
use std::collections::HashMap;

/// Most groups within groups.
const NESTED: usize = 40;

/// Most characters and groups of a grammar.
const NODES: usize = 50_000;

/// Largest number of repetitions, as in llama.cpp's own limit.
const REPETITIONS: u32 = 2000;

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    Class(Characters),
    /// The rule with this index.
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat {
        node: Box<Node>,
        min: u32,
        max: Option<u32>,
    },
}

/// The rules of a grammar; the first is `root`.
pub type Rules = Vec<Node>;

/// Reads the rules of a grammar.
pub fn parse(text: &str, budget: &mut Budget) -> Result<Rules, GrammarError> {
    let mut parser = Parser { text, rest: text, rules: vec![None], names: HashMap::new(), nodes: 0 };
    parser.names.insert("root".to_owned(), (0, text));
    parser.blanks(true);
    while !parser.rest.is_empty() {
        parser.rule()?;
        let most = budget.limits.rules;
        if budget.rules + parser.rules.len() > most {
            return Err(GrammarError::refused("grammar", format!("more than {most} rules")));
        }
    }
    budget.rules += parser.rules.len();
    let defined = |(at, rule): (usize, Option<Node>)| {
        rule.ok_or_else(|| {
            let (name, (_, place)) =
                parser.names.iter().find(|(_, (index, _))| *index == at).expect("rules have names");
            let place = if at == 0 { "grammar".to_owned() } else { lark::place(text, place) };
            GrammarError::refused(place, format!("the rule '{name}' is not defined"))
        })
    };
    std::mem::take(&mut parser.rules).into_iter().enumerate().map(defined).collect()
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
    rules: Vec<Option<Node>>,
    /// Index of each rule, and the text from its first mention on.
    names: HashMap<String, (usize, &'a str)>,
    nodes: usize,
}

impl<'a> Parser<'a> {
    fn error<T>(&self, reason: impl Into<String>) -> Result<T, GrammarError> {
        Err(GrammarError::refused(lark::place(self.text, self.rest), reason))
    }

    /// Skips blanks and comments, and line ends too if `lines` is set.
    fn blanks(&mut self, lines: bool) {
        loop {
            self.rest = self
                .rest
                .trim_start_matches(|c: char| c == ' ' || c == '\t' || (lines && "\r\n".contains(c)));
            if !self.rest.starts_with('#') {
                return;
            }
            let end = self.rest.find(['\r', '\n']).unwrap_or(self.rest.len());
            self.rest = &self.rest[end..];
        }
    }

    fn take(&mut self, text: &str) -> bool {
        let after = self.rest.strip_prefix(text);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    /// Returns the length of the name at the beginning of the rest.
    fn name_len(&self) -> usize {
        self.rest.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(byte)).count()
    }

    /// Takes a name, which must be there. Returns the index of its rule.
    fn name(&mut self) -> Result<usize, GrammarError> {
        let len = self.name_len();
        if len == 0 {
            return self.error("a name is expected");
        }
        let next = self.rules.len();
        let (index, _) = *self.names.entry(self.rest[..len].to_owned()).or_insert((next, self.rest));
        if index == next {
            self.rules.push(None);
        }
        self.rest = &self.rest[len..];
        Ok(index)
    }

    fn rule(&mut self) -> Result<(), GrammarError> {
        let begin = self.rest;
        let index = self.name()?;
        self.blanks(false);
        if !self.take("::=") {
            return self.error("'::=' is expected");
        }
        self.blanks(true);
        let node = self.choice(0)?;
        self.blanks(false);
        if !self.rest.is_empty() && !self.rest.starts_with(['\r', '\n']) {
            return self.error("the end of the line is expected");
        }
        self.blanks(true);
        if self.rules[index].replace(node).is_some() {
            return Err(GrammarError::refused(lark::place(self.text, begin), "the rule is defined twice"));
        }
        Ok(())
    }

    /// Reads alternatives. Within parentheses, which `depth` counts, lines may end anywhere.
    fn choice(&mut self, depth: usize) -> Result<Node, GrammarError> {
        let mut alternatives = vec![self.sequence(depth)?];
        while self.take("|") {
            self.blanks(true);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(if alternatives.len() == 1 { alternatives.remove(0) } else { Node::Choice(alternatives) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, GrammarError> {
        let mut nodes = Vec::new();
        loop {
            self.nodes += 1;
            if self.nodes > NODES {
                return Err(GrammarError::refused(
                    "grammar",
                    format!("more than {NODES} characters and groups"),
                ));
            }
            let first = match self.rest.chars().next() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.rest = &self.rest[1..];
                    Node::Class(Characters::default().negated())
                }
                Some('(') if depth == NESTED => return self.error("groups are nested too deeply"),
                Some('(') => {
                    self.rest = &self.rest[1..];
                    self.blanks(true);
                    let inner = self.choice(depth + 1)?;
                    if !self.take(")") {
                        return self.error("')' is expected");
                    }
                    inner
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' || c == '-' => Node::Rule(self.name()?),
                Some('<' | '!') => {
                    return self.error("tokens are not supported: use text, or the syntax of Lark");
                }
                _ => break,
            };
            self.blanks(depth > 0);
            let node = self.repetition(first, depth)?;
            nodes.push(node);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    /// Reads the operators behind a part.
    fn repetition(&mut self, mut node: Node, depth: usize) -> Result<Node, GrammarError> {
        let mut operators = 0;
        loop {
            let (min, max) = match self.rest.chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.rest = &self.rest[1..];
                    self.bounds()?
                }
                _ => return Ok(node),
            };
            operators += 1;
            if operators > 3 {
                return self.error("too many operators in a row");
            }
            self.rest = self.rest.get(1..).unwrap_or_default();
            self.blanks(depth > 0);
            node = Node::Repeat { node: Box::new(node), min, max };
        }
    }

    /// Reads `m}`, `m,}`, `,n}` or `m,n}` up to the closing brace.
    fn bounds(&mut self) -> Result<(u32, Option<u32>), GrammarError> {
        self.blanks(false);
        let min = self.number()?;
        self.blanks(false);
        let range = self.take(",");
        self.blanks(false);
        let max = if range { self.number()? } else { min };
        self.blanks(false);
        let unordered = max.is_some_and(|max| max < min.unwrap_or(0));
        if !self.rest.starts_with('}') || (min.is_none() && max.is_none()) || unordered {
            return self.error("bounds like {2}, {2,} or {2,5} are expected");
        }
        Ok((min.unwrap_or(0), max))
    }

    fn number(&mut self) -> Result<Option<u32>, GrammarError> {
        let digits = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        let number = self.rest[..digits].parse::<u32>().ok();
        if digits > 0 && number.is_none_or(|number| number > REPETITIONS) {
            return self.error(format!("at most {REPETITIONS} repetitions are supported"));
        }
        self.rest = &self.rest[digits..];
        Ok(number)
    }

    fn literal(&mut self) -> Result<Node, GrammarError> {
        self.rest = &self.rest[1..];
        let mut nodes = Vec::new();
        while !self.take("\"") {
            nodes.push(Node::Class(Characters::one(self.character()?)));
        }
        self.nodes += nodes.len();
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn class(&mut self) -> Result<Node, GrammarError> {
        self.rest = &self.rest[1..];
        let negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let first = self.character()?;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            let last = if is_range && self.take("-") { self.character()? } else { first };
            if last < first {
                return self.error("the range is in the wrong order");
            }
            ranges.push((first.into(), last.into()));
        }
        let class = Characters::new(ranges);
        Ok(Node::Class(if negated { class.negated() } else { class }))
    }

    /// Takes a character of a literal or class, which may be escaped.
    fn character(&mut self) -> Result<char, GrammarError> {
        let mut characters = self.rest.chars();
        let first = characters.next();
        let Some(first) = first else { return self.error("the grammar ends within a literal or class") };
        if first != '\\' {
            self.rest = characters.as_str();
            return Ok(first);
        }
        let escaped = characters.next();
        let after = characters.as_str();
        let (character, after) = match escaped {
            Some('x') => self.code(after, 2)?,
            Some('u') => self.code(after, 4)?,
            Some('U') => self.code(after, 8)?,
            Some('n') => ('\n', after),
            Some('r') => ('\r', after),
            Some('t') => ('\t', after),
            Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/')) => (c, after),
            _ => return self.error("the escape is unknown"),
        };
        self.rest = after;
        Ok(character)
    }

    /// Reads a code point of `digits` hexadecimal digits. Returns it, and the text after it.
    fn code(&self, text: &'a str, digits: usize) -> Result<(char, &'a str), GrammarError> {
        let code = text.get(..digits).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        match code.and_then(char::from_u32) {
            Some(character) => Ok((character, &text[digits..])),
            None => self.error(format!("{digits} hexadecimal digits of a character are expected")),
        }
    }
}
