//! Resolves a specification file with a model's config.json to a [`ModelSpec`].
//!
//! Invariant: stacks and layers are resolved one by one, each from its own tables: those of the file, those
//! of its stack, and the overrides that apply to it. Later overrides take precedence.

use super::classifier::{self, ClassifierSpec};
use super::context::{
    LayerGrouping, Prefixes, ResolveContext, activation, activation_of, candidate_names, positive,
};
use super::layer;
use super::lookup::Lookups;
use super::positions::Positions;
use super::setting::{OneOrMore, Setting};
use super::tables::{Condition, LayerPick, Override, SpecText, Tables};
use super::words::{ClassifierKind, HeadKind, Kind, Placement, StackName};
use super::{
    EmbeddingSpec, HeadSpec, IgnoredTensors, LayerSpec, ModelSpec, NormSpec, SpecFile, StackSpec, TensorPart,
    check, unread,
};
use crate::formats::HubConfig;
use crate::model::provenance::Provenance;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;
use std::collections::BTreeSet;

/// Maximum number of layers, and of experts in all layers together. The limits are checked before lists are
/// built, because a config.json can claim layers and experts that no file has.
const LAYERS_MAX: usize = 1 << 12;
const EXPERTS_MAX: usize = 1 << 16;

impl SpecFile {
    /// Resolves the specification with the values of `config`, for a checkpoint whose tensor names satisfy
    /// `has`. Errors name the specification and the configuration.
    pub fn resolve(&self, config: &HubConfig, has: &dyn Fn(&str) -> bool) -> Result<ModelSpec> {
        resolve_spec(self, config, has)
            .with_context(|| format!("{} does not fit {}", config.file().display(), self.file))
    }
}

fn resolve_spec(file: &SpecFile, config: &HubConfig, has: &dyn Fn(&str) -> bool) -> Result<ModelSpec> {
    let text = &file.text;
    for (key, values) in &text.supported_values {
        let value = config.at(key).filter(|value| !values.iter().any(|known| values_equal(value, known)));
        if let Some(value) = value {
            let supported = match &values[..] {
                [] => "no value".to_owned(),
                values => values.iter().map(Json::to_string).collect::<Vec<_>>().join(", "),
            };
            let reason = format!("{value} is not supported by {} (supported: {supported})", file.file);
            return Err(config.key_error(key, reason));
        }
    }
    let mut look = Lookups::new(config, has);
    let mut stack = |name: StackName| {
        look.begin_stack(match (text.kind, name) {
            (Kind::EncoderDecoder, StackName::Encoder) => "encoder.",
            (Kind::EncoderDecoder, StackName::Decoder) => "decoder.",
            _ => "",
        });
        StackResolver { file, lookups: &mut look, name }.resolve()
    };
    let (encoder, decoder) = match text.kind {
        Kind::Decoder => (None, Some(stack(StackName::Decoder)?)),
        Kind::Encoder => (Some(stack(StackName::Encoder)?), None),
        Kind::EncoderDecoder => (Some(stack(StackName::Encoder)?), Some(stack(StackName::Decoder)?)),
    };
    if let (Some(of_encoder), Some(of_decoder)) = (&encoder, &decoder) {
        let (of_encoder, of_decoder) = (of_encoder.sizes.1, of_decoder.sizes.1);
        ensure!(
            of_encoder == of_decoder,
            "the hidden size is {of_encoder} in the encoder, but {of_decoder} in the decoder"
        );
    }
    let last = decoder.as_ref().or(encoder.as_ref()).context("a model has a stack; this is a bug")?;
    let ((vocab, hidden), context, classifier) = (last.sizes, last.stack.context, last.classifier.clone());
    let source_vocab = encoder.as_ref().map_or(vocab, |encoder| encoder.sizes.0);
    let (encoder, decoder) = (encoder.map(|it| it.stack), decoder.map(|it| it.stack));
    let values = look.into_values();
    let unread_keys = unread::check(&file.file, &file.named, config, &values)?;
    let spec = ModelSpec {
        kind: text.kind,
        vocab,
        source_vocab,
        hidden,
        context,
        encoder,
        decoder,
        classifier,
        ignored: text.ignored_tensors(),
        provenance: Provenance {
            specification: file.file.clone(),
            model_types: text.model_types.clone(),
            model_type: config.opt_str("model_type")?.map(str::to_owned),
            config: config.file().to_owned(),
            values,
            unread_keys,
        },
    };
    check::check(&spec)
        .with_context(|| format!("{} describes an impossible model", config.file().display()))?;
    Ok(spec)
}

impl SpecText {
    fn all_prefixes(&self) -> Prefixes<'_> {
        Prefixes { added: &self.prefixes, optional: &self.optional_prefixes }
    }

    fn ignored_tensors(&self) -> IgnoredTensors {
        let patterns = candidate_names(
            &OneOrMore::More(self.ignored.clone()),
            Prefixes { added: &[], optional: &self.optional_prefixes },
        );
        IgnoredTensors { patterns, prefixes: self.prefixes.clone() }
    }
}

/// A stack with what is resolved along with it.
struct ResolvedStack {
    stack: StackSpec,
    /// Sizes of the vocabulary and of the residual stream.
    sizes: (usize, usize),
    classifier: Option<ClassifierSpec>,
}

/// Resolves one stack of a model.
struct StackResolver<'f, 'a, 'b> {
    file: &'f SpecFile,
    lookups: &'a mut Lookups<'b>,
    name: StackName,
}

impl<'f> StackResolver<'f, '_, '_> {
    /// Resolves the stack.
    fn resolve(&mut self) -> Result<ResolvedStack> {
        let overrides = self.overrides()?;
        let for_all = overrides.iter().copied().filter(|given| given.layers.is_none());
        let around = merged_tables(&self.file.text, self.name, for_all);
        let size = &around.size;
        let vocab = self.lookups.required("size.vocab", &size.vocab)?;
        let hidden = self.lookups.required("size.hidden", &size.hidden)?;
        let layers = self.lookups.required("size.layers", &size.layers)?;
        let context = self.lookups.required("size.context", &size.context)?;
        for (name, value) in
            [("vocabulary size", vocab), ("hidden size", hidden), ("number of layers", layers)]
        {
            ensure!(value > 0, "{}: the {name} is 0", self.lookups.config.file().display());
        }
        ensure!(
            layers <= LAYERS_MAX,
            "{}: the number of layers is {layers}, more than {LAYERS_MAX}",
            self.lookups.config.file().display()
        );
        let grouping = LayerGrouping::resolve(self.lookups, size, layers)?;
        let picks = overrides
            .iter()
            .map(|given| given.layers.as_ref().map(|pick| self.picked_layers(pick, layers)).transpose())
            .collect::<Result<Vec<_>>>()?;
        let has_encoder = self.file.text.kind == Kind::EncoderDecoder && self.name == StackName::Decoder;
        let mut fill = ResolveContext {
            lookups: self.lookups,
            tables: &around,
            prefixes: self.file.text.all_prefixes(),
            stack: self.name,
            has_encoder,
            vocab,
            hidden,
            grouping,
        };
        let embedding = embedding(&mut fill)?;
        let width = if embedding.projects_last { embedding.table.shape[1] } else { hidden };
        let mut positions = Positions::new(&mut fill, context, width)?;
        let specs = resolve_layers(&mut fill, &self.file.text, (&overrides, &picks), &mut positions, layers)?;
        let norm = last_norm(&mut fill)?;
        let (head, classifier) = head_and_classifier(&mut fill, self.file.text.kind, &embedding)?;
        let (position_embedding, relative_biases, ropes, context) = positions.finish();
        let stack = StackSpec {
            context,
            embedding: Some(embedding),
            position_embedding,
            relative_biases,
            ropes,
            layers: specs,
            norm,
            head,
        };
        Ok(ResolvedStack { stack, sizes: (vocab, hidden), classifier })
    }

    /// Returns the overrides that apply to this model and this stack.
    fn overrides(&self) -> Result<Vec<&'f Override>> {
        let mut all = Vec::new();
        for given in &self.file.text.overrides {
            let conditions = given.when.as_ref().map_or(&[][..], OneOrMore::as_slice);
            let mut holds = given.stack.is_none_or(|stack| stack == self.name);
            for condition in conditions {
                holds &= self.holds(condition)?;
            }
            if holds {
                all.push(given);
            }
        }
        Ok(all)
    }

    fn holds(&self, condition: &Condition) -> Result<bool> {
        let expected = condition.is.clone().unwrap_or(Json::Bool(true));
        if let Some(exists) = condition.exists {
            let both = condition.is.is_some() || condition.default.is_some();
            ensure!(
                !both,
                "{}: a 'when' tests either a value or whether it exists, not both",
                self.file.file
            );
            return Ok(match (&condition.key, &condition.tensor) {
                (Some(keys), None) => self.lookups.first_present(keys).is_some() == exists,
                (None, Some(tensor)) => self.stored_name(tensor).is_some() == exists,
                _ => bail!("{}: a 'when' requires either a 'key' or a 'tensor'", self.file.file),
            });
        }
        let found = match (&condition.key, &condition.tensor) {
            (Some(keys), None) => {
                self.lookups.first_present(keys).map(|(_, value)| value.clone()).or(condition.default.clone())
            }
            (None, Some(tensor)) => Some(self.stored_name(tensor).is_some().into()),
            _ => bail!("{}: a 'when' requires either a 'key' or a 'tensor'", self.file.file),
        };
        Ok(found.is_some_and(|found| values_equal(&found, &expected)))
    }

    /// Returns the name under which the checkpoint stores a tensor, with or without a prefix.
    fn stored_name(&self, name: &str) -> Option<String> {
        let names = candidate_names(&OneOrMore::One(name.to_owned()), self.file.text.all_prefixes());
        names.into_iter().find(|name| (self.lookups.has_tensor)(name))
    }

    /// Returns for each layer whether the pick includes it.
    fn picked_layers(&mut self, pick: &LayerPick, layers: usize) -> Result<Vec<bool>> {
        let listed = pick.key.as_ref().and_then(|keys| self.lookups.first_present(keys));
        // An empty list stands for a missing one.
        let listed = listed.filter(|(_, value)| value.as_array().is_none_or(|list| !list.is_empty()));
        if let Some((key, value)) = listed {
            let wrong = || {
                self.lookups.config.key_error(
                    key,
                    format_args!("it is not a list with one entry for each of the {layers} layers"),
                )
            };
            let list = value.as_array().filter(|list| list.len() >= layers).ok_or_else(wrong)?;
            let is = pick.is.clone().unwrap_or(Json::Bool(true));
            return Ok(list.iter().take(layers).map(|entry| values_equal(entry, &is)).collect());
        }
        let mut number = |key, setting: &Option<Setting<usize>>| {
            setting.as_ref().map(|_| self.lookups.required(key, setting)).transpose()
        };
        let from = number("layers.from", &pick.from)?.unwrap_or(0);
        let to = number("layers.to", &pick.to)?.unwrap_or(layers);
        let every = number("layers.every", &pick.every)?;
        let at = number("layers.at", &pick.at)?.unwrap_or(0);
        let only = pick
            .only
            .as_ref()
            .map(|_| self.lookups.or_derived("layers.only", &pick.only, "none", Vec::new()))
            .transpose()?
            .map(BTreeSet::from_iter);
        // A missing list picks nothing, unless another condition does.
        let says_more = pick.only.is_some() || pick.from.is_some() || pick.to.is_some() || every.is_some();
        ensure!(every != Some(0), "{}: 'layers.every' is 0", self.lookups.config.file().display());
        let holds = |layer: usize| {
            let in_turn = every.is_none_or(|every| layer >= at && (layer - at).is_multiple_of(every));
            let is_listed = only.as_ref().is_none_or(|only| only.contains(&layer));
            says_more && (from..to).contains(&layer) && in_turn && is_listed
        };
        Ok((0..layers).map(holds).collect())
    }
}

/// Resolves the layers, each from its own tables: those of the stack, and the overrides that apply to it.
/// `picks` has for each override the layers it is for; `None` is all layers.
fn resolve_layers(
    fill: &mut ResolveContext,
    text: &SpecText,
    (overrides, picks): (&[&Override], &[Option<Vec<bool>>]),
    positions: &mut Positions,
    layers: usize,
) -> Result<Vec<LayerSpec>> {
    let mut specs: Vec<LayerSpec> = Vec::new();
    let mut experts = 0;
    for index in 0..layers {
        let holds = |pick: &Option<Vec<bool>>| pick.as_ref().is_none_or(|pick| pick[index]);
        let here = overrides.iter().zip(picks).filter(|(_, pick)| holds(pick));
        let tables = merged_tables(text, fill.stack, here.map(|(given, _)| *given));
        let (look, prefixes) = (&mut *fill.lookups, fill.prefixes);
        (look.layer, look.layers) = (Some(index), Some(layers));
        let mut fill = ResolveContext { lookups: look, tables: &tables, prefixes, ..*fill };
        let layer = layer::resolve_layer(&mut fill, positions).with_context(|| format!("layer {index}"))?;
        // Fail early, before lists are built of layers that no file has.
        ensure!(
            (fill.lookups.has_tensor)(&layer.attention.q.weight.name),
            "the configuration has {layers} layers, but there is no tensor '{}'",
            layer.attention.q.weight.name
        );
        experts += layer.mlp.experts();
        ensure!(experts <= EXPERTS_MAX, "{layers} layers have more than {EXPERTS_MAX} experts");
        specs.push(layer);
    }
    fill.lookups.layer = None;
    Ok(specs)
}

/// Merges the tables of the file, of a stack, and of some overrides; later ones take precedence.
fn merged_tables<'o>(
    text: &SpecText,
    stack: StackName,
    overrides: impl Iterator<Item = &'o Override>,
) -> Tables {
    let own = match stack {
        StackName::Encoder => &text.encoder,
        StackName::Decoder => &text.decoder,
    };
    overrides.fold(own.over(&text.tables()), |tables, given| given.tables().over(&tables))
}

/// Returns whether two values are equal; numbers are compared by value.
fn values_equal(a: &Json, b: &Json) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn embedding(fill: &mut ResolveContext) -> Result<EmbeddingSpec> {
    let (tables, hidden) = (fill.tables, fill.hidden);
    let width = fill.lookups.or_default("embedding.width", &tables.embedding.width, hidden)?;
    let scale = fill.lookups.or_default("embedding.scale", &tables.embedding.scale, 1.0)? as f32;
    let types = fill.lookups.or_default("embedding.token_types", &tables.embedding.token_types, 0)?;
    let has_norm = fill.lookups.or_default("embedding.norm", &tables.embedding.norm, false)?;
    let norm_first = fill.lookups.or_default("embedding.norm_first", &tables.embedding.norm_first, false)?;
    let names = &tables.tensors;
    let project_last = &tables.embedding.project_last;
    let projects_last = fill.lookups.or_default("embedding.project_last", project_last, false)?;
    let project_bias = &tables.embedding.project_bias;
    let project_bias = fill.lookups.or_default("embedding.project_bias", project_bias, false)?;
    let summed = if projects_last { width } else { hidden };
    Ok(EmbeddingSpec {
        table: fill.slice("embedding", &names.embedding, vec![fill.vocab, width], TensorPart::Whole, None)?,
        scale,
        project_in: match width == hidden {
            true => None,
            false => {
                let bias_role = project_bias.then_some("project_in bias");
                Some(fill.linear("project_in", bias_role, &names.project_in, hidden, width)?)
            }
        },
        projects_last,
        token_types: match types {
            0 => None,
            rows => Some(fill.slice(
                "token_types",
                &names.token_types,
                vec![rows, summed],
                TensorPart::Whole,
                None,
            )?),
        },
        norm: has_norm.then(|| fill.norm("embedding_norm", &names.embedding_norm, summed)).transpose()?,
        norm_first,
    })
}

fn last_norm(fill: &mut ResolveContext) -> Result<Option<NormSpec>> {
    let by_placement = !matches!(fill.placement()?, Placement::Post | Placement::None);
    let has_one = fill.lookups.or_default("norm.last", &fill.tables.norm.last, by_placement)?;
    has_one.then(|| fill.norm("norm", &fill.tables.tensors.norm, fill.hidden)).transpose()
}

/// Resolves the head and the classifier of the last stack. A classifier with a matrix of its own takes the
/// place of the head.
fn head_and_classifier(
    fill: &mut ResolveContext,
    kind: Kind,
    embedding: &EmbeddingSpec,
) -> Result<(Option<HeadSpec>, Option<ClassifierSpec>)> {
    if kind == Kind::EncoderDecoder {
        let head = if fill.stack == StackName::Decoder { head(fill, embedding)? } else { None };
        return Ok((head, None));
    }
    let classified = classifier::kind(fill)?;
    let head = if classified == ClassifierKind::None { head(fill, embedding)? } else { None };
    let classifier = classifier::classifier(fill, classified, head.as_ref().map(|head| &head.table))?;
    Ok((head, classifier))
}

fn head(fill: &mut ResolveContext, embedding: &EmbeddingSpec) -> Result<Option<HeadSpec>> {
    let (table, names) = (&fill.tables.head, &fill.tables.tensors);
    if fill.lookups.or_default("head.kind", &table.kind, HeadKind::Lm)? == HeadKind::None {
        return Ok(None);
    }
    let (vocab, hidden) = (fill.vocab, fill.hidden);
    let width = embedding.table.shape[1];
    let tied = fill.lookups.or_derived("head.tied", &table.tied, "false", false)?;
    let has_transform = fill.lookups.or_default("head.transform", &table.transform, false)?;
    let transform = match has_transform {
        false => None,
        true => {
            let biased = fill.lookups.or_default("head.transform_bias", &table.transform_bias, true)?;
            let bias_role = biased.then_some("head_transform bias");
            let linear = fill.linear("head_transform", bias_role, &names.head_transform, width, hidden)?;
            let activation = match &table.activation {
                Some(_) => activation_of(fill.lookups.required("head.activation", &table.activation)?)?,
                None => activation(fill)?,
            };
            Some((linear, activation, fill.norm("head_transform_norm", &names.head_transform_norm, width)?))
        }
    };
    let project_out = match width == hidden || has_transform {
        true => None,
        false => Some(fill.linear("project_out", None, &names.project_out, width, hidden)?),
    };
    let matrix = match tied {
        true => embedding.table.clone(),
        false => fill.slice("head", &names.head, vec![vocab, width], TensorPart::Whole, None)?,
    };
    let unused_names = match (tied, &names.head) {
        (true, Some(names)) => candidate_names(names, fill.prefixes),
        _ => Vec::new(),
    };
    let has_bias = fill.lookups.or_default("head.bias", &table.bias, false)?;
    let bias = match (has_bias, &names.head_bias) {
        (false, _) => None,
        (true, Some(_)) => {
            Some(fill.slice("head_bias", &names.head_bias, vec![vocab], TensorPart::Whole, None)?)
        }
        (true, None) => {
            let named = fill.slice("head", &names.head, vec![vocab, width], TensorPart::Whole, None)?;
            Some(fill.bias_of(&named, "head bias", vec![vocab]))
        }
    };
    let scale = fill.lookups.or_default("head.scale", &table.scale, 1.0)? as f32;
    let cap = fill.lookups.or_default("head.softcap", &table.softcap, 0.0)? as f32;
    let normalize_rows = fill.lookups.or_default("head.normalize_rows", &table.normalize_rows, false)?;
    Ok(Some(HeadSpec {
        transform,
        project_out,
        tied,
        unused_names,
        table: matrix,
        bias,
        normalize_rows,
        scale,
        softcap: positive(cap),
        vocab_split: None,
    }))
}
