//! Which tensors a specification needs, held against those a checkpoint has.
//!
//! Invariant: after [`check`] every needed tensor is there with its shape, every other one is listed as ignored,
//! and so every size of the specification is bounded by the files.

use super::spec::{ModelSpec, TensorNames};
use crate::formats::Checkpoint;
use anyhow::{Result, bail, ensure};
use std::collections::BTreeSet;
use std::path::Path;

/// Checks both ways, and that what is needed is in a number format that can be computed with. Errors name
/// `path` and the tensors.
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
    for tensor in needed(spec) {
        let (name, shape) = (tensor.name(), tensor.shape);
        match checkpoint.tensor(&name) {
            None => missing.push(name),
            Some(tensor) if tensor.shape != shape => bail!(
                "{}: tensor '{name}' has shape {:?}, but configuration and specification make it {shape:?}",
                tensor.file.display(),
                tensor.shape
            ),
            Some(tensor) => {
                tensor.quant_type()?;
                used.insert(name);
            }
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

/// A tensor that a model is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    /// What it is, in the words of the specification's table of names.
    pub role: &'static str,
    /// Its name, with `{i}` for the layer.
    pub pattern: String,
    /// The layer it belongs to, if it belongs to one.
    pub layer: Option<usize>,
    /// (out, in), or the length of a vector.
    pub shape: Vec<usize>,
}

impl Needed {
    /// Its name in the checkpoint.
    pub fn name(&self) -> String {
        match self.layer {
            Some(layer) => TensorNames::in_layer(&self.pattern, layer),
            None => self.pattern.clone(),
        }
    }
}

/// Every needed tensor.
pub fn needed(spec: &ModelSpec) -> impl Iterator<Item = Needed> + '_ {
    let names = &spec.tensors;
    let whole = |role, name: &String, shape| Needed { role, pattern: name.clone(), layer: None, shape };
    let matrix = vec![spec.vocab, spec.hidden];
    let head = (!spec.tied_head).then(|| whole("head", &names.head, matrix.clone()));
    let around =
        [whole("embedding", &names.embedding, matrix), whole("norm", &names.norm, vec![spec.hidden])];
    around.into_iter().chain(head).chain((0..spec.layers).flat_map(|layer| in_layer(spec, layer)))
}

fn in_layer(spec: &ModelSpec, layer: usize) -> impl Iterator<Item = Needed> + '_ {
    let names = &spec.tensors;
    let (hidden, q, kv, mlp) = (spec.hidden, spec.q_width(), spec.kv_width(), spec.mlp.width);
    let tensor = move |role, pattern, shape| Needed { role, pattern, layer: Some(layer), shape };
    let norms = [("attention_norm", &names.attention_norm), ("mlp_norm", &names.mlp_norm)];
    let norms = norms.map(|(role, pattern)| tensor(role, pattern.clone(), vec![hidden]));
    let (attention, mlp_bias) = (spec.attention.bias, spec.mlp.bias);
    let linears = [
        (["q", "q bias"], &names.q, q, hidden, attention),
        (["k", "k bias"], &names.k, kv, hidden, attention),
        (["v", "v bias"], &names.v, kv, hidden, attention),
        (["o", "o bias"], &names.o, hidden, q, attention),
        (["gate", "gate bias"], &names.gate, mlp, hidden, mlp_bias),
        (["up", "up bias"], &names.up, mlp, hidden, mlp_bias),
        (["down", "down bias"], &names.down, hidden, mlp, mlp_bias),
    ];
    let linears = linears.into_iter().flat_map(move |([role, bias_role], pattern, out, inp, biased)| {
        let bias = biased.then(|| tensor(bias_role, bias_name(pattern), vec![out]));
        std::iter::once(tensor(role, pattern.clone(), vec![out, inp])).chain(bias)
    });
    norms.into_iter().chain(linears)
}

/// A tied head is often stored all the same; the embedding is what counts.
pub fn is_tied_head(spec: &ModelSpec, name: &str) -> bool {
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
