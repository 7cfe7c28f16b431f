//! Tests of buffers that are longer than 4 GiB, for backends whose weights lie row by row. Only their ends
//! are accessed, so a device that has memory only where it is accessed can run them.
//!
//! Invariant: what is expected is the result of the same backend with short buffers.

use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, KvLayout, KvTable, OutputColumns, Weight};
use mainstem_kernels::batch::{Page, PageCopy, SpanOutput};
use mainstem_kernels::quant::QuantType;

/// Bytes that 32 bits can count.
const LONG: usize = 1 << 32;

/// Tests that K and V on pages behind the first 4 GiB of a cache are stored, copied, and attended to.
pub fn long_caches<B: Backend>(make: &impl Fn() -> B) {
    const PAGE_POSITIONS: usize = 32;
    for ty in [QuantType::F32, QuantType::Q8_0] {
        let options = AttentionOptions::PLAIN;
        let case = AttentionCase { ty, kv_heads: 2, heads: 4, k_dim: 64, v_dim: 64, scale: 0.3, options };
        let AttentionCase { kv_heads, k_dim, v_dim, .. } = case;
        let page_bytes = ty.run_bytes(k_dim).expect("a short run") * kv_heads * PAGE_POSITIONS;
        let pages = LONG / page_bytes + POOL_PAGES;
        let mut rig = Rig::new(make(), limits(PAGE_POSITIONS));
        let want = case.run(&mut rig, &chunks(90, 45), PageBook::contiguous(PAGE_POSITIONS));
        let mut cache = rig.cache(KvLayout {
            ty,
            pages,
            page_positions: PAGE_POSITIONS,
            kv_heads,
            k_dim,
            v_dim,
            v_in_k: false,
        });
        let mut book = PageBook { free: last_pages(pages), ..PageBook::contiguous(PAGE_POSITIONS) };
        let mut got = RowResults::new();
        for step in chunks(90, 45) {
            case.run_step(&mut rig, &mut cache, &step, &mut book, &mut got);
        }
        assert_eq!(got, want, "{ty}: pages behind 4 GiB");
        // A copy of the first page, from one end to the other, and one back.
        let copies = [PageCopy { table: KvTable::Own, from: book.own_pages[0][0], to: 1 }];
        rig.backend.copy_pages(KvTable::Own, &copies, &mut cache);
        let back = [PageCopy { table: KvTable::Own, from: 1, to: pages as Page - 1 }];
        rig.backend.copy_pages(KvTable::Own, &back, &mut cache);
        book.own_pages[0][0] = pages as Page - 1;
        let mut batch_book = PageBook { own_pages: vec![Vec::new(); 8], ..book.clone() };
        batch_book.free = book.own_pages[0].iter().rev().copied().collect();
        let mut after = RowResults::new();
        let last = [TestSpan::given(0, 89, 1)];
        case.run_step(&mut rig, &mut cache, &last, &mut batch_book, &mut after);
        assert_eq!(after[&(0, 89)], want[&(0, 89)], "{ty}: a page that was copied over 4 GiB");
    }
}

/// Returns the last pages of a pool, to be allocated from the end of the list.
fn last_pages(pages: usize) -> Vec<Page> {
    (pages - POOL_PAGES / 2..pages - 1).map(|page| page as Page).collect()
}

/// Tests that the last rows of tables and of weights longer than 4 GiB are read, and that results longer than
/// that are written. Of the outputs, only the first and the last are compared.
pub fn long_matrices<B: Backend>(make: &impl Fn() -> B) {
    // There are fewer than 2^24 tokens.
    for (ty, k, n) in [(QuantType::F32, 128, LONG / 512 + 100), (QuantType::F16, 256, LONG / 512 + 100)] {
        let mut rig = Rig::new(make(), limits(32));
        let (w, ends) = long_weight(&mut rig, ty, n, k);
        let mut batch =
            build_batch(&[TestSpan::given(0, 0, 2)], SpanOutput::None, &mut PageBook::contiguous(32));
        batch.tokens = vec![0, n as u32 - 1];
        rig.begin(batch);
        let mut x = rig.output(2 * k);
        rig.backend.embed(&w, 0, &mut x);
        let got = rig.read(&x, 2 * k, format_args!("embed"));
        let mut want = vec![0.0; 2 * k];
        ty.dequantize(&ends, &mut want);
        assert_eq!(got, want, "{ty}: the ends of a table");
    }
    // The result of the last is longer than 4 GiB, too.
    let cases = [
        (QuantType::F32, 64, LONG / 256 + 100),
        (QuantType::Q8_0, 64, LONG / 68 + 100),
        (QuantType::Q8_0, 32, LONG / 16 + 100),
    ];
    for (ty, k, n) in cases {
        assert_long_product(make, ty, (n, k));
    }
}

/// Tests a product with a weight (n, k).
fn assert_long_product<B: Backend>(make: &impl Fn() -> B, ty: QuantType, (n, k): (usize, usize)) {
    const ROWS: usize = 4;
    let mut rig = Rig::new(make(), limits(32));
    let (w, ends) = long_weight(&mut rig, ty, n, k);
    let short = rig.quantized_weight(ty, 2, k, &ends);
    rig.begin_rows(ROWS);
    let x = rig.input(&noise(13, ROWS * k));
    let mut want = rig.output(ROWS * 2);
    rig.backend.matmul(ROWS, &short, None, &x, &mut want);
    let want = rig.read(&want, ROWS * 2, format_args!("a short product"));
    let mut y = rig.backend.alloc(ROWS * n * 4).expect("the device has memory where it is accessed");
    rig.backend.matmul_to(ROWS, (&w, OutputColumns { first: 0, of: n }), None, &x, &mut y);
    for (row, want) in want.chunks_exact(2).enumerate() {
        for (column, want) in [0, n - 1].into_iter().zip(want) {
            let mut bytes = [0; 4];
            rig.backend.download(&y, (row * n + column) * 4, &mut bytes);
            let got = f32::from_le_bytes(bytes);
            assert_eq!(got.to_bits(), want.to_bits(), "{ty} ({n}, {k}): row {row}, output {column}");
        }
    }
}

/// Returns a weight (n, k) of zeros but for its first and its last row, and these rows.
fn long_weight<B: Backend>(rig: &mut Rig<B>, ty: QuantType, n: usize, k: usize) -> (Weight<B::Buf>, Vec<u8>) {
    let ends = quantize_values(ty, &noise(11, 2 * k));
    let row = ends.len() / 2;
    assert!(n * row > LONG, "{n} rows of {row} bytes");
    rig.backend.prepare_weight(ty, k).expect("memory for a small step");
    let mut buf = rig.backend.alloc(n * row).expect("the device has memory where it is accessed");
    rig.backend.upload(&mut buf, 0, &ends[..row]);
    rig.backend.upload(&mut buf, (n - 1) * row, &ends[row..]);
    (Weight { id: None, buf, ty, n, k }, ends)
}
