//! The matrices of the small model, enough for every family.
//!
//! Invariant: their numbers depend on their shapes alone, so that all backends get the same model.

use crate::inputs::{round_to_blocks, scaled};
use crate::rig::Rig;
use mainstem_kernels::backend::{Backend, Expert, Weight};
use mainstem_kernels::quant::QuantType;

/// Dimensions of the model: odd as far as the blocks of the format allow.
#[derive(Clone, Copy)]
pub(super) struct ModelSizes {
    pub(super) hidden: usize,
    pub(super) mlp: usize,
    pub(super) head_dim: usize,
}

/// The matrices of the model (n, k).
pub(super) struct ModelWeights<B: Backend> {
    pub(super) table: Weight<B::Buf>,
    pub(super) positions: Weight<B::Buf>,
    pub(super) own: Projections<B>,
    pub(super) cross: Projections<B>,
    pub(super) gate: Weight<B::Buf>,
    pub(super) up: Weight<B::Buf>,
    pub(super) down: Weight<B::Buf>,
    pub(super) row_gate: Weight<B::Buf>,
    pub(super) router: Weight<B::Buf>,
    pub(super) experts: Vec<Expert<B::Buf>>,
    pub(super) head: Weight<B::Buf>,
}

/// The matrices of one attention.
pub(super) struct Projections<B: Backend> {
    pub(super) q: Weight<B::Buf>,
    pub(super) k: Weight<B::Buf>,
    pub(super) v: Weight<B::Buf>,
    pub(super) o: Weight<B::Buf>,
}

impl ModelSizes {
    pub(super) const HEADS: usize = 4;
    pub(super) const KV_HEADS: usize = 2;

    pub(super) fn for_format(ty: QuantType) -> ModelSizes {
        let [hidden, mlp, head_dim] = [33, 50, 10].map(|n| round_to_blocks(ty, n));
        ModelSizes { hidden, mlp, head_dim }
    }

    pub(super) fn q_width(&self) -> usize {
        ModelSizes::HEADS * self.head_dim
    }

    pub(super) fn kv_width(&self) -> usize {
        ModelSizes::KV_HEADS * self.head_dim
    }
}

impl<B: Backend> ModelWeights<B> {
    pub(super) fn new(rig: &mut Rig<B>, ty: QuantType, sizes: &ModelSizes) -> ModelWeights<B> {
        let ModelSizes { hidden, mlp, .. } = *sizes;
        let (vocab, positions) = (rig.limits.vocab, rig.limits.positions);
        let mut weight =
            |tag: u32, n: usize, k: usize| rig.weight(ty, n, &scaled(tag, n * k, 2.0 / (k as f32).sqrt()));
        let mut projections = |tag: u32| Projections {
            q: weight(tag, sizes.q_width(), hidden),
            k: weight(tag + 1, sizes.kv_width(), hidden),
            v: weight(tag + 2, sizes.kv_width(), hidden),
            o: weight(tag + 3, hidden, sizes.q_width()),
        };
        let (own, cross) = (projections(301), projections(311));
        let experts = (0..6).map(|expert| Expert {
            gate: weight(320 + expert, mlp, hidden),
            up: Some(weight(330 + expert, mlp, hidden)),
            down: weight(340 + expert, hidden, mlp),
        });
        ModelWeights {
            own,
            cross,
            experts: experts.collect(),
            table: weight(300, vocab, hidden),
            gate: weight(305, mlp, hidden),
            up: weight(306, mlp, hidden),
            down: weight(307, hidden, mlp),
            head: weight(308, vocab, hidden),
            row_gate: weight(315, 1, hidden),
            router: weight(316, 6, hidden),
            positions: weight(350, positions, hidden),
        }
    }
}
