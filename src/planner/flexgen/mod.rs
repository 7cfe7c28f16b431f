//! FlexGen's cost model: a linear program that divides weights, KV cache and activations of a model among a
//! GPU, the host's memory and a disk, and a search for the size of the block of batches (Sheng et al. 2023,
//! section 4.3 and appendix A.3). It is made for OPT models in 16 bits, and is kept to the paper's formulas
//! and constants, so that its results can be compared; placements that are served are not planned by it.
//!
//! A layer's weights are loaded once for all batches of a block. The time of a layer is the longest of what
//! overlaps: loading and storing on each link, and computing.
//!
//! Invariant: sizes and numbers are real, as in a linear program; the same inputs give the same result.

mod fit;
mod formulas;
mod search;

use anyhow::{Result, ensure};

pub use fit::{Fit, Measurement, fit};

/// Operations per second of the unit of compute rates.
const TERA: f64 = 1e12;

/// Size of an OPT model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptShape {
    pub layers: f64,
    /// Hidden size, and that of the feed-forward network.
    pub hidden: f64,
    pub mlp: f64,
    pub heads: f64,
}

/// Number of tokens of a prompt and of its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    pub prompt: f64,
    pub output: f64,
}

/// Rates of a machine. Links in GB (2^30 bytes) per second, compute in 10^12 operations per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Host to GPU.
    pub host_to_gpu: f64,
    /// GPU to host, for the cache and for activations.
    pub gpu_to_host_cache: f64,
    pub gpu_to_host_hidden: f64,
    /// Disk to host.
    pub disk_to_host: f64,
    /// Host to disk in prefill, for the cache and for activations, and in decoding.
    pub host_to_disk_cache: f64,
    pub host_to_disk_hidden: f64,
    pub host_to_disk_decode: f64,
    /// Matrix products and batched matrix products of the GPU, in prefill and in decoding.
    pub matmul_prefill: f64,
    pub matmul_decode: f64,
    pub batched_matmul_prefill: f64,
    pub batched_matmul_decode: f64,
    /// Attention on the host, at 64 sequences of a batch and a hidden size of 4096 or more.
    pub host_attention: f64,
    /// Coefficients by which smaller batches and hidden sizes lower it: of the product of the binary
    /// logarithms of both ratios, and of each.
    pub host_attention_slowdown: [f64; 3],
}

impl Rates {
    /// The rates of the paper's machine, with a T4.
    pub const T4: Rates = Rates {
        host_to_gpu: 12.89,
        gpu_to_host_cache: 0.97,
        gpu_to_host_hidden: 4.82,
        disk_to_host: 0.473,
        host_to_disk_cache: 0.746,
        host_to_disk_hidden: 2.015,
        host_to_disk_decode: 2.015,
        matmul_prefill: 21.24,
        matmul_decode: 4.3,
        batched_matmul_prefill: 9.97,
        batched_matmul_decode: 0.079,
        host_attention: 0.0123,
        host_attention_slowdown: [0.0168, 0.0328, 0.0621],
    };
}

/// Memory sizes in GB (2^30 bytes), and the fraction of them that may be used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memories {
    pub gpu: f64,
    pub host: f64,
    pub disk: f64,
    pub usable: f64,
}

/// Sequences of a GPU batch, and number of GPU batches of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub batch: usize,
    pub batches: usize,
}

/// Fractions of a kind of data on GPU, host and disk, which add up to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fractions {
    pub gpu: f64,
    pub host: f64,
    pub disk: f64,
}

impl Fractions {
    /// Tolerance of sums of fractions, which are rounded.
    const TOLERANCE: f64 = 1e-9;

    /// Fails if a fraction is negative, or if they do not add up to 1.
    fn check(self, what: &str) -> Result<()> {
        let Fractions { gpu, host, disk } = self;
        let (sum, least) = (gpu + host + disk, gpu.min(host).min(disk));
        ensure!(
            least >= -Fractions::TOLERANCE && (sum - 1.0).abs() <= Fractions::TOLERANCE,
            "the fractions of {what} are {gpu}, {host} and {disk}; they must not be negative, and add up to 1"
        );
        Ok(())
    }
}

/// Fractions of weights, cache and activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placement {
    pub weights: Fractions,
    pub cache: Fractions,
    pub hidden: Fractions,
}

impl Placement {
    /// Fails if the fractions of one kind do not add up to 1.
    fn check(self) -> Result<()> {
        self.weights.check("weights")?;
        self.cache.check("the cache")?;
        self.hidden.check("activations")
    }
}

/// The inputs of the linear program, apart from the block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    pub shape: OptShape,
    pub lengths: Lengths,
    pub rates: Rates,
    pub memories: Memories,
    /// Whether weights take 4 bits rather than 16.
    pub compress_weights: bool,
    /// A given placement; `None` lets the program choose.
    pub placement: Option<Placement>,
}

/// The best placement for a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Solution {
    pub block: Block,
    pub placement: Placement,
    /// Time of all layers for the prompts of a block, in seconds.
    pub prefill_seconds: f64,
    /// Time of all steps after the first for a block, in seconds.
    pub decode_seconds: f64,
    /// Output tokens per second.
    pub throughput: f64,
    /// Largest GPU memory in prefill and in decoding, in GB (2^30 bytes).
    pub gpu_peaks: [f64; 2],
}

#[cfg(test)]
mod tests;
