//! The one definition of a transformer layer, for every model family, device, weight type and schedule.
//!
//! A transformer layer (Vaswani et al. 2017) consists of known blocks: norms before, after or around the
//! sub-layers, attention with any kind of positions, cross-attention, and a dense feed-forward network or a
//! mixture of experts.
//!
//! ```text
//! x += s * out(o(attention(rope(norm(q(pre x))), rope(norm(k(pre x))), v(pre x)))); x = post(x)
//! x += s * out(cross(pre x));                                                       x = post(x)
//! x += s * out(mlp(pre x));                                                         x = post(x)
//! ```
//!
//! Invariant: whatever runs layers calls these functions and adds no arithmetic of its own.

use super::activations::Activations;
use super::distances;
use super::gemm_terms::run_gemms;
use super::latent::{self, LatentBuffers};
use super::layer_cache::LayerCache;
use super::spec::words::Wiring;
use super::spec::{AttentionSpec, ColumnSplit, LayerSpec};
use super::weights::{
    Attention, Dense, Embedding, Head, LayerWeights, Linear, Mlp, Moe, PositionTable, Stack, SublayerNorms,
};
use mainstem_kernels::{
    ActivationType, AttentionShape, Backend, DeviceError, Epilogue, InputOperand, KvTable, Norm,
    OutputColumns, RelativeBias, SamplingInputs, SpanStack, StepBatch, StepOutput,
};
use std::ops::Range;

/// Computes x, the embeddings of the step's tokens and positions.
pub fn embed<B: Backend>(
    b: &mut B,
    embedding: &Embedding<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let Embedding { table, first_token: first, scale, projects_last, position_table: added, .. } = embedding;
    let (first_projection, last_projection) = match projects_last {
        false => (&embedding.project_in, &None),
        true => (&None, &embedding.project_in),
    };
    let to = if embedding.project_in.is_some() { &mut act.y } else { &mut act.x };
    b.embed(table, *first, to);
    reduce(b, act.ranks, (rows, table.k), to);
    if let Some(project) = first_projection {
        linear(b, rows, project, &act.y, &mut act.x);
    }
    let (sum, width) =
        if last_projection.is_some() { (&mut act.y, table.k) } else { (&mut act.x, act.hidden) };
    if *scale != 1.0 {
        b.scale(rows, width, *scale, sum);
    }
    if let Some(norm) = embedding.norm.as_ref().filter(|_| embedding.norm_first) {
        b.norm_in_place(rows, norm, sum);
    }
    if let Some(PositionTable { table, offset, type_rows }) = added {
        b.embed_positions(table, *offset, *type_rows, sum);
    }
    if let Some(norm) = embedding.norm.as_ref().filter(|_| !embedding.norm_first) {
        b.norm_in_place(rows, norm, sum);
    }
    if let Some(project) = last_projection {
        linear(b, rows, project, &act.y, &mut act.x);
    }
}

/// Computes q, k and v, the projections of the layer's input, with their norms and rotary positions.
pub fn before_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    stack: &Stack<B::Buf>,
    block: &LayerWeights<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let (shape, weights) = (&spec.attention, &block.attention);
    let input = match (&block.attention_norms.pre, spec.wiring) {
        // The MLP reads the same input.
        (Some(norm), Wiring::Parallel) => {
            b.norm(rows, norm, &act.x, &mut act.h);
            InputOperand::Given(&act.h)
        }
        (Some(norm), _) => InputOperand::Normed { norm, x: &act.x, buffer: &mut act.h },
        (None, _) => InputOperand::Given(&act.x),
    };
    if let (Some(latent), Some(of_latent)) = (&weights.latent, &shape.latent) {
        let room = LatentBuffers {
            q: &mut act.q,
            k: &mut act.k,
            latent: &mut act.v,
            between: &mut act.latent,
            angles: &act.angles,
        };
        return latent::project(b, rows, (shape, of_latent), (weights, latent), stack, input, room);
    }
    let [q, k, v] = [&mut act.q, &mut act.k, &mut act.v].map(Epilogue::Set);
    let terms = [(&weights.q, q), (&weights.k, k), (&weights.v, v)];
    run_gemms(b, rows, input, terms);
    if let Some(bound) = shape.clip {
        b.clamp(rows, shape.q_width(), bound, &mut act.q);
        b.clamp(rows, shape.k_width(), bound, &mut act.k);
        b.clamp(rows, shape.v_width(), bound, &mut act.v);
    }
    if !shape.qk_norms_last {
        norm_queries_and_keys(b, shape, weights, rows, act);
    }
    if let Some(rope) = shape.rope {
        let (rope, angles) = (&stack.ropes[rope], &act.angles[rope]);
        b.rope(rope, angles, shape.heads, shape.k_dim, &mut act.q);
        b.rope(rope, angles, shape.kv_heads, shape.k_dim, &mut act.k);
    }
    if let Some(growth) = shape.growth {
        b.rope(&stack.ropes[growth], &act.angles[growth], shape.heads, shape.k_dim, &mut act.q);
    }
    if shape.qk_norms_last {
        norm_queries_and_keys(b, shape, weights, rows, act);
    }
}

fn norm_queries_and_keys<B: Backend>(
    b: &mut B,
    shape: &AttentionSpec,
    weights: &Attention<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let Some((q_norm, k_norm)) = &weights.qk_norms else { return };
    let (q, k) = weights.qk_split.as_ref().map(|(q, k)| (q, k)).unzip();
    norm_heads(b, rows, (q_norm, shape.q_width(), q), &mut act.q, &mut act.gathered);
    norm_heads(b, rows, (k_norm, shape.k_width(), k), &mut act.k, &mut act.gathered);
}

/// Stores k and v in the cache and computes a, the attention of q over the cache.
pub fn attention<B: Backend>(
    b: &mut B,
    (spec, weights): (&AttentionSpec, &Attention<B::Buf>),
    relative_biases: &[RelativeBias<B::Buf>],
    cache: &mut LayerCache<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    cache.store(b, rows, cache.table, [&act.k, &act.v]);
    if let (Some(latent), Some(of_latent), true) = (&weights.latent, &spec.latent, act.latent.is_open) {
        return latent::attend_to_heads(b, rows, (spec, of_latent), (weights, latent), act);
    }
    let bias = spec.relative_bias.map(|bias| &relative_biases[bias]);
    let distances = match &weights.distances {
        Some(own) => {
            Some(distances::scores(b, (rows, spec.heads), own, [&act.q, &act.k], &mut act.distances))
        }
        None => None,
    };
    let shape = AttentionShape { distances, ..attention_shape(spec, cache.table, bias, weights) };
    cache.attend(b, rows, &shape, (&act.q, &mut act.a));
}

/// Runs the rest of the layer after attention. Sub-layer outputs are reduced over the ranks of the stage.
/// Fails if experts of the layer cannot be read.
pub fn after_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    block: &LayerWeights<B::Buf>,
    cache: &LayerCache<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) -> Result<(), DeviceError> {
    // With parallel wiring the MLP reads x before the attention output is added.
    if spec.wiring == Wiring::ParallelTwoNorms
        && let Some(norm) = &block.mlp_norms.pre
    {
        b.norm(rows, norm, &act.x, &mut act.h);
    }
    attention_output(b, spec, &block.attention, &block.attention_norms, rows, act);
    if let (Some((norms, weights)), Some((_, shape_of))) = (&block.cross, &spec.cross) {
        cross_attention(b, spec, (norms, weights, shape_of), cache, rows, act);
    }
    mlp(b, spec, &block.mlp, &block.mlp_norms, rows, act)
}

/// Ends a stack for `rows`, a row batch: returns hidden states of the rows that request them, and samples the
/// tokens of the output rows with these inputs. Ranks that return no output have no `out`, but do the same
/// work.
pub fn finish_stack<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    (which, batch): (SpanStack, &StepBatch),
    rows: Range<usize>,
    act: &mut Activations<B::Buf>,
    (inputs, mut out): (SamplingInputs, Option<&mut StepOutput>),
) {
    let hidden = act.hidden;
    let runs = batch.hidden_rows(which).map(|run| run.start.max(rows.start)..run.end.min(rows.end));
    let mut runs = runs.filter(|run| !run.is_empty()).peekable();
    // All rows are normalized if a decoder attends to them or hidden states are requested.
    let normed = which == SpanStack::Encoder || runs.peek().is_some();
    if normed {
        if let Some(norm) = &stack.norm {
            b.norm_in_place(rows.len(), norm, &mut act.x);
        }
        if let Some(out) = &mut out {
            let of_batch = |run: Range<usize>| run.start - rows.start..run.end - rows.start;
            runs.for_each(|run| b.append_hidden(of_batch(run), hidden, &act.x, out));
        }
    }
    let Some(head_of) = &stack.head else { return };
    let inputs = SamplingInputs { width: Some(vocab_of(head_of)), ..inputs };
    let wanted = batch.output_rows(which).filter(|row| rows.contains(row)).count();
    for first in (0..wanted).step_by(act.logit_rows) {
        let block = first..wanted.min(first + act.logit_rows);
        b.gather_output_rows(block.clone(), hidden, &act.x, &mut act.selected);
        if let Some(norm) = stack.norm.as_ref().filter(|_| !normed) {
            b.norm_in_place(block.len(), norm, &mut act.selected);
        }
        compute_logits(b, head_of, block.len(), act);
        if let Some(out) = &mut out {
            b.sample(block.clone(), &act.logits, inputs, out);
            if batch.return_logits {
                append_logits(b, head_of, block.len(), &act.logits, out);
            }
        }
    }
}

/// Computes the logits of the selected rows.
fn compute_logits<B: Backend>(b: &mut B, head: &Head<B::Buf>, rows: usize, act: &mut Activations<B::Buf>) {
    if let Some((project, activation, norm)) = &head.transform {
        linear(b, rows, project, &act.selected, &mut act.selected_h);
        b.activate(rows, norm.width, *activation, &mut act.selected_h, None);
        b.norm(rows, norm, &act.selected_h, &mut act.selected);
    }
    if let Some(project) = &head.project_out {
        linear(b, rows, project, &act.selected, &mut act.selected_h);
    }
    let input = if head.project_out.is_some() { &act.selected_h } else { &act.selected };
    let own = if head.vocab_split.is_some() { &mut act.local_logits } else { &mut act.logits };
    b.matmul(rows, &head.table, head.bias.as_ref(), input, own);
    if head.scale != 1.0 {
        b.scale(rows, head.table.n, head.scale, own);
    }
    if let Some(cap) = head.softcap {
        b.softcap(rows, head.table.n, cap, own);
    }
    if let Some(spread) = &head.vocab_split {
        b.all_gather(rows, &spread.widths, &act.local_logits, &mut act.logits);
    }
}

/// Returns the number of logits of a row.
fn vocab_of<Buf>(head: &Head<Buf>) -> usize {
    head.vocab_split.as_ref().map_or(head.table.n, |spread| spread.widths.iter().sum())
}

/// Appends `rows` rows of logits to `out`, which allocates.
fn append_logits<B: Backend>(
    b: &mut B,
    head: &Head<B::Buf>,
    rows: usize,
    logits: &B::Buf,
    out: &mut StepOutput,
) {
    let vocab = vocab_of(head);
    let ty = b.activation_type();
    if ty == ActivationType::F32 {
        let start = out.logits.len();
        out.logits.resize(start + rows * vocab * ty.size(), 0);
        return b.download(logits, 0, &mut out.logits[start..]);
    }
    let mut bytes = vec![0; rows * vocab * ty.size()];
    b.download(logits, 0, &mut bytes);
    ty.append_f32(&bytes, &mut out.logits);
}

/// Stores the cross-attention keys and values of x, the encoder output, in a decoder layer's cache, once per
/// request. The current rows must be those of the encoder.
pub fn store_cross_kv<B: Backend>(
    b: &mut B,
    block: &LayerWeights<B::Buf>,
    cache: &mut LayerCache<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let Some((_, weights)) = &block.cross else { return };
    linear(b, rows, &weights.k, &act.x, &mut act.k);
    linear(b, rows, &weights.v, &act.x, &mut act.v);
    cache.store(b, rows, KvTable::Cross, [&act.k, &act.v]);
}

/// Adds the attention output, projected by o, to x.
fn attention_output<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    weights: &Attention<B::Buf>,
    norms: &SublayerNorms<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let values = match &weights.latent {
        Some(_) => latent::values(b, rows, weights, spec.attention.heads, (&act.a, &mut act.latent)),
        None => &act.a,
    };
    let is_fused = can_fuse_residual(act.ranks, spec, norms);
    let epilogue = residual_epilogue(is_fused, &mut act.x, &mut act.y);
    run_gemms(b, rows, InputOperand::Given(values), [(&weights.o, epilogue)]);
    add_residual(b, rows, norms, spec.residual_scale, is_fused, act);
}

fn cross_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    (norms, weights, own): (&SublayerNorms<B::Buf>, &Attention<B::Buf>, &AttentionSpec),
    cache: &LayerCache<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let input = match &norms.pre {
        Some(norm) => InputOperand::Normed { norm, x: &act.x, buffer: &mut act.h },
        None => InputOperand::Given(&act.x),
    };
    run_gemms(b, rows, input, [(&weights.q, Epilogue::Set(&mut act.q))]);
    cache.attend(b, rows, &attention_shape(own, KvTable::Cross, None, weights), (&act.q, &mut act.a));
    attention_output(b, spec, weights, norms, rows, act);
}

/// Sums x (rows, width) over the ranks that share the model. A whole model has one, whatever stage its device
/// is in.
fn reduce<B: Backend>(b: &mut B, ranks: usize, (rows, width): (usize, usize), x: &mut B::Buf) {
    if ranks > 1 {
        b.all_reduce(rows, width, x);
    }
}

/// Returns whether the GEMM that ends a sub-layer can add its result to the residual stream: no reduction,
/// norm or scale comes between.
fn can_fuse_residual<Buf>(ranks: usize, spec: &LayerSpec, norms: &SublayerNorms<Buf>) -> bool {
    ranks == 1 && norms.out.is_none() && spec.residual_scale == 1.0
}

/// Returns the epilogue of the GEMM that ends a sub-layer: it adds to the residual stream x, or stores the
/// sub-layer's output in y.
fn residual_epilogue<'a, Buf>(is_fused: bool, x: &'a mut Buf, y: &'a mut Buf) -> Epilogue<&'a mut Buf> {
    if is_fused { Epilogue::Add { x, buffer: y } } else { Epilogue::Set(y) }
}

/// Adds scale * y, the sub-layer's output, to x unless the GEMM has added it already (`is_fused`), and
/// applies the sub-layer's norms.
fn add_residual<B: Backend>(
    b: &mut B,
    rows: usize,
    norms: &SublayerNorms<B::Buf>,
    scale: f32,
    is_fused: bool,
    act: &mut Activations<B::Buf>,
) {
    let hidden = act.hidden;
    if !is_fused {
        reduce(b, act.ranks, (rows, hidden), &mut act.y);
        if let Some(norm) = &norms.out {
            b.norm_in_place(rows, norm, &mut act.y);
        }
        b.add(rows, hidden, scale, &mut act.x, &act.y);
    }
    if let Some(norm) = &norms.post {
        b.norm_in_place(rows, norm, &mut act.x);
    }
}

/// Runs the feed-forward network of a layer, and adds its output to x. With parallel wiring, its input is in
/// h already.
fn mlp<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    mlp: &Mlp<B::Buf>,
    norms: &SublayerNorms<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) -> Result<(), DeviceError> {
    let Activations { x, h, y, gate, up, router, shared, ranks, .. } = act;
    let input = match (spec.wiring, &norms.pre) {
        (Wiring::Sequential, Some(norm)) => InputOperand::Normed { norm, x, buffer: h },
        (Wiring::Sequential | Wiring::ParallelTwoNorms, None) => InputOperand::Given(x),
        (Wiring::Parallel | Wiring::ParallelTwoNorms, _) => InputOperand::Given(h),
    };
    let is_fused = match mlp {
        Mlp::Dense(mlp) => {
            dense_inner(b, rows, mlp, input, (gate, up));
            let is_fused = can_fuse_residual(*ranks, spec, norms);
            dense_output(b, rows, mlp, (gate, up), residual_epilogue(is_fused, x, y));
            is_fused
        }
        Mlp::Experts(moe) => {
            // The input is read more than once.
            let input = input.materialize(b, rows, moe.router.weight.k);
            experts(b, rows, moe, input, MoeBuffers { gate, up, router, shared, y })?;
            false
        }
    };
    add_residual(b, rows, norms, spec.residual_scale, is_fused, act);
    Ok(())
}

/// Computes gate and up, the inner layers of a dense feed-forward network before the activation function.
fn dense_inner<B: Backend>(
    b: &mut B,
    rows: usize,
    mlp: &Dense<B::Buf>,
    input: InputOperand<B::Buf>,
    (gate, up): (&mut B::Buf, &mut B::Buf),
) {
    let gate = (&mlp.gate, Epilogue::Set(gate));
    match &mlp.up {
        Some(weight) => run_gemms(b, rows, input, [gate, (weight, Epilogue::Set(up))]),
        None => run_gemms(b, rows, input, [gate]),
    }
}

/// Computes the output of a dense feed-forward network from gate and up.
fn dense_output<B: Backend>(
    b: &mut B,
    rows: usize,
    mlp: &Dense<B::Buf>,
    (gate, up): (&mut B::Buf, &B::Buf),
    epilogue: Epilogue<&mut B::Buf>,
) {
    let up = mlp.up.is_some().then_some(up);
    let activated = InputOperand::Activated { act: mlp.activation, gate, up };
    run_gemms(b, rows, activated, [(&mlp.down, epilogue)]);
}

/// The activation buffers of a mixture of experts, besides its input.
struct MoeBuffers<'a, Buf> {
    gate: &'a mut Buf,
    up: &'a mut Buf,
    router: &'a mut Buf,
    shared: &'a mut Buf,
    /// The output.
    y: &'a mut Buf,
}

/// Computes y, the output of a mixture of experts for its input x (rows, hidden). Fails if experts cannot be
/// read.
fn experts<B: Backend>(
    b: &mut B,
    rows: usize,
    moe: &Moe<B::Buf>,
    x: &B::Buf,
    MoeBuffers { gate, up, router, shared, y }: MoeBuffers<B::Buf>,
) -> Result<(), DeviceError> {
    linear(b, rows, &moe.router, x, router);
    b.moe(rows, &moe.shape, router, moe.experts(), x, y)?;
    let Some(mlp) = &moe.shared else { return Ok(()) };
    if let Some(gate_of_shared) = &moe.shared_router {
        linear(b, rows, gate_of_shared, x, router);
    }
    dense_inner(b, rows, mlp, InputOperand::Given(x), (gate, up));
    dense_output(b, rows, mlp, (gate, up), Epilogue::Set(shared));
    let hidden = moe.router.weight.k;
    if moe.shared_router.is_some() {
        b.gate_rows(rows, hidden, router, shared);
    }
    b.add(rows, hidden, 1.0, y, shared);
    Ok(())
}

/// Normalizes each head separately if the norm is as wide as a head, otherwise all heads together, including
/// those of other ranks.
fn norm_heads<B: Backend>(
    b: &mut B,
    rows: usize,
    (norm, width, spread): (&Norm<B::Buf>, usize, Option<&ColumnSplit>),
    x: &mut B::Buf,
    all: &mut B::Buf,
) {
    match spread {
        None => b.norm_in_place(rows * width / norm.width, norm, x),
        Some(ColumnSplit { widths, local: own }) => {
            b.all_gather(rows, widths, x, all);
            b.norm_in_place(rows, norm, all);
            b.copy_columns((rows, 1), (norm.width, own.clone(), all), (OutputColumns::all(own.len()), x));
        }
    }
}

fn attention_shape<'a, Buf>(
    spec: &AttentionSpec,
    table: KvTable,
    bias: Option<&'a RelativeBias<Buf>>,
    weights: &'a Attention<Buf>,
) -> AttentionShape<'a, Buf> {
    let AttentionSpec { heads, scale, softcap, mask, .. } = *spec;
    let sinks = weights.sinks.as_ref();
    AttentionShape { softcap, bias, sinks, ..AttentionShape::plain(heads, scale, mask, table) }
}

fn linear<B: Backend>(b: &mut B, rows: usize, linear: &Linear<B::Buf>, x: &B::Buf, y: &mut B::Buf) {
    run_gemms(b, rows, InputOperand::Given(x), [(linear, Epilogue::Set(y))]);
}
