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
use super::spec::words::Wiring;
use super::spec::{AttentionSpec, ColumnSplit, LayerSpec};
use super::weights::{
    Attention, Dense, Embedding, Head, LayerWeights, Linear, Mlp, Moe, Stack, SublayerNorms,
};
use crate::quantize::{MatrixId, Observer};
use mainstem_kernels::{
    AttentionShape, Backend, Epilogue, Gemm, InputOperand, KvLayer, KvTable, LateInputs, Norm, RelativeBias,
    SamplingInputs, SpanStack, StepBatch, StepOutput,
};
use std::sync::Arc;

/// Computes x, the embeddings of the step's tokens and positions.
pub fn embed<B: Backend>(
    b: &mut B,
    embedding: &Embedding<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let Embedding { table, first_token: first, scale, project_in, position_table: added, norm } = embedding;
    let hidden = act.hidden;
    let to = if project_in.is_some() { &mut act.y } else { &mut act.x };
    b.embed(table, *first, to);
    b.all_reduce(rows, table.k, to);
    if let Some(project) = project_in {
        observe(b, &mut act.observer, (rows, project.weight.k), &[&project.id], &act.y);
        linear(b, rows, project, &act.y, &mut act.x);
    }
    if *scale != 1.0 {
        b.scale(rows, hidden, *scale, &mut act.x);
    }
    if let Some((positions, offset)) = added {
        b.embed_positions(positions, *offset, &mut act.x);
    }
    if let Some(norm) = norm {
        b.norm_in_place(rows, norm, &mut act.x);
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
    let [q, k, v] = [&mut act.q, &mut act.k, &mut act.v].map(Epilogue::Set);
    let terms = [(&weights.q, q), (&weights.k, k), (&weights.v, v)];
    run_gemms(b, rows, input, &mut act.observer, terms);
    if let Some((q_norm, k_norm)) = &weights.qk_norms {
        let (q, k) = weights.qk_split.as_ref().map(|(q, k)| (q, k)).unzip();
        norm_heads(b, rows, (q_norm, shape.q_width(), q), &mut act.q, &mut act.gathered);
        norm_heads(b, rows, (k_norm, shape.k_width(), k), &mut act.k, &mut act.gathered);
    }
    if let Some(rope) = shape.rope {
        let (rope, angles) = (&stack.ropes[rope], &act.angles[rope]);
        b.rope(rope, angles, shape.heads, shape.k_dim, &mut act.q);
        b.rope(rope, angles, shape.kv_heads, shape.k_dim, &mut act.k);
    }
}

/// Stores k and v in the cache and computes a, the attention of q over the cache.
pub fn attention<B: Backend>(
    b: &mut B,
    spec: &AttentionSpec,
    relative_bias: Option<&RelativeBias<B::Buf>>,
    table: KvTable,
    cache: &mut KvLayer<B::Buf>,
    act: &mut Activations<B::Buf>,
) {
    b.store_kv(table, &act.k, &act.v, cache);
    let bias = relative_bias.filter(|_| spec.has_relative_bias);
    b.attention(&attention_shape(spec, table, bias), &act.q, cache, &mut act.a);
}

/// Runs the rest of the layer after attention. Sub-layer outputs are reduced over the ranks of the stage.
pub fn after_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    block: &LayerWeights<B::Buf>,
    cache: &KvLayer<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
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
    let norms = &block.mlp_norms;
    let input = match (spec.wiring, &norms.pre) {
        (Wiring::Sequential, Some(norm)) => MlpOperand::Normed(norm),
        (Wiring::Sequential | Wiring::ParallelTwoNorms, None) => MlpOperand::X,
        (Wiring::Parallel | Wiring::ParallelTwoNorms, _) => MlpOperand::H,
    };
    let epilogue = ResidualEpilogue::for_sublayer(b, spec, norms);
    match (&block.mlp, epilogue) {
        (Mlp::Dense(mlp), ResidualEpilogue::Fused) => {
            dense(b, rows, mlp, input, MlpEpilogue::AddToStream, act)
        }
        (Mlp::Dense(mlp), ResidualEpilogue::Separate) => dense(b, rows, mlp, input, MlpEpilogue::SetY, act),
        (Mlp::Experts(moe), _) => experts(b, rows, moe, input, act),
    }
    let epilogue = if let Mlp::Dense(_) = block.mlp { epilogue } else { ResidualEpilogue::Separate };
    add_residual(b, rows, norms, spec.residual_scale, epilogue, act);
}

/// Ends a stack: returns hidden states of the rows that request them, and samples the tokens of the output
/// rows. Ranks that return no output have no `out`, but do the same work. Sampling waits for the late inputs.
pub fn finish_stack<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    (which, batch): (SpanStack, &StepBatch),
    rows: usize,
    act: &mut Activations<B::Buf>,
    (late, mut out): (Option<&Arc<LateInputs>>, Option<&mut StepOutput>),
) {
    let inputs = SamplingInputs { biases: &batch.logit_biases, late };
    let hidden = act.hidden;
    let wants_hidden = batch.hidden_rows(which).next().is_some();
    // All rows are normalized if a decoder attends to them or hidden states are requested.
    let normed = which == SpanStack::Encoder || wants_hidden;
    if normed {
        if let Some(norm) = &stack.norm {
            b.norm_in_place(rows, norm, &mut act.x);
        }
        if let Some(out) = &mut out {
            batch.hidden_rows(which).for_each(|run| b.append_hidden(run, hidden, &act.x, out));
        }
    }
    let Some(head_of) = &stack.head else { return };
    let wanted = batch.output_rows(which).count();
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
    let hidden = act.hidden;
    if let Some((project, activation, norm)) = &head.transform {
        observe(b, &mut act.observer, (rows, hidden), &[&project.id], &act.selected);
        linear(b, rows, project, &act.selected, &mut act.selected_h);
        b.activate(rows, hidden, *activation, &mut act.selected_h, None);
        b.norm(rows, norm, &act.selected_h, &mut act.selected);
    }
    if let Some(project) = &head.project_out {
        observe(b, &mut act.observer, (rows, hidden), &[&project.id], &act.selected);
        linear(b, rows, project, &act.selected, &mut act.selected_h);
    }
    let input = if head.project_out.is_some() { &act.selected_h } else { &act.selected };
    observe(b, &mut act.observer, (rows, head.table.k), &[&head.id], input);
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

/// Appends `rows` rows of logits to `out`.
fn append_logits<B: Backend>(
    b: &mut B,
    head: &Head<B::Buf>,
    rows: usize,
    logits: &B::Buf,
    out: &mut StepOutput,
) {
    let vocab = head.vocab_split.as_ref().map_or(head.table.n, |spread| spread.widths.iter().sum());
    let given = out.logits.len();
    out.logits.resize(given + rows * vocab * size_of::<f32>(), 0);
    b.download(logits, 0, &mut out.logits[given..]);
}

/// Stores the cross-attention keys and values of the encoder output in every decoder layer's cache, once per
/// request.
pub fn store_cross_kv<B: Backend>(
    b: &mut B,
    decoder: &Stack<B::Buf>,
    caches: &mut [KvLayer<B::Buf>],
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    for (index, cache) in caches.iter_mut().enumerate() {
        let Some((_, weights)) = &decoder.weights.layer(index).cross else { continue };
        linear(b, rows, &weights.k, &act.x, &mut act.k);
        linear(b, rows, &weights.v, &act.x, &mut act.v);
        b.store_kv(KvTable::Cross, &act.k, &act.v, cache);
    }
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
    let epilogue = ResidualEpilogue::for_sublayer(b, spec, norms);
    let to = match epilogue {
        ResidualEpilogue::Fused => Epilogue::Add { x: &mut act.x, buffer: &mut act.y },
        ResidualEpilogue::Separate => Epilogue::Set(&mut act.y),
    };
    run_gemms(b, rows, InputOperand::Given(&act.a), &mut act.observer, [(&weights.o, to)]);
    add_residual(b, rows, norms, spec.residual_scale, epilogue, act);
}

fn cross_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    (norms, weights, own): (&SublayerNorms<B::Buf>, &Attention<B::Buf>, &AttentionSpec),
    cache: &KvLayer<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let input = match &norms.pre {
        Some(norm) => InputOperand::Normed { norm, x: &act.x, buffer: &mut act.h },
        None => InputOperand::Given(&act.x),
    };
    run_gemms(b, rows, input, &mut act.observer, [(&weights.q, Epilogue::Set(&mut act.q))]);
    b.attention(&attention_shape(own, KvTable::Cross, None), &act.q, cache, &mut act.a);
    attention_output(b, spec, weights, norms, rows, act);
}

/// The way in which a sub-layer's output is added to the residual stream.
#[derive(Clone, Copy)]
enum ResidualEpilogue {
    /// In the epilogue of the GEMM, because no operation comes between.
    Fused,
    /// In an operation of its own, after a reduction, a norm or a scale.
    Separate,
}

impl ResidualEpilogue {
    fn for_sublayer<B: Backend>(b: &B, spec: &LayerSpec, norms: &SublayerNorms<B::Buf>) -> ResidualEpilogue {
        let is_alone = b.rank_and_count().1 == 1;
        if is_alone && norms.out.is_none() && spec.residual_scale == 1.0 {
            ResidualEpilogue::Fused
        } else {
            ResidualEpilogue::Separate
        }
    }
}

/// Adds scale * y, the sub-layer's output, to x unless the GEMM has added it already, and applies the
/// sub-layer's norms.
fn add_residual<B: Backend>(
    b: &mut B,
    rows: usize,
    norms: &SublayerNorms<B::Buf>,
    scale: f32,
    epilogue: ResidualEpilogue,
    act: &mut Activations<B::Buf>,
) {
    let hidden = act.hidden;
    if let ResidualEpilogue::Separate = epilogue {
        b.all_reduce(rows, hidden, &mut act.y);
        if let Some(norm) = &norms.out {
            b.norm_in_place(rows, norm, &mut act.y);
        }
        b.add(rows, hidden, scale, &mut act.x, &act.y);
    }
    if let Some(norm) = &norms.post {
        b.norm_in_place(rows, norm, &mut act.x);
    }
}

/// The input of a feed-forward network.
enum MlpOperand<'a, Buf> {
    X,
    H,
    /// x after this norm.
    Normed(&'a Norm<Buf>),
}

/// Destination of the output of a feed-forward network.
#[derive(Clone, Copy)]
enum MlpEpilogue {
    /// Added to the residual stream x.
    AddToStream,
    /// Stored in y, the sub-layer's output.
    SetY,
    /// Stored beside the output of the chosen experts.
    SetShared,
}

fn dense<B: Backend>(
    b: &mut B,
    rows: usize,
    mlp: &Dense<B::Buf>,
    input: MlpOperand<B::Buf>,
    epilogue: MlpEpilogue,
    act: &mut Activations<B::Buf>,
) {
    let input = match input {
        MlpOperand::X => InputOperand::Given(&act.x),
        MlpOperand::H => InputOperand::Given(&act.h),
        MlpOperand::Normed(norm) => InputOperand::Normed { norm, x: &act.x, buffer: &mut act.h },
    };
    let (gate, up) = ((&mlp.gate, Epilogue::Set(&mut act.gate)), Epilogue::Set(&mut act.up));
    match &mlp.up {
        Some(weight) => run_gemms(b, rows, input, &mut act.observer, [gate, (weight, up)]),
        None => run_gemms(b, rows, input, &mut act.observer, [gate]),
    }
    let up = mlp.up.is_some().then_some(&act.up);
    let activated = InputOperand::Activated { act: mlp.activation, gate: &mut act.gate, up };
    let to = match epilogue {
        MlpEpilogue::AddToStream => Epilogue::Add { x: &mut act.x, buffer: &mut act.y },
        MlpEpilogue::SetY => Epilogue::Set(&mut act.y),
        MlpEpilogue::SetShared => Epilogue::Set(&mut act.shared),
    };
    run_gemms(b, rows, activated, &mut act.observer, [(&mlp.down, to)]);
}

fn experts<B: Backend>(
    b: &mut B,
    rows: usize,
    moe: &Moe<B::Buf>,
    input: MlpOperand<B::Buf>,
    act: &mut Activations<B::Buf>,
) {
    // The normalized input is read more than once.
    if let MlpOperand::Normed(norm) = input {
        b.norm(rows, norm, &act.x, &mut act.h);
    }
    let (input, rest) = match input {
        MlpOperand::X => (&act.x, MlpOperand::X),
        MlpOperand::H | MlpOperand::Normed(_) => (&act.h, MlpOperand::H),
    };
    observe(b, &mut act.observer, (rows, moe.router.weight.k), &[&moe.router.id], input);
    linear(b, rows, &moe.router, input, &mut act.router);
    if let Some(observer) = &mut act.observer {
        let width = moe.router.weight.k;
        observer.observe_experts(b, (rows, width), (&moe.shape, &moe.input_matrices), &act.router, input);
    }
    b.moe(rows, &moe.shape, &act.router, &moe.experts, input, &mut act.y);
    let Some(shared) = &moe.shared else { return };
    if let Some(router) = &moe.shared_router {
        observe(b, &mut act.observer, (rows, router.weight.k), &[&router.id], input);
        linear(b, rows, router, input, &mut act.router);
    }
    dense(b, rows, shared, rest, MlpEpilogue::SetShared, act);
    let hidden = act.hidden;
    if moe.shared_router.is_some() {
        b.gate_rows(rows, hidden, &act.router, &mut act.shared);
    }
    b.add(rows, hidden, 1.0, &mut act.y, &act.shared);
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
            b.copy_columns(rows, norm.width, own.clone(), all, x);
        }
    }
}

fn attention_shape<'a, Buf>(
    spec: &AttentionSpec,
    table: KvTable,
    bias: Option<&'a RelativeBias<Buf>>,
) -> AttentionShape<'a, Buf> {
    let AttentionSpec { heads, scale, softcap, mask, .. } = *spec;
    AttentionShape { heads, scale, softcap, mask, table, bias }
}

fn linear<B: Backend>(b: &mut B, rows: usize, linear: &Linear<B::Buf>, x: &B::Buf, y: &mut B::Buf) {
    b.matmul(rows, &linear.weight, linear.bias.as_ref(), x, y);
}

/// A weight, and the epilogue of its GEMM.
type GemmTerm<'a, Buf> = (&'a Linear<Buf>, Epilogue<'a, Buf>);

/// Runs several GEMMs with the same input. If inputs are observed, the input is computed first and recorded.
fn run_gemms<B: Backend, const N: usize>(
    b: &mut B,
    rows: usize,
    input: InputOperand<B::Buf>,
    observer: &mut Option<Observer>,
    terms: [GemmTerm<B::Buf>; N],
) {
    let input = match observer {
        None => input,
        Some(_) => {
            let x = input.materialize(b, rows, terms[0].0.weight.k);
            let ids = terms.each_ref().map(|(linear, _)| &linear.id);
            observe(b, observer, (rows, terms[0].0.weight.k), &ids, x);
            InputOperand::Given(x)
        }
    };
    let mut gemms =
        terms.map(|(Linear { weight, bias, .. }, to)| Gemm { w: weight, bias: bias.as_ref(), epilogue: to });
    b.gemms(rows, input, &mut gemms);
}

/// Records x (rows, width) as the input of the matrices `ids`, if inputs are observed.
fn observe<B: Backend>(
    b: &mut B,
    observer: &mut Option<Observer>,
    size: (usize, usize),
    ids: &[&MatrixId],
    x: &B::Buf,
) {
    if let Some(observer) = observer {
        observer.observe(b, size, ids, x);
    }
}
