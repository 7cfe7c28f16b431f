//! The order in which a step goes through the layers: all rows of the batch, layer by layer, from what the stage before gave to
//! what the next one gets.
//!
//! Invariant: no arithmetic is here; it is all in [`super::forward`].

use super::activations::Activations;
use super::forward::{after_attention, attention, before_attention, embed, end, remember};
use super::load::{Model, Stack};
use super::spec::LayerSpec;
use mainstem_kernels::{Backend, Flow, KvLayer, KvTable, SpanStack, StepBatch, StepOutput};

/// What the layers of a stack write their keys and values to.
pub struct Caches<'a, Buf> {
    /// The decoder's, layer by layer.
    pub own: &'a mut [KvLayer<Buf>],
    /// The encoder's, one for all layers.
    pub scratch: Option<&'a mut KvLayer<Buf>>,
}

/// What comes into a step, and what goes out.
pub struct Traffic<'a> {
    pub batch: &'a StepBatch,
    pub flow: Flow<'a>,
    pub out: &'a mut StepOutput,
}

/// One step of the whole batch: for each layer, every row. The serving schedule. The encoder's rows go first, and the
/// decoder's may be of the same sequences. Of a part of a model, its layers, between what stages before and behind do.
pub fn step_major<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    mut caches: Caches<B::Buf>,
    act: &mut Activations<B::Buf>,
    mut traffic: Traffic,
) {
    check_tokens(traffic.batch, model.spec.vocab);
    b.begin(traffic.batch);
    for cache in caches.own.iter_mut() {
        b.copy_pages(&traffic.batch.copies, cache);
    }
    if let Some(to) = &mut traffic.flow.to {
        to.encoder.clear();
        to.decoder.clear();
    }
    let sources = b.select(SpanStack::Encoder);
    if sources > 0 {
        encode(b, model, &mut caches, sources, act, &mut traffic);
    }
    let rows = b.select(SpanStack::Decoder);
    if rows > 0 {
        decode(b, model, caches.own, rows, act, &mut traffic);
    }
    let met = sources > 0 && model.encoder.is_some() || rows > 0 && model.decoder.is_some();
    if !met {
        meet(b, act);
    }
}

/// The members of a stage exchange something in each of its layers. Where a step has no rows for any, they meet over a number
/// that nobody reads.
fn meet<B: Backend>(b: &mut B, act: &mut Activations<B::Buf>) {
    b.reduce(1, 1, &mut act.y);
}

/// No member of a stage can know by itself whether a token that it has no row for is another's.
fn check_tokens(batch: &StepBatch, vocab: usize) {
    let foreign = batch.tokens.iter().find(|token| **token as usize >= vocab);
    assert_eq!(foreign, None, "a token beyond the {vocab} there are; this is a bug");
}

/// The encoder's rows, through its layers if some are here, and into what the decoder's remember of them.
fn encode<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    caches: &mut Caches<B::Buf>,
    rows: usize,
    act: &mut Activations<B::Buf>,
    traffic: &mut Traffic,
) {
    let from = traffic.flow.from.map(|from| &from.encoder);
    match (&model.encoder, &model.spec.encoder, &mut caches.scratch) {
        (Some(stack), Some(spec), Some(scratch)) => {
            arrive(b, stack, rows, from, act);
            for (index, layer) in spec.layers.iter().enumerate() {
                block(b, stack, layer, index, (KvTable::Scratch, scratch), rows, act);
            }
            if model.seams.ends_encoder {
                let out = model.seams.answers.then_some(&mut *traffic.out);
                end(b, stack, (SpanStack::Encoder, traffic.batch), rows, act, out);
            }
        }
        // A stage before has made them.
        _ => receive(b, rows, from, act),
    }
    if let Some(decoder) = &model.decoder {
        remember(b, decoder, caches.own, rows, act);
    }
    if model.seams.hands_on_source {
        hand_on(b, rows, act, traffic.flow.to.as_mut().map(|to| &mut to.encoder));
    }
}

/// The decoder's rows, through its layers if some are here.
fn decode<B: Backend>(
    b: &mut B,
    model: &Model<B::Buf>,
    caches: &mut [KvLayer<B::Buf>],
    rows: usize,
    act: &mut Activations<B::Buf>,
    traffic: &mut Traffic,
) {
    let (Some(stack), Some(spec)) = (&model.decoder, &model.spec.decoder) else { return };
    arrive(b, stack, rows, traffic.flow.from.map(|from| &from.decoder), act);
    for (index, cache) in caches.iter_mut().enumerate() {
        block(b, stack, &spec.layers[index], index, (KvTable::Own, cache), rows, act);
    }
    let out = model.seams.answers.then_some(&mut *traffic.out);
    match model.seams.ends_decoder {
        true => end(b, stack, (SpanStack::Decoder, traffic.batch), rows, act, out),
        false => hand_on(b, rows, act, traffic.flow.to.as_mut().map(|to| &mut to.decoder)),
    }
}

/// x = the rows that a stack's first layer here reads, and the angles of their positions.
fn arrive<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    rows: usize,
    from: Option<&Vec<u8>>,
    act: &mut Activations<B::Buf>,
) {
    match &stack.embedding {
        Some(embedding) => embed(b, embedding, rows, act),
        None => receive(b, rows, from, act),
    }
    for (rope, angles) in stack.ropes.iter().zip(&mut act.angles) {
        b.angles(rope, angles);
    }
}

/// x = what the stage before gave.
fn receive<B: Backend>(b: &mut B, rows: usize, from: Option<&Vec<u8>>, act: &mut Activations<B::Buf>) {
    let from = from.expect("there is a stage before one without embeddings; this is a bug");
    assert_eq!(from.len(), rows * act.hidden * size_of::<f32>(), "bytes of {rows} rows; else this is a bug");
    b.upload(&mut act.x, 0, from);
}

/// Gives x to the next stage, if it is this member's to give.
fn hand_on<B: Backend>(b: &mut B, rows: usize, act: &Activations<B::Buf>, to: Option<&mut Vec<u8>>) {
    if let Some(to) = to {
        to.resize(rows * act.hidden * size_of::<f32>(), 0);
        b.download(&act.x, 0, to);
    }
}

/// One layer, whose keys and values go to that cache.
fn block<B: Backend>(
    b: &mut B,
    stack: &Stack<B::Buf>,
    spec: &LayerSpec,
    index: usize,
    (table, cache): (KvTable, &mut KvLayer<B::Buf>),
    rows: usize,
    act: &mut Activations<B::Buf>,
) {
    let block = stack.source.layer(index);
    before_attention(b, spec, stack, block, rows, act);
    attention(b, &spec.attention, stack.distance.as_ref(), table, cache, act);
    after_attention(b, spec, block, cache, rows, act);
}
