//! The order of computation of a step: all rows of the batch, layer by layer, from the previous stage's
//! activations to those for the next stage.
//!
//! Invariant: this module contains no arithmetic; all of it is in [`super::forward`].

use super::activations::Activations;
use super::forward::{after_attention, attention, before_attention, embed, finish_stack, store_cross_kv};
use super::spec::LayerSpec;
use super::weights::{Model, Stack};
use mainstem_kernels::{Backend, HandoffPorts, KvLayer, KvTable, SpanStack, StepBatch, StepOutput};

/// The KV caches of the layers.
pub struct Caches<'a, Buf> {
    /// The caches of the decoder's layers.
    pub decoder: &'a mut [KvLayer<Buf>],
    /// The encoder's cache, one for all layers.
    pub scratch: Option<&'a mut KvLayer<Buf>>,
}

/// Inputs and outputs of a step.
pub struct StepIo<'a> {
    pub batch: &'a StepBatch,
    pub handoff: HandoffPorts<'a>,
    pub out: &'a mut StepOutput,
}

/// Runs one step of the whole batch: for each layer, all rows. Encoder rows go first, and decoder rows may
/// belong to the same sequences. A shard runs its layers between the activations of the previous stage and
/// those for the next.
pub fn run_step<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    mut caches: Caches<B::Buf>,
    act: &mut Activations<B::Buf>,
    mut traffic: StepIo,
) {
    check_tokens(traffic.batch, model.spec.vocab);
    b.begin_step(traffic.batch);
    for cache in caches.decoder.iter_mut() {
        b.copy_pages(&traffic.batch.page_copies, cache);
    }
    if let Some(to) = &mut traffic.handoff.output {
        to.encoder.clear();
        to.decoder.clear();
    }
    let encoder_rows = b.select_stack(SpanStack::Encoder);
    if encoder_rows > 0 {
        encode(b, model, &mut caches, encoder_rows, act, &mut traffic);
    }
    let rows = b.select_stack(SpanStack::Decoder);
    if rows > 0 {
        decode(b, model, caches.decoder, rows, act, &mut traffic);
    }
    let met = encoder_rows > 0 && model.encoder.is_some() || rows > 0 && model.decoder.is_some();
    if !met {
        synchronize_ranks(b, act);
    }
}

/// Reduces one unused value over the ranks of a stage. The ranks synchronize in each layer; this keeps them
/// in step if a step has no rows for any layer.
fn synchronize_ranks<B: Backend>(b: &mut B, act: &mut Activations<B::Buf>) {
    b.all_reduce(1, 1, &mut act.y);
}

/// Checks all tokens: a rank cannot tell whether a token outside of its share of the vocabulary belongs to
/// another rank.
fn check_tokens(batch: &StepBatch, vocab: usize) {
    let foreign = batch.tokens.iter().find(|token| **token as usize >= vocab);
    assert_eq!(foreign, None, "a token is not in the vocabulary of {vocab}; this is a bug");
}

/// Runs the encoder rows through the local encoder layers, and stores the local decoder layers'
/// cross-attention keys and values.
fn encode<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    caches: &mut Caches<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
    traffic: &mut StepIo,
) {
    let from = traffic.handoff.input.map(|from| &from.encoder);
    match (&model.encoder, &model.spec.encoder, &mut caches.scratch) {
        (Some(stack), Some(spec), Some(scratch)) => {
            enter_stack(b, stack, rows, from, act);
            for (index, layer) in spec.layers.iter().enumerate() {
                run_layer(b, stack, layer, index, (KvTable::Scratch, scratch), rows, act);
            }
            if model.role.ends_encoder {
                let out = model.role.returns_output.then_some(&mut *traffic.out);
                finish_stack(b, stack, (SpanStack::Encoder, traffic.batch), rows, act, out);
            }
        }
        // An earlier stage has computed the encoder output.
        _ => receive_activations(b, rows, from, act),
    }
    if let Some(decoder) = &model.decoder {
        store_cross_kv(b, decoder, caches.decoder, rows, act);
    }
    if model.role.forwards_encoder_output {
        send_activations(b, rows, act, traffic.handoff.output.as_mut().map(|to| &mut to.encoder));
    }
}

/// Runs the decoder rows through the local decoder layers.
fn decode<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    caches: &mut [KvLayer<B::Buf>],
    rows: usize,
    act: &mut Activations<B::Buf>,
    traffic: &mut StepIo,
) {
    let (Some(stack), Some(spec)) = (&model.decoder, &model.spec.decoder) else { return };
    enter_stack(b, stack, rows, traffic.handoff.input.map(|from| &from.decoder), act);
    for (index, cache) in caches.iter_mut().enumerate() {
        run_layer(b, stack, &spec.layers[index], index, (KvTable::Own, cache), rows, act);
    }
    let out = model.role.returns_output.then_some(&mut *traffic.out);
    match model.role.ends_decoder {
        true => {
            traffic.handoff.last_layer.send();
            finish_stack(b, stack, (SpanStack::Decoder, traffic.batch), rows, act, out);
        }
        false => send_activations(b, rows, act, traffic.handoff.output.as_mut().map(|to| &mut to.decoder)),
    }
}

/// Computes or receives x, the input of the first local layer of a stack, and the rotary angles of its
/// positions.
fn enter_stack<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    rows: usize,
    from: Option<&Vec<u8>>,
    act: &mut Activations<B::Buf>,
) {
    match &stack.embedding {
        Some(embedding) => embed(b, embedding, rows, act),
        None => receive_activations(b, rows, from, act),
    }
    for (rope, angles) in stack.ropes.iter().zip(&mut act.angles) {
        b.rope_angles(rope, angles);
    }
}

/// Loads x from the activations of the previous stage.
fn receive_activations<B: Backend>(
    b: &mut B,
    rows: usize,
    from: Option<&Vec<u8>>,
    act: &mut Activations<B::Buf>,
) {
    let from = from.expect("a stage without embeddings has a previous stage; this is a bug");
    assert_eq!(
        from.len(),
        rows * act.hidden * size_of::<f32>(),
        "not the bytes of {rows} rows; this is a bug"
    );
    b.upload(&mut act.x, 0, from);
}

/// Sends x to the next stage, if this rank has to send it.
fn send_activations<B: Backend>(b: &mut B, rows: usize, act: &Activations<B::Buf>, to: Option<&mut Vec<u8>>) {
    if let Some(to) = to {
        to.resize(rows * act.hidden * size_of::<f32>(), 0);
        b.download(&act.x, 0, to);
    }
}

/// Runs one layer, which stores its keys and values in `cache`.
fn run_layer<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    spec: &LayerSpec,
    index: usize,
    (table, cache): (KvTable, &mut KvLayer<B::Buf>),
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let block = stack.weights.layer(index);
    before_attention(b, spec, stack, block, rows, act);
    attention(b, &spec.attention, stack.relative_bias.as_ref(), table, cache, act);
    after_attention(b, spec, block, cache, rows, act);
}
