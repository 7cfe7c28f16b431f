//! A test case of attention: heads, mask, table, softcap and bias.

use super::Bounds;
use super::inputs::*;
use super::memo::ORACLE_ROWS;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{
    AttentionShape, Backend, DistanceBuckets, DistanceScores, KvLayer, KvLayout, KvTable, Mask, RelativeBias,
    StepLimits, ValueSource,
};
use mainstem_kernels::batch::{NULL_PAGE, SpanOutput, SpanStack, TableUpdate};
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;
use std::fmt::Arguments;
use std::sync::Arc;

/// One attention operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionCase {
    pub(super) ty: QuantType,
    pub(super) kv_heads: usize,
    pub(super) heads: usize,
    pub(super) k_dim: usize,
    pub(super) v_dim: usize,
    pub(super) scale: f32,
    pub(super) options: AttentionOptions,
}

/// The mask, table, softcap and bias of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionOptions {
    pub(super) mask: Mask,
    pub(super) table: KvTable,
    pub(super) softcap: Option<f32>,
    /// Reach of the relative position bias, if there is one.
    pub(super) reach: Option<usize>,
    /// Number of buckets of distances, if these have numbers.
    pub(super) buckets: Option<usize>,
    /// Whether each head has a sink.
    pub(super) has_sinks: bool,
    /// Whether V is in K, so that what is given as V has no effect.
    pub(super) v_in_k: bool,
}

/// Largest magnitude of a bias.
const MAX_BIAS: f32 = 3.0;

/// Largest magnitude of the product of a vector and that of a distance.
const MAX_PRODUCT: f32 = 4.0;

/// Largest magnitude of a sink.
const MAX_SINK: f32 = 6.0;

impl AttentionOptions {
    /// Causal attention without window, softcap or bias.
    pub(super) const PLAIN: AttentionOptions = AttentionOptions {
        mask: Mask::Causal { window: None },
        table: KvTable::Own,
        softcap: None,
        reach: None,
        buckets: None,
        has_sinks: false,
        v_in_k: false,
    };

    /// Returns the stack whose K and V are stored, and the stack that attends to them.
    fn stacks(&self) -> (SpanStack, SpanStack) {
        match self.table {
            KvTable::Own | KvTable::Window => (SpanStack::Decoder, SpanStack::Decoder),
            KvTable::Scratch => (SpanStack::Encoder, SpanStack::Encoder),
            KvTable::Cross => (SpanStack::Encoder, SpanStack::Decoder),
        }
    }
}

impl AttentionCase {
    /// Allocates a cache for the case.
    pub(super) fn cache<B: Backend>(&self, rig: &mut Rig<B>) -> KvLayer<B::Buf> {
        let AttentionCase { ty, kv_heads, k_dim, v_dim, .. } = *self;
        let page_positions = rig.limits.page_positions;
        let pages = match self.options.table {
            KvTable::Scratch => rig.limits.scratch_positions() / page_positions,
            _ => POOL_PAGES,
        };
        let v_in_k = self.options.v_in_k;
        rig.cache(KvLayout { ty, pages, page_positions, kv_heads, k_dim, v_dim, v_in_k })
    }

    /// Runs attention for every row, with a new cache.
    pub(super) fn run<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        steps: &[Vec<TestSpan>],
        mut book: PageBook,
    ) -> RowResults {
        let mut cache = self.cache(rig);
        let mut answers = RowResults::new();
        for pieces in steps {
            self.run_step(rig, &mut cache, pieces, &mut book, &mut answers);
        }
        answers
    }

    /// Returns the memoized results of the reference backend.
    pub(super) fn oracle_results(
        &self,
        oracle: &mut Rig<Reference>,
        steps: &[Vec<TestSpan>],
        book: PageBook,
    ) -> Arc<RowResults> {
        let key = oracle.memo_key((self, steps, &book));
        ORACLE_ROWS.get(key, || self.run(oracle, steps, book))
    }

    /// Runs one step. K, V and Q of a row depend on its sequence and position alone. A step that only stores
    /// has no attention.
    pub(super) fn run_step<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        cache: &mut KvLayer<B::Buf>,
        pieces: &[TestSpan],
        book: &mut PageBook,
        answers: &mut RowResults,
    ) {
        let mut batch = build_batch(pieces, SpanOutput::None, book);
        self.add_window_entries(&rig.limits, &mut batch.table_updates);
        rig.begin(batch);
        if self.options.table == KvTable::Cross {
            // As in a decoder layer, whose own K and V are in the same pool.
            self.store(rig, KvTable::Own, SpanStack::Decoder, pieces, cache);
        }
        let (stored, attending) = self.options.stacks();
        self.store(rig, self.options.table, stored, pieces, cache);
        if pieces.iter().all(|piece| matches!(piece.kind, TestSpanKind::Stored | TestSpanKind::Poison)) {
            return;
        }
        let rows = stack_rows(pieces, attending);
        assert_eq!(rig.backend.select_stack(attending), rows.len(), "rows of the {attending:?}");
        let q = rig.input(&row_inputs(100_002, &rows, self.heads * self.k_dim));
        let width = self.heads * self.v_dim;
        let out = self.attend_rows(rig, &q, cache, &rows);
        let out = rig.read(&out, rows.len() * width, format_args!("{self:?} over {pieces:?}"));
        answers.extend(rows.into_iter().zip(out.chunks_exact(width).map(<[f32]>::to_vec)));
    }

    /// Adds the entries of window tables for those of own ones, if the case uses them. A slot has the pages
    /// that one step needs, in turn.
    fn add_window_entries(&self, limits: &StepLimits, tables: &mut Vec<TableUpdate>) {
        let (KvTable::Window, Some(window)) = (self.options.table, self.options.mask.causal_window()) else {
            return;
        };
        let held = limits.pages_of_window(window) as u32;
        for at in 0..tables.len() {
            let TableUpdate { slot, index, .. } = tables[at];
            let entry = |index, page| TableUpdate { slot, table: KvTable::Window, index, page };
            tables.push(entry(index, 1 + slot * held + index % held));
            if let Some(before) = index.checked_sub(held) {
                tables.push(entry(before, NULL_PAGE));
            }
        }
    }

    /// Stores K and V of the rows of one stack.
    fn store<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        table: KvTable,
        stack: SpanStack,
        pieces: &[TestSpan],
        cache: &mut KvLayer<B::Buf>,
    ) {
        let rows = stack_rows(pieces, stack);
        assert_eq!(rig.backend.select_stack(stack), rows.len(), "rows of the {stack:?}");
        let is_poison = pieces.iter().any(|piece| piece.kind == TestSpanKind::Poison);
        let [k, v] = [(100_000, self.k_dim), (100_001, self.v_dim)].map(|(tag, dim)| {
            let mut numbers = row_inputs(tag, &rows, self.kv_heads * dim);
            if is_poison {
                numbers.fill(f32::NAN);
            }
            rig.input(&numbers)
        });
        rig.backend.store_kv(table, &k, &v, cache);
    }

    /// Runs attention with an output of `n` numbers.
    pub(super) fn attend<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        q: &B::Buf,
        cache: &KvLayer<B::Buf>,
        n: usize,
    ) -> B::Buf {
        self.attend_by(rig, n, |backend, shape, out| backend.attention(shape, q, cache, out))
    }

    /// Runs attention for these rows, with the numbers of their distances.
    fn attend_rows<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        q: &B::Buf,
        cache: &KvLayer<B::Buf>,
        rows: &[(u32, usize)],
    ) -> B::Buf {
        let n = rows.len() * self.heads * self.v_dim;
        let Some(count) = self.options.buckets else { return self.attend(rig, q, cache, n) };
        let [of_queries, of_keys] = [100_005, 100_006].map(|tag| {
            let numbers = row_inputs(tag, rows, self.heads * count);
            rig.input(&numbers.into_iter().map(|number| MAX_PRODUCT * number).collect::<Vec<_>>())
        });
        // As distances grow, buckets change, in either direction.
        let reach = rig.limits.encoder_positions;
        let bucket = |at: usize| (at * 7 / 5 % count) as f32;
        let table = rig.constant(&(0..2 * reach - 1).map(bucket).collect::<Vec<_>>());
        let buckets = &DistanceBuckets { table, count, reach };
        self.attend_by(rig, n, |backend, shape, out| {
            let distances = Some(DistanceScores { of_queries: &of_queries, of_keys: &of_keys, buckets });
            backend.attention(&AttentionShape { distances, ..*shape }, q, cache, out);
        })
    }

    /// Runs attention of the last step again, with V from a source; returns the result of its only row.
    pub(super) fn attend_fetching<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        cache: (&KvLayer<B::Buf>, &dyn ValueSource),
        row: (u32, usize),
    ) -> Vec<f32> {
        let q = rig.input(&row_inputs(100_002, &[row], self.heads * self.k_dim));
        let n = self.heads * self.v_dim;
        let out = self.attend_by(rig, n, |backend, shape, out| {
            backend.attention_fetching_values(shape, &q, cache, out);
        });
        rig.read(&out, n, format_args!("{self:?}, {row:?}, with fetched values"))
    }

    fn attend_by<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        n: usize,
        run: impl FnOnce(&mut B, &AttentionShape<B::Buf>, &mut B::Buf),
    ) -> B::Buf {
        let AttentionOptions { mask, table, softcap, reach, has_sinks, .. } = self.options;
        let bias = reach.map(|reach| RelativeBias {
            table: rig.constant(&scaled(100_003, self.heads * (2 * reach - 1), MAX_BIAS)),
            heads: self.heads,
            reach,
        });
        let bias = bias.as_ref();
        let sinks = has_sinks.then(|| rig.constant(&scaled(100_004, self.heads, MAX_SINK)));
        let (heads, scale, sinks) = (self.heads, self.scale, sinks.as_ref());
        let shape = AttentionShape { heads, scale, softcap, mask, table, bias, sinks, distances: None };
        let mut out = rig.output(n);
        run(&mut rig.backend, &shape, &mut out);
        out
    }

    /// Asserts that results are close to the reference. Inputs are at most 1, so the weighted sum of values
    /// is too, and `scale * k_dim` bounds a score without what is added.
    pub(super) fn assert_close(&self, what: Arguments, got: &RowResults, want: &RowResults, bounds: &Bounds) {
        let bias = if self.options.reach.is_some() { MAX_BIAS } else { 0.0 };
        let sink = if self.options.has_sinks { MAX_SINK } else { 0.0 };
        let added = if self.options.buckets.is_some() { 2.0 * MAX_PRODUCT } else { 0.0 };
        let magnitude = 1.0 + self.scale * (self.k_dim as f32 + added) + bias + sink;
        assert!(!got.is_empty(), "{what}: no rows");
        for ((sequence, position), got) in got {
            let what = format_args!("{what}, sequence {sequence}, position {position}");
            assert_close(what, got, &want[&(*sequence, *position)], (bounds.attention)(self.ty), |_| {
                magnitude
            });
        }
    }
}

/// Returns a pseudo-random input row for each row.
fn row_inputs(tag: u32, rows: &[(u32, usize)], width: usize) -> Vec<f32> {
    let row =
        |(sequence, position): &(u32, usize)| noise(tag + 10_000 * sequence + 10 * *position as u32, width);
    rows.iter().flat_map(row).collect()
}
