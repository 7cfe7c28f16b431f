//! The order of computation of a step: all rows of the batch, layer by layer, from the previous stage's
//! activations to those for the next stage. A layer is applied to one row batch after another, so the weights
//! of a layer that is not in memory are read once for all rows of the step.
//!
//! Invariant: this module contains no arithmetic; all of it is in [`super::forward`].

use super::activations::Activations;
use super::drafter::Drafter;
use super::forward::{after_attention, attention, before_attention, embed, finish_stack, store_cross_kv};
use super::layer_cache::LayerCache;
use super::offload::{StepTrace, StreamedCaches};
use super::spec::LayerSpec;
use super::weights::{LayerWeights, Model, Stack};
use mainstem_kernels::batch::split_typed_token;
use mainstem_kernels::{
    Backend, DeviceError, HandoffPorts, SamplingInputs, SpanStack, StepBatch, StepOutput,
};
use std::ops::Range;
use std::time::Instant;

/// The KV caches of the decoder's layers.
pub struct DecoderCaches<Buf> {
    pub layers: Vec<LayerCache<Buf>>,
    /// The caches whose pages are copied to the device, which have empty buffers in `layers`; `None` if there
    /// are none.
    pub streamed: Option<StreamedCaches<Buf>>,
}

/// The KV caches of all layers.
pub struct Caches<'a, Buf> {
    /// The caches of the decoder's layers.
    pub decoder: &'a mut DecoderCaches<Buf>,
    /// The encoder's cache, one for all layers.
    pub scratch: Option<&'a mut LayerCache<Buf>>,
}

/// Inputs and outputs of a step.
pub struct StepIo<'a> {
    pub batch: &'a StepBatch,
    /// The logit biases that the sampling parameters of the batch refer to.
    pub biases: &'a [(u32, f32)],
    pub handoff: HandoffPorts<'a>,
    pub out: &'a mut StepOutput,
    /// The record of the times of layers, if they are wanted.
    pub trace: Option<&'a StepTrace>,
}

impl StepIo<'_> {
    /// Returns the inputs of sampling, and the output if this rank returns one.
    fn output(&mut self, is_returned: bool) -> (SamplingInputs<'_>, Option<&mut StepOutput>) {
        let inputs = SamplingInputs { biases: self.biases, late: self.handoff.late, width: None };
        (inputs, is_returned.then_some(&mut *self.out))
    }
}

/// Runs one step of the whole batch: for each layer, all row batches. Encoder rows go first, and decoder rows
/// may belong to the same sequences. A shard runs its layers between the activations of the previous stage
/// and those for the next. A drafter makes its drafts first; without one, those of the batch are ignored.
/// Fails if the weights of a layer cannot be acquired; the step then has no results.
pub fn run_step<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    caches: Caches<B::Buf>,
    act: &mut Activations<B::Buf>,
    mut drafter: Option<&mut dyn Drafter<B>>,
    mut traffic: StepIo,
) -> Result<(), DeviceError> {
    check_tokens(traffic.batch, model.spec.vocab.max(model.spec.source_vocab));
    b.begin_step(traffic.batch);
    if let Some(streamed) = &mut caches.decoder.streamed {
        streamed.begin(b, traffic.batch)?;
    }
    if let Some(stack) = &mut model.decoder {
        stack.weights.begin_step(act.latent.has_openings);
    }
    copy_pages(b, traffic.batch, caches.decoder);
    match &mut drafter {
        Some(drafter) => draft(b, &mut **drafter, &mut traffic)?,
        None => assert!(!traffic.batch.has_drafted_tokens(), "drafts without a drafter; this is a bug"),
    }
    if let Some(to) = &mut traffic.handoff.output {
        to.encoder.clear();
        to.decoder.clear();
    }
    let [encoder_rows, rows] = [SpanStack::Encoder, SpanStack::Decoder].map(|stack| b.row_batches(stack) > 0);
    if encoder_rows {
        encode(b, model, caches.scratch, act, &mut traffic)?;
    }
    decode(b, model, caches.decoder, act, drafter, &mut traffic)?;
    let met = encoder_rows && model.encoder.is_some() || rows && model.decoder.is_some();
    if !met {
        synchronize_ranks(b, act);
    }
    Ok(())
}

/// Copies the pages that a batch wants copied, in every layer whose cache stays where it is. Others read them
/// from their sources.
pub fn copy_pages<B: Backend>(b: &mut B, batch: &StepBatch, caches: &mut DecoderCaches<B::Buf>) {
    let DecoderCaches { layers, streamed } = caches;
    for (index, LayerCache { table, kv, .. }) in layers.iter_mut().enumerate() {
        if streamed.as_ref().is_none_or(|streamed| !streamed.contains(index)) {
            b.copy_pages(*table, &batch.page_copies, kv);
        }
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
    caches: &mut DecoderCaches<B::Buf>,
    act: &mut Activations<B::Buf>,
    mut traffic: StepIo,
) -> Result<(), DeviceError> {
    decode(b, model, caches, act, None, &mut traffic)
}

/// Calls `compute` for each row batch of a stack, with its residual stream in `act` and the range of its rows
/// in the stack.
fn for_each_batch<B: Backend>(
    b: &mut B,
    stack: SpanStack,
    act: &mut Activations<B::Buf>,
    mut compute: impl FnMut(&mut B, &mut Activations<B::Buf>, Range<usize>),
) {
    for batch in 0..b.row_batches(stack) {
        let rows = b.select_rows(stack, batch);
        act.latent.is_open = stack == SpanStack::Decoder && rows.start >= act.latent.rows_before_openings;
        act.exchange(stack, batch);
        compute(b, act, rows);
        act.exchange(stack, batch);
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
    let mut ids = batch.tokens.iter().map(|token| split_typed_token(*token).0);
    let foreign = ids.find(|id| *id as usize >= vocab);
    assert_eq!(foreign, None, "a token is not in the vocabulary of {vocab} tokens; this is a bug");
}

/// Runs the encoder rows through the local encoder layers. If the stage has layers of the decoder, the
/// encoder output remains in the residual streams for them.
fn encode<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    scratch: Option<&mut LayerCache<B::Buf>>,
    act: &mut Activations<B::Buf>,
    traffic: &mut StepIo,
) -> Result<(), DeviceError> {
    let (from, which) = (traffic.handoff.input.map(|from| &from.encoder), SpanStack::Encoder);
    match (&mut model.encoder, &model.spec.encoder, scratch) {
        (Some(stack), Some(spec), Some(scratch)) => {
            for_each_batch(b, which, act, |b, act, rows| enter_stack(b, stack, rows, from, act));
            for (index, layer) in spec.layers.iter().enumerate() {
                with_layer(b, stack, (which, index), traffic.trace, |b, stack, block| {
                    run_layer(b, which, stack, (layer, block), scratch, act)
                })?;
            }
            if model.role.ends_encoder {
                let (batch, is_returned) = (traffic.batch, model.role.returns_output);
                for_each_batch(b, which, act, |b, act, rows| {
                    finish_stack(b, stack, (which, batch), rows, act, traffic.output(is_returned));
                });
            }
        }
        // An earlier stage has computed the encoder output.
        _ => for_each_batch(b, which, act, |b, act, rows| receive_activations(b, rows, from, act)),
    }
    if model.role.forwards_encoder_output {
        for_each_batch(b, which, act, |b, act, rows| {
            send_activations(b, rows, act, traffic.handoff.output.as_mut().map(|to| &mut to.encoder));
        });
    }
    Ok(())
}

/// Runs the decoder rows through the local decoder layers. Each layer first stores the cross-attention keys
/// and values of the encoder rows, which need the same weights.
fn decode<B: Backend>(
    b: &mut B,
    model: &mut Model<B::Buf>,
    caches: &mut DecoderCaches<B::Buf>,
    act: &mut Activations<B::Buf>,
    mut drafter: Option<&mut dyn Drafter<B>>,
    traffic: &mut StepIo,
) -> Result<(), DeviceError> {
    let (Some(stack), Some(spec)) = (&mut model.decoder, &model.spec.decoder) else { return Ok(()) };
    let (from, which) = (traffic.handoff.input.map(|from| &from.decoder), SpanStack::Decoder);
    for_each_batch(b, which, act, |b, act, rows| enter_stack(b, stack, rows, from, act));
    let is_idle = [SpanStack::Encoder, SpanStack::Decoder].iter().all(|stack| b.row_batches(*stack) == 0);
    for (index, layer) in spec.layers.iter().enumerate() {
        with_cache(caches, index, |cache| {
            // Only page copies.
            if is_idle {
                return Ok(());
            }
            with_layer(b, stack, (which, index), traffic.trace, |b, stack, block| {
                for_each_batch(b, SpanStack::Encoder, act, |b, act, rows| {
                    store_cross_kv(b, block, cache, rows.len(), act);
                });
                run_layer(b, which, stack, (layer, block), cache, act)
            })
        })?;
    }
    if b.row_batches(which) == 0 {
        return Ok(());
    }
    if !model.role.ends_decoder {
        for_each_batch(b, which, act, |b, act, rows| {
            send_activations(b, rows, act, traffic.handoff.output.as_mut().map(|to| &mut to.decoder));
        });
        return Ok(());
    }
    traffic.handoff.last_layer.send();
    let (batch, is_returned) = (traffic.batch, model.role.returns_output);
    for_each_batch(b, which, act, |b, act, rows| {
        if let Some(drafter) = &mut drafter {
            drafter.receive_hidden(b, batch, &act.x);
        }
        finish_stack(b, stack, (which, batch), rows, act, traffic.output(is_returned));
    });
    Ok(())
}

/// Computes or receives x, the input of the first local layer of a stack, and the rotary angles of its
/// positions.
fn enter_stack<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    rows: Range<usize>,
    from: Option<&Vec<u8>>,
    act: &mut Activations<B::Buf>,
) {
    match &stack.embedding {
        Some(embedding) => embed(b, embedding, rows.len(), act),
        None => receive_activations(b, rows, from, act),
    }
    for (rope, angles) in stack.ropes.iter().zip(&mut act.angles) {
        b.rope_angles(rope, angles);
    }
}

/// Loads x from the activations of the previous stage: those of `rows`, a row batch.
fn receive_activations<B: Backend>(
    b: &mut B,
    rows: Range<usize>,
    from: Option<&Vec<u8>>,
    act: &mut Activations<B::Buf>,
) {
    let from = from.expect("a stage without embeddings has a previous stage; this is a bug");
    let bytes = rows.start * act.row_bytes..rows.end * act.row_bytes;
    b.upload(&mut act.x, 0, from.get(bytes).expect("all rows were sent; anything else is a bug"));
}

/// Sends x, the activations of a row batch, to the next stage, if this rank has to send it.
fn send_activations<B: Backend>(
    b: &mut B,
    rows: Range<usize>,
    act: &Activations<B::Buf>,
    to: Option<&mut Vec<u8>>,
) {
    if let Some(to) = to {
        let start = to.len();
        to.resize(start + rows.len() * act.row_bytes, 0);
        b.download(&act.x, 0, &mut to[start..]);
    }
}

/// Calls `use_cache` with the cache of a layer, which is acquired before and released after it if its pages
/// are copied to the device.
fn with_cache<Buf>(
    caches: &mut DecoderCaches<Buf>,
    index: usize,
    use_cache: impl FnOnce(&mut LayerCache<Buf>) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let DecoderCaches { layers, streamed } = caches;
    let cache = &mut layers[index];
    let Some(streamed) = streamed.as_mut().filter(|streamed| streamed.has_work(index)) else {
        return use_cache(cache);
    };
    cache.values = streamed.acquire(index, &mut cache.kv)?;
    let outcome = use_cache(cache);
    cache.values = None;
    streamed.release(index, &mut cache.kv, outcome.is_err());
    outcome
}

/// Calls `use_layer` with the weights of a layer, which are acquired before and released after it.
fn with_layer<B: Backend>(
    b: &mut B,
    stack: &mut Stack<B::Buf>,
    (which, index): (SpanStack, usize),
    trace: Option<&StepTrace>,
    use_layer: impl FnOnce(&mut B, &Stack<B::Buf>, &LayerWeights<B::Buf>) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    stack.weights.acquire(b, index)?;
    let began = Instant::now();
    let outcome = use_layer(b, stack, stack.weights.layer(index));
    if let Some(trace) = trace {
        trace.end_layer(which, index, began);
    }
    stack.weights.release(b, index);
    outcome
}

/// Runs one layer for all row batches of a stack, which stores their keys and values in `cache`. Fails if
/// experts of the layer cannot be read.
fn run_layer<B: Backend>(
    b: &mut B,
    which: SpanStack,
    stack: &Stack<B::Buf>,
    (spec, block): (&LayerSpec, &LayerWeights<B::Buf>),
    cache: &mut LayerCache<B::Buf>,
    act: &mut Activations<B::Buf>,
) -> Result<(), DeviceError> {
    let mut outcome = Ok(());
    for_each_batch(b, which, act, |b, act, rows| {
        if outcome.is_ok() {
            before_attention(b, spec, stack, block, rows.len(), act);
            let parts = (&spec.attention, &block.attention);
            attention(b, parts, &stack.relative_biases, cache, rows.len(), act);
            outcome = after_attention(b, spec, block, cache, rows.len(), act);
        }
    });
    outcome
}
