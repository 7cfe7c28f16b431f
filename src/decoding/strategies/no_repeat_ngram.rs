//! No-repeat n-grams.

use super::dry::matches;
use super::history::History;
use super::params::{Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

const SIZE: Param = Param::integer(
    "no_repeat_ngram_size",
    0,
    0,
    i32::MAX as i64,
    "length of the sequences that may occur only once; 0: off",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "no_repeat_ngram",
    aliases: &["no_repeat_ngram_size"],
    place: Place::Edit,
    params: &[SIZE],
    summary: "Forbids every token that would complete a sequence of n tokens which the prompt and the output \
              already contain.",
    build,
};

/// Forbids repetitions of this length.
#[derive(Debug)]
struct NoRepeatNgram(usize);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let size = values.count(&SIZE);
    Ok((size > 0).then(|| Unit::Edit(Box::new(NoRepeatNgram(size)))))
}

impl Edit for NoRepeatNgram {
    fn edit(&self, logits: &mut [f32], history: &History, scratch: &mut EditScratch) {
        let tokens = history.tokens();
        if tokens.len() < self.0 {
            return;
        }
        let mut forbid = |token: u32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        };
        if self.0 == 1 {
            tokens.iter().for_each(|&token| forbid(token));
            return;
        }
        // A token completes a sequence that has occurred if the tokens before it are those at the end.
        let lengths = &mut scratch.lengths;
        matches(tokens, lengths);
        for i in (1..tokens.len()).filter(|&i| lengths[i] as usize >= self.0 - 1) {
            forbid(tokens[tokens.len() - i]);
        }
    }
}
