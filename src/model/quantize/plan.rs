//! What each tensor of a model becomes.
//!
//! Invariant: a stored tensor is written in one number format, that in which all of its parts are loaded; where they are
//! loaded in several, none is the right one, and it is refused.

use crate::formats::save::SavedTensor;
use crate::formats::{Checkpoint, TensorView};
use crate::model::pieces;
use crate::model::source::ModelSource;
use crate::model::spec::Piece;
use crate::model::tensors;
use anyhow::{Context, Result, bail};
use mainstem_kernels::QuantType;
use std::collections::HashMap;

/// A model's tensors as they are to be written: weights first, then those that hold settings.
pub struct Plan<'a> {
    source: &'a ModelSource,
    tensors: Vec<Planned<'a>>,
    /// How many of them are weights.
    weights: usize,
}

/// One tensor.
pub(super) struct Planned<'a> {
    pub(super) saved: SavedTensor,
    pub(super) stored: TensorView<'a>,
    pub(super) ty: QuantType,
    /// A weight's first part.
    pub(super) piece: Option<&'a Piece>,
}

/// Tensors of one number format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub ty: QuantType,
    pub tensors: usize,
    pub numbers: usize,
    /// Bytes as they were stored, and as they are written.
    pub before: usize,
    pub after: usize,
}

impl<'a> Plan<'a> {
    /// The plan for a model by its rules. Of tensors in `all` those that the model's own checkpoint lacks hold settings.
    pub fn of(source: &'a ModelSource, all: Option<&'a Checkpoint>) -> Result<Plan<'a>> {
        let mut parts: HashMap<&str, Vec<&Piece>> = HashMap::new();
        for piece in tensors::pieces(&source.spec) {
            parts.entry(&piece.name).or_default().push(piece);
        }
        let needed = tensors::needed(&source.spec).into_iter();
        let mut tensors: Vec<_> =
            needed.map(|piece| weight(source, piece, &parts[piece.name.as_str()])).collect::<Result<_>>()?;
        let weights = tensors.len();
        let has = |tensor: &TensorView| source.checkpoint.tensor(tensor.name).is_some();
        for tensor in all.into_iter().flat_map(Checkpoint::tensors).filter(|tensor| !has(tensor)) {
            tensors.push(setting(tensor)?);
        }
        Ok(Plan { source, tensors, weights })
    }

    pub(super) fn source(&self) -> &'a ModelSource {
        self.source
    }

    pub(super) fn tensor(&self, at: usize) -> &Planned<'a> {
        &self.tensors[at]
    }

    /// What is to be written.
    pub(super) fn saved(&self) -> Vec<SavedTensor> {
        self.tensors.iter().map(|tensor| tensor.saved.clone()).collect()
    }

    /// How many of them are weights.
    pub(super) fn weights(&self) -> usize {
        self.weights
    }

    /// Bytes of all tensors as they are read.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.stored.bytes_len()).sum()
    }

    /// By number format, in the order of the formats' table.
    pub fn parts(&self) -> Vec<Part> {
        let of_type = |ty: QuantType| {
            let own = || self.tensors.iter().filter(move |tensor| tensor.saved.ty == ty);
            Part {
                ty,
                tensors: own().count(),
                numbers: own().map(|tensor| tensor.saved.shape.iter().product::<usize>()).sum(),
                before: own().map(|tensor| tensor.stored.stored_len()).sum(),
                after: own().map(|tensor| tensor.saved.bytes()).sum(),
            }
        };
        QuantType::all().map(of_type).filter(|part| part.tensors > 0).collect()
    }
}

/// A tensor of these parts, of which `piece` is the first.
fn weight<'a>(source: &'a ModelSource, piece: &'a Piece, parts: &[&Piece]) -> Result<Planned<'a>> {
    let stored = source.checkpoint.tensor(&piece.name).context("it was there at opening; this is a bug")?;
    let types: Vec<QuantType> = parts.iter().map(|part| source.written_as(part)).collect();
    if let Some(other) = types.iter().find(|ty| **ty != types[0]) {
        let (name, one) = (&piece.name, types[0]);
        bail!(
            "{}: tensor '{name}': some of it would be {one} and some {other}, and one tensor is stored in one format: \
             give it a rule of its own, such as '{}={one}'",
            stored.file.display(),
            piece.pattern.replace("{i}", "*").replace("{e}", "*")
        );
    }
    let ty = types[0];
    let is_new = ty != stored.quant_type()?;
    let turned = stored.is_turned() || piece.transposed && is_new && ty.is_blocked();
    let shape = match stored.shape {
        // GGUF stores a matrix of one row as a vector; in blocks it has to be a matrix.
        [width] if ty.is_blocked() => vec![1, *width],
        shape => shape.to_vec(),
    };
    let saved = SavedTensor { name: piece.name.clone(), ty, shape, turned };
    Ok(Planned { saved, ty: stored.quant_type()?, stored, piece: Some(piece) })
}

/// A tensor that is written as it is.
fn setting(stored: TensorView) -> Result<Planned> {
    let (ty, turned) = (stored.quant_type()?, stored.is_turned());
    let saved = SavedTensor { name: stored.name.to_owned(), ty, shape: stored.shape.to_vec(), turned };
    Ok(Planned { saved, stored, ty, piece: None })
}

impl Planned<'_> {
    /// All of it, or each plane. What holds settings has none.
    pub(super) fn matrices(&self) -> Vec<Piece> {
        self.piece.map_or_else(Vec::new, |piece| pieces::matrices(piece, self.stored.shape))
    }

    /// Whether they are (in, out) and have to be turned.
    pub(super) fn turns(&self) -> bool {
        self.piece.is_some() && self.saved.turned && !self.stored.is_turned()
    }

    /// Numbers of a row as they are written.
    pub(super) fn width(&self) -> usize {
        match (self.stored.shape, self.saved.turned) {
            ([.., width, _], true) => *width,
            (shape, _) => shape.last().copied().unwrap_or(1),
        }
    }
}
