//! Logit biases.

use super::history::History;
use super::params::{Kind, Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

/// Biases of tokens.
pub const BIAS: Param = Param::list(
    "logit_bias",
    Kind::Biases,
    "object from token ids or texts to numbers, or list of such pairs; `false` forbids",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "logit_bias",
    aliases: &[],
    place: Place::First,
    params: &[BIAS],
    summary: "Adds a number to the logits of tokens. A text stands for each of its tokens.",
    build,
};

/// The biases of a request.
#[derive(Debug)]
struct LogitBias(Vec<(u32, f32)>);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let biases = values.biases(&BIAS).to_vec();
    Ok((!biases.is_empty()).then(|| Unit::Edit(Box::new(LogitBias(biases)))))
}

impl Edit for LogitBias {
    fn edit(&self, logits: &mut [f32], _: &History, _: &mut EditScratch) {
        for &(id, bias) in &self.0 {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }
}
