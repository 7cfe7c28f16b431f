//! A budget for the thinking part of an answer.

use super::history::History;
use super::params::{Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

const BUDGET: Param = Param::integer(
    "thinking_token_budget",
    -1,
    -1,
    u32::MAX as i64,
    "most tokens of the thinking part; -1: any number",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "thinking_token_budget",
    aliases: &[],
    place: Place::Last,
    params: &[BUDGET],
    summary: "After this many tokens inside the thinking part, forces the tokens that end it, whatever other \
              edits forbid. The part begins after the last token of the prompt or the output that begins \
              one, also in a message that quotes it.",
    build,
};

/// The budget, and the tokens of the model that delimit its thinking.
#[derive(Debug)]
struct Thinking {
    budget: usize,
    start: u32,
    /// At least one token.
    end: Vec<u32>,
}

fn build(values: &Values, vocabulary: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let Ok(budget) = usize::try_from(values.integer(&BUDGET)) else { return Ok(None) };
    let missing =
        || ParamError::new(BUDGET.name, "is given, but the model has no tokens around its thinking");
    let (start, end) = vocabulary.thinking().filter(|(_, end)| !end.is_empty()).ok_or_else(missing)?;
    Ok(Some(Unit::Edit(Box::new(Thinking { budget, start, end: end.into_owned() }))))
}

impl Edit for Thinking {
    fn edit(&self, logits: &mut [f32], history: &History, _: &mut EditScratch) {
        let Some(next) = self.forced(history.tokens()) else { return };
        if (next as usize) < logits.len() {
            logits.fill(f32::NEG_INFINITY);
            logits[next as usize] = 0.0;
        }
    }
}

impl Thinking {
    /// Returns the token that must follow, if the budget is used up and the thinking part has not ended.
    fn forced(&self, tokens: &[u32]) -> Option<u32> {
        let start = tokens.iter().rposition(|&token| token == self.start)?;
        let thoughts = &tokens[start + 1..];
        let has_ended = thoughts.windows(self.end.len()).any(|window| window == self.end);
        if has_ended || thoughts.len() < self.budget {
            return None;
        }
        // The end may have begun: its longest beginning with which the thoughts end.
        let begun = (0..self.end.len()).rev().find(|&n| thoughts.ends_with(&self.end[..n]));
        self.end.get(begun.unwrap_or(0)).copied()
    }
}
