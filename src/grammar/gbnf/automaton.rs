//! Automata of lexemes (Glushkov's construction), to find out where reading the longest lexeme is wrong.

use super::characters::Characters;
use super::parse::Node;

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
    /// Builds the automaton of a node without recursive rules. Returns `None` if it would be too large.
    pub fn new(node: &Node, rules: &[Node]) -> Option<Automaton> {
        let mut builder = Builder {
            rules,
            classes: vec![Characters::default()],
            next: vec![Vec::new()],
            visits: 0,
            transitions: 0,
        };
        let whole = builder.visit(node)?;
        let Builder { classes, mut next, .. } = builder;
        let mut accepting = vec![false; classes.len()];
        accepting[0] = whole.nullable;
        whole.last.iter().for_each(|state| accepting[*state] = true);
        next[0] = whole.first;
        Some(Automaton { classes, next, accepting })
    }

    /// Returns whether the empty word is a word.
    pub fn is_nullable(&self) -> bool {
        self.accepting[0]
    }

    /// Returns the characters that words begin with.
    pub fn first(&self) -> Characters {
        let mut first = Characters::default();
        self.next[0].iter().for_each(|state| first.add(&self.classes[*state]));
        first
    }

    /// Returns whether a word of this automaton can be read on, as the beginning of a word of `other`, with
    /// one of the characters `follow`. Assumes that it cannot if there is too much to compare.
    pub fn is_read_on(&self, other: &Automaton, follow: &Characters) -> bool {
        let mut seen = std::collections::HashSet::from([(0, 0)]);
        let mut open = vec![(0, 0)];
        while let Some((own, others)) = open.pop() {
            let goes_on = || other.next[others].iter().any(|state| other.classes[*state].meets(follow));
            if own > 0 && self.accepting[own] && goes_on() {
                return true;
            }
            for a in &self.next[own] {
                for b in &other.next[others] {
                    let same = self.classes[*a].meets(&other.classes[*b]);
                    if same && seen.len() < PAIRS && seen.insert((*a, *b)) {
                        open.push((*a, *b));
                    }
                }
            }
        }
        false
    }
}

struct Builder<'a> {
    rules: &'a [Node],
    classes: Vec<Characters>,
    next: Vec<Vec<usize>>,
    visits: usize,
    transitions: usize,
}

impl Builder<'_> {
    fn visit(&mut self, node: &Node) -> Option<Fragment> {
        self.visits += 1;
        if self.visits > VISITS {
            return None;
        }
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
        from.iter().for_each(|state| self.next[*state].extend(to));
        Some(())
    }
}
