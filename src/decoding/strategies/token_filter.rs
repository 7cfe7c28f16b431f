//! A list of allowed tokens.

use super::history::History;
use super::params::{Kind, Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

const ALLOWED: Param =
    Param::list("allowed_token_ids", Kind::Tokens, "the only tokens that may be generated; empty: all");

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "allowed_token_ids",
    aliases: &[],
    place: Place::First,
    params: &[ALLOWED],
    summary: "Forbids all other tokens.",
    build,
};

/// The allowed tokens, in order.
#[derive(Debug)]
struct Allowed(Vec<u32>);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let mut allowed = values.tokens(&ALLOWED).to_vec();
    allowed.sort_unstable();
    Ok((!allowed.is_empty()).then(|| Unit::Edit(Box::new(Allowed(allowed)))))
}

impl Edit for Allowed {
    fn edit(&self, logits: &mut [f32], _: &History, _: &mut EditScratch) {
        let mut next = 0;
        let vocab = logits.len();
        for id in self.0.iter().map(|&id| id as usize).take_while(|&id| id < vocab) {
            logits[next.min(id)..id].fill(f32::NEG_INFINITY);
            next = id + 1;
        }
        logits[next..].fill(f32::NEG_INFINITY);
    }
}
