//! Loads and computes the tables of positions: those added to embeddings, rotary ones, and biases of scores.
//!
//! Invariant: computed tables cover the positions that a step can have, and no more.

use super::{Loader, little_endian};
use crate::model::load_target::LoadTarget;
use crate::model::relative_bias;
use crate::model::rope;
use crate::model::spec::{PositionEmbeddingSpec, RelativeBiasKind, RelativeBiasSpec, RopeSpec, TensorSlice};
use crate::model::tensor_slices;
use crate::model::weights::PositionTable;
use anyhow::{Context, Result};
use mainstem_kernels::{QuantType, RelativeBias, Rope, Weight};

/// Number of token types that inputs can have: those of a first and of a second text.
const TOKEN_TYPES: usize = 2;

/// The embeddings of token types.
struct TypeRows {
    count: usize,
    /// A row for each of them; none if data is not read.
    rows: Vec<Vec<f32>>,
}

impl<T: LoadTarget> Loader<'_, T> {
    /// Loads or computes the table that is added by position.
    pub(super) fn position_table(
        &mut self,
        spec: &Option<PositionEmbeddingSpec>,
        token_types: Option<&TensorSlice>,
        (positions, width): (usize, usize),
    ) -> Result<Option<PositionTable<T::Buf>>> {
        // The embedding of a token's type is added to the rows of positions, which each type has of its own.
        let types = token_types.map(|piece| self.type_rows(piece)).transpose()?;
        let types = types.as_ref();
        let is_read = self.tensors.data.is_some();
        let (table, n, offset) = match spec {
            Some(PositionEmbeddingSpec::Learned { table, offset }) => {
                (self.learned_positions(table, types)?, table.shape[0], *offset)
            }
            Some(PositionEmbeddingSpec::Sinusoidal { layout, frequencies, offset, scale }) => {
                let kind = (*layout, *frequencies);
                let rows = is_read.then(|| relative_bias::sinusoids(kind, width, positions, *offset, *scale));
                (self.upload_rows((positions, width), rows, types)?, positions, 0)
            }
            None if types.is_some() => {
                let rows = is_read.then(|| vec![0.0; positions * width]);
                (self.upload_rows((positions, width), rows, types)?, positions, 0)
            }
            None => return Ok(None),
        };
        let type_rows = if types.is_some_and(|types| types.count > 1) { n } else { 0 };
        Ok(Some(PositionTable { table, offset, type_rows }))
    }

    /// Loads a table of learned positions, with the rows of token types added if there are any.
    fn learned_positions(&mut self, piece: &TensorSlice, types: Option<&TypeRows>) -> Result<Weight<T::Buf>> {
        if types.is_none() {
            return self.matrix(piece, false);
        }
        let (record, stored) = self.read(piece, QuantType::F32)?;
        self.upload_rows((record.n(), record.k()), stored.map(|stored| stored.to_f32()), types)
    }

    /// Reads the rows of the token types that inputs can have; they are empty if data is not read.
    fn type_rows(&mut self, piece: &TensorSlice) -> Result<TypeRows> {
        let count = piece.shape[0].min(TOKEN_TYPES);
        let Some(source) = self.tensors.data else { return Ok(TypeRows { count, rows: Vec::new() }) };
        let stored = tensor_slices::read_slice(&source.checkpoint, piece)?;
        let rows = stored.to_f32().chunks(stored.k()).take(count).map(<[f32]>::to_vec).collect();
        Ok(TypeRows { count, rows })
    }

    /// Uploads a computed matrix (n, width). With token types it is uploaded once for each, with the row of
    /// the type added to each of its rows.
    fn upload_rows(
        &mut self,
        (n, width): (usize, usize),
        rows: Option<Vec<f32>>,
        types: Option<&TypeRows>,
    ) -> Result<Weight<T::Buf>> {
        let rows = rows.unwrap_or_default();
        let added = |row: &Vec<f32>| -> Vec<f32> {
            rows.iter().zip(row.iter().cycle()).map(|(value, added)| value + added).collect()
        };
        let (n, rows) = match types {
            Some(types) => (n * types.count, types.rows.iter().map(added).collect::<Vec<_>>().concat()),
            None => (n, rows),
        };
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
