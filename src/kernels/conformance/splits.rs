//! Tests of attention over so many positions that a backend sums them in several splits.
//!
//! Invariant: rows attend to far more positions than a block or a page has, and few rows are evaluated.

use super::Bounds;
use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, KvTable, Mask, StepLimits};
use mainstem_kernels::batch::SpanOutput;
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;

/// Evaluated rows (first, count). Some attend to hundreds of positions, the last ones to thousands.
const EVALUATED_ROWS: [(usize, usize); 5] = [(0, 3), (500, 30), (1022, 5), (1535, 3), (2550, 50)];

fn long_limits() -> StepLimits {
    StepLimits { rows: 1200, positions: 2688, encoder_positions: LONG_INPUT_LEN, ..limits(64) }
}

fn causal(window: Option<usize>) -> AttentionOptions {
    AttentionOptions { mask: Mask::Causal { window }, ..AttentionOptions::PLAIN }
}

/// Tests that results are close to the reference in every cache format, and independent of chunks and of
/// other rows.
pub fn attention_over_splits<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (i, ty) in QuantType::kv_cache_types().enumerate() {
        let capped = AttentionOptions { softcap: Some(3.0), reach: Some(1300), ..causal(Some(1300)) };
        for look in [AttentionOptions::PLAIN, [causal(Some(700)), capped, causal(Some(513))][i % 3]] {
            let (k_dim, v_dim) = [(72, 20), (16, 33)][i % 2];
            let case = AttentionCase { ty, kv_heads: 2, heads: 4, k_dim, v_dim, scale: 0.8, options: look };
            let what = format_args!("{case:?}");
            let mut oracle = Rig::new(Reference::new(), long_limits());
            let want = case.oracle_results(&mut oracle, &prompt(50), PageBook::scattered(64));
            let mut rig = Rig::new(make(), long_limits());
            let got = case.run(&mut rig, &prompt(50), PageBook::scattered(64));
            case.assert_close(what, &got, &want, bounds);
            for steps in [prompt(1), prompt(7), with_other_rows(prompt(50))] {
                let other = case.run(&mut rig, &steps, PageBook::contiguous(64));
                let own = other.into_iter().filter(|((sequence, _), _)| *sequence == 0).collect();
                assert_same_rows(format_args!("{case:?}, in chunks or with other rows"), &own, &got, bounds);
            }
        }
    }
}

/// Returns steps with sequence 0 up to its last row, with the evaluated rows in chunks.
fn prompt(chunk: usize) -> Vec<Vec<TestSpan>> {
    let (mut steps, mut at) = (Vec::new(), 0);
    for (first, len) in EVALUATED_ROWS {
        let stored =
            (at..first).step_by(1000).map(|start| TestSpan::stored(0, start, 1000.min(first - start)));
        let end = first + len;
        let evaluated =
            (first..end).step_by(chunk).map(|start| TestSpan::given(0, start, chunk.min(end - start)));
        steps.extend(stored.chain(evaluated).map(|piece| vec![piece]));
        at = end;
    }
    steps
}

/// Adds rows of other sequences before and after the evaluated rows.
fn with_other_rows(mut steps: Vec<Vec<TestSpan>>) -> Vec<Vec<TestSpan>> {
    let evaluated = steps.iter_mut().filter(|pieces| pieces[0].kind == TestSpanKind::Given);
    for (i, pieces) in evaluated.enumerate() {
        pieces.insert(0, TestSpan::given(1, 2 * i, 2));
        pieces.extend([TestSpan::hole(5), TestSpan::given(2, 3 * i, 3)]);
    }
    steps
}

/// Tests long encoder inputs: encoder self-attention and cross-attention.
pub fn encoder_inputs_over_splits<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let look = |mask, table| AttentionOptions { mask, table, ..AttentionOptions::PLAIN };
    let bidirectional = |window| Mask::Bidirectional { window };
    let looks = [
        look(bidirectional(None), KvTable::Scratch),
        AttentionOptions {
            softcap: Some(2.0),
            reach: Some(521),
            ..look(bidirectional(Some(520)), KvTable::Scratch)
        },
        look(bidirectional(None), KvTable::Cross),
        // The last rows attend to nothing.
        look(bidirectional(Some(30)), KvTable::Cross),
        look(bidirectional(Some(700)), KvTable::Cross),
    ];
    for (look, ty) in looks.into_iter().zip(QuantType::kv_cache_types()) {
        let case =
            AttentionCase { ty, kv_heads: 1, heads: 2, k_dim: 12, v_dim: 17, scale: 0.8, options: look };
        let alone = [
            vec![TestSpan::encoder_input(LONG_INPUT_SEQUENCE), TestSpan::given(LONG_INPUT_SEQUENCE, 0, 3)],
            vec![TestSpan::given(LONG_INPUT_SEQUENCE, 3, 20)],
            vec![TestSpan::stored(LONG_INPUT_SEQUENCE, 23, 1067)],
            vec![TestSpan::given(LONG_INPUT_SEQUENCE, 1090, 45)],
        ];
        let mut mixed = alone.clone();
        mixed[0].insert(0, TestSpan::encoder_input(3));
        mixed[1].extend([TestSpan::given(3, 0, 7), TestSpan::given(2, 0, 2)]);
        mixed[3] = (1090..1135).map(|position| TestSpan::given(LONG_INPUT_SEQUENCE, position, 1)).collect();
        let mut oracle = Rig::new(Reference::new(), long_limits());
        let want = case.oracle_results(&mut oracle, &mixed, PageBook::scattered(64));
        let mut rig = Rig::new(make(), long_limits());
        let got = case.run(&mut rig, &mixed, PageBook::scattered(64));
        assert_eq!(got.len(), want.len(), "{case:?}: rows");
        case.assert_close(format_args!("{case:?}"), &got, &want, bounds);
        let alone = case.run(&mut rig, &alone, PageBook::contiguous(64));
        assert_same_rows(format_args!("{case:?}, alone"), &alone, &got, bounds);
    }
}

/// Tests that positions outside the window have no effect, even with NaN in the middle of a split.
pub fn masked_splits<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::kv_cache_types().filter(|ty| !ty.is_blocked()) {
        let look = causal(Some(700));
        let case =
            AttentionCase { ty, kv_heads: 2, heads: 4, k_dim: 16, v_dim: 20, scale: 0.8, options: look };
        let mut rig = Rig::new(make(), long_limits());
        let run = |rig: &mut Rig<B>, kind: TestSpanKind| {
            let unseen = [(0, 1000), (1000, 101)]
                .map(|(start, len)| TestSpan { kind, ..TestSpan::stored(0, start, len) });
            let stored =
                unseen.into_iter().chain([TestSpan::stored(0, 1101, 99), TestSpan::stored(0, 1200, 600)]);
            let evaluated =
                (0..4).map(|i| TestSpan::given(0, 1800 + i, 1)).chain([TestSpan::given(0, 1804, 20)]);
            let steps: Vec<Vec<TestSpan>> = stored.chain(evaluated).map(|piece| vec![piece]).collect();
            case.run(rig, &steps, PageBook::scattered(64))
        };
        // The first evaluated row attends to positions from 1101 on, in the middle of a split and of a block.
        let want = run(&mut rig, TestSpanKind::Stored);
        let got = run(&mut rig, TestSpanKind::Poison);
        assert_same_rows(format_args!("{case:?}, NaN before the window"), &got, &want, bounds);
    }
}

/// Tests that scores of negative infinity have weight zero, even if all scores of a split are. If all scores
/// are, the result is NaN.
pub fn negative_infinite_scores<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    const DIM: usize = 16;
    let ty = QuantType::F32;
    let look = AttentionOptions::PLAIN;
    let case = AttentionCase { ty, kv_heads: 1, heads: 1, k_dim: DIM, v_dim: DIM, scale: 1.0, options: look };
    // 1290 rows: those in `small` have weight zero; half of the others have value 1, half 3.
    for small in [512..1024, 0..512, 0..1024, 512..1280, 3..1289, 0..1290] {
        // Dot products of `f32::MIN` are negative infinity in F32, but not in every wider format; those of
        // negative infinity always are.
        let lowest = if small.len() == 1290 { f32::NEG_INFINITY } else { f32::MIN };
        let key = |p: usize| if small.contains(&p) { lowest } else { 0.0 };
        let value = |p: usize| if small.contains(&p) { 1e6 } else { [1.0, 3.0][p % 2] };
        let mut rig = Rig::new(make(), long_limits());
        let (mut cache, mut book) = (case.cache(&mut rig), PageBook::scattered(64));
        for start in [0, 645] {
            rig.begin(build_batch(&[TestSpan::given(0, start, 645)], SpanOutput::None, &mut book));
            let wide = |of: &dyn Fn(usize) -> f32| -> Vec<f32> {
                (start * DIM..(start + 645) * DIM).map(|i| of(i / DIM)).collect()
            };
            let [k, v] = [wide(&key), wide(&value)].map(|numbers| rig.input(&numbers));
            rig.backend.store_kv(KvTable::Own, &k, &v, &mut cache);
        }
        rig.begin(build_batch(&[TestSpan::given(0, 1289, 1)], SpanOutput::None, &mut book));
        let q = rig.input(&[1.0; DIM]);
        let out = case.attend(&mut rig, &q, &cache, DIM);
        let what = format_args!("scores of {small:?} are -inf");
        let out = rig.read(&out, DIM, what);
        if small.len() == 1290 {
            assert!(out.iter().all(|out| out.is_nan()), "{what}: {out:?}");
            continue;
        }
        let seen: Vec<usize> = (0..1290).filter(|p| !small.contains(p)).collect();
        let want = seen.iter().map(|p| value(*p)).sum::<f32>() / seen.len() as f32;
        assert_close(what, &out, &[want; DIM], (bounds.attention)(ty), |_| 3.0);
    }
}

/// Returns the bits of rows that attend to many splits. Backends with the same arithmetic must give the same
/// bits.
pub fn split_bits<B: Backend>(make: &impl Fn() -> B) -> Vec<u32> {
    let mut bits = Vec::new();
    for ty in QuantType::kv_cache_types() {
        for look in [AttentionOptions::PLAIN, causal(Some(700))] {
            let case =
                AttentionCase { ty, kv_heads: 2, heads: 4, k_dim: 20, v_dim: 33, scale: 0.8, options: look };
            let mut rig = Rig::new(make(), long_limits());
            for steps in [prompt(1), with_other_rows(prompt(25))] {
                let answers = case.run(&mut rig, &steps, PageBook::scattered(64));
                bits.extend(answers.values().flatten().map(|value| value.to_bits()));
            }
        }
    }
    bits
}
