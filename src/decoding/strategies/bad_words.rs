//! Words that must not be generated.

use super::history::History;
use super::params::{Kind, Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

const WORDS: Param =
    Param::list("bad_words", Kind::Sequences, "texts, or lists of token ids, that must not be generated");

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "bad_words",
    aliases: &[],
    place: Place::First,
    params: &[WORDS],
    summary: "Forbids the last token of each sequence whose other tokens have just been generated. A text \
              stands for its tokens, with and without a space before it.",
    build,
};

/// The forbidden sequences, none of them empty.
#[derive(Debug)]
struct BadWords(Vec<Vec<u32>>);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let words = values.sequences(&WORDS).to_vec();
    Ok((!words.is_empty()).then(|| Unit::Edit(Box::new(BadWords(words)))))
}

impl Edit for BadWords {
    fn edit(&self, logits: &mut [f32], history: &History, _: &mut EditScratch) {
        for word in &self.0 {
            if let Some((last, before)) = word.split_last()
                && history.generated().ends_with(before)
                && let Some(logit) = logits.get_mut(*last as usize)
            {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}
