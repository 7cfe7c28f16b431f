//! Locally typical sampling.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;

const P: Param =
    Param::float("typical_p", 1.0, Bounds::above(0.0, 1.0), "probability of the candidates to keep; 1: off")
        .or(&["typical"]);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "typical_p",
    aliases: &["typ_p", "typical", "typical-p"],
    place: Place::Filter,
    params: &[P],
    summary: "Orders candidates by the distance of their surprise -ln p from the entropy, and keeps the \
              smallest number of first ones that together have at least this probability.",
    build,
};

/// Keeps the most typical candidates with this probability.
#[derive(Debug)]
struct Typical(f32);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let p = values.float(&P);
    Ok((p < 1.0).then(|| Unit::Filter(Box::new(Typical(p)))))
}

/// Returns the distance of the surprise from the entropy, as a function of a value minus the largest.
pub fn distance(candidates: &Candidates<'_>) -> impl Fn(f32) -> f32 + use<> {
    // -ln p is ln of the total minus the relative value.
    let typical = (candidates.total().ln() - candidates.entropy()) as f32;
    move |x| (typical - x).abs()
}

impl Filter for Typical {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let distance = distance(candidates);
        candidates.keep_fraction_by(self.0, distance);
    }
}
