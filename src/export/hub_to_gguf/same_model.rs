//! Compares a written GGUF file with the model of the folder.
//!
//! Invariant: every value of the specification is compared, but for those that files have otherwise.

use super::metadata;
use crate::formats::RopeConfig;
use crate::model::rope;
use crate::model::source::ModelSource;
use crate::model::spec::{
    AttentionSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec, Norms, RopeSpec, StackSpec, TensorSlice,
};
use crate::model::tensors;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::RopeStyle;

/// Largest relative difference of two frequencies, which files have as products of 32-bit numbers.
const FREQUENCY_ERROR: f32 = 1e-6;

/// Fails if the file is not the model of the folder.
pub(super) fn check(folder: &ModelSource, file: &ModelSource) -> Result<()> {
    let [own, read] = [folder, file].map(|source| (&source.spec, source.spec.decoder.as_ref()));
    let (own_stack, read_stack) = (own.1.context("it has no decoder")?, read.1.context("it has no decoder")?);
    same("vocabulary", &own.0.vocab, &read.0.vocab)?;
    same("width", &own.0.hidden, &read.0.hidden)?;
    same("context length", &own.0.context, &read.0.context)?;
    same("number of layers", &own_stack.layers.len(), &read_stack.layers.len())?;
    let [own_plain, read_plain] = [own_stack, read_stack].map(without_tensors);
    for (at, (own, read)) in own_plain.layers.iter().zip(&read_plain.layers).enumerate() {
        check_layer(own, read).with_context(|| format!("layer {at}"))?;
        let ropes = [(own_stack, own), (read_stack, read)]
            .map(|(stack, layer)| layer.attention.rope.map(|at| &stack.ropes[at]));
        check_ropes(ropes).with_context(|| format!("layer {at}"))?;
    }
    same("embedding", &own_plain.embedding, &read_plain.embedding)?;
    same("position embedding", &own_plain.position_embedding, &read_plain.position_embedding)?;
    same("relative bias", &own_plain.relative_biases, &read_plain.relative_biases)?;
    same("final norm", &own_plain.norm, &read_plain.norm)?;
    same("head", &own_plain.head, &read_plain.head)?;
    check_tensors(folder, file)?;
    metadata::check_end_tokens(folder, file)
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, own: &T, read: &T) -> Result<()> {
    ensure!(own == read, "{what}: the file's would be {read:?} instead of {own:?}");
    Ok(())
}

fn check_layer(own: &LayerSpec, read: &LayerSpec) -> Result<()> {
    same("wiring", &own.wiring, &read.wiring)?;
    same("residual scale", &own.residual_scale, &read.residual_scale)?;
    same("norms of attention", &own.attention_norms, &read.attention_norms)?;
    same("norms of the MLP", &own.mlp_norms, &read.mlp_norms)?;
    same("MLP", &own.mlp, &read.mlp)?;
    let [own, read] = [own, read].map(|layer| AttentionSpec { rope: None, ..layer.attention.clone() });
    same("factor of attention scores", &own.scale, &read.scale)?;
    same("attention mask", &own.mask, &read.mask)?;
    same("attention", &own, &read)
}

/// Compares rotations: the frequencies, and what the scaling does beside them. Two pairs of styles are equal,
/// as the rows of queries and keys were reordered.
fn check_ropes(ropes: [Option<&RopeSpec>; 2]) -> Result<()> {
    let [Some(own), Some(read)] = ropes else {
        return same("rotation", &ropes[0], &ropes[1]);
    };
    same("rotated dimensions", &own.dims, &read.dims)?;
    let [ours, theirs] = [own, read].map(|rope| rope::frequencies(&rope.config, rope.dims, 0));
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= FREQUENCY_ERROR * a.abs();
    ensure!(ours.iter().zip(&theirs).all(is_near), "the rotary frequencies differ");
    let [own, read] = [own, read].map(|rope| amplitude(&rope.config));
    ensure!((own - read).abs() < 1e-6, "the rotary attention factor would be {read} instead of {own}");
    Ok(())
}

/// Returns the first cosine of the rotation's table, which is 1 but for a factor.
fn amplitude(config: &RopeConfig) -> f32 {
    let table = rope::table(config, 2, 1, 0);
    table.first_chunk().map_or(1.0, |bytes| f32::from_le_bytes(*bytes))
}

/// Compares the tensors in the order of loading: their roles, shapes and number formats.
fn check_tensors(folder: &ModelSource, file: &ModelSource) -> Result<()> {
    let [own, read] = [folder, file].map(|source| tensors::required_slices(&source.spec));
    same("number of tensors", &own.len(), &read.len())?;
    for (own, read) in own.into_iter().zip(read) {
        same("tensor", &(own.role, own.layer), &(read.role, read.layer))?;
        let is_vector = read.shape.len() == 1;
        let [ours, theirs] = [(folder, own), (file, read)].map(|(source, piece)| source.load_type(piece));
        ensure!(
            is_vector || ours == theirs,
            "tensor '{}' would be loaded as {theirs} instead of {ours}",
            read.name
        );
    }
    Ok(())
}

/// Returns the stack without the places of its tensors, and without what files have otherwise: rotations and
/// the constants added to norms.
fn without_tensors(stack: &StackSpec) -> StackSpec {
    let mut stack = stack.clone();
    for layer in &mut stack.layers {
        clear_norms(&mut layer.attention_norms);
        clear_norms(&mut layer.mlp_norms);
        let attention = &mut layer.attention;
        [&mut attention.q, &mut attention.k, &mut attention.v, &mut attention.o]
            .into_iter()
            .for_each(clear_linear);
        attention.qk_norms.iter_mut().flat_map(|(q, k)| [q, k]).for_each(clear_norm);
        if let MlpSpec::Dense(mlp) = &mut layer.mlp {
            [&mut mlp.gate, &mut mlp.down].into_iter().chain(&mut mlp.up).for_each(clear_linear);
        }
    }
    if let Some(embedding) = &mut stack.embedding {
        clear(&mut embedding.table);
        embedding.norm.iter_mut().for_each(clear_norm);
    }
    stack.norm.iter_mut().for_each(clear_norm);
    if let Some(head) = &mut stack.head {
        clear(&mut head.table);
        head.unused_names.clear();
    }
    stack.ropes.iter_mut().for_each(|rope| rope.style = RopeStyle::NeoX);
    stack
}

fn clear_norms(norms: &mut Norms) {
    norms.pre.iter_mut().chain(&mut norms.out).chain(&mut norms.post).for_each(clear_norm);
}

fn clear_norm(norm: &mut NormSpec) {
    norm.offset = 0.0;
    norm.weights.iter_mut().chain(&mut norm.biases).for_each(clear);
}

fn clear_linear(linear: &mut LinearSpec) {
    clear(&mut linear.weight);
    linear.bias.iter_mut().for_each(clear);
}

fn clear(piece: &mut TensorSlice) {
    (piece.name, piece.pattern) = (String::new(), "".into());
    (piece.shape, piece.transposed) = (crate::model::tensor_slices::full_shape(piece), false);
}
