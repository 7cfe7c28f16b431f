//! The order of computation of a step: all rows of the batch, layer by layer, from the previous stage's
//! activations to those for the next stage.
//!
//! Invariant: this module contains no arithmetic; all of it is in [`super::forward`].

use super::activations::Activations;
use super::drafter::Drafter;
use super::forward::{after_attention, attention, before_attention, embed, finish_stack, store_cross_kv};
use super::spec::LayerSpec;
use super::weights::{LayerWeights, Model, Stack};
use mainstem_kernels::{
    Backend, DeviceError, HandoffPorts, KvLayer, KvTable, SamplingInputs, SpanStack, StepBatch, StepOutput,
};
use std::time::Instant;

/// The KV cache of a decoder layer.
pub struct LayerCache<Buf> {
    /// The page table of the layer.
    pub table: KvTable,
    pub kv: KvLayer<Buf>,
}

/// The KV caches of the layers.
pub struct Caches<'a, Buf> {
    /// The caches of the decoder's layers.
    pub decoder: &'a mut [LayerCache<Buf>],
    /// The encoder's cache, one for all layers.
    pub scratch: Option<&'a mut KvLayer<Buf>>,
}

/// Inputs and outputs of a step.
pub struct StepIo<'a> {
    pub batch: &'a StepBatch,
    /// The logit biases that the sampling parameters of the batch refer to.
    pub biases: &'a [(u32, f32)],
    pub handoff: HandoffPorts<'a>,
    pub out: &'a mut StepOutput,
}

impl StepIo<'_> {
    /// Returns the inputs of sampling, and the output if this rank returns one.
    fn output(&mut self, is_returned: bool) -> (SamplingInputs<'_>, Option<&mut StepOutput>) {
        let inputs = SamplingInputs { biases: self.biases, late: self.handoff.late, width: None };
        (inputs, is_returned.then_some(&mut *self.out))
    }
}

/// Runs one step of the whole batch: for each layer, all rows. Encoder rows go first, and decoder rows may
/// belong to the same sequences. A shard runs its layers between the activations of the previous stage and
/// those for the next. A drafter makes its drafts first; without one, those of the batch are ignored. Fails
/// if the weights of a layer cannot be acquired; the step then has no results.
pub fn run_step<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    caches: Caches<B::Buf>,
    act: &mut Activations<B::Buf>,
    mut drafter: Option<&mut dyn Drafter<B>>,
    mut traffic: StepIo,
) -> Result<(), DeviceError> {
    check_tokens(traffic.batch, model.spec.vocab);
    b.begin_step(traffic.batch);
    copy_pages(b, traffic.batch, caches.decoder);
    match &mut drafter {
        Some(drafter) => draft(b, &mut **drafter, &mut traffic)?,
        None => assert!(!traffic.batch.has_drafted_tokens(), "drafts without a drafter; this is a bug"),
    }
    if let Some(to) = &mut traffic.handoff.output {
        to.encoder.clear();
        to.decoder.clear();
    }
    let encoder_rows = b.select_stack(SpanStack::Encoder);
    if encoder_rows > 0 {
        encode(b, model, caches.scratch, encoder_rows, act, &mut traffic)?;
    }
    let rows = b.select_stack(SpanStack::Decoder);
    let rows_of = StackRows { encoder: encoder_rows, decoder: rows };
    decode(b, model, caches.decoder, rows_of, act, drafter, &mut traffic)?;
    let met = encoder_rows > 0 && model.encoder.is_some() || rows > 0 && model.decoder.is_some();
    if !met {
        synchronize_ranks(b, act);
    }
    Ok(())
}

/// Copies the pages that a batch wants copied, in every layer.
pub fn copy_pages<B: Backend>(b: &mut B, batch: &StepBatch, caches: &mut [LayerCache<B::Buf>]) {
    for LayerCache { table, kv } in caches {
        b.copy_pages(*table, &batch.page_copies, kv);
    }
}

/// Makes the drafts of a step, and then maps its rows, which may have drafts among them.
fn draft<B: Backend>(
    b: &mut B,
    drafter: &mut dyn Drafter<B>,
    traffic: &mut StepIo,
) -> Result<(), DeviceError> {
    let StepIo { batch, out, .. } = traffic;
    let began = Instant::now();
    drafter.make_drafts(b, batch, out)?;
    if !batch.drafts.is_empty() {
        out.times.draft = began.elapsed();
        b.map_rows(batch);
    }
    Ok(())
}

/// Runs the current rows through a whole decoder-only model, within a step of another one.
pub fn run_decoder<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    caches: &mut [LayerCache<B::Buf>],
    act: &mut Activations<B::Buf>,
    mut traffic: StepIo,
) -> Result<(), DeviceError> {
    let rows = StackRows { encoder: 0, decoder: b.select_stack(SpanStack::Decoder) };
    decode(b, model, caches, rows, act, None, &mut traffic)
}

/// Numbers of rows of a step.
#[derive(Clone, Copy)]
struct StackRows {
    encoder: usize,
    decoder: usize,
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
    assert_eq!(foreign, None, "a token is not in the vocabulary of {vocab} tokens; this is a bug");
}

/// Runs the encoder rows through the local encoder layers. If the stage has layers of the decoder, keeps the
/// encoder output for them.
fn encode<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    scratch: Option<&mut KvLayer<B::Buf>>,
    rows: usize,
    act: &mut Activations<B::Buf>,
    traffic: &mut StepIo,
) -> Result<(), DeviceError> {
    let from = traffic.handoff.input.map(|from| &from.encoder);
    match (&mut model.encoder, &model.spec.encoder, scratch) {
        (Some(stack), Some(spec), Some(scratch)) => {
            enter_stack(b, stack, rows, from, act);
            for (index, layer) in spec.layers.iter().enumerate() {
                with_layer(b, stack, index, |b, stack, block| {
                    run_layer(b, stack, (layer, block), (KvTable::Scratch, scratch), rows, act);
                })?;
            }
            if model.role.ends_encoder {
                let batch = traffic.batch;
                let output = traffic.output(model.role.returns_output);
                finish_stack(b, stack, (SpanStack::Encoder, batch), rows, act, output);
            }
        }
        // An earlier stage has computed the encoder output.
        _ => receive_activations(b, rows, from, act),
    }
    if model.role.forwards_encoder_output {
        send_activations(b, rows, act, traffic.handoff.output.as_mut().map(|to| &mut to.encoder));
    }
    if model.decoder.is_some() {
        std::mem::swap(&mut act.x, &mut act.encoder_output);
    }
    Ok(())
}

/// Runs the decoder rows through the local decoder layers, the current rows being those of the decoder. Each
/// layer first stores the cross-attention keys and values of the encoder rows, which need the same weights.
fn decode<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    caches: &mut [LayerCache<B::Buf>],
    rows: StackRows,
    act: &mut Activations<B::Buf>,
    drafter: Option<&mut dyn Drafter<B>>,
    traffic: &mut StepIo,
) -> Result<(), DeviceError> {
    let (Some(stack), Some(spec)) = (&mut model.decoder, &model.spec.decoder) else { return Ok(()) };
    if rows.decoder > 0 {
        enter_stack(b, stack, rows.decoder, traffic.handoff.input.map(|from| &from.decoder), act);
    }
    let is_idle = rows.encoder + rows.decoder == 0;
    for ((index, layer), cache) in spec.layers.iter().enumerate().zip(caches).filter(|_| !is_idle) {
        with_layer(b, stack, index, |b, stack, block| {
            if rows.encoder > 0 {
                b.select_stack(SpanStack::Encoder);
                store_cross_kv(b, block, &mut cache.kv, rows.encoder, act);
                b.select_stack(SpanStack::Decoder);
            }
            if rows.decoder > 0 {
                let LayerCache { table, kv } = cache;
                run_layer(b, stack, (layer, block), (*table, kv), rows.decoder, act);
            }
        })?;
    }
    if rows.decoder == 0 {
        return Ok(());
    }
    match model.role.ends_decoder {
        true => {
            traffic.handoff.last_layer.send();
            let batch = traffic.batch;
            if let Some(drafter) = drafter {
                drafter.receive_hidden(b, batch, &act.x);
            }
            let output = traffic.output(model.role.returns_output);
            finish_stack(b, stack, (SpanStack::Decoder, batch), rows.decoder, act, output)
        }
        false => {
            let to = traffic.handoff.output.as_mut().map(|to| &mut to.decoder);
            send_activations(b, rows.decoder, act, to);
        }
    }
    Ok(())
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
    assert_eq!(from.len(), rows * act.row_bytes, "not the bytes of {rows} rows; this is a bug");
    b.upload(&mut act.x, 0, from);
}

/// Sends x to the next stage, if this rank has to send it.
fn send_activations<B: Backend>(b: &mut B, rows: usize, act: &Activations<B::Buf>, to: Option<&mut Vec<u8>>) {
    if let Some(to) = to {
        to.resize(rows * act.row_bytes, 0);
        b.download(&act.x, 0, to);
    }
}

/// Calls `use_layer` with the weights of a layer, which are acquired before and released after it.
fn with_layer<B: Backend>(
    b: &mut B,
    stack: &mut Stack<B::Buf>,
    index: usize,
    use_layer: impl FnOnce(&mut B, &Stack<B::Buf>, &LayerWeights<B::Buf>),
) -> Result<(), DeviceError> {
    stack.weights.acquire(b, index)?;
    use_layer(b, stack, stack.weights.layer(index));
    stack.weights.release(b, index);
    Ok(())
}

/// Runs one layer, which stores its keys and values in `cache`.
fn run_layer<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    (spec, block): (&LayerSpec, &LayerWeights<B::Buf>),
    (table, cache): (KvTable, &mut KvLayer<B::Buf>),
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    before_attention(b, spec, stack, block, rows, act);
    attention(b, &spec.attention, stack.relative_bias.as_ref(), table, cache, act);
    after_attention(b, spec, block, cache, rows, act);
}
