//! Tests of pages that only windowed layers use, and use again for later positions.

use super::Bounds;
use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, Fraction, KvTable, Mask, StepLimits};
use mainstem_kernels::batch::{PageCopy, SpanOutput};
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;

/// Tests attention through the window table. Each sequence has no more pages than a step can see, and stores
/// later positions in those that no row sees any more. All other pages, the null page included, hold NaN, and
/// entries of positions that are not seen refer to the null page.
pub fn window_tables<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let types = QuantType::kv_cache_types().enumerate();
    for (i, ty) in types {
        for (window, chunk) in [([33, 1, 64][i % 3], 40), (50, 17), (100, 64)] {
            for attended_fraction in [Fraction::ONE, Fraction::new(0.5).expect("it is in range")] {
                let generated = if attended_fraction.is_one() { 0 } else { 3 };
                let limits = StepLimits { window: Some(window), rows: 80, attended_fraction, ..limits(32) };
                let masks = [Mask::Causal { window: Some(window) }, Mask::Chunked { chunk: window }];
                let mask = masks[(i + usize::from(chunk == 50)) % 2];
                assert_windowed(ty, (mask, chunk, generated), limits, make, bounds);
            }
        }
    }
}

/// Tests one window, with two sequences in chunks and then so many generated tokens.
fn assert_windowed<B: Backend>(
    ty: QuantType,
    (mask, chunk, generated): (Mask, usize, usize),
    limits: StepLimits,
    make: &impl Fn() -> B,
    bounds: &Bounds,
) {
    const LEN: usize = 410;
    let options = |table| AttentionOptions { mask, table, ..AttentionOptions::PLAIN };
    let case = |table| AttentionCase {
        ty,
        kv_heads: 2,
        heads: 4,
        k_dim: 64,
        v_dim: 64,
        scale: 0.4,
        options: options(table),
    };
    let mut steps = chunks(LEN, chunk);
    // Another sequence, far behind.
    steps.iter_mut().enumerate().for_each(|(at, spans)| spans.push(TestSpan::given(1, at * 7, 7)));
    let more = (LEN..LEN + generated).map(|position| vec![TestSpan::generated(0, position, 1)]);
    steps.extend(more);

    let own = case(KvTable::Own);
    let mut oracle = Rig::new(Reference::new(), limits);
    let want = own.oracle_results(&mut oracle, &steps, PageBook::scattered(32));
    let same = own.run(&mut Rig::new(make(), limits), &steps, PageBook::scattered(32));

    let (windowed, mut device) = (case(KvTable::Window), Rig::new(make(), limits));
    let mut cache = windowed.cache(&mut device);
    let bytes = device.backend.sizes().kv_bytes(&cache.layout).expect("the suite's sizes are valid");
    device.backend.upload(&mut cache.k, 0, &vec![0xff; bytes[0]]);
    device.backend.upload(&mut cache.v, 0, &vec![0xff; bytes[1]]);
    let (mut book, mut got) = (PageBook::scattered(32), RowResults::new());
    for pieces in &steps {
        windowed.run_step(&mut device, &mut cache, pieces, &mut book, &mut got);
    }
    let what = format_args!("{ty}, {mask:?}, chunks of {chunk}, pages used again");
    assert_eq!(got.len(), want.len(), "{what}: rows");
    own.assert_close(what, &got, &want, bounds);
    assert_same_rows(what, &got, &same, bounds);
}

/// Tests that a page of windowed layers is copied for these alone, and that their tables move with slots.
pub fn window_copies<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let limits = StepLimits { window: Some(40), rows: 80, ..limits(32) };
    let options = AttentionOptions {
        mask: Mask::Causal { window: Some(40) },
        table: KvTable::Window,
        ..AttentionOptions::PLAIN
    };
    let (ty, scale) = (QuantType::F16, 0.5);
    let case = AttentionCase { ty, kv_heads: 1, heads: 2, k_dim: 64, v_dim: 64, scale, options };
    let steps = [vec![TestSpan::given(0, 0, 60)], vec![TestSpan::given(0, 60, 2)]];
    let want = case.run(&mut Rig::new(make(), limits), &steps, PageBook::contiguous(32));

    let mut device = Rig::new(make(), limits);
    let mut cache = case.cache(&mut device);
    let (mut book, mut got) = (PageBook::contiguous(32), RowResults::new());
    case.run_step(&mut device, &mut cache, &steps[0], &mut book, &mut got);
    let pages = device.backend.page_table(0, KvTable::Window).to_vec();
    let mut batch = build_batch(&[TestSpan::hole(7)], SpanOutput::None, &mut book);
    batch.moves.push(mainstem_kernels::SlotMove { from: 0, to: 3 });
    book.apply_moves(&batch.moves);
    let entry = |index: u32| mainstem_kernels::TableUpdate {
        slot: 3,
        table: KvTable::Window,
        index,
        page: 50 + index,
    };
    batch.table_updates.extend([1].map(entry));
    device.begin(batch);
    let copies = [(KvTable::Window, pages[1], 51), (KvTable::Own, 60, pages[0])];
    let copies = copies.map(|(table, from, to)| PageCopy { table, from, to });
    device.backend.copy_pages(KvTable::Window, &copies, &mut cache);
    let last = TestSpan { slot: 3, ..steps[1][0] };
    case.run_step(&mut device, &mut cache, &[last], &mut book, &mut got);
    assert_same_rows(format_args!("after a move and a copy"), &got, &want, bounds);
}
