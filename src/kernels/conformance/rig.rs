//! A backend that is prepared for a test, with helpers for buffers and steps.

use super::inputs::*;
use super::memo::ROPE_TABLES;
use super::spans::*;
use mainstem_kernels::backend::{
    Backend, KvLayer, KvLayout, Rope, RopeStyle, SamplingInputs, StepLimits, Weight,
};
use mainstem_kernels::batch::{SamplingParams, SlotMove, SpanOutput, StepBatch, StepOutput};
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;
use std::collections::BTreeMap;
use std::fmt::Arguments;

/// Results of rows, by sequence and position.
pub(super) type RowResults = BTreeMap<(u32, usize), Vec<f32>>;

/// Values after the end of every written buffer, which must not change.
pub(super) const GUARD: [f32; 5] = [-1.25e30, 77.0, 3.5, -1e-3, 0.625];

/// Values after the end of every read buffer, which must not affect a result.
pub(super) const TRAP: [f32; 5] = [f32::NAN; 5];

/// A prepared backend.
pub(super) struct Rig<B: Backend> {
    pub(super) backend: B,
    pub(super) limits: StepLimits,
    pub(super) step: u64,
}

impl<B: Backend> Rig<B> {
    pub(super) fn new(mut backend: B, limits: StepLimits) -> Rig<B> {
        backend.prepare(&limits).expect("memory for a small step");
        Rig { backend, limits, step: 0 }
    }

    /// Ends the step that is open, if there is one, and begins another.
    pub(super) fn begin(&mut self, mut batch: StepBatch) {
        if self.step > 0 {
            self.backend.end_step();
        }
        batch.step = self.step;
        self.step += 1;
        self.backend.begin_step(&batch);
    }

    /// Begins a step of `rows` rows, for operations that use nothing else of it.
    pub(super) fn begin_rows(&mut self, rows: usize) {
        let book = &mut PageBook::scattered(self.limits.page_positions);
        self.begin(build_batch(&[TestSpan::given(0, 0, rows)], SpanOutput::None, book));
    }

    /// Returns the key of a memoized result: the operation and its inputs, the precision of activations, and
    /// the limits.
    pub(super) fn memo_key(&self, operation: impl std::fmt::Debug) -> String {
        format!("{operation:?}, {:?}, {:?}", self.backend.activation_precision(), self.limits)
    }

    /// Runs a step that samples (or scores) the given tokens. The logits leave no other choice.
    pub(super) fn sample_tokens(
        &mut self,
        pieces: &[TestSpan],
        tokens: &[u32],
        samples: &[SamplingParams],
        moves: &[SlotMove],
    ) -> StepOutput {
        let mut batch =
            build_batch(pieces, SpanOutput::All, &mut PageBook::scattered(self.limits.page_positions));
        batch.moves = moves.to_vec();
        batch.sampling = samples.to_vec();
        self.begin(batch);
        let logits: Vec<f32> = tokens.iter().flat_map(|token| one_hot(*token, self.limits.vocab)).collect();
        let logits = self.input(&logits);
        let mut out = StepOutput::with_capacity(&self.limits);
        self.backend.sample(0..tokens.len(), &logits, SamplingInputs::default(), &mut out);
        out
    }

    /// Begins a step, and returns the last tokens of these slots. The vocabulary has less than 2^24 tokens.
    pub(super) fn last_tokens(&mut self, slots: &[u32]) -> Vec<u32> {
        let vocab = self.limits.vocab;
        let table = self.weight(QuantType::F32, vocab, &(0..vocab).map(|id| id as f32).collect::<Vec<_>>());
        let last = |slot: &u32| TestSpan { sequence: 0, ..TestSpan::last(*slot, 0) };
        let spans: Vec<TestSpan> = slots.iter().map(last).collect();
        let book = &mut PageBook::scattered(self.limits.page_positions);
        self.begin(build_batch(&spans, SpanOutput::None, book));
        let mut x = self.output(slots.len());
        self.backend.embed(&table, 0, &mut x);
        let tokens = self.read(&x, slots.len(), format_args!("embed of last tokens"));
        tokens.into_iter().map(|token| token as u32).collect()
    }

    /// Allocates a buffer of exactly these values.
    pub(super) fn constant(&mut self, values: &[f32]) -> B::Buf {
        let bytes = quantize_values(QuantType::F32, values);
        let mut buf = self.backend.alloc(bytes.len()).expect("memory for a small buffer");
        self.backend.upload(&mut buf, 0, &bytes);
        buf
    }

    /// Allocates a buffer of these values for reading.
    pub(super) fn input(&mut self, values: &[f32]) -> B::Buf {
        self.constant(&[values, &TRAP].concat())
    }

    /// Allocates a buffer of these values for reading and writing.
    pub(super) fn in_out(&mut self, values: &[f32]) -> B::Buf {
        self.constant(&[values, &GUARD].concat())
    }

    /// Allocates a buffer for writing `n` values, which are NaN before.
    pub(super) fn output(&mut self, n: usize) -> B::Buf {
        self.in_out(&vec![f32::NAN; n])
    }

    /// Reads the `n` values of a written buffer, and asserts that the guard after them is unchanged.
    pub(super) fn read(&mut self, buf: &B::Buf, n: usize, what: Arguments) -> Vec<f32> {
        let mut bytes = vec![0; (n + GUARD.len()) * 4];
        self.backend.download(buf, 0, &mut bytes);
        assert!(
            bytes[n * 4..] == quantize_values(QuantType::F32, &GUARD),
            "{what}: wrote beyond its {n} values"
        );
        let mut values = vec![0.0; n];
        QuantType::F32.dequantize(&bytes[..n * 4], &mut values);
        values
    }

    /// Uploads a matrix of `n` rows with these values.
    pub(super) fn weight(&mut self, ty: QuantType, n: usize, values: &[f32]) -> Weight<B::Buf> {
        self.quantized_weight(ty, n, values.len() / n, &quantize_values(ty, values))
    }

    /// Uploads a quantized matrix.
    pub(super) fn quantized_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Weight<B::Buf> {
        let weight = self.backend.upload_weight(ty, n, k, bytes).expect("memory for a small matrix");
        assert_eq!((weight.ty, weight.n, weight.k), (ty, n, k), "shape of an uploaded weight");
        weight
    }

    /// Allocates a cache.
    pub(super) fn cache(&mut self, layout: KvLayout) -> KvLayer<B::Buf> {
        let cache = self.backend.alloc_kv(layout).expect("memory for a small cache");
        assert_eq!(cache.layout, layout, "layout of an allocated cache");
        cache
    }

    /// Returns RoPE for every position within the limits, with one table.
    pub(super) fn rope(&mut self, dims: usize, style: RopeStyle) -> Rope<B::Buf> {
        self.rope_with_tables(dims, style, &[(usize::MAX, 10_000.0)])
    }

    /// Returns RoPE for every position within the limits, with a table for each (reserved length, base).
    pub(super) fn rope_with_tables(
        &mut self,
        dims: usize,
        style: RopeStyle,
        bases: &[(usize, f64)],
    ) -> Rope<B::Buf> {
        let positions = self.limits.positions;
        let table = |base: f64| {
            let angle = move |p: usize, i: usize| p as f64 * base.powf(-2.0 * i as f64 / dims as f64);
            let pair = move |p, i| [angle(p, i).cos() as f32, angle(p, i).sin() as f32];
            let all = || (0..positions).flat_map(|p| (0..dims / 2).flat_map(move |i| pair(p, i))).collect();
            ROPE_TABLES.get((positions, dims, base.to_bits()), all)
        };
        let tables = bases.iter().map(|(bound, base)| (*bound, self.constant(&table(*base)))).collect();
        Rope { tables, positions, dims, style, dynamic_ntk: None }
    }
}

/// Prepares the backend under test and the reference backend.
pub(super) fn rigs<B: Backend>(make: &impl Fn() -> B, page_positions: usize) -> (Rig<B>, Rig<Reference>) {
    let device = make();
    let oracle = Reference::with_precision(device.activation_precision());
    (Rig::new(device, limits(page_positions)), Rig::new(oracle, limits(page_positions)))
}
