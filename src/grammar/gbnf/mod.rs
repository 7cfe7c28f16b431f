//! llama.cpp's grammars (GBNF), which vLLM's `grammar` has too, as grammars of llguidance.
//!
//! GBNF describes text character by character. llguidance reads the longest lexeme first, so a lexeme must
//! not swallow what the grammar wants to follow it. `lexemes` cuts the grammar into lexemes for which reading
//! the longest is exact, as large as possible, because masks over large ones are fast.
//!
//! Invariant: the converted grammar describes no text that the original does not describe, whatever the cut.

mod characters;

mod parse;

mod automaton;

mod lexemes;

use crate::GrammarError;
use crate::limits::Budget;
use lexemes::{Cut, Item};
use parse::Node;

/// Returns whether a grammar is GBNF rather than Lark: GBNF defines rules with `::=`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    let definition = |line: &str| {
        let after =
            line.trim_start().trim_start_matches(|c: char| c.is_ascii_alphanumeric() || "_-".contains(c));
        after.trim_start().starts_with("::=") && after.len() < line.trim_start().len()
    };
    text.lines().any(definition)
}

/// Converts a grammar to llguidance's dialect of Lark. The rule `root` describes the text. Errors name the
/// line and column.
pub(crate) fn to_lark(text: &str, budget: &mut Budget) -> Result<String, GrammarError> {
    let rules = parse::parse(text, budget)?;
    let cut = lexemes::cut(&rules, budget)?;
    Ok(write(&cut))
}

/// Writes the productions and lexemes in Lark's syntax.
fn write(cut: &Cut) -> String {
    let item = |item: &Item| match item {
        Item::Lexeme(at) => format!("L{at}"),
        Item::Symbol(at) => format!("s{at}"),
    };
    let sequence = |items: &Vec<Item>| match items[..] {
        [] => "\"\"".to_owned(),
        _ => items.iter().map(item).collect::<Vec<_>>().join(" "),
    };
    let mut text = format!("start: {}\n", item(&cut.start));
    for (at, alternatives) in cut.symbols.iter().enumerate() {
        let alternatives: Vec<String> = alternatives.iter().map(sequence).collect();
        text += &format!("s{at}: {}\n", alternatives.join(" | "));
    }
    let mut terminals = Terminals { text: String::new(), named: 0 };
    for (at, node) in cut.lexemes.iter().enumerate() {
        let body = terminals.node(node);
        terminals.text += &format!("L{at}: {body}\n");
    }
    // Shared rules are written once, and refer to each other.
    for (at, node) in &cut.shared {
        let body = terminals.node(node);
        terminals.text += &format!("R{at}: {body}\n");
    }
    text + &terminals.text
}

/// Writes terminals. Nested parts get names of their own, so that nothing is nested in the text.
struct Terminals {
    text: String,
    named: usize,
}

impl Terminals {
    fn node(&mut self, node: &Node) -> String {
        match node {
            Node::Class(class) => class.regex(),
            Node::Rule(at) => format!("R{at}"),
            Node::Sequence(nodes) if nodes.is_empty() => "\"\"".to_owned(),
            Node::Sequence(nodes) => self.all(nodes).join(" "),
            Node::Choice(nodes) => self.all(nodes).join(" | "),
            Node::Repeat { max: Some(0), .. } => "\"\"".to_owned(),
            Node::Repeat { node, min, max } => {
                let body = self.atom(node);
                match max {
                    Some(max) => format!("{body}{{{min},{max}}}"),
                    None => format!("{body}{{{min},}}"),
                }
            }
        }
    }

    fn all(&mut self, nodes: &[Node]) -> Vec<String> {
        nodes.iter().map(|node| self.atom(node)).collect()
    }

    /// Writes a node as a single name or class.
    fn atom(&mut self, node: &Node) -> String {
        if matches!(node, Node::Class(_) | Node::Rule(_)) {
            return self.node(node);
        }
        let body = self.node(node);
        self.named += 1;
        let name = format!("N{}", self.named);
        self.text += &format!("{name}: {body}\n");
        name
    }
}
