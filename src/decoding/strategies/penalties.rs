//! Repetition, presence and frequency penalties.

use super::history::History;
use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};
use mainstem_kernels::Penalties;
use mainstem_kernels::batch::{IN_PROMPT, with_generated};

const REPETITION: Param = Param::float(
    "repetition_penalty",
    1.0,
    Bounds::above(0.0, f64::INFINITY),
    "divisor of the positive logits, factor of the negative ones, of tokens of the prompt and the output; \
     1: off",
)
.or(&["repeat_penalty"]);
const PRESENCE: Param = Param::float(
    "presence_penalty",
    0.0,
    Bounds::within(-2.0, 2.0),
    "subtracted from the logits of generated tokens; 0: off",
);
const FREQUENCY: Param = Param::float(
    "frequency_penalty",
    0.0,
    Bounds::within(-2.0, 2.0),
    "subtracted as often as a token was generated; 0: off",
);
const LAST_N: Param = Param::integer(
    "repeat_last_n",
    -1,
    -1,
    i32::MAX as i64,
    "number of last tokens that the penalties look at; -1: all, 0: off",
)
.or(&["penalty_last_n"]);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "penalties",
    aliases: &[],
    place: Place::Edit,
    params: &[REPETITION, PRESENCE, FREQUENCY, LAST_N],
    summary: "Makes tokens less likely that have occurred among the last `repeat_last_n`. \
              `repetition_penalty` looks at the prompt and the output, the other two at the output only.",
    build,
};

/// The penalties of a request, and the number of last tokens that they look at; negative for all.
#[derive(Debug)]
struct LastTokens {
    penalties: Penalties,
    last_n: i64,
}

impl LastTokens {
    /// Returns what the values switch on.
    fn of(values: &Values) -> Option<LastTokens> {
        let penalties = Penalties {
            repetition: values.float(&REPETITION),
            presence: values.float(&PRESENCE),
            frequency: values.float(&FREQUENCY),
        };
        let last_n = values.integer(&LAST_N);
        (!penalties.is_none() && last_n != 0).then_some(LastTokens { penalties, last_n })
    }
}

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    Ok(LastTokens::of(values).map(|it| Unit::Edit(Box::new(it))))
}

/// Returns the penalties if they look at all tokens of a sequence, or are off.
pub fn of_all_tokens(values: &Values) -> Option<Penalties> {
    match LastTokens::of(values) {
        None => Some(Penalties::NONE),
        Some(LastTokens { penalties, last_n }) => (last_n < 0).then_some(penalties),
    }
}

impl Edit for LastTokens {
    fn edit(&self, logits: &mut [f32], history: &History, scratch: &mut EditScratch) {
        let (tokens, of_prompt) = history.last(self.last_n);
        // The marks are counts.
        let marks = &mut scratch.marks;
        for (i, &token) in tokens.iter().enumerate() {
            if let Some(mark) = marks.get_mut(token as usize) {
                let count = *mark as u16;
                *mark = if i < of_prompt { count | IN_PROMPT } else { with_generated(count) }.into();
            }
        }
        for &token in tokens {
            let Some(mark) = marks.get_mut(token as usize) else { continue };
            let logit = &mut logits[token as usize];
            *logit = self.penalties.apply(*logit, std::mem::take(mark) as u16);
        }
    }
}
