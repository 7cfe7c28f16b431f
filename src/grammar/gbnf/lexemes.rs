//! Cuts a grammar into lexemes and productions over them.
//!
//! Parts without recursion become lexemes, neighbours as one. Where reading the longest lexeme would swallow
//! what may follow it, the lexeme is split into its parts, until none is left for which that happens; single
//! characters never do. If a part is too large for that analysis, some of its texts may be lost; if all is,
//! the grammar is refused.

use super::automaton::Automaton;
use super::characters::Characters;
use super::parse::Node;
use crate::GrammarError;
use crate::limits::Budget;
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

/// Cuts a grammar into lexemes. Fails if it is too large.
pub fn cut(rules: &[Node], budget: &Budget) -> Result<Cut, GrammarError> {
    let regular = regular_rules(rules);
    let mut split = HashSet::new();
    for round in 0.. {
        let mut cutter = Cutter::new(rules, &regular, &split, budget);
        let start = cutter.item(&Node::Rule(0))?;
        let Cutter { symbols, lexemes, .. } = cutter;
        let mut cut = Cut { start, symbols, shared: Vec::new(), lexemes };
        let swallowing =
            if round < ROUNDS { Analysis::new(&cut, rules, budget)?.swallowing()? } else { Vec::new() };
        if swallowing.is_empty() {
            cut.shared = shared(&cut.lexemes, rules);
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

/// Returns about how many steps it takes to copy or compare a node.
fn size(node: &Node) -> usize {
    match node {
        Node::Class(class) => class.size(),
        Node::Rule(_) => 1,
        Node::Sequence(nodes) | Node::Choice(nodes) => nodes.iter().map(size).sum::<usize>() + 1,
        Node::Repeat { node, .. } => size(node) + 1,
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

struct Cutter<'a, 'b> {
    rules: &'a [Node],
    regular: &'a [bool],
    /// Nodes that must not be lexemes.
    split: &'a HashSet<Node>,
    budget: &'a Budget<'b>,
    symbols: Vec<Vec<Vec<Item>>>,
    symbol_of_rule: HashMap<usize, usize>,
    lexemes: Vec<Node>,
    lexeme_of: HashMap<Node, usize>,
}

impl<'a, 'b> Cutter<'a, 'b> {
    fn new(
        rules: &'a [Node],
        regular: &'a [bool],
        split: &'a HashSet<Node>,
        budget: &'a Budget<'b>,
    ) -> Cutter<'a, 'b> {
        let (symbols, symbol_of_rule, lexemes, lexeme_of) = Default::default();
        Cutter { rules, regular, split, budget, symbols, symbol_of_rule, lexemes, lexeme_of }
    }

    /// Returns whether a node may be a lexeme; says no once the budget is spent, which others report.
    fn is_lexeme(&self, node: &Node) -> bool {
        if self.budget.cutting(size(node)).is_err() {
            return false;
        }
        let mut regular = true;
        references(node, &mut |at| regular &= self.regular[at]);
        regular && !self.split.contains(node) && !is_empty(node)
    }

    fn lexeme(&mut self, node: Node) -> Result<Item, GrammarError> {
        self.budget.cutting(size(&node))?;
        let next = self.lexemes.len();
        let at = *self.lexeme_of.entry(node.clone()).or_insert(next);
        if at == next {
            self.lexemes.push(node);
        }
        Ok(Item::Lexeme(at))
    }

    fn symbol(&mut self) -> Result<usize, GrammarError> {
        self.symbols.push(Vec::new());
        self.budget.cutting(1)?;
        let most = self.budget.limits.symbols / 10;
        if self.symbols.len() > most {
            return Err(GrammarError::refused("grammar", format!("more than {most} parts")));
        }
        Ok(self.symbols.len() - 1)
    }

    fn item(&mut self, node: &Node) -> Result<Item, GrammarError> {
        if self.is_lexeme(node) {
            return self.lexeme(node.clone());
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
                    all.push(vec![self.lexeme(merged)?]);
                } else {
                    for node in together {
                        all.push(vec![self.lexeme(node.clone())?]);
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
            self.budget.cutting(rest[..run].iter().map(size).sum())?;
            let merged = Node::Sequence(rest[..run].to_vec());
            if run > 1 && !self.split.contains(&merged) {
                items.push(self.lexeme(merged)?);
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
        self.budget.cutting(min as usize)?;
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
struct Analysis<'a, 'b> {
    cut: &'a Cut,
    budget: &'a Budget<'b>,
    /// The automaton of each lexeme; `None` if it is too large.
    automata: Vec<Option<Automaton>>,
    /// The characters that each lexeme begins with.
    characters: Vec<Characters>,
    nullable: Vec<bool>,
    /// The lexemes that each symbol may begin with.
    first: Vec<Lexemes>,
    /// The lexemes that may follow each symbol, and each lexeme.
    after_symbol: Vec<Lexemes>,
    after_lexeme: Vec<Lexemes>,
}

impl<'a, 'b> Analysis<'a, 'b> {
    /// Examines a cut. Fails if the budget is spent, as do the methods.
    fn new(cut: &'a Cut, rules: &[Node], budget: &'a Budget<'b>) -> Result<Analysis<'a, 'b>, GrammarError> {
        let automata = cut.lexemes.iter().map(|lexeme| Automaton::new(lexeme, rules, budget));
        let automata: Vec<Option<Automaton>> = automata.collect::<Result<_, _>>()?;
        let first = |automaton: &Option<Automaton>| {
            automaton.as_ref().map_or_else(|| Ok(Characters::default()), |automaton| automaton.first(budget))
        };
        let characters = automata.iter().map(first).collect::<Result<_, _>>()?;
        let symbols = cut.symbols.len();
        let mut analysis = Analysis {
            cut,
            budget,
            automata,
            characters,
            nullable: vec![false; symbols],
            first: vec![Lexemes::new(); symbols],
            after_symbol: vec![Lexemes::new(); symbols],
            after_lexeme: vec![Lexemes::new(); cut.lexemes.len()],
        };
        for _ in 0..PASSES {
            if !analysis.pass()? {
                break;
            }
        }
        Ok(analysis)
    }

    fn is_nullable(&self, item: Item) -> bool {
        match item {
            Item::Lexeme(at) => self.automata[at].as_ref().is_some_and(Automaton::is_nullable),
            Item::Symbol(at) => self.nullable[at],
        }
    }

    /// Extends all sets by what the productions say. Returns whether any grew.
    fn pass(&mut self) -> Result<bool, GrammarError> {
        let mut grew = false;
        let cut = self.cut;
        for (symbol, alternatives) in cut.symbols.iter().enumerate().rev() {
            for items in alternatives {
                // The lexemes that begin the rest of the production, and whether the rest may be empty.
                let (mut next, mut empty) = (Lexemes::new(), true);
                for item in items.iter().rev() {
                    let begins = if let Item::Symbol(at) = item { self.first[*at].len() } else { 1 };
                    let ends = if empty { self.after_symbol[symbol].len() } else { 0 };
                    self.budget.cutting(1 + next.len() + begins + ends)?;
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
        Ok(grew)
    }

    /// Returns the characters that may follow a lexeme.
    fn follow(&self, lexeme: usize) -> Result<Characters, GrammarError> {
        let mut all = Characters::default();
        for at in &self.after_lexeme[lexeme] {
            self.budget.cutting(all.size() + self.characters[*at].size())?;
            all.add(&self.characters[*at]);
        }
        Ok(all)
    }

    /// Returns the lexemes that swallow what may follow a lexeme expected at the same place.
    fn swallowing(&self) -> Result<Vec<usize>, GrammarError> {
        let Item::Symbol(start) = self.cut.start else { return Ok(Vec::new()) };
        let follow: Vec<Characters> =
            (0..self.cut.lexemes.len()).map(|at| self.follow(at)).collect::<Result<_, _>>()?;
        let mut examined = HashSet::new();
        let mut found = BTreeSet::new();
        let mut sets = HashSet::from([self.first[start].clone()]);
        let mut open: Vec<Lexemes> = sets.iter().cloned().collect();
        while let Some(set) = open.pop() {
            for own in &set {
                let mut next = Lexemes::new();
                for other in &set {
                    self.budget.cutting(self.characters[*other].size() + self.characters[*own].size())?;
                    if !self.characters[*other].meets(&self.characters[*own]) {
                        continue;
                    }
                    self.budget.cutting(self.after_lexeme[*other].len())?;
                    next.extend(&self.after_lexeme[*other]);
                    if !examined.insert((*own, *other)) {
                        continue;
                    }
                    if let (Some(a), Some(b)) = (&self.automata[*own], &self.automata[*other])
                        && a.is_read_on(b, &follow[*own], self.budget)?
                    {
                        found.insert(*other);
                    }
                }
                self.budget.cutting(next.len())?;
                if sets.len() < SETS && sets.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        Ok(found.into_iter().collect())
    }
}
