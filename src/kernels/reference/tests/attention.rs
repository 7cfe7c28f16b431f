//! Tests of attention, against means and weights computed by hand.

use super::*;

/// Stores zero keys and the given values for `values.len()` positions of the current rows.
fn store_values(oracle: &mut Reference, table: KvTable, cache: &mut KvLayer<HostBuf>, values: &[f32]) {
    oracle.store_kv(table, &buf(&vec![0.0; values.len()]), &buf(values), cache);
}

fn cache(oracle: &mut Reference, pages: usize) -> KvLayer<HostBuf> {
    let layout = KvLayout {
        ty: QuantType::F32,
        pages,
        page_positions: 32,
        kv_heads: 1,
        k_dim: 1,
        v_dim: 1,
        v_in_k: false,
    };
    oracle.alloc_kv(layout).unwrap()
}

/// Returns the output of one head over `cache`, for `rows` rows with zero queries.
fn attend(
    oracle: &mut Reference,
    table: KvTable,
    mask: Mask,
    bias: Option<&RelativeBias<HostBuf>>,
    (cache, rows): (&KvLayer<HostBuf>, usize),
) -> Vec<f32> {
    let mut out = buf(&vec![0.0; rows]);
    let shape = AttentionShape { bias, ..AttentionShape::plain(1, 1.0, mask, table) };
    oracle.attention(&shape, &buf(&vec![0.0; rows]), cache, &mut out);
    out.f32().to_vec()
}

#[test]
fn attention_weighs_two_positions_by_their_scores() {
    let mut oracle = with_decoder_span(0, 2);
    let layout = KvLayout {
        ty: QuantType::F32,
        pages: 2,
        page_positions: 32,
        kv_heads: 1,
        k_dim: 2,
        v_dim: 1,
        v_in_k: false,
    };
    let mut cache = oracle.alloc_kv(layout).unwrap();
    oracle.store_kv(KvTable::Own, &buf(&[1.0, 0.0, 0.0, 2.0]), &buf(&[10.0, 20.0]), &mut cache);
    let mut out = buf(&[0.0; 4]);
    let q = buf(&[1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 0.0, 0.0]);
    let mask = Mask::Causal { window: None };
    let shape = AttentionShape {
        heads: 2,
        scale: 0.5,
        softcap: None,
        mask,
        table: KvTable::Own,
        bias: None,
        sinks: None,
        distances: None,
    };
    oracle.attention(&shape, &q, &cache, &mut out);
    // Position 0 attends only to itself. At position 1, head 0 has the scores 0.5 and 1, and head 1 has equal
    // scores.
    let second = 1.0 / (1.0 + (-0.5f64).exp());
    assert_near(out.f32(), &[10.0, 10.0, 10.0 + 10.0 * second, 15.0]);
    // With a softcap of 0.1, the scores become tanh(5) / 10 and tanh(10) / 10.
    oracle.attention(&AttentionShape { softcap: Some(0.1), ..shape }, &q, &cache, &mut out);
    let second = 1.0 / (1.0 + (0.1 * (5f64.tanh() - 10f64.tanh())).exp());
    assert_near(out.f32(), &[10.0, 10.0, 10.0 + 10.0 * second, 15.0]);
}

#[test]
fn a_sink_takes_its_part_of_the_weights() {
    let mut oracle = with_decoder_span(0, 2);
    let mut cache = cache(&mut oracle, 2);
    store_values(&mut oracle, KvTable::Own, &mut cache, &[3.0, 9.0]);
    let (mask, sinks) = (Mask::Causal { window: None }, buf(&[4f32.ln()]));
    let (scale, sinks) = (1.0, Some(&sinks));
    let shape = AttentionShape { sinks, ..AttentionShape::plain(1, scale, mask, KvTable::Own) };
    let mut out = buf(&[0.0; 2]);
    oracle.attention(&shape, &buf(&[0.0; 2]), &cache, &mut out);
    // All scores are 0, and the sink weighs as much as four of them.
    assert_near(out.f32(), &[3.0 / 5.0, 12.0 / 6.0]);
}

#[test]
fn a_row_sees_its_own_chunk_up_to_itself() {
    let mut oracle = with_decoder_span(0, 6);
    let mut cache = cache(&mut oracle, 2);
    store_values(&mut oracle, KvTable::Own, &mut cache, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let mut mean = |chunk| attend(&mut oracle, KvTable::Own, Mask::Chunked { chunk }, None, (&cache, 6));
    assert_near(&mean(4), &[0.0, 0.5, 1.0, 1.5, 4.0, 4.5]);
    assert_near(&mean(1), &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_near(&mean(9), &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
}

#[test]
fn a_causal_window_counts_the_row_itself() {
    let mut oracle = with_decoder_span(0, 6);
    let mut cache = cache(&mut oracle, 2);
    store_values(&mut oracle, KvTable::Own, &mut cache, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let mut mean = |window| attend(&mut oracle, KvTable::Own, Mask::Causal { window }, None, (&cache, 6));
    assert_near(&mean(None), &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
    assert_near(&mean(Some(3)), &[0.0, 0.5, 1.0, 2.0, 3.0, 4.0]);
    assert_near(&mean(Some(1)), &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn encoder_rows_attend_to_their_own_input_only() {
    let mut oracle = with_spans(&[encoder_span(1, 4), encoder_span(0, 3)]);
    assert_eq!(oracle.select_stack(SpanStack::Encoder), 7);
    let mut cache = cache(&mut oracle, LIMITS.scratch_positions() / 32);
    store_values(&mut oracle, KvTable::Scratch, &mut cache, &[1.0, 2.0, 3.0, 6.0, 50.0, 60.0, 100.0]);
    let mut mean = |mask| attend(&mut oracle, KvTable::Scratch, mask, None, (&cache, 7));
    assert_near(&mean(Mask::Bidirectional { window: None }), &[3.0, 3.0, 3.0, 3.0, 70.0, 70.0, 70.0]);
    assert_near(
        &mean(Mask::Bidirectional { window: Some(1) }),
        &[1.5, 2.0, 11.0 / 3.0, 4.5, 55.0, 70.0, 80.0],
    );
    assert_near(&mean(Mask::Causal { window: None }), &[1.0, 1.5, 2.0, 3.0, 50.0, 55.0, 70.0]);
}

#[test]
fn decoder_rows_attend_to_the_encoder_input_through_the_cross_table() {
    let hole = Span { table: SpanTable::Null, ..span(1, 0, 1) };
    let without_encoder = Span { encoder_len: 0, ..span(1, 0, 1) };
    let mut oracle =
        with_spans(&[encoder_span(0, 3), encoder_span(1, 2), span(0, 5, 2), hole, without_encoder]);
    let mut cache = cache(&mut oracle, 5);
    oracle.select_stack(SpanStack::Encoder);
    store_values(&mut oracle, KvTable::Cross, &mut cache, &[1.0, 2.0, 6.0, 50.0, 70.0]);
    assert_eq!(oracle.select_stack(SpanStack::Decoder), 4);
    let bidirectional = Mask::Bidirectional { window: None };
    assert_near(
        &attend(&mut oracle, KvTable::Cross, bidirectional, None, (&cache, 4)),
        &[3.0, 3.0, 0.0, 0.0],
    );
    // Neither of the own pages was written.
    let own = attend(&mut oracle, KvTable::Own, Mask::Causal { window: None }, None, (&cache, 4));
    assert_near(&own, &[0.0; 4]);
}

#[test]
fn alibi_decays_with_distance_and_t5_distinguishes_sides() {
    let mut oracle = with_decoder_span(0, 3);
    let mut cached = cache(&mut oracle, 2);
    store_values(&mut oracle, KvTable::Own, &mut cached, &[1.0, 10.0, 100.0]);
    // A slope of ln 2 halves the weight with every position: entries for key - query from -2 to 2.
    let slope = std::f32::consts::LN_2;
    let table = buf(&[-2.0 * slope, -slope, 0.0, 99.0, 99.0]);
    let alibi = RelativeBias { table, heads: 1, reach: 3 };
    let causal = Mask::Causal { window: None };
    let got = attend(&mut oracle, KvTable::Own, causal, Some(&alibi), (&cached, 3));
    assert_near(&got, &[1.0, 10.5 / 1.5, 105.25 / 1.75]);
    // Weights 8, 4, 1, 2, 16 for keys from two positions before to two positions after the query.
    let mut oracle = with_spans(&[encoder_span(0, 3)]);
    oracle.select_stack(SpanStack::Encoder);
    let mut cached = cache(&mut oracle, LIMITS.scratch_positions() / 32);
    store_values(&mut oracle, KvTable::Scratch, &mut cached, &[1.0, 10.0, 100.0]);
    let table = buf(&[8f32, 4.0, 1.0, 2.0, 16.0].map(f32::ln));
    let bidirectional = RelativeBias { table, heads: 1, reach: 3 };
    let got = attend(
        &mut oracle,
        KvTable::Scratch,
        Mask::Bidirectional { window: None },
        Some(&bidirectional),
        (&cached, 3),
    );
    assert_near(
        &got,
        &[(1.0 + 20.0 + 1600.0) / 19.0, (4.0 + 10.0 + 200.0) / 7.0, (8.0 + 40.0 + 100.0) / 13.0],
    );
}

/// The case of the FlexGen paper: of 20 earlier positions a tenth, that is two, and the current one. Values
/// that are not selected are not read, and the softmax weights are those over all positions.
#[test]
fn a_generated_token_attends_to_a_fraction_of_the_values() {
    let attended = Fraction::new(0.1).expect("a tenth is a valid fraction");
    let mut oracle = Reference::new();
    oracle.prepare(&StepLimits { rows: 21, attended_fraction: attended, ..LIMITS }).unwrap();
    let page = TableUpdate { slot: 0, table: KvTable::Own, index: 0, page: 1 };
    let past = StepBatch { table_updates: vec![page], spans: vec![span(0, 0, 20)], ..StepBatch::default() };
    oracle.begin_step(&StepBatch { tokens: vec![2; 20], ..past });
    // The scores equal the keys: position 3 has the largest, and 15 ties with 11, which comes first.
    let mut keys = [0.0; 20];
    (keys[3], keys[7], keys[11], keys[15]) = (2.0, 0.5, 1.0, 1.0);
    let mut values = [f32::NAN; 20];
    (values[3], values[11]) = (10.0, 100.0);
    let mut cache = cache(&mut oracle, 2);
    oracle.store_kv(KvTable::Own, &buf(&keys), &buf(&values), &mut cache);
    oracle.end_step();
    let generated = Span { tokens: SpanTokens::Last, ..span(0, 20, 1) };
    oracle.begin_step(&StepBatch { spans: vec![generated], ..StepBatch::default() });
    oracle.store_kv(KvTable::Own, &buf(&[-1.0]), &buf(&[1000.0]), &mut cache);
    let (mask, table) = (Mask::Causal { window: None }, KvTable::Own);
    let shape = AttentionShape::plain(1, 1.0, mask, table);
    let mut out = buf(&[0.0]);
    oracle.attention(&shape, &buf(&[1.0]), &cache, &mut out);
    let all: f64 = keys.iter().map(|key| f64::from(*key).exp()).sum::<f64>() + (-1f64).exp();
    assert_near(out.f32(), &[(10.0 * 2f64.exp() + 100.0 * 1f64.exp() + 1000.0 * (-1f64).exp()) / all]);
}

#[test]
fn the_largest_scores_are_selected_ties_by_index() {
    let half = Fraction::new(0.5).expect("a half is a valid fraction");
    assert_eq!(select_top_k(&[1.0, 3.0, f64::NAN, 3.0, 2.0, 3.0, 0.0], half), [1, 3, 5, 6]);
    assert_eq!(select_top_k(&[3.0, 1.0, 3.0, 3.0, 9.0], half), [0, 2, 4]);
    assert_eq!(select_top_k(&[f64::NAN, f64::NEG_INFINITY, 5.0], half), [0, 2]);
    assert_eq!(select_top_k(&[5.0], half), [0]);
}
