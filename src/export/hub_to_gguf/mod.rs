//! Writes the model of a hub folder as a GGUF file.
//!
//! Names, metadata keys and conventions are those of `specs/gguf.toml`, which reads such files. Three things
//! differ from the folder: the rows of queries and keys where files have the two rows of a rotated pair side
//! by side, norms to which the folder's model adds a constant, and rotary frequencies that are scaled one by
//! one, which files have as a tensor of factors.
//!
//! Invariant: at most one tensor is in memory. The written file is opened and compared with the folder's
//! model before it appears under its name, so a model that GGUF cannot express is refused.

mod metadata;
mod same_model;

use super::{ExportTarget, FormatTotals, open_place};
use crate::formats::save::{self, AtomicOutput, GgufEntries, SavedFile, SavedTensor};
use crate::formats::{Folder, HubConfig};
use crate::model::gguf::{GgufTable, GgufTarget};
use crate::model::source::{ModelRef, ModelSource};
use crate::model::spec::{Kind, NormSpec, TensorPart, TensorSlice};
use crate::model::tensor_slices::{self, SliceData};
use crate::model::tensors;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{QuantType, RopeStyle};
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// A model as it will be written.
pub(super) struct GgufExport<'a> {
    source: &'a ModelSource,
    metadata: GgufEntries,
    tensors: Vec<ExportTensor<'a>>,
}

/// A tensor of the file.
struct ExportTensor<'a> {
    saved: SavedTensor,
    content: Content<'a>,
}

/// The source of a tensor's values.
enum Content<'a> {
    /// A tensor of the folder, with a change.
    Stored(&'a TensorSlice, Change),
    Values(Vec<f32>),
}

/// A change of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    None,
    /// The rows of each head are reordered so that the two rows of a rotated pair are side by side.
    PairRows {
        head_rows: usize,
    },
    /// A number is added to each value.
    Add(f32),
}

impl<'a> GgufExport<'a> {
    /// Plans the file of a folder's model. Fails, naming the reason, if GGUF cannot express the model, as far
    /// as this can be known before it is written.
    pub(super) fn new(source: &'a ModelSource, folder: &Folder) -> Result<GgufExport<'a>> {
        let config = HubConfig::from_folder(folder)?;
        let plan = || {
            ensure!(source.spec.kind == Kind::Decoder, "only decoders can be written as GGUF");
            ensure!(source.sentence.is_none(), "models for embeddings cannot be written as GGUF");
            let target = GgufTable::shipped().target(config.opt_str("model_type")?.unwrap_or_default())?;
            let mut tensors = planned_tensors(source, &target)?;
            tensors.extend(metadata::frequency_factors(source));
            let saved: Vec<SavedTensor> = tensors.iter().map(|tensor| tensor.saved.clone()).collect();
            save::check_gguf(&saved)?;
            let metadata = metadata::entries(source, &target, &config, folder)?;
            Ok(GgufExport { source, metadata, tensors })
        };
        plan().with_context(|| folder.path().display().to_string())
    }

    /// Writes the file and compares it with the folder's model.
    pub(super) fn write(&self, target: &ExportTarget) -> Result<(AtomicOutput, Vec<FormatTotals>)> {
        self.source.progress.add_total(self.tensors.iter().map(|tensor| self.stored_bytes(tensor)).sum());
        let place = open_place(target)?;
        let saved: Vec<SavedTensor> = self.tensors.iter().map(|tensor| tensor.saved.clone()).collect();
        let file = save::new_gguf_file("", &self.metadata, &saved)?;
        self.write_file(&file, place.temp_path(), target)
            .with_context(|| format!("cannot write {}", target.path.display()))?;
        let written = ModelSource::open(&ModelRef::Path(place.temp_path().to_owned()), None);
        written.and_then(|written| same_model::check(self.source, &written)).with_context(|| {
            format!("{}: GGUF cannot express this model: specify a folder", self.source.path.display())
        })?;
        Ok((place, self.totals()))
    }

    fn write_file(&self, file: &SavedFile, path: &Path, target: &ExportTarget) -> Result<()> {
        let mut out = File::create_new(path)?;
        out.write_all(&file.header)?;
        for tensor in &self.tensors {
            let bytes = self.bytes(tensor, target.threads);
            let bytes = bytes.with_context(|| format!("tensor '{}'", tensor.saved.name))?;
            out.write_all(&bytes)?;
            out.write_all(&vec![0; bytes.len().next_multiple_of(file.alignment) - bytes.len()])?;
            self.source.progress.advance(self.stored_bytes(tensor))?;
        }
        Ok(out.sync_all()?)
    }

    /// Returns a tensor's values as the file has them.
    fn bytes(&self, tensor: &ExportTensor, threads: usize) -> Result<Vec<u8>> {
        let (piece, change) = match &tensor.content {
            Content::Values(values) => return Ok(values.iter().flat_map(|x| x.to_le_bytes()).collect()),
            Content::Stored(piece, change) => (*piece, *change),
        };
        let ModelSource { checkpoint, rounding, .. } = self.source;
        let data = change.apply(tensor_slices::read_slice(checkpoint, piece)?)?;
        let data = data.requantize(tensor.saved.ty, piece.rounding(rounding), threads)?;
        let bytes = data.bytes.into_owned();
        checkpoint.release(&piece.name);
        Ok(bytes)
    }

    fn stored_bytes(&self, tensor: &ExportTensor) -> usize {
        match &tensor.content {
            Content::Stored(piece, _) => {
                self.source.checkpoint.tensor(&piece.name).map_or(0, |stored| stored.bytes_len())
            }
            Content::Values(values) => values.len() * size_of::<f32>(),
        }
    }

    /// Returns the totals by number format, in the order of the formats' table.
    fn totals(&self) -> Vec<FormatTotals> {
        let of_type = |ty: QuantType| {
            let own = || self.tensors.iter().filter(move |tensor| tensor.saved.ty == ty);
            FormatTotals {
                ty,
                tensors: own().count(),
                elements: own().map(|tensor| tensor.saved.shape.iter().product::<usize>()).sum(),
                bytes_before: own().map(|tensor| self.stored_bytes(tensor)).sum(),
                bytes_after: own().map(|tensor| tensor.saved.bytes()).sum(),
            }
        };
        QuantType::all().map(of_type).filter(|part| part.tensors > 0).collect()
    }
}

/// Plans the model's tensors. Vectors become F32, as in other GGUF files.
fn planned_tensors<'a>(source: &'a ModelSource, target: &GgufTarget) -> Result<Vec<ExportTensor<'a>>> {
    let changes = changes(source, target)?;
    let plan = |piece: &'a TensorSlice| {
        ensure!(
            piece.part == TensorPart::Whole && piece.plane.is_none(),
            "tensor '{}': it has several matrices, which cannot be written as GGUF",
            piece.name
        );
        let shape = tensor_slices::full_shape(piece);
        let ty = if shape.len() == 1 { QuantType::F32 } else { source.write_type(piece) };
        let saved = SavedTensor { name: target.tensor_name(piece)?, ty, shape, transposed: false };
        let change = changes.get(piece.name.as_str()).copied().unwrap_or(Change::None);
        Ok(ExportTensor { saved, content: Content::Stored(piece, change) })
    };
    tensors::required_tensors(&source.spec).into_iter().map(plan).collect()
}

/// Returns the changes of tensors, by their names in the folder.
fn changes<'a>(source: &'a ModelSource, target: &GgufTarget) -> Result<HashMap<&'a str, Change>> {
    let stack = source.spec.decoder.as_ref().context("the model has no decoder")?;
    let mut changes = HashMap::new();
    let mut norms: Vec<&NormSpec> = stack.norm.iter().collect();
    for layer in &stack.layers {
        let sublayers = [&layer.attention_norms, &layer.mlp_norms];
        norms
            .extend(sublayers.iter().flat_map(|norms| norms.pre.iter().chain(&norms.out).chain(&norms.post)));
        let attention = &layer.attention;
        norms.extend(attention.qk_norms.iter().flat_map(|(q, k)| [q, k]));
        let Some(rope) = attention.rope.map(|at| &stack.ropes[at]) else { continue };
        if target.pairs_are_adjacent() && rope.style == RopeStyle::NeoX {
            ensure!(
                rope.dims == attention.k_dim,
                "only {} of the {} dimensions of a head are rotated, which GGUF files of '{}' do not have",
                rope.dims,
                attention.k_dim,
                target.architecture
            );
            let change = Change::PairRows { head_rows: attention.k_dim };
            for linear in [&attention.q, &attention.k] {
                let names = [Some(&linear.weight), linear.bias.as_ref()].into_iter().flatten();
                changes.extend(names.map(|piece| (piece.name.as_str(), change)));
            }
        }
    }
    let shifted = norms.into_iter().map(|norm| (norm, norm.offset - target.norm_offset()));
    let shifted = shifted.filter(|(_, added)| *added != 0.0);
    changes.extend(shifted.flat_map(|(norm, added)| {
        norm.weights.iter().map(move |weight| (weight.name.as_str(), Change::Add(added)))
    }));
    Ok(changes)
}

impl Change {
    fn apply(self, data: SliceData) -> Result<SliceData> {
        match self {
            Change::None => Ok(data),
            Change::Add(number) => {
                let values = data.to_f32().into_iter().flat_map(|x| (x + number).to_le_bytes()).collect();
                Ok(SliceData { ty: QuantType::F32, shape: data.shape, bytes: Vec::into(values) })
            }
            Change::PairRows { head_rows } => {
                let row = data.ty.bytes(data.k()).context("rows are whole blocks; this is a bug")?;
                let half = head_rows / 2;
                let order =
                    (0..data.n()).map(|at| at / head_rows * head_rows + at % head_rows / 2 + at % 2 * half);
                let bytes: Vec<u8> =
                    order.flat_map(|from| &data.bytes[from * row..][..row]).copied().collect();
                Ok(SliceData { ty: data.ty, shape: data.shape, bytes: bytes.into() })
            }
        }
    }
}
