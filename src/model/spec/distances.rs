//! Resolves disentangled attention (He et al. 2021, section 3.1): vectors of distances, of which each head
//! has a key and a query. With b, the bucket of the distance of a key and a query, the score is
//! `q · k + q · key of b + query of b · k`.
//!
//! Invariant: only a bidirectional encoder has it, with a key for each query head.

use super::context::ResolveContext;
use super::words::PositionKind;
use super::{LinearSpec, NormSpec, TensorPart, TensorSlice};
use anyhow::{Result, ensure};
use mainstem_kernels::Mask;

/// The vectors of distances, and their projections.
#[derive(Clone, Debug, PartialEq)]
pub struct DistanceSpec {
    /// The vectors of all buckets, (buckets, hidden): one half is for keys after the query, the other for
    /// keys at its position and before.
    pub table: TensorSlice,
    /// Norm of the vectors.
    pub norm: Option<NormSpec>,
    /// Projections of the vectors to queries and to keys of the heads.
    pub q: LinearSpec,
    pub k: LinearSpec,
    /// Distance up to which buckets grow, the longer the distance; without growth, each distance in the
    /// table has a bucket of its own.
    pub growth_end: Option<usize>,
}

impl DistanceSpec {
    /// Returns the number of buckets.
    pub fn buckets(&self) -> usize {
        self.table.shape[0]
    }
}

/// Returns whether the current layer has disentangled attention.
pub(super) fn is_disentangled(fill: &mut ResolveContext) -> Result<bool> {
    let kind = &fill.tables.position.kind;
    let kind = fill.lookups.or_default("position.kind", kind, PositionKind::None)?;
    Ok(kind == PositionKind::Disentangled)
}

/// Resolves the distances of the current layer, which has the mask and the projections of queries and keys
/// given, for as many heads as KV heads of the width given.
pub(super) fn resolve(
    fill: &mut ResolveContext,
    mask: Mask,
    (heads, kv_heads, k_dim): (usize, usize, usize),
    own: [&LinearSpec; 2],
) -> Result<Option<Box<DistanceSpec>>> {
    if !is_disentangled(fill)? {
        return Ok(None);
    }
    let is_bidirectional = matches!(mask, Mask::Bidirectional { .. });
    ensure!(is_bidirectional, "disentangled attention needs a bidirectional encoder");
    ensure!(heads == kv_heads, "disentangled attention needs a KV head for each of the {heads} heads");
    let (table, names, hidden) = (&fill.tables.position, &fill.tables.tensors, fill.hidden);
    let buckets = fill.lookups.or_default("position.buckets", &table.buckets, 0)?;
    let max_distance = fill.lookups.required("position.max_distance", &table.max_distance)?;
    let grows = buckets > 0;
    let side = if grows { buckets } else { max_distance };
    super::check::check_sizes(&[("number of buckets", side), ("largest distance", max_distance)])?;
    ensure!(
        !grows || buckets > 1 && max_distance > buckets / 2 + 1,
        "{buckets} buckets cannot distinguish distances up to {max_distance}"
    );
    let has_norm = fill.lookups.or_default("position.norm", &table.norm, false)?;
    let is_shared = fill.lookups.or_default("position.shared", &table.shared, false)?;
    let norm = match has_norm {
        true => Some(fill.norm("distance_norm", &names.distance_norm, hidden)?),
        false => None,
    };
    let mut project = |own: &LinearSpec, roles: (&'static str, &'static str), names| match is_shared {
        true => Ok(own.clone()),
        false => fill.linear(roles.0, own.bias.as_ref().map(|_| roles.1), names, heads * k_dim, hidden),
    };
    let q = project(own[0], ("distance_q", "distance_q bias"), &names.distance_q)?;
    let k = project(own[1], ("distance_k", "distance_k bias"), &names.distance_k)?;
    let shape = vec![2 * side, hidden];
    let table = fill.slice("distances", &names.distances, shape, TensorPart::Whole, None)?;
    Ok(Some(Box::new(DistanceSpec { table, norm, q, k, growth_end: grows.then_some(max_distance) })))
}
