//! Checks the tensors of a checkpoint against those that a specification requires.
//!
//! Invariant: after [`check`] every required tensor exists with its shape, and every other one is ignored
//! explicitly. So every size in the specification is bounded by the files.

use super::pieces as parts;
use super::spec::{
    AddedSpec, AttentionSpec, DenseSpec, DistanceKind, DistanceSpec, HeadSpec, LayerSpec, LinearSpec,
    MlpSpec, ModelSpec, NormSpec, Norms, Piece, StackSpec,
};
use crate::formats::Checkpoint;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashSet;
use std::path::Path;

/// Checks for missing and unknown tensors, and that the required ones have a supported number format. Errors
/// name `path` and the tensors.
pub fn check(path: &Path, spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<()> {
    let path = path.display();
    let (mut missing, mut named) = (Vec::new(), HashSet::new());
    let mut used = HashSet::new();
    // Each slice of a tensor states the shape that it expects.
    for piece in pieces(spec) {
        match checkpoint.tensor(&piece.name) {
            None if !named.insert(piece.name.as_str()) => {}
            None => missing.push(piece.name.clone()),
            Some(tensor) if !fits(tensor.shape, &piece.shape) => bail!(
                "{}: tensor '{}' has shape {:?}, but configuration and specification require {:?}",
                tensor.file.display(),
                piece.name,
                tensor.shape,
                piece.shape
            ),
            Some(tensor) => {
                tensor.quant_type()?;
                parts::check(&tensor, piece)
                    .with_context(|| format!("{}: tensor '{}'", tensor.file.display(), piece.name))?;
                used.insert(piece.name.as_str());
            }
        }
    }
    ensure!(missing.is_empty(), "{path}: missing {}", some_of(&missing));
    let is_known = |name: &str| {
        used.contains(name)
            || spec.ignored.covers(name)
            || is_tied_head(spec, name)
            || checkpoint.scales_activations(name)
    };
    let unknown: Vec<String> = checkpoint.names().filter(|name| !is_known(name)).map(str::to_owned).collect();
    ensure!(unknown.is_empty(), "{path}: the specification does not use {}", some_of(&unknown));
    Ok(())
}

/// Returns whether a stored shape is the required one. A vector may be stored as a matrix of one row, and
/// vice versa.
fn fits(stored: &[usize], needed: &[usize]) -> bool {
    let row = |matrix: &[usize], vector: &[usize]| matches!((matrix, vector), ([1, a], [b]) if a == b);
    stored == needed || row(stored, needed) || row(needed, stored)
}

/// Returns every required tensor once, as its first slice.
pub fn needed(spec: &ModelSpec) -> Vec<&Piece> {
    let mut seen = HashSet::new();
    let mut all = pieces(spec);
    all.retain(|piece| seen.insert(piece.name.as_str()));
    all
}

/// Returns all required slices, in the order of loading.
pub fn pieces(spec: &ModelSpec) -> Vec<&Piece> {
    let mut all = Vec::new();
    spec.stacks().for_each(|stack| of_stack(stack, &mut all));
    all
}

fn of_stack<'a>(stack: &'a StackSpec, all: &mut Vec<&'a Piece>) {
    if let Some(embedding) = &stack.embedding {
        all.push(&embedding.table);
        of_linears(&embedding.project_in, all);
        if let Some(AddedSpec::Learned { table, .. }) = &stack.added {
            all.push(table);
        }
        all.extend(&embedding.token_types);
        of_norms(&embedding.norm, all);
    }
    if let Some(DistanceSpec { kind: DistanceKind::Relative { table, .. }, .. }) = &stack.distance {
        all.push(table);
    }
    stack.layers.iter().for_each(|layer| of_layer(layer, all));
    of_norms(&stack.norm, all);
    if let Some(head) = &stack.head {
        of_head(head, all);
    }
}

fn of_layer<'a>(layer: &'a LayerSpec, all: &mut Vec<&'a Piece>) {
    of_sublayer(&layer.attention_norms, all);
    of_attention(&layer.attention, all);
    if let Some((norms, attention)) = &layer.cross {
        of_sublayer(norms, all);
        of_attention(attention, all);
    }
    of_sublayer(&layer.mlp_norms, all);
    match &layer.mlp {
        MlpSpec::Dense(dense) => of_dense(dense, all),
        MlpSpec::Experts(moe) => {
            of_linears([&moe.router], all);
            moe.experts.iter().chain(&moe.shared).for_each(|expert| of_dense(expert, all));
            of_linears(&moe.shared_router, all);
        }
    }
}

fn of_sublayer<'a>(norms: &'a Norms, all: &mut Vec<&'a Piece>) {
    of_norms(norms.pre.iter().chain(&norms.out).chain(&norms.post), all);
}

fn of_attention<'a>(attention: &'a AttentionSpec, all: &mut Vec<&'a Piece>) {
    of_linears([&attention.q, &attention.k, &attention.v, &attention.o], all);
    of_norms(attention.qk_norms.iter().flat_map(|(q, k)| [q, k]), all);
}

fn of_dense<'a>(dense: &'a DenseSpec, all: &mut Vec<&'a Piece>) {
    of_linears([&dense.gate].into_iter().chain(&dense.up).chain([&dense.down]), all);
}

fn of_head<'a>(head: &'a HeadSpec, all: &mut Vec<&'a Piece>) {
    if let Some((linear, _, norm)) = &head.transform {
        of_linears([linear], all);
        of_norms([norm], all);
    }
    of_linears(&head.project_out, all);
    all.push(&head.table);
    all.extend(&head.bias);
}

fn of_norms<'a>(norms: impl IntoIterator<Item = &'a NormSpec>, all: &mut Vec<&'a Piece>) {
    all.extend(norms.into_iter().flat_map(|norm| [&norm.weight].into_iter().chain(&norm.bias)));
}

fn of_linears<'a>(linears: impl IntoIterator<Item = &'a LinearSpec>, all: &mut Vec<&'a Piece>) {
    all.extend(linears.into_iter().flat_map(|linear| [&linear.weight].into_iter().chain(&linear.bias)));
}

/// Returns whether `name` is a separate matrix of a tied head: it is often stored, but the embedding is used.
pub fn is_tied_head(spec: &ModelSpec, name: &str) -> bool {
    spec.last_stack().head.as_ref().is_some_and(|head| head.unused_names.iter().any(|unused| unused == name))
}

fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = names.iter().take(SHOWN).map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => format!("tensor {shown}"),
        more => format!("tensors {shown} and {more} more"),
    }
}
