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
//! a scale tensor the elements are used as they are.
//! Invariant: an element is its F8_E4M3 value times its scale, rounded once to F32; a NaN stays a NaN. Every
//! scale tensor that is used has been checked to fit, and is no longer a tensor of its own.

use super::folder::Folder;
use super::{Checkpoint, Dtype, HubConfig, Layout, TensorEntry, elements};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// Name of the type in a safetensors header, and in the output of `inspect`.
const DTYPE: &str = "F8_E4M3";
pub(super) const TYPE_NAME: &str = "f8_e4m3";

/// Suffixes of scale tensors, after the name of the tensor they scale.
const SCALE_SUFFIXES: [&str; 2] = ["_scale", "_scale_inv"];

/// Suffixes of the scales of activations, keys or values. They are unused: activations are not rounded to 8
/// bits here.
const ACTIVATION_SCALE_SUFFIXES: [&str; 8] = [
    ".input_scale",
    ".input_scale_ub",
    ".output_scale",
    ".activation_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
];

/// The format below the sign bit: exponent bias, fraction bits, and the one pattern that is a NaN.
const EXPONENT_BIAS: i32 = 7;
const FRACTION_BITS: u32 = 3;
const NAN: u8 = 0x7f;

/// Location of an F8_E4M3 tensor's scales.
#[derive(Debug)]
pub(super) struct Fp8Layout {
    /// File index, byte range and type of the scales; `None` if there are none.
    pub(super) scales: Option<(usize, Range<usize>, QuantType)>,
    columns: usize,
    /// Rows and columns that share a scale; neither is 0.
    block: [usize; 2],
}

impl Fp8Layout {
    /// Bytes of `codes` elements as F32.
    pub(super) fn output_bytes(&self, codes: usize) -> usize {
        codes * size_of::<f32>()
    }

    /// Multiplies F8_E4M3 elements by their scales and returns them as F32.
    pub(super) fn dequantize(&self, codes: &[u8], scales: &[u8]) -> Vec<u8> {
        let scales = self.scales(scales);
        let [rows, columns] = self.block;
        let across = self.columns.div_ceil(columns);
        let values: Vec<f32> = (0..=u8::MAX).map(decode_f8_e4m3).collect();
        let mut numbers = Vec::with_capacity(self.output_bytes(codes.len()));
        for (row, codes) in codes.chunks_exact(self.columns.max(1)).enumerate() {
            let scales = &scales[row / rows * across..][..across];
            for (codes, scale) in codes.chunks(columns).zip(scales) {
                numbers
                    .extend(codes.iter().flat_map(|code| (values[usize::from(*code)] * scale).to_le_bytes()));
            }
        }
        numbers
    }

    fn scales(&self, bytes: &[u8]) -> Vec<f32> {
        let Some((_, _, ty)) = &self.scales else { return vec![1.0] };
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

impl Checkpoint {
    /// Attaches the scale tensors to every F8_E4M3 tensor.
    pub(super) fn attach_fp8_scales(&mut self, folder: &Folder) -> Result<()> {
        let is_coded = |entry: &TensorEntry| entry.dtype == Dtype::Unsupported(DTYPE.to_owned());
        let names = self.tensors.iter().filter(|(_, entry)| is_coded(entry)).map(|(name, _)| name.clone());
        let names: Vec<String> = names.collect();
        let block = if names.is_empty() { None } else { block_size(folder)? };
        for name in names {
            let file = self.files[self.tensors[&name].file].path().display().to_string();
            self.attach_scales_to(&name, block).with_context(|| format!("{file}: tensor '{name}'"))?;
        }
        Ok(())
    }

    fn attach_scales_to(&mut self, name: &str, block: Option<[usize; 2]>) -> Result<()> {
        let found = SCALE_SUFFIXES.map(|end| format!("{name}{end}"));
        let mut found = found.iter().filter_map(|scales| self.tensors.remove_entry(scales));
        let (scales, other) = (found.next(), found.next());
        if let (Some((one, _)), Some((other, _))) = (&scales, &other) {
            bail!("it has two scale tensors, '{one}' and '{other}'");
        }
        let entry = self.tensors.get_mut(name).context("the name comes from this map; this is a bug")?;
        let held = entry.bytes.len();
        let &[rows, columns] = &entry.shape[..] else {
            bail!("shape {:?} of {DTYPE} is not a matrix", entry.shape)
        };
        let fits = elements(&entry.shape) == Some(held);
        ensure!(fits, "shape {:?} of {DTYPE} does not match its {held} bytes", entry.shape);
        let whole = [rows.max(1), columns.max(1)];
        let scaled = match scales {
            None => Fp8Layout { scales: None, columns, block: whole },
            Some((scales, entry)) => {
                let block = scale_block_shape(&entry.shape, [rows, columns], block).with_context(|| {
                    format!(
                        "scales '{scales}' of shape {:?} do not fit {rows} x {columns} elements",
                        entry.shape
                    )
                })?;
                let ty = match (&entry.dtype, &entry.layout) {
                    (Dtype::Known(ty), Layout::Dense) if !ty.is_blocked() => *ty,
                    (Dtype::Known(ty), _) => {
                        bail!("scales '{scales}' have the unsupported type {ty}")
                    }
                    (Dtype::Unsupported(ty), _) => {
                        bail!("scales '{scales}' have the unsupported type {ty}")
                    }
                };
                Fp8Layout { scales: Some((entry.file, entry.bytes, ty)), columns, block }
            }
        };
        entry.dtype = Dtype::Known(QuantType::F32);
        entry.layout = Layout::Fp8(scaled);
        Ok(())
    }

    /// Whether a tensor is an activation scale of a model with F8_E4M3 weights. Such a tensor is not a weight
    /// and can be ignored.
    pub fn is_activation_scale(&self, name: &str) -> bool {
        let is_scaled = |entry: &TensorEntry| matches!(entry.layout, Layout::Fp8(_));
        ACTIVATION_SCALE_SUFFIXES.iter().any(|end| name.ends_with(end))
            && self.tensors.values().any(is_scaled)
    }
}

/// Returns the rows and columns that share a scale, given the shape of the scale tensor; `None` if it does
/// not fit.
fn scale_block_shape(
    scales: &[usize],
    [rows, columns]: [usize; 2],
    block: Option<[usize; 2]>,
) -> Option<[usize; 2]> {
    let whole = [rows.max(1), columns.max(1)];
    let of_blocks = block.filter(|[r, c]| scales == [rows.div_ceil(*r), columns.div_ceil(*c)]);
    match scales {
        _ if of_blocks.is_some() => of_blocks,
        [] | [1] | [1, 1] => Some(whole),
        [count] | [count, 1] if *count == rows => Some([1, whole[1]]),
        _ => None,
    }
}

/// Returns the scale block size from config.json, if it has one.
fn block_size(folder: &Folder) -> Result<Option<[usize; 2]>> {
    const SECTION: &str = "quantization_config";
    const KEY: &str = "weight_block_size";
    let Some(config) = HubConfig::read_if_present(folder, "config.json")? else { return Ok(None) };
    let Some(section) = config.section(SECTION)? else { return Ok(None) };
    section.typed(KEY, "two positive integers", |value| {
        let numbers = value.as_array()?.iter().map(|number| number.as_u64().filter(|number| *number > 0));
        let numbers: Vec<usize> = numbers.map(|number| number?.try_into().ok()).collect::<Option<_>>()?;
        numbers.try_into().ok()
    })
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
        let recorded = include_bytes!("../../tests/fixtures/f8/e4m3.bin");
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

    fn numbers(folder: &Scratch) -> Vec<f32> {
        let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
        assert!(checkpoint.names().eq(["w"]));
        let tensor = checkpoint.tensor("w").unwrap();
        let bytes = tensor.bytes();
        assert_eq!(
            (tensor.bytes_len(), tensor.stored_len(), tensor.stored_type_name()),
            (bytes.len(), 12, TYPE_NAME)
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
            assert_eq!(numbers(&folder(name, shape, block, &[])), expected, "{name} {shape:?} {block:?}");
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
    fn scales_in_blocks_are_refused_by_their_type() {
        let folder = folder_of([2, 64], Some([1, 2]), &[tensor("w_scale", QuantType::Q8_0, &[2, 32])]);
        let error = format!("{:#}", Checkpoint::open_folder(&folder.folder()).unwrap_err());
        assert!(error.contains("'w_scale' have the unsupported type q8_0"), "{error}");
    }

    #[test]
    fn scales_of_activations_are_known_beside_such_weights_only() {
        let folder = folder("w_scale", &[1], None, &["w.input_scale", "other_scale"]);
        let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
        assert!(checkpoint.names().eq(["other_scale", "w", "w.input_scale"]));
        assert!(
            checkpoint.is_activation_scale("w.input_scale") && !checkpoint.is_activation_scale("other_scale")
        );
        let plain = Checkpoint::from_buffer("t".as_ref(), Vec::new(), QuantType::F32, []);
        assert!(!plain.is_activation_scale("w.input_scale"));
    }
}
