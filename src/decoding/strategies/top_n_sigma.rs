//! Top-n-sigma.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;

const N: Param = Param::float(
    "top_n_sigma",
    0.0,
    Bounds::within(-1.0, f64::INFINITY),
    "number of standard deviations; 0 or less: off",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "top_n_sigma",
    aliases: &["top-n-sigma"],
    place: Place::Filter,
    params: &[N],
    summary: "Keeps candidates whose logit is at most n standard deviations below the largest. The standard \
              deviation is that of the candidates' finite logits.",
    build,
};

/// Keeps candidates within this many standard deviations of the first.
#[derive(Debug)]
struct TopNSigma(f32);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let n = values.float(&N);
    Ok((n > 0.0).then(|| Unit::Filter(Box::new(TopNSigma(n)))))
}

impl Filter for TopNSigma {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
        let largest = candidates.largest();
        // Relative to the largest, so that the squares do not cancel.
        candidates.visit(|_, value| {
            if value > f32::NEG_INFINITY {
                let x = f64::from(value - largest);
                (count, sum, squares) = (count + 1.0, sum + x, squares + x * x);
            }
        });
        let mean: f64 = sum / count;
        let deviation = (squares / count - mean * mean).max(0.0).sqrt();
        candidates.retain(|x| f64::from(x) >= -f64::from(self.0) * deviation);
    }
}
