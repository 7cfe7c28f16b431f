//! Multi-head latent attention (DeepSeek-AI 2024, section 2.1): keys and values of all heads are made from
//! one latent vector for each position, and queries may be made from a latent, too.
//!
//! The matrices that make keys and values of the latent are absorbed: queries are multiplied by the former,
//! and what attention sums of the latents by the latter. So attention itself has one KV head, whose key is
//! the latent and the rotated part, and whose value is the latent. Openings of prompts may attend to keys and
//! values of all heads instead ([`ModelSpec::open_with_heads`]).
//!
//! Invariant: the cache has one key for each position, with its value in it, on every rank.

use super::context::{ResolveContext, norm_kind};
use super::positions::Positions;
use super::{AttentionSpec, LinearSpec, ModelSpec, NormSpec, TensorPart};
use anyhow::{Result, bail, ensure};

/// The parts of latent attention besides those of every attention. In its [`AttentionSpec`], `q` are the
/// parts of queries without positions, `k` is the latent, and `v` makes the values of each head from it.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentSpec {
    /// Width of the part of a query or key without positions.
    pub nope_dim: usize,
    /// Width of the rotated part of a query or key.
    pub rope_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// The latent of queries and its norm, if queries have one.
    pub q_a: Option<(LinearSpec, NormSpec)>,
    /// The rotated parts of queries, (heads * rope_dim, inputs).
    pub q_rope: LinearSpec,
    /// The rotated part of the key, (rope_dim, hidden).
    pub k_rope: LinearSpec,
    /// Norm of the latent.
    pub norm: NormSpec,
    /// The matrices that queries absorb, (heads * width of the latent, nope_dim): those that make keys of the
    /// latent, each transposed.
    pub absorbed: LinearSpec,
    /// The matrices that make keys of the latent, (heads * nope_dim, width of the latent), if openings
    /// ([`mainstem_kernels::Span::is_opening`]) attend to keys and values of all heads.
    pub keys: Option<LinearSpec>,
}

impl LatentSpec {
    /// Returns the linear layers, in the order of loading.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        let q_a = self.q_a.iter().map(|(linear, _)| linear);
        q_a.chain([&self.q_rope, &self.k_rope, &self.absorbed]).chain(&self.keys)
    }

    /// Returns the width of a query or key with its rotated part.
    pub fn key_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Returns the shape of the attention of openings, of so many heads: heads, and widths of a key and of a
    /// value. `None` if it is that of all rows.
    pub fn opening_heads(&self, heads: usize) -> Option<[usize; 3]> {
        self.keys.as_ref().map(|_| [heads, self.key_dim(), self.value_dim])
    }

    /// Returns the norms, in the order of loading.
    pub fn norms(&self) -> impl Iterator<Item = &NormSpec> {
        self.q_a.iter().map(|(_, norm)| norm).chain([&self.norm])
    }
}

impl ModelSpec {
    /// Returns whether openings attend to keys and values of all heads.
    pub fn opens_with_heads(&self) -> bool {
        let latents = self.cached_layers().iter().flat_map(|layer| &layer.attention.latent);
        latents.into_iter().any(|latent| latent.keys.is_some())
    }

    /// Lets openings attend to keys and values of all heads, which are made from their latents. Fails if
    /// layers differ, or have no latents.
    pub fn open_with_heads(&mut self) -> Result<()> {
        let layers = self.decoder.iter_mut().flat_map(|stack| &mut stack.layers);
        let mut shapes = Vec::new();
        for attention in layers.map(|layer| &mut layer.attention) {
            let Some(latent) = &mut attention.latent else { bail!("not all layers have latent attention") };
            let mut keys = latent.absorbed.clone();
            (keys.n, keys.k) = (attention.heads * latent.nope_dim, attention.v_dim);
            let width = attention.v_dim;
            keys.weight.part = match keys.weight.part {
                TensorPart::TurnedRows { groups, stride, first, count } => {
                    TensorPart::Rows { groups, stride, first, count }
                }
                // They are stored transposed.
                _ => {
                    TensorPart::TurnedRows { groups: attention.heads, stride: width, first: 0, count: width }
                }
            };
            latent.keys = Some(keys);
            shapes.push(latent.opening_heads(attention.heads));
        }
        ensure!(!shapes.is_empty(), "no layer has latent attention");
        ensure!(shapes.windows(2).all(|two| two[0] == two[1]), "the heads of layers differ");
        Ok(())
    }
}

/// Resolves the latent attention of the current layer.
pub(super) fn attention(fill: &mut ResolveContext, positions: &mut Positions) -> Result<AttentionSpec> {
    let (table, names, hidden) = (&fill.tables.attention, &fill.tables.tensors, fill.hidden);
    let look = &mut *fill.lookups;
    let heads = look.required("attention.heads", &table.heads)?;
    let q_rank = look.or_default("attention.q_rank", &table.q_rank, 0)?;
    let kv_rank = look.required("attention.kv_rank", &table.kv_rank)?;
    let nope_dim = look.required("attention.nope_dim", &table.nope_dim)?;
    let rope_dim = look.required("attention.rope_dim", &table.rope_dim)?;
    let value_dim =
        look.or_derived("attention.value_dim", &table.value_dim, "attention.nope_dim", nope_dim)?;
    let widest = kv_rank.max(nope_dim).saturating_add(rope_dim.max(value_dim));
    super::check::check_sizes(&[
        ("number of heads", heads),
        ("width of the latent", kv_rank),
        ("dimension without positions", nope_dim),
        ("rotated dimension", rope_dim),
        ("value dimension", value_dim),
        ("width of all heads", heads.saturating_mul(widest)),
        ("width of the latent of queries", q_rank.max(1)),
    ])?;
    let bias = look.or_default("attention.bias", &table.bias, false)?;
    let qkv_bias = look.or_default("attention.qkv_bias", &table.qkv_bias, bias)?;
    let out_bias = look.or_default("attention.out_bias", &table.out_bias, bias)?;

    let q_a = match q_rank {
        0 => None,
        _ => Some(latent_queries(fill, qkv_bias, q_rank)?),
    };
    let inputs = if q_rank == 0 { hidden } else { q_rank };
    let [q, q_rope] = split_rows(fill, "q", None, (heads, [nope_dim, rope_dim]), inputs)?;
    let kv_a_bias = qkv_bias.then_some("kv_a bias");
    let [k, k_rope] = split_rows(fill, "kv_a", kv_a_bias, (1, [kv_rank, rope_dim]), hidden)?;
    let norm = inner_norm(fill, "kv_a_norm", kv_rank)?;
    let [absorbed, v] = matrices_of_heads(fill, heads, [nope_dim, value_dim], kv_rank)?;
    let o = fill.linear("o", out_bias.then_some("o bias"), &names.o, hidden, heads * value_dim)?;

    let (rope, relative_bias) = positions.resolve_layer(fill, (heads, rope_dim))?;
    ensure!(relative_bias.is_none(), "latent attention cannot have relative position biases");
    let factor = rope.map_or(1.0, |rope| positions.score_factor(rope));
    let by_width = factor / ((nope_dim + rope_dim) as f64).sqrt();
    let scale = fill.lookups.or_default("attention.scale", &table.scale, by_width)? as f32;
    let mask = fill.mask()?;
    let latent =
        LatentSpec { nope_dim, rope_dim, value_dim, q_a, q_rope, k_rope, norm, absorbed, keys: None };
    Ok(AttentionSpec {
        heads,
        kv_heads: 1,
        k_dim: kv_rank + rope_dim,
        v_dim: kv_rank,
        scale,
        softcap: None,
        mask,
        rope,
        growth: None,
        sinks: None,
        relative_bias: None,
        clip: None,
        q,
        k,
        v,
        o,
        qk_norms: None,
        qk_norms_last: false,
        qk_split: None,
        distances: None,
        latent: Some(Box::new(latent)),
    })
}

/// Resolves the projection to the latent of queries, and its norm.
fn latent_queries(
    fill: &mut ResolveContext,
    has_bias: bool,
    q_rank: usize,
) -> Result<(LinearSpec, NormSpec)> {
    let names = &fill.tables.tensors.q_a;
    let linear = fill.linear("q_a", has_bias.then_some("q_a bias"), names, q_rank, fill.hidden)?;
    Ok((linear, inner_norm(fill, "q_a_norm", q_rank)?))
}

/// Resolves the matrices that queries absorb, and those that make values of the latent.
fn matrices_of_heads(
    fill: &mut ResolveContext,
    heads: usize,
    [nope_dim, value_dim]: [usize; 2],
    kv_rank: usize,
) -> Result<[LinearSpec; 2]> {
    let names = &fill.tables.tensors;
    if fill.exists(&names.k_b) {
        let absorbed = fill.linear("k_b", None, &names.k_b, heads * kv_rank, nope_dim)?;
        return Ok([absorbed, fill.linear("v_b", None, &names.v_b, heads * value_dim, kv_rank)?]);
    }
    let [mut absorbed, v] = split_rows(fill, "kv_b", None, (heads, [nope_dim, value_dim]), kv_rank)?;
    let (groups, stride) = (heads, nope_dim + value_dim);
    absorbed.weight.part = TensorPart::TurnedRows { groups, stride, first: 0, count: nope_dim };
    (absorbed.n, absorbed.k) = (heads * kv_rank, nope_dim);
    Ok([absorbed, v])
}

/// Resolves the two parts of a linear layer whose rows are groups, each with rows of both parts.
fn split_rows(
    fill: &mut ResolveContext,
    role: &'static str,
    bias_role: Option<&'static str>,
    (groups, counts): (usize, [usize; 2]),
    k: usize,
) -> Result<[LinearSpec; 2]> {
    let names = &fill.tables.tensors;
    let names = match role {
        "q" => &names.q,
        "kv_a" => &names.kv_a,
        _ => &names.kv_b,
    };
    let stride = counts[0] + counts[1];
    let mut part = |first, count| {
        let rows = (groups * stride, TensorPart::Rows { groups, stride, first, count });
        fill.linear_part(role, bias_role, names, (groups * count, k), rows, None)
    };
    Ok([part(0, counts[0])?, part(counts[0], counts[1])?])
}

/// Resolves the norm of a latent, whose epsilon is that of query and key norms.
fn inner_norm(fill: &mut ResolveContext, role: &'static str, width: usize) -> Result<NormSpec> {
    let (table, names) = (&fill.tables.attention, &fill.tables.tensors);
    let names = if role == "q_a_norm" { &names.q_a_norm } else { &names.kv_a_norm };
    let usual = fill.lookups.required("norm.kind", &fill.tables.norm.kind)?;
    let kind = fill.lookups.or_default("attention.qk_norm_kind", &table.qk_norm_kind, usual)?;
    let has_bias = fill.norm_bias()?;
    let mut norm = fill.norm_of_kind((norm_kind(kind), has_bias), role, names, (None, width))?;
    norm.eps =
        fill.lookups.or_default("attention.qk_norm_eps", &table.qk_norm_eps, f64::from(norm.eps))? as f32;
    Ok(norm)
}
