//! Files of weights, read as named tensors over bytes that stay where they are, and the settings that lie
//! beside them.
//!
//! Invariant: a [`Checkpoint`] that exists is consistent: every tensor's bytes lie inside its file and are
//! exactly as many as its shape and type need, or those that its numbers are picked from, unless its type is
//! foreign. A file that is not so is refused, with the file, the tensor and the reason, before anything is
//! allocated from a number it holds.

mod mmap;

pub mod folder;

pub mod config;

mod rope;

pub mod chat;

pub mod gguf;

pub mod sentence;

mod coded;
mod gather;
mod groups;
mod scaled;
mod sharded;

mod llama2c;
mod pickle;
mod safetensors;

pub mod save;

pub use chat::{ChatFiles, ChatSource};
pub use config::{DecoderOpening, GenerationConfig, HubConfig, SamplingDefaults};
pub(crate) use folder::is_plain_name;
pub use folder::{EmbeddedFolder, Folder, MemoryFolder};
pub use gguf::Gguf;
pub use llama2c::{Llama2cHeader, Llama2cVersion};
pub use pickle::is_pytorch;
pub use rope::{RopeConfig, RopeKeys, RopeScaling};
pub use sentence::{FoundPooling, SentenceFiles, TextSettings, Unserved};

use anyhow::{Result, bail, ensure};
use folder::FileBytes;
use gather::Gather;
use groups::Groups;
use mainstem_kernels::QuantType;
use scaled::Scaled;
use sharded::Naming;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Named tensors over the bytes of one or more files.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<FileBytes>,
    tensors: Tensors,
}

/// The formats whose files have settled names in a folder; the first that is there is opened.
const FOLDER_KINDS: [Naming; 2] = [safetensors::FILES, pickle::FILES];

/// Tensors by name.
type Tensors = BTreeMap<String, Entry>;

/// What a tensor is, and where its bytes lie.
#[derive(Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    file: usize,
    bytes: Range<usize>,
    layout: Layout,
}

/// How a tensor's numbers lie in its bytes.
#[derive(Debug)]
enum Layout {
    /// As they are wanted: row-major, without gaps.
    Dense,
    /// The same, of matrices (in, out) that lie there as (out, in).
    Turned,
    /// To be picked, or made into another type.
    Gathered(Gather),
    /// To be made of bytes and scales.
    Grouped(Groups),
    /// To be made of bytes and scales that lie elsewhere.
    Scaled(Scaled),
}

impl Entry {
    /// The same where so many files come before its own.
    fn behind(mut self, files: usize) -> Entry {
        self.file += files;
        if let Layout::Scaled(Scaled { scales: Some((file, ..)), .. }) = &mut self.layout {
            *file += files;
        }
        self
    }

    /// Bytes of the numbers as they are wanted.
    fn bytes_len(&self) -> usize {
        match &self.layout {
            Layout::Dense | Layout::Turned => self.bytes.len(),
            Layout::Gathered(gather) => gather.bytes_len(&self.shape),
            Layout::Grouped(groups) => groups.wanted_bytes(self.bytes.len()),
            Layout::Scaled(scaled) => scaled.wanted_bytes(self.bytes.len()),
        }
    }
}

/// The number format of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    Known(QuantType),
    /// One that cannot be computed with, by its name in the file. Such a tensor may lie in a file as long as
    /// nobody needs it; its bytes lie inside the file, but are not held against its shape.
    Foreign(String),
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dtype::Known(ty) => ty.fmt(f),
            Dtype::Foreign(name) => f.write_str(name),
        }
    }
}

/// One tensor of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub dtype: &'a Dtype,
    /// Outermost dimension first; empty for a single number.
    pub shape: &'a [usize],
    /// The file it comes from, to name in errors.
    pub file: &'a Path,
    entry: &'a Entry,
    stored: &'a [u8],
    /// Those that lie elsewhere.
    scales: &'a [u8],
}

impl Checkpoint {
    /// Tensors that the program made: each by name and shape, its numbers of type `ty` in `buffer` from the
    /// given byte on. They may share bytes. `path` stands for the file in errors.
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
                bytes.filter(|end| *end <= held).expect("a tensor lies inside its buffer; this is a bug");
            let (dtype, bytes) = (Dtype::Known(ty), begin..end);
            (name, Entry { dtype, shape, file: 0, bytes, layout: Layout::Dense })
        };
        let tensors = tensors.into_iter().map(entry).collect();
        let file = FileBytes::Held { path: path.to_owned(), bytes: Cow::Owned(buffer) };
        Checkpoint { files: vec![file], tensors }
    }

    /// Whether a folder has what [`Checkpoint::open_folder`] opens.
    pub fn is_in_folder(folder: &Folder) -> bool {
        FOLDER_KINDS.iter().any(|kind| kind.is_in(folder))
    }

    /// Opens a folder's weights: safetensors if there are any, else what PyTorch saved.
    pub fn open_folder(folder: &Folder) -> Result<Checkpoint> {
        for kind in &FOLDER_KINDS {
            if let Some(mut checkpoint) = kind.open(folder)? {
                // Of what PyTorch saved, such codes are refused: how they lie is not looked at.
                if kind.single == safetensors::FILES.single {
                    checkpoint.settle_scales(folder)?;
                }
                return Ok(checkpoint);
            }
        }
        let names = FOLDER_KINDS.map(|kind| format!("{} or {}", kind.single, kind.index)).join(", ");
        bail!("{}: no weights are there: looked for {names}", folder.path().display())
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get_key_value(name).map(|(name, entry)| self.view(name, entry))
    }

    /// Gives the memory of a tensor's bytes back to the system: it has been read, and has a place elsewhere.
    pub fn let_go(&self, name: &str) {
        if let Some(entry) = self.tensors.get(name) {
            self.files[entry.file].let_go(entry.bytes.clone());
        }
    }

    /// Every tensor, in the order of names.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    /// Every tensor's name, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The files, in the order they were opened.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(FileBytes::path)
    }

    /// Leaves a tensor out: one that is no weight, and has been read.
    pub fn forget(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> usize {
        self.tensors.values().map(Entry::bytes_len).sum()
    }

    /// Takes the tensors of another one; refuses those that are here already.
    fn join(&mut self, other: Checkpoint) -> Result<()> {
        let first = self.files.len();
        self.files.extend(other.files);
        for (name, entry) in other.tensors {
            let entry = entry.behind(first);
            let file = self.files[entry.file].path();
            ensure!(
                !self.tensors.contains_key(&name),
                "{}: tensor '{name}': another file has it too",
                file.display()
            );
            self.tensors.insert(name, entry);
        }
        Ok(())
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> TensorView<'a> {
        let file = &self.files[entry.file];
        let stored = &file.bytes()[entry.bytes.clone()];
        let scales = match &entry.layout {
            Layout::Scaled(Scaled { scales: Some((file, bytes, _)), .. }) => {
                &self.files[*file].bytes()[bytes.clone()]
            }
            _ => &[],
        };
        TensorView {
            name,
            dtype: &entry.dtype,
            shape: &entry.shape,
            file: file.path(),
            entry,
            stored,
            scales,
        }
    }
}

impl<'a> TensorView<'a> {
    /// The numbers, little-endian, row-major and of any alignment: those of the file, or a copy where the file
    /// has them in another order or type. Each call makes its own copy.
    pub fn bytes(&self) -> Cow<'a, [u8]> {
        match &self.entry.layout {
            Layout::Dense | Layout::Turned => Cow::Borrowed(self.stored),
            Layout::Gathered(gather) => Cow::Owned(gather.numbers(self.stored, self.shape)),
            Layout::Grouped(groups) => Cow::Owned(groups.numbers(self.stored)),
            Layout::Scaled(scaled) => Cow::Owned(scaled.numbers(self.stored, self.scales)),
        }
    }

    /// Whether its bytes are those of matrices (out, in), though its shape is (in, out).
    pub fn is_turned(&self) -> bool {
        matches!(self.entry.layout, Layout::Turned)
    }

    /// How many [`TensorView::bytes`] are; the file is not read for it.
    pub fn bytes_len(&self) -> usize {
        self.entry.bytes_len()
    }

    /// The number format that the file has.
    pub fn stored_name(&self) -> &'a str {
        match (&self.entry.layout, self.dtype) {
            (Layout::Scaled(_), _) => scaled::NAME,
            (_, Dtype::Known(ty)) => ty.name(),
            (_, Dtype::Foreign(name)) => name,
        }
    }

    /// The number format to load it in where nobody says: its own, but 16 bits for codes of 8 with scales, which have a
    /// fraction of 3 bits.
    pub fn usual_type(&self) -> Result<QuantType> {
        match self.entry.layout {
            Layout::Scaled(_) => Ok(QuantType::BF16),
            _ => self.quant_type(),
        }
    }

    /// How many bytes of the file they are made of.
    pub fn stored_len(&self) -> usize {
        self.stored.len()
    }

    /// The number format; an error that names file, tensor and format if it cannot be computed with.
    pub fn quant_type(&self) -> Result<QuantType> {
        match self.dtype {
            Dtype::Known(ty) => Ok(*ty),
            Dtype::Foreign(name) => bail!(
                "{}: tensor '{}': its dtype {name} is not supported yet (supported: {}, and F8_E4M3 in safetensors)",
                self.file.display(),
                self.name,
                QuantType::all().map(QuantType::name).collect::<Vec<_>>().join(", ")
            ),
        }
    }
}

/// The elements of a shape, if they can be counted.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))
}

/// The `N` bytes at `at`, which a truncated file may lack.
fn fixed_bytes<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<N>()) {
        Some(chunk) => Ok(*chunk),
        None => bail!("truncated: {N} bytes expected at offset {at}, and the file ends at {}", bytes.len()),
    }
}
