//! A test case of attention: heads, mask, table, softcap and bias.

use super::Bounds;
use super::answers::ROWS;
use super::inputs::*;
use super::pieces::*;
use super::rig::*;
use crate::backend::{AttentionShape, Backend, DistanceBias, KvLayer, KvLayout, KvTable, Mask};
use crate::batch::{SpanStack, Want};
use crate::quant::QuantType;
use crate::reference::Reference;
use std::fmt::Arguments;
use std::sync::Arc;

/// One attention operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) ty: QuantType,
    pub(super) kv_heads: usize,
    pub(super) heads: usize,
    pub(super) k_dim: usize,
    pub(super) v_dim: usize,
    pub(super) scale: f32,
    pub(super) look: Look,
}

/// The mask, table, softcap and bias of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) mask: Mask,
    pub(super) table: KvTable,
    pub(super) softcap: Option<f32>,
    /// Reach of the relative position bias, if there is one.
    pub(super) reach: Option<usize>,
}

/// Largest magnitude of a bias.
const BIASED: f32 = 3.0;

impl Look {
    /// Causal attention without window, softcap or bias.
    pub(super) const PLAIN: Look =
        Look { mask: Mask::Causal { window: None }, table: KvTable::Own, softcap: None, reach: None };

    /// Returns the stack whose K and V are stored, and the stack that attends to them.
    fn stacks(&self) -> (SpanStack, SpanStack) {
        match self.table {
            KvTable::Own => (SpanStack::Decoder, SpanStack::Decoder),
            KvTable::Scratch => (SpanStack::Encoder, SpanStack::Encoder),
            KvTable::Cross => (SpanStack::Encoder, SpanStack::Decoder),
        }
    }
}

impl Heads {
    /// Allocates a cache for the case.
    pub(super) fn cache<B: Backend>(&self, rig: &mut Rig<B>) -> KvLayer<B::Buf> {
        let Heads { ty, kv_heads, k_dim, v_dim, .. } = *self;
        let page_positions = rig.limits.page_positions;
        let pages = match self.look.table {
            KvTable::Scratch => rig.limits.scratch_positions() / page_positions,
            _ => POOL,
        };
        rig.cache(KvLayout { ty, pages, page_positions, kv_heads, k_dim, v_dim })
    }

    /// Runs attention for every row, with a new cache.
    pub(super) fn on<B: Backend>(&self, rig: &mut Rig<B>, steps: &[Vec<Piece>], mut book: Book) -> Answers {
        let mut cache = self.cache(rig);
        let mut answers = Answers::new();
        for pieces in steps {
            self.turn(rig, &mut cache, pieces, &mut book, &mut answers);
        }
        answers
    }

    /// Returns the memoized results of the reference backend.
    pub(super) fn of_oracle(
        &self,
        oracle: &mut Rig<Reference>,
        steps: &[Vec<Piece>],
        book: Book,
    ) -> Arc<Answers> {
        let key = oracle.question((self, steps, &book));
        ROWS.get(key, || self.on(oracle, steps, book))
    }

    /// Runs one step. K, V and Q of a row depend on its sequence and position alone. A step that only stores
    /// has no attention.
    pub(super) fn turn<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        cache: &mut KvLayer<B::Buf>,
        pieces: &[Piece],
        book: &mut Book,
        answers: &mut Answers,
    ) {
        rig.begin(batch_of(pieces, Want::None, book));
        if self.look.table == KvTable::Cross {
            // As in a decoder layer, whose own K and V are in the same pool.
            self.store(rig, KvTable::Own, SpanStack::Decoder, pieces, cache);
        }
        let (stored, attending) = self.look.stacks();
        self.store(rig, self.look.table, stored, pieces, cache);
        if pieces.iter().all(|piece| matches!(piece.kind, Kind::Stored | Kind::Poison)) {
            return;
        }
        let rows = rows_of(pieces, attending);
        assert_eq!(rig.backend.select(attending), rows.len(), "rows of the {attending:?}");
        let q = rig.put(&input(100_002, &rows, self.heads * self.k_dim));
        let width = self.heads * self.v_dim;
        let out = self.attend(rig, &q, cache, rows.len() * width);
        let out = rig.read(&out, rows.len() * width, format_args!("{self:?} over {pieces:?}"));
        answers.extend(rows.into_iter().zip(out.chunks_exact(width).map(<[f32]>::to_vec)));
    }

    /// Stores K and V of the rows of one stack.
    fn store<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        table: KvTable,
        stack: SpanStack,
        pieces: &[Piece],
        cache: &mut KvLayer<B::Buf>,
    ) {
        let rows = rows_of(pieces, stack);
        assert_eq!(rig.backend.select(stack), rows.len(), "rows of the {stack:?}");
        let is_poison = pieces.iter().any(|piece| piece.kind == Kind::Poison);
        let [k, v] = [(100_000, self.k_dim), (100_001, self.v_dim)].map(|(tag, dim)| {
            let mut numbers = input(tag, &rows, self.kv_heads * dim);
            if is_poison {
                numbers.fill(f32::NAN);
            }
            rig.put(&numbers)
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
        let Look { mask, table, softcap, reach } = self.look;
        let bias = reach.map(|reach| DistanceBias {
            table: rig.constant(&scaled(100_003, self.heads * (2 * reach - 1), BIASED)),
            heads: self.heads,
            reach,
        });
        let bias = bias.as_ref();
        let shape = AttentionShape { heads: self.heads, scale: self.scale, softcap, mask, table, bias };
        let mut out = rig.output(n);
        rig.backend.attention(&shape, q, cache, &mut out);
        out
    }

    /// Asserts that results are close to the reference. Inputs are at most 1, so the weighted sum of values
    /// is too, and `scale * k_dim` bounds a score without its bias.
    pub(super) fn close(&self, what: Arguments, got: &Answers, want: &Answers, bounds: &Bounds) {
        let bias = if self.look.reach.is_some() { BIASED } else { 0.0 };
        let magnitude = 1.0 + self.scale * self.k_dim as f32 + bias;
        assert!(!got.is_empty(), "{what}: no rows");
        for ((sequence, position), got) in got {
            let what = format_args!("{what}, sequence {sequence}, position {position}");
            close(what, got, &want[&(*sequence, *position)], (bounds.attention)(self.ty), |_| magnitude);
        }
    }
}

/// Returns a pseudo-random input row for each row.
fn input(tag: u32, rows: &[(u32, usize)], width: usize) -> Vec<f32> {
    let row =
        |(sequence, position): &(u32, usize)| noise(tag + 10_000 * sequence + 10 * *position as u32, width);
    rows.iter().flat_map(row).collect()
}
