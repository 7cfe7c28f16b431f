//! The metadata of a GGUF file for a model of a hub folder.
//!
//! Invariant: numbers are those that the specification resolved, whatever config.json calls them.

use super::{Content, ExportTensor};
use crate::formats::save::{GgufEntries, GgufMetadata, SavedTensor};
use crate::formats::{Folder, HubConfig, RopeConfig, RopeScaling};
use crate::model::gguf::GgufTarget;
use crate::model::rope;
use crate::model::source::ModelSource;
use crate::model::spec::{MlpSpec, RopeSpec, StackSpec};
use crate::text::GgufVocabulary;
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::{Mask, NormKind, QuantType};
use serde_json::Value;

/// Name of the tensor with the factors of rotary frequencies.
const FACTORS: &str = "rope_freqs.weight";

/// Ends of keys whose values are floating-point numbers, whatever config.json has.
const FLOAT_KEYS: [&str; 4] = ["softcapping", "freq_base", "freq_base_swa", "epsilon"];

/// Keys of the tokens that end a text, in the order in which they are given.
const END_KEYS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Returns the metadata of the model's file.
pub(super) fn entries(
    source: &ModelSource,
    target: &GgufTarget,
    config: &HubConfig,
    folder: &Folder,
) -> Result<GgufEntries> {
    let stack = source.spec.decoder.as_ref().context("the model has no decoder")?;
    let text = |key: &str, text: &str| (key.to_owned(), GgufMetadata::Text(text.to_owned()));
    let mut entries = vec![
        text("general.architecture", &target.architecture),
        text("general.type", "model"),
        text("general.name", &source.name()),
    ];
    entries.extend(sizes(source, stack, target)?);
    if let Some(rope) = global_rope(stack) {
        entries.extend(rotation(rope, target)?);
    }
    let known: Vec<String> = entries.iter().map(|(key, _)| key.clone()).collect();
    let own = target.own_values(config).into_iter().filter(|(key, _)| known.iter().all(|known| known != key));
    for (key, value) in own {
        entries.push((key.to_owned(), metadata(key, &value)?));
    }
    let vocabulary = GgufVocabulary::from_folder(folder, source.spec.vocab)?;
    entries.extend(vocabulary.entries());
    entries.extend(end_tokens(source, &vocabulary));
    entries.extend(source.chat.template.iter().map(|own| text("tokenizer.chat_template", &own.text)));
    Ok(entries)
}

/// Returns the keys of the model's sizes.
fn sizes(source: &ModelSource, stack: &StackSpec, target: &GgufTarget) -> Result<GgufEntries> {
    let layer = stack.layers.first().context("the model has no layers")?;
    let (attention, norm) = (&layer.attention, layer.attention_norms.pre.as_ref());
    let MlpSpec::Dense(mlp) = &layer.mlp else { bail!("mixtures of experts cannot be written as GGUF") };
    let number = |name: &str, value: usize| {
        let value = u32::try_from(value).with_context(|| format!("{name} is too large"))?;
        anyhow::Ok((target.key(name), GgufMetadata::U32(value)))
    };
    let mut entries = vec![
        number("vocab_size", source.spec.vocab)?,
        number("context_length", stack.context)?,
        number("embedding_length", source.spec.hidden)?,
        number("block_count", stack.layers.len())?,
        number("feed_forward_length", mlp.width)?,
        number("attention.head_count", attention.heads)?,
        number("attention.head_count_kv", attention.kv_heads)?,
        number("attention.key_length", attention.k_dim)?,
        number("attention.value_length", attention.v_dim)?,
    ];
    if let Some(norm) = norm {
        let name = match norm.kind {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            _ => "attention.layer_norm_epsilon",
        };
        entries.push((target.key(name), GgufMetadata::F32(norm.eps)));
    }
    Ok(entries)
}

/// Returns the rotary position embedding of the layers that see every position, or else of the first layer.
fn global_rope(stack: &StackSpec) -> Option<&RopeSpec> {
    let is_global = |mask: Mask| mask == Mask::Causal { window: None };
    let global = stack.layers.iter().find(|layer| is_global(layer.attention.mask));
    let at = global.or(stack.layers.first())?.attention.rope?;
    stack.ropes.get(at)
}

/// Returns the keys of a rotary position embedding. Fails for a scaling that they cannot express.
fn rotation(rope: &RopeSpec, target: &GgufTarget) -> Result<GgufEntries> {
    let RopeSpec { dims, config: RopeConfig { theta, scaling }, .. } = rope;
    let number = |name: &str, value: usize| (target.key(name), GgufMetadata::U32(value as u32));
    let real = |name: &str, value: f64| (target.key(name), GgufMetadata::F32(value as f32));
    let kind = |name: &str| (target.key("rope.scaling.type"), GgufMetadata::Text(name.to_owned()));
    let mut entries = vec![number("rope.dimension_count", *dims), real("rope.freq_base", *theta)];
    match scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => {}
        RopeScaling::Linear { factor } => {
            entries.extend([kind("linear"), real("rope.scaling.factor", *factor)]);
        }
        RopeScaling::Yarn { factor, original_context, .. } => entries.extend([
            kind("yarn"),
            real("rope.scaling.factor", *factor),
            number("rope.scaling.original_context_length", *original_context),
        ]),
        RopeScaling::Dynamic { .. } | RopeScaling::Stretched { .. } => {
            bail!("dynamic rotary scaling cannot be written as GGUF")
        }
        RopeScaling::LongRope { .. } => bail!("longrope scaling cannot be written as GGUF"),
    }
    Ok(entries)
}

/// Returns the tensor with the factors of rotary frequencies that are scaled one by one.
pub(super) fn frequency_factors(source: &ModelSource) -> Option<ExportTensor<'static>> {
    let RopeSpec { dims, config, .. } = global_rope(source.spec.decoder.as_ref()?)?;
    if !matches!(config.scaling, RopeScaling::Llama3 { .. } | RopeScaling::Factors(_)) {
        return None;
    }
    let plain = RopeConfig { theta: config.theta, scaling: RopeScaling::None };
    let [scaled, plain] = [config, &plain].map(|config| rope::frequencies(config, *dims, 0));
    let factors: Vec<f32> = plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect();
    let (name, shape) = (FACTORS.to_owned(), vec![factors.len()]);
    let saved = SavedTensor { name, ty: QuantType::F32, shape, transposed: false };
    Some(ExportTensor { saved, content: Content::Values(factors) })
}

/// Returns a value of config.json as metadata.
fn metadata(key: &str, value: &Value) -> Result<GgufMetadata> {
    let is_float = value.is_f64() || FLOAT_KEYS.iter().any(|end| key.ends_with(end));
    match (value, value.as_u64(), value.as_f64()) {
        (Value::Bool(flag), ..) => Ok(GgufMetadata::Bool(*flag)),
        (_, _, Some(number)) if is_float => Ok(GgufMetadata::F32(number as f32)),
        (_, Some(number), _) => u32::try_from(number)
            .map(GgufMetadata::U32)
            .with_context(|| format!("{key}: {number} is too large")),
        _ => bail!("{key}: {value} cannot be written"),
    }
}

/// Returns the keys of tokens that end a text, other than the tokenizer's.
fn end_tokens(source: &ModelSource, vocabulary: &GgufVocabulary) -> GgufEntries {
    let others = source.eos.iter().filter(|id| Some(**id) != vocabulary.eos_token_id);
    END_KEYS.iter().zip(others).map(|(key, id)| ((*key).to_owned(), GgufMetadata::U32(*id))).collect()
}

/// Fails if a token that ends a text in the folder does not in the file.
pub(super) fn check_end_tokens(source: &ModelSource, written: &ModelSource) -> Result<()> {
    let lost: Vec<&u32> = source.eos.iter().filter(|id| !written.eos.contains(id)).collect();
    ensure!(lost.is_empty(), "it has more end tokens than a file can name: {lost:?}");
    Ok(())
}
