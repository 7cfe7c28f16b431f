//! Resolves one layer of a specification: attention, feed-forward network, and the norms around them.
//!
//! Invariant: every size of a layer follows from its own tables; nothing is taken from the layer before.

use super::context::{ResolveContext, activation_of, norm_kind, positive};
use super::positions::Positions;
use super::setting::OneOrMore;
use super::words::{ActivationName, AttentionKind, MlpKind, Placement, QkNorm, QkvLayout, QkvOrder, Wiring};
use super::{
    AttentionSpec, DenseSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec, Norms, TensorPart, TensorSlice,
};
use super::{distances, experts, latent};
use anyhow::{Result, ensure};
use mainstem_kernels::{Activation, Mask, Xielu};

type Names = Option<OneOrMore<String>>;

/// Resolves the current layer of `fill`.
pub(super) fn resolve_layer(fill: &mut ResolveContext, positions: &mut Positions) -> Result<LayerSpec> {
    let (residual, names) = (&fill.tables.residual, &fill.tables.tensors);
    let wiring = fill.lookups.or_default("residual.wiring", &residual.wiring, Wiring::Sequential)?;
    let residual_scale = fill.lookups.or_default("residual.scale", &residual.scale, 1.0)? as f32;
    let parallel = wiring != Wiring::Sequential;
    ensure!(!(parallel && fill.has_encoder), "a layer with cross-attention cannot have parallel wiring");
    let attention_norms =
        match fill.lookups.or_default("attention.norm", &fill.tables.attention.norm, true)? {
            true => norms(
                fill,
                ("attention_norm", &names.attention_norm),
                ("attention_out_norm", &names.attention_out_norm),
            )?,
            false => Norms::default(),
        };
    let kind = &fill.tables.attention.kind;
    let attention = match fill.lookups.or_default("attention.kind", kind, AttentionKind::Heads)? {
        AttentionKind::Heads => attention(fill, positions)?,
        AttentionKind::Latent => latent::attention(fill, positions)?,
    };
    ensure!(
        attention.latent.is_none() || !distances::is_disentangled(fill)?,
        "latent attention cannot be disentangled"
    );
    ensure!(
        attention.latent.is_none() || !fill.has_encoder,
        "latent attention cannot be in an encoder-decoder"
    );
    let cross = match fill.has_encoder {
        true => Some((
            norms(fill, ("cross_norm", &names.cross_norm), ("cross_out_norm", &names.cross_out_norm))?,
            cross_attention(fill, &attention)?,
        )),
        false => None,
    };
    // With parallel wiring and a shared input, the norm before attention is also the MLP's.
    let has_mlp_norms = fill.lookups.or_default("mlp.norm", &fill.tables.mlp.norm, true)?;
    let mlp_norms = match wiring {
        Wiring::Parallel => Norms::default(),
        _ if !has_mlp_norms => Norms::default(),
        _ => norms(fill, ("mlp_norm", &names.mlp_norm), ("mlp_out_norm", &names.mlp_out_norm))?,
    };
    ensure!(
        !parallel || attention_norms.pre.is_some() && attention_norms.post.is_none(),
        "parallel wiring requires a norm before attention, and none after residuals"
    );
    ensure!(
        wiring != Wiring::ParallelTwoNorms || mlp_norms.pre.is_some(),
        "parallel wiring with two norms requires a norm before the MLP"
    );
    let mlp = mlp(fill)?;
    Ok(LayerSpec { wiring, residual_scale, attention_norms, attention, cross, mlp_norms, mlp })
}

fn norms(
    fill: &mut ResolveContext,
    main: (&'static str, &Names),
    out: (&'static str, &Names),
) -> Result<Norms> {
    let hidden = fill.hidden;
    let placement = fill.placement()?;
    let mut norm = |(role, names): (&'static str, &Names)| fill.norm(role, names, hidden).map(Some);
    Ok(match placement {
        Placement::Pre => Norms { pre: norm(main)?, ..Norms::default() },
        Placement::Post => Norms { post: norm(main)?, ..Norms::default() },
        Placement::Sandwich => Norms { pre: norm(main)?, out: norm(out)?, post: None },
        Placement::Output => Norms { out: norm(out)?, ..Norms::default() },
        Placement::None => Norms::default(),
    })
}

fn attention(fill: &mut ResolveContext, positions: &mut Positions) -> Result<AttentionSpec> {
    let (table, names, hidden) = (&fill.tables.attention, &fill.tables.tensors, fill.hidden);
    let look = &mut *fill.lookups;
    let heads = look.required("attention.heads", &table.heads)?;
    ensure!(heads > 0, "the number of heads is 0");
    let kv_heads = look.or_derived("attention.kv_heads", &table.kv_heads, "attention.heads", heads)?;
    ensure!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "the number of heads, {heads}, is not a multiple of the {kv_heads} KV heads"
    );
    let by_width = hidden / heads;
    let k_dim =
        look.or_derived("attention.head_dim", &table.head_dim, "size.hidden / attention.heads", by_width)?;
    let v_dim = look.or_default("attention.value_dim", &table.value_dim, k_dim)?;
    super::check::check_sizes(&[
        ("number of heads", heads),
        ("head dimension", k_dim),
        ("value dimension", v_dim),
        ("width of all heads", heads.saturating_mul(k_dim.max(v_dim))),
    ])?;
    let bias = look.or_default("attention.bias", &table.bias, false)?;
    let qkv_bias = look.or_default("attention.qkv_bias", &table.qkv_bias, bias)?;
    let out_bias = look.or_default("attention.out_bias", &table.out_bias, bias)?;
    let layout = look.or_default("attention.qkv", &table.qkv, QkvLayout::Separate)?;
    let qk_norm = look.or_default("attention.qk_norm", &table.qk_norm, QkNorm::None)?;
    let scale = look.or_default("attention.scale", &table.scale, 1.0 / (k_dim as f64).sqrt())? as f32;
    let softcap = positive(look.or_default("attention.softcap", &table.softcap, 0.0)? as f32);
    let has_sinks = look.or_default("attention.sinks", &table.sinks, false)?;
    let qk_norms_last = look.or_default("attention.qk_norm_last", &table.qk_norm_last, false)?;
    let clip = positive(look.or_default("attention.clip", &table.clip, 0.0)? as f32);
    let mask = fill.mask()?;
    let [q, k, v] = match layout {
        QkvLayout::Separate => {
            let roles = [("q", "q bias"), ("k", "k bias"), ("v", "v bias")];
            let widths = [heads * k_dim, kv_heads * k_dim, kv_heads * v_dim];
            separate_qkv(fill, roles, [&names.q, &names.k, &names.v], widths, qkv_bias)?
        }
        _ => fused_qkv(fill, layout, (heads, kv_heads, k_dim, v_dim), qkv_bias)?,
    };
    let o = fill.linear("o", out_bias.then_some("o bias"), &names.o, hidden, heads * v_dim)?;
    let qk_norms = qk_norms(fill, qk_norm, (heads, kv_heads, k_dim))?;
    let sinks = has_sinks.then(|| fill.slice("sinks", &names.sinks, vec![heads], TensorPart::Whole, None));
    let sinks = sinks.transpose()?;
    let (rope, relative_bias) = positions.resolve_layer(fill, (heads, k_dim))?;
    let growth = positions.growth(fill, k_dim)?;
    let distances = distances::resolve(fill, mask, (heads, kv_heads, k_dim), [&q, &k])?;
    Ok(AttentionSpec {
        heads,
        kv_heads,
        k_dim,
        v_dim,
        scale,
        softcap,
        mask,
        rope,
        growth,
        sinks,
        relative_bias,
        clip,
        q,
        k,
        v,
        o,
        qk_norms,
        qk_norms_last,
        qk_split: None,
        latent: None,
        distances,
    })
}

fn separate_qkv(
    fill: &mut ResolveContext,
    roles: [(&'static str, &'static str); 3],
    names: [&Names; 3],
    widths: [usize; 3],
    biased: bool,
) -> Result<[LinearSpec; 3]> {
    let hidden = fill.hidden;
    let mut linear = |at: usize| {
        let (role, bias_role) = roles[at];
        fill.linear(role, biased.then_some(bias_role), names[at], widths[at], hidden)
    };
    Ok([linear(0)?, linear(1)?, linear(2)?])
}

/// Resolves queries, keys and values that are rows of one tensor.
fn fused_qkv(
    fill: &mut ResolveContext,
    layout: QkvLayout,
    (heads, kv_heads, k_dim, v_dim): (usize, usize, usize, usize),
    biased: bool,
) -> Result<[LinearSpec; 3]> {
    let (table, names, hidden) = (&fill.tables.attention, &fill.tables.tensors.qkv, fill.hidden);
    let groups = match layout {
        QkvLayout::Fused => 1,
        _ => fill.lookups.or_default("attention.qkv_groups", &table.qkv_groups, kv_heads)?,
    };
    ensure!(
        groups > 0 && kv_heads.is_multiple_of(groups),
        "'attention.qkv_groups' is {groups}, which does not divide the {kv_heads} KV heads"
    );
    let order = fill.lookups.or_default("attention.qkv_order", &table.qkv_order, QkvOrder::Qkv)?;
    let counts = [heads * k_dim / groups, kv_heads * k_dim / groups, kv_heads * v_dim / groups];
    let stride = counts.iter().sum::<usize>();
    let firsts = match order {
        QkvOrder::Qkv => [0, counts[0], counts[0] + counts[1]],
        QkvOrder::Qvk => [0, counts[0] + counts[2], counts[0]],
    };
    let mut linear = |at: usize, role, bias_role: &'static str| {
        let (first, count) = (firsts[at], counts[at]);
        let part = (groups * stride, TensorPart::Rows { groups, stride, first, count });
        fill.linear_part(role, biased.then_some(bias_role), names, (groups * count, hidden), part, None)
    };
    Ok([linear(0, "qkv", "qkv bias")?, linear(1, "qkv", "qkv bias")?, linear(2, "qkv", "qkv bias")?])
}

fn qk_norms(
    fill: &mut ResolveContext,
    which: QkNorm,
    (heads, kv_heads, k_dim): (usize, usize, usize),
) -> Result<Option<(NormSpec, NormSpec)>> {
    let (q_width, k_width) = match which {
        QkNorm::None => return Ok(None),
        QkNorm::PerHead | QkNorm::PerHeadWeights => (k_dim, k_dim),
        QkNorm::Full => (heads * k_dim, kv_heads * k_dim),
    };
    let names = &fill.tables.tensors;
    let usual = fill.lookups.required("norm.kind", &fill.tables.norm.kind)?;
    let kind =
        fill.lookups.or_default("attention.qk_norm_kind", &fill.tables.attention.qk_norm_kind, usual)?;
    let kind = norm_kind(kind);
    let table = &fill.tables.attention;
    let has_weight = fill.lookups.or_default("attention.qk_norm_weight", &table.qk_norm_weight, true)?;
    if !has_weight {
        let usual = fill.lookups.required("norm.eps", &fill.tables.norm.eps)?;
        let eps = fill.lookups.or_default("attention.qk_norm_eps", &table.qk_norm_eps, usual)? as f32;
        let (weights, biases) = (Vec::new(), Vec::new());
        let norm = NormSpec { kind, weights, biases, offset: 0.0, width: q_width, eps };
        return Ok(Some((norm.clone(), NormSpec { width: k_width, ..norm })));
    }
    let usual = fill.norm_bias()?;
    let bias = &fill.tables.attention.qk_norm_bias;
    let has_bias = fill.lookups.or_default("attention.qk_norm_bias", bias, usual)?;
    let mut norm = |role, names, width, heads: usize| {
        let heads = (which == QkNorm::PerHeadWeights).then_some(heads);
        fill.norm_of_kind((kind, has_bias), role, names, (heads, width))
    };
    let mut q = norm("q_norm", &names.q_norm, q_width, heads)?;
    let mut k = norm("k_norm", &names.k_norm, k_width, kv_heads)?;
    let eps = &fill.tables.attention.qk_norm_eps;
    let eps = fill.lookups.or_default("attention.qk_norm_eps", eps, f64::from(q.eps))? as f32;
    (q.eps, k.eps) = (eps, eps);
    Ok(Some((q, k)))
}

/// Resolves cross-attention: the sizes are those of self-attention, and there are no positions.
fn cross_attention(fill: &mut ResolveContext, own: &AttentionSpec) -> Result<AttentionSpec> {
    let (table, names) = (&fill.tables.cross, &fill.tables.tensors);
    let usual = fill.lookups.or_default("attention.bias", &fill.tables.attention.bias, false)?;
    let biased = fill.lookups.or_default("cross.bias", &table.bias, usual)?;
    let scale = fill.lookups.or_default("cross.scale", &table.scale, own.scale.into())? as f32;
    let widths = [own.q_width(), own.k_width(), own.v_width()];
    let [q, k, v] = match &names.cross_kv {
        None => {
            let roles =
                [("cross_q", "cross_q bias"), ("cross_k", "cross_k bias"), ("cross_v", "cross_v bias")];
            let names = [&names.cross_q, &names.cross_k, &names.cross_v];
            separate_qkv(fill, roles, names, widths, biased)?
        }
        fused => {
            let [q_width, k_width, v_width] = widths;
            let (hidden, stride) = (fill.hidden, k_width + v_width);
            let q =
                fill.linear("cross_q", biased.then_some("cross_q bias"), &names.cross_q, q_width, hidden)?;
            let mut rows = |first, count| {
                let part = (stride, TensorPart::Rows { groups: 1, stride, first, count });
                let bias_role = biased.then_some("cross_kv bias");
                fill.linear_part("cross_kv", bias_role, fused, (count, hidden), part, None)
            };
            [q, rows(0, k_width)?, rows(k_width, v_width)?]
        }
    };
    let o = fill.linear(
        "cross_o",
        biased.then_some("cross_o bias"),
        &names.cross_o,
        fill.hidden,
        own.out_width(),
    )?;
    let mask = Mask::Bidirectional { window: None };
    Ok(AttentionSpec {
        scale,
        softcap: None,
        mask,
        rope: None,
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
        latent: None,
        distances: None,
        ..*own
    })
}

fn mlp(fill: &mut ResolveContext) -> Result<MlpSpec> {
    let table = &fill.tables.mlp;
    let kind = fill.lookups.required("mlp.kind", &table.kind)?;
    if kind == MlpKind::Experts {
        return Ok(MlpSpec::Experts(Box::new(experts::moe(fill)?)));
    }
    let (names, hidden) = (&fill.tables.tensors, fill.hidden);
    let width = fill.lookups.required("mlp.width", &table.width)?;
    super::check::check_sizes(&[("MLP width", width)])?;
    let (activation, activation_numbers) = mlp_activation(fill)?;
    let biased = fill.lookups.or_default("mlp.bias", &table.bias, false)?;
    let fused = fill.lookups.or_default("mlp.fused", &table.fused, false)?;
    let bias = |role: &'static str| biased.then_some(role);
    let (gate, up) = match (kind, fused) {
        (MlpKind::Ungated, _) => (fill.linear("up", bias("up bias"), &names.up, width, hidden)?, None),
        (_, false) => (
            fill.linear("gate", bias("gate bias"), &names.gate, width, hidden)?,
            Some(fill.linear("up", bias("up bias"), &names.up, width, hidden)?),
        ),
        (_, true) => {
            let mut half = |first| {
                let part = TensorPart::Rows { groups: 1, stride: 2 * width, first, count: width };
                let rows = (2 * width, part);
                fill.linear_part("gate_up", bias("gate_up bias"), &names.gate_up, (width, hidden), rows, None)
            };
            (half(0)?, Some(half(width)?))
        }
    };
    let down = fill.linear("down", bias("down bias"), &names.down, hidden, width)?;
    Ok(MlpSpec::Dense(Box::new(DenseSpec { width, activation, activation_numbers, gate, up, down })))
}

/// Resolves the activation of a dense MLP, and the tensors with its learned numbers.
fn mlp_activation(fill: &mut ResolveContext) -> Result<(Activation, Vec<TensorSlice>)> {
    let name = fill.lookups.required("mlp.activation", &fill.tables.mlp.activation)?;
    if name != ActivationName::Xielu {
        return Ok((activation_of(name)?, Vec::new()));
    }
    let names = &fill.tables.tensors;
    let numbers = [
        ("xielu_positive", &names.xielu_positive),
        ("xielu_negative", &names.xielu_negative),
        ("xielu_linear", &names.xielu_linear),
        ("xielu_bound", &names.xielu_bound),
    ];
    let slices =
        numbers.into_iter().map(|(role, names)| fill.slice(role, names, vec![1], TensorPart::Whole, None));
    Ok((Activation::Xielu(Xielu::default()), slices.collect::<Result<_>>()?))
}
