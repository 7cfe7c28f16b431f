//! The output tensor for each tensor of a model.
//!
//! Invariant: a stored tensor is written in one number format, that in which all of its parts are loaded. If
//! its parts are loaded in several formats, it is refused.

use crate::formats::save::SavedTensor;
use crate::formats::{Checkpoint, TensorView};
use crate::model::source::ModelSource;
use crate::model::spec::TensorSlice;
use crate::model::tensor_slices;
use crate::model::tensors;
use anyhow::{Context, Result, bail};
use mainstem_kernels::QuantType;
use std::collections::HashMap;

/// The tensors of a model as they will be written: weights first, then those that hold settings.
pub struct OutputPlan<'a> {
    source: &'a ModelSource,
    tensors: Vec<PlannedTensor<'a>>,
    /// Number of weights among `tensors`.
    weights: usize,
}

/// A tensor to be written.
pub(super) struct PlannedTensor<'a> {
    pub(super) saved: SavedTensor,
    pub(super) stored: TensorView<'a>,
    pub(super) ty: QuantType,
    /// The first slice of a weight; `None` for a tensor that holds settings.
    pub(super) slice: Option<&'a TensorSlice>,
}

/// Totals of the tensors of one number format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatTotals {
    pub ty: QuantType,
    pub tensors: usize,
    pub elements: usize,
    /// Size in bytes before and after the conversion.
    pub bytes_before: usize,
    pub bytes_after: usize,
}

impl<'a> OutputPlan<'a> {
    /// Plans a model by its rules. Tensors in `all` that the model's own checkpoint lacks hold settings.
    pub fn new(source: &'a ModelSource, all: Option<&'a Checkpoint>) -> Result<OutputPlan<'a>> {
        let mut parts: HashMap<&str, Vec<&TensorSlice>> = HashMap::new();
        for piece in tensors::required_slices(&source.spec) {
            parts.entry(&piece.name).or_default().push(piece);
        }
        let needed = tensors::required_tensors(&source.spec).into_iter();
        let mut tensors: Vec<_> = needed
            .map(|piece| plan_weight(source, piece, &parts[piece.name.as_str()]))
            .collect::<Result<_>>()?;
        let weights = tensors.len();
        let has = |tensor: &TensorView| source.checkpoint.tensor(tensor.name).is_some();
        for tensor in all.into_iter().flat_map(Checkpoint::tensors).filter(|tensor| !has(tensor)) {
            tensors.push(plan_settings_tensor(tensor)?);
        }
        Ok(OutputPlan { source, tensors, weights })
    }

    pub(super) fn source(&self) -> &'a ModelSource {
        self.source
    }

    pub(super) fn tensor(&self, at: usize) -> &PlannedTensor<'a> {
        &self.tensors[at]
    }

    /// Returns the tensors to be written.
    pub(super) fn saved(&self) -> Vec<SavedTensor> {
        self.tensors.iter().map(|tensor| tensor.saved.clone()).collect()
    }

    /// Returns the number of weights; these come first.
    pub(super) fn weights(&self) -> usize {
        self.weights
    }

    /// Returns the total size of the tensors to be read, in bytes.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.stored.bytes_len()).sum()
    }

    /// Returns the totals by number format, in the order of the formats' table.
    pub fn format_totals(&self) -> Vec<FormatTotals> {
        let of_type = |ty: QuantType| {
            let own = || self.tensors.iter().filter(move |tensor| tensor.saved.ty == ty);
            FormatTotals {
                ty,
                tensors: own().count(),
                elements: own().map(|tensor| tensor.saved.shape.iter().product::<usize>()).sum(),
                bytes_before: own().map(|tensor| tensor.stored.stored_len()).sum(),
                bytes_after: own().map(|tensor| tensor.saved.bytes()).sum(),
            }
        };
        QuantType::all().map(of_type).filter(|part| part.tensors > 0).collect()
    }
}

/// Plans the tensor of a weight; `piece` is the first of its `parts`.
fn plan_weight<'a>(
    source: &'a ModelSource,
    piece: &'a TensorSlice,
    parts: &[&TensorSlice],
) -> Result<PlannedTensor<'a>> {
    let stored = source.checkpoint.tensor(&piece.name).context("it was there at opening; this is a bug")?;
    let types: Vec<QuantType> = parts.iter().map(|part| source.write_type(part)).collect();
    if let Some(other) = types.iter().find(|ty| **ty != types[0]) {
        let (name, one) = (&piece.name, types[0]);
        bail!(
            "{}: tensor '{name}': parts of it would be {one} and others {other}, but a tensor is stored \
             in one format: add a rule for it, such as '{}={one}'",
            stored.file.display(),
            piece.pattern.replace("{i}", "*").replace("{e}", "*")
        );
    }
    let ty = types[0];
    let is_new = ty != stored.quant_type()?;
    let turned = stored.is_transposed() || piece.transposed && is_new && ty.is_blocked();
    let shape = match stored.shape {
        // GGUF stores a matrix of one row as a vector; in blocks it has to be a matrix.
        [width] if ty.is_blocked() => vec![1, *width],
        shape => shape.to_vec(),
    };
    let saved = SavedTensor { name: piece.name.clone(), ty, shape, transposed: turned };
    Ok(PlannedTensor { saved, ty: stored.quant_type()?, stored, slice: Some(piece) })
}

/// Plans a tensor that is written unchanged.
fn plan_settings_tensor(stored: TensorView) -> Result<PlannedTensor> {
    let (ty, turned) = (stored.quant_type()?, stored.is_transposed());
    let saved =
        SavedTensor { name: stored.name.to_owned(), ty, shape: stored.shape.to_vec(), transposed: turned };
    Ok(PlannedTensor { saved, stored, ty, slice: None })
}

impl PlannedTensor<'_> {
    /// Returns the tensor's matrices: the whole tensor, or each plane. A tensor that holds settings has none.
    pub(super) fn matrices(&self) -> Vec<TensorSlice> {
        self.slice.map_or_else(Vec::new, |piece| tensor_slices::stored_matrices(piece, self.stored.shape))
    }

    /// Returns whether the matrices are stored as (in, out) and must be transposed.
    pub(super) fn needs_transpose(&self) -> bool {
        self.slice.is_some() && self.saved.transposed && !self.stored.is_transposed()
    }

    /// Returns the number of values in a written row.
    pub(super) fn width(&self) -> usize {
        match (self.stored.shape, self.saved.transposed) {
            ([.., width, _], true) => *width,
            (shape, _) => shape.last().copied().unwrap_or(1),
        }
    }
}
