//! The reference backend: every operation as a simple loop, and the definition of token sampling.
//!
//! It is slow by design. Sums run in F64 in index order, so that the only error is the rounding of stored
//! values. The crate `mainstem-conformance` compares every fast backend with it. This file lists the
//! operations; the other files hold the rows of the current step, the formulas, and sampling.
//! Invariant: no threads, no unsafe code, and no state beyond the slots and the current rows.

mod rows;

mod formulas;

mod sample;

mod sample_row;

mod sizes;

pub mod draw;

#[cfg(test)]
pub(crate) use formulas::erfc;
pub use formulas::route;
pub use sample::{LogProbs, is_finite_row, logprobs, rank, sample, sample_counted};
pub use sizes::ReferenceSizes;

use crate::backend::{
    Activation, ActivationType, AttentionShape, Backend, DeviceError, DeviceSizes, Experts, Fraction,
    KvLayer, KvLayout, KvTable, MoeShape, Norm, OutputColumns, Rope, RopeStyle, SamplingInputs, StepLimits,
    Weight,
};
use crate::batch::{
    Page, PageCopy, SampleMode, SpanStack, SpanTable, StepBatch, StepOutput, StepState, StepTimes,
    TokenCounts,
};
use crate::clock::StepClock;
use crate::collective::Collective;
use crate::host::{HostBuf, HostLists, HostMemory};
use crate::quant::{ActivationPrecision, QuantType};
use crate::stage::StageCollective;
use formulas::{
    activation_factor, distance_score, dot, mixture, normalize_row, read_history, read_matrix_row,
    relative_bias, round_input, row_angles, scores, select_top_k, sigmoid, softcap_value, weighted_sum,
    write_run,
};
use rows::{NOT_PREPARED, visible_positions};

pub use formulas::apply_activation;
use sample_row::{append_result, sample_row};
use std::ops::Range;

/// The reference backend (the oracle of the conformance tests), in host memory.
#[derive(Debug, Default)]
pub struct Reference {
    collective: StageCollective,
    activation_precision: ActivationPrecision,
    /// The state of the slots, and the current rows.
    step: Option<StepState>,
    /// Kept logits of drafts, (slots, drafts, vocabulary).
    draft_logits: Option<HostBuf>,
    counts: TokenCounts,
    /// Counts the memory of the counts.
    lists: Option<HostLists>,
    memory: HostMemory,
    clock: StepClock,
}

impl Reference {
    /// The element type of activations.
    pub const ACTIVATION_TYPE: ActivationType = ActivationType::F32;

    /// Creates a backend without slots, which [`Backend::prepare`] allocates. Activations stay F32.
    pub fn new() -> Reference {
        Reference::with_precision(ActivationPrecision::F32)
    }

    /// Creates a backend with the given precision of activations.
    pub fn with_precision(inputs: ActivationPrecision) -> Reference {
        Reference { activation_precision: inputs, ..Reference::default() }
    }
}

impl Reference {
    /// Samples or scores output rows.
    fn sample_rows(
        &mut self,
        outputs: Range<usize>,
        logits: &HostBuf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    ) {
        let step = self.step.as_mut().expect(NOT_PREPARED);
        let kept = self.draft_logits.as_mut().map_or(&mut [][..], HostBuf::f32_mut);
        let (vocab, first) = (step.limits.vocab, step.first_sample());
        let width = inputs.width.unwrap_or(vocab);
        let rows =
            || outputs.clone().zip(logits.f32().chunks_exact(width).map(|row| &row[..width.min(vocab)]));
        for (i, logits) in rows() {
            if let Some(at) = step.kept_row(i) {
                let kept = &mut kept[at * vocab..][..vocab];
                kept.fill(f32::NEG_INFINITY);
                kept[..logits.len()].copy_from_slice(logits);
            }
        }
        for (i, logits) in rows().filter(|(i, _)| step.samples()[*i].mode == SampleMode::Host) {
            inputs.begin_draw(first + i, step.host_row(i, logits, kept));
        }
        for (i, logits) in rows() {
            let params = step.samples()[i];
            let counted = step.token_slot(i).filter(|_| params.is_penalized());
            let counts = counted.map_or(&[][..], |slot| self.counts.of(slot));
            let token = sample_row(first + i, logits, (&params, counts), inputs);
            if let Ok(token) = token
                && !matches!(params.mode, SampleMode::Score(_))
            {
                step.store_token(i, token);
                counted.into_iter().for_each(|slot| self.counts.add(slot, token));
            }
            append_result(token, logits, &params, out);
        }
    }
}

impl Backend for Reference {
    type Buf = HostBuf;

    fn sizes(&self) -> &dyn DeviceSizes {
        &ReferenceSizes
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.used()
    }

    fn activation_precision(&self) -> ActivationPrecision {
        self.activation_precision
    }

    fn join_stage(&mut self, stage: Box<dyn Collective>) {
        self.collective = StageCollective::new(stage);
    }

    fn rank_and_count(&self) -> (usize, usize) {
        self.collective.rank_and_count()
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostBuf, DeviceError> {
        self.memory.zeroed(bytes)
    }

    fn upload(&mut self, to: &mut HostBuf, offset: usize, bytes: &[u8]) {
        to.bytes_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    fn download(&mut self, from: &HostBuf, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&from.bytes()[offset..][..bytes.len()]);
    }

    fn prepare_weight(&mut self, _: QuantType, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn host_bytes(buf: &mut HostBuf) -> Option<&mut [u8]> {
        Some(buf.bytes_mut())
    }

    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Result<Weight<HostBuf>, DeviceError> {
        assert_eq!(Some(bytes.len()), ty.bytes(k).map(|row| row * n), "size of a {n} x {k} matrix of {ty}");
        let mut buf = self.memory.zeroed(bytes.len())?;
        buf.bytes_mut().copy_from_slice(bytes);
        Ok(Weight { id: None, buf, ty, n, k })
    }

    /// Both buffers are (pages, page_positions, kv_heads) runs of format `layout.ty`.
    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        assert_eq!(layout.page_positions % KvLayout::BLOCK_POSITIONS, 0, "pages hold whole blocks");
        let [k, v] = ReferenceSizes.kv_bytes(&layout)?;
        Ok(KvLayer { k: self.memory.zeroed(k)?, v: self.memory.zeroed(v)?, layout })
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        self.draft_logits = Some(self.memory.zeroed(limits.draft_logits_len() * size_of::<f32>())?);
        let count_bytes = limits.token_counts_len() * size_of::<u16>();
        self.lists = None;
        self.memory.check(count_bytes)?;
        self.lists.insert(self.memory.lists()).count(count_bytes);
        self.counts = TokenCounts::new(vec![0; limits.token_counts_len()], limits.vocab);
        self.step = Some(StepState::new(limits));
        Ok(())
    }

    fn begin_step(&mut self, batch: &StepBatch) {
        self.clock.begin();
        self.counts.begin(batch);
        self.step_mut().begin(batch);
    }

    fn map_rows(&mut self, batch: &StepBatch) {
        self.step_mut().map(batch);
    }

    fn end_step(&mut self) -> StepTimes {
        self.clock.end()
    }

    fn row_batches(&self, stack: SpanStack) -> usize {
        self.step().row_batches(stack)
    }

    fn select_rows(&mut self, stack: SpanStack, batch: usize) -> Range<usize> {
        self.step_mut().select(stack, batch)
    }

    fn copy_pages(&mut self, table: KvTable, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
        for buf in [&mut cache.k, &mut cache.v] {
            let page_bytes = buf.len() / cache.layout.pages;
            for copy in copies.iter().filter(|copy| copy.table == table) {
                let from = copy.from as usize * page_bytes;
                buf.bytes_mut().copy_within(from..from + page_bytes, copy.to as usize * page_bytes);
            }
        }
    }

    fn embed(&mut self, table: &Weight<HostBuf>, first: usize, x: &mut HostBuf) {
        let tokens = first..first + table.n;
        for (row, x) in self.step().rows().iter().zip(x.f32_mut().chunks_exact_mut(table.k)) {
            match tokens.contains(&(row.token as usize)) {
                true => read_matrix_row(table.ty, &table.buf, row.token as usize - first, x),
                false => x.fill(0.0),
            }
        }
    }

    fn embed_positions(&mut self, table: &Weight<HostBuf>, offset: usize, type_rows: usize, x: &mut HostBuf) {
        let mut vector = vec![0.0; table.k];
        for (row, x) in self.step().rows().iter().zip(x.f32_mut().chunks_exact_mut(table.k)) {
            let at = row.position_row(offset, type_rows);
            assert!(at < table.n, "position {} has no embedding", row.position);
            read_matrix_row(table.ty, &table.buf, at, &mut vector);
            x.iter_mut().zip(&vector).for_each(|(x, v)| *x += v);
        }
    }

    fn matmul_to(
        &mut self,
        rows: usize,
        (w, OutputColumns { first, of }): (&Weight<HostBuf>, OutputColumns),
        bias: Option<&HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let (x, y) = (&x.f32()[..rows * w.k], &mut y.f32_mut()[..rows * of]);
        let mut weights = vec![0.0; w.k];
        let x = &*round_input(w.ty.operand_format(self.activation_precision), x);
        for o in 0..w.n {
            read_matrix_row(w.ty, &w.buf, o, &mut weights);
            let start = bias.map_or(0.0, |bias| f64::from(bias.f32()[first + o]));
            for r in 0..rows {
                y[r * of + first + o] = (start + dot(&x[r * w.k..][..w.k], &weights)) as f32;
            }
        }
    }

    fn matmul_heads(
        &mut self,
        rows: usize,
        heads: usize,
        (w, columns): (&Weight<HostBuf>, OutputColumns),
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let x = &*round_input(w.ty.operand_format(self.activation_precision), &x.f32()[..rows * heads * w.k]);
        let (n, mut weights) = (w.n / heads, vec![0.0; w.k]);
        for o in 0..w.n {
            read_matrix_row(w.ty, &w.buf, o, &mut weights);
            for at in (o / n..rows * heads).step_by(heads) {
                let y = &mut y.f32_mut()[at * columns.of + columns.first..][..n];
                y[o % n] = dot(&x[at * w.k..][..w.k], &weights) as f32;
            }
        }
    }

    fn norm(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &HostBuf, y: &mut HostBuf) {
        let len = rows * norm.width;
        y.f32_mut()[..len].copy_from_slice(&x.f32()[..len]);
        self.norm_in_place(rows, norm, y);
    }

    fn norm_in_place(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &mut HostBuf) {
        for (row, x) in x.f32_mut()[..rows * norm.width].chunks_exact_mut(norm.width).enumerate() {
            normalize_row(norm, row, x);
        }
    }

    fn rope_angles(&mut self, rope: &Rope<HostBuf>, angles: &mut HostBuf) {
        let step = self.step();
        for (row, angles) in step.rows().iter().zip(angles.f32_mut().chunks_exact_mut(rope.dims)) {
            row_angles(rope, row.position, step.span_of(row).reserved, angles);
        }
    }

    fn rope(
        &mut self,
        rope: &Rope<HostBuf>,
        angles: &HostBuf,
        heads: usize,
        head_dim: usize,
        x: &mut HostBuf,
    ) {
        assert!(rope.dims <= head_dim && rope.dims.is_multiple_of(2), "{} of {head_dim} dims", rope.dims);
        let half = rope.dims / 2;
        let rows = angles.f32().chunks_exact(rope.dims).take(self.step().rows().len());
        for (cos_sin, x) in rows.zip(x.f32_mut().chunks_exact_mut(heads * head_dim)) {
            for head in x.chunks_exact_mut(head_dim) {
                for i in 0..half {
                    let (a, b) = match rope.style {
                        RopeStyle::NeoX => (i, i + half),
                        RopeStyle::GptJ => (2 * i, 2 * i + 1),
                    };
                    let [cos, sin, u, v] =
                        [cos_sin[2 * i], cos_sin[2 * i + 1], head[a], head[b]].map(f64::from);
                    head[a] = (u * cos - v * sin) as f32;
                    head[b] = (u * sin + v * cos) as f32;
                }
            }
        }
    }

    fn store_kv(&mut self, table: KvTable, k: &HostBuf, v: &HostBuf, cache: &mut KvLayer<HostBuf>) {
        let layout = cache.layout;
        let step = self.step();
        for (r, row) in step.rows().iter().enumerate() {
            let place = self.locate(step.span_of(row), table, row.position, &layout);
            for head in 0..layout.kv_heads {
                let (from, to) = (r * layout.kv_heads + head, place * layout.kv_heads + head);
                write_run(layout.ty, &k.f32()[from * layout.k_dim..][..layout.k_dim], &mut cache.k, to);
                if !layout.v_in_k {
                    write_run(layout.ty, &v.f32()[from * layout.v_dim..][..layout.v_dim], &mut cache.v, to);
                }
            }
        }
    }

    fn attention(
        &mut self,
        shape: &AttentionShape<HostBuf>,
        q: &HostBuf,
        cache: &KvLayer<HostBuf>,
        out: &mut HostBuf,
    ) {
        let layout = cache.layout;
        let group = shape.heads / layout.kv_heads;
        assert_eq!(group * layout.kv_heads, shape.heads, "query heads share KV heads evenly");
        shape.assert_valid();
        let step = self.step();
        for (r, row) in step.rows().iter().enumerate() {
            let span = step.span_of(row);
            let seen = visible_positions(span, row.position, shape.mask, shape.table);
            let fraction = self.attended_fraction(span, shape.table);
            for kv_head in 0..layout.kv_heads {
                let positions = seen.clone().map(|p| self.locate(span, shape.table, p, &layout));
                let (keys, values) = read_history(cache, kv_head, positions);
                for head in kv_head * group..(kv_head + 1) * group {
                    let at = r * shape.heads + head;
                    let q = &q.f32()[at * layout.k_dim..][..layout.k_dim];
                    let added = seen.clone().map(|key| distance_score(shape, at, key, row.position));
                    let mut scores = scores(shape, q, keys.chunks_exact(q.len()).zip(added));
                    if let Some(bias) = shape.bias {
                        let biases = seen.clone().map(|key| relative_bias(bias, head, key, row.position));
                        scores.iter_mut().zip(biases).for_each(|(score, bias)| *score += bias);
                    }
                    let out = &mut out.f32_mut()[at * layout.v_dim..][..layout.v_dim];
                    let sinks = shape.sinks.filter(|_| span.table != SpanTable::Null);
                    let of_head = (&scores[..], sinks.map(|sinks| f64::from(sinks.f32()[head])));
                    match fraction {
                        Fraction::ONE => weighted_sum(of_head, 0..scores.len(), &values, out),
                        fraction => {
                            weighted_sum(of_head, select_top_k(&scores, fraction).into_iter(), &values, out)
                        }
                    }
                }
            }
        }
    }

    fn activate(
        &mut self,
        rows: usize,
        width: usize,
        act: Activation,
        gate: &mut HostBuf,
        up: Option<&HostBuf>,
    ) {
        for (i, gate) in gate.f32_mut()[..rows * width].iter_mut().enumerate() {
            let activated = apply_activation(act, f64::from(*gate));
            let factor = up.map_or(1.0, |up| activation_factor(act, f64::from(up.f32()[i])));
            *gate = (activated * factor) as f32;
        }
    }

    fn add(&mut self, rows: usize, width: usize, factor: f32, x: &mut HostBuf, y: &HostBuf) {
        for (x, y) in x.f32_mut()[..rows * width].iter_mut().zip(y.f32()) {
            *x += factor * y;
        }
    }

    fn scale(&mut self, rows: usize, width: usize, factor: f32, x: &mut HostBuf) {
        x.f32_mut()[..rows * width].iter_mut().for_each(|x| *x *= factor);
    }

    fn softcap(&mut self, rows: usize, width: usize, cap: f32, x: &mut HostBuf) {
        for x in &mut x.f32_mut()[..rows * width] {
            *x = softcap_value(f64::from(*x), cap) as f32;
        }
    }

    fn clamp(&mut self, rows: usize, width: usize, bound: f32, x: &mut HostBuf) {
        for x in &mut x.f32_mut()[..rows * width] {
            *x = x.clamp(-bound, bound);
        }
    }

    fn gate_rows(&mut self, rows: usize, width: usize, gate: &HostBuf, x: &mut HostBuf) {
        for (x, gate) in x.f32_mut()[..rows * width].chunks_exact_mut(width).zip(gate.f32()) {
            let gate = sigmoid(f64::from(*gate));
            x.iter_mut().for_each(|x| *x = (f64::from(*x) * gate) as f32);
        }
    }

    fn prepare_moe(&mut self, _shape: &MoeShape, _hidden: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &HostBuf,
        experts: Experts<HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) -> Result<(), DeviceError> {
        let logits = &router.f32()[..rows * shape.experts];
        let sums = mixture(self.activation_precision, shape, &experts, logits, x.f32())?;
        y.f32_mut().iter_mut().zip(sums).for_each(|(y, sum)| *y = sum as f32);
        Ok(())
    }

    fn all_reduce(&mut self, rows: usize, width: usize, x: &mut HostBuf) {
        self.collective.all_reduce(&mut x.f32_mut()[..rows * width]);
    }

    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &HostBuf, all: &mut HostBuf) {
        self.collective.all_gather(rows, widths, own.f32(), all.f32_mut());
    }

    fn copy_columns(
        &mut self,
        (rows, copies): (usize, usize),
        (width, columns, x): (usize, Range<usize>, &HostBuf),
        (to, y): (OutputColumns, &mut HostBuf),
    ) {
        for (row, y) in y.f32_mut().chunks_exact_mut(to.of).take(rows * copies).enumerate() {
            y[to.first..][..columns.len()].copy_from_slice(&x.f32()[row / copies * width..][columns.clone()]);
        }
    }

    fn gather_output_rows(&mut self, outputs: Range<usize>, width: usize, x: &HostBuf, y: &mut HostBuf) {
        let rows = &self.step().wanted()[outputs];
        for (row, y) in rows.iter().zip(y.f32_mut().chunks_exact_mut(width)) {
            y.copy_from_slice(&x.f32()[*row as usize * width..][..width]);
        }
    }

    fn append_hidden(&mut self, rows: Range<usize>, width: usize, x: &HostBuf, out: &mut StepOutput) {
        out.hidden.extend_from_slice(&x.f32()[rows.start * width..rows.end * width]);
    }

    fn sample(
        &mut self,
        outputs: Range<usize>,
        logits: &HostBuf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    ) {
        // The clock leaves its place, because sampling needs the whole backend.
        let mut clock = std::mem::take(&mut self.clock);
        clock.sample(|| self.sample_rows(outputs, logits, inputs, out));
        self.clock = clock;
    }

    fn page_table(&self, slot: u32, table: KvTable) -> &[Page] {
        self.step().table(slot as usize, table)
    }
}

#[cfg(test)]
mod tests;
