//! Loading of latent attention.
//!
//! Invariant: the device is prepared for the products of as many heads as it computes at once.

use super::Loader;
use crate::model::load_target::LoadTarget;
use crate::model::spec::LinearSpec;
use crate::model::spec::latent::LatentSpec;
use crate::model::weights::{Latent, Linear};
use anyhow::Result;

impl<T: LoadTarget> Loader<'_, T> {
    /// Loads the parts that only latent attention has.
    pub(super) fn latent(&mut self, heads: usize, spec: &LatentSpec) -> Result<Latent<T::Buf>> {
        let q_a = spec.q_a.as_ref().map(|(linear, _)| self.divided_linear(linear)).transpose()?;
        let (q_rope, k_rope) = (self.divided_linear(&spec.q_rope)?, self.divided_linear(&spec.k_rope)?);
        let absorbed = self.head_linear(heads, &spec.absorbed)?;
        // Its rows are those of heads, which are used together, so it is not divided.
        self.layers.is_for_openings = true;
        let keys = spec.keys.as_ref().map(|linear| self.linear(linear)).transpose();
        self.layers.is_for_openings = false;
        let keys = keys?;
        let q_a_norm = spec.q_a.as_ref().map(|(_, norm)| self.norm(norm)).transpose()?;
        let q_a = q_a.zip(q_a_norm);
        Ok(Latent { q_a, q_rope, k_rope, absorbed, keys, norm: self.norm(&spec.norm)? })
    }

    /// Loads a linear layer that has a matrix for each head.
    pub(super) fn head_linear(&mut self, heads: usize, spec: &LinearSpec) -> Result<Linear<T::Buf>> {
        let columns = self.target.device_sizes().columns_of_heads(heads, spec.k);
        self.target.prepare_weight((self.tensors.types)(&spec.weight), columns)?;
        self.linear(spec)
    }
}
