//! Tests of top-k sparse attention, against the reference backend.

use super::Bounds;
use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, Fraction, KvTable, Mask, StepLimits, ValueSource};
use mainstem_kernels::batch::{Page, SpanOutput};
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns prompts mixed with generated tokens: of sequence 0 from position 37 on, of sequence 1 from its
/// second token on.
fn test_steps() -> Vec<Vec<TestSpan>> {
    let mut steps = vec![vec![TestSpan::given(0, 0, 37), TestSpan::given(1, 0, 1)]];
    for i in 0..12 {
        steps.push(vec![TestSpan::given(2, 7 * i, 7), TestSpan::last(0, 37 + i), TestSpan::last(1, 1 + i)]);
    }
    steps.push(vec![TestSpan::hole(5), TestSpan::given(0, 49, 80), TestSpan::last(1, 13)]);
    steps.push(vec![TestSpan::last(0, 129), TestSpan::given(1, 14, 1)]);
    steps
}

/// Returns the spans of one sequence only.
fn steps_of(sequence: u32) -> Vec<Vec<TestSpan>> {
    let own = |pieces: Vec<TestSpan>| pieces.into_iter().filter(|piece| piece.sequence == sequence).collect();
    test_steps().into_iter().map(own).filter(|pieces: &Vec<TestSpan>| !pieces.is_empty()).collect()
}

/// Returns masks with and without window, softcap and bias.
fn test_options() -> [AttentionOptions; 3] {
    let window =
        |window| AttentionOptions { mask: Mask::Causal { window: Some(window) }, ..AttentionOptions::PLAIN };
    [
        AttentionOptions::PLAIN,
        window(20),
        AttentionOptions { softcap: Some(2.0), reach: Some(150), ..window(50) },
    ]
}

/// Tests that results are close to the reference in every cache format, and do not depend on the other rows
/// or on the pages; and that a given token, even a single one, uses dense attention.
pub fn top_k_attention<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (i, ty) in QuantType::kv_cache_types().enumerate() {
        for (look, fraction) in test_options().into_iter().zip([0.1, 0.5, 0.25]) {
            let (heads, k_dim, v_dim) = [(6, 64, 80), (2, 20, 33)][i % 2];
            let case = AttentionCase { ty, kv_heads: 2, heads, k_dim, v_dim, scale: 1.0, options: look };
            let attended = Fraction::new(fraction).expect("a valid fraction");
            assert_top_k(&case, attended, make, bounds);
        }
    }
}

/// Tests one case.
fn assert_top_k<B: Backend>(
    case: &AttentionCase,
    attended: Fraction,
    make: &impl Fn() -> B,
    bounds: &Bounds,
) {
    let limits = |page_positions| StepLimits { attended_fraction: attended, ..limits(page_positions) };
    let what = format_args!("{case:?}, {attended:?}");
    let want = case.oracle_results(
        &mut Rig::new(Reference::new(), limits(32)),
        &test_steps(),
        PageBook::scattered(32),
    );
    let all =
        case.run(&mut Rig::new(make(), super::inputs::limits(32)), &test_steps(), PageBook::scattered(32));
    let mut rig = Rig::new(make(), limits(32));
    let got = case.run(&mut rig, &test_steps(), PageBook::scattered(32));
    case.assert_close(what, &got, &want, bounds);
    for sequence in [0, 1] {
        let alone = case.run(&mut rig, &steps_of(sequence), PageBook::contiguous(32));
        assert_same_rows(format_args!("{what}, alone"), &alone, &got, bounds);
    }
    let paged = case.run(&mut Rig::new(make(), limits(128)), &test_steps(), PageBook::scattered(128));
    assert_same_rows(format_args!("{what}, on larger pages"), &paged, &got, bounds);
    // Given tokens use dense attention, whatever else is in the step.
    for place in [(0, 36), (0, 60), (1, 14), (2, 80)] {
        assert_same(
            format_args!("{what}, {place:?}, given"),
            &got[&place],
            &all[&place],
            bounds.batch_invariance,
        );
    }
    for place in [(0, 40), (1, 9), (0, 129)] {
        assert_ne!(got[&place], all[&place], "{what}, {place:?}: generated, but attends to all");
    }
}

/// Tests that values of positions that are not selected are not read: neither NaN nor very large numbers have
/// an effect.
pub fn unselected_values<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    const DIM: usize = 16;
    let attended = Fraction::new(0.1).expect("a tenth is a valid fraction");
    let selected = [3, 11];
    let value = |position: usize| if selected.contains(&position) { position as f32 } else { f32::NAN };
    let key = |position: usize| if selected.contains(&position) { 1.0 } else { 0.25 };
    let case = AttentionCase {
        ty: QuantType::F32,
        kv_heads: 1,
        heads: 1,
        k_dim: DIM,
        v_dim: DIM,
        scale: 1.0 / DIM as f32,
        options: AttentionOptions::PLAIN,
    };
    let mut rig = Rig::new(make(), StepLimits { attended_fraction: attended, ..limits(32) });
    let (mut cache, mut book) = (case.cache(&mut rig), PageBook::scattered(32));
    let mut store = |rig: &mut Rig<B>, piece: TestSpan, k: Vec<f32>, v: Vec<f32>| {
        rig.begin(build_batch(&[piece], SpanOutput::None, &mut book));
        let [k, v] = [k, v].map(|numbers| rig.input(&numbers));
        rig.backend.store_kv(KvTable::Own, &k, &v, &mut cache);
    };
    let wide = |of: &dyn Fn(usize) -> f32| (0..20 * DIM).map(|i| of(i / DIM)).collect();
    store(&mut rig, TestSpan::given(0, 0, 20), wide(&key), wide(&value));
    store(&mut rig, TestSpan::last(0, 20), vec![0.5; DIM], vec![20.0; DIM]);
    let q = rig.input(&[1.0; DIM]);
    let out = case.attend(&mut rig, &q, &cache, DIM);
    let out = rig.read(&out, DIM, format_args!("attention to 3 of 21"));
    let [large, small, middle] = [1f64, 0.25, 0.5].map(f64::exp);
    let want = (14.0 * large + 20.0 * middle) / (2.0 * large + 18.0 * small + middle);
    assert_close(
        format_args!("3 of 21"),
        &out,
        &[want as f32; DIM],
        (bounds.attention)(QuantType::F32),
        |_| 20.0,
    );
}

/// V of a whole cache, of which one page is also in the device's buffer.
struct WholeValues {
    bytes: Vec<u8>,
    present: Page,
    read: AtomicUsize,
}

impl ValueSource for WholeValues {
    fn is_present(&self, page: Page) -> bool {
        page == self.present
    }

    fn read(&self, at: usize, to: &mut [u8]) {
        to.copy_from_slice(&self.bytes[at..at + to.len()]);
        self.read.fetch_add(to.len(), Ordering::Relaxed);
    }
}

/// Tests that a backend that fetches values has the same results if they are not in its cache, in every cache
/// format, and that it fetches those that are selected rather than all. Returns false if the backend fetches
/// none, so that the part does not apply to it.
pub fn fetched_values<B: Backend>(make: &impl Fn() -> B) -> bool {
    const POSITIONS: usize = 129;
    let attended = Fraction::new(0.1).expect("a tenth is a valid fraction");
    for (i, ty) in QuantType::kv_cache_types().enumerate() {
        let (heads, k_dim, v_dim) = [(6, 64, 80), (2, 20, 33)][i % 2];
        let options = test_options()[i % 3];
        let case = AttentionCase { ty, kv_heads: 2, heads, k_dim, v_dim, scale: 1.0, options };
        let mut rig = Rig::new(make(), StepLimits { attended_fraction: attended, ..limits(32) });
        if !rig.backend.fetches_values() {
            return false;
        }
        let (mut cache, mut book, mut want) =
            (case.cache(&mut rig), PageBook::scattered(32), RowResults::new());
        for piece in [TestSpan::given(0, 0, POSITIONS), TestSpan::last(0, POSITIONS)] {
            case.run_step(&mut rig, &mut cache, &[piece], &mut book, &mut want);
        }
        let present = rig.backend.page_table(0, KvTable::Own)[POSITIONS / 32];
        let [_, len] = rig.backend.sizes().kv_bytes(&cache.layout).expect("the cache is there");
        let mut bytes = vec![0; len];
        rig.backend.download(&cache.v, 0, &mut bytes);
        let page_bytes = len / cache.layout.pages;
        for page in (0..cache.layout.pages).filter(|page| *page != present as usize) {
            rig.backend.upload(&mut cache.v, page * page_bytes, &vec![0xff; page_bytes]);
        }
        let values = WholeValues { bytes, present, read: AtomicUsize::new(0) };
        let got = case.attend_fetching(&mut rig, (&cache, &values), (0, POSITIONS));
        assert_eq!(got, want[&(0, POSITIONS)], "{case:?}");
        let (read, seen) = (values.read.into_inner(), POSITIONS / 32 * page_bytes);
        assert!(read > 0 && read * 2 < seen, "{case:?}: {read} of {seen} bytes");
    }
    true
}
