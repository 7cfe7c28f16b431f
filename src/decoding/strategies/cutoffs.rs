//! Epsilon and eta cutoffs: smallest probabilities, fixed or dependent on the entropy.

use super::params::{Bounds, Param, ParamError};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::reference::draw::exp;

const EPSILON: Param =
    Param::float("epsilon_cutoff", 0.0, Bounds::below(0.0, 1.0), "smallest probability; 0: off");
const ETA: Param =
    Param::float("eta_cutoff", 0.0, Bounds::below(0.0, 1.0), "smallest probability at low entropy; 0: off");

/// The row of the table.
pub const EPSILON_CUTOFF: Strategy = Strategy {
    name: "epsilon_cutoff",
    aliases: &[],
    place: Place::Filter,
    params: &[EPSILON],
    summary: "Keeps candidates of at least this probability.",
    build: |values, _| build(values.float(&EPSILON), false),
};

/// The row of the table.
pub const ETA_CUTOFF: Strategy = Strategy {
    name: "eta_cutoff",
    aliases: &[],
    place: Place::Filter,
    params: &[ETA],
    summary: "Keeps candidates of at least the probability min(eta, sqrt(eta) e^-H), where H is the entropy \
              of the candidates in nats.",
    build: |values, _| build(values.float(&ETA), true),
};

/// Keeps candidates of at least a probability.
#[derive(Debug)]
struct Cutoff {
    least: f32,
    by_entropy: bool,
}

fn build(least: f32, by_entropy: bool) -> Result<Option<Unit>, ParamError> {
    Ok((least > 0.0).then(|| Unit::Filter(Box::new(Cutoff { least, by_entropy }))))
}

impl Filter for Cutoff {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let mut least = f64::from(self.least);
        if self.by_entropy {
            least = least.min(least.sqrt() * (-candidates.entropy()).exp());
        }
        let least = least * candidates.total();
        // Most candidates are far below the limit, and need no exponential function.
        let near = least.ln() as f32 - 0.01;
        candidates.retain(|x| x >= near && f64::from(exp(x)) >= least);
    }
}
