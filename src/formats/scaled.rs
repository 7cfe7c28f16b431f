//! Numbers of 8 bits, F8_E4M3, whose scales are a tensor of their own: one for all, one for each row, or one for each block of
//! rows and columns.
//!
//! | tensor | is |
//! |---|---|
//! | NAME | codes of shape (out, in), a byte each |
//! | NAME`_scale` or NAME`_scale_inv` | what they are multiplied by; in spite of its name the second is no inverse |
//!
//! A scale has the shape () or (1), (out) or (out, 1), or with `weight_block_size` [rows, columns] of config.json's
//! `quantization_config` that of the blocks, of which the last ones may be smaller. Without a scale codes are numbers as they are.
//! Invariant: a number is its code's value times its scale, rounded once, to an F32; a NaN stays one. Every scale that counts
//! is known to fit, and no longer a tensor by itself.

use super::folder::Folder;
use super::{Checkpoint, Dtype, Entry, HubConfig, Layout, elements};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// The type's name in a file, and what `inspect` calls it.
const DTYPE: &str = "F8_E4M3";
pub(super) const NAME: &str = "f8_e4m3";

/// How names of scales end, behind that of what they scale.
const SCALES: [&str; 2] = ["_scale", "_scale_inv"];

/// How names of scales end that are for activations, keys or values: those are not rounded to 8 bits here.
const OF_ACTIVATIONS: [&str; 8] = [
    ".input_scale",
    ".input_scale_ub",
    ".output_scale",
    ".activation_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
];

/// Numbers of one sign: 7 bits of exponent and fraction. The last one is a NaN.
const EXPONENT_BIAS: i32 = 7;
const FRACTION_BITS: u32 = 3;
const NAN: u8 = 0x7f;

/// Where the scales of a tensor's codes are.
#[derive(Debug)]
pub(super) struct Scaled {
    /// The file, its bytes, and the scales' type; `None` where there are none.
    pub(super) scales: Option<(usize, Range<usize>, QuantType)>,
    columns: usize,
    /// Rows and columns that share a scale, neither 0.
    block: [usize; 2],
}

impl Scaled {
    /// Bytes of so many numbers as they are wanted.
    pub(super) fn wanted_bytes(&self, codes: usize) -> usize {
        codes * size_of::<f32>()
    }

    /// The numbers of these codes and scales, in F32.
    pub(super) fn numbers(&self, codes: &[u8], scales: &[u8]) -> Vec<u8> {
        let scales = self.scales(scales);
        let [rows, columns] = self.block;
        let across = self.columns.div_ceil(columns);
        let values: Vec<f32> = (0..=u8::MAX).map(value).collect();
        let mut numbers = Vec::with_capacity(self.wanted_bytes(codes.len()));
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

/// What a code stands for: a sign, 4 bits of exponent and 3 of fraction, without infinities.
fn value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> FRACTION_BITS & 15), f32::from(code & 7));
    let size = match (code & NAN, exponent) {
        (NAN, _) => f32::NAN,
        (_, 0) => fraction / 8.0 * 2f32.powi(1 - EXPONENT_BIAS),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - EXPONENT_BIAS),
    };
    if code > NAN { -size } else { size }
}

impl Checkpoint {
    /// Takes every tensor of such codes together with its scales.
    pub(super) fn settle_scales(&mut self, folder: &Folder) -> Result<()> {
        let is_coded = |entry: &Entry| entry.dtype == Dtype::Foreign(DTYPE.to_owned());
        let names = self.tensors.iter().filter(|(_, entry)| is_coded(entry)).map(|(name, _)| name.clone());
        let names: Vec<String> = names.collect();
        let block = if names.is_empty() { None } else { block_size(folder)? };
        for name in names {
            let file = self.files[self.tensors[&name].file].path().display().to_string();
            self.settle(&name, block).with_context(|| format!("{file}: tensor '{name}'"))?;
        }
        Ok(())
    }

    fn settle(&mut self, name: &str, block: Option<[usize; 2]>) -> Result<()> {
        let found = SCALES.map(|end| format!("{name}{end}"));
        let mut found = found.iter().filter_map(|scales| self.tensors.remove_entry(scales));
        let (scales, other) = (found.next(), found.next());
        if let (Some((one, _)), Some((other, _))) = (&scales, &other) {
            bail!("it has two tensors of scales, '{one}' and '{other}'");
        }
        let entry = self.tensors.get_mut(name).context("it was there; this is a bug")?;
        let held = entry.bytes.len();
        let &[rows, columns] = &entry.shape[..] else {
            bail!("{DTYPE} of shape {:?} is no matrix", entry.shape)
        };
        let fits = elements(&entry.shape) == Some(held);
        ensure!(fits, "shape {:?} of {DTYPE} does not have {held} bytes", entry.shape);
        let whole = [rows.max(1), columns.max(1)];
        let scaled = match scales {
            None => Scaled { scales: None, columns, block: whole },
            Some((scales, entry)) => {
                let block = shared_by(&entry.shape, [rows, columns], block).with_context(|| {
                    format!(
                        "scales '{scales}' of shape {:?} do not fit {rows} x {columns} numbers",
                        entry.shape
                    )
                })?;
                let ty = match (&entry.dtype, &entry.layout) {
                    (Dtype::Known(ty), Layout::Dense) if !ty.is_blocked() => *ty,
                    (Dtype::Known(ty), _) => {
                        bail!("scales '{scales}' are {ty}, which scales are not read in")
                    }
                    (Dtype::Foreign(ty), _) => {
                        bail!("scales '{scales}' are {ty}, which scales are not read in")
                    }
                };
                Scaled { scales: Some((entry.file, entry.bytes, ty)), columns, block }
            }
        };
        entry.dtype = Dtype::Known(QuantType::F32);
        entry.layout = Layout::Scaled(scaled);
        Ok(())
    }

    /// Whether a tensor scales activations of a model whose weights are such codes: no weight, and nothing is lost without it.
    pub fn scales_activations(&self, name: &str) -> bool {
        let is_scaled = |entry: &Entry| matches!(entry.layout, Layout::Scaled(_));
        OF_ACTIVATIONS.iter().any(|end| name.ends_with(end)) && self.tensors.values().any(is_scaled)
    }
}

/// Rows and columns that share a scale, of scales of that shape.
fn shared_by(scales: &[usize], [rows, columns]: [usize; 2], block: Option<[usize; 2]>) -> Option<[usize; 2]> {
    let whole = [rows.max(1), columns.max(1)];
    let of_blocks = block.filter(|[r, c]| scales == [rows.div_ceil(*r), columns.div_ceil(*c)]);
    match scales {
        _ if of_blocks.is_some() => of_blocks,
        [] | [1] | [1, 1] => Some(whole),
        [count] | [count, 1] if *count == rows => Some([1, whole[1]]),
        _ => None,
    }
}

/// Of the blocks that have a scale each, if config.json says so.
fn block_size(folder: &Folder) -> Result<Option<[usize; 2]>> {
    const SECTION: &str = "quantization_config";
    const KEY: &str = "weight_block_size";
    let Some(config) = HubConfig::read_if_present(folder, "config.json")? else { return Ok(None) };
    let Some(section) = config.section(SECTION)? else { return Ok(None) };
    section.typed(KEY, "two whole numbers above 0", |value| {
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

    /// As PyTorch reads each code (tests/oracle/make_f8.py).
    #[test]
    fn every_code_has_pytorchs_value() {
        let recorded = include_bytes!("../../tests/fixtures/f8/e4m3.bin");
        let (recorded, _) = recorded.as_chunks::<4>();
        assert_eq!(recorded.len(), 256);
        for (code, recorded) in (0..=u8::MAX).zip(recorded) {
            let (value, recorded) = (value(code), f32::from_le_bytes(*recorded));
            let same = value.to_bits() == recorded.to_bits() || value.is_nan() && recorded.is_nan();
            assert!(same, "{code:#04x}: {value}, recorded {recorded}");
        }
    }

    /// A folder with 3 x 4 codes, whose scales in F32 have that shape and name.
    fn folder(name: &str, shape: &[usize], block: Option<[usize; 2]>, more: &[&str]) -> Scratch {
        let one = tensor(name, QuantType::F32, shape);
        let tensors: Vec<SavedTensor> =
            [one].into_iter().chain(more.iter().map(|name| tensor(name, QuantType::F32, &[1]))).collect();
        folder_of([3, 4], block, &tensors)
    }

    fn tensor(name: &str, ty: QuantType, shape: &[usize]) -> SavedTensor {
        SavedTensor { name: name.to_owned(), ty, shape: shape.to_vec(), turned: false }
    }

    /// Codes of that shape, behind tensors of 1, 2, 3, ...
    fn folder_of([rows, columns]: [usize; 2], block: Option<[usize; 2]>, tensors: &[SavedTensor]) -> Scratch {
        let folder = Scratch::new();
        let (files, _) = safetensors_files(tensors, usize::MAX);
        let numbers: usize = tensors.iter().map(|tensor| tensor.bytes() / 4).sum();
        let text = String::from_utf8(files[0].head[8..].to_vec()).unwrap();
        let codes = json!({
            "dtype": "F8_E4M3", "shape": [rows, columns],
            "data_offsets": [4 * numbers, 4 * numbers + rows * columns],
        });
        let text = format!(r#"{},"w":{codes}}}"#, text.trim_end().strip_suffix('}').unwrap());
        let mut bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        bytes.extend((1..=numbers).flat_map(|number| (number as f32).to_le_bytes()));
        // Each stands for 1.
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
        assert_eq!((tensor.bytes_len(), tensor.stored_len(), tensor.stored_name()), (bytes.len(), 12, NAME));
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
            ("w_scale", &[1], None, &["w_scale_inv"], "two tensors of scales"),
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
        assert!(error.contains("'w_scale' are q8_0"), "{error}");
    }

    #[test]
    fn scales_of_activations_are_known_beside_such_weights_only() {
        let folder = folder("w_scale", &[1], None, &["w.input_scale", "other_scale"]);
        let checkpoint = Checkpoint::open_folder(&folder.folder()).unwrap();
        assert!(checkpoint.names().eq(["other_scale", "w", "w.input_scale"]));
        assert!(
            checkpoint.scales_activations("w.input_scale") && !checkpoint.scales_activations("other_scale")
        );
        let plain = Checkpoint::from_buffer("t".as_ref(), Vec::new(), QuantType::F32, []);
        assert!(!plain.scales_activations("w.input_scale"));
    }
}
