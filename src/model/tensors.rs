//! Which tensors a specification needs, held against those a checkpoint has.
//!
//! Invariant: after [`check`] every needed tensor is there with its shape, every other one is listed as ignored,
//! and so every size of the specification is bounded by the files.

use super::spec::{ModelSpec, TensorNames};
use crate::formats::Checkpoint;
use anyhow::{Result, bail, ensure};
use std::collections::BTreeSet;
use std::path::Path;

/// Checks both ways. Errors name `path` and the tensors.
pub fn check(path: &Path, spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<()> {
    let path = path.display();
    let stored = checkpoint.names().count();
    // Before a name is made for each: a file has at least one tensor for each of its layers.
    ensure!(
        spec.layers <= stored,
        "{path}: the configuration has {} layers, but there are only {stored} tensors (no '{}')",
        spec.layers,
        TensorNames::in_layer(&spec.tensors.q, spec.layers - 1)
    );
    let mut missing = Vec::new();
    let mut used = BTreeSet::new();
    for (name, shape) in needed(spec) {
        match checkpoint.tensor(&name) {
            None => missing.push(name),
            Some(tensor) if tensor.shape != shape => bail!(
                "{}: tensor '{name}' has shape {:?}, but configuration and specification make it {shape:?}",
                tensor.file.display(),
                tensor.shape
            ),
            Some(_) => _ = used.insert(name),
        }
    }
    ensure!(missing.is_empty(), "{path}: missing {}", some_of(&missing));
    let is_known =
        |name: &str| used.contains(name) || spec.tensors.is_ignored(name) || is_tied_head(spec, name);
    let unknown: Vec<String> = checkpoint.names().filter(|name| !is_known(name)).map(str::to_owned).collect();
    ensure!(unknown.is_empty(), "{path}: the specification has no use for {}", some_of(&unknown));
    Ok(())
}

/// The name of the bias that belongs to a weight.
pub fn bias_name(weight: &str) -> String {
    format!("{}.bias", weight.strip_suffix(".weight").unwrap_or(weight))
}

/// Every needed tensor with its shape.
fn needed(spec: &ModelSpec) -> impl Iterator<Item = (String, Vec<usize>)> + '_ {
    let names = &spec.tensors;
    let head = (!spec.tied_head).then(|| (names.head.clone(), vec![spec.vocab, spec.hidden]));
    let around =
        [(names.embedding.clone(), vec![spec.vocab, spec.hidden]), (names.norm.clone(), vec![spec.hidden])];
    around.into_iter().chain(head).chain((0..spec.layers).flat_map(|layer| in_layer(spec, layer)))
}

fn in_layer(spec: &ModelSpec, layer: usize) -> impl Iterator<Item = (String, Vec<usize>)> + '_ {
    let names = &spec.tensors;
    let (hidden, q, kv, mlp) = (spec.hidden, spec.q_width(), spec.kv_width(), spec.mlp.width);
    let name = move |pattern: &str| TensorNames::in_layer(pattern, layer);
    let norms = [&names.attention_norm, &names.mlp_norm].map(|pattern| (name(pattern), vec![hidden]));
    let (attention, mlp_bias) = (spec.attention.bias, spec.mlp.bias);
    let linears = [
        (&names.q, q, hidden, attention),
        (&names.k, kv, hidden, attention),
        (&names.v, kv, hidden, attention),
        (&names.o, hidden, q, attention),
        (&names.gate, mlp, hidden, mlp_bias),
        (&names.up, mlp, hidden, mlp_bias),
        (&names.down, hidden, mlp, mlp_bias),
    ];
    let linears = linears.into_iter().flat_map(move |(pattern, out, inp, biased)| {
        let weight = name(pattern);
        let bias = biased.then(|| (bias_name(&weight), vec![out]));
        std::iter::once((weight, vec![out, inp])).chain(bias)
    });
    norms.into_iter().chain(linears)
}

/// A tied head is often stored all the same; the embedding is what counts.
fn is_tied_head(spec: &ModelSpec, name: &str) -> bool {
    spec.tied_head && name == spec.tensors.head
}

fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = names.iter().take(SHOWN).map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => format!("tensor {shown}"),
        more => format!("tensors {shown} and {more} more"),
    }
}
