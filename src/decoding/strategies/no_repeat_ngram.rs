//! No-repeat n-grams.

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
    fn edit(&self, logits: &mut [f32], history: &History, _: &mut EditScratch) {
        let tokens = history.tokens();
        if tokens.len() < self.0 {
            return;
        }
        let suffix = &tokens[tokens.len() + 1 - self.0..];
        for ngram in tokens.windows(self.0) {
            let (last, before) = ngram.split_last().expect("the size is above 0; this is a bug");
            if before == suffix
                && let Some(logit) = logits.get_mut(*last as usize)
            {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}
