//! The layers of the small model: attention and MLP, connected as its family requires.
//!
//! Invariant: the backend runs every operation on rows; nothing is computed here.

use super::TinyModel;
use super::weights::ModelSizes;
use crate::family::{Mlp, ModelFamily, PositionEncoding};
use mainstem_kernels::backend::{Activation, AttentionShape, Backend, Experts, KvTable, Mask};
use mainstem_kernels::batch::SpanStack;

impl<B: Backend> TinyModel<B> {
    /// Runs one stack for the current rows.
    pub(super) fn run_stack(&mut self, stack: SpanStack, rows: usize) -> B::Buf {
        let mut x = self.embed(rows);
        let (table, mask) = match stack {
            SpanStack::Encoder => (KvTable::Scratch, Mask::Bidirectional { window: self.family.window }),
            SpanStack::Decoder => (KvTable::Own, Mask::Causal { window: self.family.window }),
        };
        let y = self.normalize(rows, &x);
        let q = self.project_queries(rows, &y, false);
        self.store_kv(rows, &y, table);
        self.attend(rows, &q, table, mask, &mut x);
        if self.family.has_encoder && stack == SpanStack::Decoder {
            let y = self.normalize(rows, &x);
            let q = self.project_queries(rows, &y, true);
            self.attend(rows, &q, KvTable::Cross, Mask::Bidirectional { window: None }, &mut x);
        }
        self.feed_forward(rows, &mut x);
        if stack == SpanStack::Encoder {
            let y = self.normalize(rows, &x);
            self.store_kv(rows, &y, KvTable::Cross);
        }
        x
    }

    /// Computes embeddings.
    fn embed(&mut self, rows: usize) -> B::Buf {
        let mut x = self.rig.output(rows * self.sizes.hidden);
        self.rig.backend.embed(&self.weights.table, 0, &mut x);
        if self.family.positions == PositionEncoding::Learned {
            self.rig.backend.embed_positions(&self.weights.positions, 0, 0, &mut x);
        }
        self.rig.backend.scale(rows, self.sizes.hidden, self.family.factor, &mut x);
        x
    }

    /// Normalizes rows.
    pub(super) fn normalize(&mut self, rows: usize, x: &B::Buf) -> B::Buf {
        let mut y = self.rig.output(rows * self.sizes.hidden);
        self.rig.backend.norm(rows, &self.norm, x, &mut y);
        y
    }

    /// Projects queries.
    fn project_queries(&mut self, rows: usize, y: &B::Buf, is_cross: bool) -> B::Buf {
        let mut q = self.rig.output(rows * self.sizes.q_width());
        let projections = if is_cross { &self.weights.cross } else { &self.weights.own };
        self.rig.backend.matmul(rows, &projections.q, Some(&self.q_bias), y, &mut q);
        if !is_cross {
            self.normalize_and_rotate(rows, ModelSizes::HEADS, &mut q);
        }
        q
    }

    /// Stores the K and V of y.
    fn store_kv(&mut self, rows: usize, y: &B::Buf, table: KvTable) {
        let [mut k, mut v] = [(); 2].map(|()| self.rig.output(rows * self.sizes.kv_width()));
        let projections = if table == KvTable::Cross { &self.weights.cross } else { &self.weights.own };
        self.rig.backend.matmul(rows, &projections.k, None, y, &mut k);
        self.rig.backend.matmul(rows, &projections.v, None, y, &mut v);
        if table != KvTable::Cross {
            self.normalize_and_rotate(rows, ModelSizes::KV_HEADS, &mut k);
        }
        let cache = if table == KvTable::Scratch { &mut self.scratch } else { &mut self.cache };
        self.rig.backend.store_kv(table, &k, &v, cache);
    }

    /// Normalizes and rotates each head of x (rows, heads, head_dim).
    fn normalize_and_rotate(&mut self, rows: usize, heads: usize, x: &mut B::Buf) {
        if self.family.head_norm {
            self.rig.backend.norm_in_place(rows * heads, &self.head_norm, x);
        }
        if let Some(rope) = &self.rope {
            let mut angles = self.rig.output(rows * rope.dims);
            self.rig.backend.rope_angles(rope, &mut angles);
            self.rig.backend.rope(rope, &angles, heads, self.sizes.head_dim, x);
        }
    }

    /// Adds the attention of q: x += W_o · attention(q).
    fn attend(&mut self, rows: usize, q: &B::Buf, table: KvTable, mask: Mask, x: &mut B::Buf) {
        let [mut attended, mut y] =
            [self.sizes.q_width(), self.sizes.hidden].map(|width| self.rig.output(rows * width));
        let bias = self.bias.as_ref().filter(|_| table != KvTable::Cross);
        let softcap = self.family.softcap;
        let plain = AttentionShape::plain(ModelSizes::HEADS, 0.5, mask, table);
        let shape = AttentionShape { softcap, bias, ..plain };
        let cache = if table == KvTable::Scratch { &self.scratch } else { &self.cache };
        self.rig.backend.attention(&shape, q, cache, &mut attended);
        let projections = if table == KvTable::Cross { &self.weights.cross } else { &self.weights.own };
        self.rig.backend.matmul(rows, &projections.o, None, &attended, &mut y);
        self.rig.backend.all_reduce(rows, self.sizes.hidden, &mut y);
        self.rig.backend.add(rows, self.sizes.hidden, self.family.factor, x, &y);
    }

    /// Adds the MLP: x += MLP(norm(x)).
    fn feed_forward(&mut self, rows: usize, x: &mut B::Buf) {
        let h = self.normalize(rows, x);
        let mut y = match self.family.mlp {
            Mlp::Plain(act) => self.dense_mlp(rows, act, &h, false),
            Mlp::Gated(act) => self.dense_mlp(rows, act, &h, true),
            Mlp::Mixture(_) => self.dense_mlp(rows, Activation::Silu, &h, true),
        };
        if let Mlp::Mixture(scoring) = self.family.mlp {
            let shape = ModelFamily::experts(scoring, self.sizes.mlp);
            let [mut gate, mut logits, mut mixed] =
                [1, shape.experts, self.sizes.hidden].map(|width| self.rig.output(rows * width));
            let b = &mut self.rig.backend;
            b.matmul(rows, &self.weights.row_gate, None, &h, &mut gate);
            b.gate_rows(rows, self.sizes.hidden, &gate, &mut y);
            b.matmul(rows, &self.weights.router, None, &h, &mut logits);
            let experts = Experts::in_memory(&self.weights.experts);
            b.moe(rows, &shape, &logits, experts, &h, &mut mixed).expect("all experts are in memory");
            b.add(rows, self.sizes.hidden, 1.0, &mut y, &mixed);
        }
        self.rig.backend.all_reduce(rows, self.sizes.hidden, &mut y);
        self.rig.backend.add(rows, self.sizes.hidden, self.family.factor, x, &y);
    }

    /// Computes a dense MLP.
    fn dense_mlp(&mut self, rows: usize, act: Activation, h: &B::Buf, is_gated: bool) -> B::Buf {
        let [mut gate, mut up, mut y] =
            [self.sizes.mlp, self.sizes.mlp, self.sizes.hidden].map(|width| self.rig.output(rows * width));
        let b = &mut self.rig.backend;
        b.matmul(rows, &self.weights.gate, None, h, &mut gate);
        b.matmul(rows, &self.weights.up, None, h, &mut up);
        b.activate(rows, self.sizes.mlp, act, &mut gate, is_gated.then_some(&up));
        b.matmul(rows, &self.weights.down, None, &gate, &mut y);
        y
    }
}
