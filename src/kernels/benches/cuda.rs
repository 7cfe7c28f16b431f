//! The speed of a GPU's kernels, as shares of the rate at which it adds long vectors: products with weights
//! of several formats at 1 to 512 rows, attention over long caches, sampling, and norms.
//!
//! `cargo bench -p mainstem-kernels --bench cuda [-- NAME...]` measures those whose names contain one of the
//! arguments, and prints a line of JSON for each: the median seconds, the bytes that a pass must read and
//! their rate. Weights and caches exceed the GPU's L2 cache several times. NVRTC is found as the program
//! finds it, or in `NVRTC_FOLDER`. `SMALL=1` runs tiny shapes once, to try the program on an emulated GPU.
//! Invariant: every format multiplies the same shapes.

use mainstem_kernels::batch::{
    SampleMode, SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch,
    StepOutput, TableUpdate,
};
use mainstem_kernels::cuda::{CudaBackend, CudaBuf, Driver, ProgramCache};
use mainstem_kernels::random::noise;
use mainstem_kernels::{
    ActivationPrecision, AttentionShape, Backend, Fraction, KvLayout, KvTable, Mask, Norm, NormKind,
    QuantType, SamplingInputs, StepLimits,
};
use std::path::Path;
use std::time::Instant;

/// The sizes of what is measured.
struct Sizes {
    /// Outputs and inputs of a weight.
    width: usize,
    /// Bytes of the weights of a format together.
    weight_bytes: usize,
    /// Tokens in the cache of each sequence.
    positions: usize,
    sequences: usize,
    vocab: usize,
    times: usize,
}

const FULL: Sizes =
    Sizes { width: 4096, weight_bytes: 400 << 20, positions: 4096, sequences: 64, vocab: 128_256, times: 20 };
const SMALL: Sizes =
    Sizes { width: 256, weight_bytes: 1 << 17, positions: 64, sequences: 2, vocab: 1000, times: 1 };

const ROWS: [usize; 8] = [1, 2, 4, 8, 16, 64, 256, 512];
const FORMATS: [&str; 8] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_K", "q6_K", "q3h_b64t1"];
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const PAGE: usize = 64;

fn main() {
    let names: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let is_wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part.as_str()));
    let sizes = if std::env::var_os("SMALL").is_some() { SMALL } else { FULL };
    let folder = std::env::var_os("NVRTC_FOLDER");
    let driver = Driver::open().expect("a driver and a GPU");
    let programs = ProgramCache::open(folder.as_deref().map(Path::new), None, driver.version());
    let programs = programs.expect("NVRTC");
    let gpu = CudaBackend::new(&driver, 0, programs, ActivationPrecision::Int8).expect("GPU 0");
    let mut bench = Bench { gpu, sizes, add_rate: f64::NAN };
    bench.gpu.prepare(&bench.limits()).expect("memory for a step");
    println!("{{\"device\": \"{}\"}}", bench.gpu.describe());
    bench.add();
    for name in FORMATS.into_iter().filter(|name| is_wanted(name)) {
        bench.products(QuantType::by_name(name).expect("the names are those of formats"));
    }
    if is_wanted("attention") {
        for ty in QuantType::kv_cache_types() {
            bench.attention(ty);
        }
    }
    if is_wanted("sample") {
        bench.sampling();
    }
    if is_wanted("norm") {
        bench.norms();
    }
}

struct Bench {
    gpu: CudaBackend,
    sizes: Sizes,
    /// Bytes per second that additions of long vectors move: the yardstick of all others.
    add_rate: f64,
}

impl Bench {
    fn limits(&self) -> StepLimits {
        let Sizes { positions, sequences, vocab, .. } = self.sizes;
        StepLimits {
            slots: sequences,
            rows: 512,
            batch_rows: usize::MAX,
            logit_rows: sequences,
            positions: positions + 1,
            encoder_positions: 0,
            page_positions: PAGE,
            window: None,
            top_logprobs: 0,
            vocab,
            hidden: 0,
            drafts: 0,
            draft_logits: false,
            counts_tokens: false,
            opening_rows: 0,
            attended_fraction: Fraction::ONE,
        }
    }

    /// Measures `work`, which queues operations, and prints its rate for the bytes that it must move.
    fn measure(&mut self, name: &str, bytes: usize, mut work: impl FnMut(&mut CudaBackend)) -> f64 {
        let mut seconds: Vec<f64> = (0..self.sizes.times + 1)
            .map(|_| {
                self.gpu.begin_step(&StepBatch::default());
                self.gpu.end_step();
                let start = Instant::now();
                work(&mut self.gpu);
                start.elapsed().as_secs_f64()
            })
            .skip(1)
            .collect();
        seconds.sort_by(f64::total_cmp);
        let (median, rate) = (seconds[seconds.len() / 2], bytes as f64 / seconds[seconds.len() / 2]);
        println!(
            "{{\"name\": \"{name}\", \"seconds\": {median:.3e}, \"gb_per_s\": {:.1}, \"of_add\": {:.3}}}",
            rate / 1e9,
            if self.add_rate.is_nan() { 1.0 } else { rate / self.add_rate }
        );
        rate
    }

    fn buffer(&mut self, values: &[f32]) -> CudaBuf {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut buf = self.gpu.alloc(bytes.len()).expect("memory of the GPU");
        self.gpu.upload(&mut buf, 0, &bytes);
        buf
    }

    fn add(&mut self) {
        let n = self.sizes.weight_bytes / 4;
        let mut x = self.gpu.alloc(4 * n).expect("memory of the GPU");
        let y = self.gpu.alloc(4 * n).expect("memory of the GPU");
        self.add_rate = self.measure("add", 3 * 4 * n, |gpu| {
            gpu.begin_step(&StepBatch::default());
            gpu.add(1, n, 1.0, &mut x, &y);
            gpu.end_step();
        });
    }

    fn products(&mut self, ty: QuantType) {
        let (width, mut bytes) = (self.sizes.width, Vec::new());
        bytes.resize(ty.bytes(width * width).expect("whole blocks"), 0);
        ty.quantize(&noise(1, width * width), &mut bytes);
        let count = self.sizes.weight_bytes.div_ceil(bytes.len());
        let upload = |_| self.gpu.upload_weight(ty, width, width, &bytes).expect("memory of the GPU");
        let weights: Vec<_> = (0..count).map(upload).collect();
        let x = self.buffer(&noise(2, 512 * width));
        let mut y = self.buffer(&vec![0.0; 512 * width]);
        for rows in ROWS {
            self.measure(&format!("product {ty} {rows}"), count * bytes.len(), |gpu| {
                gpu.begin_step(&StepBatch::default());
                weights.iter().for_each(|w| gpu.matmul(rows, w, None, &x, &mut y));
                gpu.end_step();
            });
        }
    }

    /// Measures one generated token of each sequence over its whole cache.
    fn attention(&mut self, ty: QuantType) {
        let Sizes { positions, sequences, .. } = self.sizes;
        let pages = 1 + sequences * (positions / PAGE + 1);
        let (kv_heads, k_dim, v_dim) = (KV_HEADS, HEAD_DIM, HEAD_DIM);
        let layout = KvLayout { ty, pages, page_positions: PAGE, kv_heads, k_dim, v_dim, v_in_k: false };
        let cache = self.gpu.alloc_kv(layout).expect("memory of the GPU");
        let q = self.buffer(&noise(3, sequences * HEADS * HEAD_DIM));
        let mut out = self.buffer(&vec![0.0; sequences * HEADS * HEAD_DIM]);
        let batch = self.decode_batch();
        let bytes = sequences * positions * layout.position_bytes().expect("a small cache");
        self.measure(&format!("attention {ty} {sequences}"), bytes, |gpu| {
            gpu.begin_step(&batch);
            let (mask, table) = (Mask::Causal { window: None }, KvTable::Own);
            let scale = (HEAD_DIM as f32).powf(-0.5);
            let shape = AttentionShape::plain(HEADS, scale, mask, table);
            gpu.attention(&shape, &q, &cache, &mut out);
            gpu.end_step();
        });
    }

    fn decode_batch(&self) -> StepBatch {
        let Sizes { positions, sequences, .. } = self.sizes;
        let span = |slot| Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot,
            start: positions as u32,
            tokens: SpanTokens::Last,
            table: SpanTable::Own,
            reserved: positions as u32 + 1,
            encoder_len: 0,
            output: SpanOutput::Last,
        };
        let spans: Vec<Span> = (0..sequences as u32).map(span).collect();
        let of_slot = (positions / PAGE + 1) as u32;
        let update = |at: u32| TableUpdate {
            slot: at / of_slot,
            table: KvTable::Own,
            index: at % of_slot,
            page: at + 1,
        };
        let table_updates = (0..sequences as u32 * of_slot).map(update).collect();
        let params = SamplingParams {
            mode: SampleMode::Sample,
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            ..SamplingParams::GREEDY
        };
        StepBatch { spans, table_updates, sampling: vec![params; sequences], ..StepBatch::default() }
    }

    fn sampling(&mut self) {
        let Sizes { sequences, vocab, .. } = self.sizes;
        let logits = self.buffer(&noise(4, sequences * vocab));
        let (batch, mut out) = (self.decode_batch(), StepOutput::with_capacity(&self.limits()));
        for rows in [1, sequences] {
            self.measure(&format!("sample {rows}"), rows * vocab * 4, |gpu| {
                gpu.begin_step(&batch);
                out.clear();
                gpu.sample(0..rows, &logits, SamplingInputs::default(), &mut out);
                gpu.end_step();
            });
        }
    }

    fn norms(&mut self) {
        let width = self.sizes.width;
        let weight = Some(self.buffer(&noise(5, width)));
        let norm = Norm { kind: NormKind::Rms, weight, bias: None, sets: 1, width, eps: 1e-5 };
        let (x, mut y) = (self.buffer(&noise(6, 512 * width)), self.buffer(&vec![0.0; 512 * width]));
        for rows in [1, 512] {
            self.measure(&format!("norm {rows}"), rows * width * 8, |gpu| {
                gpu.begin_step(&StepBatch::default());
                gpu.norm(rows, &norm, &x, &mut y);
                gpu.end_step();
            });
        }
    }
}
