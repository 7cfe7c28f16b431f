//! Automata of lexemes (Glushkov's construction), to find out where reading the longest lexeme is wrong.

use super::characters::Characters;
use super::parse::Node;
use crate::GrammarError;
use crate::limits::Budget;

/// Most states of an automaton.
const STATES: usize = 2000;

/// Most transitions of an automaton.
const TRANSITIONS: usize = 20_000;

/// Most parts that are visited to build an automaton.
const VISITS: usize = 20_000;

/// Most pairs of states that are compared.
const PAIRS: usize = 50_000;

/// An automaton that reads the words of a lexeme. State 0 is the start; every transition into a state reads a
/// character of that state's class.
pub struct Automaton {
    classes: Vec<Characters>,
    next: Vec<Vec<usize>>,
    accepting: Vec<bool>,
}

/// A part of an automaton: the states that its words begin and end with.
struct Fragment {
    nullable: bool,
    first: Vec<usize>,
    last: Vec<usize>,
}

impl Automaton {
    /// Builds the automaton of a node without recursive rules. Returns `None` if it would be too large. Fails
    /// if the grammar's budget is spent.
    pub fn new(node: &Node, rules: &[Node], budget: &Budget) -> Result<Option<Automaton>, GrammarError> {
        let mut builder = Builder {
            rules,
            budget,
            classes: vec![Characters::default()],
            next: vec![Vec::new()],
            visits: 0,
            transitions: 0,
        };
        let whole = builder.visit(node);
        budget.cutting(0)?;
        let Some(whole) = whole else { return Ok(None) };
        let Builder { classes, mut next, .. } = builder;
        let mut accepting = vec![false; classes.len()];
        accepting[0] = whole.nullable;
        whole.last.iter().for_each(|state| accepting[*state] = true);
        next[0] = whole.first;
        Ok(Some(Automaton { classes, next, accepting }))
    }

    /// Returns whether the empty word is a word.
    pub fn is_nullable(&self) -> bool {
        self.accepting[0]
    }

    /// Returns the characters that words begin with. Fails if the grammar's budget is spent.
    pub fn first(&self, budget: &Budget) -> Result<Characters, GrammarError> {
        let mut first = Characters::default();
        for state in &self.next[0] {
            budget.cutting(first.size() + self.classes[*state].size())?;
            first.add(&self.classes[*state]);
        }
        Ok(first)
    }

    /// Returns whether a word of this automaton can be read on, as the beginning of a word of `other`, with
    /// one of the characters `follow`. Assumes that it cannot if there is too much to compare. Fails if the
    /// grammar's budget is spent.
    pub fn is_read_on(
        &self,
        other: &Automaton,
        follow: &Characters,
        budget: &Budget,
    ) -> Result<bool, GrammarError> {
        let mut seen = std::collections::HashSet::from([(0, 0)]);
        let mut open = vec![(0, 0)];
        while let Some((own, others)) = open.pop() {
            if own > 0 && self.accepting[own] {
                for state in &other.next[others] {
                    budget.cutting(other.classes[*state].size() + follow.size())?;
                    if other.classes[*state].meets(follow) {
                        return Ok(true);
                    }
                }
            }
            for a in &self.next[own] {
                for b in &other.next[others] {
                    budget.cutting(self.classes[*a].size() + other.classes[*b].size())?;
                    let same = self.classes[*a].meets(&other.classes[*b]);
                    if same && seen.len() < PAIRS && seen.insert((*a, *b)) {
                        open.push((*a, *b));
                    }
                }
            }
        }
        Ok(false)
    }
}

struct Builder<'a, 'b> {
    rules: &'a [Node],
    budget: &'a Budget<'b>,
    classes: Vec<Characters>,
    next: Vec<Vec<usize>>,
    visits: usize,
    transitions: usize,
}

impl Builder<'_, '_> {
    fn visit(&mut self, node: &Node) -> Option<Fragment> {
        self.visits += 1;
        if self.visits > VISITS {
            return None;
        }
        let size = if let Node::Class(class) = node { class.size() } else { 1 };
        self.budget.cutting(size).ok()?;
        match node {
            Node::Class(class) => {
                let state = self.classes.len();
                self.classes.push(class.clone());
                self.next.push(Vec::new());
                (state <= STATES).then(|| Fragment { nullable: false, first: vec![state], last: vec![state] })
            }
            Node::Rule(at) => self.visit(&self.rules[*at]),
            Node::Sequence(nodes) => {
                let mut whole = Fragment { nullable: true, first: Vec::new(), last: Vec::new() };
                for node in nodes {
                    let part = self.visit(node)?;
                    whole = self.join(whole, part)?;
                }
                Some(whole)
            }
            Node::Choice(nodes) => {
                let mut whole = Fragment { nullable: false, first: Vec::new(), last: Vec::new() };
                for node in nodes {
                    let part = self.visit(node)?;
                    whole.nullable |= part.nullable;
                    whole.first.extend(part.first);
                    whole.last.extend(part.last);
                }
                Some(whole)
            }
            Node::Repeat { node, min, max } => self.repeat(node, *min, *max),
        }
    }

    fn repeat(&mut self, node: &Node, min: u32, max: Option<u32>) -> Option<Fragment> {
        let mut whole = Fragment { nullable: true, first: Vec::new(), last: Vec::new() };
        let copies = max.unwrap_or(min.max(1));
        for copy in 0..copies {
            let mut part = self.visit(node)?;
            part.nullable |= copy >= min;
            if max.is_none() && copy + 1 == copies {
                self.connect(&part.last, &part.first)?;
            }
            whole = self.join(whole, part)?;
        }
        Some(whole)
    }

    /// Joins the words of two parts.
    fn join(&mut self, mut before: Fragment, mut after: Fragment) -> Option<Fragment> {
        self.connect(&before.last, &after.first)?;
        if before.nullable {
            before.first.extend(&after.first);
        }
        if after.nullable {
            after.last.extend(before.last);
        }
        Some(Fragment { nullable: before.nullable && after.nullable, first: before.first, last: after.last })
    }

    fn connect(&mut self, from: &[usize], to: &[usize]) -> Option<()> {
        self.transitions += from.len() * to.len();
        if self.transitions > TRANSITIONS {
            return None;
        }
        self.budget.cutting(from.len() * to.len()).ok()?;
        from.iter().for_each(|state| self.next[*state].extend(to));
        Some(())
    }
}
