//! Importance matrix: the mean squared input of each matrix column, collected over the tokens of a text.
//!
//! Devices that run the model pass the inputs of their GEMMs to an [`Observer`], which adds them to the
//! shared [`Observations`]; an [`ImportanceMatrix`] is computed from these. Projections that are fused in one
//! stored matrix have the same inputs.
//!
//! Invariant: every number is finite, and the mean over a matrix is 1. A matrix whose inputs were never
//! observed, or were all 0, has no entry.

use super::coding::Codes;
use super::spec::{Part, Piece};
use anyhow::{Result, ensure};
use mainstem_kernels::{Backend, MoeShape};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

/// Identifies a stored matrix: a whole tensor, or one of the matrices stacked in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatrixId {
    tensor: Arc<str>,
    plane: usize,
}

impl MatrixId {
    /// Returns the stored matrix that contains the slice.
    pub fn of(piece: &Piece) -> MatrixId {
        let plane = if let Part::Plane(plane) = piece.part { plane } else { 0 };
        MatrixId { tensor: piece.name.as_str().into(), plane }
    }
}

/// Selects how matrices are rounded when they are converted to another number format.
#[derive(Clone, Debug, Default)]
pub enum Choice {
    /// Round to nearest, by the format's own equations.
    #[default]
    Equations,
    /// Minimize the squared error. Columns are weighted by the importance matrix if there is one, otherwise
    /// equally.
    LeastSquares(Option<Arc<Importance>>),
}

impl Choice {
    /// Returns the rounding for one slice, with the column weights of that slice if they are known.
    pub fn of(&self, piece: &Piece) -> Codes<'_> {
        match self {
            Choice::Equations => Codes::Equations,
            Choice::LeastSquares(importance) => {
                Codes::LeastSquares(importance.as_ref().and_then(|importance| importance.of(piece)))
            }
        }
    }
}

/// Weights of the columns of each matrix, normalized to a mean of 1.
#[derive(Debug, Default)]
pub struct Importance(HashMap<MatrixId, Vec<f32>>);

impl Importance {
    /// Returns the weights of the columns that the slice covers; `None` if the matrix was not observed.
    pub fn of(&self, piece: &Piece) -> Option<&[f32]> {
        let columns = self.0.get(&MatrixId::of(piece))?;
        Some(&columns[piece.cut.columns.clone().unwrap_or(0..columns.len())])
    }
}

/// Weight of the uniform prior: as many rows with equal columns are added to the observed rows.
const SUPPOSED_ROWS: f64 = 8.0;

/// Sums of squared inputs of each matrix, collected by any number of devices.
#[derive(Debug, Default)]
pub struct Observations(Mutex<HashMap<MatrixId, Squares>>);

/// Sums of squares of each column over the observed rows.
#[derive(Debug, Default)]
struct Squares {
    sums: Vec<f64>,
    rows: usize,
}

impl Observations {
    /// Returns the mean squared input of each column of the slice's matrix; `None` if it was not observed.
    pub fn means(&self, piece: &Piece) -> Option<Vec<f64>> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Squares { sums, rows } = seen.get(&MatrixId::of(piece))?;
        (*rows > 0).then(|| sums.iter().map(|sum| sum / *rows as f64).collect())
    }

    /// Computes the importance matrix. Fails if an input was not finite.
    pub fn importance(&self) -> Result<Importance> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = HashMap::new();
        for (id, Squares { sums, rows }) in seen.iter() {
            let mean = sums.iter().sum::<f64>() / sums.len() as f64;
            ensure!(mean.is_finite(), "the input of tensor '{}' is not finite", id.tensor);
            if mean > 0.0 {
                // A uniform prior: few rows say little, and a column of zeros may have other values
                // elsewhere.
                let (known, supposed) = (*rows as f64, SUPPOSED_ROWS * mean / *rows as f64);
                let share = |sum: &f64| (sum + supposed) / (mean * (1.0 + SUPPOSED_ROWS / known));
                all.insert(id.clone(), sums.iter().map(|sum| share(sum) as f32).collect());
            }
        }
        Ok(Importance(all))
    }

    fn add<'a>(&self, id: &MatrixId, width: usize, rows: impl Iterator<Item = &'a [u8]>) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let squares = match seen.entry(id.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Squares { sums: vec![0.0; width], rows: 0 }),
        };
        for row in rows {
            squares.rows += 1;
            for (sum, value) in squares.sums.iter_mut().zip(floats(row)) {
                *sum += f64::from(value).powi(2);
            }
        }
    }
}

/// Records the GEMM inputs of one device in the shared [`Observations`].
pub struct Observer {
    seen: Arc<Observations>,
    /// Rows downloaded from the device: inputs, and router logits.
    inputs: Vec<u8>,
    logits: Vec<u8>,
}

impl Observer {
    pub fn new(seen: Arc<Observations>) -> Observer {
        Observer { seen, inputs: Vec::new(), logits: Vec::new() }
    }

    /// Records x (rows, width) as the input of the matrices `ids`.
    pub fn see<B: Backend>(
        &mut self,
        b: &mut B,
        (rows, width): (usize, usize),
        ids: &[&MatrixId],
        x: &B::Buf,
    ) {
        bring(b, rows * width, x, &mut self.inputs);
        for id in distinct(ids.iter().copied()) {
            self.seen.add(id, width, self.inputs.chunks_exact(width * size_of::<f32>()));
        }
    }

    /// Records the rows of x (rows, width) as inputs of the local experts that they are routed to.
    pub fn see_experts<B: Backend>(
        &mut self,
        b: &mut B,
        (rows, width): (usize, usize),
        (shape, ids): (&MoeShape, &[Vec<MatrixId>]),
        router: &B::Buf,
        x: &B::Buf,
    ) {
        bring(b, rows * width, x, &mut self.inputs);
        bring(b, rows * shape.experts, router, &mut self.logits);
        let inputs = || self.inputs.chunks_exact(width * size_of::<f32>());
        let logits = self.logits.chunks_exact(shape.experts * size_of::<f32>());
        let routed: Vec<Vec<usize>> = logits.map(|row| routed(row, shape.top_k)).collect();
        for (expert, ids) in (shape.first..).zip(ids) {
            let own = || inputs().zip(&routed).filter(|(_, to)| to.contains(&expert)).map(|(row, _)| row);
            for id in distinct(ids) {
                self.seen.add(id, width, own());
            }
        }
    }
}

/// Returns the ids without consecutive duplicates: parts of one fused matrix have the same input and are
/// adjacent.
fn distinct<'a>(ids: impl IntoIterator<Item = &'a MatrixId>) -> Vec<&'a MatrixId> {
    let mut ids: Vec<_> = ids.into_iter().collect();
    ids.dedup();
    ids
}

fn bring<B: Backend>(b: &mut B, numbers: usize, from: &B::Buf, to: &mut Vec<u8>) {
    to.resize(numbers * size_of::<f32>(), 0);
    b.download(from, 0, to);
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

/// Returns the `top_k` experts with the largest logits, which also have the largest scores; ties go to the
/// lower index.
fn routed(logits: &[u8], top_k: usize) -> Vec<usize> {
    let logits: Vec<f32> = floats(logits).collect();
    let mut experts: Vec<usize> = (0..logits.len()).collect();
    experts.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    experts.truncate(top_k);
    experts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::Cut;
    use mainstem_kernels::reference::Reference;
    use mainstem_kernels::{Activation, HostBuf, Scoring};

    fn piece(name: &str, part: Part, columns: Option<std::ops::Range<usize>>) -> Piece {
        let (cut, shape) = (Cut { rows: None, columns }, vec![]);
        let (role, layer, transposed) = ("q", None, false);
        Piece { role, name: name.into(), pattern: name.into(), layer, shape, part, cut, transposed }
    }

    fn buf(b: &mut Reference, values: &[f32]) -> HostBuf {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut buf = b.alloc(bytes.len()).expect("the reference backend allocates");
        b.upload(&mut buf, 0, &bytes);
        buf
    }

    fn means(seen: &Observations, name: &str, plane: usize) -> Option<Vec<f64>> {
        seen.means(&piece(name, Part::Plane(plane), None))
    }

    /// Computed by hand: a step of two rows and a step of one. The third row of the buffer is not part of the
    /// first step.
    #[test]
    fn squares_are_averaged_over_the_rows_of_all_steps() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let whole = piece("qkv", Part::Whole, None);
        let (q, o) = (MatrixId::of(&whole), MatrixId::of(&piece("o", Part::Whole, None)));
        let x = buf(&mut b, &[1.0, -2.0, 0.0, 3.0, 4.0, 0.0, 9.0, 9.0, 9.0]);
        // The three parts of a fused matrix have the same input.
        observer.see(&mut b, (2, 3), &[&q, &q, &q], &x);
        assert_eq!(seen.means(&whole), Some(vec![5.0, 10.0, 0.0]));
        let x = buf(&mut b, &[0.0, 1.0, 0.0]);
        observer.see(&mut b, (1, 3), &[&q, &o], &x);
        assert_eq!(seen.means(&whole), Some(vec![10.0 / 3.0, 7.0, 0.0]));
        assert_eq!(seen.means(&piece("o", Part::Whole, None)), Some(vec![0.0, 1.0, 0.0]));
        let importance = seen.importance().unwrap();
        let mean = (10.0 / 3.0 + 7.0) / 3.0;
        // Three observed rows, and eight rows of the prior.
        let expected = [10.0 / 3.0, 7.0, 0.0].map(|x: f64| ((3.0 * x + 8.0 * mean) / (11.0 * mean)) as f32);
        let found = importance.of(&whole).unwrap();
        assert!(found.iter().zip(expected).all(|(found, x)| (found - x).abs() < 1e-6), "{found:?}");
        assert_eq!(importance.of(&piece("qkv", Part::Whole, Some(1..3))), Some(&found[1..]));
        assert!(importance.of(&piece("k", Part::Whole, None)).is_none());
    }

    /// Each row goes to the two experts with the largest logits; the local experts start at number 1.
    #[test]
    fn experts_see_the_rows_that_are_routed_to_them() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let shape = MoeShape {
            experts: 4,
            first: 1,
            top_k: 2,
            scoring: Scoring::Softmax,
            renormalise: true,
            scale: 1.0,
            width: 1,
            activation: Activation::Silu,
        };
        let id = |name: &str, plane| MatrixId::of(&piece(name, Part::Plane(plane), None));
        let ids =
            vec![vec![id("gate", 1), id("up", 1)], vec![id("both", 2), id("both", 2)], vec![id("gate", 3)]];
        // Experts 0 and 2, then 2 and 3, then 0 and 1 because all four logits are equal.
        let router = buf(&mut b, &[9.0, 1.0, 5.0, 2.0, -3.0, -4.0, -1.0, -2.0, 7.0, 7.0, 7.0, 7.0]);
        let x = buf(&mut b, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        observer.see_experts(&mut b, (3, 2), (&shape, &ids), &router, &x);
        assert_eq!(means(&seen, "gate", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "up", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "both", 2), Some(vec![5.0, 10.0]));
        assert_eq!(means(&seen, "gate", 3), Some(vec![9.0, 16.0]));
        assert_eq!(means(&seen, "gate", 0), None);
        // The only local expert is the last one, and the row is routed to others.
        let (router, x) = (buf(&mut b, &[9.0, 0.0, 8.0, 0.0]), buf(&mut b, &[1.0, 1.0]));
        observer.see_experts(
            &mut b,
            (1, 2),
            (&MoeShape { first: 3, ..shape }, &[vec![id("idle", 3)]]),
            &router,
            &x,
        );
        assert_eq!(means(&seen, "idle", 3), None);
        assert!(seen.importance().unwrap().of(&piece("idle", Part::Plane(3), None)).is_none());
    }

    #[test]
    fn what_is_no_number_is_an_error_and_what_is_all_zero_counts_alike() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let (dead, strange) = (piece("dead", Part::Whole, None), piece("strange", Part::Whole, None));
        let x = buf(&mut b, &[0.0, 0.0]);
        observer.see(&mut b, (1, 2), &[&MatrixId::of(&dead)], &x);
        assert!(seen.importance().unwrap().of(&dead).is_none());
        let x = buf(&mut b, &[1.0, f32::NAN]);
        observer.see(&mut b, (1, 2), &[&MatrixId::of(&strange)], &x);
        assert!(seen.importance().unwrap_err().to_string().contains("'strange'"));
    }
}
