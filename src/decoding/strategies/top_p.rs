//! Top-p (nucleus sampling).

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;

/// Probability to keep.
pub const TOP_P: Param =
    Param::float("top_p", 1.0, Bounds::above(0.0, 1.0), "probability of the candidates to keep; 1: all");

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "top_p",
    aliases: &["top-p", "nucleus"],
    place: Place::Filter,
    params: &[TOP_P],
    summary: "Keeps the smallest number of most likely candidates that together have at least this \
              probability.",
    build,
};

/// Keeps the shortest prefix of candidates with this probability.
#[derive(Debug)]
pub struct TopP(pub f32);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let p = values.float(&TOP_P);
    Ok((p < 1.0).then(|| Unit::Filter(Box::new(TopP(p)))))
}

impl Filter for TopP {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        candidates.keep_fraction(self.0);
    }
}
