//! Loads and computes the tables of positions: those added to embeddings, rotary ones, and biases of scores.
//!
//! Invariant: computed tables cover the positions that a step can have, and no more.

use super::{Loader, little_endian};
use crate::model::load_target::LoadTarget;
use crate::model::relative_bias;
use crate::model::rope;
use crate::model::spec::{PositionEmbeddingSpec, RelativeBiasKind, RelativeBiasSpec, RopeSpec, TensorSlice};
use crate::model::tensor_slices;
use anyhow::{Context, Result};
use mainstem_kernels::{QuantType, RelativeBias, Rope, Weight};

impl<T: LoadTarget> Loader<'_, T> {
    /// Loads or computes the table that is added by position, with the row of position 0.
    pub(super) fn position_table(
        &mut self,
        spec: &Option<PositionEmbeddingSpec>,
        token_types: Option<&TensorSlice>,
        (positions, width): (usize, usize),
    ) -> Result<Option<(Weight<T::Buf>, usize)>> {
        // The token type embedding is the same for all tokens, so it is added to each position's row.
        let types = token_types.map(|piece| self.first_row(piece)).transpose()?;
        let types = types.as_deref();
        let is_read = self.tensors.data.is_some();
        Ok(match spec {
            Some(PositionEmbeddingSpec::Learned { table, offset }) => {
                Some((self.learned_positions(table, types)?, *offset))
            }
            Some(PositionEmbeddingSpec::Sinusoidal { layout, frequencies, offset, scale }) => {
                let kind = (*layout, *frequencies);
                let rows = is_read.then(|| relative_bias::sinusoids(kind, width, positions, *offset, *scale));
                Some((self.upload_rows((positions, width), rows, types)?, 0))
            }
            None if types.is_some() => {
                let rows = is_read.then(|| vec![0.0; positions * width]);
                Some((self.upload_rows((positions, width), rows, types)?, 0))
            }
            None => None,
        })
    }

    /// Loads a table of learned positions, adding `row` to each of its rows if there is one.
    fn learned_positions(&mut self, piece: &TensorSlice, row: Option<&[f32]>) -> Result<Weight<T::Buf>> {
        if row.is_none() {
            return self.matrix(piece, false);
        }
        let (record, stored) = self.read(piece, QuantType::F32)?;
        self.upload_rows((record.n(), record.k()), stored.map(|stored| stored.to_f32()), row)
    }

    /// Reads the first row of a matrix; it is empty if data is not read.
    fn first_row(&mut self, piece: &TensorSlice) -> Result<Vec<f32>> {
        let Some(source) = self.tensors.data else { return Ok(Vec::new()) };
        let stored = tensor_slices::read_slice(&source.checkpoint, piece)?;
        let mut rows = stored.to_f32();
        rows.truncate(stored.k());
        Ok(rows)
    }

    /// Uploads a computed matrix (n, width), adding `row` to each of its rows if there is one.
    fn upload_rows(
        &mut self,
        (n, width): (usize, usize),
        rows: Option<Vec<f32>>,
        row: Option<&[f32]>,
    ) -> Result<Weight<T::Buf>> {
        let mut rows = rows.unwrap_or_default();
        for (value, added) in rows.iter_mut().zip(row.into_iter().flatten().cycle()) {
            *value += added;
        }
        Ok(self.target.upload_weight(QuantType::F32, n, width, &little_endian(&rows))?)
    }

    /// Computes the tables of a rotary position embedding.
    pub(super) fn rope(&mut self, spec: &RopeSpec, positions: usize) -> Result<Rope<T::Buf>> {
        let mut tables = Vec::new();
        for bound in rope::length_bounds(&spec.config) {
            let table = self.tensors.data.map(|_| match spec.growth {
                Some(growth) => rope::growth_table(growth, spec.dims, positions),
                None => rope::table(&spec.config, spec.dims, positions, bound),
            });
            let uploaded = self.upload_bytes(rope::table_bytes(spec.dims, positions), table);
            tables.push((bound, uploaded.context("allocating the rotary position table")?));
        }
        Ok(Rope {
            tables,
            positions,
            dims: spec.dims,
            style: spec.style,
            dynamic_ntk: rope::dynamic_stretch(&spec.config),
        })
    }

    /// Loads or computes a relative position bias for distances of less than `reach`.
    pub(super) fn relative_bias(
        &mut self,
        spec: &RelativeBiasSpec,
        reach: usize,
    ) -> Result<RelativeBias<T::Buf>> {
        let RelativeBiasSpec { kind, heads, local_heads: own } = spec;
        let table = match kind {
            RelativeBiasKind::Alibi { scale, max } => {
                let slopes = relative_bias::alibi_slopes(*heads, *max);
                self.tensors.data.map(|_| relative_bias::alibi_biases(&slopes, own.clone(), *scale, reach))
            }
            RelativeBiasKind::Learned { table, buckets, max_distance, bidirectional: both_ways } => {
                let (_, stored) = self.read(table, (self.tensors.types)(table))?;
                let heads = (*heads, own.clone());
                stored.map(|stored| {
                    let learned = stored.to_f32();
                    relative_bias::learned_biases(&learned, heads, *buckets, *max_distance, *both_ways, reach)
                })
            }
        };
        let columns = (2 * reach).saturating_sub(1);
        let table =
            self.upload(own.len() * columns, table).context("allocating the relative position bias")?;
        Ok(RelativeBias { table, heads: own.len(), reach })
    }
}
