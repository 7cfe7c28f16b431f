//! F8_E4M3 weights (8-bit floats) with scales in a separate tensor: one per tensor, one per row, or one per
//! block of rows and columns.
//!
//! | tensor | content |
//! |---|---|
//! | NAME | F8_E4M3 elements of shape (N, K), one byte each |
//! | NAME`_scale` or NAME`_scale_inv` | their multipliers; despite its name, the second is not an inverse |
//!
//! A scale tensor has the shape () or (1), (N) or (N, 1), or, with `weight_block_size` [rows, columns] in
//! config.json's `quantization_config`, one element per block, where the last blocks may be smaller. Without
//! a scale tensor the elements are used as they are; with a known `quant_method` there has to be one.
//! Invariant: an element is its F8_E4M3 value times its scale, rounded once to F32; a NaN stays a NaN. Every
//! scale tensor that is used has been checked to fit, and is no longer a tensor of its own.

use super::super::{Checkpoint, Dtype, TensorEntry};
use super::method::Method;
use super::stored::{FLOATS, Module};
use super::{Encoded, Encoding};
use anyhow::{Context, Result, bail};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// Name of the type in a safetensors header, and in the output of `inspect`.
pub(super) const DTYPE: &str = "F8_E4M3";
pub(super) const TYPE_NAME: &str = "f8_e4m3";

/// Suffixes of scale tensors, after the name of the tensor they scale.
const SCALE_SUFFIXES: [&str; 2] = ["_scale", "_scale_inv"];

/// Suffixes of the scales and zero points of activations, keys or values. They are unused: activations are
/// not rounded to 8 bits here.
const ACTIVATION_SCALE_SUFFIXES: [&str; 13] = [
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".q_scale",
    ".k_scale",
    ".k_zero_point",
    ".v_scale",
    ".v_zero_point",
    ".kv_scale",
    ".prob_scale",
];

/// The format below the sign bit: exponent bias, fraction bits, and the one pattern that is a NaN.
const EXPONENT_BIAS: i32 = 7;
const FRACTION_BITS: u32 = 3;
const NAN: u8 = 0x7f;

/// Scales of an F8_E4M3 tensor.
#[derive(Debug)]
pub(super) struct Fp8 {
    /// Type of the scales, which are the second part; `None` if there are none.
    scales: Option<QuantType>,
    /// Rows and columns that share a scale; neither is 0.
    block: [usize; 2],
}

impl Fp8 {
    /// Appends rows of a matrix with so many columns as F32.
    pub(super) fn decode(&self, parts: &[&[u8]], (rows, columns): (Range<usize>, usize), out: &mut Vec<u8>) {
        let scales = self.scales(parts.get(1).copied());
        let [block_rows, block_columns] = self.block;
        let across = columns.div_ceil(block_columns);
        let values: Vec<f32> = (0..=u8::MAX).map(decode_f8_e4m3).collect();
        for row in rows {
            let scales = &scales[row / block_rows * across..][..across];
            let quants = parts[0][row * columns..][..columns].chunks(block_columns);
            for (quants, scale) in quants.zip(scales) {
                out.extend(
                    quants.iter().flat_map(|quant| (values[usize::from(*quant)] * scale).to_le_bytes()),
                );
            }
        }
    }

    fn scales(&self, bytes: Option<&[u8]>) -> Vec<f32> {
        let (Some(bytes), Some(ty)) = (bytes, self.scales) else { return vec![1.0] };
        let mut scales = vec![0.0; bytes.len() / ty.row().block_bytes];
        ty.dequantize(bytes, &mut scales);
        scales
    }
}

/// Decodes an F8_E4M3 element: a sign, 4 exponent bits and 3 fraction bits, without infinities.
fn decode_f8_e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> FRACTION_BITS & 15), f32::from(code & 7));
    let size = match (code & NAN, exponent) {
        (NAN, _) => f32::NAN,
        (_, 0) => fraction / 8.0 * 2f32.powi(1 - EXPONENT_BIAS),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - EXPONENT_BIAS),
    };
    if code > NAN { -size } else { size }
}

/// Attaches the scale tensors to every F8_E4M3 matrix. Without a known method, a matrix need not have one.
pub(super) fn attach(checkpoint: &mut Checkpoint, method: Option<&Method>) -> Result<()> {
    let is_encoded = |entry: &TensorEntry| entry.dtype == Dtype::Unsupported(DTYPE.to_owned());
    checkpoint.attach_each(["", ""], is_encoded, |module| matrix(module, method))
}

fn matrix(module: &mut Module, method: Option<&Method>) -> Result<(Vec<usize>, Encoded)> {
    let quants = module.take("")?;
    let found = SCALE_SUFFIXES.map(|suffix| module.take_if_stored(suffix));
    let scales = match found {
        [Some(one), Some(other)] => {
            bail!("it has two scale tensors, '{}' and '{}'", one.name, other.name)
        }
        [one, other] => one.or(other),
    };
    let &[rows, columns] = &quants.shape[..] else {
        bail!("shape {:?} of {DTYPE} is not a matrix", quants.shape)
    };
    quants.check(&[DTYPE], &[rows, columns])?;
    let fp8 = match &scales {
        None if !matches!(method, None | Some(Method::Other(..))) => {
            bail!("'{}_scale' is missing, which belongs to it", quants.name)
        }
        None => Fp8 { scales: None, block: [rows.max(1), columns.max(1)] },
        Some(scales) => {
            let block = scale_block_shape(&scales.shape, [rows, columns], method).with_context(|| {
                let (name, shape) = (&scales.name, &scales.shape);
                format!("scales '{name}' of shape {shape:?} do not fit {rows} x {columns} elements")
            })?;
            scales.check(&FLOATS, &scales.shape)?;
            Fp8 { scales: Some(scales.float_type()?), block }
        }
    };
    let encoded = Encoded {
        parts: [quants].into_iter().chain(scales).collect(),
        rows,
        columns,
        encoding: Encoding::Fp8(fp8),
        ty: QuantType::F32,
        // Three fraction bits need no more.
        load_type: QuantType::BF16,
        has_zero_bias: false,
    };
    Ok((vec![rows, columns], encoded))
}

/// Whether a tensor is named like a scale of activations. Such a tensor is not a weight.
pub(super) fn is_activation_scale(name: &str) -> bool {
    ACTIVATION_SCALE_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

/// Returns the rows and columns that share a scale, given the shape of the scale tensor; `None` if it does
/// not fit.
fn scale_block_shape(
    scales: &[usize],
    [rows, columns]: [usize; 2],
    method: Option<&Method>,
) -> Option<[usize; 2]> {
    let whole = [rows.max(1), columns.max(1)];
    let fits = |[r, c]: &&[usize; 2]| scales == [rows.div_ceil(*r), columns.div_ceil(*c)];
    let of_blocks = method.and_then(|method| method.blocks().iter().find(fits)).copied();
    match scales {
        _ if of_blocks.is_some() => of_blocks,
        [] | [1] | [1, 1] => Some(whole),
        [count] | [count, 1] if *count == rows => Some([1, whole[1]]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::save::{SavedTensor, safetensors_files};
    use crate::testing::Scratch;
    use serde_json::json;

    /// Compares with the values PyTorch decodes (tests/oracle/make_f8.py).
    #[test]
    fn every_code_has_pytorchs_value() {
        let recorded = include_bytes!("../../../tests/fixtures/f8/e4m3.bin");
        let (recorded, _) = recorded.as_chunks::<4>();
        assert_eq!(recorded.len(), 256);
        for (code, recorded) in (0..=u8::MAX).zip(recorded) {
            let (value, recorded) = (decode_f8_e4m3(code), f32::from_le_bytes(*recorded));
            let same = value.to_bits() == recorded.to_bits() || value.is_nan() && recorded.is_nan();
            assert!(same, "{code:#04x}: {value}, recorded {recorded}");
        }
    }

    /// A folder with a 3 x 4 F8_E4M3 matrix "w", a scale tensor of this name and shape, and further tensors
    /// `more`.
    fn folder(name: &str, shape: &[usize], block: Option<[usize; 2]>, more: &[&str]) -> Scratch {
        let one = tensor(name, QuantType::F32, shape);
        let tensors: Vec<SavedTensor> =
            [one].into_iter().chain(more.iter().map(|name| tensor(name, QuantType::F32, &[1]))).collect();
        folder_of([3, 4], block, &tensors)
    }

    fn tensor(name: &str, ty: QuantType, shape: &[usize]) -> SavedTensor {
        SavedTensor { name: name.to_owned(), ty, shape: shape.to_vec(), transposed: false }
    }

    /// A folder with an F8_E4M3 matrix "w" of ones after F32 tensors with the elements 1, 2, 3, ...
    fn folder_of([rows, columns]: [usize; 2], block: Option<[usize; 2]>, tensors: &[SavedTensor]) -> Scratch {
        let folder = Scratch::new();
        let (files, _) = safetensors_files(tensors, usize::MAX);
        let numbers: usize = tensors.iter().map(|tensor| tensor.bytes() / 4).sum();
        let text = String::from_utf8(files[0].header[8..].to_vec()).unwrap();
        let codes = json!({
            "dtype": "F8_E4M3", "shape": [rows, columns],
            "data_offsets": [4 * numbers, 4 * numbers + rows * columns],
        });
        let text = format!(r#"{},"w":{codes}}}"#, text.trim_end().strip_suffix('}').unwrap());
        let mut bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        bytes.extend((1..=numbers).flat_map(|number| (number as f32).to_le_bytes()));
        // 0x38 encodes 1.
        bytes.extend(vec![0x38; rows * columns]);
        folder.write("model.safetensors", &bytes);
        let config = json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": block } });
        folder.write("config.json", config.to_string().as_bytes());
        folder
    }

    /// The numbers of a folder's matrix "w", which has so many scales.
    fn numbers(folder: &Scratch, scales: usize) -> Vec<f32> {
        let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
        assert!(checkpoint.names().eq(["w"]));
        let tensor = checkpoint.tensor("w").unwrap();
        let bytes = tensor.bytes();
        assert_eq!(
            (tensor.bytes_len(), tensor.stored_len(), tensor.stored_type_name()),
            (bytes.len(), 12 + scales * size_of::<f32>(), TYPE_NAME)
        );
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn a_number_is_its_code_times_the_scale_of_its_place() {
        for (name, shape, block, expected) in [
            ("w_scale", &[][..], None, [1.; 12]),
            ("w_scale_inv", &[1], Some([2, 3]), [1.; 12]),
            ("w_scale", &[3, 1], None, [1., 1., 1., 1., 2., 2., 2., 2., 3., 3., 3., 3.]),
            ("w_scale", &[3], Some([2, 3]), [1., 1., 1., 1., 2., 2., 2., 2., 3., 3., 3., 3.]),
            ("w_scale_inv", &[2, 2], Some([2, 3]), [1., 1., 1., 2., 1., 1., 1., 2., 3., 3., 3., 4.]),
            ("w_scale", &[3, 2], Some([1, 2]), [1., 1., 2., 2., 3., 3., 4., 4., 5., 5., 6., 6.]),
        ] {
            let scales = shape.iter().product();
            let found = numbers(&folder(name, shape, block, &[]), scales);
            assert_eq!(found, expected, "{name} {shape:?} {block:?}");
        }
    }

    #[test]
    fn scales_that_do_not_fit_are_refused_with_their_tensor() {
        for (name, shape, block, more, reason) in [
            ("w_scale", &[4][..], None, &[][..], "scales 'w_scale' of shape [4] do not fit 3 x 4"),
            ("w_scale_inv", &[2, 2], None, &[], "do not fit"),
            ("w_scale_inv", &[2, 2], Some([2, 4]), &[], "do not fit"),
            ("w_scale_inv", &[2, 2], Some([0, 4]), &[], "'quantization_config.weight_block_size'"),
            ("w_scale", &[1], None, &["w_scale_inv"], "two scale tensors"),
        ] {
            let folder = folder(name, shape, block, more);
            let error = format!("{:#}", Checkpoint::open_folder(&folder.folder()).unwrap_err());
            assert!(error.contains(reason), "{error}\nexpected: {reason}");
        }
    }

    #[test]
    fn methods_that_are_not_known_may_have_such_weights() {
        for (method, more) in [
            (json!({ "quant_method": "modelopt", "quant_algo": "FP8" }), &[][..]),
            (json!({ "quant_method": "quark" }), &[]),
            (json!({ "weight_block_size": [2, 3] }), &["w.input_scale"]),
        ] {
            let has_blocks = method.get("weight_block_size").is_some();
            let folder = folder("w_scale", if has_blocks { &[2, 2] } else { &[3] }, None, more);
            let config = json!({ "quantization_config": method });
            folder.write("config.json", config.to_string().as_bytes());
            let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
            let last = checkpoint.tensor("w").unwrap().bytes().as_chunks().0.last().copied().unwrap();
            assert_eq!(f32::from_le_bytes(last), if has_blocks { 4.0 } else { 3.0 }, "{method}");
        }
        // A known method in a variant that is not supported.
        let folder = folder("w_scale", &[3], None, &[]);
        folder.write("config.json", br#"{"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}"#);
        assert!(Checkpoint::open_folder(&folder.folder()).is_err());
    }

    #[test]
    fn dequantized_weights_may_keep_the_method_they_had() {
        for config in [
            json!({ "quant_method": "gptq", "bits": 3, "group_size": 128 }),
            json!({ "quant_method": "bitsandbytes", "load_in_4bit": true }),
        ] {
            let folder = Scratch::new();
            let (files, _) = safetensors_files(&[tensor("w", QuantType::F32, &[1])], usize::MAX);
            folder.write("model.safetensors", &[&files[0].header[..], &[0; 4]].concat());
            folder.write("config.json", json!({ "quantization_config": config }).to_string().as_bytes());
            assert!(Checkpoint::open_folder(&folder.folder()).unwrap().names().eq(["w"]), "{config}");
        }
    }

    #[test]
    fn scales_in_blocks_are_refused_by_their_type() {
        let folder = folder_of([2, 64], Some([1, 2]), &[tensor("w_scale", QuantType::Q8_0, &[2, 32])]);
        let error = format!("{:#}", Checkpoint::open_folder(&folder.folder()).unwrap_err());
        assert!(error.contains("'w_scale' is q8_0 [2, 32], but it has to be F16 or BF16 or F32"), "{error}");
    }

    #[test]
    fn scales_of_activations_are_known_beside_such_weights_only() {
        let folder = folder("w_scale", &[1], None, &["w.input_scale", "other_scale"]);
        let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
        assert!(checkpoint.names().eq(["other_scale", "w", "w.input_scale"]));
        for name in ["kv_scale", "k_zero_point", "v_zero_point", "output_zero_point"] {
            assert!(checkpoint.unused_reason(&format!("w.{name}")).is_some(), "{name}");
        }
        let is_unused = |name: &str| checkpoint.unused_reason(name).is_some();
        assert!(is_unused("w.input_scale") && !is_unused("other_scale"));
        let plain = Checkpoint::from_buffer("t".as_ref(), Vec::new(), QuantType::F32, []);
        assert_eq!(plain.unused_reason("w.input_scale"), None);
    }
}
