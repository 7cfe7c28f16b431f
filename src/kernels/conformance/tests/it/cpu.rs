//! Tests of what the conformance suite cannot check: that results agree bit for bit across instruction sets,
//! numbers of threads and tilings.

use mainstem_conformance::{few_types, fingerprint, split_bits};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::quant::OperandFormat;
use mainstem_kernels::random::noise;
use mainstem_kernels::reference::{Reference, sample};
use mainstem_kernels::{
    ActivationPrecision, AttentionShape, Backend, DistanceBuckets, DistanceScores, Fraction, HostBuf,
    HostMemory, KvLayout, KvTable, Mask, OutputColumns, PackedLayout, QuantType, RelativeBias, SampleMode,
    SamplingInputs, SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch,
    StepLimits, StepOutput,
};

fn backend(isa: Isa, threads: usize) -> Option<CpuBackend> {
    CpuBackend::new(CpuConfig { threads, isa, activation_precision: ActivationPrecision::Int8 })
        .inspect_err(|error| eprintln!("skipped: {}: {error}", isa.name()))
        .ok()
}

/// Returns a closure as a trait object, so that generic code that takes it is compiled once.
fn as_dyn(new: &(dyn Fn() -> CpuBackend + Sync)) -> &(dyn Fn() -> CpuBackend + Sync) {
    new
}

fn limits(rows: usize, vocab: usize) -> StepLimits {
    StepLimits {
        slots: rows,
        rows,
        batch_rows: usize::MAX,
        logit_rows: rows,
        positions: 64,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 5,
        vocab,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    }
}

fn f32_buf(values: &[f32]) -> HostBuf {
    let mut buf = HostMemory::default().zeroed(size_of_val(values)).unwrap();
    buf.f32_mut().copy_from_slice(values);
    buf
}

/// Returns the bits of x (m, k) · wᵀ, row by row.
fn gemm_bits(cpu: &mut CpuBackend, ty: QuantType, rows: usize, n: usize, k: usize) -> Vec<Vec<u32>> {
    GemmOperands::new(ty, n, k).multiply(cpu, rows)
}

/// Operands of GEMMs with up to [`GemmOperands::ROWS`] rows.
struct GemmOperands {
    ty: QuantType,
    n: usize,
    k: usize,
    weights: Vec<u8>,
    x: Vec<f32>,
}

impl GemmOperands {
    const ROWS: usize = 64;

    fn new(ty: QuantType, n: usize, k: usize) -> GemmOperands {
        let mut weights = vec![0; ty.bytes(n * k).unwrap()];
        ty.quantize(&noise(1, n * k), &mut weights);
        GemmOperands { ty, n, k, weights, x: noise(2, GemmOperands::ROWS * k) }
    }

    fn multiply(&self, cpu: &mut CpuBackend, rows: usize) -> Vec<Vec<u32>> {
        let GemmOperands { ty, n, k, weights, x } = self;
        cpu.prepare(&limits(rows, 1)).unwrap();
        let w = cpu.upload_weight(*ty, *n, *k, weights).unwrap();
        let (x, bias) = (f32_buf(&x[..rows * k]), f32_buf(&noise(3, *n)));
        let mut y = cpu.alloc(rows * n * 4).unwrap();
        cpu.matmul(rows, &w, Some(&bias), &x, &mut y);
        y.f32().chunks(*n).map(|row| row.iter().map(|y| y.to_bits()).collect()).collect()
    }
}

/// Packs a (n, k) matrix whose stored bytes are a fixed pattern. Returns the packed bytes with their layout.
fn pack<B: Backend>(backend: &mut B, ty: QuantType, n: usize, k: usize) -> (PackedLayout, Vec<u8>) {
    let bytes: Vec<u8> = (0..ty.bytes(k).unwrap() * n).map(|i| (i * 37 % 251) as u8).collect();
    let weight = backend.upload_weight(ty, n, k, &bytes).unwrap();
    let layout = weight.packed_layout(backend.sizes());
    let mut packed = vec![0; layout.bytes];
    backend.download(&weight.buf, 0, &mut packed);
    (layout, packed)
}

/// A weight that was packed for one device is valid on every other one with the same layout, and the layout
/// says which operand type it is for.
#[test]
fn equal_layouts_have_equal_bytes_on_every_device() {
    let mut known = std::collections::HashMap::<String, Vec<u8>>::new();
    for isa in isas() {
        for precision in [ActivationPrecision::Int8, ActivationPrecision::F32] {
            let config = CpuConfig { threads: 2, isa, activation_precision: precision };
            let mut cpu = CpuBackend::new(config).unwrap();
            for ty in QuantType::all() {
                let (layout, packed) = pack(&mut cpu, ty, 35, 512);
                let arrangement = match ty.operand_format(cpu.activation_precision()) {
                    OperandFormat::F32 => "rows/1",
                    OperandFormat::Int8 => "int8-panels-16/1",
                    OperandFormat::Bf16 => "bf16-panels-16x32/1",
                    OperandFormat::Bf16Pair => "f16-panels-16x32/1",
                };
                assert_eq!(layout.to_string(), format!("{arrangement} {ty} (35, 512)"), "{isa:?}");
                assert!(*known.entry(layout.to_string()).or_insert(packed.clone()) == packed, "{layout}");
            }
        }
    }
    for ty in QuantType::all() {
        let (layout, packed) = pack(&mut Reference::new(), ty, 35, 512);
        assert!(known[&layout.to_string()] == packed, "{layout} of the reference backend");
    }
}

/// Packed bytes that were stored by an earlier version of the program must stay valid. If this fails because
/// an arrangement has changed, increase its version.
#[test]
fn a_version_of_a_layout_has_always_the_same_bytes() {
    let mut sums = std::collections::BTreeMap::<String, u64>::new();
    for isa in isas() {
        let mut cpu = backend(isa, 1).expect("this instruction set is available");
        for ty in QuantType::all() {
            let (PackedLayout { arrangement, version, .. }, packed) = pack(&mut cpu, ty, 19, 512);
            // FNV-1a, over all formats that the instruction set has in this arrangement.
            let sum = sums
                .entry(format!("{arrangement}/{version} {}", isa.name()))
                .or_insert(0xcbf2_9ce4_8422_2325);
            *sum =
                packed.iter().fold(*sum, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
        }
    }
    for (layout, sum) in sums {
        match layout.split(' ').next() {
            Some("int8-panels-16/1") => assert_eq!(sum, 0xa945_c665_1e41_6407, "{layout}: {sum:#x}"),
            Some("f16-panels-16x32/1") => assert_eq!(sum, 0x43e7_9037_3c74_f819, "{layout}: {sum:#x}"),
            Some("bf16-panels-16x32/1") => assert_eq!(sum, 0x5f58_b4c2_08fb_94fd, "{layout}: {sum:#x}"),
            // Rows as they are stored, of the remaining formats.
            Some("rows/1") => {}
            _ => panic!("{layout} has no known bytes"),
        }
    }
}

/// Returns the instruction sets that this machine has, without `Auto`.
fn isas() -> impl Iterator<Item = Isa> {
    let named = |isa: &Isa| *isa != Isa::Auto && backend(*isa, 1).is_some();
    let best = backend(Isa::Auto, 1).expect("there is always an instruction set").isa();
    assert!(backend(best, 1).is_some(), "the best one has a name: {best:?}");
    Isa::ALL.into_iter().filter(named)
}

#[test]
fn gemms_have_the_same_bits_for_any_tiling_and_threads() {
    // Incomplete vectors and blocks, several slices, panels and items; and a width at which few outputs fit a
    // panel.
    for (n, k) in [(5, 33), (129, 1000), (131, 992), (67, 2048), (10, 20_000)] {
        for ty in few_types().filter(|ty| ty.bytes(k).is_some()) {
            let operands = GemmOperands::new(ty, n, k);
            for isa in isas() {
                let whole = operands.multiply(
                    &mut backend(isa, 1).expect("this instruction set is available"),
                    GemmOperands::ROWS,
                );
                for threads in 1..4 {
                    let mut cpu = backend(isa, threads).expect("this instruction set is available");
                    for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 64] {
                        let part = operands.multiply(&mut cpu, rows);
                        assert!(part[..] == whole[..rows], "{isa:?} {threads} threads {ty} {rows}x{k}x{n}");
                    }
                }
            }
        }
    }
}

/// Work items of the products of heads have some rows and some outputs, which divide panels and tiles.
#[test]
fn heads_have_the_same_bits_for_any_tiling_and_threads() {
    const HEADS: usize = 3;
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16, QuantType::Q8_0] {
        for (n, k, all) in [(83, 96, 210), (200, 64, 7)] {
            let mut weights = vec![0; ty.bytes(HEADS * n * k).unwrap()];
            ty.quantize(&noise(1, HEADS * n * k), &mut weights);
            let x = noise(2, all * HEADS * k);
            let columns = OutputColumns { first: 3, of: n + 5 };
            let multiply = |isa, threads, rows: usize| {
                let mut cpu = backend(isa, threads).expect("this instruction set is available");
                cpu.prepare(&limits(all, 1)).unwrap();
                let w = cpu.upload_weight(ty, HEADS * n, k, &weights).unwrap();
                let (x, mut y) =
                    (f32_buf(&x[..rows * HEADS * k]), cpu.alloc(rows * HEADS * (n + 5) * 4).unwrap());
                cpu.matmul_heads(rows, HEADS, (&w, columns), &x, &mut y);
                y.f32().iter().map(|y| y.to_bits()).collect::<Vec<u32>>()
            };
            for isa in isas() {
                let mut cpu = backend(isa, 1).expect("this instruction set is available");
                cpu.prepare(&limits(all, 1)).unwrap();
                let mut expected = vec![0; all * HEADS * (n + 5)];
                for (head, own) in weights.chunks_exact(weights.len() / HEADS).enumerate() {
                    let of_head: Vec<f32> =
                        x.chunks_exact(k).skip(head).step_by(HEADS).flatten().copied().collect();
                    let w = cpu.upload_weight(ty, n, k, own).unwrap();
                    let (of_head, mut y) = (f32_buf(&of_head), cpu.alloc(all * n * 4).unwrap());
                    cpu.matmul(all, &w, None, &of_head, &mut y);
                    let places = expected.chunks_exact_mut(n + 5).skip(head).step_by(HEADS);
                    for (to, own) in places.zip(y.f32().chunks_exact(n)) {
                        to[3..3 + n].iter_mut().zip(own).for_each(|(to, own)| *to = own.to_bits());
                    }
                }
                for threads in [1, 2, 3, 5] {
                    for rows in [1, 7, 49, 110, 210].into_iter().filter(|rows| *rows <= all) {
                        let got = multiply(isa, threads, rows);
                        let what = format_args!("{isa:?} {threads} threads {ty} {rows} rows, {n} x {k}");
                        assert!(got[..] == expected[..got.len()], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn fused_instruction_sets_have_the_same_bits() {
    let Some(mut narrow) = backend(Isa::Avx2, 2) else { return };
    for isa in [Isa::Amx, Isa::Avx512, Isa::Avx512F] {
        let Some(mut wide) = backend(isa, 2) else { continue };
        for ty in QuantType::all().filter(|ty| ty.row().quantize.is_some()) {
            let operand = ty.operand_format(wide.activation_precision());
            if let OperandFormat::Bf16 | OperandFormat::Bf16Pair = operand {
                continue;
            }
            let k = if ty.is_blocked() { 1024 } else { 1001 };
            assert!(gemm_bits(&mut wide, ty, 37, 130, k) == gemm_bits(&mut narrow, ty, 37, 130, k), "{ty}");
        }
    }
    let Some(_) = backend(Isa::Avx512F, 2) else { return };
    let bits = |isa| {
        fingerprint::<CpuBackend>(&as_dyn(&|| backend(isa, 2).expect("this instruction set is available")))
    };
    assert!(bits(Isa::Avx512F) == bits(Isa::Avx2));
}

/// One thread merges the results of splits as it goes; several threads store them separately.
#[test]
fn attention_over_splits_has_the_same_bits_with_any_number_of_threads() {
    let mut fused: Option<Vec<u32>> = None;
    // The other instruction sets differ from these only in GEMMs.
    for isa in [Isa::Avx512F, Isa::Avx2, Isa::Portable] {
        if backend(isa, 1).is_none() {
            continue;
        }
        let bits = |threads| {
            split_bits::<CpuBackend>(&as_dyn(&|| {
                backend(isa, threads).expect("this instruction set is available")
            }))
        };
        let alone = bits(1);
        for threads in 2..=4 {
            assert!(bits(threads) == alone, "{isa:?}, {threads} threads");
        }
        if isa != Isa::Portable {
            assert!(alone == *fused.get_or_insert_with(|| alone.clone()), "{isa:?} gives other bits");
        }
    }
}

#[test]
fn a_gemm_without_rows_writes_nothing() {
    for isa in Isa::ALL {
        let Some(mut cpu) = backend(isa, 2) else { continue };
        cpu.prepare(&limits(1, 1)).unwrap();
        for ty in few_types().chain([QuantType::BF16]) {
            let w = cpu.upload_weight(ty, 64, 256, &vec![0; ty.bytes(64 * 256).unwrap()]).unwrap();
            let mut y = f32_buf(&[7.0; 64]);
            cpu.matmul(0, &w, None, &f32_buf(&[1.0; 256]), &mut y);
            assert!(y.f32().iter().all(|y| *y == 7.0), "{isa:?} {ty}");
        }
    }
}

/// AMX sums even and odd products of 32 columns separately, then together. The order is the same for one row
/// and for many.
#[test]
fn amx_sums_bf16_products_in_the_documented_order() {
    let Some(mut cpu) = backend(Isa::Amx, 1) else { return };
    let (rows, n, k) = (17, 5, 70);
    let rounded = |values: Vec<f32>| -> Vec<f32> {
        values.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect()
    };
    let (w, x) = (rounded(noise(1, n * k)), rounded(noise(2, 64 * k)));
    let bias = noise(3, n);
    let element = |row: usize, o: usize| {
        let columns = x[row * k..][..k].chunks(32).zip(w[o * k..][..k].chunks(32));
        let sums = columns.map(|(x, w)| {
            let mut sums = [0f32; 2];
            for (i, (x, w)) in x.iter().zip(w).enumerate() {
                sums[i % 2] = x.mul_add(*w, sums[i % 2]);
            }
            sums[0] + sums[1]
        });
        (sums.fold(0f32, |total, sum| total + sum) + bias[o]).to_bits()
    };
    for (row, got) in gemm_bits(&mut cpu, QuantType::BF16, rows, n, k).iter().enumerate() {
        let expected: Vec<u32> = (0..n).map(|o| element(row, o)).collect();
        assert_eq!(*got, expected, "row {row}");
    }
}

/// Returns a span with a slot's last token, whose successor is wanted.
fn span(slot: u32) -> Span {
    Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot,
        start: 0,
        tokens: SpanTokens::Last,
        table: SpanTable::Own,
        reserved: 1,
        encoder_len: 0,
        output: SpanOutput::Last,
    }
}

/// Samples with many seeds from one row of logits, on the device and with the reference, and compares.
fn assert_samples_match_reference(logits: &[f32], rows: &[SamplingParams]) {
    let mut cpu = backend(Isa::Auto, 2).expect("there is always an instruction set");
    cpu.prepare(&limits(rows.len(), logits.len())).unwrap();
    let mut batch = StepBatch { sampling: rows.to_vec(), ..StepBatch::default() };
    batch.spans.extend((0..rows.len() as u32).map(span));
    cpu.begin_step(&batch);
    let mut out = StepOutput::default();
    cpu.sample(0..rows.len(), &f32_buf(&logits.repeat(rows.len())), SamplingInputs::default(), &mut out);
    for (row, result) in rows.iter().zip(&out.tokens) {
        assert_eq!(Ok(result.token), sample(logits, &[], None, row), "{row:?}");
    }
}

#[test]
fn samples_from_flat_and_steep_logits_equal_the_references() {
    for (tag, steepness) in [(1, 0.0), (2, 1e-3), (3, 1.0), (4, 4.0), (5, 60.0)] {
        let logits: Vec<f32> = noise(tag, 5003).iter().map(|x| x * steepness).collect();
        let mut rows = Vec::new();
        for (i, (top_k, top_p, min_p)) in [
            (0, 1.0, 0.0),
            (0, 0.9, 0.0),
            (0, 1.0, 0.05),
            (300, 0.99, 0.0),
            (5000, 1.0, 0.01),
            (9000, 0.5, 0.1),
        ]
        .into_iter()
        .enumerate()
        {
            rows.extend((0..12).map(|seed| SamplingParams {
                mode: SampleMode::Sample,
                position: i as u32,
                seed,
                temperature: 0.7,
                top_k,
                top_p,
                min_p,
                ..SamplingParams::GREEDY
            }));
        }
        assert_samples_match_reference(&logits, &rows);
    }
}

/// Runs attention of 4 rows, each of which sees all, with a bias and buckets of the given reaches.
fn biased(reach: usize, bucket_reach: usize) {
    let mut cpu = backend(Isa::Auto, 1).expect("there is always an instruction set");
    cpu.prepare(&StepLimits { encoder_positions: 4, ..limits(4, 1) }).unwrap();
    let (k_dim, v_dim) = (1, 1);
    let layout = KvLayout {
        ty: QuantType::F32,
        pages: 4,
        page_positions: 32,
        kv_heads: 1,
        k_dim,
        v_dim,
        v_in_k: false,
    };
    let cache = cpu.alloc_kv(layout).unwrap();
    let tokens = SpanTokens::Given { at: 0, len: 4 };
    let (stack, table) = (SpanStack::Encoder, SpanTable::Scratch);
    let spans = vec![Span { stack, tokens, table, output: SpanOutput::None, ..span(0) }];
    cpu.begin_step(&StepBatch { spans, tokens: vec![0; 4], ..StepBatch::default() });
    cpu.select_stack(stack);
    let bias = RelativeBias { table: f32_buf(&vec![0.0; 2 * reach - 1]), heads: 1, reach };
    let (mask, table) = (Mask::Bidirectional { window: None }, KvTable::Scratch);
    let buckets = f32_buf(&vec![0.0; 2 * bucket_reach - 1]);
    let buckets = DistanceBuckets { table: buckets, count: 1, reach: bucket_reach };
    let products = f32_buf(&[0.0; 4]);
    let distances = DistanceScores { of_queries: &products, of_keys: &products, buckets: &buckets };
    let (bias, distances) = (Some(&bias), Some(distances));
    let shape = AttentionShape { bias, distances, ..AttentionShape::plain(1, 1.0, mask, table) };
    cpu.attention(&shape, &f32_buf(&[0.0; 4]), &cache, &mut f32_buf(&[1.0; 4]));
}

#[test]
fn tables_that_cover_every_distance_are_accepted() {
    biased(4, 4);
}

#[test]
#[should_panic(expected = "the relative position bias covers every distance")]
fn a_bias_that_does_not_cover_every_distance_is_rejected() {
    biased(3, 4);
}

#[test]
#[should_panic(expected = "there is a bucket for every distance")]
fn buckets_that_do_not_cover_every_distance_are_rejected() {
    biased(4, 3);
}

#[test]
fn a_backend_needs_a_thread_and_describes_itself() {
    assert!(
        CpuBackend::new(CpuConfig {
            threads: 0,
            isa: Isa::Auto,
            activation_precision: ActivationPrecision::Int8
        })
        .is_err()
    );
    let cpu = CpuBackend::new(CpuConfig {
        threads: 2,
        isa: Isa::Portable,
        activation_precision: ActivationPrecision::Int8,
    })
    .unwrap();
    assert_eq!(cpu.describe(), "cpu (portable, 2 threads)");
}
