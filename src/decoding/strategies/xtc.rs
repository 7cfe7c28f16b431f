//! XTC: excludes top choices.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit, stream};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::reference::draw::exp;

const PROBABILITY: Param = Param::float(
    "xtc_probability",
    0.0,
    Bounds::within(0.0, 1.0),
    "probability of acting on a token; 0: off",
);
const THRESHOLD: Param = Param::float(
    "xtc_threshold",
    0.1,
    Bounds::within(0.0, 1.0),
    "probability from which candidates are top choices; above 0.5: off",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "xtc",
    aliases: &[],
    place: Place::Filter,
    params: &[PROBABILITY, THRESHOLD],
    summary: "With the probability `xtc_probability`, and if two or more candidates have at least the \
              probability `xtc_threshold`, removes all of these but the least likely one.",
    build,
};

/// Removes the most likely candidates now and then.
#[derive(Debug)]
struct Xtc {
    probability: f32,
    threshold: f64,
}

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let (probability, threshold) = (values.float(&PROBABILITY), values.float(&THRESHOLD).into());
    let acts = probability > 0.0 && threshold <= 0.5;
    Ok(acts.then(|| Unit::Filter(Box::new(Xtc { probability, threshold }))))
}

impl Filter for Xtc {
    fn filter(&self, candidates: &mut Candidates<'_>, context: &Context<'_>) {
        if context.uniform(stream::XTC) >= self.probability {
            return;
        }
        let total = candidates.total();
        let largest = candidates.largest();
        let threshold = self.threshold * total;
        let (mut count, mut least) = (0, (f32::INFINITY, 0));
        let near = threshold.ln() as f32 - 0.01;
        candidates.visit(|id, value| {
            if value - largest >= near
                && f64::from(exp(value - largest)) >= threshold
                && value > f32::NEG_INFINITY
            {
                count += 1;
                // Of equal candidates, the one with the highest id comes last.
                if value < least.0 || (value == least.0 && id > least.1) {
                    least = (value, id);
                }
            }
        });
        if count >= 2 {
            candidates.remove_before(least.0, least.1);
        }
    }
}
