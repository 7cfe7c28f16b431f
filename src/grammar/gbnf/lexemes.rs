//! Cuts a grammar into lexemes and productions over them.
//!
//! Parts without recursion become lexemes, neighbours as one. Where reading the longest lexeme would swallow
//! what may follow it, the lexeme is split into its parts, until none is left for which that happens; single
//! characters never do. If the grammar is too large for that analysis, some of its texts may be lost.

use super::automaton::Automaton;
use super::characters::Characters;
use super::parse::Node;
use crate::{GrammarError, Limits};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Most rounds of splitting.
const ROUNDS: usize = 50;

/// Most passes over the productions to find what follows what.
const PASSES: usize = 100;

/// Most sets of lexemes that are examined.
const SETS: usize = 2000;

/// A member of a production.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    Lexeme(usize),
    Symbol(usize),
}

/// A grammar over lexemes.
pub struct Cut {
    pub start: Item,
    /// The productions of each symbol.
    pub symbols: Vec<Vec<Vec<Item>>>,
    pub lexemes: Vec<Node>,
    /// The rules that lexemes refer to, with their indices.
    pub shared: Vec<(usize, Node)>,
}

/// Cuts a grammar into lexemes.
pub fn cut(rules: &[Node], limits: &Limits) -> Result<Cut, GrammarError> {
    let regular = regular_rules(rules);
    let mut split = HashSet::new();
    for round in 0.. {
        let mut cutter = Cutter::new(rules, &regular, &split, limits);
        let start = cutter.item(&Node::Rule(0))?;
        let Cutter { symbols, lexemes, .. } = cutter;
        let cut = Cut { start, symbols, shared: shared(&lexemes, rules), lexemes };
        let swallowing = if round < ROUNDS { Analysis::new(&cut, rules).swallowing() } else { Vec::new() };
        if swallowing.is_empty() {
            return Ok(cut);
        }
        split.extend(swallowing.into_iter().map(|at| cut.lexemes[at].clone()));
    }
    unreachable!("the last round returns; this is a bug")
}

/// Calls `found` for each rule that a node refers to.
fn references(node: &Node, found: &mut impl FnMut(usize)) {
    match node {
        Node::Class(_) => {}
        Node::Rule(at) => found(*at),
        Node::Sequence(nodes) | Node::Choice(nodes) => nodes.iter().for_each(|node| references(node, found)),
        Node::Repeat { node, .. } => references(node, found),
    }
}

/// Returns whether a node is written as nothing.
fn is_empty(node: &Node) -> bool {
    match node {
        Node::Sequence(nodes) => nodes.iter().all(is_empty),
        Node::Repeat { max: Some(0), .. } => true,
        Node::Class(_) | Node::Rule(_) | Node::Choice(_) | Node::Repeat { .. } => false,
    }
}

/// Returns which rules reach no recursive rule.
fn regular_rules(rules: &[Node]) -> Vec<bool> {
    let mut used_by = vec![Vec::new(); rules.len()];
    let mut unknown = vec![0usize; rules.len()];
    for (at, rule) in rules.iter().enumerate() {
        let mut targets = BTreeSet::new();
        references(rule, &mut |target| {
            targets.insert(target);
        });
        unknown[at] = targets.len();
        targets.into_iter().for_each(|target| used_by[target].push(at));
    }
    let mut regular = vec![false; rules.len()];
    let mut open: Vec<usize> = (0..rules.len()).filter(|at| unknown[*at] == 0).collect();
    while let Some(at) = open.pop() {
        regular[at] = true;
        for user in &used_by[at] {
            unknown[*user] -= 1;
            if unknown[*user] == 0 {
                open.push(*user);
            }
        }
    }
    regular
}

/// Returns the rules that lexemes refer to, directly or through others.
fn shared(lexemes: &[Node], rules: &[Node]) -> Vec<(usize, Node)> {
    let mut found = BTreeSet::new();
    let mut open = Vec::new();
    lexemes.iter().for_each(|lexeme| references(lexeme, &mut |at| open.push(at)));
    while let Some(at) = open.pop() {
        if found.insert(at) {
            references(&rules[at], &mut |at| open.push(at));
        }
    }
    found.into_iter().map(|at| (at, rules[at].clone())).collect()
}

struct Cutter<'a> {
    rules: &'a [Node],
    regular: &'a [bool],
    /// Nodes that must not be lexemes.
    split: &'a HashSet<Node>,
    limits: &'a Limits,
    symbols: Vec<Vec<Vec<Item>>>,
    symbol_of_rule: HashMap<usize, usize>,
    lexemes: Vec<Node>,
    lexeme_of: HashMap<Node, usize>,
}

impl<'a> Cutter<'a> {
    fn new(
        rules: &'a [Node],
        regular: &'a [bool],
        split: &'a HashSet<Node>,
        limits: &'a Limits,
    ) -> Cutter<'a> {
        let (symbols, symbol_of_rule, lexemes, lexeme_of) = Default::default();
        Cutter { rules, regular, split, limits, symbols, symbol_of_rule, lexemes, lexeme_of }
    }

    fn is_lexeme(&self, node: &Node) -> bool {
        let mut regular = true;
        references(node, &mut |at| regular &= self.regular[at]);
        regular && !self.split.contains(node) && !is_empty(node)
    }

    fn lexeme(&mut self, node: Node) -> Item {
        let next = self.lexemes.len();
        let at = *self.lexeme_of.entry(node.clone()).or_insert(next);
        if at == next {
            self.lexemes.push(node);
        }
        Item::Lexeme(at)
    }

    fn symbol(&mut self) -> Result<usize, GrammarError> {
        self.symbols.push(Vec::new());
        let most = self.limits.symbols / 10;
        if self.symbols.len() > most {
            return Err(GrammarError::refused("grammar", format!("more than {most} parts")));
        }
        Ok(self.symbols.len() - 1)
    }

    fn item(&mut self, node: &Node) -> Result<Item, GrammarError> {
        if self.is_lexeme(node) {
            return Ok(self.lexeme(node.clone()));
        }
        if let Node::Rule(at) = node {
            if let Some(symbol) = self.symbol_of_rule.get(at) {
                return Ok(Item::Symbol(*symbol));
            }
            let symbol = self.symbol()?;
            self.symbol_of_rule.insert(*at, symbol);
            self.symbols[symbol] = self.alternatives(&self.rules[*at])?;
            return Ok(Item::Symbol(symbol));
        }
        let symbol = self.symbol()?;
        self.symbols[symbol] = self.alternatives(node)?;
        Ok(Item::Symbol(symbol))
    }

    fn alternatives(&mut self, node: &Node) -> Result<Vec<Vec<Item>>, GrammarError> {
        match node {
            Node::Class(_) | Node::Rule(_) => Ok(vec![vec![self.item(node)?]]),
            Node::Sequence(nodes) => Ok(vec![self.sequence(nodes)?]),
            Node::Repeat { node, min, max } => self.repeat(node, *min, *max),
            Node::Choice(nodes) => {
                let (together, apart): (Vec<&Node>, Vec<&Node>) =
                    nodes.iter().partition(|node| self.is_lexeme(node));
                let merged = Node::Choice(together.iter().copied().cloned().collect());
                let mut all = Vec::new();
                if together.len() > 1 && !self.split.contains(&merged) {
                    all.push(vec![self.lexeme(merged)]);
                } else {
                    for node in together {
                        all.push(vec![self.lexeme(node.clone())]);
                    }
                }
                for node in apart {
                    all.extend(self.alternatives(node)?);
                }
                Ok(all)
            }
        }
    }

    /// Returns the items of nodes that follow each other; neighbours become one lexeme.
    fn sequence(&mut self, nodes: &[Node]) -> Result<Vec<Item>, GrammarError> {
        let mut items = Vec::new();
        let mut rest = nodes;
        while let Some(first) = rest.first() {
            let run = rest.iter().take_while(|node| self.is_lexeme(node)).count();
            let merged = Node::Sequence(rest[..run].to_vec());
            if run > 1 && !self.split.contains(&merged) {
                items.push(self.lexeme(merged));
                rest = &rest[run..];
            } else {
                items.push(self.item(first)?);
                rest = &rest[1..];
            }
        }
        Ok(items)
    }

    fn repeat(&mut self, node: &Node, min: u32, max: Option<u32>) -> Result<Vec<Vec<Item>>, GrammarError> {
        let item = self.item(node)?;
        let mut items = vec![item; min as usize];
        let Some(max) = max else {
            let more = self.symbol()?;
            self.symbols[more] = vec![vec![], vec![item, Item::Symbol(more)]];
            items.push(Item::Symbol(more));
            return Ok(vec![items]);
        };
        let mut more = None;
        for _ in min..max {
            let symbol = self.symbol()?;
            let rest = [item].into_iter().chain(more).collect();
            self.symbols[symbol] = vec![vec![], rest];
            more = Some(Item::Symbol(symbol));
        }
        items.extend(more);
        Ok(vec![items])
    }
}

/// A set of lexemes.
type Lexemes = BTreeSet<usize>;

/// The order of lexemes in a grammar: which may begin a symbol, and which may follow.
struct Analysis<'a> {
    cut: &'a Cut,
    /// The automaton of each lexeme; `None` if it is too large.
    automata: Vec<Option<Automaton>>,
    nullable: Vec<bool>,
    /// The lexemes that each symbol may begin with.
    first: Vec<Lexemes>,
    /// The lexemes that may follow each symbol, and each lexeme.
    after_symbol: Vec<Lexemes>,
    after_lexeme: Vec<Lexemes>,
}

impl<'a> Analysis<'a> {
    fn new(cut: &'a Cut, rules: &[Node]) -> Analysis<'a> {
        let automata = cut.lexemes.iter().map(|lexeme| Automaton::new(lexeme, rules)).collect();
        let symbols = cut.symbols.len();
        let mut analysis = Analysis {
            cut,
            automata,
            nullable: vec![false; symbols],
            first: vec![Lexemes::new(); symbols],
            after_symbol: vec![Lexemes::new(); symbols],
            after_lexeme: vec![Lexemes::new(); cut.lexemes.len()],
        };
        for _ in 0..PASSES {
            if !analysis.pass() {
                break;
            }
        }
        analysis
    }

    fn is_nullable(&self, item: Item) -> bool {
        match item {
            Item::Lexeme(at) => self.automata[at].as_ref().is_some_and(Automaton::is_nullable),
            Item::Symbol(at) => self.nullable[at],
        }
    }

    /// Extends all sets by what the productions say. Returns whether any grew.
    fn pass(&mut self) -> bool {
        let mut grew = false;
        let cut = self.cut;
        for (symbol, alternatives) in cut.symbols.iter().enumerate().rev() {
            for items in alternatives {
                // The lexemes that begin the rest of the production, and whether the rest may be empty.
                let (mut next, mut empty) = (Lexemes::new(), true);
                for item in items.iter().rev() {
                    let mut after = next.clone();
                    if empty {
                        after.extend(&self.after_symbol[symbol]);
                    }
                    let (target, begins) = match item {
                        Item::Lexeme(at) => (&mut self.after_lexeme[*at], Lexemes::from([*at])),
                        Item::Symbol(at) => (&mut self.after_symbol[*at], self.first[*at].clone()),
                    };
                    let before = target.len();
                    target.extend(after);
                    grew |= target.len() > before;
                    if !self.is_nullable(*item) {
                        (next, empty) = (Lexemes::new(), false);
                    }
                    next.extend(begins);
                }
                let before = self.first[symbol].len();
                self.first[symbol].extend(next);
                grew |= self.first[symbol].len() > before || empty != self.nullable[symbol] && empty;
                self.nullable[symbol] |= empty;
            }
        }
        grew
    }

    /// Returns the characters that may follow a lexeme.
    fn follow(&self, lexeme: usize) -> Characters {
        let mut all = Characters::default();
        let automata = self.after_lexeme[lexeme].iter().filter_map(|at| self.automata[*at].as_ref());
        automata.for_each(|automaton| all.add(&automaton.first()));
        all
    }

    /// Returns the lexemes that swallow what may follow a lexeme expected at the same place.
    fn swallowing(&self) -> Vec<usize> {
        let Item::Symbol(start) = self.cut.start else { return Vec::new() };
        let lexemes = 0..self.cut.lexemes.len();
        let follow: Vec<Characters> = lexemes.clone().map(|at| self.follow(at)).collect();
        let first: Vec<Characters> =
            self.automata.iter().map(|a| a.as_ref().map(Automaton::first).unwrap_or_default()).collect();
        let mut examined = HashSet::new();
        let mut found = BTreeSet::new();
        let mut sets = HashSet::from([self.first[start].clone()]);
        let mut open: Vec<Lexemes> = sets.iter().cloned().collect();
        while let Some(set) = open.pop() {
            for own in &set {
                let mut next = Lexemes::new();
                for other in set.iter().filter(|other| first[**other].meets(&first[*own])) {
                    next.extend(&self.after_lexeme[*other]);
                    if !examined.insert((*own, *other)) {
                        continue;
                    }
                    if let (Some(a), Some(b)) = (&self.automata[*own], &self.automata[*other])
                        && a.is_read_on(b, &follow[*own])
                    {
                        found.insert(*other);
                    }
                }
                if sets.len() < SETS && sets.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        found.into_iter().collect()
    }
}
