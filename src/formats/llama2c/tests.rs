//! Tests on whole files, built from the format's description.

use super::header::{HEADER_BYTES, HEADER_BYTES_V0, MAGIC};
use super::*;
use crate::formats::elements;
use crate::testing::Scratch;
use mainstem_kernels::random::philox;

const SIZES: [i32; 7] = [8, 6, 2, 4, 2, 5, 3];
/// Group size: divides the size of every matrix, is larger than a row of `w2`, and not a multiple of it.
const GROUP: usize = 8;
const ALL: [(u32, bool); 6] = [(0, true), (0, false), (1, true), (1, false), (2, true), (2, false)];

/// The tensors of a version, in file order, with their element counts: written by hand from the format's
/// description, not derived from the code under test. Rotary tables have the name "".
fn expected(version: u32, shared: bool) -> Vec<(String, usize)> {
    let each =
        |name: &str, n: usize| (0..2).map(|i| (format!("layers.{i}.{name}.weight"), n)).collect::<Vec<_>>();
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
    if version == 2 {
        bytes.extend((GROUP as i32).to_le_bytes());
    }
    bytes.resize(HEADER_BYTES, 0);
    bytes
}

/// The elements of tensor number `at` of a file.
fn numbers(at: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((at * 7 + i * 3) % 255) as f32 - 127.0).collect()
}

/// Tensor number `at` in F32: all tensors of versions 0 and 1, and the norms of version 2.
fn plain(at: usize, count: usize) -> Vec<u8> {
    numbers(at, count).into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Tensor number `at` in group-quantized form, with the scales 1, 2 and so on.
fn grouped(at: usize, count: usize) -> Vec<u8> {
    let quants = numbers(at, count).into_iter().map(|number| number as i8 as u8);
    let scales = (0..count / GROUP).flat_map(|group| (group as f32 + 1.0).to_le_bytes());
    quants.chain(scales).collect()
}

fn is_grouped(version: u32, name: &str) -> bool {
    version == 2 && !name.ends_with("norm.weight")
}

fn file(version: u32, shared: bool) -> Vec<u8> {
    let mut bytes = header_bytes(version, shared, SIZES);
    for (at, (name, count)) in expected(version, shared).into_iter().enumerate() {
        bytes.extend(if is_grouped(version, &name) { grouped(at, count) } else { plain(at, count) });
    }
    bytes
}

#[test]
fn every_version_comes_back_with_and_without_a_classifier_of_its_own() {
    for (version, shared) in ALL {
        let folder = Scratch::new();
        let path = folder.write("model.bin", &file(version, shared));
        let (checkpoint, header) = Checkpoint::open_llama2c(&path).unwrap();
        let versions = [Llama2cVersion::V0, Llama2cVersion::V1, Llama2cVersion::V2 { group_size: GROUP }];
        assert_eq!((header.version, header.shared_classifier), (versions[version as usize], shared));
        assert_eq!([header.dim, header.hidden_dim, header.layers, header.heads], [8, 6, 2, 4]);
        assert_eq!([header.kv_heads, header.vocab, header.seq_len, header.head_dim()], [2, 5, 3, 2]);
        let mut named = 0;
        for (at, (name, count)) in expected(version, shared).into_iter().enumerate() {
            if name.is_empty() {
                continue;
            }
            named += 1;
            let tensor = checkpoint.tensor(&name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(tensor.quant_type().unwrap(), QuantType::F32);
            assert_eq!((elements(tensor.shape), tensor.bytes_len()), (Some(count), 4 * count), "{name}");
            let scale = |i: usize| if is_grouped(version, &name) { (i / GROUP + 1) as f32 } else { 1.0 };
            let values = numbers(at, count).into_iter().enumerate().map(|(i, number)| number * scale(i));
            let values: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            assert!(*tensor.bytes() == values, "{name} of version {version}");
        }
        assert_eq!(checkpoint.names().count(), named);
        assert_eq!(checkpoint.tensor("layers.1.feed_forward.w2.weight").unwrap().shape, [8, 6]);
        assert_eq!(checkpoint.tensor("layers.0.attention.wk.weight").unwrap().shape, [4, 8]);
    }
}

#[test]
fn files_of_the_wrong_length_are_refused() {
    for (version, shared) in ALL {
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
    let patched = |version: u32, at: usize, value: u8| {
        let mut bytes = file(version, true);
        bytes[at] = value;
        bytes
    };
    let group = |size: i32| {
        let mut bytes = file(2, true);
        bytes[9 + HEADER_BYTES_V0..][..4].copy_from_slice(&size.to_le_bytes());
        bytes
    };
    let cases = [
        (size(0, 0), "dim is 0"),
        (size(1, -6), "hidden_dim is -6"),
        (size(2, 0), "n_layers is 0"),
        (size(3, 3), "dim 8 is not a multiple of n_heads 3"),
        (size(3, 8), "RoPE needs an even head size"),
        (size(4, 3), "n_heads 4 is not a multiple of n_kv_heads 3"),
        (size(5, 0), "vocab_size is 0"),
        (size(5, i32::MIN), "truncated: tok_embeddings.weight"),
        (size(6, 1 << 30), "truncated: the rotary tables"),
        (size(2, i32::MAX), "truncated: attention_norm.weight"),
        (size(1, i32::MAX), "truncated: feed_forward.w1.weight"),
        (header_bytes(0, true, [0x7fff_fffe, 1, i32::MAX, 1, 1, 1, 1]), "truncated"),
        (patched(1, 4, 2), "group_size is 0"),
        (patched(1, 4, 3), "version 3 is not supported"),
        (patched(1, 8 + HEADER_BYTES_V0, 2), "shared_classifier is 2"),
        (patched(1, 8 + HEADER_BYTES_V0 - 5, 0xff), "vocab_size is -"),
        (patched(2, 8 + HEADER_BYTES_V0, 2), "shared_classifier is 2"),
        (group(0), "group_size is 0"),
        (group(-8), "group_size is -8"),
        (group(64), "tok_embeddings.weight: shape [5, 8] is not a whole number of groups of 64 elements"),
        (group(i32::MAX), "tok_embeddings.weight: shape [5, 8] is not a whole number of groups"),
        (group(4), "truncated: feed_forward.w2.weight"),
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
    for version in [0, 1, 2] {
        let whole = file(version, false);
        for round in 0..20_000 {
            let mut bytes = whole.clone();
            let [first, second, value, _] = philox([round, version, 0, 0], [3, 4]);
            for at in [first, second] {
                bytes[at as usize % 44] = value.rotate_left(at) as u8;
            }
            for entry in read(&bytes).into_iter().flat_map(|(tensors, _)| tensors.into_values()) {
                let numbers = elements(&entry.shape).unwrap();
                assert_eq!(entry.bytes_len(), 4 * numbers);
                if let Layout::Grouped(groups) = entry.layout {
                    assert_eq!(groups.dequantize(&bytes[entry.bytes]).len(), 4 * numbers);
                } else {
                    assert_eq!(bytes[entry.bytes].len(), 4 * numbers);
                }
            }
        }
    }
}
