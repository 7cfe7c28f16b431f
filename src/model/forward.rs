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
use super::importance::{MatrixId, Observer};
use super::load::{Attention, Block, Dense, Embedding, Head, Linear, Mlp, Moe, Stack, SublayerNorms};
use super::spec::tables::Wiring;
use super::spec::{AttentionSpec, LayerSpec, Spread};
use mainstem_kernels::{
    AttentionShape, Backend, DistanceBias, Factor, KvLayer, KvTable, Norm, Product, SpanStack, StepBatch,
    StepOutput, To,
};
use std::time::Instant;

/// Computes x, the embeddings of the step's tokens and positions.
pub fn embed<B: Backend>(
    b: &mut B,
    embedding: &Embedding<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let Embedding { table, first, scale, project_in, added, norm } = embedding;
    let hidden = act.hidden;
    let to = if project_in.is_some() { &mut act.y } else { &mut act.x };
    b.embed(table, *first, to);
    b.reduce(rows, table.inp, to);
    if let Some(project) = project_in {
        observe(b, &mut act.observer, (rows, project.weight.inp), &[&project.id], &act.y);
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
    block: &Block<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let (shape, weights) = (&spec.attention, &block.attention);
    let input = match (&block.attention_norms.pre, spec.wiring) {
        // The MLP reads the same input.
        (Some(norm), Wiring::Parallel) => {
            b.norm(rows, norm, &act.x, &mut act.h);
            Factor::Given(&act.h)
        }
        (Some(norm), _) => Factor::Normed { norm, x: &act.x, room: &mut act.h },
        (None, _) => Factor::Given(&act.x),
    };
    let [q, k, v] = [&mut act.q, &mut act.k, &mut act.v].map(To::Set);
    let terms = [(&weights.q, q), (&weights.k, k), (&weights.v, v)];
    multiply(b, rows, input, &mut act.observer, terms);
    if let Some((q_norm, k_norm)) = &weights.qk_norms {
        let (q, k) = weights.spread.as_ref().map(|(q, k)| (q, k)).unzip();
        norm_heads(b, rows, (q_norm, shape.q_width(), q), &mut act.q, &mut act.spread);
        norm_heads(b, rows, (k_norm, shape.k_width(), k), &mut act.k, &mut act.spread);
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
    relative_bias: Option<&DistanceBias<B::Buf>>,
    table: KvTable,
    cache: &mut KvLayer<B::Buf>,
    act: &mut Activations<B::Buf>,
) {
    b.store_kv(table, &act.k, &act.v, cache);
    let bias = relative_bias.filter(|_| spec.by_distance);
    b.attention(&shape(spec, table, bias), &act.q, cache, &mut act.a);
}

/// Runs the rest of the layer after attention. Sub-layer outputs are reduced over the ranks of the stage.
pub fn after_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    block: &Block<B::Buf>,
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
    give_attention(b, spec, &block.attention, &block.attention_norms, rows, act);
    if let (Some((norms, weights)), Some((_, shape_of))) = (&block.cross, &spec.cross) {
        cross_attention(b, spec, (norms, weights, shape_of), cache, rows, act);
    }
    let norms = &block.mlp_norms;
    let input = match (spec.wiring, &norms.pre) {
        (Wiring::Sequential, Some(norm)) => MlpInput::Normed(norm),
        (Wiring::Sequential | Wiring::ParallelTwoNorms, None) => MlpInput::X,
        (Wiring::Parallel | Wiring::ParallelTwoNorms, _) => MlpInput::H,
    };
    let epilogue = Joins::of(b, spec, norms);
    match (&block.mlp, epilogue) {
        (Mlp::Dense(mlp), Joins::AtOnce) => dense(b, rows, mlp, input, Target::Stream, act),
        (Mlp::Dense(mlp), Joins::Apart) => dense(b, rows, mlp, input, Target::Y, act),
        (Mlp::Experts(moe), _) => experts(b, rows, moe, input, act),
    }
    let epilogue = if let Mlp::Dense(_) = block.mlp { epilogue } else { Joins::Apart };
    join(b, rows, norms, spec.residual_scale, epilogue, act);
}

/// Ends a stack: returns hidden states of the rows that request them, and samples the tokens of the output
/// rows. Ranks that return no output have no `out`, but do the same work.
pub fn end<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    (which, batch): (SpanStack, &StepBatch),
    rows: usize,
    act: &mut Activations<B::Buf>,
    mut out: Option<&mut StepOutput>,
) {
    let hidden = act.hidden;
    let wants_hidden = batch.hidden_rows(which).next().is_some();
    // All rows are normalized if a decoder attends to them or hidden states are requested.
    let normed = which == SpanStack::Encoder || wants_hidden;
    if normed {
        if let Some(norm) = &stack.norm {
            b.norm_in_place(rows, norm, &mut act.x);
        }
        if let Some(out) = &mut out {
            batch.hidden_rows(which).for_each(|run| b.hidden(run, hidden, &act.x, out));
        }
    }
    let Some(head_of) = &stack.head else { return };
    let wanted = batch.wanted_rows(which).count();
    for first in (0..wanted).step_by(act.logit_rows) {
        let block = first..wanted.min(first + act.logit_rows);
        b.gather(block.clone(), hidden, &act.x, &mut act.wanted);
        if let Some(norm) = stack.norm.as_ref().filter(|_| !normed) {
            b.norm_in_place(block.len(), norm, &mut act.wanted);
        }
        head(b, head_of, block.len(), act);
        if let Some(out) = &mut out {
            let began = Instant::now();
            b.sample(block.clone(), &act.logits, out);
            if batch.logits {
                give_logits(b, head_of, block.len(), &act.logits, out);
            }
            out.times.sample += began.elapsed();
        }
    }
}

/// Computes the logits of the selected rows.
fn head<B: Backend>(b: &mut B, head: &Head<B::Buf>, rows: usize, act: &mut Activations<B::Buf>) {
    let hidden = act.hidden;
    if let Some((project, activation, norm)) = &head.transform {
        observe(b, &mut act.observer, (rows, hidden), &[&project.id], &act.wanted);
        linear(b, rows, project, &act.wanted, &mut act.wanted_h);
        b.activate(rows, hidden, *activation, &mut act.wanted_h, None);
        b.norm(rows, norm, &act.wanted_h, &mut act.wanted);
    }
    if let Some(project) = &head.project_out {
        observe(b, &mut act.observer, (rows, hidden), &[&project.id], &act.wanted);
        linear(b, rows, project, &act.wanted, &mut act.wanted_h);
    }
    let input = if head.project_out.is_some() { &act.wanted_h } else { &act.wanted };
    observe(b, &mut act.observer, (rows, head.table.inp), &[&head.id], input);
    let own = if head.spread.is_some() { &mut act.own_logits } else { &mut act.logits };
    b.matmul(rows, &head.table, head.bias.as_ref(), input, own);
    if head.scale != 1.0 {
        b.scale(rows, head.table.out, head.scale, own);
    }
    if let Some(cap) = head.softcap {
        b.softcap(rows, head.table.out, cap, own);
    }
    if let Some(spread) = &head.spread {
        b.all_gather(rows, &spread.widths, &act.own_logits, &mut act.logits);
    }
}

/// Appends `rows` rows of logits to `out`.
fn give_logits<B: Backend>(
    b: &mut B,
    head: &Head<B::Buf>,
    rows: usize,
    logits: &B::Buf,
    out: &mut StepOutput,
) {
    let vocab = head.spread.as_ref().map_or(head.table.out, |spread| spread.widths.iter().sum());
    let given = out.logits.len();
    out.logits.resize(given + rows * vocab * size_of::<f32>(), 0);
    b.download(logits, 0, &mut out.logits[given..]);
}

/// Stores the cross-attention keys and values of the encoder output in every decoder layer's cache, once per
/// request.
pub fn remember<B: Backend>(
    b: &mut B,
    decoder: &Stack<B::Buf>,
    caches: &mut [KvLayer<B::Buf>],
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    for (index, cache) in caches.iter_mut().enumerate() {
        let Some((_, weights)) = &decoder.source.layer(index).cross else { continue };
        linear(b, rows, &weights.k, &act.x, &mut act.k);
        linear(b, rows, &weights.v, &act.x, &mut act.v);
        b.store_kv(KvTable::Cross, &act.k, &act.v, cache);
    }
}

/// Adds the attention output, projected by o, to x.
fn give_attention<B: Backend>(
    b: &mut B,
    spec: &LayerSpec,
    weights: &Attention<B::Buf>,
    norms: &SublayerNorms<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let epilogue = Joins::of(b, spec, norms);
    let to = match epilogue {
        Joins::AtOnce => To::Add { x: &mut act.x, room: &mut act.y },
        Joins::Apart => To::Set(&mut act.y),
    };
    multiply(b, rows, Factor::Given(&act.a), &mut act.observer, [(&weights.o, to)]);
    join(b, rows, norms, spec.residual_scale, epilogue, act);
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
        Some(norm) => Factor::Normed { norm, x: &act.x, room: &mut act.h },
        None => Factor::Given(&act.x),
    };
    multiply(b, rows, input, &mut act.observer, [(&weights.q, To::Set(&mut act.q))]);
    b.attention(&shape(own, KvTable::Cross, None), &act.q, cache, &mut act.a);
    give_attention(b, spec, weights, norms, rows, act);
}

/// How a sub-layer's output is added to the residual stream.
#[derive(Clone, Copy)]
enum Joins {
    /// In the epilogue of the GEMM, because no operation comes between.
    AtOnce,
    /// In an operation of its own, after a reduction, a norm or a scale.
    Apart,
}

impl Joins {
    fn of<B: Backend>(b: &B, spec: &LayerSpec, norms: &SublayerNorms<B::Buf>) -> Joins {
        let is_alone = b.place().1 == 1;
        if is_alone && norms.out.is_none() && spec.residual_scale == 1.0 {
            Joins::AtOnce
        } else {
            Joins::Apart
        }
    }
}

/// Adds scale * y, the sub-layer's output, to x unless the GEMM has added it already, and applies the
/// sub-layer's norms.
fn join<B: Backend>(
    b: &mut B,
    rows: usize,
    norms: &SublayerNorms<B::Buf>,
    scale: f32,
    epilogue: Joins,
    act: &mut Activations<B::Buf>,
) {
    let hidden = act.hidden;
    if let Joins::Apart = epilogue {
        b.reduce(rows, hidden, &mut act.y);
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
enum MlpInput<'a, Buf> {
    X,
    H,
    /// x after this norm.
    Normed(&'a Norm<Buf>),
}

/// Where a feed-forward network stores its output.
#[derive(Clone, Copy)]
enum Target {
    /// Added to the residual stream x.
    Stream,
    /// Stored in y, the sub-layer's output.
    Y,
    /// Stored beside the output of the chosen experts.
    Shared,
}

fn dense<B: Backend>(
    b: &mut B,
    rows: usize,
    mlp: &Dense<B::Buf>,
    input: MlpInput<B::Buf>,
    epilogue: Target,
    act: &mut Activations<B::Buf>,
) {
    let input = match input {
        MlpInput::X => Factor::Given(&act.x),
        MlpInput::H => Factor::Given(&act.h),
        MlpInput::Normed(norm) => Factor::Normed { norm, x: &act.x, room: &mut act.h },
    };
    let (gate, up) = ((&mlp.gate, To::Set(&mut act.gate)), To::Set(&mut act.up));
    match &mlp.up {
        Some(weight) => multiply(b, rows, input, &mut act.observer, [gate, (weight, up)]),
        None => multiply(b, rows, input, &mut act.observer, [gate]),
    }
    let up = mlp.up.is_some().then_some(&act.up);
    let activated = Factor::Activated { act: mlp.activation, gate: &mut act.gate, up };
    let to = match epilogue {
        Target::Stream => To::Add { x: &mut act.x, room: &mut act.y },
        Target::Y => To::Set(&mut act.y),
        Target::Shared => To::Set(&mut act.shared),
    };
    multiply(b, rows, activated, &mut act.observer, [(&mlp.down, to)]);
}

fn experts<B: Backend>(
    b: &mut B,
    rows: usize,
    moe: &Moe<B::Buf>,
    input: MlpInput<B::Buf>,
    act: &mut Activations<B::Buf>,
) {
    // The normalized input is read more than once.
    if let MlpInput::Normed(norm) = input {
        b.norm(rows, norm, &act.x, &mut act.h);
    }
    let (input, rest) = match input {
        MlpInput::X => (&act.x, MlpInput::X),
        MlpInput::H | MlpInput::Normed(_) => (&act.h, MlpInput::H),
    };
    observe(b, &mut act.observer, (rows, moe.router.weight.inp), &[&moe.router.id], input);
    linear(b, rows, &moe.router, input, &mut act.router);
    if let Some(observer) = &mut act.observer {
        let width = moe.router.weight.inp;
        observer.see_experts(b, (rows, width), (&moe.shape, &moe.ids), &act.router, input);
    }
    b.moe(rows, &moe.shape, &act.router, &moe.experts, input, &mut act.y);
    let Some(shared) = &moe.shared else { return };
    if let Some(router) = &moe.shared_router {
        observe(b, &mut act.observer, (rows, router.weight.inp), &[&router.id], input);
        linear(b, rows, router, input, &mut act.router);
    }
    dense(b, rows, shared, rest, Target::Shared, act);
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
    (norm, width, spread): (&Norm<B::Buf>, usize, Option<&Spread>),
    x: &mut B::Buf,
    all: &mut B::Buf,
) {
    match spread {
        None => b.norm_in_place(rows * width / norm.width, norm, x),
        Some(Spread { widths, own }) => {
            b.all_gather(rows, widths, x, all);
            b.norm_in_place(rows, norm, all);
            b.columns(rows, norm.width, own.clone(), all, x);
        }
    }
}

fn shape<'a, Buf>(
    spec: &AttentionSpec,
    table: KvTable,
    bias: Option<&'a DistanceBias<Buf>>,
) -> AttentionShape<'a, Buf> {
    let AttentionSpec { heads, scale, softcap, mask, .. } = *spec;
    AttentionShape { heads, scale, softcap, mask, table, bias }
}

fn linear<B: Backend>(b: &mut B, rows: usize, linear: &Linear<B::Buf>, x: &B::Buf, y: &mut B::Buf) {
    b.matmul(rows, &linear.weight, linear.bias.as_ref(), x, y);
}

/// A weight, and the epilogue of its GEMM.
type Term<'a, Buf> = (&'a Linear<Buf>, To<'a, Buf>);

/// Runs several GEMMs with the same input. If inputs are observed, the input is computed first and recorded.
fn multiply<B: Backend, const N: usize>(
    b: &mut B,
    rows: usize,
    input: Factor<B::Buf>,
    observer: &mut Option<Observer>,
    terms: [Term<B::Buf>; N],
) {
    let input = match observer {
        None => input,
        Some(_) => {
            let x = input.made(b, rows, terms[0].0.weight.inp);
            let ids = terms.each_ref().map(|(linear, _)| &linear.id);
            observe(b, observer, (rows, terms[0].0.weight.inp), &ids, x);
            Factor::Given(x)
        }
    };
    let mut gemms =
        terms.map(|(Linear { weight, bias, .. }, to)| Product { w: weight, bias: bias.as_ref(), to });
    b.products(rows, input, &mut gemms);
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
        observer.see(b, size, ids, x);
    }
}
