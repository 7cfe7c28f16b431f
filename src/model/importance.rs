//! How much each column of a matrix counts: the mean of the squares of what it is multiplied by, over the tokens of a text.
//!
//! Devices that run the model show an [`Observer`] what their products read; what all of them have seen is in
//! [`Observations`], and comes to an [`Importance`]. What is fused in one stored matrix reads the same.
//! Invariant: every number of it is finite, and 1 in the mean of a matrix. A matrix whose inputs nobody has seen, or which
//! were all 0, has none.

use super::coding::Codes;
use super::spec::{Part, Piece};
use anyhow::{Result, ensure};
use mainstem_kernels::{Backend, MoeShape};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

/// A stored matrix: a tensor, or one of those that are stacked in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatrixId {
    tensor: Arc<str>,
    plane: usize,
}

impl MatrixId {
    /// The one that a piece is a part of.
    pub fn of(piece: &Piece) -> MatrixId {
        let plane = if let Part::Plane(plane) = piece.part { plane } else { 0 };
        MatrixId { tensor: piece.name.as_str().into(), plane }
    }
}

/// How the codes of a model's matrices are chosen, where they get another number format.
#[derive(Clone, Debug, Default)]
pub enum Choice {
    /// By the formats' own equations.
    #[default]
    Equations,
    /// By least squares. Columns count by what was observed, or all alike.
    LeastSquares(Option<Arc<Importance>>),
}

impl Choice {
    /// Those of a piece.
    pub fn of(&self, piece: &Piece) -> Codes<'_> {
        match self {
            Choice::Equations => Codes::Equations,
            Choice::LeastSquares(importance) => {
                Codes::LeastSquares(importance.as_ref().and_then(|importance| importance.of(piece)))
            }
        }
    }
}

/// By matrix, how much each of its columns counts.
#[derive(Debug, Default)]
pub struct Importance(HashMap<MatrixId, Vec<f32>>);

impl Importance {
    /// Of the columns that a piece has.
    pub fn of(&self, piece: &Piece) -> Option<&[f32]> {
        let columns = self.0.get(&MatrixId::of(piece))?;
        Some(&columns[piece.cut.columns.clone().unwrap_or(0..columns.len())])
    }
}

/// Rows that are supposed beside those that were seen, all of whose columns are alike.
const SUPPOSED_ROWS: f64 = 8.0;

/// What has been seen so far, by however many devices.
#[derive(Debug, Default)]
pub struct Observations(Mutex<HashMap<MatrixId, Squares>>);

/// Sums over rows.
#[derive(Debug, Default)]
struct Squares {
    sums: Vec<f64>,
    rows: usize,
}

impl Observations {
    /// The mean of the squares of what each column of a piece's matrix was multiplied by; `None` if it was not seen.
    pub fn means(&self, piece: &Piece) -> Option<Vec<f64>> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Squares { sums, rows } = seen.get(&MatrixId::of(piece))?;
        (*rows > 0).then(|| sums.iter().map(|sum| sum / *rows as f64).collect())
    }

    /// What they come to. An input that is no number is an error.
    pub fn importance(&self) -> Result<Importance> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = HashMap::new();
        for (id, Squares { sums, rows }) in seen.iter() {
            let mean = sums.iter().sum::<f64>() / sums.len() as f64;
            ensure!(mean.is_finite(), "what the model multiplies '{}' by is no number", id.tensor);
            if mean > 0.0 {
                // As if so many rows more were all alike: few rows say little, and a column of zeros may have others elsewhere.
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

/// A device's way to show what its products read.
pub struct Observer {
    seen: Arc<Observations>,
    /// Rows brought from the device: inputs, and router logits.
    inputs: Vec<u8>,
    logits: Vec<u8>,
}

impl Observer {
    pub fn new(seen: Arc<Observations>) -> Observer {
        Observer { seen, inputs: Vec::new(), logits: Vec::new() }
    }

    /// These matrices are multiplied by x (rows, width).
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

    /// Those of the experts that a device has are multiplied by the rows of x (rows, width) that are routed to them.
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

/// Parts of one stored matrix have read the same, and stand beside each other.
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

/// The experts with the largest logits, which have the largest scores; of equals the first.
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
        let mut buf = b.alloc(bytes.len()).expect("there is room");
        b.upload(&mut buf, 0, &bytes);
        buf
    }

    fn means(seen: &Observations, name: &str, plane: usize) -> Option<Vec<f64>> {
        seen.means(&piece(name, Part::Plane(plane), None))
    }

    /// By hand: two steps of two rows and of one; the third row of the buffer is not the step's.
    #[test]
    fn squares_are_averaged_over_the_rows_of_all_steps() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let whole = piece("qkv", Part::Whole, None);
        let (q, o) = (MatrixId::of(&whole), MatrixId::of(&piece("o", Part::Whole, None)));
        let x = buf(&mut b, &[1.0, -2.0, 0.0, 3.0, 4.0, 0.0, 9.0, 9.0, 9.0]);
        // Of a fused matrix three parts read the same.
        observer.see(&mut b, (2, 3), &[&q, &q, &q], &x);
        assert_eq!(seen.means(&whole), Some(vec![5.0, 10.0, 0.0]));
        let x = buf(&mut b, &[0.0, 1.0, 0.0]);
        observer.see(&mut b, (1, 3), &[&q, &o], &x);
        assert_eq!(seen.means(&whole), Some(vec![10.0 / 3.0, 7.0, 0.0]));
        assert_eq!(seen.means(&piece("o", Part::Whole, None)), Some(vec![0.0, 1.0, 0.0]));
        let importance = seen.importance().unwrap();
        let mean = (10.0 / 3.0 + 7.0) / 3.0;
        // Three rows, and eight that are supposed.
        let expected = [10.0 / 3.0, 7.0, 0.0].map(|x: f64| ((3.0 * x + 8.0 * mean) / (11.0 * mean)) as f32);
        let found = importance.of(&whole).unwrap();
        assert!(found.iter().zip(expected).all(|(found, x)| (found - x).abs() < 1e-6), "{found:?}");
        assert_eq!(importance.of(&piece("qkv", Part::Whole, Some(1..3))), Some(&found[1..]));
        assert!(importance.of(&piece("k", Part::Whole, None)).is_none());
    }

    /// Each row goes to the two experts of the largest logits; of those that are here the numbers begin at 1.
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
        // Experts 0 and 2, then 2 and 3, then 0 and 1 of four alike.
        let router = buf(&mut b, &[9.0, 1.0, 5.0, 2.0, -3.0, -4.0, -1.0, -2.0, 7.0, 7.0, 7.0, 7.0]);
        let x = buf(&mut b, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        observer.see_experts(&mut b, (3, 2), (&shape, &ids), &router, &x);
        assert_eq!(means(&seen, "gate", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "up", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "both", 2), Some(vec![5.0, 10.0]));
        assert_eq!(means(&seen, "gate", 3), Some(vec![9.0, 16.0]));
        assert_eq!(means(&seen, "gate", 0), None);
        // A row for the first one alone, and the last one is here too.
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
