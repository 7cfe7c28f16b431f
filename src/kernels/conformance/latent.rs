//! Tests of what multi-head latent attention needs: a matrix for each head, and a cache with V in K.

use super::Bounds;
use super::attention::{assert_copied, assert_long};
use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, Mask, OutputColumns};
use mainstem_kernels::quant::QuantType::{self, *};

/// Tests that the product of each head equals that of its own matrix alone, in every kind of operand, and
/// that other columns are not written.
pub fn matmul_heads<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    const HEADS: usize = 3;
    let rig = &mut Rig::new(make(), limits(32));
    for (n, k) in [(16, 256), (12, 512), (67, 256)] {
        for ty in [F32, F16, BF16, Q8_0, Q4_0, Q4_K] {
            let numbers = noise(70, HEADS * n * k);
            let all = rig.weight(ty, HEADS * n, &numbers);
            let columns = rig.backend.sizes().columns_of_heads(HEADS, k);
            rig.backend.prepare_weight(ty, columns).expect("memory for inputs");
            let each: Vec<_> = numbers.chunks_exact(n * k).map(|own| rig.weight(ty, n, own)).collect();
            // More rows than a work item has.
            let many = if n == 16 { Some(150) } else { None };
            for rows in ROWS.into_iter().chain(many) {
                let what = format_args!("{HEADS} heads of {n} x {k} in {ty}, {rows} rows");
                let columns = OutputColumns { first: 2, of: n + 5 };
                let x = noise(71, rows * HEADS * k);
                let (mut want, len) = (noise(72, rows * HEADS * columns.of), rows * HEADS * columns.of);
                rig.begin_rows(rows);
                let (from, mut to) = (rig.input(&x), rig.in_out(&want));
                rig.backend.matmul_heads(rows, HEADS, (&all, columns), &from, &mut to);
                let got = rig.read(&to, len, what);
                for (head, w) in each.iter().enumerate() {
                    let own: Vec<f32> =
                        x.chunks_exact(k).skip(head).step_by(HEADS).flatten().copied().collect();
                    let (from, mut to) = (rig.input(&own), rig.output(rows * n));
                    rig.backend.matmul(rows, w, None, &from, &mut to);
                    let result = rig.read(&to, rows * n, what);
                    let places = want.chunks_exact_mut(columns.of).skip(head).step_by(HEADS);
                    places
                        .zip(result.chunks_exact(n))
                        .for_each(|(to, own)| to[2..2 + n].copy_from_slice(own));
                }
                assert_same(what, &got, &want, bounds.batch_invariance);
            }
        }
    }
}

/// Returns cases of a cache with V in K, in every format: heads of whole groups and vectors, and of parts of
/// them.
fn cases() -> impl Iterator<Item = AttentionCase> {
    let plain = AttentionOptions { v_in_k: true, ..AttentionOptions::PLAIN };
    let window = |window| Mask::Causal { window: Some(window) };
    let looks = [
        plain,
        AttentionOptions { mask: window(20), ..plain },
        AttentionOptions { softcap: Some(3.0), reach: Some(512), ..plain },
    ];
    let shapes = [(1, 5, 96, 64), (1, 3, 76, 50), (2, 4, 41, 33), (1, 20, 22, 16), (1, 2, 320, 256)];
    let formats = QuantType::kv_cache_types();
    formats.flat_map(move |ty| {
        shapes.into_iter().enumerate().map(move |(i, (kv_heads, heads, k_dim, v_dim))| AttentionCase {
            ty,
            kv_heads,
            heads,
            k_dim,
            v_dim,
            scale: 0.4,
            options: looks[i % looks.len()],
        })
    })
}

/// Tests attention over a cache with V in K: close to the reference. V in memory of its own is not read.
pub fn latent_attention<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let steps = [
        vec![TestSpan::given(0, 0, 37), TestSpan::given(1, 0, 1), TestSpan::given(2, 0, 5)],
        vec![TestSpan::last(1, 1), TestSpan::given(0, 37, 30), TestSpan::hole(5), TestSpan::given(3, 0, 33)],
        vec![TestSpan::given(2, 5, 1), TestSpan::last(0, 67), TestSpan::given(3, 33, 2)],
    ];
    for (i, case) in cases().enumerate() {
        let page_positions = PAGE_POSITIONS[i % PAGE_POSITIONS.len()];
        let (device, oracle) = &mut rigs(make, page_positions);
        let got = case.run(device, &steps, PageBook::scattered(page_positions));
        let want = case.oracle_results(oracle, &steps, PageBook::scattered(page_positions));
        case.assert_close(format_args!("{case:?}, pages of {page_positions}"), &got, &want, bounds);
    }
}

/// Tests that attention over a cache with V in K is independent of prompt chunks, page size and splits, and
/// that a copied page has both.
pub fn latent_attention_long<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (i, case) in cases().enumerate() {
        // Each format with another shape.
        if i % 5 == (i / 5 + 3) % 5 {
            assert_long(&case, make, bounds);
            assert_copied(&case, make, bounds);
        }
    }
}
