//! The oracle: every operation as one plain loop, and the one definition of drawing a token.
//!
//! Slow on purpose. Sums run in F64 in the order of their index, so that what remains is the rounding of
//! stored values; whatever a fast backend does is compared with this by [`crate::conformance`].
//! Invariant: no threads, no unsafe code, no state beyond slots and the current rows.

use crate::backend::{
    Activation, AttentionShape, Backend, DeviceError, KvLayer, KvLayout, Norm, Rope, RopeStyle, StepLimits,
    Weight,
};
use crate::batch::{
    Page, PageCopy, SINK_PAGE, SampleMode, SampleRow, SampledRow, SpanTable, SpanTokens, StepBatch,
    StepOutput,
};
use crate::host::HostBuf;
use crate::quant::QuantType;
use crate::random::uniform;
use std::ops::Range;

/// The oracle backend, in host memory.
#[derive(Debug, Default)]
pub struct Reference {
    limits: Option<StepLimits>,
    slots: Vec<SlotState>,
    /// Rows of the step begun last.
    rows: Vec<Row>,
    /// Of those, the rows whose results are wanted, in order.
    wanted: Vec<usize>,
    /// What to do with each wanted row.
    samples: Vec<SampleRow>,
    biases: Vec<(u32, f32)>,
}

#[derive(Clone, Debug)]
struct SlotState {
    last: u32,
    table: Vec<Page>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    slot: usize,
    position: usize,
    token: u32,
    table: SpanTable,
}

/// The log-probabilities of one row of raw logits.
#[derive(Clone, Debug)]
pub struct LogProbs {
    /// Logarithm of the sum of the exponentials.
    log_sum: f64,
    /// The most likely tokens, likeliest first, ties by id: (id, log-probability).
    pub top: Vec<(u32, f32)>,
}

impl LogProbs {
    /// The log-probability of a token whose raw logit is `logit`.
    pub fn of(&self, logit: f32) -> f32 {
        (f64::from(or_lowest(logit)) - self.log_sum) as f32
    }
}

/// The token that `row` draws from `logits` (vocabulary) with its `biases`. What `Backend::sample` must
/// give, exactly.
///
/// 1. Biases are added first, in their order. Biases that leave no logit above negative infinity are void:
///    something must be drawn.
/// 2. Greedy rows take the largest logit, the lowest id on ties. So do rows without a finite largest
///    scaled logit, since nothing can be weighed there.
/// 3. Scaled = logit / temperature; candidates by scaled descending, ties by id.
///    Weights = exp(scaled - largest), in F32; their sums are F64.
/// 4. Top-k keeps the first k; top-p the shortest prefix that holds its share of what top-k kept, at
///    least one; min-p then those of at least its share of the largest weight.
/// 5. The first candidate whose running sum of weights exceeds `uniform(seed, position)` times the sum of
///    the kept; the last kept if none does.
///
/// A NaN logit counts as negative infinity.
pub fn draw(logits: &[f32], biases: &[(u32, f32)], row: &SampleRow) -> u32 {
    let logits = &biased(logits, biases)[..];
    let scaled: Vec<f32> = logits.iter().map(|l| or_lowest(l / row.temperature)).collect();
    let largest = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row.is_greedy() || !largest.is_finite() {
        return greedy(logits);
    }
    let weights: Vec<f32> = scaled.iter().map(|s| (s - largest).exp()).collect();
    let kept = candidates(&scaled, &weights, row);
    let weight_of = |&id: &u32| f64::from(weights[id as usize]);
    let threshold =
        f64::from(uniform(row.seed, row.position.into())) * kept.iter().map(weight_of).sum::<f64>();
    let drawn = prefix_where(&kept, weight_of, |sum| sum > threshold);
    kept[drawn - 1]
}

/// The log-probabilities of `logits` (vocabulary), with the `n` likeliest tokens. All are NaN when the
/// largest logit is not finite; a NaN logit counts as negative infinity.
pub fn logprobs(logits: &[f32], n: usize) -> LogProbs {
    let values: Vec<f32> = logits.iter().map(|&l| or_lowest(l)).collect();
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = values.iter().map(|v| f64::from((v - largest).exp())).sum();
    let mut result = LogProbs { log_sum: f64::from(largest) + sum.ln(), top: Vec::new() };
    let likeliest = descending(&values).into_iter().take(n);
    result.top = likeliest.map(|id| (id, result.of(values[id as usize]))).collect();
    result
}

fn biased(logits: &[f32], biases: &[(u32, f32)]) -> Vec<f32> {
    let mut biased = logits.to_vec();
    for &(id, bias) in biases {
        biased[id as usize] += bias;
    }
    let is_void = biased.iter().all(|&logit| or_lowest(logit) == f32::NEG_INFINITY);
    if is_void { logits.to_vec() } else { biased }
}

/// The ids that top-k, top-p and min-p leave over, likeliest first; at least one.
fn candidates(scaled: &[f32], weights: &[f32], row: &SampleRow) -> Vec<u32> {
    let weight_of = |&id: &u32| f64::from(weights[id as usize]);
    let mut kept = descending(scaled);
    let mut total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    if row.top_k > 0 {
        kept.truncate(row.top_k as usize);
        total = kept.iter().map(weight_of).sum();
    }
    if row.top_p < 1.0 {
        let share = f64::from(row.top_p) * total;
        kept.truncate(prefix_where(&kept, weight_of, |sum| sum >= share));
    }
    let least = row.min_p * weights[kept[0] as usize];
    let likely = kept.iter().filter(|&&id| weights[id as usize] >= least).count();
    kept.truncate(likely.max(1));
    kept
}

/// Length of the shortest prefix, at least 1, whose sum of weights is `enough`; the whole if none is.
fn prefix_where(ids: &[u32], weight_of: impl Fn(&u32) -> f64, enough: impl Fn(f64) -> bool) -> usize {
    let mut sum = 0.0;
    for (i, id) in ids.iter().enumerate() {
        sum += weight_of(id);
        if enough(sum) {
            return i + 1;
        }
    }
    ids.len()
}

/// The largest logit's id; the lowest on ties; 0 when no logit is above negative infinity.
fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > or_lowest(logits[best]) {
            best = id;
        }
    }
    best as u32
}

/// Ids by value, largest first, ties by id. No value may be NaN.
fn descending(values: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..values.len() as u32).collect();
    let value = |id: &u32| values[*id as usize];
    // The sort is stable, and 0.0 ties with -0.0.
    ids.sort_by(|a, b| value(b).partial_cmp(&value(a)).expect("NaN was replaced; this is a bug"));
    ids
}

fn or_lowest(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

impl Reference {
    /// An oracle without slots; [`Backend::prepare`] makes them.
    pub fn new() -> Reference {
        Reference::default()
    }

    fn limits(&self) -> &StepLimits {
        self.limits.as_ref().expect("prepare comes before the first step; this is a bug")
    }

    fn move_slots(&mut self, batch: &StepBatch) {
        for moved in &batch.moves {
            assert!(
                batch.moves.iter().all(|other| other.from != moved.to),
                "moves overlap: {:?}",
                batch.moves
            );
            self.slots[moved.to as usize] = self.slots[moved.from as usize].clone();
        }
    }

    fn map_rows(&mut self, batch: &StepBatch) {
        self.rows.clear();
        for span in &batch.spans {
            assert!(
                matches!(span.table, SpanTable::Own | SpanTable::Sink),
                "spans through {:?} tables are not served",
                span.table
            );
            for i in 0..span.len() {
                let token = match span.tokens {
                    SpanTokens::Given { at, .. } => batch.tokens[at as usize + i],
                    SpanTokens::Last => self.slots[span.slot as usize].last,
                };
                let position = span.start as usize + i;
                assert!(position < self.limits().positions, "position {position} is beyond the limits");
                self.rows.push(Row { slot: span.slot as usize, position, token, table: span.table });
            }
        }
        assert!(self.rows.len() <= self.limits().rows, "{} rows exceed the limits", self.rows.len());
    }

    /// Where a sequence position of a row's table lies: its number among all positions of the cache.
    fn place(&self, row: &Row, position: usize, layout: &KvLayout) -> usize {
        let page = match row.table {
            SpanTable::Sink => SINK_PAGE,
            _ => self.slots[row.slot].table[position / layout.page_positions],
        };
        assert!((page as usize) < layout.pages, "page {page} is outside the pool");
        page as usize * layout.page_positions + position % layout.page_positions
    }

    /// The positions a row attends to.
    fn visible(row: &Row) -> Range<usize> {
        match row.table {
            SpanTable::Sink => row.position..row.position + 1,
            _ => 0..row.position + 1,
        }
    }
}

impl Backend for Reference {
    type Buf = HostBuf;

    fn describe(&self) -> String {
        "reference (scalar F64, 1 thread)".into()
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostBuf, DeviceError> {
        HostBuf::zeroed(bytes)
    }

    fn upload(&mut self, to: &mut HostBuf, offset: usize, bytes: &[u8]) {
        to.bytes_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    fn download(&mut self, from: &HostBuf, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&from.bytes()[offset..][..bytes.len()]);
    }

    fn upload_weight(
        &mut self,
        ty: QuantType,
        out: usize,
        inp: usize,
        bytes: &[u8],
    ) -> Result<Weight<HostBuf>, DeviceError> {
        assert_eq!(
            Some(bytes.len()),
            ty.bytes(inp).map(|row| row * out),
            "{ty} codes of a {out} x {inp} matrix"
        );
        let mut buf = HostBuf::zeroed(bytes.len())?;
        buf.bytes_mut().copy_from_slice(bytes);
        Ok(Weight { buf, ty, out, inp })
    }

    /// Both buffers are (pages, page_positions, kv_heads, width) in codes of `layout.ty`.
    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        assert_eq!(layout.page_positions % KvLayout::BLOCK, 0, "pages hold whole blocks");
        let vectors = layout.pages * layout.page_positions * layout.kv_heads;
        let allocate = |width: usize| match layout.ty.bytes(width) {
            Some(bytes) => HostBuf::zeroed(vectors * bytes),
            None => Err(DeviceError::Unsupported(format!("heads of width {width} in a {} cache", layout.ty))),
        };
        Ok(KvLayer { k: allocate(layout.k_dim)?, v: allocate(layout.v_dim)?, layout })
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        self.limits = Some(*limits);
        self.slots = vec![SlotState { last: 0, table: vec![SINK_PAGE; limits.table_len()] }; limits.slots];
        Ok(())
    }

    fn begin(&mut self, batch: &StepBatch) {
        self.move_slots(batch);
        for update in &batch.tables {
            self.slots[update.slot as usize].table[update.index as usize] = update.page;
        }
        self.map_rows(batch);
        self.wanted = batch.wanted_rows().collect();
        self.samples.clone_from(&batch.samples);
        self.biases.clone_from(&batch.biases);
    }

    fn copy_pages(&mut self, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
        for buf in [&mut cache.k, &mut cache.v] {
            let page_bytes = buf.len() / cache.layout.pages;
            for copy in copies {
                let from = copy.from as usize * page_bytes;
                buf.bytes_mut().copy_within(from..from + page_bytes, copy.to as usize * page_bytes);
            }
        }
    }

    fn embed(&mut self, table: &Weight<HostBuf>, x: &mut HostBuf) {
        for (row, x) in self.rows.iter().zip(x.f32_mut().chunks_exact_mut(table.inp)) {
            read_codes(table.ty, &table.buf, row.token as usize, x);
        }
    }

    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<HostBuf>,
        bias: Option<&HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let (x, y) = (&x.f32()[..rows * w.inp], &mut y.f32_mut()[..rows * w.out]);
        let mut weights = vec![0.0; w.inp];
        for o in 0..w.out {
            read_codes(w.ty, &w.buf, o, &mut weights);
            let start = bias.map_or(0.0, |bias| f64::from(bias.f32()[o]));
            for r in 0..rows {
                y[r * w.out + o] = (start + dot(&x[r * w.inp..][..w.inp], &weights)) as f32;
            }
        }
    }

    fn norm(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &HostBuf, y: &mut HostBuf) {
        let (x, y) = (&x.f32()[..rows * norm.width], &mut y.f32_mut()[..rows * norm.width]);
        for (x, y) in x.chunks_exact(norm.width).zip(y.chunks_exact_mut(norm.width)) {
            let rms = (dot(x, x) / norm.width as f64 + f64::from(norm.eps)).sqrt();
            for ((y, x), weight) in y.iter_mut().zip(x).zip(norm.weight.f32()) {
                *y = (f64::from(*x) / rms * f64::from(*weight)) as f32;
            }
        }
    }

    fn rope(&mut self, rope: &Rope<HostBuf>, heads: usize, head_dim: usize, x: &mut HostBuf) {
        assert!(rope.dims <= head_dim && rope.dims.is_multiple_of(2), "{} of {head_dim} dims", rope.dims);
        let half = rope.dims / 2;
        for (row, x) in self.rows.iter().zip(x.f32_mut().chunks_exact_mut(heads * head_dim)) {
            assert!(row.position < rope.positions, "position {} has no angle", row.position);
            let cos_sin = &rope.cos_sin.f32()[row.position * rope.dims..][..rope.dims];
            for head in x.chunks_exact_mut(head_dim) {
                for i in 0..half {
                    let (a, b) = match rope.style {
                        RopeStyle::Halves => (i, i + half),
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let [cos, sin, u, v] =
                        [cos_sin[2 * i], cos_sin[2 * i + 1], head[a], head[b]].map(f64::from);
                    head[a] = (u * cos - v * sin) as f32;
                    head[b] = (u * sin + v * cos) as f32;
                }
            }
        }
    }

    fn store_kv(&mut self, k: &HostBuf, v: &HostBuf, cache: &mut KvLayer<HostBuf>) {
        let layout = cache.layout;
        for (r, row) in self.rows.iter().enumerate() {
            let place = self.place(row, row.position, &layout);
            for head in 0..layout.kv_heads {
                let (from, to) = (r * layout.kv_heads + head, place * layout.kv_heads + head);
                write_codes(layout.ty, &k.f32()[from * layout.k_dim..][..layout.k_dim], &mut cache.k, to);
                write_codes(layout.ty, &v.f32()[from * layout.v_dim..][..layout.v_dim], &mut cache.v, to);
            }
        }
    }

    fn attention(
        &mut self,
        shape: &AttentionShape,
        q: &HostBuf,
        cache: &KvLayer<HostBuf>,
        out: &mut HostBuf,
    ) {
        let layout = cache.layout;
        let group = shape.heads / layout.kv_heads;
        assert_eq!(group * layout.kv_heads, shape.heads, "query heads share KV heads evenly");
        for (r, row) in self.rows.iter().enumerate() {
            for kv_head in 0..layout.kv_heads {
                let places = Reference::visible(row).map(|p| self.place(row, p, &layout));
                let (keys, values) = history(cache, kv_head, places);
                for head in kv_head * group..(kv_head + 1) * group {
                    let at = r * shape.heads + head;
                    let q = &q.f32()[at * layout.k_dim..][..layout.k_dim];
                    let out = &mut out.f32_mut()[at * layout.v_dim..][..layout.v_dim];
                    attend(q, shape.scale, &keys, &values, out);
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
            let x = f64::from(*gate);
            let activated = match act {
                Activation::Silu => x / (1.0 + (-x).exp()),
            };
            *gate = (activated * up.map_or(1.0, |up| f64::from(up.f32()[i]))) as f32;
        }
    }

    fn add(&mut self, rows: usize, width: usize, x: &mut HostBuf, y: &HostBuf) {
        for (x, y) in x.f32_mut()[..rows * width].iter_mut().zip(y.f32()) {
            *x += y;
        }
    }

    fn reduce(&mut self, _rows: usize, _width: usize, _x: &mut HostBuf) {
        // A stage of one member.
    }

    fn gather(&mut self, wanted: Range<usize>, width: usize, x: &HostBuf, y: &mut HostBuf) {
        for (row, y) in self.wanted[wanted].iter().zip(y.f32_mut().chunks_exact_mut(width)) {
            y.copy_from_slice(&x.f32()[row * width..][..width]);
        }
    }

    fn sample(&mut self, wanted: Range<usize>, logits: &HostBuf, out: &mut StepOutput) {
        let vocab = self.limits().vocab;
        for (i, logits) in wanted.zip(logits.f32().chunks_exact(vocab)) {
            let (row, sample) = (self.rows[self.wanted[i]], self.samples[i]);
            let token = match sample.mode {
                SampleMode::Draw => draw(logits, sample.biases(&self.biases), &sample),
                SampleMode::Score(token) => token,
            };
            if sample.mode == SampleMode::Draw && row.table != SpanTable::Sink {
                self.slots[row.slot].last = token;
            }
            report(token, logits, &sample, out);
        }
    }

    fn table(&self, slot: u32) -> &[Page] {
        &self.slots[slot as usize].table
    }
}

/// Appends one wanted row's result.
fn report(token: u32, logits: &[f32], sample: &SampleRow, out: &mut StepOutput) {
    let mut result = SampledRow { token, logprob: f32::NAN, top_at: out.top.len() as u32, top_len: 0 };
    if sample.logprob || sample.top_logprobs > 0 {
        let logprobs = logprobs(logits, sample.top_logprobs.into());
        result.top_len = logprobs.top.len() as u32;
        if sample.logprob {
            result.logprob = logprobs.of(logits[token as usize]);
        }
        out.top.extend(logprobs.top);
    }
    out.rows.push(result);
}

/// K (places, k_dim) and V (places, v_dim) of one KV head at those places of the cache.
fn history(
    cache: &KvLayer<HostBuf>,
    kv_head: usize,
    places: impl ExactSizeIterator<Item = usize>,
) -> (Vec<f32>, Vec<f32>) {
    let layout = cache.layout;
    let mut keys = vec![0.0; places.len() * layout.k_dim];
    let mut values = vec![0.0; places.len() * layout.v_dim];
    let rows = keys.chunks_exact_mut(layout.k_dim).zip(values.chunks_exact_mut(layout.v_dim));
    for (place, (key, value)) in places.zip(rows) {
        read_codes(layout.ty, &cache.k, place * layout.kv_heads + kv_head, key);
        read_codes(layout.ty, &cache.v, place * layout.kv_heads + kv_head, value);
    }
    (keys, values)
}

/// out (v_dim) = softmax(q · keysᵀ · scale) · values, for keys (n, k_dim) and values (n, v_dim).
fn attend(q: &[f32], scale: f32, keys: &[f32], values: &[f32], out: &mut [f32]) {
    let scores: Vec<f64> = keys.chunks_exact(q.len()).map(|key| dot(q, key) * f64::from(scale)).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut sums = vec![0.0; out.len()];
    for (weight, value) in weights.iter().zip(values.chunks_exact(out.len())) {
        for (sum, v) in sums.iter_mut().zip(value) {
            *sum += weight * f64::from(*v);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = (sum / total) as f32;
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Reads vector number `index` of `out.len()` elements.
fn read_codes(ty: QuantType, from: &HostBuf, index: usize, out: &mut [f32]) {
    let bytes = vector_bytes(ty, out.len());
    (ty.row().dequantize)(&from.bytes()[index * bytes..][..bytes], out);
}

/// Writes vector number `index` of `values.len()` elements.
fn write_codes(ty: QuantType, values: &[f32], to: &mut HostBuf, index: usize) {
    let bytes = vector_bytes(ty, values.len());
    (ty.row().quantize)(values, &mut to.bytes_mut()[index * bytes..][..bytes]);
}

fn vector_bytes(ty: QuantType, elements: usize) -> usize {
    ty.bytes(elements).expect("vectors hold whole blocks; this is a bug")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Span, SpanModel, Want};

    fn buf(values: &[f32]) -> HostBuf {
        let mut buf = HostBuf::zeroed(values.len() * 4).unwrap();
        buf.f32_mut().copy_from_slice(values);
        buf
    }

    /// An oracle whose current rows are those of one span of slot 0, which has page 1.
    fn at(start: u32, len: u32) -> Reference {
        let mut oracle = Reference::new();
        let limits = StepLimits {
            slots: 1,
            rows: 4,
            logit_rows: 4,
            positions: 32,
            page_positions: 32,
            top_logprobs: 4,
            biases: 4,
            vocab: 4,
        };
        oracle.prepare(&limits).unwrap();
        let span = Span {
            model: SpanModel::Target,
            slot: 0,
            start,
            tokens: SpanTokens::Given { at: 0, len },
            table: SpanTable::Own,
            want: Want::None,
        };
        let tables = vec![crate::batch::TableUpdate { slot: 0, index: 0, page: 1 }];
        oracle.begin(&StepBatch { spans: vec![span], tokens: vec![2; 4], tables, ..StepBatch::default() });
        oracle
    }

    fn near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    #[test]
    fn norm_divides_by_the_root_of_the_mean_square() {
        let mut y = buf(&[0.0; 2]);
        let norm = Norm { weight: buf(&[1.0, 0.5]), width: 2, eps: 0.0 };
        at(0, 1).norm(1, &norm, &buf(&[3.0, 4.0]), &mut y);
        // The mean of 9 and 16 is 12.5.
        near(y.f32(), &[3.0 / 12.5f64.sqrt(), 2.0 / 12.5f64.sqrt()]);
        let norm = Norm { eps: 12.5, ..norm };
        at(0, 1).norm(1, &norm, &buf(&[3.0, 4.0]), &mut y);
        near(y.f32(), &[0.6, 0.4]);
    }

    #[test]
    fn rope_turns_the_pairs_of_its_style_and_leaves_the_rest() {
        let angles = [0.3f64, 1.1];
        let row: Vec<f32> = angles.iter().flat_map(|a| [a.cos() as f32, a.sin() as f32]).collect();
        let cos_sin = || buf(&[&[9.0; 4][..], &row].concat());
        let [(c0, s0), (c1, s1)] = angles.map(|a| (a.cos(), a.sin()));
        let head = [1.0, 2.0, 3.0, 4.0, 5.0];
        let rotate = |style| {
            let mut x = buf(&head);
            let rope = Rope { cos_sin: cos_sin(), positions: 2, dims: 4, style };
            at(1, 1).rope(&rope, 1, 5, &mut x);
            x.f32().to_vec()
        };
        let halves = [c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, s0 + 3.0 * c0, 2.0 * s1 + 4.0 * c1, 5.0];
        near(&rotate(RopeStyle::Halves), &halves);
        let interleaved = [c0 - 2.0 * s0, s0 + 2.0 * c0, 3.0 * c1 - 4.0 * s1, 3.0 * s1 + 4.0 * c1, 5.0];
        near(&rotate(RopeStyle::Interleaved), &interleaved);
    }

    #[test]
    fn attention_weighs_two_positions_by_their_scores() {
        let mut oracle = at(0, 2);
        let layout =
            KvLayout { ty: QuantType::F32, pages: 2, page_positions: 32, kv_heads: 1, k_dim: 2, v_dim: 1 };
        let mut cache = oracle.alloc_kv(layout).unwrap();
        oracle.store_kv(&buf(&[1.0, 0.0, 0.0, 2.0]), &buf(&[10.0, 20.0]), &mut cache);
        let mut out = buf(&[0.0; 4]);
        let q = buf(&[1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 0.0, 0.0]);
        oracle.attention(&AttentionShape { heads: 2, scale: 0.5 }, &q, &cache, &mut out);
        // Position 0 sees itself alone. At position 1, head 0 scores 0.5 and 1, and head 1 scores alike.
        let second = 1.0 / (1.0 + (-0.5f64).exp());
        near(out.f32(), &[10.0, 10.0, 10.0 + 10.0 * second, 15.0]);
    }

    #[test]
    fn silu_matmul_and_embed_give_their_formulas() {
        let mut oracle = at(0, 1);
        let mut gate = buf(&[0.0, 1.0, -2.0]);
        oracle.activate(1, 3, Activation::Silu, &mut gate, Some(&buf(&[7.0, 3.0, 1.0])));
        near(gate.f32(), &[0.0, 3.0 / (1.0 + (-1f64).exp()), -2.0 / (1.0 + 2f64.exp())]);

        let codes: Vec<u8> =
            [1.0f32, 2.0, 3.0, -4.0, 5.0, 6.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let w = oracle.upload_weight(QuantType::F32, 3, 2, &codes).unwrap();
        let mut y = buf(&[0.0; 3]);
        oracle.matmul(1, &w, Some(&buf(&[0.0, 0.5, 0.0])), &buf(&[10.0, 1.0]), &mut y);
        assert_eq!(y.f32(), [12.0, 26.5, 56.0]);
        let mut x = buf(&[0.0; 2]);
        oracle.embed(&w, &mut x);
        assert_eq!(x.f32(), [5.0, 6.0]);
    }

    #[test]
    fn greedy_rows_take_the_lowest_of_the_largest() {
        let greedy = SampleRow::GREEDY;
        assert_eq!(draw(&[1.0, 3.0, 3.0, 2.0], &[], &greedy), 1);
        assert_eq!(draw(&[f32::NAN, -3.0, f32::NAN, -2.0], &[], &greedy), 3);
        assert_eq!(draw(&[f32::NAN; 3], &[], &greedy), 0);
        assert_eq!(draw(&[-0.0, 0.0], &[], &greedy), 0);
        let unweighable = SampleRow { temperature: 1.0, ..greedy };
        assert_eq!(draw(&[1.0, f32::INFINITY, f32::INFINITY], &[], &unweighable), 1);
    }

    #[test]
    fn biases_come_before_everything_else() {
        const FORBID: f32 = f32::NEG_INFINITY;
        let drawn = SampleRow { temperature: 0.5, top_k: 2, seed: 3, ..SampleRow::GREEDY };
        for row in [SampleRow::GREEDY, drawn, SampleRow { top_p: 0.1, top_k: 0, ..drawn }] {
            let logits = [1.0, 3.0, 2.0, f32::NAN];
            assert_eq!(draw(&logits, &[(0, 90.0)], &row), 0, "{row:?}: lifted over all others");
            assert_eq!(draw(&logits, &[(1, FORBID), (2, -90.0)], &row), 0, "{row:?}: what is left");
            assert_eq!(draw(&logits, &[(1, FORBID), (1, 90.0), (2, FORBID)], &row), 0, "{row:?}");
            let all = [(0, FORBID), (1, FORBID), (2, FORBID)];
            assert_eq!(draw(&logits, &all, &row), draw(&logits, &[], &row), "{row:?}: void");
        }
        assert_eq!(draw(&[f32::INFINITY, 0.0], &[(0, FORBID)], &SampleRow::GREEDY), 1);
    }

    /// Weights 8, 4, 2, 1 of ids 2, 0, 3, 1 at temperature 1.
    const LOGITS: [f32; 4] =
        [std::f32::consts::LN_2 * 2.0, 0.0, std::f32::consts::LN_2 * 3.0, std::f32::consts::LN_2];

    /// How often each id is drawn in 4096 positions, as shares of the whole.
    fn shares(row: SampleRow) -> [f64; 4] {
        let mut shares = [0.0; 4];
        for position in 0..4096 {
            shares[draw(&LOGITS, &[], &SampleRow { position, ..row }) as usize] += 1.0 / 4096.0;
        }
        shares
    }

    #[test]
    fn each_filter_keeps_what_it_says() {
        let plain = SampleRow { temperature: 1.0, seed: 11, ..SampleRow::GREEDY };
        let check = |row, want: [f64; 4]| {
            let got = shares(row);
            for (got, want) in got.iter().zip(want) {
                assert!(
                    (got - want).abs() < 0.03 && (want > 0.0 || *got == 0.0),
                    "{row:?}: {got} is not {want}"
                );
            }
        };
        check(plain, [4.0 / 15.0, 1.0 / 15.0, 8.0 / 15.0, 2.0 / 15.0]);
        check(SampleRow { temperature: 0.5, ..plain }, [16.0 / 85.0, 1.0 / 85.0, 64.0 / 85.0, 4.0 / 85.0]);
        check(SampleRow { top_k: 3, ..plain }, [4.0 / 14.0, 0.0, 8.0 / 14.0, 2.0 / 14.0]);
        check(SampleRow { top_p: 0.79, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        // Of the 14 parts that top-k leaves, 12 suffice; of all 15 they would not.
        check(SampleRow { top_p: 0.82, top_k: 3, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        check(SampleRow { top_p: 0.82, ..plain }, [4.0 / 14.0, 0.0, 8.0 / 14.0, 2.0 / 14.0]);
        check(SampleRow { min_p: 0.4, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        check(SampleRow { top_p: 1e-9, ..plain }, [0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn log_probabilities_are_of_the_raw_logits() {
        let result = logprobs(&LOGITS, 3);
        assert_eq!(result.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 0, 3]);
        near(&[result.top[1].1, result.of(LOGITS[1])], &[(4f64 / 15.0).ln(), (1f64 / 15.0).ln()]);
        assert_eq!(
            logprobs(&[1.0, 2.0, 2.0], 9).top.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
            [1, 2, 0]
        );
        assert_eq!(logprobs(&[0.0, f32::NAN], 0).of(f32::NAN), f32::NEG_INFINITY);
    }
}
