//! The work of matching names of properties with `patternProperties`.
//!
//! llguidance finds the schema of a name by the patterns of its object, or of an object that it is combined
//! with, and sets no limit on the automata that this builds. So the same is done here first, with one.

use crate::GrammarError;
use crate::limits::Budget;
use llguidance::derivre::{Regex, RegexBuilder};
use std::collections::BTreeSet;

/// Work of building one automaton's first state, as in llguidance.
const FIRST_STATE: u64 = 10_000;

/// The names of properties and their patterns within a schema.
#[derive(Default)]
pub struct Names {
    pub names: BTreeSet<String>,
    pub patterns: Vec<String>,
}

impl Names {
    /// Matches all names with all patterns. Fails if that takes too much work.
    pub fn check(&self, budget: &mut Budget) -> Result<(), GrammarError> {
        let most = budget.limits.name_matches;
        let bytes = |all: &mut dyn Iterator<Item = &String>| all.map(String::len).sum::<usize>();
        let names = bytes(&mut self.names.iter());
        let patterns = bytes(&mut self.patterns.iter());
        let work = names * self.patterns.len() + patterns * self.names.len();
        budget.name_matches = budget.name_matches.saturating_add(work);
        let refused = || GrammarError::refused("$", "too many names and patterns of properties to match");
        if budget.name_matches > most {
            return Err(refused());
        }
        for pattern in &self.patterns {
            // An invalid pattern is refused later.
            let Some(mut automaton) = automaton(pattern) else { continue };
            let before = automaton.cost();
            let cost = |automaton: &Regex| (automaton.cost() - before) as usize;
            for name in &self.names {
                let mut state = automaton.initial_state();
                for byte in name.bytes() {
                    state = automaton.transition(state, byte);
                    if budget.name_matches + cost(&automaton) > most {
                        return Err(refused());
                    }
                }
            }
            budget.name_matches += cost(&automaton);
        }
        Ok(())
    }
}

/// Returns the automaton that llguidance builds for a pattern.
fn automaton(pattern: &str) -> Option<Regex> {
    let pattern = super::pattern::translate(pattern).ok()?;
    let mut builder = RegexBuilder::new();
    let expression = builder.mk_regex_for_serach(&llguidance::regex_to_lark(&pattern, "dw")).ok()?;
    builder.to_regex_limited(expression, FIRST_STATE).ok()
}
