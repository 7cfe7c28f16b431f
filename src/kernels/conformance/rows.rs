//! Tests of the map of rows to slots, tokens, positions and pages, against results that are written out.
//!
//! The reference backend shares the map with others, so a comparison with it would not find an error there.
//! Invariant: keys and queries are zero, so the output of a row is the mean of the values that it sees.

use super::inputs::*;
use super::rig::*;
use mainstem_kernels::backend::{AttentionShape, Backend, KvLayer, KvLayout, KvTable, Mask};
use mainstem_kernels::batch::{
    Page, SlotMove, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, TableUpdate,
};
use mainstem_kernels::quant::QuantType;

/// Width of keys and values.
const DIM: usize = 8;
/// Causal attention to all earlier positions.
const CAUSAL: Mask = Mask::Causal { window: None };
/// Attention to the whole encoder input.
const WHOLE: Mask = Mask::Bidirectional { window: None };

/// Returns a span of the decoder.
fn span(slot: u32, start: u32, tokens: SpanTokens, encoder_len: u32) -> Span {
    Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot,
        start,
        tokens,
        table: SpanTable::Own,
        reserved: 100,
        encoder_len,
        output: SpanOutput::None,
    }
}

/// Returns a span of `len` tokens of the batch, from number `at` on.
fn given(at: u32, len: u32) -> SpanTokens {
    SpanTokens::Given { at, len }
}

fn encoder_span(slot: u32, at: u32, len: u32) -> Span {
    let (stack, table) = (SpanStack::Encoder, SpanTable::Scratch);
    Span { stack, table, ..span(slot, 0, given(at, len), len) }
}

fn hole(slot: u32) -> Span {
    Span { table: SpanTable::Null, reserved: 0, ..span(slot, 0, SpanTokens::Last, 0) }
}

fn updates(entries: &[(u32, KvTable, u32, Page)]) -> Vec<TableUpdate> {
    let update = |&(slot, table, index, page)| TableUpdate { slot, table, index, page };
    entries.iter().map(update).collect()
}

/// Stores the values of the rows of a stack.
fn store<B: Backend>(
    rig: &mut Rig<B>,
    stack: SpanStack,
    table: KvTable,
    values: &[f32],
    cache: &mut KvLayer<B::Buf>,
) {
    assert_eq!(rig.backend.select_stack(stack), values.len(), "rows of the {stack:?}");
    let wide: Vec<f32> = values.iter().flat_map(|value| [*value; DIM]).collect();
    let (k, v) = (rig.input(&vec![0.0; wide.len()]), rig.input(&wide));
    rig.backend.store_kv(table, &k, &v, cache);
}

/// Asserts the mean of the values that each row of a stack sees.
fn assert_means<B: Backend>(
    rig: &mut Rig<B>,
    stack: SpanStack,
    (table, mask): (KvTable, Mask),
    cache: &KvLayer<B::Buf>,
    want: &[f32],
) {
    assert_eq!(rig.backend.select_stack(stack), want.len(), "rows of the {stack:?}");
    let q = rig.input(&vec![0.0; want.len() * DIM]);
    let mut out = rig.output(want.len() * DIM);
    let shape = AttentionShape::plain(1, 1.0, mask, table);
    rig.backend.attention(&shape, &q, cache, &mut out);
    let what = format_args!("means through the {table:?} table, {mask:?}");
    let got = rig.read(&out, want.len() * DIM, what);
    let want: Vec<f32> = want.iter().flat_map(|value| [*value; DIM]).collect();
    assert_close(what, &got, &want, 1e-6, |_| 40.0);
}

/// Tests which values the rows of a step see: through the tables of their slot, in another slot after a move,
/// on a second page, and in the encoder input of their sequence.
pub fn visible_values<B: Backend>(make: &impl Fn() -> B) {
    let (own, cross, decoder, encoder) =
        (KvTable::Own, KvTable::Cross, SpanStack::Decoder, SpanStack::Encoder);
    let mut rig = Rig::new(make(), limits(32));
    let scratch_pages = rig.limits.scratch_positions() / 32;
    let mut cache_of = |pages| {
        let (ty, page_positions) = (QuantType::F32, 32);
        rig.cache(KvLayout { ty, pages, page_positions, kv_heads: 1, k_dim: DIM, v_dim: DIM, v_in_k: false })
    };
    let (mut cache, mut scratch) = (cache_of(POOL_PAGES), cache_of(scratch_pages));

    // An encoder input of 10 and 30, another of 7; prompts 1, 3 and 8; and a hole of 5.
    rig.begin(StepBatch {
        table_updates: updates(&[(0, own, 0, 5), (0, own, 1, 3), (1, own, 0, 9), (0, cross, 0, 7)]),
        spans: vec![
            encoder_span(0, 0, 2),
            encoder_span(3, 2, 1),
            span(0, 0, given(3, 2), 2),
            span(1, 0, given(5, 1), 0),
            hole(2),
        ],
        tokens: vec![0; 6],
        ..StepBatch::default()
    });
    let scratch_table = KvTable::Scratch;
    store(&mut rig, encoder, scratch_table, &[10.0, 30.0, 7.0], &mut scratch);
    assert_means(&mut rig, encoder, (scratch_table, WHOLE), &scratch, &[20.0, 20.0, 7.0]);
    store(&mut rig, encoder, cross, &[10.0, 30.0, 7.0], &mut cache);
    store(&mut rig, decoder, own, &[1.0, 3.0, 8.0, 5.0], &mut cache);
    assert_means(&mut rig, decoder, (own, CAUSAL), &cache, &[1.0, 2.0, 8.0, 5.0]);
    assert_means(&mut rig, decoder, (cross, WHOLE), &cache, &[20.0, 20.0, 0.0, 0.0]);

    // The first sequence moves to slot 4, then the second one to slot 0. Their next tokens are 5, 2 and 11.
    rig.begin(StepBatch {
        moves: vec![SlotMove { from: 0, to: 4 }],
        spans: vec![span(4, 2, given(0, 1), 2), span(1, 1, SpanTokens::Last, 0)],
        tokens: vec![0],
        ..StepBatch::default()
    });
    store(&mut rig, decoder, own, &[5.0, 2.0], &mut cache);
    assert_means(&mut rig, decoder, (own, CAUSAL), &cache, &[3.0, 5.0]);
    assert_means(&mut rig, decoder, (cross, WHOLE), &cache, &[20.0, 0.0]);
    rig.begin(StepBatch {
        moves: vec![SlotMove { from: 1, to: 0 }],
        spans: vec![span(0, 2, SpanTokens::Last, 0)],
        ..StepBatch::default()
    });
    store(&mut rig, decoder, own, &[11.0], &mut cache);
    assert_means(&mut rig, decoder, (own, CAUSAL), &cache, &[7.0]);

    // Positions 3 to 33 of the first sequence: the last two are on its second page.
    let values: Vec<f32> = (3..34).map(|position| if position < 32 { 4.0 } else { 40.0 }).collect();
    rig.begin(StepBatch {
        spans: vec![span(4, 3, given(0, 31), 2)],
        tokens: vec![0; 31],
        ..StepBatch::default()
    });
    store(&mut rig, decoder, own, &values, &mut cache);
    let window = |window| (own, Mask::Causal { window: Some(window) });
    let mut pairs = vec![4.0; 31];
    (pairs[0], pairs[29], pairs[30]) = (4.5, 22.0, 40.0);
    assert_means(&mut rig, decoder, window(2), &cache, &pairs);
    pairs.splice(.., values);
    assert_means(&mut rig, decoder, window(1), &cache, &pairs);
}

/// Tests the tokens and the positions of rows: of both stacks, of prompt chunks, holes and last tokens.
pub fn row_tokens<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let numbers: Vec<f32> = (0..57).map(|number| number as f32).collect();
    let table = rig.weight(QuantType::F32, 57, &numbers);
    rig.begin(StepBatch {
        spans: vec![
            encoder_span(5, 2, 2),
            span(1, 30, given(4, 3), 0),
            hole(2),
            span(6, 9, SpanTokens::Generated { at: 0, len: 2 }, 0),
        ],
        tokens: vec![41, 42, 13, 14, 25, 26, 27],
        ..StepBatch::default()
    });
    for (stack, tokens, positions) in [
        (SpanStack::Encoder, &[13.0, 14.0][..], &[0.0, 1.0][..]),
        (SpanStack::Decoder, &[25.0, 26.0, 27.0, 0.0, 41.0, 42.0], &[30.0, 31.0, 32.0, 0.0, 9.0, 10.0]),
    ] {
        assert_eq!(rig.backend.select_stack(stack), tokens.len(), "rows of the {stack:?}");
        let mut x = rig.output(tokens.len());
        rig.backend.embed(&table, 0, &mut x);
        assert_eq!(rig.read(&x, tokens.len(), format_args!("tokens")), tokens, "tokens of the {stack:?}");
        let mut x = rig.in_out(&vec![0.0; tokens.len()]);
        rig.backend.embed_positions(&table, 0, 0, &mut x);
        let got = rig.read(&x, tokens.len(), format_args!("positions"));
        assert_eq!(got, positions, "positions of the {stack:?}");
    }
}
