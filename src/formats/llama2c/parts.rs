//! What follows the header of a llama2.c file, in order: the tensors of one kind for all layers together.
//!
//! Invariant: a part's bytes are counted before anything is made of it, and all parts together are as long as
//! the file.

use super::header::{Llama2cHeader, Llama2cVersion};
use crate::formats::elements;
use crate::formats::groups::Groups;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;

/// A tensor, or one of its kind for every layer.
pub(super) struct Part {
    /// Without a name it is skipped.
    pub(super) name: Option<&'static str>,
    pub(super) shape: Vec<usize>,
    pub(super) copies: Copies,
    /// F32 where there are none.
    pub(super) groups: Option<Groups>,
}

/// How often a part is there.
#[derive(Clone, Copy)]
pub(super) enum Copies {
    Once,
    ForEachLayer,
}

impl Part {
    /// Bytes of one tensor in the file; `None` if they cannot be counted.
    pub(super) fn bytes(&self) -> Option<usize> {
        let count = elements(&self.shape)?;
        match self.groups {
            None => QuantType::F32.bytes(count),
            Some(groups) => groups.stored_bytes(count),
        }
    }

    pub(super) fn copies(&self, header: &Llama2cHeader) -> usize {
        match self.copies {
            Copies::Once => 1,
            Copies::ForEachLayer => header.layers,
        }
    }

    /// The name of the tensor number `copy` of this part.
    pub(super) fn name_of(&self, copy: usize) -> Option<String> {
        let name = self.name?;
        Some(match self.copies {
            Copies::Once => name.to_owned(),
            Copies::ForEachLayer => format!("layers.{copy}.{name}"),
        })
    }

    fn once(name: &'static str, shape: &[usize]) -> Part {
        Part { name: Some(name), shape: shape.to_vec(), copies: Copies::Once, groups: None }
    }

    fn layered(name: &'static str, shape: &[usize]) -> Part {
        Part { copies: Copies::ForEachLayer, ..Part::once(name, shape) }
    }
}

/// Everything that follows the header.
pub(super) fn of(header: &Llama2cHeader) -> Vec<Part> {
    let Llama2cHeader { dim, vocab, .. } = *header;
    let matrix = |part: Part| Part { groups: header.groups(), ..part };
    let embedding = matrix(Part::once("tok_embeddings.weight", &[vocab, dim]));
    let attention_norm = Part::layered("attention_norm.weight", &[dim]);
    let ffn_norm = Part::layered("ffn_norm.weight", &[dim]);
    let norm = Part::once("norm.weight", &[dim]);
    let (attention, feed_forward) = (attention(header).map(matrix), feed_forward(header).map(matrix));
    let mut parts = Vec::new();
    match header.version {
        Llama2cVersion::V0 => {
            parts.extend([embedding, attention_norm]);
            parts.extend(attention);
            parts.push(ffn_norm);
            parts.extend(feed_forward);
            parts.extend([norm, rotary(header), rotary(header)]);
        }
        Llama2cVersion::V1 | Llama2cVersion::V2 { .. } => {
            parts.extend([attention_norm, ffn_norm, norm, embedding]);
            parts.extend(attention);
            parts.extend(feed_forward);
        }
    }
    if !header.shared_classifier {
        parts.push(matrix(Part::once("output.weight", &[vocab, dim])));
    }
    parts
}

fn attention(header: &Llama2cHeader) -> [Part; 4] {
    let (dim, kv_dim) = (header.dim, header.kv_heads * header.head_dim());
    [
        Part::layered("attention.wq.weight", &[dim, dim]),
        Part::layered("attention.wk.weight", &[kv_dim, dim]),
        Part::layered("attention.wv.weight", &[kv_dim, dim]),
        Part::layered("attention.wo.weight", &[dim, dim]),
    ]
}

fn feed_forward(header: &Llama2cHeader) -> [Part; 3] {
    let (dim, hidden) = (header.dim, header.hidden_dim);
    [
        Part::layered("feed_forward.w1.weight", &[hidden, dim]),
        Part::layered("feed_forward.w2.weight", &[dim, hidden]),
        Part::layered("feed_forward.w3.weight", &[hidden, dim]),
    ]
}

/// Cosines or sines, which follow from the sizes.
fn rotary(header: &Llama2cHeader) -> Part {
    let shape = vec![header.seq_len, header.head_dim() / 2];
    Part { name: None, shape, copies: Copies::Once, groups: None }
}

/// Asserts that header and parts together are as long as the file.
pub(super) fn check_length(header: &Llama2cHeader, parts: &[Part], file_bytes: usize) -> Result<()> {
    let mut needed = header.bytes();
    for part in parts {
        let (name, shape) = (part.name.unwrap_or("the rotary tables"), &part.shape);
        let copies = part.copies(header);
        if let (Some(Groups { size }), Some(count)) = (part.groups, elements(shape)) {
            ensure!(
                count.is_multiple_of(size),
                "{name}: {shape:?} numbers are no whole number of groups, which have {size}"
            );
        }
        let bytes = part.bytes().and_then(|bytes| bytes.checked_mul(copies));
        needed = bytes
            .and_then(|bytes| needed.checked_add(bytes))
            .with_context(|| format!("{name}: {copies} x {shape:?} numbers are too many to count"))?;
        ensure!(
            needed <= file_bytes,
            "truncated: {name}, {copies} x {shape:?} numbers, would end at {needed} of {file_bytes} bytes"
        );
    }
    ensure!(needed == file_bytes, "oversized: the tensors end at {needed} of {file_bytes} bytes");
    Ok(())
}
