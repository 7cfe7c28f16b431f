//! The one definition of a layer, for every device, weight type and schedule.
//!
//! A pre-norm transformer block (Vaswani et al. 2017; Zhang and Sennrich 2019 for RMS norm; Su et al. 2021
//! for rotary positions; Ainslie et al. 2023 for grouped queries; Shazeer 2020 for the gated MLP):
//!
//! ```text
//! x += o(attention(rope(q(norm x)), rope(k(norm x)), v(norm x)))
//! x += down(act(gate(norm x)) * up(norm x))
//! ```
//!
//! Invariant: whatever steps through layers calls these five functions and adds no arithmetic of its own.

use super::load::{Block, Linear, Model, Stack};
use super::shard::Shard;
use super::spec::ModelSpec;
use mainstem_kernels::{AttentionShape, Backend, DeviceError, KvLayer, StepBatch, StepLimits, StepOutput};
use std::time::Instant;

/// The buffers between the operations, made once for the largest step. All F32, (rows, width).
pub struct Activations<Buf> {
    /// The residual stream, (rows, hidden).
    x: Buf,
    /// Its norm, and what a sub-layer gives back, (rows, hidden).
    h: Buf,
    y: Buf,
    /// (rows, heads, head_dim)
    q: Buf,
    /// (rows, kv_heads, head_dim)
    k: Buf,
    v: Buf,
    /// What attention gives, (rows, heads, head_dim).
    a: Buf,
    /// (rows, MLP width)
    gate: Buf,
    up: Buf,
    /// The wanted rows, (logit rows, hidden).
    wanted: Buf,
    wanted_h: Buf,
    /// (logit rows, vocabulary)
    logits: Buf,
    /// Wanted rows whose logits have room at once.
    logit_rows: usize,
}

impl<Buf> Activations<Buf> {
    /// Buffers for every step within `limits`.
    pub fn new<B: Backend<Buf = Buf>>(
        backend: &mut B,
        spec: &ModelSpec,
        limits: &StepLimits,
    ) -> Result<Activations<Buf>, DeviceError> {
        let mut alloc = |rows: usize, width: usize| backend.alloc(rows * width * size_of::<f32>());
        Ok(Activations {
            x: alloc(limits.rows, spec.hidden)?,
            h: alloc(limits.rows, spec.hidden)?,
            y: alloc(limits.rows, spec.hidden)?,
            q: alloc(limits.rows, spec.q_width())?,
            k: alloc(limits.rows, spec.kv_width())?,
            v: alloc(limits.rows, spec.kv_width())?,
            a: alloc(limits.rows, spec.q_width())?,
            gate: alloc(limits.rows, spec.mlp.width)?,
            up: alloc(limits.rows, spec.mlp.width)?,
            wanted: alloc(limits.logit_rows, spec.hidden)?,
            wanted_h: alloc(limits.logit_rows, spec.hidden)?,
            logits: alloc(limits.logit_rows, spec.vocab)?,
            logit_rows: limits.logit_rows,
        })
    }
}

/// Bytes of all activations together.
pub fn activation_bytes(spec: &ModelSpec, limits: &StepLimits) -> usize {
    let row = 3 * spec.hidden + 2 * spec.q_width() + 2 * spec.kv_width() + 2 * spec.mlp.width;
    let logit_row = 2 * spec.hidden + spec.vocab;
    (limits.rows * row + limits.logit_rows * logit_row) * size_of::<f32>()
}

/// One step of the whole batch: for each layer, every row. The serving schedule.
pub fn step_major<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    shard: &Shard,
    kv: &mut [KvLayer<B::Buf>],
    act: &mut Activations<B::Buf>,
    batch: &StepBatch,
    out: &mut StepOutput,
) {
    let rows = batch.rows();
    let stack = model.decoder();
    b.begin(batch);
    for cache in kv.iter_mut() {
        b.copy_pages(&batch.copies, cache);
    }
    embed(b, stack, act);
    for (index, cache) in kv.iter_mut().enumerate().take(shard.layers.len()) {
        let block = stack.source.layer(index);
        before_attention(b, &model.spec, stack, block, rows, act);
        attention(b, &model.spec, cache, act);
        after_attention(b, &model.spec, block, rows, act);
    }
    head(b, &model.spec, stack, batch.samples.len(), act, out);
}

/// x = the embeddings of the step's tokens.
pub fn embed<B: Backend>(b: &mut B, stack: &Stack<B::Buf>, act: &mut Activations<B::Buf>) {
    b.embed(&stack.embedding, &mut act.x);
}

/// q, k, v = the projections of norm(x), q and k rotated.
pub fn before_attention<B: Backend>(
    b: &mut B,
    spec: &ModelSpec,
    stack: &Stack<B::Buf>,
    block: &Block<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let shape = &spec.attention;
    b.norm(rows, &block.attention_norm, &act.x, &mut act.h);
    linear(b, rows, &block.q, &act.h, &mut act.q);
    linear(b, rows, &block.k, &act.h, &mut act.k);
    linear(b, rows, &block.v, &act.h, &mut act.v);
    b.rope(&stack.rope, shape.heads, shape.head_dim, &mut act.q);
    b.rope(&stack.rope, shape.kv_heads, shape.head_dim, &mut act.k);
}

/// a = attention of q over the cache, which holds k and v first.
pub fn attention<B: Backend>(
    b: &mut B,
    spec: &ModelSpec,
    cache: &mut KvLayer<B::Buf>,
    act: &mut Activations<B::Buf>,
) {
    let shape =
        AttentionShape { heads: spec.attention.heads, scale: 1.0 / (spec.attention.head_dim as f32).sqrt() };
    b.store_kv(&act.k, &act.v, cache);
    b.attention(&shape, &act.q, cache, &mut act.a);
}

/// x += o(a), then x += the MLP of norm(x). What each gives is reduced over the stage first.
pub fn after_attention<B: Backend>(
    b: &mut B,
    spec: &ModelSpec,
    block: &Block<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    linear(b, rows, &block.o, &act.a, &mut act.y);
    b.reduce(rows, spec.hidden, &mut act.y);
    b.add(rows, spec.hidden, &mut act.x, &act.y);

    b.norm(rows, &block.mlp_norm, &act.x, &mut act.h);
    linear(b, rows, &block.gate, &act.h, &mut act.gate);
    linear(b, rows, &block.up, &act.h, &mut act.up);
    b.activate(rows, spec.mlp.width, spec.mlp.activation, &mut act.gate, Some(&act.up));
    linear(b, rows, &block.down, &act.gate, &mut act.y);
    b.reduce(rows, spec.hidden, &mut act.y);
    b.add(rows, spec.hidden, &mut act.x, &act.y);
}

/// Tokens of the wanted rows, in blocks of as many as there is room for logits.
pub fn head<B: Backend>(
    b: &mut B,
    spec: &ModelSpec,
    stack: &Stack<B::Buf>,
    wanted: usize,
    act: &mut Activations<B::Buf>,
    out: &mut StepOutput,
) {
    for first in (0..wanted).step_by(act.logit_rows) {
        let block = first..wanted.min(first + act.logit_rows);
        b.gather(block.clone(), spec.hidden, &act.x, &mut act.wanted);
        b.norm(block.len(), &stack.norm, &act.wanted, &mut act.wanted_h);
        b.matmul(block.len(), stack.head(), None, &act.wanted_h, &mut act.logits);
        let began = Instant::now();
        b.sample(block, &act.logits, out);
        out.times.sample += began.elapsed();
    }
}

fn linear<B: Backend>(b: &mut B, rows: usize, linear: &Linear<B::Buf>, x: &B::Buf, y: &mut B::Buf) {
    b.matmul(rows, &linear.weight, linear.bias.as_ref(), x, y);
}
