//! Checks the tensors of a checkpoint against those that a specification requires.
//!
//! Invariant: after [`check`] every required tensor exists with its shape, and every other one is ignored
//! explicitly. So every size in the specification is bounded by the files.

use super::spec::classifier::ClassifierSpec;
use super::spec::{
    AttentionSpec, DenseSpec, HeadSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, Norms,
    PositionEmbeddingSpec, RelativeBiasKind, StackSpec, TensorSlice,
};
use super::tensor_slices;
use crate::formats::{Checkpoint, TensorView};
use anyhow::{Context, Error, Result, ensure};
use std::collections::HashSet;
use std::path::Path;

/// Checks for missing and unknown tensors, and that the required ones have a supported number format. Errors
/// name `path` and the tensors.
pub fn check(path: &Path, spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<()> {
    let path = path.display();
    let Differences { missing, unfit, unknown } = compare(spec, checkpoint);
    if let Some((_, error)) = unfit.into_iter().next() {
        return Err(error);
    }
    ensure!(missing.is_empty(), "{path}: missing {}", list_names(&missing));
    ensure!(unknown.is_empty(), "{path}: the specification does not use {}", list_names(&unknown));
    Ok(())
}

/// The differences between the tensors that a specification requires and those of a checkpoint.
#[derive(Debug, Default)]
pub struct Differences {
    /// Required tensors that the checkpoint lacks, in the order of loading.
    pub missing: Vec<String>,
    /// Tensors with another shape than the required one or an unsupported number format, each once, with an
    /// error that names its file.
    pub unfit: Vec<(String, Error)>,
    /// Tensors of the checkpoint that are neither required nor ignored.
    pub unknown: Vec<String>,
}

/// Compares the tensors of a checkpoint with those that a specification requires.
pub fn compare(spec: &ModelSpec, checkpoint: &Checkpoint) -> Differences {
    let mut found = Differences::default();
    let (mut absent, mut used, mut unfit) = (HashSet::new(), HashSet::new(), HashSet::new());
    // Each slice of a tensor states the shape that it expects.
    for piece in required_slices(spec) {
        let name = piece.name.as_str();
        let Some(tensor) = checkpoint.tensor(name) else {
            if absent.insert(name) {
                found.missing.push(name.to_owned());
            }
            continue;
        };
        used.insert(name);
        if let Err(error) = check_tensor(&tensor, piece)
            && unfit.insert(name)
        {
            found.unfit.push((name.to_owned(), error));
        }
    }
    let is_known = |name: &str| {
        used.contains(name)
            || spec.ignored.covers(name)
            || is_tied_head(spec, name)
            || checkpoint.unused_reason(name).is_some()
    };
    found.unknown = checkpoint.names().filter(|name| !is_known(name)).map(str::to_owned).collect();
    found
}

/// Checks shape and number format of a tensor for one of its uses.
fn check_tensor(tensor: &TensorView<'_>, piece: &TensorSlice) -> Result<()> {
    ensure!(
        shape_matches(tensor.shape, &piece.shape),
        "{}: tensor '{}' has shape {:?}, but configuration and specification require {:?}",
        tensor.file.display(),
        piece.name,
        tensor.shape,
        piece.shape
    );
    tensor.quant_type()?;
    tensor_slices::check_slice(tensor, piece)
        .with_context(|| format!("{}: tensor '{}'", tensor.file.display(), piece.name))
}

/// Returns whether a stored shape is the required one. A vector may be stored as a matrix of one row, and
/// vice versa; a matrix as several that are stacked; and a single number without dimensions.
fn shape_matches(stored: &[usize], needed: &[usize]) -> bool {
    if let ([planes, rows, columns], [all, width]) = (stored, needed) {
        return planes.checked_mul(*rows) == Some(*all) && columns == width;
    }
    let row = |matrix: &[usize], vector: &[usize]| matches!((matrix, vector), ([1, a], [b]) if a == b);
    stored == needed || row(stored, needed) || row(needed, stored) || stored.is_empty() && needed == [1]
}

/// Returns every required tensor once, as its first slice.
pub fn required_tensors(spec: &ModelSpec) -> Vec<&TensorSlice> {
    let mut seen = HashSet::new();
    let mut all = required_slices(spec);
    all.retain(|piece| seen.insert(piece.name.as_str()));
    all
}

/// Returns all required slices, in the order of loading.
pub fn required_slices(spec: &ModelSpec) -> Vec<&TensorSlice> {
    let mut all = Vec::new();
    spec.stacks().for_each(|stack| push_stack(stack, &mut all));
    all.extend(spec.classifier.iter().flat_map(ClassifierSpec::slices));
    all
}

fn push_stack<'a>(stack: &'a StackSpec, all: &mut Vec<&'a TensorSlice>) {
    if let Some(embedding) = &stack.embedding {
        all.push(&embedding.table);
        push_linears(&embedding.project_in, all);
        if let Some(PositionEmbeddingSpec::Learned { table, .. }) = &stack.position_embedding {
            all.push(table);
        }
        all.extend(&embedding.token_types);
        push_norms(&embedding.norm, all);
    }
    for bias in &stack.relative_biases {
        if let RelativeBiasKind::Learned { table, .. } = &bias.kind {
            all.push(table);
        }
    }
    stack.layers.iter().for_each(|layer| push_layer(layer, all));
    push_norms(&stack.norm, all);
    if let Some(head) = &stack.head {
        push_head(head, all);
    }
}

fn push_layer<'a>(layer: &'a LayerSpec, all: &mut Vec<&'a TensorSlice>) {
    push_sublayer_norms(&layer.attention_norms, all);
    push_attention(&layer.attention, all);
    if let Some((norms, attention)) = &layer.cross {
        push_sublayer_norms(norms, all);
        push_attention(attention, all);
    }
    push_sublayer_norms(&layer.mlp_norms, all);
    match &layer.mlp {
        MlpSpec::Dense(dense) => push_dense(dense, all),
        MlpSpec::Experts(moe) => {
            push_linears([&moe.router], all);
            all.extend(&moe.correction);
            moe.experts.iter().chain(&moe.shared).for_each(|expert| push_dense(expert, all));
            push_linears(&moe.shared_router, all);
        }
    }
}

fn push_sublayer_norms<'a>(norms: &'a Norms, all: &mut Vec<&'a TensorSlice>) {
    push_norms(norms.pre.iter().chain(&norms.out).chain(&norms.post), all);
}

fn push_attention<'a>(attention: &'a AttentionSpec, all: &mut Vec<&'a TensorSlice>) {
    push_linears([&attention.q, &attention.k, &attention.v, &attention.o], all);
    push_norms(attention.qk_norms.iter().flat_map(|(q, k)| [q, k]), all);
    all.extend(&attention.sinks);
    if let Some(latent) = &attention.latent {
        push_linears(latent.linears(), all);
        push_norms(latent.norms(), all);
    }
    if let Some(distances) = &attention.distances {
        all.push(&distances.table);
        push_norms(&distances.norm, all);
        push_linears([&distances.q, &distances.k], all);
    }
}

fn push_dense<'a>(dense: &'a DenseSpec, all: &mut Vec<&'a TensorSlice>) {
    push_linears([&dense.gate].into_iter().chain(&dense.up).chain([&dense.down]), all);
    all.extend(&dense.activation_numbers);
}

fn push_head<'a>(head: &'a HeadSpec, all: &mut Vec<&'a TensorSlice>) {
    if let Some((linear, _, norm)) = &head.transform {
        push_linears([linear], all);
        push_norms([norm], all);
    }
    push_linears(&head.project_out, all);
    all.push(&head.table);
    all.extend(&head.bias);
}

fn push_norms<'a>(norms: impl IntoIterator<Item = &'a NormSpec>, all: &mut Vec<&'a TensorSlice>) {
    all.extend(norms.into_iter().flat_map(|norm| norm.weights.iter().chain(&norm.biases)));
}

fn push_linears<'a>(linears: impl IntoIterator<Item = &'a LinearSpec>, all: &mut Vec<&'a TensorSlice>) {
    all.extend(linears.into_iter().flat_map(|linear| [&linear.weight].into_iter().chain(&linear.bias)));
}

/// Returns whether `name` is a separate matrix of a tied head: it is often stored, but the embedding is used.
pub fn is_tied_head(spec: &ModelSpec, name: &str) -> bool {
    spec.last_stack().head.as_ref().is_some_and(|head| head.unused_names.iter().any(|unused| unused == name))
}

fn list_names(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = names.iter().take(SHOWN).map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => format!("tensor {shown}"),
        more => format!("tensors {shown} and {more} more"),
    }
}
