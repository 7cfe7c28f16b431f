//! llama2.c checkpoints: a header of seven numbers, then every tensor as f32, those of one kind for all
//! layers together. Version 0 opens with the numbers; version 1 with a magic number, and its header has 256
//! bytes.
//!
//! Invariant: an accepted file is exactly as long as its header says it should be.

use super::folder::FileBytes;
use super::mmap::MappedFile;
use super::{Checkpoint, Dtype, Entry, Layout, elements, fixed_bytes};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use std::collections::BTreeMap;
use std::path::Path;

/// "ak42" as a little-endian u32.
const MAGIC: u32 = 0x616b_3432;
const HEADER_BYTES_V0: usize = 7 * 4;
const HEADER_BYTES_V1: usize = 256;

/// The sizes of a llama2.c model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Llama2cHeader {
    /// Width of the residual stream.
    pub dim: usize,
    /// Width of the feed-forward network.
    pub hidden_dim: usize,
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub seq_len: usize,
    /// The output matrix is the embedding.
    pub shared_classifier: bool,
    /// 0 or 1.
    pub version: u32,
}

impl Checkpoint {
    /// Opens a llama2.c file of version 0 or 1. Tensors bear the names they have in Meta's Llama; the rotary
    /// tables of version 0 follow from the header and are left out.
    pub fn open_llama2c(path: &Path) -> Result<(Checkpoint, Llama2cHeader)> {
        let file = MappedFile::open(path)?;
        let (tensors, header) = read(file.bytes()).with_context(|| path.display().to_string())?;
        Ok((Checkpoint { files: vec![FileBytes::Mapped(file)], tensors }, header))
    }
}

fn read(bytes: &[u8]) -> Result<(BTreeMap<String, Entry>, Llama2cHeader)> {
    let header = read_header(bytes)?;
    let parts = header.parts();
    check_length(&header, &parts, bytes.len())?;
    let mut offset = header.bytes();
    let mut tensors = BTreeMap::new();
    for Part { name, shape, layered } in parts {
        let len = elements(&shape)
            .and_then(|n| QuantType::F32.bytes(n))
            .expect("counted by check_length; this is a bug");
        for layer in 0..if layered { header.layers } else { 1 } {
            let range = offset..offset + len;
            offset = range.end;
            if let Some(name) = name {
                let name = if layered { format!("layers.{layer}.{name}") } else { name.to_owned() };
                let dtype = Dtype::Known(QuantType::F32);
                let (shape, layout) = (shape.clone(), Layout::Dense);
                tensors.insert(name, Entry { dtype, shape, file: 0, bytes: range, layout });
            }
        }
    }
    Ok((tensors, header))
}

fn read_header(bytes: &[u8]) -> Result<Llama2cHeader> {
    let word = |at: usize| fixed_bytes::<4>(bytes, at);
    if u32::from_le_bytes(word(0)?) != MAGIC {
        let mut sizes = read_sizes(bytes, 0)?;
        let shared_classifier = sizes[5] > 0;
        sizes[5] = sizes[5].saturating_abs();
        return checked_header(sizes, shared_classifier, 0);
    }
    match u32::from_le_bytes(word(4)?) {
        1 => {}
        2 => bail!("llama2.c version 2 (int8) is not supported: export the model as version 0 or 1"),
        version => bail!("llama2.c version {version} is not known (known: 0 and 1)"),
    }
    let [shared] = fixed_bytes(bytes, 8 + HEADER_BYTES_V0)?;
    ensure!(shared <= 1, "shared_classifier is {shared}: it must be 0 or 1");
    checked_header(read_sizes(bytes, 8)?, shared == 1, 1)
}

fn read_sizes(bytes: &[u8], at: usize) -> Result<[i32; 7]> {
    let words = fixed_bytes::<HEADER_BYTES_V0>(bytes, at)?;
    Ok(std::array::from_fn(|i| i32::from_le_bytes(std::array::from_fn(|b| words[4 * i + b]))))
}

fn checked_header(sizes: [i32; 7], shared_classifier: bool, version: u32) -> Result<Llama2cHeader> {
    let names = ["dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len"];
    for (name, size) in names.iter().zip(sizes) {
        ensure!(size > 0, "no llama2.c file: {name} is {size}");
    }
    let [dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len] = sizes.map(|size| size as usize);
    ensure!(dim % heads == 0, "dim {dim} is no multiple of n_heads {heads}");
    ensure!(heads % kv_heads == 0, "n_heads {heads} is no multiple of n_kv_heads {kv_heads}");
    ensure!(
        dim / heads % 2 == 0,
        "heads of dim / n_heads = {} numbers: rotary pairs need an even width",
        dim / heads
    );
    Ok(Llama2cHeader { dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len, shared_classifier, version })
}

/// A tensor, or one of its kind for every layer, in the file's order. Without a name it is skipped.
struct Part {
    name: Option<&'static str>,
    shape: Vec<usize>,
    layered: bool,
}

impl Llama2cHeader {
    /// Numbers of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Bytes before the first tensor.
    fn bytes(&self) -> usize {
        if self.version == 0 { HEADER_BYTES_V0 } else { HEADER_BYTES_V1 }
    }

    /// Everything that follows the header, in order.
    fn parts(&self) -> Vec<Part> {
        let Llama2cHeader { dim, hidden_dim: hidden, vocab, .. } = *self;
        let kv_dim = self.kv_heads * self.head_dim();
        let whole = |name, shape: &[usize]| Part { name: Some(name), shape: shape.to_vec(), layered: false };
        let layered = |name, shape: &[usize]| Part { name: Some(name), shape: shape.to_vec(), layered: true };
        let embedding = whole("tok_embeddings.weight", &[vocab, dim]);
        let attention_norm = layered("attention_norm.weight", &[dim]);
        let attention = [
            layered("attention.wq.weight", &[dim, dim]),
            layered("attention.wk.weight", &[kv_dim, dim]),
            layered("attention.wv.weight", &[kv_dim, dim]),
            layered("attention.wo.weight", &[dim, dim]),
        ];
        let ffn_norm = layered("ffn_norm.weight", &[dim]);
        let feed_forward = [
            layered("feed_forward.w1.weight", &[hidden, dim]),
            layered("feed_forward.w2.weight", &[dim, hidden]),
            layered("feed_forward.w3.weight", &[hidden, dim]),
        ];
        let norm = whole("norm.weight", &[dim]);
        let mut parts = Vec::new();
        if self.version == 0 {
            // Cosines and sines, which follow from the sizes.
            let rotary =
                || Part { name: None, shape: vec![self.seq_len, self.head_dim() / 2], layered: false };
            parts.extend([embedding, attention_norm]);
            parts.extend(attention);
            parts.push(ffn_norm);
            parts.extend(feed_forward);
            parts.extend([norm, rotary(), rotary()]);
        } else {
            parts.extend([attention_norm, ffn_norm, norm, embedding]);
            parts.extend(attention);
            parts.extend(feed_forward);
        }
        if !self.shared_classifier {
            parts.push(whole("output.weight", &[vocab, dim]));
        }
        parts
    }
}

/// Asserts that header and parts together are as long as the file.
fn check_length(header: &Llama2cHeader, parts: &[Part], file_bytes: usize) -> Result<()> {
    let mut needed = header.bytes();
    for Part { name, shape, layered } in parts {
        let copies = if *layered { header.layers } else { 1 };
        let sum = elements(shape)
            .and_then(|n| n.checked_mul(copies))
            .and_then(|n| QuantType::F32.bytes(n))
            .and_then(|len| needed.checked_add(len));
        let name = name.unwrap_or("the rotary tables");
        needed =
            sum.with_context(|| format!("{name}: {copies} x {shape:?} numbers are too many to count"))?;
        ensure!(
            needed <= file_bytes,
            "truncated: {name}, {copies} x {shape:?} f32 numbers, would end at {needed} of {file_bytes} bytes"
        );
    }
    ensure!(needed == file_bytes, "oversized: the tensors end at {needed} of {file_bytes} bytes");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::scratch::Scratch;
    use mainstem_kernels::random::philox;

    const SIZES: [i32; 7] = [8, 6, 2, 4, 2, 5, 3];

    /// The tensors of a version, in file order, with the count of their numbers: written down by hand from
    /// the format's description, not derived from the code under test. Rotary tables are "".
    fn expected(version: u32, shared: bool) -> Vec<(String, usize)> {
        let each = |name: &str, n: usize| {
            (0..2).map(|i| (format!("layers.{i}.{name}.weight"), n)).collect::<Vec<_>>()
        };
        let one = |name: &str, n: usize| vec![(name.to_owned(), n)];
        let qkvo = [
            each("attention.wq", 64),
            each("attention.wk", 32),
            each("attention.wv", 32),
            each("attention.wo", 64),
        ]
        .concat();
        let ffn =
            [each("feed_forward.w1", 48), each("feed_forward.w2", 48), each("feed_forward.w3", 48)].concat();
        let embedding = one("tok_embeddings.weight", 40);
        let (attention_norm, ffn_norm, norm) =
            (each("attention_norm", 8), each("ffn_norm", 8), one("norm.weight", 8));
        let mut all = match version {
            0 => [embedding, attention_norm, qkvo, ffn_norm, ffn, norm, one("", 3), one("", 3)].concat(),
            _ => [attention_norm, ffn_norm, norm, embedding, qkvo, ffn].concat(),
        };
        if !shared {
            all.extend(one("output.weight", 40));
        }
        all
    }

    fn header_bytes(version: u32, shared: bool, sizes: [i32; 7]) -> Vec<u8> {
        let mut sizes = sizes;
        if version == 0 && !shared {
            sizes[5] = -sizes[5];
        }
        let words = sizes.map(i32::to_le_bytes).concat();
        if version == 0 {
            return words;
        }
        let mut bytes = [&MAGIC.to_le_bytes(), &version.to_le_bytes(), &words[..], &[shared as u8]].concat();
        bytes.resize(HEADER_BYTES_V1, 0);
        bytes
    }

    /// A file whose numbers count up from 0.
    fn file(version: u32, shared: bool) -> Vec<u8> {
        let count: usize = expected(version, shared).iter().map(|(_, n)| n).sum();
        let numbers = (0..count).flat_map(|i| (i as f32).to_le_bytes());
        header_bytes(version, shared, SIZES).into_iter().chain(numbers).collect()
    }

    #[test]
    fn both_versions_come_back_with_and_without_a_classifier_of_their_own() {
        for (version, shared) in [(0, true), (0, false), (1, true), (1, false)] {
            let folder = Scratch::new();
            let path = folder.write("model.bin", &file(version, shared));
            let (checkpoint, header) = Checkpoint::open_llama2c(&path).unwrap();
            assert_eq!((header.version, header.shared_classifier), (version, shared));
            assert_eq!([header.dim, header.hidden_dim, header.layers, header.heads], [8, 6, 2, 4]);
            assert_eq!([header.kv_heads, header.vocab, header.seq_len, header.head_dim()], [2, 5, 3, 2]);
            let (mut next, mut named) = (0, 0);
            for (name, count) in expected(version, shared) {
                if !name.is_empty() {
                    named += 1;
                    let tensor = checkpoint.tensor(&name).unwrap_or_else(|| panic!("{name}"));
                    assert_eq!(elements(tensor.shape), Some(count), "{name}");
                    assert_eq!(tensor.bytes_len(), 4 * count, "{name}");
                    assert_eq!(tensor.bytes()[..4], (next as f32).to_le_bytes(), "{name}");
                }
                next += count;
            }
            assert_eq!(checkpoint.names().count(), named);
            assert_eq!(checkpoint.tensor("layers.1.feed_forward.w2.weight").unwrap().shape, [8, 6]);
            assert_eq!(checkpoint.tensor("layers.0.attention.wk.weight").unwrap().shape, [4, 8]);
        }
    }

    #[test]
    fn files_of_the_wrong_length_are_refused() {
        for (version, shared) in [(0, true), (0, false), (1, true), (1, false)] {
            let whole = file(version, shared);
            for end in (0..whole.len()).step_by(7).chain([whole.len() - 4, whole.len() - 1]) {
                let error = format!("{:#}", read(&whole[..end]).unwrap_err());
                assert!(error.contains("truncated"), "{end}: {error}");
            }
            let error = format!("{:#}", read(&[&whole[..], &[0; 4]].concat()).unwrap_err());
            assert!(error.contains("oversized"), "{error}");
        }
    }

    #[test]
    fn headers_that_cannot_be_are_refused_by_name() {
        let size = |at: usize, value: i32| {
            let mut sizes = SIZES;
            sizes[at] = value;
            [header_bytes(0, true, sizes), file(0, true)[HEADER_BYTES_V0..].to_vec()].concat()
        };
        let v1 = |at: usize, value: u8| {
            let mut bytes = file(1, true);
            bytes[at] = value;
            bytes
        };
        let cases = [
            (size(0, 0), "dim is 0"),
            (size(1, -6), "hidden_dim is -6"),
            (size(2, 0), "n_layers is 0"),
            (size(3, 3), "dim 8 is no multiple of n_heads 3"),
            (size(3, 8), "rotary pairs need an even width"),
            (size(4, 3), "n_heads 4 is no multiple of n_kv_heads 3"),
            (size(5, 0), "vocab_size is 0"),
            (size(5, i32::MIN), "truncated: tok_embeddings.weight"),
            (size(6, 1 << 30), "truncated: the rotary tables"),
            (size(2, i32::MAX), "truncated: attention_norm.weight"),
            (size(1, i32::MAX), "truncated: feed_forward.w1.weight"),
            (header_bytes(0, true, [0x7fff_fffe, 1, i32::MAX, 1, 1, 1, 1]), "truncated"),
            (v1(4, 2), "version 2 (int8) is not supported"),
            (v1(4, 3), "version 3 is not known"),
            (v1(8 + HEADER_BYTES_V0, 2), "shared_classifier is 2"),
            (v1(8 + HEADER_BYTES_V0 - 5, 0xff), "vocab_size is -"),
        ];
        let folder = Scratch::new();
        for (bytes, reason) in cases {
            let path = folder.write("model.bin", &bytes);
            let error = format!("{:#}", Checkpoint::open_llama2c(&path).unwrap_err());
            assert!(
                error.contains(reason) && error.starts_with(path.to_str().unwrap()),
                "{error}\nexpected: {reason}"
            );
        }
    }

    #[test]
    fn no_random_damage_to_a_header_makes_it_panic() {
        for version in [0, 1] {
            let whole = file(version, false);
            for round in 0..20_000 {
                let mut bytes = whole.clone();
                let [first, second, value, _] = philox([round, version, 0, 0], [3, 4]);
                for at in [first, second] {
                    bytes[at as usize % 40] = value.rotate_left(at) as u8;
                }
                for entry in read(&bytes).into_iter().flat_map(|(tensors, _)| tensors.into_values()) {
                    assert_eq!(bytes[entry.bytes].len(), 4 * elements(&entry.shape).unwrap());
                }
            }
        }
    }
}
