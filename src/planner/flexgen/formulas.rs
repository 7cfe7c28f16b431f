//! The times and sizes of the cost model, as linear expressions of the placement.
//!
//! Invariant: these are the formulas of the original program term by term, whatever could be simpler.

use super::{Block, Fractions, Lengths, OptShape, Problem, Rates, TERA};
use good_lp::{Expression, ProblemVariables, variable};

/// Bytes of the unit of sizes and of link rates.
const GB: f64 = (1u64 << 30) as f64;

/// The fractions of one kind of data, in terms of the variables.
pub(super) struct Shares {
    gpu: Expression,
    host: Expression,
    /// The rest, so that no equation is needed: the solver fails at redundant ones.
    disk: Expression,
    /// Whether they are given.
    pub(super) is_fixed: bool,
}

impl Shares {
    /// Fractions that add up to 1; given ones, or variables.
    fn new(variables: &mut ProblemVariables, given: Option<Fractions>, on_disk: bool) -> Shares {
        let (gpu, host): (Expression, Expression) = match given {
            Some(given) => (given.gpu.into(), given.host.into()),
            None => {
                let gpu = variables.add(variable().min(0.0).max(1.0));
                let host = on_disk.then(|| variables.add(variable().min(0.0).max(1.0)));
                (gpu.into(), host.map_or_else(|| 1.0 - gpu, Expression::from))
            }
        };
        // A given one may be a rounded zero.
        let rest = |given: Fractions| if given.disk <= Fractions::TOLERANCE { 0.0 } else { given.disk };
        let disk = given.map_or_else(|| 1.0 - gpu.clone() - host.clone(), |given| rest(given).into());
        Shares { gpu, host, disk, is_fixed: given.is_some() }
    }

    fn gpu(&self) -> Expression {
        self.gpu.clone()
    }

    fn host(&self) -> Expression {
        self.host.clone()
    }

    pub(super) fn disk(&self) -> Expression {
        self.disk.clone()
    }

    /// The fraction that is not on the GPU.
    fn away(&self) -> Expression {
        1.0 - self.gpu()
    }

    pub(super) fn values(&self, solution: &impl good_lp::Solution) -> Fractions {
        let value = |of: &Expression| of.eval_with(solution).clamp(0.0, 1.0);
        let [gpu, host, disk] = [&self.gpu, &self.host, &self.disk].map(value);
        Fractions { gpu, host, disk }
    }
}

/// The shares of all kinds of data, and the numbers that the formulas are made of.
pub(super) struct Formulas {
    pub(super) weights: Shares,
    pub(super) cache: Shares,
    pub(super) hidden: Shares,
    /// Bytes of a layer's weights, in GB.
    layer: f64,
    /// Bytes of the activations of one token of all sequences of a block, and of a batch, in GB.
    block_token: f64,
    batch_token: f64,
    lengths: Lengths,
    shape: OptShape,
    /// Numbers of sequences of a block, and of a batch.
    pub(super) block: f64,
    batch: f64,
}

impl Formulas {
    pub(super) fn new(variables: &mut ProblemVariables, problem: &Problem, block: Block) -> Formulas {
        let OptShape { hidden, mlp, .. } = problem.shape;
        let compression = if problem.compress_weights { 4.0 } else { 1.0 };
        let (batch, sequences) = (block.batch as f64, (block.batch * block.batches) as f64);
        Formulas {
            weights: Shares::new(variables, problem.placement.map(|given| given.weights), true),
            cache: Shares::new(variables, problem.placement.map(|given| given.cache), true),
            // The paper's program keeps activations off the disk.
            hidden: Shares::new(variables, problem.placement.map(|given| given.hidden), false),
            layer: (8.0 * hidden * hidden + 4.0 * hidden * mlp) / compression / GB,
            block_token: 2.0 * hidden * sequences / GB,
            batch_token: 2.0 * hidden * batch / GB,
            lengths: problem.lengths,
            shape: problem.shape,
            block: sequences,
            batch,
        }
    }

    /// Times of one layer in prefill: of both directions between GPU and host, with the disk's, and of
    /// computing.
    pub(super) fn prefill_times(&self, rates: &Rates) -> [Expression; 3] {
        let Formulas { weights, cache, hidden, layer, block_token, .. } = self;
        let Lengths { prompt, .. } = self.lengths;
        let OptShape { hidden: h1, mlp: h2, .. } = self.shape;
        // K and V of the prompt and of one token more.
        let kv = 2.0 * (prompt + 1.0) * block_token;
        let activations = prompt * block_token;
        let load = (*layer * weights.away() + activations * hidden.away()) / rates.host_to_gpu;
        let store = kv * cache.away() / rates.gpu_to_host_cache
            + activations * hidden.away() / rates.gpu_to_host_hidden;
        let read = (*layer * weights.disk() + activations * hidden.disk()) / rates.disk_to_host;
        let write = kv * cache.disk() / rates.host_to_disk_cache
            + activations * hidden.disk() / rates.host_to_disk_hidden;
        let compute = self.block * (8.0 * prompt * h1 * h1 + 4.0 * prompt * h1 * h2)
            / (rates.matmul_prefill * TERA)
            + 4.0 * self.block * prompt * prompt * h1 / (rates.batched_matmul_prefill * TERA);
        [load + read, store + write, compute.into()]
    }

    /// Times of one layer and token in decoding, each with the time to load from the host, which the paper's
    /// model does not overlap.
    pub(super) fn decode_times(&self, rates: &Rates) -> [Expression; 4] {
        let Formulas { weights, cache, hidden, layer, block_token, .. } = self;
        let OptShape { hidden: h1, mlp: h2, .. } = self.shape;
        // On average, half of the output is cached.
        let cached = self.lengths.prompt + self.lengths.output / 2.0;
        let load = (*layer * weights.away() + *block_token * hidden.away()) / rates.host_to_gpu;
        let store = *block_token * hidden.away() / rates.gpu_to_host_hidden;
        let read = (2.0 * cached * block_token * cache.disk() + *block_token * hidden.disk())
            / rates.disk_to_host
            + *layer * weights.disk() / (0.95 * rates.disk_to_host);
        let write =
            (2.0 * block_token * cache.disk() + *block_token * hidden.disk()) / rates.host_to_disk_decode;
        let attention = 4.0 * self.block * cached * h1 / TERA;
        let compute = self.block * (8.0 * h1 * h1 + 4.0 * h1 * h2) / (rates.matmul_decode * TERA)
            + attention * cache.gpu() / rates.batched_matmul_decode
            + attention * cache.away() / self.host_attention_rate(rates);
        [load.clone() + store, load.clone() + read, load.clone() + write, load + compute]
    }

    /// Rate of attention on the host, which is lower for small batches and small models.
    pub(super) fn host_attention_rate(&self, rates: &Rates) -> f64 {
        let small_batch = (64.0 / self.batch).log2().max(0.0);
        let small_model = (4096.0 / self.shape.hidden).log2().max(0.0);
        let [both, batch, model] = rates.host_attention_slowdown;
        let factor = 1.0 + both * small_batch * small_model - batch * small_batch - model * small_model;
        rates.host_attention * factor.max(0.1)
    }

    /// Bytes of K and V of all layers for one token of all sequences of a block, in GB.
    fn kv_token(&self) -> f64 {
        2.0 * self.block_token * self.shape.layers
    }

    /// GPU memory in prefill and in decoding, in GB.
    pub(super) fn gpu_memory(&self) -> [Expression; 2] {
        let Formulas { weights, cache, hidden, layer, block_token, batch_token, .. } = self;
        let OptShape { layers, hidden: h1, mlp: h2, heads } = self.shape;
        let Lengths { prompt, output } = self.lengths;
        let tokens = prompt + output;
        let buffered = 2.0 * *layer * (1.0 - weights.gpu());
        let intermediate = self.batch
            * (8.0 * prompt * h1
                + (2.0 * prompt * h1 + 2.0 * heads * prompt * prompt)
                + 2.0 * prompt * h1
                + 4.0 * prompt * h1
                + 2.0 * prompt * h2
                + 2.0 * prompt * h1)
            / GB;
        let prefill = *layer * layers * weights.gpu()
            + prompt * block_token * hidden.gpu()
            + tokens * self.kv_token() * cache.gpu()
            + buffered.clone()
            + prompt * batch_token * (1.0 - hidden.gpu())
            + intermediate;
        let with_cache = 2.0 * h1 + 2.0 * tokens * h1 + 2.0 * heads * tokens + 2.0 * tokens * h1 + 2.0 * h1;
        let decode = *layer * layers * weights.gpu()
            + *block_token * hidden.gpu()
            + tokens * self.kv_token() * cache.gpu()
            + buffered
            + *batch_token * (1.0 - hidden.gpu())
            + 2.0 * tokens * batch_token * cache.gpu()
            + self.batch * with_cache / GB * cache.gpu()
            + self.batch * (8.0 * h1 + 4.0 * h1 + 2.0 * h2 + 2.0 * h1) / GB;
        [prefill, decode]
    }

    /// Host memory in prefill and in decoding, in GB.
    pub(super) fn host_memory(&self) -> [Expression; 2] {
        let Formulas { weights, cache, hidden, layer, block_token, batch_token, .. } = self;
        let OptShape { layers, hidden: h1, heads, .. } = self.shape;
        let Lengths { prompt, output } = self.lengths;
        let tokens = prompt + output;
        let prefill = *layer * layers * weights.host()
            + prompt * block_token * hidden.host()
            + prompt * self.kv_token() * cache.host()
            + *layer * (1.0 - weights.gpu())
            + prompt * batch_token * (1.0 - hidden.gpu());
        let decode = *layer * layers * weights.host()
            + *block_token * hidden.host()
            + tokens * self.kv_token() * cache.host()
            + *layer * weights.disk()
            + 2.0 * batch_token * hidden.disk()
            + 4.0 * tokens * batch_token * cache.disk()
            + self.batch * (2.0 * heads * tokens + 2.0 * h1) / GB;
        [prefill, decode]
    }

    /// Disk space, in GB.
    pub(super) fn disk_space(&self) -> Expression {
        let Lengths { prompt, output } = self.lengths;
        self.layer * self.shape.layers * self.weights.disk()
            + prompt * self.block_token * self.hidden.disk()
            + (prompt + output) * self.kv_token() * self.cache.disk()
    }
}
