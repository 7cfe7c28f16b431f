//! Tail-free sampling.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::reference::draw::weight;

const Z: Param =
    Param::float("tfs_z", 1.0, Bounds::above(0.0, 1.0), "fraction of the curvature to keep; 1: off")
        .or(&["tfs"]);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "tfs_z",
    aliases: &["tfs", "tail_free"],
    place: Place::Filter,
    params: &[Z],
    summary: "Takes the absolute second differences of the ordered probabilities, normalized to a sum of 1, \
              and keeps as many first candidates, at least one, as there are before their running sum \
              exceeds z. All candidates stay if it never does.",
    build,
};

/// Cuts the tail of the candidates where their probabilities stop bending.
#[derive(Debug)]
struct TailFree(f32);

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let z = values.float(&Z);
    Ok((z < 1.0).then(|| Unit::Filter(Box::new(TailFree(z)))))
}

impl Filter for TailFree {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let sum = curvatures(candidates).sum::<i64>() as f64;
        let mut running = 0;
        let kept = curvatures(candidates).position(|curvature| {
            running += curvature;
            running as f64 > f64::from(self.0) * sum
        });
        if let Some(kept) = kept {
            candidates.keep_first(kept);
        }
    }
}

/// Puts the candidates in order, and returns the absolute second differences of their weights.
pub fn curvatures<'c>(candidates: &'c mut Candidates<'_>) -> impl Iterator<Item = i64> + 'c {
    let largest = candidates.largest();
    let weights = candidates.first(usize::MAX).map(move |(_, value)| weight(value - largest) as i64);
    let mut before: (Option<i64>, Option<i64>) = (None, None);
    weights.filter_map(move |weight| {
        let curvature = match before {
            (Some(first), Some(second)) => Some((first - 2 * second + weight).abs()),
            _ => None,
        };
        before = (before.1, Some(weight));
        curvature
    })
}
