//! The classifier of a model: what maps the hidden states of a text to a score for each label.
//!
//! Invariant: a classifier has at least one label, and a name for each.

use super::context::{ResolveContext, activation_of};
use super::setting::OneOrMore;
use super::words::{ActivationName, ClassifierKind, ClassifierPooling, StackName};
use super::{LinearSpec, NormSpec, TensorPart, TensorSlice};
use crate::formats::HubConfig;
use crate::model::provenance::Origin;
use anyhow::{Result, ensure};
use mainstem_kernels::Activation;
use serde_json::Value as Json;

/// Maximum number of labels.
const LABELS_MAX: usize = 1 << 16;

/// Key of config.json with the tokens whose logits are the scores.
const TOKENS_KEY: &str = "classifier_from_token";

/// Name of the classifier's matrix in files, if the specification gives none.
const USUAL_NAME: &str = "score.weight";

/// A classifier.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassifierSpec {
    /// The hidden state that is classified; `None` classifies each token.
    pub pooling: Option<ClassifierPooling>,
    /// A linear layer with an activation before the last one.
    pub dense: Option<(LinearSpec, Activation)>,
    /// A norm before the last linear layer.
    pub norm: Option<NormSpec>,
    pub output: ClassifierOutput,
    pub scores: ScoreFunction,
}

/// The last linear layer of a classifier.
#[derive(Clone, Debug, PartialEq)]
pub enum ClassifierOutput {
    /// A matrix with a row for each label.
    Labels { linear: Box<LinearSpec>, names: Vec<String> },
    /// Rows of the head's matrix: the labels are tokens with these names.
    Tokens { head: TensorSlice, names: Vec<String> },
}

/// The function from logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Over all labels.
    Softmax,
    /// Of each label separately.
    Sigmoid,
    /// None: the scores are the logits.
    Identity,
}

impl ClassifierSpec {
    /// Returns the classifier whose labels are tokens, which are rows of the head's matrix.
    pub fn of_tokens(head: TensorSlice, names: Vec<String>) -> ClassifierSpec {
        // The difference of two tokens' logits decides between them, like one label's logit.
        let scores = if names.len() == 2 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
        let output = ClassifierOutput::Tokens { head, names };
        ClassifierSpec { pooling: Some(ClassifierPooling::Last), dense: None, norm: None, output, scores }
    }

    /// Returns whether the classifier gives one score for a text, such as a pair of texts.
    pub fn scores_pairs(&self) -> bool {
        let labels = match &self.output {
            ClassifierOutput::Labels { names, .. } => names.len(),
            ClassifierOutput::Tokens { names, .. } => names.len() - 1,
        };
        self.pooling.is_some() && labels == 1
    }

    /// Returns the tensors that only the classifier uses, in order.
    pub fn slices(&self) -> impl Iterator<Item = &TensorSlice> {
        let output = match &self.output {
            ClassifierOutput::Labels { linear, .. } => Some(&**linear),
            ClassifierOutput::Tokens { .. } => None,
        };
        let linears = self.dense.iter().map(|(linear, _)| linear).chain(output);
        let of_norm = self.norm.iter().flat_map(|norm| norm.weights.iter().chain(&norm.biases));
        linears.flat_map(|linear| std::iter::once(&linear.weight).chain(&linear.bias)).chain(of_norm)
    }
}

/// Returns what a model classifies, by the specification or by config.json's `architectures`. Labels that are
/// tokens do not count: such a model keeps its head.
pub(super) fn kind(fill: &mut ResolveContext) -> Result<ClassifierKind> {
    let config = fill.lookups.config;
    if config.get(TOKENS_KEY).is_some() {
        return Ok(ClassifierKind::None);
    }
    let names = config.get("architectures").and_then(Json::as_array).into_iter().flatten();
    let is = |ending: &str| names.clone().filter_map(Json::as_str).any(|name| name.ends_with(ending));
    let by_name = match (is("ForSequenceClassification"), is("ForTokenClassification")) {
        (true, _) => ClassifierKind::Sequence,
        (_, true) => ClassifierKind::Token,
        (false, false) => ClassifierKind::None,
    };
    let setting = &fill.tables.classifier.kind;
    if by_name == ClassifierKind::None {
        return fill.lookups.or_default("classifier.kind", setting, by_name);
    }
    fill.lookups.or_derived("classifier.kind", setting, "architectures", by_name)
}

/// Resolves the classifier of the last stack, whose head's matrix is `head`.
pub(super) fn classifier(
    fill: &mut ResolveContext,
    kind: ClassifierKind,
    head: Option<&TensorSlice>,
) -> Result<Option<ClassifierSpec>> {
    let config = fill.lookups.config;
    if let (Some(names), Some(head)) = (token_names(config)?, head) {
        return Ok(Some(ClassifierSpec::of_tokens(head.clone(), names)));
    }
    if kind == ClassifierKind::None {
        return Ok(None);
    }
    let is_decoder = fill.stack == StackName::Decoder;
    ensure!(
        kind == ClassifierKind::Sequence || !is_decoder,
        "{}: classification of tokens is not supported in a decoder",
        config.file().display()
    );
    let names = labels(config)?;
    fill.lookups.record_json(
        "classifier.labels",
        names.len().into(),
        Origin::Config(vec!["id2label".into()]),
    );
    let (table, hidden) = (&fill.tables.classifier, fill.hidden);
    let usual = if is_decoder { ClassifierPooling::Last } else { ClassifierPooling::First };
    let pooling = match kind {
        ClassifierKind::Sequence => {
            Some(fill.lookups.or_default("classifier.pooling", &table.pooling, usual)?)
        }
        ClassifierKind::Token | ClassifierKind::None => None,
    };
    let of_tokens = fill.lookups.or_default("classifier.dense_tokens", &table.dense_tokens, false)?;
    let has_dense = fill.lookups.or_default("classifier.dense", &table.dense, false)?
        && (kind == ClassifierKind::Sequence || of_tokens);
    let has_norm = has_dense && fill.lookups.or_default("classifier.norm", &table.norm, false)?;
    let tensors = &fill.tables.tensors;
    let dense = match has_dense {
        true => {
            let tanh = ActivationName::Tanh;
            let activation = fill.lookups.or_default("classifier.activation", &table.activation, tanh)?;
            let linear = linear(fill, "classifier_dense", &tensors.classifier_dense, (hidden, hidden))?;
            Some((linear, activation_of(activation)?))
        }
        false => None,
    };
    let norm =
        has_norm.then(|| fill.norm("classifier_norm", &tensors.classifier_norm, hidden)).transpose()?;
    let usual = Some(OneOrMore::One(USUAL_NAME.to_owned()));
    let matrix = if is_decoder && tensors.classifier.is_none() { &usual } else { &tensors.classifier };
    let linear = linear(fill, "classifier", matrix, (names.len(), hidden))?;
    let scores = score_function(config, names.len())?;
    let output = ClassifierOutput::Labels { linear: Box::new(linear), names };
    Ok(Some(ClassifierSpec { pooling, dense, norm, output, scores }))
}

/// Resolves a linear layer (n, k), which has a bias if the checkpoint has one.
fn linear(
    fill: &ResolveContext,
    role: &'static str,
    names: &Option<OneOrMore<String>>,
    (n, k): (usize, usize),
) -> Result<LinearSpec> {
    let weight = fill.slice(role, names, vec![n, k], TensorPart::Whole, None)?;
    let bias_role = if role == "classifier" { "classifier bias" } else { "classifier_dense bias" };
    let bias = fill.bias_of(&weight, bias_role, vec![n]);
    let bias = Some(bias).filter(|bias| (fill.lookups.has_tensor)(&bias.name));
    Ok(LinearSpec { n, k, weight, bias })
}

/// Returns the tokens whose logits are the scores, if config.json names some.
fn token_names(config: &HubConfig) -> Result<Option<Vec<String>>> {
    let Some(value) = config.get(TOKENS_KEY) else { return Ok(None) };
    let names: Option<Vec<String>> = value
        .as_array()
        .and_then(|names| names.iter().map(|name| name.as_str().map(str::to_owned)).collect())
        .filter(|names: &Vec<String>| names.len() >= 2);
    match names {
        Some(names) => Ok(Some(names)),
        None => Err(config.key_error(TOKENS_KEY, "it is not a list of at least two tokens")),
    }
}

/// Returns the names of the labels: those of `id2label`, or as many as `num_labels` says; 2 by default, as in
/// transformers.
fn labels(config: &HubConfig) -> Result<Vec<String>> {
    let by_number = |count: usize| (0..count).map(|number| format!("LABEL_{number}")).collect();
    let names: Vec<String> = match config.get("id2label").and_then(Json::as_object) {
        Some(names) => {
            let name = |number: usize| names.get(&number.to_string()).and_then(Json::as_str);
            let all: Option<_> = (0..names.len()).map(|number| name(number).map(str::to_owned)).collect();
            let wrong = || {
                config
                    .key_error("id2label", "its keys are not the numbers from 0 on, or its values not texts")
            };
            all.ok_or_else(wrong)?
        }
        None => {
            let count = config.opt_usize("num_labels")?.unwrap_or(2);
            ensure!(
                count <= LABELS_MAX,
                config.key_error("num_labels", format_args!("{count} is too large"))
            );
            by_number(count)
        }
    };
    ensure!(!names.is_empty(), config.key_error("id2label", "there are no labels"));
    Ok(names)
}

/// Returns the function that turns the logits of so many labels into scores: that of sentence-transformers'
/// settings, or the one that belongs to `problem_type`. Without either, one label has a sigmoid, and several
/// have a softmax.
fn score_function(config: &HubConfig, labels: usize) -> Result<ScoreFunction> {
    for key in ["sentence_transformers.activation_fn", "sbert_ce_default_activation_function"] {
        let Some(name) = config.at(key).and_then(Json::as_str) else { continue };
        return match name.rsplit('.').next().unwrap_or_default() {
            "Sigmoid" => Ok(ScoreFunction::Sigmoid),
            "Identity" => Ok(ScoreFunction::Identity),
            "Softmax" => Ok(ScoreFunction::Softmax),
            _ => Err(config.key_error(key, format_args!("{name} is not supported"))),
        };
    }
    match config.opt_str("problem_type")? {
        Some("regression") => Ok(ScoreFunction::Identity),
        Some("multi_label_classification") => Ok(ScoreFunction::Sigmoid),
        Some("single_label_classification") | None if labels > 1 => Ok(ScoreFunction::Softmax),
        Some("single_label_classification") | None => Ok(ScoreFunction::Sigmoid),
        Some(other) => Err(config.key_error("problem_type", format_args!("'{other}' is not known"))),
    }
}
