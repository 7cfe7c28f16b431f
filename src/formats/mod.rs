//! Model weights in files, read as named tensors over memory-mapped bytes, and the configuration files that
//! accompany them.
//!
//! Invariant: every `Checkpoint` is consistent. The bytes of each tensor lie inside its file and have
//! exactly the length that its shape and type require (for gathered tensors, they contain every element that
//! is read); only tensors of an unsupported type are not measured. A file that violates this is rejected,
//! with the file, the tensor and the reason, before memory is allocated from a number in the file.

mod mmap;

pub mod folder;

pub mod config;

mod rope;

pub mod chat;

pub mod gguf;

pub mod sentence;

pub mod sampling_keys;

mod encoded;
mod gather;
mod groups;
mod packed;
mod sharded;

pub mod ctranslate2;
mod llama2c;
mod pickle;
mod safetensors;

pub mod save;

pub use chat::{ChatConfig, ChatTemplateSource};
pub(crate) use config::CONFIG as CONFIG_FILE;
pub use config::{DecoderStart, GenerationConfig, HubConfig};
pub use folder::{EmbeddedFolder, Folder, MemoryFolder};
pub(crate) use folder::{is_plain_name, read_bounded};
pub use gguf::Gguf;
pub use llama2c::{Llama2cHeader, Llama2cVersion};
pub use pickle::is_pytorch;
pub use rope::{RopeConfig, RopeKeys, RopeScaling};
pub(crate) use safetensors::{INDEX as SAFETENSORS_INDEX, SINGLE as SAFETENSORS_FILE};
pub use sentence::{
    DenseConfig, PoolingConfig, Prompts, SentenceConfig, Similarity, TextPreprocessing, UnsupportedSetting,
};

pub use crate::request::ParamList;
use anyhow::{Result, bail, ensure};
use encoded::Encoded;
use folder::FileBytes;
use gather::Gather;
use groups::QuantGroups;
use mainstem_kernels::QuantType;
use sharded::FolderFormat;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Named tensors stored in one or more files.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<FileBytes>,
    tensors: Tensors,
}

/// Formats with fixed file names in a model folder, in order of preference.
const FOLDER_FORMATS: [FolderFormat; 2] = [safetensors::FOLDER_FORMAT, pickle::FOLDER_FORMAT];

/// Tensors of a checkpoint, by name.
type Tensors = BTreeMap<String, TensorEntry>;

/// A tensor's type, shape and location.
#[derive(Debug)]
struct TensorEntry {
    dtype: Dtype,
    shape: Vec<usize>,
    file: usize,
    bytes: Range<usize>,
    layout: Layout,
}

/// Arrangement of a tensor's elements in its bytes.
#[derive(Debug)]
enum Layout {
    /// Row-major, without gaps.
    Dense,
    /// Row-major and transposed: matrices of shape (K, N) stored as (N, K).
    Transposed,
    /// Elements to be picked by strides, or converted to another type.
    Gathered(Gather),
    /// Signed bytes with one scale per group, stored in the tensor's own bytes.
    Grouped(QuantGroups),
    /// Rows that are decoded from several stored tensors.
    Encoded(Box<Encoded>),
}

impl TensorEntry {
    /// Creates the entry of a tensor that is decoded from several stored ones.
    fn encoded(shape: Vec<usize>, encoded: Encoded) -> TensorEntry {
        let (dtype, (file, bytes)) = (Dtype::Known(encoded.ty()), encoded.place());
        TensorEntry { dtype, shape, file, bytes, layout: Layout::Encoded(Box::new(encoded)) }
    }

    /// Returns the entry with its file indices shifted by `files`, for appending to another checkpoint.
    fn with_file_offset(mut self, files: usize) -> TensorEntry {
        self.file += files;
        if let Layout::Encoded(encoded) = &mut self.layout {
            encoded.shift_files(files);
        }
        self
    }

    /// Bytes of the elements as [`TensorView::bytes`] returns them.
    fn bytes_len(&self) -> usize {
        match &self.layout {
            Layout::Dense | Layout::Transposed => self.bytes.len(),
            Layout::Gathered(gather) => gather.bytes_len(&self.shape),
            Layout::Grouped(groups) => groups.output_bytes(self.bytes.len()),
            Layout::Encoded(encoded) => encoded.decoded_bytes(),
        }
    }
}

/// The data type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    Known(QuantType),
    /// A type without compute support, by its name in the file. Such a tensor may be in a file as long as
    /// nothing reads it; its bytes lie inside the file, but are not checked against its shape.
    Unsupported(String),
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dtype::Known(ty) => ty.fmt(f),
            Dtype::Unsupported(name) => f.write_str(name),
        }
    }
}

/// One tensor of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub dtype: &'a Dtype,
    /// Outermost dimension first; empty for a scalar.
    pub shape: &'a [usize],
    /// The file that holds the tensor, for error messages.
    pub file: &'a Path,
    entry: &'a TensorEntry,
    files: &'a [FileBytes],
}

impl Checkpoint {
    /// Creates a checkpoint from tensors in memory: each has a name, a shape and the byte offset in `buffer`
    /// where its elements of type `ty` start. Tensors may share bytes. `path` stands for the file in error
    /// messages.
    pub fn from_buffer(
        path: &Path,
        buffer: Vec<u8>,
        ty: QuantType,
        tensors: impl IntoIterator<Item = (String, Vec<usize>, usize)>,
    ) -> Checkpoint {
        let held = buffer.len();
        let entry = |(name, shape, begin): (String, Vec<usize>, usize)| {
            let bytes = elements(&shape).and_then(|n| ty.bytes(n)).and_then(|len| begin.checked_add(len));
            let end =
                bytes.filter(|end| *end <= held).expect("every tensor lies inside its buffer; this is a bug");
            let (dtype, bytes) = (Dtype::Known(ty), begin..end);
            (name, TensorEntry { dtype, shape, file: 0, bytes, layout: Layout::Dense })
        };
        let tensors = tensors.into_iter().map(entry).collect();
        let file = FileBytes::InMemory { path: path.to_owned(), bytes: Cow::Owned(buffer) };
        Checkpoint { files: vec![file], tensors }
    }

    /// Whether the folder has weights that [`Checkpoint::open_folder`] or [`Checkpoint::open_ctranslate2`]
    /// can open.
    pub fn is_in_folder(folder: &Folder) -> bool {
        FOLDER_FORMATS.iter().any(|kind| kind.is_present_in(folder))
            || Checkpoint::has_ctranslate2_model(folder)
    }

    /// Opens a folder's weights: safetensors if present, otherwise a PyTorch checkpoint.
    pub fn open_folder(folder: &Folder) -> Result<Checkpoint> {
        for kind in &FOLDER_FORMATS {
            if let Some(mut checkpoint) = kind.open(folder)? {
                // The packages that quantize models write safetensors. F8_E4M3 tensors of PyTorch checkpoints
                // are rejected: how they store their scales is unknown.
                if kind.single == safetensors::FOLDER_FORMAT.single {
                    checkpoint.attach_encodings(folder)?;
                }
                return Ok(checkpoint);
            }
        }
        let names = FOLDER_FORMATS.map(|kind| format!("{} or {}", kind.single, kind.index)).join(", ");
        bail!("{}: no weights found (looked for {names})", folder.path().display())
    }

    /// Returns the tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get_key_value(name).map(|(name, entry)| self.view(name, entry))
    }

    /// Releases the memory of a tensor's bytes, for use after the tensor has been copied elsewhere.
    pub fn release(&self, name: &str) {
        if let Some(entry) = self.tensors.get(name) {
            match &entry.layout {
                Layout::Encoded(encoded) => encoded.release(&self.files),
                _ => self.files[entry.file].release(entry.bytes.clone()),
            }
        }
    }

    /// Returns every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    /// Returns the name of every tensor, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the files in the order they were opened.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(FileBytes::path)
    }

    /// Removes a tensor: for one that is not a weight and has already been read.
    pub fn remove(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Total bytes of all tensors, as [`TensorView::bytes`] returns them.
    pub fn total_bytes(&self) -> usize {
        self.tensors.values().map(TensorEntry::bytes_len).sum()
    }

    /// Adds the tensors of another checkpoint. Fails if a name occurs in both.
    fn merge(&mut self, other: Checkpoint) -> Result<()> {
        let first = self.files.len();
        self.files.extend(other.files);
        for (name, entry) in other.tensors {
            let entry = entry.with_file_offset(first);
            let file = self.files[entry.file].path();
            ensure!(
                !self.tensors.contains_key(&name),
                "{}: tensor '{name}': it is also in another file",
                file.display()
            );
            self.tensors.insert(name, entry);
        }
        Ok(())
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a TensorEntry) -> TensorView<'a> {
        TensorView {
            name,
            dtype: &entry.dtype,
            shape: &entry.shape,
            file: self.files[entry.file].path(),
            entry,
            files: &self.files,
        }
    }
}

impl<'a> TensorView<'a> {
    /// Returns the elements: little-endian, row-major, of any alignment. Borrows the file's bytes where they
    /// are stored that way; otherwise every call makes a new copy.
    pub fn bytes(&self) -> Cow<'a, [u8]> {
        match &self.entry.layout {
            Layout::Dense | Layout::Transposed => Cow::Borrowed(self.stored_bytes()),
            Layout::Gathered(gather) => Cow::Owned(gather.gather(self.stored_bytes(), self.shape)),
            Layout::Grouped(groups) => Cow::Owned(groups.dequantize(self.stored_bytes())),
            Layout::Encoded(encoded) => Cow::Owned(encoded.decode(self.files)),
        }
    }

    /// Returns the elements of some rows of a matrix (rows, columns) that is decoded from several stored
    /// tensors; rows of stacked matrices are numbered consecutively. `None` for other tensors.
    pub fn decoded_rows(&self, rows: Range<usize>) -> Option<Vec<u8>> {
        match &self.entry.layout {
            Layout::Encoded(encoded) => Some(encoded.decode_rows(rows, self.files)),
            _ => None,
        }
    }

    /// Returns whether the rows are decoded from several stored tensors.
    pub fn is_encoded(&self) -> bool {
        matches!(self.entry.layout, Layout::Encoded(_))
    }

    fn stored_bytes(&self) -> &'a [u8] {
        &self.files[self.entry.file].bytes()[self.entry.bytes.clone()]
    }

    /// Whether the bytes are those of matrices (N, K), although the shape is (K, N).
    pub fn is_transposed(&self) -> bool {
        matches!(self.entry.layout, Layout::Transposed)
    }

    /// Length of [`TensorView::bytes`], computed without reading the file.
    pub fn bytes_len(&self) -> usize {
        self.entry.bytes_len()
    }

    /// Name of the data type or encoding in the file.
    pub fn stored_type_name(&self) -> &'a str {
        match (&self.entry.layout, self.dtype) {
            (Layout::Encoded(encoded), _) => encoded.name(),
            (_, Dtype::Known(ty)) => ty.name(),
            (_, Dtype::Unsupported(name)) => name,
        }
    }

    /// Returns the number format to load the tensor in by default: the stored one, or that of its encoding.
    pub fn default_load_type(&self) -> Result<QuantType> {
        match &self.entry.layout {
            Layout::Encoded(encoded) => Ok(encoded.load_type()),
            _ => self.quant_type(),
        }
    }

    /// Number of bytes the tensor occupies in its files, with scales.
    pub fn stored_len(&self) -> usize {
        match &self.entry.layout {
            Layout::Encoded(encoded) => encoded.stored_bytes(),
            _ => self.entry.bytes.len(),
        }
    }

    /// Returns the number format. Fails, naming the file, the tensor and the type, if there is no compute
    /// support for it.
    pub fn quant_type(&self) -> Result<QuantType> {
        match self.dtype {
            Dtype::Known(ty) => Ok(*ty),
            Dtype::Unsupported(name) => bail!(
                "{}: tensor '{}': its dtype {name} is not supported yet (supported: {}, and F8_E4M3 in \
                 safetensors)",
                self.file.display(),
                self.name,
                QuantType::all().map(QuantType::name).collect::<Vec<_>>().join(", ")
            ),
        }
    }
}

/// Returns the number of elements of a shape, or `None` on overflow.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))
}

/// Returns the `N` bytes at offset `at`. Fails if the file is shorter.
fn fixed_bytes<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<N>()) {
        Some(chunk) => Ok(*chunk),
        None => bail!("truncated: expected {N} bytes at offset {at}, but the file ends at {}", bytes.len()),
    }
}
