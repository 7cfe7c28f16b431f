//! Top-k.

use super::params::{Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;

/// Number of candidates to keep.
pub const TOP_K: Param =
    Param::integer("top_k", 0, -1, u32::MAX as i64, "number of candidates to keep; 0 or -1: all");

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "top_k",
    aliases: &["top-k"],
    place: Place::Filter,
    params: &[TOP_K],
    summary: "Keeps the k most likely candidates, the lower id on ties.",
    build,
};

/// Keeps the first k candidates.
#[derive(Debug)]
pub struct TopK(pub usize);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let k = values.count(&TOP_K);
    Ok((k > 0).then(|| Unit::Filter(Box::new(TopK(k)))))
}

impl Filter for TopK {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        candidates.keep_first(self.0);
    }
}
