//! Mirostat: a chooser that keeps the mean surprise of the tokens near a target.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Choose, Context, Place, Registers, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::reference::draw::weight;

const VERSION: Param = Param::integer("mirostat", 0, 0, 2, "version of the algorithm; 0: off");
const TAU: Param =
    Param::float("mirostat_tau", 5.0, Bounds::within(0.0, f64::INFINITY), "target of the surprise, in bits");
const ETA: Param = Param::float(
    "mirostat_eta",
    0.1,
    Bounds::within(0.0, f64::INFINITY),
    "how fast the limit follows the surprise",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "mirostat",
    aliases: &[],
    place: Place::Instead,
    params: &[VERSION, TAU, ETA],
    summary: "Keeps candidates up to a limit mu, draws one, and lowers mu by `mirostat_eta` * (s - \
              `mirostat_tau`), where s is the surprise of the sampled token among the kept ones in bits. mu \
              begins at 2 `mirostat_tau`. Version 2 keeps candidates of at most mu bits, at least one. \
              Version 1 estimates the exponent of Zipf's law from the 100 most likely candidates, and from \
              it the number of candidates to keep. Other filters of the request are ignored.",
    build,
};

/// The parameters of a request. The first register is mu.
#[derive(Debug)]
pub struct Mirostat {
    pub first_version: bool,
    pub tau: f64,
    pub eta: f64,
}

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let version = values.integer(&VERSION);
    let (tau, eta) = (values.float(&TAU).into(), values.float(&ETA).into());
    let mirostat = Mirostat { first_version: version == 1, tau, eta };
    Ok((version != 0).then(|| Unit::Choose(Box::new(mirostat))))
}

impl Choose for Mirostat {
    fn begin(&self) -> Registers {
        [2.0 * self.tau, 0.0]
    }

    fn choose(&self, candidates: &mut Candidates<'_>, context: &Context<'_>, state: &mut Registers) -> u32 {
        let mu = state[0];
        if self.first_version {
            let kept = zipf_count(candidates, mu);
            candidates.keep_first(kept);
        } else {
            let log_total = bits(candidates.total_weight(), weight(0.0));
            candidates.retain(|x| log_total - f64::from(x) / std::f64::consts::LN_2 <= mu);
        }
        let token = candidates.draw(context.seed, context.position);
        let drawn = weight(candidates.value(token) - candidates.largest());
        let surprise = bits(candidates.total_weight(), drawn);
        state[0] = mu - self.eta * (surprise - self.tau);
        token
    }
}

/// Returns the binary logarithm of the ratio of two weights.
fn bits(total: u64, part: u64) -> f64 {
    (total as f64 / part.max(1) as f64).log2()
}

/// Returns the number of candidates to keep for a limit of `mu` bits, if probabilities follow Zipf's law.
fn zipf_count(candidates: &mut Candidates<'_>, mu: f64) -> usize {
    const SAMPLE: usize = 100;
    let n = candidates.count() as f64;
    let (mut products, mut squares) = (0.0, 0.0);
    let mut before = None;
    for (rank, (_, value)) in (1..).zip(candidates.first(SAMPLE)) {
        let value = f64::from(value);
        if let Some(before) = before.replace(value) {
            let t = (f64::from(rank) / f64::from(rank - 1)).ln();
            products += t * (before - value);
            squares += t * t;
        }
    }
    let exponent: f64 = products / squares;
    let epsilon = exponent - 1.0;
    let count = ((epsilon * mu.exp2()) / (1.0 - n.powf(-epsilon))).powf(1.0 / exponent);
    // Of a single candidate or equal ones, there is no exponent: the conversion maps NaN to 0.
    (count as usize).max(1)
}
