//! A small model of any family, run step by step.
//!
//! Invariant: the tokens of a row depend on its sequence and position alone, not on the output of the model.

mod weights;

mod layers;

use super::family::{Mlp, ModelFamily, PositionEncoding};
use super::inputs::*;
use super::rig::*;
use super::rope::rope_with_dependence;
use super::spans::*;
use mainstem_kernels::backend::{
    Backend, KvLayer, KvLayout, KvTable, Norm, NormKind, RelativeBias, Rope, SamplingInputs,
};
use mainstem_kernels::batch::{
    Page, SamplingParams, SlotMove, SpanOutput, SpanStack, StepBatch, StepOutput, TableUpdate,
};
use mainstem_kernels::quant::QuantType;
use std::collections::BTreeMap;
use weights::{ModelSizes, ModelWeights};

/// A step of the small model.
#[derive(Clone, Default)]
pub(super) struct ModelStep {
    pub(super) moves: Vec<SlotMove>,
    pub(super) spans: Vec<TestSpan>,
    /// Output of each span, with the selected rows; empty means logits of every row.
    pub(super) outputs: Vec<SpanOutput>,
    pub(super) selected_rows: Vec<u32>,
}

/// Offset from the number of a sequence to the number of its hidden states.
const HIDDEN_SEQUENCE_OFFSET: u32 = 1000;

/// A model with one transformer layer, or one encoder layer and one decoder layer, with embedding and head.
/// All weights have one format, and the cache has one.
pub(super) struct TinyModel<B: Backend> {
    family: ModelFamily,
    pub(super) rig: Rig<B>,
    pub(super) book: PageBook,
    /// The sampling parameters of a row by its sequence and position. Without them, the tokens of the test
    /// sequences are sampled, not those of the model, so that every schedule processes the same text.
    pub(super) sampling: Option<fn(u32, usize) -> SamplingParams>,
    /// The tokens that were sampled with these parameters.
    pub(super) sampled: BTreeMap<(u32, usize), u32>,
    sizes: ModelSizes,
    weights: ModelWeights<B>,
    norm: Norm<B::Buf>,
    head_norm: Norm<B::Buf>,
    q_bias: B::Buf,
    rope: Option<Rope<B::Buf>>,
    bias: Option<RelativeBias<B::Buf>>,
    cache: KvLayer<B::Buf>,
    scratch: KvLayer<B::Buf>,
}

impl<B: Backend> TinyModel<B> {
    pub(super) fn new(
        backend: B,
        (family, ty): (ModelFamily, QuantType),
        page_positions: usize,
    ) -> TinyModel<B> {
        let mut rig = Rig::new(backend, limits(page_positions));
        let sizes = ModelSizes::for_format(ty);
        let cached = cache_type(ty);
        let scratch_pages = rig.limits.scratch_positions() / page_positions;
        let [cache, scratch] = [POOL_PAGES, scratch_pages].map(|pages| {
            let (kv_heads, dim) = (ModelSizes::KV_HEADS, sizes.head_dim);
            rig.cache(KvLayout {
                ty: cached,
                pages,
                page_positions,
                kv_heads,
                k_dim: dim,
                v_dim: dim,
                v_in_k: false,
            })
        });
        if let Mlp::Mixture(scoring) = family.mlp {
            let shape = ModelFamily::experts(scoring, sizes.mlp);
            rig.backend.prepare_moe(&shape, sizes.hidden).expect("memory for a small mixture");
        }
        TinyModel {
            book: PageBook::scattered(page_positions),
            sampling: None,
            sampled: BTreeMap::new(),
            weights: ModelWeights::new(&mut rig, ty, &sizes),
            norm: norm_of(&mut rig, family.norm, sizes.hidden),
            head_norm: Norm {
                kind: NormKind::Rms,
                weight: None,
                bias: None,
                sets: 1,
                width: sizes.head_dim,
                eps: 1e-6,
            },
            q_bias: rig.constant(&noise(310, sizes.q_width())),
            rope: rope_of(&mut rig, family.positions, sizes.head_dim),
            bias: bias_of(&mut rig, family.positions),
            cache,
            scratch,
            family,
            rig,
            sizes,
        }
    }

    /// Runs all steps; returns the requested logits and hidden states of all rows.
    pub(super) fn run(&mut self, steps: &[ModelStep]) -> RowResults {
        let mut answers = RowResults::new();
        for step in steps {
            self.book.apply_moves(&step.moves);
            let mut batch = build_batch(&step.spans, SpanOutput::All, &mut self.book);
            batch.moves.clone_from(&step.moves);
            batch.selected_rows.clone_from(&step.selected_rows);
            for (span, output) in batch.spans.iter_mut().zip(&step.outputs) {
                span.output = *output;
            }
            sample_all_greedily(&mut batch);
            self.set_sampling(&step.spans, &mut batch);
            self.rig.begin(batch.clone());
            for stack in [SpanStack::Encoder, SpanStack::Decoder] {
                let rows = stack_rows(&step.spans, stack);
                if self.rig.backend.select_stack(stack) > 0 {
                    let x = self.run_stack(stack, rows.len());
                    self.append_logits(&x, stack, &batch, &rows, &mut answers);
                    self.append_hidden(&x, stack, &batch, &rows, &mut answers);
                }
            }
        }
        answers.retain(|(sequence, _), _| *sequence != HOLE_SEQUENCE);
        answers
    }

    /// Sets the sampling parameters of the output rows, if the model has any.
    fn set_sampling(&self, spans: &[TestSpan], batch: &mut StepBatch) {
        let Some(params) = self.sampling else { return };
        let rows = [SpanStack::Encoder, SpanStack::Decoder].map(|stack| {
            let rows = stack_rows(spans, stack);
            batch.output_rows(stack).map(|row| rows[row]).collect::<Vec<_>>()
        });
        batch.sampling = rows.concat().into_iter().map(|(sequence, at)| params(sequence, at)).collect();
    }

    /// Computes logits, in blocks of as many rows as can have logits at the same time, and samples.
    fn append_logits(
        &mut self,
        x: &B::Buf,
        stack: SpanStack,
        batch: &StepBatch,
        rows: &[(u32, usize)],
        answers: &mut RowResults,
    ) {
        let vocab = self.rig.limits.vocab;
        let rows: Vec<(u32, usize)> = batch.output_rows(stack).map(|row| rows[row]).collect();
        let mut out = StepOutput::with_capacity(&self.rig.limits);
        for start in (0..rows.len()).step_by(self.rig.limits.logit_rows) {
            let block = start..rows.len().min(start + self.rig.limits.logit_rows);
            let [mut gathered, mut logits] =
                [self.sizes.hidden, vocab].map(|width| self.rig.output(block.len() * width));
            self.rig.backend.gather_output_rows(block.clone(), self.sizes.hidden, x, &mut gathered);
            let y = self.normalize(block.len(), &gathered);
            self.rig.backend.matmul(block.len(), &self.weights.head, None, &y, &mut logits);
            if let Some(cap) = self.family.softcap {
                self.rig.backend.softcap(block.len(), vocab, cap, &mut logits);
            }
            let got = self.rig.read(&logits, block.len() * vocab, format_args!("logits of rows {block:?}"));
            answers.extend(
                rows[block.clone()].iter().copied().zip(got.chunks_exact(vocab).map(<[f32]>::to_vec)),
            );
            if self.sampling.is_none() {
                let next = rows[block.clone()].iter().map(|&(sequence, p)| token_at(sequence, p + 1));
                logits = self.rig.input(&next.flat_map(|token| one_hot(token, vocab)).collect::<Vec<_>>());
            }
            self.rig.backend.sample(block, &logits, SamplingInputs::default(), &mut out);
        }
        self.sampled.extend(rows.into_iter().zip(out.tokens.iter().map(|result| result.token)));
    }

    /// Returns the hidden states of the spans that request them.
    fn append_hidden(
        &mut self,
        x: &B::Buf,
        stack: SpanStack,
        batch: &StepBatch,
        rows: &[(u32, usize)],
        answers: &mut RowResults,
    ) {
        let y = self.normalize(rows.len(), x);
        let mut out = StepOutput::with_capacity(&self.rig.limits);
        let mut keys = Vec::new();
        for run in batch.hidden_rows(stack) {
            keys.extend(
                rows[run.clone()]
                    .iter()
                    .map(|(sequence, position)| (sequence + HIDDEN_SEQUENCE_OFFSET, *position)),
            );
            self.rig.backend.append_hidden(run, self.sizes.hidden, &y, &mut out);
        }
        answers.extend(keys.into_iter().zip(out.hidden.chunks_exact(self.sizes.hidden).map(<[f32]>::to_vec)));
    }

    /// Fills every page, and the scratch positions that encoder inputs use, with NaN, as if another sequence
    /// had left it there.
    pub(super) fn poison(&mut self) {
        let size = self.rig.limits.page_positions;
        let width = self.sizes.kv_width();
        for page in 1..POOL_PAGES as Page {
            let tables = vec![TableUpdate { slot: 0, table: KvTable::Own, index: 0, page }];
            let batch =
                build_batch(&[TestSpan::given(0, 0, size)], SpanOutput::None, &mut PageBook::scattered(512));
            self.rig.begin(StepBatch { table_updates: tables, ..batch });
            let [k, v] = [(); 2].map(|()| self.rig.input(&vec![f32::NAN; size * width]));
            self.rig.backend.store_kv(KvTable::Own, &k, &v, &mut self.cache);
        }
        let encoder_input =
            |slot| TestSpan { len: self.rig.limits.encoder_positions, ..TestSpan::encoder_input(slot) };
        self.rig.begin(build_batch(
            &[encoder_input(0), encoder_input(1)],
            SpanOutput::None,
            &mut PageBook::scattered(512),
        ));
        let rows = self.rig.backend.select_stack(SpanStack::Encoder);
        let [k, v] = [(); 2].map(|()| self.rig.input(&vec![f32::NAN; rows * width]));
        self.rig.backend.store_kv(KvTable::Scratch, &k, &v, &mut self.scratch);
    }
}

/// Returns the format of the weights if the KV cache supports it, another format otherwise.
fn cache_type(weights: QuantType) -> QuantType {
    match weights {
        QuantType::Q4_0 => QuantType::G4_B64,
        ty if QuantType::kv_cache_types().any(|cached| cached == ty) => ty,
        _ => QuantType::F16,
    }
}

/// Creates a norm; layer norm has a bias here, RMS norm has none.
fn norm_of<B: Backend>(rig: &mut Rig<B>, kind: NormKind, width: usize) -> Norm<B::Buf> {
    let bias = (kind == NormKind::Layer).then(|| rig.constant(&noise(317, width)));
    Norm { kind, weight: Some(rig.constant(&noise(309, width))), bias, sets: 1, width, eps: 1e-5 }
}

/// Creates the RoPE of a family, if it has one.
fn rope_of<B: Backend>(
    rig: &mut Rig<B>,
    positions: PositionEncoding,
    head_dim: usize,
) -> Option<Rope<B::Buf>> {
    let PositionEncoding::Rotary(style, dims, lengths) = positions else { return None };
    Some(rope_with_dependence(rig, if dims == 0 { head_dim } else { dims }, style, lengths))
}

/// Creates the relative position bias of a family, if it has one.
fn bias_of<B: Backend>(rig: &mut Rig<B>, positions: PositionEncoding) -> Option<RelativeBias<B::Buf>> {
    let (heads, reach) = (ModelSizes::HEADS, 150);
    (positions == PositionEncoding::RelativeBias).then(|| {
        let table = rig.constant(&scaled(318, heads * (2 * reach - 1), 2.0));
        RelativeBias { table, heads, reach }
    })
}
