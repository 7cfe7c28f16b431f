//! Reads the layers that the host applies to vectors: those of a model's classifier, and the dense modules of
//! an embedding model.
//!
//! Invariant: what is read here is on no device.

use crate::decoding::{Classifier, DenseLayer, LayerNorm, OutputFunction, Pooling};
use crate::formats::{DenseConfig, Folder};
use crate::model::ModelSource;
use crate::model::spec::classifier::{ClassifierOutput, ClassifierSpec, ScoreFunction};
use crate::model::spec::words::ClassifierPooling;
use crate::model::spec::{LinearSpec, NormSpec, SliceBounds, TensorSlice};
use crate::model::tensor_slices::read_slice;
use crate::text::Tokenizer;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::NormKind;

/// Reads the classifier of a model, if it has one.
pub fn read(source: &ModelSource, tokenizer: &Tokenizer) -> Result<Option<Classifier>> {
    let Some(spec) = &source.spec.classifier else { return Ok(None) };
    let read = || read_classifier(source, spec, tokenizer);
    read().map(Some).with_context(|| format!("{}: the classifier", source.path.display()))
}

fn read_classifier(source: &ModelSource, spec: &ClassifierSpec, tokenizer: &Tokenizer) -> Result<Classifier> {
    let norm = spec.norm.as_ref().map(|norm| read_norm(source, norm)).transpose()?;
    let dense = spec.dense.as_ref().map(|(linear, activation)| {
        let layer = read_linear(source, linear)?;
        anyhow::Ok(DenseLayer { activation: Some(*activation), norm, ..layer })
    });
    let mut layers: Vec<DenseLayer> = dense.into_iter().collect::<Result<_>>()?;
    let labels = match &spec.output {
        ClassifierOutput::Labels { linear, names } => {
            layers.push(read_linear(source, linear)?);
            names.clone()
        }
        ClassifierOutput::Tokens { head, names } => {
            let (layer, labels) = token_rows(source, head, names, tokenizer)?;
            layers.push(layer);
            labels
        }
    };
    Ok(Classifier {
        pooling: spec.pooling.map(|pooling| match pooling {
            ClassifierPooling::First => Pooling::Cls,
            ClassifierPooling::Last => Pooling::Last,
            ClassifierPooling::Mean => Pooling::Mean,
        }),
        layers,
        labels,
        function: match spec.scores {
            ScoreFunction::Softmax => OutputFunction::Softmax,
            ScoreFunction::Sigmoid => OutputFunction::Sigmoid,
            ScoreFunction::Identity => OutputFunction::Identity,
        },
    })
}

/// Returns the layer whose rows are those of the head's matrix for some tokens, with its labels. Of two
/// tokens it is the second row minus the first: the logistic function of that is the second one's share.
fn token_rows(
    source: &ModelSource,
    head: &TensorSlice,
    names: &[String],
    tokenizer: &Tokenizer,
) -> Result<(DenseLayer, Vec<String>)> {
    let spec = source.spec.last_stack().head.as_ref().context("it needs the head's matrix")?;
    let is_plain = spec.transform.is_none()
        && spec.project_out.is_none()
        && spec.bias.is_none()
        && spec.softcap.is_none()
        && !spec.normalize_rows;
    ensure!(is_plain, "scores from tokens need a head that is a matrix alone");
    let row = |name: &String| -> Result<Vec<f32>> {
        let id = tokenizer.token_id(name).with_context(|| format!("'{name}' is not one token"))? as usize;
        ensure!(id < source.spec.vocab, "the token '{name}' is not in the model's vocabulary");
        let bounds = SliceBounds { rows: Some(id..id + 1), columns: None };
        let mut row = read_values(source, &TensorSlice { bounds, ..head.clone() })?;
        row.iter_mut().for_each(|x| *x *= spec.scale);
        Ok(row)
    };
    let rows: Vec<Vec<f32>> = names.iter().map(row).collect::<Result<_>>()?;
    let (rows, labels) = match (&rows[..], names) {
        ([no, yes], [_, name]) => {
            (vec![yes.iter().zip(no).map(|(yes, no)| yes - no).collect()], vec![name.clone()])
        }
        _ => (rows, names.to_vec()),
    };
    let (n, k) = (rows.len(), source.spec.hidden);
    let layer = DenseLayer { weight: rows.concat(), n, k, bias: None, activation: None, norm: None };
    Ok((layer, labels))
}

fn read_linear(source: &ModelSource, linear: &LinearSpec) -> Result<DenseLayer> {
    Ok(DenseLayer {
        weight: read_values(source, &linear.weight)?,
        n: linear.n,
        k: linear.k,
        bias: linear.bias.as_ref().map(|bias| read_values(source, bias)).transpose()?,
        activation: None,
        norm: None,
    })
}

fn read_norm(source: &ModelSource, norm: &NormSpec) -> Result<LayerNorm> {
    let mut weight = match norm.weights.first() {
        Some(weight) => read_values(source, weight)?,
        None => vec![1.0; norm.width],
    };
    weight.iter_mut().for_each(|x| *x += norm.offset);
    let bias = norm.biases.first().map(|bias| read_values(source, bias)).transpose()?;
    Ok(LayerNorm { weight, bias, centered: norm.kind == NormKind::Layer, eps: norm.eps })
}

/// Reads the numbers of a slice.
fn read_values(source: &ModelSource, piece: &TensorSlice) -> Result<Vec<f32>> {
    Ok(read_slice(&source.checkpoint, piece)?.to_f32())
}

/// Reads the dense modules of an embedding model in `folder`, in order, for vectors of `width` numbers.
pub fn read_dense(folder: &Folder, modules: &[DenseConfig], mut width: usize) -> Result<Vec<DenseLayer>> {
    let mut layers = Vec::new();
    for module in modules {
        let DenseConfig { inputs: k, outputs: n, activation, .. } = *module;
        let weights = module.read(folder)?;
        ensure!(
            k == width,
            "{}: a dense module reads vectors of {k} numbers, not of {width}",
            folder.path().display()
        );
        layers.push(DenseLayer { weight: weights.matrix, n, k, bias: weights.bias, activation, norm: None });
        width = n;
    }
    Ok(layers)
}
