//! The strategies of Inferflow, which choose from a pool of the most likely tokens. Probabilities are
//! relative to the pool.

use super::min_p::MinP;
use super::mirostat::Mirostat;
use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::tail_free::curvatures;
use super::typical::distance;
use super::unit::{Choose, Context, Filter, Place, Registers, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::reference::draw::weight;

/// Number of tokens of a pool.
pub const POOL_SIZE: Param = Param::integer("pool_size", 50, 1, 1024, "number of candidates of the pool");

const MAX_K: Param = Param::integer("max_k", 8, 1, 1024, "largest number of candidates to keep");
const MIN_K: Param = Param::integer("min_k", 1, 1, 1024, "smallest number of candidates to keep");
const TOP_P: Param = Param::float("top_p", 0.9, Bounds::above(0.0, 1.0), "probability to keep");
const EOS_BYPASSING_MAX: Param = Param::integer(
    "eos_bypassing_max",
    0,
    0,
    u32::MAX as i64,
    "how often a sampled end token is replaced by the most likely other candidate",
);
const MIN_P: Param = Param::float("min_p", 0.05, Bounds::within(0.0, 1.0), "fraction of the largest");
const Z: Param = Param::float("z", 0.95, Bounds::above(0.0, 1.0), "fraction of the curvature to keep");
const P: Param = Param::float("p", 0.95, Bounds::above(0.0, 1.0), "probability to keep");
const TAU: Param = Param::float("tau", 5.0, Bounds::within(0.0, f64::INFINITY), "target in bits");
const ETA: Param = Param::float("eta", 0.1, Bounds::within(0.0, f64::INFINITY), "speed of mu");

/// The row of the table.
pub const GREEDY: Strategy = Strategy {
    name: "greedy",
    aliases: &["sample.greedy"],
    place: Place::Named,
    params: &[],
    summary: "Takes the most likely token, the lowest id on ties.",
    build: |_, _| Ok(Some(Unit::Choose(Box::new(Greedy)))),
};

/// The row of the table.
pub const STD: Strategy = Strategy {
    name: "sample.std",
    aliases: &["std", "top_p", "sample.top_p"],
    place: Place::Named,
    params: &[POOL_SIZE, TOP_P, MAX_K, MIN_K, EOS_BYPASSING_MAX],
    summary: "Keeps the smallest number of first candidates with the probability `top_p`, but at least \
              `min_k` and at most `max_k`, and draws one.",
    build: |values, vocabulary| {
        let (min_k, max_k) = (values.count(&MIN_K), values.count(&MAX_K));
        if min_k > max_k {
            let rest = format!("is {min_k} but must be at most max_k, {max_k}");
            return Err(ParamError::new("strategy_params.min_k", rest));
        }
        pool(values, Box::new(Prefix { top_p: values.float(&TOP_P), min_k, max_k }), Some(vocabulary))
    },
};

/// The row of the table.
pub const TOP_K: Strategy = Strategy {
    name: "sample.top_k",
    aliases: &["top_k"],
    place: Place::Named,
    params: &[POOL_SIZE, MAX_K, EOS_BYPASSING_MAX],
    summary: "Keeps the first `max_k` candidates, and draws one.",
    build: |values, vocabulary| {
        let max_k = values.count(&MAX_K);
        pool(values, Box::new(Prefix { top_p: 1.0, min_k: max_k, max_k }), Some(vocabulary))
    },
};

/// The row of the table.
pub const POOL_MIN_P: Strategy = Strategy {
    name: "sample.min_p",
    aliases: &["min_p"],
    place: Place::Named,
    params: &[POOL_SIZE, MIN_P],
    summary: "Keeps candidates of at least the fraction `min_p` of the largest probability, and draws one.",
    build: |values, _| pool(values, Box::new(MinP(values.float(&MIN_P))), None),
};

/// The row of the table.
pub const POOL_TAIL_FREE: Strategy = Strategy {
    name: "sample.tfs",
    aliases: &["tfs"],
    place: Place::Named,
    params: &[POOL_SIZE, Z],
    summary: "Tail-free sampling in the pool: the first second difference is not counted, all are equal if \
              their sum is at most 1e-6, and the last two candidates are never kept.",
    build: |values, _| pool(values, Box::new(PoolTailFree(values.float(&Z))), None),
};

/// The row of the table.
pub const POOL_TYPICAL: Strategy = Strategy {
    name: "sample.typical",
    aliases: &["typical"],
    place: Place::Named,
    params: &[POOL_SIZE, P],
    summary: "Typical sampling in the pool: the most typical candidate is always kept and not counted, \
              further ones while their sum is at most `p`.",
    build: |values, _| pool(values, Box::new(PoolTypical(values.float(&P))), None),
};

/// The row of the table.
pub const POOL_MIROSTAT: Strategy = Strategy {
    name: "sample.mirostat",
    aliases: &["mirostat"],
    place: Place::Named,
    params: &[POOL_SIZE, TAU, ETA],
    summary: "Mirostat, version 2, in the pool.",
    build: |values, _| {
        let (tau, eta) = (values.float(&TAU).into(), values.float(&ETA).into());
        let mirostat = Mirostat { first_version: false, tau, eta };
        Ok(Some(Unit::Choose(Box::new(PoolOf { size: values.count(&POOL_SIZE), chooser: mirostat }))))
    },
};

/// Returns a pool with a filter, and with the bypassing of end tokens if a vocabulary is given.
fn pool(
    values: &Values,
    filter: Box<dyn Filter>,
    vocabulary: Option<&dyn Vocabulary>,
) -> Result<Option<Unit>, ParamError> {
    let chooser = DrawFrom {
        filter,
        bypassing_max: values.integer(&EOS_BYPASSING_MAX) as f64,
        end_tokens: vocabulary.map_or(Vec::new(), |vocabulary| vocabulary.end_tokens().into_owned()),
    };
    Ok(Some(Unit::Choose(Box::new(PoolOf { size: values.count(&POOL_SIZE), chooser }))))
}

/// Takes the most likely token.
#[derive(Debug)]
struct Greedy;

impl Choose for Greedy {
    fn choose(&self, candidates: &mut Candidates<'_>, _: &Context<'_>, _: &mut Registers) -> u32 {
        candidates.most_likely()
    }
}

/// A chooser that sees the most likely candidates only.
#[derive(Debug)]
struct PoolOf<C> {
    size: usize,
    chooser: C,
}

impl<C: Choose> Choose for PoolOf<C> {
    fn begin(&self) -> Registers {
        self.chooser.begin()
    }

    fn choose(&self, candidates: &mut Candidates<'_>, context: &Context<'_>, state: &mut Registers) -> u32 {
        candidates.keep_first(self.size);
        self.chooser.choose(candidates, context, state)
    }
}

/// Draws one of the candidates that a filter keeps. The second register counts bypassed end tokens.
#[derive(Debug)]
struct DrawFrom {
    filter: Box<dyn Filter>,
    bypassing_max: f64,
    end_tokens: Vec<u32>,
}

impl Choose for DrawFrom {
    fn choose(&self, candidates: &mut Candidates<'_>, context: &Context<'_>, state: &mut Registers) -> u32 {
        self.filter.filter(candidates, context);
        let token = candidates.draw(context.seed, context.position);
        if state[1] >= self.bypassing_max || !self.end_tokens.contains(&token) {
            return token;
        }
        let other = candidates.first(usize::MAX).map(|(id, _)| id).find(|id| !self.end_tokens.contains(id));
        state[1] += f64::from(other.is_some());
        other.unwrap_or(token)
    }
}

/// Keeps a prefix by its probability and its length.
#[derive(Debug)]
pub struct Prefix {
    pub top_p: f32,
    pub min_k: usize,
    pub max_k: usize,
}

impl Filter for Prefix {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let (total, largest) = (candidates.total_weight() as f64, candidates.largest());
        let enough = f64::from(self.top_p) * total;
        let mut sum = 0;
        let below = candidates.first(self.max_k).map(|(_, value)| {
            sum += weight(value - largest);
            sum
        });
        let kept = below.take_while(|&sum| (sum as f64) < enough).count() + 1;
        candidates.keep_first(kept.clamp(self.min_k, self.max_k));
    }
}

/// Inferflow's tail-free filter.
#[derive(Debug)]
struct PoolTailFree(f32);

impl Filter for PoolTailFree {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let total = candidates.total_weight() as f64;
        let (count, sum) =
            curvatures(candidates).fold((0, 0.0), |(n, sum), c| (n + 1, sum + c as f64 / total));
        let share = |c: i64| if sum > 1e-6 { c as f64 / total / sum } else { 1.0 / f64::from(count) };
        let mut running = 0.0;
        let counted = curvatures(candidates).skip(1).take_while(|&c| {
            running += share(c);
            running <= f64::from(self.0)
        });
        let kept = 1 + counted.count();
        candidates.keep_first(kept);
    }
}

/// Inferflow's typical filter.
#[derive(Debug)]
struct PoolTypical(f32);

impl Filter for PoolTypical {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let distance = distance(candidates);
        let most = f64::from(self.0) * candidates.total_weight() as f64;
        let mut sum = 0;
        candidates.keep_while_by(distance, |weight| {
            sum += weight;
            sum as f64 <= most
        });
    }
}
