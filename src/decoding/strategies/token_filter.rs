//! Lists of allowed and of forbidden tokens.

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

/// Tokens that are never generated.
pub const SUPPRESSED: Param =
    Param::list("suppress_tokens", Kind::Tokens, "tokens that must not be generated, whatever their bias");

/// The row of the table.
pub const SUPPRESS: Strategy = Strategy {
    name: "suppress_tokens",
    aliases: &[],
    place: Place::First,
    params: &[SUPPRESSED],
    summary: "Forbids tokens.",
    build: build_suppressed,
};

/// The allowed tokens, in order.
#[derive(Debug)]
struct Allowed(Vec<u32>);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let mut allowed = values.tokens(&ALLOWED).to_vec();
    allowed.sort_unstable();
    Ok((!allowed.is_empty()).then(|| Unit::Edit(Box::new(Allowed(allowed)))))
}

/// The forbidden tokens.
#[derive(Debug)]
struct Suppressed(Vec<u32>);

fn build_suppressed(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let suppressed = values.tokens(&SUPPRESSED).to_vec();
    Ok((!suppressed.is_empty()).then(|| Unit::Edit(Box::new(Suppressed(suppressed)))))
}

impl Edit for Suppressed {
    fn edit(&self, logits: &mut [f32], _: &History, _: &mut EditScratch) {
        for &id in &self.0 {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
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
