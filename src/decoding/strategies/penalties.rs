//! Repetition, presence and frequency penalties.

use super::history::History;
use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

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

/// The penalties of a request.
#[derive(Debug)]
struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    last_n: i64,
}

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let penalties = Penalties {
        repetition: values.float(&REPETITION),
        presence: values.float(&PRESENCE),
        frequency: values.float(&FREQUENCY),
        last_n: values.integer(&LAST_N),
    };
    let is_off = penalties.repetition == 1.0 && penalties.presence == 0.0 && penalties.frequency == 0.0;
    Ok((!is_off && penalties.last_n != 0).then(|| Unit::Edit(Box::new(penalties))))
}

impl Edit for Penalties {
    fn edit(&self, logits: &mut [f32], history: &History, scratch: &mut EditScratch) {
        let (tokens, of_prompt) = history.last(self.last_n);
        // A mark is 1 for a token that occurs, plus 2 for each time that it was generated.
        let marks = &mut scratch.marks;
        for (i, &token) in tokens.iter().enumerate() {
            if let Some(mark) = marks.get_mut(token as usize) {
                *mark = (*mark | 1) + if i >= of_prompt { 2 } else { 0 };
            }
        }
        for &token in tokens {
            let Some(mark) = marks.get_mut(token as usize) else { continue };
            let mark = std::mem::take(mark);
            if mark > 0 {
                self.apply(&mut logits[token as usize], mark >> 1);
            }
        }
    }
}

impl Penalties {
    /// Changes the logit of a token that occurs and was generated `count` times.
    fn apply(&self, logit: &mut f32, count: u32) {
        if self.repetition != 1.0 {
            *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
        }
        if count > 0 {
            *logit -= self.frequency * count as f32;
            *logit -= self.presence;
        }
    }
}
