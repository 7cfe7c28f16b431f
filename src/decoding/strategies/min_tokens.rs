//! A minimum length of the output.

use super::history::History;
use super::params::{Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

/// Minimum number of tokens.
pub const MIN_TOKENS: Param = Param::integer(
    "min_tokens",
    0,
    0,
    u32::MAX as i64,
    "number of tokens before one that ends the sequence; 0: off",
)
.or(&["min_new_tokens"]);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "min_tokens",
    aliases: &[],
    place: Place::First,
    params: &[MIN_TOKENS],
    summary: "Forbids the tokens that would end the sequence before this many are generated.",
    build,
};

/// Forbids the end tokens at the beginning.
#[derive(Debug)]
struct MinTokens {
    least: usize,
    end_tokens: Vec<u32>,
}

fn build(values: &Values, vocabulary: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let least = values.count(&MIN_TOKENS);
    let end_tokens = vocabulary.end_tokens().into_owned();
    Ok((least > 0).then(|| Unit::Edit(Box::new(MinTokens { least, end_tokens }))))
}

impl Edit for MinTokens {
    fn edit(&self, logits: &mut [f32], history: &History, _: &mut EditScratch) {
        if history.generated().len() < self.least {
            for &id in &self.end_tokens {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}
