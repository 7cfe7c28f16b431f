//! The conformance test suite for backends: each operation against the reference backend, and properties that
//! every backend must have.
//!
//! Inputs are pseudo-random but fixed. Every buffer that an operation may write ends in a guard that must not
//! change. A failure is a panic with the operation, sizes, element and both values. Whether a backend is
//! available on this machine is checked and reported by the caller.
//! Invariant: the suite uses a backend through its trait only, and does not know the layout of its memory.

#![deny(unsafe_code)]

mod inputs;
mod rig;
mod spans;

mod memo;

mod elementwise;
mod gemms;
mod latent;
mod long_buffers;
mod matmul;
mod moe;
mod norm;
mod packed;
mod rope;
mod rows;
mod stage;
mod state;

mod attention;
mod attention_case;
mod sparse;
mod splits;
mod unusual_values;
mod windows;

mod drafts;
mod late;
mod penalties;
mod sampling;
mod verification;

mod family;
mod properties;
mod tiny;

pub use attention::{
    attention, attention_long, attention_options, cache_types, copy_pages, encoder_batch_invariance,
};
pub use drafts::drafts;
pub use elementwise::{activate, caps_and_gates, embed, embed_positions, sums};
pub use gemms::{divided_gemms, gemms};
pub use inputs::few_types;
pub use late::{host_draws, late_abort, lost_late_inputs};
pub use latent::{latent_attention, latent_attention_long, matmul_heads};
pub use long_buffers::{long_caches, long_matrices};
pub use matmul::{matmul, matmul_batch_invariance};
pub use moe::{moe, moe_batch_invariance, moe_expert_source, moe_expert_subsets, moe_preparation};
pub use norm::norm;
pub use packed::packed_weights;
pub use penalties::penalties;
pub use properties::{batch_invariance, chunking, moves, output_selection, paging, stale_pages};
pub use rope::{angles, rope};
pub use rows::{row_tokens, visible_values};
pub use sampling::{drawn_frequencies, sample_tokens};
pub use sparse::{fetched_values, top_k_attention, unselected_values};
pub use splits::{
    attention_over_splits, encoder_inputs_over_splits, masked_splits, negative_infinite_scores, split_bits,
};
pub use stage::{columns, stage_abort, stage_all_gather, stage_all_reduce};
pub use state::{allocated_bytes, buffers, gather, hidden, samples_by_stack, slot_state, step_brackets};
pub use unusual_values::{extreme_groups, non_finite_values, quantized_inputs};
pub use verification::verification;
pub use windows::{window_copies, window_tables};

use elementwise::{ACTIVATIONS, activate_on};
use family::ModelFamily;
use inputs::{limits, scaled};
use mainstem_kernels::backend::Backend;
use mainstem_kernels::quant::QuantType;
use properties::mixed_steps;
use rig::Rig;
use tiny::TinyModel;

/// Tolerances of a backend relative to the reference, as fractions of the magnitude of the summed terms.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// GEMMs, by the format of the weights.
    pub matmul: fn(QuantType) -> f32,
    /// Attention, by the format of the cache. Errors of scores are scaled by the largest magnitude of a
    /// score.
    pub attention: fn(QuantType) -> f32,
    /// Norms, rotations, activations and log-probabilities. The bound of an activation that uses a power of e
    /// is relative to its result times the magnitude of the exponent, because the rounding error of the
    /// exponent has that effect.
    pub elementwise: f32,
    /// Differences between results of a backend for one row in different batches. 0 requires equal bits.
    pub batch_invariance: f32,
}

impl Bounds {
    /// Bounds for F32 arithmetic with exactly widened weights and cache, and a fixed order of summation.
    pub const F32_FIXED_ORDER: Bounds =
        Bounds { matmul: |_| 2e-6, attention: |_| 2e-6, elementwise: 1e-6, batch_invariance: 0.0 };
}

/// Runs the whole suite.
pub fn run<B: Backend>(make: impl Fn() -> B + Sync, bounds: Bounds) {
    // A single closure type, so that the suite is compiled once per backend.
    let make: &(dyn Fn() -> B + Sync) = &make;
    let (make, bounds) = (&make, &bounds);
    buffers(make);
    allocated_bytes(make);
    step_brackets(make);
    slot_state(make);
    row_tokens(make);
    visible_values(make);
    gather(make);
    samples_by_stack(make);
    hidden(make);
    embed(make);
    embed_positions(make);
    sums(make, bounds);
    columns(make);
    stage_all_reduce(make);
    stage_all_gather(make);
    stage_abort(make);
    caps_and_gates(make, bounds);
    activate(make, bounds);
    norm(make, bounds);
    angles(make, bounds);
    rope(make, bounds);
    matmul(make, bounds);
    matmul_batch_invariance(make, bounds);
    gemms(make, bounds);
    divided_gemms(make, bounds);
    matmul_heads(make, bounds);
    packed_weights(make);
    quantized_inputs(make);
    moe(make, bounds);
    moe_batch_invariance(make, bounds);
    moe_preparation(make, bounds);
    moe_expert_subsets(make, bounds);
    moe_expert_source(make, bounds);
    attention(make, bounds);
    attention_options(make, bounds);
    latent_attention(make, bounds);
    latent_attention_long(make, bounds);
    cache_types(make);
    attention_long(make, bounds);
    attention_over_splits(make, bounds);
    encoder_inputs_over_splits(make, bounds);
    masked_splits(make, bounds);
    negative_infinite_scores(make, bounds);
    top_k_attention(make, bounds);
    unselected_values(make, bounds);
    if !fetched_values(make) {
        println!("fetched_values: not applicable, the backend fetches none");
    }
    non_finite_values(make, bounds);
    extreme_groups(make, bounds);
    encoder_batch_invariance(make, bounds);
    copy_pages(make, bounds);
    window_tables(make, bounds);
    window_copies(make, bounds);
    sample_tokens(make, bounds);
    drawn_frequencies(make);
    penalties(make);
    host_draws(make, bounds);
    lost_late_inputs(make);
    late_abort(make);
    verification(make, bounds);
    drafts(make);
    batch_invariance(make, bounds);
    chunking(make, bounds);
    moves(make, bounds);
    paging(make, bounds);
    stale_pages(make, bounds);
    output_selection(make, bounds);
}

/// Returns the bits of all results of small models of every family under a mixed load, in every number
/// format, and of every activation function. Backends with the same arithmetic, for example with different
/// numbers of threads, must give the same bits.
pub fn fingerprint<B: Backend>(make: &impl Fn() -> B) -> Vec<u32> {
    let mut bits = Vec::new();
    for case in ModelFamily::with_formats() {
        let answers = TinyModel::new(make(), case, 32).run(&mixed_steps(case.0));
        bits.extend(answers.values().flatten().map(|value| value.to_bits()));
    }
    let mut rig = Rig::new(make(), limits(32));
    for act in ACTIVATIONS {
        let activated = activate_on(&mut rig, 64, act, &scaled(21, 64 * 300, 6.0), None);
        bits.extend(activated.iter().map(|value| value.to_bits()));
    }
    bits
}
