//! Checks of resolved specifications.
//!
//! Invariant: after [`check`], products of two sizes cannot overflow, and what the kernels assert of a model
//! holds.

use super::{LayerSpec, MlpSpec, ModelSpec, NormSpec, PositionEmbeddingSpec, RelativeBiasKind, StackSpec};
use anyhow::{Context, Result, ensure};

/// Maximum of any size, far beyond real models.
const SIZE_MAX: usize = 1 << 24;

/// Checks that sizes, given with their names, are above 0 and not absurdly large.
pub fn check_sizes(all: &[(&str, usize)]) -> Result<()> {
    for (name, value) in all {
        ensure!(*value > 0, "the {name} is 0");
        ensure!(*value <= SIZE_MAX, "the {name} is {value}, more than {SIZE_MAX}");
    }
    Ok(())
}

/// Checks properties of a specification that involve several values.
pub fn check(spec: &ModelSpec) -> Result<()> {
    let vocabularies = [("vocabulary size", spec.vocab), ("source vocabulary size", spec.source_vocab)];
    check_sizes(&vocabularies)?;
    check_sizes(&[("hidden size", spec.hidden)])?;
    for stack in spec.stacks() {
        check_stack(stack)?;
    }
    // All layers of an encoder share one cache.
    if let Some(encoder) = &spec.encoder {
        let cached =
            |layer: &LayerSpec| (layer.attention.kv_heads, layer.attention.k_dim, layer.attention.v_dim);
        let first = encoder.layers.first().map(cached);
        ensure!(
            encoder.layers.iter().all(|layer| Some(cached(layer)) == first),
            "layers of an encoder cannot differ in their KV heads"
        );
    }
    Ok(())
}

fn check_stack(stack: &StackSpec) -> Result<()> {
    check_sizes(&[("context", stack.context)])?;
    if let Some(embedding) = &stack.embedding {
        check_sizes(&[("width of the embedding", embedding.table.shape[1])])?;
        check_finite("embedding.scale", embedding.scale)?;
        embedding.norm.iter().try_for_each(check_norm)?;
    }
    stack.norm.iter().try_for_each(check_norm)?;
    for (index, layer) in stack.layers.iter().enumerate() {
        let check = || -> Result<()> {
            let own = [&layer.attention_norms, &layer.mlp_norms].into_iter();
            let norms = own.chain(layer.cross.as_ref().map(|(norms, _)| norms));
            let norms = norms.flat_map(|norms| norms.pre.iter().chain(&norms.out).chain(&norms.post));
            let qk = layer.attention.qk_norms.iter().flat_map(|(q, k)| [q, k]);
            let latent = layer.attention.latent.iter().flat_map(|latent| latent.norms());
            let distances = layer.attention.distances.iter().flat_map(|distances| &distances.norm);
            norms.chain(qk).chain(latent).chain(distances).try_for_each(check_norm)?;
            if let MlpSpec::Experts(moe) = &layer.mlp {
                check_finite("moe.scale", moe.scale)?;
            }
            check_finite("residual.scale", layer.residual_scale)?;
            check_finite("attention.softcap", layer.attention.softcap.unwrap_or(0.0))?;
            check_finite("attention.scale", layer.attention.scale)?;
            check_finite("attention.clip", layer.attention.clip.unwrap_or(0.0))?;
            check_finite("cross.scale", layer.cross.as_ref().map_or(0.0, |(_, cross)| cross.scale))
        };
        check().with_context(|| format!("layer {index}"))?;
    }
    if let Some(PositionEmbeddingSpec::Sinusoidal { scale, .. }) = &stack.position_embedding {
        check_finite("position.scale", *scale)?;
    }
    for bias in &stack.relative_biases {
        if let RelativeBiasKind::Alibi { scale, max } = &bias.kind {
            check_finite("position.scale", *scale)?;
            check_finite("position.alibi_max", *max)?;
        }
    }
    if let Some(head) = &stack.head {
        check_finite("head.scale", head.scale)?;
        check_finite("head.softcap", head.softcap.unwrap_or(0.0))?;
    }
    Ok(())
}

fn check_norm(norm: &NormSpec) -> Result<()> {
    ensure!(norm.eps > 0.0 && norm.eps < 1.0, "the norm epsilon {} is not in the range (0, 1)", norm.eps);
    check_finite("norm.offset", norm.offset)
}

fn check_finite(key: &str, number: f32) -> Result<()> {
    ensure!(number.is_finite(), "'{key}' is {number}");
    Ok(())
}
