//! Stored encodings: matrices whose rows are decoded from several stored tensors, such as integers and their
//! scales.
//!
//! | encoding | stored tensors of a matrix NAME`.weight` | file |
//! |---|---|---|
//! | GPTQ | NAME`.qweight`, `.scales`, `.qzeros`, `.g_idx` | gptq.rs |
//! | AWQ | NAME`.qweight`, `.scales`, `.qzeros` | gptq.rs |
//! | compressed-tensors | NAME`.weight_packed` or `.weight`, `.weight_scale` and others | compressed.rs |
//! | F8_E4M3 | NAME`.weight`, `.weight_scale` or `.weight_scale_inv` | fp8.rs |
//! | MXFP4 | NAME`_blocks`, NAME`_scales`, of a stack of matrices NAME | mxfp4.rs |
//! | CTranslate2 | NAME, NAME`_scale` | divided.rs |
//!
//! config.json's `quantization_config` names the method (method.rs). Which matrices are encoded is decided by
//! the tensors in the files.
//!
//! A matrix becomes one tensor. Its type is a block format if this represents every value exactly, otherwise
//! F32: an integer times its scale is then rounded once to F32.
//! Invariant: all stored tensors of an encoded matrix have been checked to fit each other, and are no longer
//! tensors of their own. Of their data, only group indices, zero points and scales are read before the matrix
//! is: they decide its type.

mod compressed;
pub(super) mod divided;
mod fp8;
mod gptq;
mod integers;
mod method;
mod mxfp4;
mod packing;
mod stored;

use self::divided::Divided;
use self::fp8::Fp8;
use self::integers::Integers;
use self::method::Method;
use self::stored::{Module, StoredPart};
use super::folder::{FileBytes, Folder};
use super::{Checkpoint, Dtype, Layout, TensorEntry};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// A matrix, or a stack of matrices, that is decoded from several stored tensors.
#[derive(Debug)]
pub(super) struct Encoded {
    /// The stored tensors, in the order that the encoding defines. The first one has the quants.
    parts: Vec<StoredPart>,
    /// Rows of all matrices (out), and columns (in).
    rows: usize,
    columns: usize,
    encoding: Encoding,
    /// Type of the decoded elements.
    ty: QuantType,
    /// Type in which the matrix is loaded by default.
    load_type: QuantType,
    /// Whether a bias is stored whose elements are all 0, which some packages add to layers without a bias.
    has_zero_bias: bool,
}

#[derive(Debug)]
enum Encoding {
    Integers(Integers),
    Fp8(Fp8),
    Mxfp4,
    Divided(Divided),
}

impl Encoded {
    /// Bytes of the decoded elements.
    pub(super) fn decoded_bytes(&self) -> usize {
        self.row_bytes() * self.rows
    }

    fn row_bytes(&self) -> usize {
        self.ty.bytes(self.columns).expect("the type was chosen for the width of a row; this is a bug")
    }

    /// Bytes of all stored tensors.
    pub(super) fn stored_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes.len()).sum()
    }

    /// Decodes all rows.
    pub(super) fn decode(&self, files: &[FileBytes]) -> Vec<u8> {
        self.decode_rows(0..self.rows, files)
    }

    /// Decodes a range of rows. Those of stacked matrices are numbered consecutively.
    pub(super) fn decode_rows(&self, rows: Range<usize>, files: &[FileBytes]) -> Vec<u8> {
        let parts: Vec<&[u8]> = self.parts.iter().map(|part| part.data(files)).collect();
        let mut out = Vec::with_capacity(rows.len() * self.row_bytes());
        match &self.encoding {
            Encoding::Integers(integers) => {
                integers.decode(&parts, (rows, self.columns), self.ty, &mut out);
            }
            Encoding::Fp8(fp8) => fp8.decode(&parts, (rows, self.columns), &mut out),
            Encoding::Mxfp4 => mxfp4::decode(&parts, (rows, self.columns), &mut out),
            Encoding::Divided(divided) => {
                divided.decode(&parts, (rows, [self.rows, self.columns]), self.ty, &mut out);
            }
        }
        out
    }

    /// Type of the decoded elements.
    pub(super) fn ty(&self) -> QuantType {
        self.ty
    }

    /// Returns the file and the bytes of the quants.
    pub(super) fn place(&self) -> (usize, Range<usize>) {
        (self.parts[0].file, self.parts[0].bytes.clone())
    }

    /// Name of the encoding in the output of `inspect`.
    pub(super) fn name(&self) -> &'static str {
        match &self.encoding {
            Encoding::Integers(integers) => integers.name,
            Encoding::Fp8(_) => fp8::TYPE_NAME,
            Encoding::Mxfp4 => mxfp4::TYPE_NAME,
            Encoding::Divided(divided) => divided.name(),
        }
    }

    /// Type in which the matrix is loaded by default.
    pub(super) fn load_type(&self) -> QuantType {
        self.load_type
    }

    /// Releases the memory of the stored tensors.
    pub(super) fn release(&self, files: &[FileBytes]) {
        self.parts.iter().for_each(|part| files[part.file].release(part.bytes.clone()));
    }

    /// Shifts the file indices by `files`.
    pub(super) fn shift_files(&mut self, files: usize) {
        self.parts.iter_mut().for_each(|part| part.file += files);
    }
}

impl Checkpoint {
    /// Replaces the stored tensors of every encoded matrix by the matrix.
    pub(super) fn attach_encodings(&mut self, folder: &Folder) -> Result<()> {
        let method = match Method::of_folder(folder) {
            Err(refusal) if self.is_quantized(true) => return Err(refusal),
            Ok(Some(Method::Other(refusal, _))) if self.is_quantized(false) => return Err(refusal),
            // The weights have been dequantized.
            Err(_) => None,
            Ok(method) => method,
        };
        match &method {
            Some(Method::Gptq(config)) => gptq::attach_gptq(self, config)?,
            Some(Method::Awq(config)) => gptq::attach_awq(self, config)?,
            Some(Method::Compressed(config)) => compressed::attach(self, config)?,
            Some(Method::Mxfp4) => mxfp4::attach(self)?,
            Some(Method::Fp8(_) | Method::Other(..)) | None => {}
        }
        fp8::attach(self, method.as_ref())
    }

    /// Whether a tensor is stored by a quantization method, apart from F8_E4M3 unless `or_fp8`. Positions
    /// and masks of I64 and BOOL are not.
    fn is_quantized(&self, or_fp8: bool) -> bool {
        self.tensors.iter().any(|(name, entry)| match &entry.dtype {
            Dtype::Unsupported(dtype) if dtype == fp8::DTYPE => or_fp8,
            Dtype::Unsupported(dtype) => !["I64", "BOOL"].contains(&dtype.as_str()),
            Dtype::Known(_) => name.ends_with(".qweight") || name.ends_with(".weight_packed"),
        })
    }

    /// Replaces stored tensors by the matrix MODULE`target` for every MODULE that has a tensor MODULE`suffix`
    /// for which the condition holds. Errors name that tensor and its file.
    fn attach_each(
        &mut self,
        [suffix, target]: [&str; 2],
        is_encoded: impl Fn(&TensorEntry) -> bool,
        read: impl Fn(&mut Module) -> Result<(Vec<usize>, Encoded)>,
    ) -> Result<()> {
        let encoded = self.tensors.iter().filter(|(_, entry)| is_encoded(entry));
        let modules: Vec<String> =
            encoded.filter_map(|(name, _)| Some(name.strip_suffix(suffix)?.to_owned())).collect();
        for module in modules {
            let (quants, name) = (format!("{module}{suffix}"), format!("{module}{target}"));
            let file = self.files[self.tensors[&quants].file].path().display().to_string();
            let mut module = Module::new(self, &module);
            let attached = read(&mut module).map(|(shape, encoded)| {
                (shape, Encoded { has_zero_bias: module.has_zero_bias(), ..encoded })
            });
            let attached = attached.and_then(|(shape, encoded)| self.insert_encoded(name, shape, encoded));
            attached.with_context(|| format!("{file}: tensor '{quants}'"))?;
        }
        Ok(())
    }

    fn insert_encoded(&mut self, name: String, shape: Vec<usize>, encoded: Encoded) -> Result<()> {
        ensure!(!self.tensors.contains_key(&name), "'{name}' is stored too");
        self.tensors.insert(name, TensorEntry::encoded(shape, encoded));
        Ok(())
    }

    /// Returns why a tensor need not be used although no specification ignores it: a scale of activations, or
    /// a bias of zeros, of a model with encoded matrices.
    pub fn unused_reason(&self, name: &str) -> Option<&'static str> {
        let encoded = |entry: &TensorEntry| match &entry.layout {
            Layout::Encoded(encoded) => Some(encoded.has_zero_bias),
            _ => None,
        };
        let is_zero_bias = || {
            let matrix = self.tensors.get(&format!("{}.weight", name.strip_suffix(".bias")?))?;
            encoded(matrix)
        };
        match fp8::is_activation_scale(name) {
            true if self.tensors.values().any(|entry| encoded(entry).is_some()) => {
                Some("activations are not rounded to 8 bits")
            }
            false if is_zero_bias() == Some(true) => Some("all its numbers are 0"),
            _ => None,
        }
    }
}
