//! Tests of the reference backend, against small cases computed by other means.

use super::formulas::route;
use super::*;
use crate::backend::{
    DynamicNtk, Expert, ExpertBiases, ExpertGroups, Fraction, GroupScore, Mask, NormKind, RelativeBias,
    Scoring, Xielu,
};
use crate::batch::{Span, SpanModel, SpanOutput, SpanTable, SpanTokens, TableUpdate};
use crate::host::HostMemory;

mod attention;

fn buf(values: &[f32]) -> HostBuf {
    let mut buf = HostMemory::default().zeroed(values.len() * 4).unwrap();
    buf.f32_mut().copy_from_slice(values);
    buf
}

fn assert_near(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() < 1e-6 * want.abs().max(1.0), "{got} is not {want}");
    }
}

const LIMITS: StepLimits = StepLimits {
    slots: 2,
    rows: 16,
    batch_rows: usize::MAX,
    logit_rows: 4,
    positions: 32,
    encoder_positions: 8,
    page_positions: 32,
    window: None,
    top_logprobs: 4,
    vocab: 4,
    hidden: 4,
    drafts: 0,
    draft_logits: false,
    counts_tokens: false,
    opening_rows: 0,
    attended_fraction: Fraction::ONE,
};

/// Returns a span of token 2 in a sequence with 20 reserved tokens and an encoder input of 3 tokens.
fn span(slot: u32, start: u32, len: u32) -> Span {
    Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot,
        start,
        tokens: SpanTokens::Given { at: 0, len },
        table: SpanTable::Own,
        reserved: 20,
        encoder_len: 3,
        output: SpanOutput::None,
    }
}

fn encoder_span(slot: u32, len: u32) -> Span {
    Span { stack: SpanStack::Encoder, table: SpanTable::Scratch, ..span(slot, 0, len) }
}

/// Returns a backend whose current rows are those of the spans. Slot s has page 1 + 2s, and page 2 + 2s for
/// its encoder input.
fn with_spans(spans: &[Span]) -> Reference {
    let mut oracle = Reference::new();
    oracle.prepare(&LIMITS).unwrap();
    let entry = |slot, table, page| TableUpdate { slot, table, index: 0, page };
    let tables = (0..2).flat_map(|slot| {
        [entry(slot, KvTable::Own, 1 + 2 * slot), entry(slot, KvTable::Cross, 2 + 2 * slot)]
    });
    let (spans, tables) = (spans.to_vec(), tables.collect());
    oracle.begin_step(&StepBatch {
        spans,
        tokens: vec![2; 16],
        table_updates: tables,
        ..StepBatch::default()
    });
    oracle
}

fn with_decoder_span(start: u32, len: u32) -> Reference {
    with_spans(&[span(0, start, len)])
}

fn matrix(oracle: &mut Reference, n: usize, values: &[f32]) -> Weight<HostBuf> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    oracle.upload_weight(QuantType::F32, n, values.len() / n, &bytes).unwrap()
}

#[test]
fn norms_divide_by_the_deviation() {
    let mut y = buf(&[0.0; 2]);
    let norm =
        Norm { kind: NormKind::Rms, weight: Some(buf(&[1.0, 0.5])), bias: None, sets: 1, width: 2, eps: 0.0 };
    with_decoder_span(0, 1).norm(1, &norm, &buf(&[3.0, 4.0]), &mut y);
    // The mean of 9 and 16 is 12.5.
    assert_near(y.f32(), &[3.0 / 12.5f64.sqrt(), 2.0 / 12.5f64.sqrt()]);
    let norm = Norm { eps: 12.5, ..norm };
    with_decoder_span(0, 1).norm(1, &norm, &buf(&[3.0, 4.0]), &mut y);
    assert_near(y.f32(), &[0.6, 0.4]);
    // The mean of 1, 3 and 8 is 4, and the variance 26 / 3.
    let mut x = buf(&[1.0, 3.0, 8.0]);
    let (weight, bias) = (Some(buf(&[1.0, 2.0, 0.5])), Some(buf(&[0.0, 0.25, 1.0])));
    let norm = Norm { kind: NormKind::Layer, weight, bias, sets: 1, width: 3, eps: 1.0 / 3.0 };
    with_decoder_span(0, 1).norm_in_place(1, &norm, &mut x);
    assert_near(x.f32(), &[-1.0, -2.0 / 3.0 + 0.25, 2.0 / 3.0 + 1.0]);
}

#[test]
fn rope_rotates_the_pairs_of_its_style_only() {
    let row = [0.3f64, 1.1];
    let angles: Vec<f32> = row.iter().flat_map(|a| [a.cos() as f32, a.sin() as f32]).collect();
    let table = || buf(&[&[9.0; 4][..], &angles].concat());
    let [(c0, s0), (c1, s1)] = row.map(|a| (a.cos(), a.sin()));
    let rotate = |style| {
        let (mut x, mut angles) = (buf(&[1.0, 2.0, 3.0, 4.0, 5.0]), buf(&[0.0; 4]));
        let rope =
            Rope { tables: vec![(usize::MAX, table())], positions: 2, dims: 4, style, dynamic_ntk: None };
        let mut oracle = with_decoder_span(1, 1);
        oracle.rope_angles(&rope, &mut angles);
        oracle.rope(&rope, &angles, 1, 5, &mut x);
        x.f32().to_vec()
    };
    let half_pairs = [c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, s0 + 3.0 * c0, 2.0 * s1 + 4.0 * c1, 5.0];
    assert_near(&rotate(RopeStyle::NeoX), &half_pairs);
    let adjacent_pairs = [c0 - 2.0 * s0, s0 + 2.0 * c0, 3.0 * c1 - 4.0 * s1, 3.0 * s1 + 4.0 * c1, 5.0];
    assert_near(&rotate(RopeStyle::GptJ), &adjacent_pairs);
}

#[test]
fn angles_depend_on_the_reserved_length() {
    let table = |value: f32| buf(&[value; 16 * 4]);
    let tables = vec![(10, table(1.0)), (20, table(2.0)), (30, table(3.0))];
    let rope = Rope { tables, positions: 16, dims: 4, style: RopeStyle::NeoX, dynamic_ntk: None };
    let first = |rope: &Rope<HostBuf>, reserved| {
        let mut angles = buf(&[0.0; 4]);
        with_spans(&[Span { reserved, ..span(0, 7, 1) }]).rope_angles(rope, &mut angles);
        angles.f32().to_vec()
    };
    let bounds = [(1, 1.0), (10, 1.0), (11, 2.0), (20, 2.0), (21, 3.0), (31, 3.0)];
    for (reserved, value) in bounds {
        assert_eq!(first(&rope, reserved), [value; 4], "{reserved} reserved");
    }
    // With 18 reserved positions, a context of 12 and factor 2, the base grows by 2 * 18 / 12 - 1 = 2 to the
    // power of 4 / 2: to 40,000.
    let stretch = DynamicNtk { theta: 10_000.0, factor: 2.0, context: 12 };
    let rope = Rope { dynamic_ntk: Some(stretch), ..rope };
    let (slow, fast) = (7.0 / 200f64, 7f64);
    assert_near(&first(&rope, 18), &[fast.cos(), fast.sin(), slow.cos(), slow.sin()]);
    assert_eq!(first(&rope, 12), [2.0; 4], "within the context");
}

#[test]
fn the_error_function_has_its_tabulated_values() {
    let tabulated = [
        (0.0, 1.0),
        (0.5, 0.4795001221869535),
        (1.0, 0.15729920705028513),
        (2.0, 0.004677734981047266),
        (2.9, 4.109_787_809_945_884e-5),
        (3.0, 2.209049699858544e-05),
        (4.0, 1.541725790028002e-08),
        (6.0, 2.1519736712498913e-17),
        (-1.0, 1.8427007929497148),
        (-4.0, 1.999999984582742),
    ];
    for (x, value) in tabulated {
        assert!((erfc(x) - value).abs() <= 1e-10 * value, "erfc({x}) is {:e}, not {value:e}", erfc(x));
    }
}

#[test]
fn activations_give_their_formulas() {
    let mut oracle = with_decoder_span(0, 1);
    let mut of = |act, x: &[f32]| {
        let mut x = buf(x);
        oracle.activate(1, x.len() / 4, act, &mut x, None);
        x.f32().to_vec()
    };
    assert_near(&of(Activation::Relu, &[-2.0, 0.0, 3.0]), &[0.0, 0.0, 3.0]);
    assert_near(&of(Activation::SquaredRelu, &[-2.0, 0.0, 3.0]), &[0.0, 0.0, 9.0]);
    let numbers = Xielu { positive: 2.0, negative: 3.0, linear: 0.5, bound: -0.5 };
    let below = |x: f64| 3.0 * (x.min(-0.5).exp_m1() - x) + 0.5 * x;
    let want = [below(-2.0), below(-0.25), below(0.0), 2.5];
    assert_near(&of(Activation::Xielu(numbers), &[-2.0, -0.25, 0.0, 1.0]), &want);
    assert_near(&of(Activation::Gelu, &[1.0, -3.0]), &[0.8413447460685429, -0.00404969409489031]);
    assert_near(&of(Activation::GeluTanh, &[1.0, -2.0]), &[0.8411919906082768, -0.045_402_305_912_225_9]);
    assert_near(&of(Activation::QuickGelu, &[2.0, 0.0]), &[1.9356586231442083, 0.0]);
    assert_near(&of(Activation::Tanh, &[0.5, -40.0]), &[0.46211715726000975, -1.0]);
    let mut gate = buf(&[2.0, 9.0, -2.0, 2.0]);
    oracle.activate(1, 4, Activation::ClampedSwiglu, &mut gate, Some(&buf(&[0.5, 7.5, -9.0, -1.0])));
    assert_near(gate.f32(), &[1.5 * 1.9356586231442083, 8.0 * 6.9999533, -6.0 * -0.0643413768557917, 0.0]);
    let mut gate = buf(&[0.0, 1.0, -2.0]);
    oracle.activate(1, 3, Activation::Silu, &mut gate, Some(&buf(&[7.0, 3.0, 1.0])));
    assert_near(gate.f32(), &[0.0, 3.0 / (1.0 + (-1f64).exp()), -2.0 / (1.0 + 2f64.exp())]);
}

#[test]
fn sums_caps_and_gates_give_their_formulas() {
    let mut oracle = with_decoder_span(0, 2);
    let mut x = buf(&[1.0, 2.0, 3.0, 4.0]);
    oracle.add(2, 2, 0.5, &mut x, &buf(&[10.0, 20.0, 30.0, 40.0]));
    assert_eq!(x.f32(), [6.0, 12.0, 18.0, 24.0]);
    oracle.scale(1, 2, -2.0, &mut x);
    assert_eq!(x.f32(), [-12.0, -24.0, 18.0, 24.0]);
    let ln_3 = 3f32.ln();
    oracle.gate_rows(2, 2, &buf(&[0.0, -ln_3]), &mut x);
    assert_near(x.f32(), &[-6.0, -12.0, 4.5, 6.0]);
    oracle.softcap(2, 2, 4.0, &mut x);
    let capped = [-1.5f64, -3.0, 1.125, 1.5].map(|x| 4.0 * x.tanh());
    assert_near(x.f32(), &capped);
    let mut out = StepOutput::default();
    oracle.append_hidden(1..2, 2, &buf(&[1.0, 2.0, 3.0, 4.0]), &mut out);
    assert_eq!(out.hidden, [3.0, 4.0]);
}

#[test]
fn matmul_and_embeddings_give_their_formulas() {
    let mut oracle = with_decoder_span(1, 1);
    let w = matrix(&mut oracle, 3, &[1.0, 2.0, 3.0, -4.0, 5.0, 6.0]);
    let mut y = buf(&[0.0; 3]);
    oracle.matmul(1, &w, Some(&buf(&[0.0, 0.5, 0.0])), &buf(&[10.0, 1.0]), &mut y);
    assert_eq!(y.f32(), [12.0, 26.5, 56.0]);
    let mut x = buf(&[0.0; 2]);
    oracle.embed(&w, 0, &mut x);
    assert_eq!(x.f32(), [5.0, 6.0]);
    // The token is in the second row if the table starts with token 1, and in no row if it starts with token
    // 3.
    oracle.embed(&w, 1, &mut x);
    assert_eq!(x.f32(), [3.0, -4.0]);
    oracle.embed(&w, 3, &mut x);
    assert_eq!(x.f32(), [0.0, 0.0]);
    oracle.embed(&w, 0, &mut x);
    // Position 1, and the one after it.
    oracle.embed_positions(&w, 0, 0, &mut x);
    assert_eq!(x.f32(), [8.0, 2.0]);
    oracle.embed_positions(&w, 1, 0, &mut x);
    assert_eq!(x.f32(), [13.0, 8.0]);
}

#[test]
fn routing_selects_the_largest_logits_and_scores_them() {
    let shape = MoeShape {
        experts: 4,
        first_expert: 0,
        top_k: 2,
        scoring: Scoring::Softmax,
        groups: None,
        normalize_scores: false,
        scale: 1.0,
        weighs_input: false,
        width: 1,
        activation: Activation::Relu,
    };
    let check = |shape: MoeShape, logits: [f32; 4], want: &[(usize, f64)]| {
        let got = route(&shape, &logits, None);
        assert_eq!(got.len(), want.len(), "{shape:?}");
        for ((expert, score), (wanted, value)) in got.into_iter().zip(want) {
            assert!(expert == *wanted && (score - value).abs() < 1e-6, "{expert}: {score} in {shape:?}");
        }
    };
    // Probabilities of one, two, four and one eighth.
    let logits = [1f32, 2.0, 4.0, 1.0].map(f32::ln);
    check(shape, logits, &[(1, 0.25), (2, 0.5)]);
    check(MoeShape { scale: 3.0, ..shape }, logits, &[(1, 0.75), (2, 1.5)]);
    check(MoeShape { normalize_scores: true, ..shape }, logits, &[(1, 1.0 / 3.0), (2, 2.0 / 3.0)]);
    check(MoeShape { top_k: 3, ..shape }, logits, &[(0, 0.125), (1, 0.25), (2, 0.5)]);
    // 0 and ln 3 have the sigmoids 1/2 and 3/4.
    let sigmoid = MoeShape { scoring: Scoring::Sigmoid, ..shape };
    check(sigmoid, [0.0, -1.0, 3f32.ln(), -9.0], &[(0, 0.5), (2, 0.75)]);
    check(
        MoeShape { normalize_scores: true, ..sigmoid },
        [0.0, -1.0, 3f32.ln(), -9.0],
        &[(0, 0.4), (2, 0.6)],
    );
    check(shape, [f32::NAN, 0.0, -9.0, 0.0], &[(1, 0.499_969_1), (3, 0.499_969_1)]);
    // 2 and 1.5 are near each other, 1 is near 1.5 only, and -0.5 near none.
    let nearby = MoeShape { scoring: Scoring::Nearby { tolerance: 0.4 }, ..shape };
    let two_of = |difference: f64| 1.0 / (1.0 + (-difference).exp());
    check(nearby, [1.0, 2.0, -0.5, 1.5], &[(1, two_of(0.5)), (3, two_of(0.5))]);
    check(nearby, [1.5, 1.5, 1.5, -9.0], &[(0, 1.0 / 3.0), (1, 0.5)]);
    check(nearby, [f32::NEG_INFINITY, f32::NAN, 1.0, f32::NEG_INFINITY], &[(0, 0.0), (2, 1.0)]);
    // Of logits below zero, the magnitude of the other one counts.
    check(nearby, [-1.0, -1.5, -9.0, -1.75], &[(0, two_of(0.5)), (1, two_of(0.25))]);
}

#[test]
fn corrections_and_groups_decide_which_experts_are_selected_but_not_their_scores() {
    let shape = MoeShape {
        experts: 6,
        first_expert: 0,
        top_k: 2,
        scoring: Scoring::Sigmoid,
        groups: None,
        normalize_scores: false,
        scale: 1.0,
        weighs_input: false,
        width: 1,
        activation: Activation::Relu,
    };
    // The logits of these scores.
    let logits = [0.5f32, 0.6, 0.9, 0.1, 0.4, 0.8].map(|score| (score / (1.0 - score)).ln());
    let check = |shape: MoeShape, correction: Option<[f32; 6]>, want: [(usize, f64); 2]| {
        let got = route(&shape, &logits, correction.as_ref().map(|it| &it[..]));
        let is_near =
            |(got, want): (&(usize, f64), &(usize, f64))| got.0 == want.0 && (got.1 - want.1).abs() < 1e-6;
        assert!(got.len() == 2 && got.iter().zip(&want).all(is_near), "{got:?}, not {want:?}, of {shape:?}");
    };
    check(shape, None, [(2, 0.9), (5, 0.8)]);
    check(shape, Some([0.0, 0.0, -0.5, 0.75, 0.0, 0.0]), [(3, 0.1), (5, 0.8)]);
    let groups = |groups, top_groups, score| MoeShape {
        groups: Some(ExpertGroups { groups, top_groups, score }),
        ..shape
    };
    // The groups have the sums 1.1, 1.0 and 1.2, and the maxima 0.6, 0.9 and 0.8.
    check(groups(3, 1, GroupScore::TopTwo), None, [(4, 0.4), (5, 0.8)]);
    check(groups(3, 2, GroupScore::TopTwo), None, [(1, 0.6), (5, 0.8)]);
    check(groups(3, 1, GroupScore::Max), None, [(2, 0.9), (3, 0.1)]);
    let correction = Some([0.0, 0.0, 0.25, 0.0, 0.0, 0.0]);
    check(groups(3, 1, GroupScore::TopTwo), correction, [(2, 0.9), (3, 0.1)]);
    // Groups of one expert, and ties, which go to the lower group.
    check(groups(6, 2, GroupScore::TopTwo), None, [(2, 0.9), (5, 0.8)]);
    let tied = route(&groups(3, 1, GroupScore::Max), &[0.0; 6], None);
    assert_eq!(tied, [(0, 0.5), (1, 0.5)]);
}

#[test]
fn a_mixture_sums_the_results_of_its_experts() {
    let mut oracle = with_decoder_span(0, 2);
    let mut expert = |gate: f32, up: Option<f32>, down: [f32; 2]| Expert {
        gate: matrix(&mut oracle, 1, &[gate, 0.0]),
        up: up.map(|up| matrix(&mut oracle, 1, &[0.0, up])),
        down: matrix(&mut oracle, 2, &down),
    };
    let experts = [
        expert(1.0, Some(1.0), [1.0, 0.0]),
        expert(-1.0, Some(1.0), [9.0, 9.0]),
        expert(2.0, Some(3.0), [0.0, 1.0]),
    ];
    let shape = MoeShape {
        experts: 3,
        first_expert: 0,
        top_k: 2,
        scoring: Scoring::Softmax,
        groups: None,
        normalize_scores: true,
        scale: 1.0,
        weighs_input: false,
        width: 1,
        activation: Activation::Relu,
    };
    let mut y = buf(&[0.0; 4]);
    // The first row passes half and half through experts 0 and 2, the second one through 0 and 1, whose
    // result is zero.
    let router = buf(&[5.0, 0.0, 5.0, 5.0, 5.0, 0.0]);
    let x = buf(&[2.0, 7.0, 3.0, 1.0]);
    oracle.moe(2, &shape, &router, Experts::in_memory(&experts), &x, &mut y).unwrap();
    assert_near(y.f32(), &[0.5 * 14.0, 0.5 * 84.0, 0.5 * 3.0, 0.0]);
    let last = MoeShape { first_expert: 2, ..shape };
    oracle.moe(2, &last, &router, Experts::in_memory(&experts[2..]), &x, &mut y).unwrap();
    assert_near(y.f32(), &[0.0, 0.5 * 84.0, 0.0, 0.0]);
    // Gate and up are linear here, so that half of the input gives a quarter of the result.
    let weighed = MoeShape { weighs_input: true, ..shape };
    oracle.moe(2, &weighed, &router, Experts::in_memory(&experts), &x, &mut y).unwrap();
    assert_near(y.f32(), &[0.25 * 14.0, 0.25 * 84.0, 0.25 * 3.0, 0.0]);
    let biases = |gate: f32, up: f32, down: [f32; 2]| ExpertBiases {
        gate: Some(buf(&[gate])),
        up: Some(buf(&[up])),
        down: Some(buf(&down)),
    };
    let biases = [biases(1.0, 2.0, [5.0, 6.0]), biases(0.0, 0.0, [0.0; 2]), biases(0.0, 0.0, [0.0; 2])];
    let experts = Experts { biases: &biases, ..Experts::in_memory(&experts) };
    oracle.moe(2, &shape, &router, experts, &x, &mut y).unwrap();
    assert_near(y.f32(), &[0.5 * (3.0 * 9.0 + 5.0), 0.5 * (84.0 + 6.0), 0.5 * (4.0 * 3.0 + 5.0), 3.0]);
}
