//! Loads the mixture of experts of a layer.
//!
//! Invariant: matrices of experts are noted with the number of their expert; their biases are vectors like
//! any other, which are never read when rows choose an expert.

use super::Loader;
use crate::model::load_target::LoadTarget;
use crate::model::spec::{DenseSpec, MoeSpec};
use crate::model::weights::Moe;
use anyhow::Result;
use mainstem_kernels::{Expert, ExpertBiases};

impl<T: LoadTarget> Loader<'_, T> {
    /// Loads the router, the experts and the shared expert.
    pub(super) fn moe(&mut self, spec: &MoeSpec) -> Result<Moe<T::Buf>> {
        let shape = spec.shape();
        self.target.prepare_moe(&shape, spec.router.k)?;
        let expert = |(number, dense): (usize, &DenseSpec), loader: &mut Self| {
            loader.layers.expert = Some(number);
            let gate = loader.linear(&dense.gate)?;
            let (up, up_bias) = match &dense.up {
                Some(up) => Some(loader.linear(up)?).map(|up| (up.weight, up.bias)).unzip(),
                None => (None, None),
            };
            let down = loader.linear(&dense.down)?;
            loader.layers.expert = None;
            let biases = ExpertBiases { gate: gate.bias, up: up_bias.flatten(), down: down.bias };
            anyhow::Ok((Expert { gate: gate.weight, up, down: down.weight }, biases))
        };
        let router = self.linear(&spec.router)?;
        let correction = spec.correction.as_ref().map(|piece| self.vector(piece, 0.0)).transpose()?;
        let experts =
            spec.experts.iter().enumerate().map(|it| expert(it, self)).collect::<Result<Vec<_>>>()?;
        let is_biased = spec.experts.iter().any(|expert| expert.gate.bias.is_some());
        let (experts, mut biases): (Vec<_>, Vec<_>) = experts.into_iter().unzip();
        biases.truncate(if is_biased { biases.len() } else { 0 });
        Ok(Moe {
            shape,
            router,
            correction,
            experts,
            biases,
            source: None,
            shared: spec.shared.as_ref().map(|dense| self.dense(dense)).transpose()?,
            shared_router: spec.shared_router.as_ref().map(|linear| self.linear(linear)).transpose()?,
        })
    }
}
