//! Tests of unusual numbers: in a quantized KV cache, and as inputs of GEMMs that are quantized.

use super::Bounds;
use super::attention_case::*;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, KvTable};
use mainstem_kernels::batch::SpanOutput;
use mainstem_kernels::quant::{INT8_BLOCK_LEN, Int8Block, OperandFormat, QuantType};
use mainstem_kernels::reference::Reference;

/// Number of positions, and the position with the unusual numbers.
const POSITIONS: usize = 40;
const UNUSUAL_POSITION: usize = 20;
const DIM: usize = 72;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// Runs attention with the given K and V; returns (rows, heads, DIM).
fn attend<B: Backend>(rig: &mut Rig<B>, ty: QuantType, [k, v]: &[Vec<f32>; 2]) -> Vec<f32> {
    let (kv_heads, look) = (KV_HEADS, AttentionOptions::PLAIN);
    let case =
        AttentionCase { ty, kv_heads, heads: HEADS, k_dim: DIM, v_dim: DIM, scale: 0.2, options: look };
    let mut cache = case.cache(rig);
    rig.begin(build_batch(
        &[TestSpan::given(0, 0, POSITIONS)],
        SpanOutput::None,
        &mut PageBook::scattered(32),
    ));
    let [k, v] = [k, v].map(|numbers| rig.input(numbers));
    rig.backend.store_kv(KvTable::Own, &k, &v, &mut cache);
    let (q, n) = (rig.input(&noise(400, POSITIONS * HEADS * DIM)), POSITIONS * HEADS * DIM);
    let out = case.attend(rig, &q, &cache, n);
    rig.read(&out, n, format_args!("{case:?}"))
}

/// Returns ordinary K and V.
fn ordinary_kv() -> [Vec<f32>; 2] {
    [401, 402].map(|tag| noise(tag, POSITIONS * KV_HEADS * DIM))
}

/// Tests NaN, infinite and very large numbers in one head of one position: results are finite, and neither
/// other heads nor earlier rows are affected.
pub fn non_finite_values<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for ty in QuantType::kv_cache_types().filter(|ty| ty.is_blocked()) {
        let want = attend(&mut rig, ty, &ordinary_kv());
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            let mut numbers = ordinary_kv();
            numbers.iter_mut().for_each(|numbers| numbers[UNUSUAL_POSITION * KV_HEADS * DIM + 7] = odd);
            let got = attend(&mut rig, ty, &numbers);
            for (at, (got, want)) in got.chunks(DIM).zip(want.chunks(DIM)).enumerate() {
                let what = format_args!(
                    "{ty}, {odd} at {UNUSUAL_POSITION}: row {}, head {}",
                    at / HEADS,
                    at % HEADS
                );
                assert!(got.iter().all(|x| x.is_finite()), "{what}: {got:?}");
                if at / HEADS < UNUSUAL_POSITION || at % HEADS >= HEADS / KV_HEADS {
                    assert_same(what, got, want, bounds.batch_invariance);
                }
            }
        }
    }
}

/// Tests groups with equal numbers, with a tiny range, and with very small or very large numbers.
pub fn extreme_groups<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::kv_cache_types().filter(|ty| ty.is_blocked()) {
        for (minimum, spread) in
            [(0.375, 0.0), (0.0, 0.0), (0.25, 1e-6), (0.0, 1e-7), (0.0, 1e-41), (0.0, 1e4)]
        {
            let [k, v] = ordinary_kv();
            let v: Vec<f32> = v.iter().map(|x| minimum + x * spread).collect();
            let numbers = [k, v];
            let got = attend(&mut Rig::new(make(), limits(32)), ty, &numbers);
            let want = attend(&mut Rig::new(Reference::new(), limits(32)), ty, &numbers);
            let magnitude = (minimum + spread) * (1.0 + 0.2 * DIM as f32);
            let what = format_args!("{ty}, {minimum} and up to {spread} around it");
            assert_close(what, &got, &want, (bounds.attention)(ty), |_| magnitude);
        }
    }
}

/// Tests that inputs of GEMMs are quantized bit for bit as [`Int8Block`] defines, also tiny, huge and
/// non-finite ones: a matrix with single ones returns them.
pub fn quantized_inputs<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    // The scale 1 and the quants of a row.
    let one_at =
        |at| [[0, 0x3c].as_slice(), &std::array::from_fn::<_, 32, _>(|i| u8::from(i == at))].concat();
    let identity: Vec<u8> = (0..INT8_BLOCK_LEN).flat_map(one_at).collect();
    let w = rig.quantized_weight(QuantType::Q8_0, INT8_BLOCK_LEN, INT8_BLOCK_LEN, &identity);
    let is_int8 = w.ty.operand_format(rig.backend.activation_precision()) == OperandFormat::Int8;
    let odd = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, 0.0, 2.5, 1e-44];
    let scales = [1.0, 1e-45, 1e-40, 3e-37, 4e-37, 1e30, 0.0];
    for scale in scales {
        let mut x = scaled(403, odd.len() * INT8_BLOCK_LEN, scale);
        x.chunks_exact_mut(INT8_BLOCK_LEN).zip(odd).for_each(|(row, odd)| row[17] = odd);
        rig.begin_rows(odd.len());
        let (given, mut y) = (rig.input(&x), rig.output(x.len()));
        rig.backend.matmul(odd.len(), &w, None, &given, &mut y);
        let got = rig.read(&y, x.len(), format_args!("rows times single ones"));
        for ((x, got), odd) in x.as_chunks().0.iter().zip(got.chunks(INT8_BLOCK_LEN)).zip(odd) {
            let want = if is_int8 { Int8Block::quantize(x).dequantize() } else { *x };
            let is_same = |(got, want): (&f32, &f32)| got == want || (got.is_nan() && !odd.is_finite());
            let what = "numbers up to";
            assert!(got.iter().zip(&want).all(is_same), "{what} {scale}, and {odd}: {got:?} is not {want:?}");
        }
    }
}
