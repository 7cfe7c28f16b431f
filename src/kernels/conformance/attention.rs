//! Tests of the KV cache and of attention, against the reference backend.

use super::Bounds;
use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::KvLayout;
use mainstem_kernels::backend::{Backend, KvTable, Mask};
use mainstem_kernels::batch::{PageCopy, SpanOutput, StepBatch, TableUpdate};
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;

/// Tests attention for every head shape and cache format, with mixed spans and scattered pages.
pub fn attention<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let steps = [
        vec![TestSpan::given(0, 0, 37), TestSpan::given(1, 0, 1), TestSpan::given(2, 0, 5)],
        vec![TestSpan::last(1, 1), TestSpan::given(0, 37, 30), TestSpan::hole(5), TestSpan::given(3, 0, 33)],
        vec![
            TestSpan::given(2, 5, 1),
            TestSpan::last(0, 67),
            TestSpan::given(3, 33, 2),
            TestSpan::last(1, 2),
        ],
    ];
    for (shift, page_positions) in PAGE_POSITIONS.into_iter().enumerate() {
        let (device, oracle) = &mut rigs(make, page_positions);
        // Each page size covers a third of the cases, of every format.
        let third = head_cases().enumerate().filter(|(i, _)| (i + i / 3 + shift).is_multiple_of(3));
        for (_, case) in third {
            let got = case.run(device, &steps, PageBook::scattered(page_positions));
            let want = case.oracle_results(oracle, &steps, PageBook::scattered(page_positions));
            case.assert_close(format_args!("{case:?}, pages of {page_positions}"), &got, &want, bounds);
        }
    }
}

/// Tests attention with every mask, softcap and bias, through every page table, with spans of other sequences
/// and of both stacks in the same step.
pub fn attention_options<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let steps = [
        vec![
            TestSpan::encoder_input(0),
            TestSpan::encoder_input(3),
            TestSpan::given(0, 0, 37),
            TestSpan::given(2, 0, 5),
        ],
        vec![
            TestSpan::encoder_input(1),
            TestSpan::given(0, 37, 60),
            TestSpan::hole(5),
            TestSpan::given(1, 0, 33),
        ],
        vec![
            TestSpan::given(2, 5, 1),
            TestSpan::last(0, 97),
            TestSpan::given(1, 33, 44),
            TestSpan::given(3, 0, 2),
        ],
    ];
    for (page, page_positions) in PAGE_POSITIONS.into_iter().enumerate() {
        let (device, oracle) = &mut rigs(make, page_positions);
        for (i, look) in all_options().into_iter().enumerate() {
            let shapes = [(1, 3, 10, 8), (2, 8, 64, 80), (2, 2, 12, 33)];
            let (kv_heads, heads, k_dim, v_dim) = shapes[(i + page) % 3];
            // Each page size covers a third of the formats of every option.
            let types = QuantType::kv_cache_types().enumerate();
            for (_, ty) in types.filter(|(at, _)| (at + i + 2 * page).is_multiple_of(3)) {
                let case = AttentionCase { ty, kv_heads, heads, k_dim, v_dim, scale: 0.7, options: look };
                let got = case.run(device, &steps, PageBook::scattered(page_positions));
                let want = case.oracle_results(oracle, &steps, PageBook::scattered(page_positions));
                assert_eq!(got.len(), want.len(), "{case:?}: rows");
                case.assert_close(format_args!("{case:?}, pages of {page_positions}"), &got, &want, bounds);
            }
        }
    }
}

/// Tests that encoder rows do not depend on the other encoder inputs of the step, nor on their position in
/// the scratch cache.
pub fn encoder_batch_invariance<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for look in all_options().into_iter().filter(|look| look.table == KvTable::Scratch) {
        for ty in QuantType::kv_cache_types() {
            let case =
                AttentionCase { ty, kv_heads: 2, heads: 4, k_dim: 64, v_dim: 64, scale: 0.3, options: look };
            let mut rig = Rig::new(make(), limits(32));
            let mut on =
                |pieces: &[TestSpan]| case.run(&mut rig, &[pieces.to_vec()], PageBook::scattered(32));
            let mut alone = RowResults::new();
            for slot in [0, 1, 3] {
                alone.extend(on(&[TestSpan::encoder_input(slot)]));
            }
            let all = [
                TestSpan::encoder_input(3),
                TestSpan::encoder_input(1),
                TestSpan::encoder_input(0),
                TestSpan::given(2, 0, 20),
            ];
            let got = on(&all);
            assert_eq!(got.len(), alone.len(), "rows of all encoder inputs");
            assert_same_rows(format_args!("{case:?}, several encoder inputs"), &got, &alone, bounds);
        }
    }
}

/// Tests attention over hundreds of positions: close to the reference, and independent of prompt chunks and
/// page size.
pub fn attention_long<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let causal = |window| AttentionOptions { mask: Mask::Causal { window }, ..AttentionOptions::PLAIN };
    let windowed = AttentionOptions { softcap: Some(4.0), reach: Some(80), ..causal(Some(77)) };
    for (i, ty) in QuantType::kv_cache_types().enumerate() {
        let chunked = AttentionOptions { mask: Mask::Chunked { chunk: 170 }, ..AttentionOptions::PLAIN };
        let with_sinks = AttentionOptions { has_sinks: true, ..[AttentionOptions::PLAIN, chunked][i % 2] };
        for look in [AttentionOptions::PLAIN, windowed, with_sinks, causal(Some([33, 100, 300][i % 3]))] {
            let case =
                AttentionCase { ty, kv_heads: 2, heads: 4, k_dim: 64, v_dim: 64, scale: 1.0, options: look };
            assert_long(&case, make, bounds);
        }
    }
}

/// Tests one case with different prompt chunks and page sizes.
pub(super) fn assert_long<B: Backend>(case: &AttentionCase, make: &impl Fn() -> B, bounds: &Bounds) {
    let mut oracle = Rig::new(Reference::new(), limits(64));
    let want = case.oracle_results(&mut oracle, &chunks(450, 150), PageBook::scattered(64));
    let mut first: Option<RowResults> = None;
    for (page_positions, chunk) in [(32, 150), (64, 90), (128, 64), (64, 17), (32, 1)] {
        let mut device = Rig::new(make(), limits(page_positions));
        let got = case.run(&mut device, &chunks(450, chunk), PageBook::scattered(page_positions));
        let what = format_args!("{case:?}, chunks of {chunk}, pages of {page_positions}");
        case.assert_close(what, &got, &want, bounds);
        assert_same_rows(what, &got, first.get_or_insert_with(|| got.clone()), bounds);
    }
}

/// Tests that a copied page equals the original, which is unchanged.
pub fn copy_pages<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::kv_cache_types() {
        let look = AttentionOptions::PLAIN;
        let case =
            AttentionCase { ty, kv_heads: 2, heads: 2, k_dim: 64, v_dim: 64, scale: 0.5, options: look };
        assert_copied(&case, make, bounds);
    }
}

/// Tests one case with copied pages.
pub(super) fn assert_copied<B: Backend>(case: &AttentionCase, make: &impl Fn() -> B, bounds: &Bounds) {
    let steps = [vec![TestSpan::given(0, 0, 64)], vec![TestSpan::last(0, 64)]];
    let (device, oracle) = &mut rigs(make, 32);
    let want = case.oracle_results(oracle, &steps, PageBook::contiguous(32));

    let mut cache = case.cache(device);
    let mut book = PageBook::contiguous(32);
    case.run_step(device, &mut cache, &steps[0], &mut book, &mut RowResults::new());
    let copied = [40, 7];
    let copy = |i: usize| PageCopy { table: KvTable::Own, from: book.own_pages[0][i], to: copied[i] };
    // A copy for other layers does nothing.
    let foreign = PageCopy { table: KvTable::Window, from: 7, to: book.own_pages[0][0] };
    let copies = [copy(0), copy(1), foreign];
    let entry = |index| TableUpdate { slot: 1, table: KvTable::Own, index, page: copied[index as usize] };
    let tables = [0, 1].map(entry).to_vec();
    let batch = build_batch(&[TestSpan::hole(7)], SpanOutput::None, &mut book);
    device.begin(StepBatch { table_updates: tables, page_copies: copies.to_vec(), ..batch });
    device.backend.copy_pages(KvTable::Own, &copies, &mut cache);
    book.own_pages[1] = copied.to_vec();
    // The next token of the same sequence, with the copy and with the original.
    for slot in [1, 0] {
        let mut got = RowResults::new();
        case.run_step(device, &mut cache, &[TestSpan { slot, ..steps[1][0] }], &mut book, &mut got);
        let what = format_args!("{case:?}, after pages were copied, in slot {slot}");
        case.assert_close(what, &got, &want, bounds);
    }
}

/// Returns cases of every head shape and cache format.
fn head_cases() -> impl Iterator<Item = AttentionCase> {
    let dims = HEAD_DIMS.map(|dim| (dim, dim)).into_iter().chain([(12, 8), (64, 80), (33, 20)]);
    let shapes = dims.flat_map(|dims| KV_HEADS.map(|kv_heads| GROUPS.map(|group| (dims, kv_heads, group))));
    let cases = shapes.flatten().flat_map(|shape| QuantType::kv_cache_types().map(move |ty| (shape, ty)));
    // Groups of quantized formats do not depend on the number of heads.
    let cases = cases.filter(|((_, kv_heads, _), ty)| !ty.is_blocked() || *kv_heads == 2);
    cases.map(|(((k_dim, v_dim), kv_heads, group), ty)| {
        let scale = if kv_heads == 3 { 1.0 } else { (k_dim as f32).sqrt().recip() };
        AttentionCase {
            ty,
            kv_heads,
            heads: kv_heads * group,
            k_dim,
            v_dim,
            scale,
            options: AttentionOptions::PLAIN,
        }
    })
}

/// Tests that other formats are rejected for the cache, with the name of the format in the error.
pub fn cache_types<B: Backend>(make: &impl Fn() -> B) {
    let layout = KvLayout {
        ty: QuantType::F32,
        pages: 2,
        page_positions: 32,
        kv_heads: 1,
        k_dim: 64,
        v_dim: 64,
        v_in_k: false,
    };
    let is_cached = |ty: QuantType| QuantType::kv_cache_types().any(|cached| cached == ty);
    for ty in QuantType::all() {
        match make().alloc_kv(KvLayout { ty, ..layout }) {
            Ok(_) => assert!(is_cached(ty), "a cache of {ty} was allocated"),
            Err(error) => assert!(!is_cached(ty) && error.to_string().contains(ty.name()), "{ty}: {error}"),
        }
    }
}

/// Returns windows within a block, of one block and across several; weak and strong softcaps; and bias tables
/// that cover every distance, or just the window.
fn all_options() -> Vec<AttentionOptions> {
    let own = |window| AttentionOptions { mask: Mask::Causal { window }, ..AttentionOptions::PLAIN };
    let scratch = |mask| AttentionOptions { mask, table: KvTable::Scratch, ..AttentionOptions::PLAIN };
    let cross = |window| AttentionOptions {
        mask: Mask::Bidirectional { window },
        table: KvTable::Cross,
        ..AttentionOptions::PLAIN
    };
    let bidirectional = |window| Mask::Bidirectional { window };
    let mut looks = Vec::from([1, 5, 31, 32, 33, 64].map(|window| own(Some(window))));
    looks.extend([
        AttentionOptions { softcap: Some(0.8), ..own(None) },
        AttentionOptions { softcap: Some(30.0), ..own(Some(20)) },
        AttentionOptions { reach: Some(512), ..own(None) },
        AttentionOptions { reach: Some(40), ..own(Some(40)) },
        AttentionOptions { softcap: Some(2.0), reach: Some(100), ..own(Some(50)) },
    ]);
    let chunked = |chunk| AttentionOptions { mask: Mask::Chunked { chunk }, ..AttentionOptions::PLAIN };
    let with_sinks = |options| AttentionOptions { has_sinks: true, ..options };
    looks.extend([1, 7, 32, 48].map(chunked));
    looks.extend([
        AttentionOptions { softcap: Some(2.0), reach: Some(40), ..chunked(40) },
        with_sinks(own(None)),
        with_sinks(own(Some(20))),
        with_sinks(chunked(33)),
        with_sinks(AttentionOptions { softcap: Some(1.5), reach: Some(512), ..own(None) }),
        with_sinks(scratch(bidirectional(None))),
        with_sinks(cross(None)),
    ]);
    looks.extend([scratch(bidirectional(None)), scratch(Mask::Causal { window: None })]);
    looks.extend([0, 3, 32, 45].map(|window| scratch(bidirectional(Some(window)))));
    looks.extend([
        AttentionOptions { reach: Some(70), ..scratch(bidirectional(None)) },
        AttentionOptions { softcap: Some(1.5), reach: Some(10), ..scratch(bidirectional(Some(9))) },
        AttentionOptions { buckets: Some(11), ..scratch(bidirectional(None)) },
        with_sinks(AttentionOptions {
            softcap: Some(3.0),
            buckets: Some(24),
            ..scratch(bidirectional(Some(20)))
        }),
        cross(None),
        cross(Some(0)),
        cross(Some(20)),
        AttentionOptions { softcap: Some(2.0), reach: Some(128), ..cross(None) },
    ]);
    looks
}
