//! The tensors of a llama2.c file, in file order; those of one kind are stored for all layers together.
//!
//! Invariant: the size of every tensor is computed before anything is allocated for it, and all tensors
//! together fill the file exactly.

use super::header::{Llama2cHeader, Llama2cVersion};
use crate::formats::elements;
use crate::formats::groups::QuantGroups;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;

/// Name, shape and encoding of one tensor, or of the same tensor in every layer.
pub(super) struct TensorSpec {
    /// `None` for data that is skipped.
    pub(super) name: Option<&'static str>,
    pub(super) shape: Vec<usize>,
    pub(super) repetition: Repetition,
    /// Group quantization; `None` for F32.
    pub(super) groups: Option<QuantGroups>,
}

/// Number of occurrences of a tensor.
#[derive(Clone, Copy)]
pub(super) enum Repetition {
    Once,
    PerLayer,
}

impl TensorSpec {
    /// Bytes of one tensor in the file; `None` on overflow, or if it is not whole groups.
    pub(super) fn bytes(&self) -> Option<usize> {
        let count = elements(&self.shape)?;
        match self.groups {
            None => QuantType::F32.bytes(count),
            Some(groups) => groups.stored_bytes(count),
        }
    }

    pub(super) fn copy_count(&self, header: &Llama2cHeader) -> usize {
        match self.repetition {
            Repetition::Once => 1,
            Repetition::PerLayer => header.layers,
        }
    }

    /// Returns the name of the tensor with index `copy`; `None` if it is skipped.
    pub(super) fn tensor_name(&self, copy: usize) -> Option<String> {
        let name = self.name?;
        Some(match self.repetition {
            Repetition::Once => name.to_owned(),
            Repetition::PerLayer => format!("layers.{copy}.{name}"),
        })
    }

    fn once(name: &'static str, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: Some(name), shape: shape.to_vec(), repetition: Repetition::Once, groups: None }
    }

    fn per_layer(name: &'static str, shape: &[usize]) -> TensorSpec {
        TensorSpec { repetition: Repetition::PerLayer, ..TensorSpec::once(name, shape) }
    }
}

/// Returns all tensors that follow the header, in file order.
pub(super) fn tensor_specs(header: &Llama2cHeader) -> Vec<TensorSpec> {
    let Llama2cHeader { dim, vocab, .. } = *header;
    let matrix = |part: TensorSpec| TensorSpec { groups: header.groups(), ..part };
    let embedding = matrix(TensorSpec::once("tok_embeddings.weight", &[vocab, dim]));
    let attention_norm = TensorSpec::per_layer("attention_norm.weight", &[dim]);
    let ffn_norm = TensorSpec::per_layer("ffn_norm.weight", &[dim]);
    let norm = TensorSpec::once("norm.weight", &[dim]);
    let (attention, feed_forward) = (attention(header).map(matrix), feed_forward(header).map(matrix));
    let mut parts = Vec::new();
    match header.version {
        Llama2cVersion::V0 => {
            parts.extend([embedding, attention_norm]);
            parts.extend(attention);
            parts.push(ffn_norm);
            parts.extend(feed_forward);
            parts.extend([norm, rotary_table(header), rotary_table(header)]);
        }
        Llama2cVersion::V1 | Llama2cVersion::V2 { .. } => {
            parts.extend([attention_norm, ffn_norm, norm, embedding]);
            parts.extend(attention);
            parts.extend(feed_forward);
        }
    }
    if !header.shared_classifier {
        parts.push(matrix(TensorSpec::once("output.weight", &[vocab, dim])));
    }
    parts
}

fn attention(header: &Llama2cHeader) -> [TensorSpec; 4] {
    let (dim, kv_dim) = (header.dim, header.kv_heads * header.head_dim());
    [
        TensorSpec::per_layer("attention.wq.weight", &[dim, dim]),
        TensorSpec::per_layer("attention.wk.weight", &[kv_dim, dim]),
        TensorSpec::per_layer("attention.wv.weight", &[kv_dim, dim]),
        TensorSpec::per_layer("attention.wo.weight", &[dim, dim]),
    ]
}

fn feed_forward(header: &Llama2cHeader) -> [TensorSpec; 3] {
    let (dim, hidden) = (header.dim, header.hidden_dim);
    [
        TensorSpec::per_layer("feed_forward.w1.weight", &[hidden, dim]),
        TensorSpec::per_layer("feed_forward.w2.weight", &[dim, hidden]),
        TensorSpec::per_layer("feed_forward.w3.weight", &[hidden, dim]),
    ]
}

/// The table of cosines or sines, which is skipped because it follows from the sizes.
fn rotary_table(header: &Llama2cHeader) -> TensorSpec {
    let shape = vec![header.seq_len, header.head_dim() / 2];
    TensorSpec { name: None, shape, repetition: Repetition::Once, groups: None }
}

/// Checks that the header and all tensors together are as long as the file.
pub(super) fn check_length(header: &Llama2cHeader, parts: &[TensorSpec], file_bytes: usize) -> Result<()> {
    let mut needed = header.bytes();
    for part in parts {
        let (name, shape) = (part.name.unwrap_or("the rotary tables"), &part.shape);
        let copies = part.copy_count(header);
        if let (Some(QuantGroups { size }), Some(count)) = (part.groups, elements(shape)) {
            ensure!(
                count.is_multiple_of(size),
                "{name}: shape {shape:?} is not a whole number of groups of {size} elements"
            );
        }
        let bytes = part.bytes().and_then(|bytes| bytes.checked_mul(copies));
        needed = bytes
            .and_then(|bytes| needed.checked_add(bytes))
            .with_context(|| format!("{name}: {copies} x {shape:?} elements are too many"))?;
        ensure!(
            needed <= file_bytes,
            "truncated: {name}, {copies} x {shape:?} elements, would end at {needed} of {file_bytes} bytes"
        );
    }
    ensure!(
        needed == file_bytes,
        "oversized: the tensors end at byte {needed}, but the file has {file_bytes} bytes"
    );
    Ok(())
}
