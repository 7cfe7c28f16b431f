//! Frustratingly simple decoding (FSD): an n-gram model of the text so far penalizes repetitions.

use super::params::{Bounds, Param, Values};
use super::pool::{POOL_SIZE, Prefix};
use super::unit::{Choose, Context, Filter, Place, Registers, Strategy, Unit, stream};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::reference::draw::weight;

const K: Param = Param::integer("k", 6, 1, Fsd::MOST as i64, "number of candidates");
const ALPHA: Param = Param::float("alpha", 0.5, Bounds::within(0.0, 1.0), "weight of the penalty");
const N: Param = Param::integer("n", 3, 1, 16, "length of the longest n-grams");
const BETA: Param = Param::float("beta", 0.9, Bounds::within(0.0, 1.0), "share of the longest n-gram");
const TOP_P: Param =
    Param::float("top_p", 0.93, Bounds::above(0.0, 1.0), "probability to keep when a token is drawn");
const MAX_K: Param = Param::integer("max_k", 8, 1, 1024, "number of candidates when a token is drawn");
const RANDOM_TOKENS: Param =
    Param::integer("random_tokens", 10, 0, u32::MAX as i64, "number of first tokens that may be drawn");

/// The row of the table.
pub const FSD: Strategy = Strategy {
    name: "fsd",
    aliases: &["sample.fsd"],
    place: Place::Named,
    params: &[POOL_SIZE, K, ALPHA, N, BETA],
    summary: "Takes the candidate of the first `k` with the largest (1 - alpha) p - alpha q, where p is its \
              probability in the pool, and q its penalty by the n-grams of the prompt and the output. \
              Deterministic.",
    build: |values, _| Ok(Some(Unit::Choose(Box::new(Fsd::new(values))))),
};

/// The row of the table.
pub const RANDOM_FSD: Strategy = Strategy {
    name: "random_fsd",
    aliases: &["sample.random_fsd"],
    place: Place::Named,
    params: &[POOL_SIZE, K, ALPHA, N, BETA, TOP_P, MAX_K, RANDOM_TOKENS],
    summary: "As `fsd`, but each of the first `random_tokens` tokens is drawn with probability 1/2, as \
              `sample.std` does.",
    build: |values, _| {
        let prefix = Prefix { top_p: values.float(&TOP_P), min_k: 1, max_k: values.count(&MAX_K) };
        let random = RandomFsd { fsd: Fsd::new(values), prefix, tokens: values.count(&RANDOM_TOKENS) };
        Ok(Some(Unit::Choose(Box::new(random))))
    },
};

/// Deterministic FSD.
#[derive(Debug)]
struct Fsd {
    pool_size: usize,
    k: usize,
    alpha: f64,
    n: usize,
    beta: f64,
}

/// FSD whose first tokens may be drawn.
#[derive(Debug)]
struct RandomFsd {
    fsd: Fsd,
    prefix: Prefix,
    tokens: usize,
}

impl Fsd {
    /// Largest number of candidates.
    const MOST: usize = 64;

    fn new(values: &Values) -> Fsd {
        Fsd {
            pool_size: values.count(&POOL_SIZE),
            k: values.count(&K),
            alpha: values.float(&ALPHA).into(),
            n: values.count(&N),
            beta: values.float(&BETA).into(),
        }
    }
}

impl Choose for Fsd {
    fn choose(&self, candidates: &mut Candidates<'_>, context: &Context<'_>, _: &mut Registers) -> u32 {
        candidates.keep_first(self.pool_size);
        let (total, largest) = (candidates.total_weight() as f64, candidates.largest());
        let mut ids = [0; Fsd::MOST];
        let mut probabilities = [0.0; Fsd::MOST];
        let mut len = 0;
        for (i, (id, value)) in candidates.first(self.k.min(Fsd::MOST)).enumerate() {
            (ids[i], probabilities[i]) = (id, weight(value - largest) as f64 / total);
            len = i + 1;
        }
        let tokens = context.history.tokens();
        let mut penalties = [0.0; Fsd::MOST];
        let has_context = tokens.len() + 1 >= self.n;
        if has_context {
            add_penalties(tokens, self.n, self.beta, &ids[..len], &mut penalties);
        }
        let score = |i: usize| match has_context {
            true => (1.0 - self.alpha) * probabilities[i] - self.alpha * penalties[i],
            false => probabilities[i],
        };
        // On ties, the more likely candidate.
        let best = (0..len).reduce(|best, i| if score(i) > score(best) { i } else { best });
        ids[best.unwrap_or(0)]
    }
}

/// Sets the penalty of each id: its share of the followers of the last n - 1, n - 2, ... 0 tokens. A length
/// after which the id never followed is skipped; each other takes the fraction `beta` of what is left.
pub fn add_penalties(tokens: &[u32], n: usize, beta: f64, ids: &[u32], penalties: &mut [f64]) {
    let mut left = [1.0; Fsd::MOST];
    for order in (0..n.min(tokens.len() + 1)).rev() {
        let suffix = &tokens[tokens.len() - order..];
        let (mut total, mut counts) = (0u32, [0u32; Fsd::MOST]);
        for ngram in tokens.windows(order + 1).filter(|ngram| ngram.starts_with(suffix)) {
            total += 1;
            if let Some(i) = ids.iter().position(|&id| id == ngram[order]) {
                counts[i] += 1;
            }
        }
        for (i, &count) in counts[..ids.len()].iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = f64::from(count);
            penalties[i] += match order {
                0 => left[i] * count / f64::from(total),
                _ => left[i] * beta * count / f64::from(total + 1),
            };
            left[i] *= 1.0 - beta;
        }
    }
}

impl Choose for RandomFsd {
    fn choose(&self, candidates: &mut Candidates<'_>, context: &Context<'_>, state: &mut Registers) -> u32 {
        let is_early = context.history.generated().len() < self.tokens;
        if is_early && context.uniform(stream::RANDOM_FSD) < 0.5 {
            candidates.keep_first(self.fsd.pool_size);
            self.prefix.filter(candidates, context);
            return candidates.draw(context.seed, context.position);
        }
        self.fsd.choose(candidates, context, state)
    }
}
