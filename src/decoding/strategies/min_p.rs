//! Min-p.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;

/// Smallest probability, relative to the largest.
pub const MIN_P: Param = Param::float(
    "min_p",
    0.0,
    Bounds::within(0.0, 1.0),
    "smallest probability, relative to the most likely token; 0: off",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "min_p",
    aliases: &["min-p"],
    place: Place::Filter,
    params: &[MIN_P],
    summary: "Keeps candidates of at least this fraction of the largest probability.",
    build,
};

/// Keeps candidates of at least this fraction of the largest probability.
#[derive(Debug)]
pub struct MinP(pub f32);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let p = values.float(&MIN_P);
    Ok((p > 0.0).then(|| Unit::Filter(Box::new(MinP(p)))))
}

impl Filter for MinP {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        candidates.keep_likely(self.0);
    }
}
