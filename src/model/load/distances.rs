//! Loading of disentangled attention: the keys and queries of distances, which follow from the weights.
//!
//! Invariant: sums run in the order of columns, in sixteen lanes, whatever the number of threads and ranks.

use super::{Loader, little_endian};
use crate::model::distances;
use crate::model::load_target::LoadTarget;
use crate::model::spec::distances::DistanceSpec;
use crate::model::spec::{LinearSpec, NormSpec, TensorSlice};
use crate::model::tensor_slices;
use crate::model::weights::Distances;
use anyhow::{Context, Result};
use mainstem_kernels::{DistanceBuckets, NormKind, QuantType, Weight};

/// Lanes of a dot product.
const LANES: usize = 16;

impl<T: LoadTarget> Loader<'_, T> {
    /// Computes the keys and queries of the distances for heads of width `k_dim`.
    pub(super) fn distances(&mut self, spec: &DistanceSpec, k_dim: usize) -> Result<Distances<T::Buf>> {
        let (count, reach) = (spec.buckets(), self.positions);
        let vectors = self.distance_vectors(spec)?;
        let queries = self.vectors_of_heads(&spec.q, k_dim, (count, &vectors))?;
        let keys = self.vectors_of_heads(&spec.k, k_dim, (count, &vectors))?;
        let table = self.tensors.data.map(|_| distances::buckets(count, spec.growth_end, reach));
        let table = self.upload((2 * reach).saturating_sub(1), table).context("allocating the buckets")?;
        Ok(Distances { queries, keys, buckets: DistanceBuckets { table, count, reach } })
    }

    /// Reads the vectors of distances, (buckets, hidden), and normalizes them.
    fn distance_vectors(&mut self, spec: &DistanceSpec) -> Result<Vec<f32>> {
        let mut vectors = self.read_f32(&spec.table)?;
        if let Some(norm) = &spec.norm {
            let weight = norm.weights.first().map(|piece| self.read_f32(piece)).transpose()?;
            let bias = norm.biases.first().map(|piece| self.read_f32(piece)).transpose()?;
            for row in vectors.chunks_exact_mut(norm.width) {
                normalize(norm, (weight.as_deref(), bias.as_deref()), row);
            }
        }
        Ok(vectors)
    }

    /// Projects vectors (count, hidden) to those of heads, (heads * count, k_dim), which rows of heads are
    /// multiplied by.
    fn vectors_of_heads(
        &mut self,
        spec: &LinearSpec,
        k_dim: usize,
        (count, vectors): (usize, &[f32]),
    ) -> Result<Weight<T::Buf>> {
        let heads = spec.n / k_dim;
        if self.layers.packing.is_some() {
            // Stores have no vectors of distances, which are computed when a model is loaded from one.
            return Ok(Weight {
                id: None,
                buf: self.target.alloc(0)?,
                ty: QuantType::F32,
                n: heads * count,
                k: k_dim,
            });
        }
        let weight = self.read_f32(&spec.weight)?;
        let bias = spec.bias.as_ref().map(|piece| self.read_f32(piece)).transpose()?;
        let projected = match self.tensors.data {
            Some(_) => project(&weight, bias.as_deref(), (spec.k, vectors), k_dim, self.target.threads()),
            None => Vec::new(),
        };
        let columns = self.target.device_sizes().columns_of_heads(heads, k_dim);
        self.target.prepare_weight(QuantType::F32, columns)?;
        let bytes = little_endian(&projected);
        let uploaded = self.target.upload_weight(QuantType::F32, heads * count, k_dim, &bytes);
        uploaded.with_context(|| format!("distances that tensor '{}' projects", spec.weight.name))
    }

    /// Reads a slice in F32, and records it unless it has been recorded. It is empty if data is not read.
    fn read_f32(&mut self, piece: &TensorSlice) -> Result<Vec<f32>> {
        if self.records.iter().all(|record| record.name != piece.name) {
            let (_, stored) = self.read(piece, (self.tensors.types)(piece))?;
            return Ok(stored.map(|stored| stored.to_f32()).unwrap_or_default());
        }
        let Some(source) = self.tensors.data else { return Ok(Vec::new()) };
        let stored = tensor_slices::read_slice(&source.checkpoint, piece)?;
        tensor_slices::check_finite(piece, &stored)?;
        Ok(stored.to_f32())
    }
}

/// Normalizes a vector.
fn normalize(norm: &NormSpec, (weight, bias): (Option<&[f32]>, Option<&[f32]>), x: &mut [f32]) {
    let mean_of = |x: &mut dyn Iterator<Item = f64>| x.sum::<f64>() / norm.width as f64;
    let mean = match norm.kind {
        NormKind::Layer => mean_of(&mut x.iter().map(|x| f64::from(*x))),
        NormKind::Rms => 0.0,
    };
    let variance = mean_of(&mut x.iter().map(|x| (f64::from(*x) - mean).powi(2)));
    let factor = (variance + f64::from(norm.eps)).sqrt().recip();
    for (at, x) in x.iter_mut().enumerate() {
        let weight = weight.map_or(1.0, |weight| f64::from(weight[at] + norm.offset));
        let bias = bias.map_or(0.0, |bias| f64::from(bias[at]));
        *x = ((f64::from(*x) - mean) * factor * weight + bias) as f32;
    }
}

/// Multiplies vectors (count, k) by a weight (heads * k_dim, k), and adds a bias (heads * k_dim), on
/// `threads` threads. Returns the results (heads, count, k_dim).
fn project(
    weight: &[f32],
    bias: Option<&[f32]>,
    (k, vectors): (usize, &[f32]),
    k_dim: usize,
    threads: usize,
) -> Vec<f32> {
    let (heads, count) = (weight.len() / k / k_dim, vectors.len() / k);
    let mut projected = vec![0.0; heads * count * k_dim];
    let per_thread = heads.div_ceil(threads.max(1));
    std::thread::scope(|scope| {
        for (number, part) in projected.chunks_mut(per_thread * count * k_dim).enumerate() {
            scope.spawn(move || {
                for (head, to) in (number * per_thread..).zip(part.chunks_exact_mut(count * k_dim)) {
                    let rows = weight[head * k_dim * k..].chunks_exact(k);
                    for (at, row) in rows.enumerate().take(k_dim) {
                        let start = bias.map_or(0.0, |bias| bias[head * k_dim + at]);
                        for (vector, to) in vectors.chunks_exact(k).zip(to.chunks_exact_mut(k_dim)) {
                            to[at] = start + dot(row, vector);
                        }
                    }
                }
            });
        }
    });
    projected
}

/// Returns the dot product of two vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
