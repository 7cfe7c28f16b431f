//! Tensors of every type, rank and layout, as PyTorch saves them with several protocols.

use super::assemble::*;
use super::{content, fixture, opened, value_refusal};
use crate::formats::Checkpoint;
use crate::testing::Scratch;
use serde_json::{Value, json};

/// Compares a tensor with what PyTorch reads.
fn check(checkpoint: &Checkpoint, name: &str, expected: &Value) {
    let tensor = checkpoint.tensor(name).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(json!(tensor.shape), expected["shape"], "{name}");
    match expected["bytes"].as_str() {
        None => assert_eq!(json!(tensor.dtype.to_string()), expected["dtype"], "{name}"),
        Some(bytes) => {
            let dtype = tensor.quant_type().unwrap().to_string().to_uppercase();
            assert_eq!(json!(dtype), expected["dtype"], "{name}");
            let hex: String = tensor.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, bytes, "{name}");
        }
    }
}

#[test]
fn every_kind_of_tensor_comes_back_from_every_container_and_protocol() {
    let expected: serde_json::Map<String, Value> =
        serde_json::from_slice(&content("kinds/kinds.json")).unwrap();
    for (file, missing) in [("zip1", 0), ("zip2", 0), ("zip5", 0), ("stream", 2)] {
        let checkpoint = opened(&content(&format!("kinds/{file}.bin"))).unwrap();
        assert_eq!(checkpoint.names().count(), expected.len() - missing, "{file}");
        for name in checkpoint.names() {
            check(&checkpoint, name, &expected[name]);
        }
    }
}

#[test]
fn numbers_that_lie_as_they_are_wanted_are_not_copied() {
    let bytes = content("kinds/zip2.bin");
    let checkpoint = Checkpoint::from_pickle(&fixture("kinds/zip2.bin"), bytes).unwrap();
    let file = checkpoint.files[0].bytes().as_ptr_range();
    let is_in_file = |name| file.contains(&checkpoint.tensor(name).unwrap().bytes().as_ptr());
    for name in ["float32", "float16", "bfloat16", "single", "cube", "one row", "the same", "int64"] {
        assert!(is_in_file(name), "{name}");
    }
    for name in ["float64", "cube, turned", "cube, cut", "overlapping"] {
        assert!(!is_in_file(name), "{name}");
    }
    let place = |name| checkpoint.tensor(name).unwrap().bytes().as_ptr();
    assert_eq!(place("cube"), place("the same"));
}

/// 8-bit float weights are rejected, because it is unknown how a pickle stores their scales.
#[test]
fn quants_of_8_bits_are_refused_by_name() {
    let folder = Scratch::new();
    folder.write("pytorch_model.bin", &content("kinds/zip2.bin"));
    let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
    let error = checkpoint.tensor("float8_e4m3fn").unwrap().quant_type().unwrap_err().to_string();
    assert!(error.contains("F8_E4M3"), "{error}");
}

#[test]
fn a_tensor_that_leaves_its_storage_or_cannot_be_counted_is_refused_by_name() {
    const HUGE: i128 = i64::MAX as i128;
    let two = || storage("FloatStorage", "0", 2);
    let cases = [
        (tensor(two(), 1, &[2], &[1]), "shape [2] with strides [1] from element 1 exceeds the 8 bytes"),
        (tensor(two(), 0, &[2], &[2]), "exceeds the 8 bytes of storage '0'"),
        (tensor(two(), 3, &[0], &[1]), "exceeds the 8 bytes of storage '0'"),
        (tensor(two(), 0, &[3], &[0]), "shape [3] repeats the elements of a storage that has only 2"),
        (tensor(two(), 0, &[HUGE, HUGE], &[0, 0]), "is too large"),
        (tensor(two(), 0, &[2, HUGE], &[HUGE, 1]), "is too large"),
        (tensor(two(), HUGE, &[1], &[1]), "is too large"),
        (tensor(two(), 0, &[2], &[HUGE]), "is too large"),
        (tensor(two(), 0, &[HUGE], &[1]), "is too large"),
        (
            tensor(storage("FloatStorage", "0", 3), 0, &[1], &[1]),
            "has 8 bytes in the file, but 12 in the pickle",
        ),
        (
            tensor(storage("FloatStorage", "0", 1), 0, &[1], &[1]),
            "has 8 bytes in the file, but 4 in the pickle",
        ),
        (tensor(storage("FloatStorage", "1", 2), 0, &[1], &[1]), "its storage '1' is not in the file"),
        (tensor(storage("LongStorage", "0", 1), 0, &[2], &[1]), "exceeds the 8 bytes of storage '0'"),
    ];
    for (value, reason) in cases {
        let error = value_refusal(&dict(&[("good", good_tensor()), ("x", value)]));
        assert!(error.starts_with("tensor 'x': ") && error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// Errors in a tensor before its name is known.
#[test]
fn a_tensor_of_parts_that_are_none_is_refused() {
    const TOO_MANY: [i128; 65] = [1; 65];
    let two = || storage("FloatStorage", "0", 2);
    let cases = [
        (tensor(two(), 0, &[2], &[-1]), "a tensor's strides: -1 is not a valid size"),
        (tensor(two(), 0, &[-2], &[1]), "a tensor's sizes: -2 is not a valid size"),
        (tensor(two(), -1, &[1], &[1]), "a tensor's offset: -1 is not a valid size"),
        (tensor(two(), 1 << 64, &[1], &[1]), "a tensor's offset: 18446744073709551616 is not a valid size"),
        (tensor(two(), 0, &[1, 1], &[1]), "a tensor with 2 sizes and 1 strides"),
        (tensor(two(), 0, &TOO_MANY, &TOO_MANY), "65 dimensions, more than 64"),
        (tensor(int(3), 0, &[1], &[1]), "it creates a tensor from an integer, not from a storage"),
        (storage("FloatStorage", "0", -1), "storage '0': -1 is not a valid size"),
        (storage("ComplexDoubleStorage", "0", (i64::MAX as i128) * 2), "it has too many elements"),
        (storage("float32", "0", 2), "storage '0': torch.float32 is not a storage class"),
        (storage("Size", "0", 2), "storage '0': torch.Size is not a storage class"),
    ];
    for (value, reason) in cases {
        let error = value_refusal(&dict(&[("good", good_tensor()), ("x", value)]));
        assert!(error.starts_with("in the pickle, at byte ") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_state_dict_is_found_under_the_keys_that_training_programs_use() {
    let tensors = || dict(&[("a", good_tensor()), ("b", int(1))]);
    let other = || dict(&[("c", good_tensor())]);
    let found = [
        tensors(),
        dict(&[("epoch", int(3)), ("model", tensors()), ("optimizer", other())]),
        dict(&[("state_dict", dict(&[("module", tensors())]))]),
        dict(&[("module", tensors()), ("model", text("tiny"))]),
        dict(&[("model", tensors()), ("step", good_tensor())]),
    ];
    for value in found {
        let checkpoint = opened(&archive(&value)).unwrap();
        assert!(checkpoint.names().eq(["a"]));
        assert_eq!(*checkpoint.tensor("a").unwrap().bytes(), GOOD_STORAGE);
    }
    let deep = (0..6).fold(tensors(), |inner, _| dict(&[("model", inner)]));
    let long = "x".repeat(1025);
    let cases = [
        (dict(&[("model", tensors()), ("module", other())]), "more than one of model, state_dict, module"),
        (deep, "the state dict is nested more than 4 dicts deep"),
        (dict(&[("a", int(1))]), "the pickle has no named tensors"),
        (dict(&[]), "the pickle has no named tensors"),
        (list(&[good_tensor()]), "the pickle holds a list, not a dict of tensors"),
        (good_tensor(), "the pickle holds a tensor, not a dict"),
        (dict(&[("a", good_tensor()), ("a", good_tensor())]), "tensor 'a': it appears twice"),
        (dict(&[(&long, good_tensor())]), "a tensor's name has 1025 bytes"),
        (
            [b"}".to_vec(), int(1), good_tensor(), b"s".to_vec()].concat(),
            "an integer is used as a tensor's name",
        ),
    ];
    for (value, reason) in cases {
        let error = value_refusal(&value);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}
