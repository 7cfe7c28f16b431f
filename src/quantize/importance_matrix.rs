//! Importance matrix: the mean squared input of each matrix column, collected over the tokens of a text.
//!
//! Devices that run the model pass the inputs of their GEMMs to an [`Observer`], which adds them to the
//! shared [`Observations`]; an [`ImportanceMatrix`] is computed from these. Projections that are fused in one
//! stored matrix have the same inputs.
//!
//! Invariant: every number is finite, and the mean over a matrix is 1. A matrix whose inputs were never
//! observed, or were all 0, has no entry.

use super::requantize::Rounding;
use anyhow::{Result, ensure};
use mainstem_kernels::{Backend, MoeShape};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Identifies a stored matrix: a whole tensor, or one of the matrices stacked in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatrixId {
    tensor: Arc<str>,
    plane: usize,
}

impl MatrixId {
    /// Identifies a matrix by its tensor's name and its index in that tensor; 0 for a whole tensor.
    pub fn new(tensor: &str, plane: usize) -> MatrixId {
        MatrixId { tensor: tensor.into(), plane }
    }
}

/// Selects how matrices are rounded when they are converted to another number format.
#[derive(Clone, Debug, Default)]
pub enum RoundingPolicy {
    /// Round to nearest, by the format's own equations.
    #[default]
    RoundToNearest,
    /// Minimize the squared error. Columns are weighted by the importance matrix if there is one, otherwise
    /// equally.
    LeastSquares(Option<Arc<ImportanceMatrix>>),
}

impl RoundingPolicy {
    /// Returns the rounding for some columns of a matrix (`None`: all), with their weights if they are known.
    pub fn rounding(&self, id: &MatrixId, columns: Option<Range<usize>>) -> Rounding<'_> {
        match self {
            RoundingPolicy::RoundToNearest => Rounding::RoundToNearest,
            RoundingPolicy::LeastSquares(importance) => Rounding::LeastSquares(
                importance.as_ref().and_then(|importance| importance.column_weights(id, columns)),
            ),
        }
    }
}

/// Weights of the columns of each matrix, normalized to a mean of 1.
#[derive(Debug, Default)]
pub struct ImportanceMatrix(HashMap<MatrixId, Vec<f32>>);

impl ImportanceMatrix {
    /// Returns the weights of some columns of a matrix (`None`: all); `None` if the matrix was not observed.
    pub fn column_weights(&self, id: &MatrixId, columns: Option<Range<usize>>) -> Option<&[f32]> {
        let weights = self.0.get(id)?;
        Some(&weights[columns.unwrap_or(0..weights.len())])
    }
}

/// Weight of the uniform prior: as many rows with equal columns are added to the observed rows.
const PRIOR_ROWS: f64 = 8.0;

/// Sums of squared inputs of each matrix, collected by any number of devices.
#[derive(Debug, Default)]
pub struct Observations(Mutex<HashMap<MatrixId, SquareSums>>);

/// Sums of squares of each column over the observed rows.
#[derive(Debug, Default)]
struct SquareSums {
    sums: Vec<f64>,
    rows: usize,
}

impl Observations {
    /// Returns the mean squared input of each column of a matrix; `None` if it was not observed.
    pub fn mean_squares(&self, id: &MatrixId) -> Option<Vec<f64>> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let SquareSums { sums, rows } = seen.get(id)?;
        (*rows > 0).then(|| sums.iter().map(|sum| sum / *rows as f64).collect())
    }

    /// Computes the importance matrix. Fails if an input was not finite.
    pub fn importance_matrix(&self) -> Result<ImportanceMatrix> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = HashMap::new();
        for (id, SquareSums { sums, rows }) in seen.iter() {
            let mean = sums.iter().sum::<f64>() / sums.len() as f64;
            ensure!(mean.is_finite(), "the input of tensor '{}' is not finite", id.tensor);
            if mean > 0.0 {
                // A uniform prior: few rows say little, and a column of zeros may have other values
                // elsewhere.
                let (known, supposed) = (*rows as f64, PRIOR_ROWS * mean / *rows as f64);
                let share = |sum: &f64| (sum + supposed) / (mean * (1.0 + PRIOR_ROWS / known));
                all.insert(id.clone(), sums.iter().map(|sum| share(sum) as f32).collect());
            }
        }
        Ok(ImportanceMatrix(all))
    }

    fn add<'a>(&self, id: &MatrixId, width: usize, rows: impl Iterator<Item = &'a [u8]>) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let squares = match seen.entry(id.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(SquareSums { sums: vec![0.0; width], rows: 0 }),
        };
        for row in rows {
            squares.rows += 1;
            for (sum, value) in squares.sums.iter_mut().zip(decode_f32(row)) {
                *sum += f64::from(value).powi(2);
            }
        }
    }
}

/// Records the GEMM inputs of one device in the shared [`Observations`].
pub struct Observer {
    observations: Arc<Observations>,
    /// Rows downloaded from the device: inputs, and router logits.
    inputs: Vec<u8>,
    logits: Vec<u8>,
}

impl Observer {
    /// Creates an observer that adds to `seen`.
    pub fn new(seen: Arc<Observations>) -> Observer {
        Observer { observations: seen, inputs: Vec::new(), logits: Vec::new() }
    }

    /// Records x (rows, width) as the input of the matrices `ids`.
    pub fn observe<B: Backend>(
        &mut self,
        b: &mut B,
        (rows, width): (usize, usize),
        ids: &[&MatrixId],
        x: &B::Buf,
    ) {
        download_f32(b, rows * width, x, &mut self.inputs);
        for id in without_repeats(ids.iter().copied()) {
            self.observations.add(id, width, self.inputs.chunks_exact(width * size_of::<f32>()));
        }
    }

    /// Records the rows of x (rows, width) as inputs of the local experts that they are routed to.
    pub fn observe_experts<B: Backend>(
        &mut self,
        b: &mut B,
        (rows, width): (usize, usize),
        (shape, ids): (&MoeShape, &[Vec<MatrixId>]),
        router: &B::Buf,
        x: &B::Buf,
    ) {
        download_f32(b, rows * width, x, &mut self.inputs);
        download_f32(b, rows * shape.experts, router, &mut self.logits);
        let inputs = || self.inputs.chunks_exact(width * size_of::<f32>());
        let logits = self.logits.chunks_exact(shape.experts * size_of::<f32>());
        let routed: Vec<Vec<usize>> = logits.map(|row| top_k_experts(row, shape.top_k)).collect();
        for (expert, ids) in (shape.first_expert..).zip(ids) {
            let own = || inputs().zip(&routed).filter(|(_, to)| to.contains(&expert)).map(|(row, _)| row);
            for id in without_repeats(ids) {
                self.observations.add(id, width, own());
            }
        }
    }
}

/// Returns the ids without consecutive duplicates: parts of one fused matrix have the same input and are
/// adjacent.
fn without_repeats<'a>(ids: impl IntoIterator<Item = &'a MatrixId>) -> Vec<&'a MatrixId> {
    let mut ids: Vec<_> = ids.into_iter().collect();
    ids.dedup();
    ids
}

fn download_f32<B: Backend>(b: &mut B, numbers: usize, from: &B::Buf, to: &mut Vec<u8>) {
    to.resize(numbers * size_of::<f32>(), 0);
    b.download(from, 0, to);
}

fn decode_f32(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

/// Returns the `top_k` experts with the largest logits, which also have the largest scores; ties go to the
/// lower index.
fn top_k_experts(logits: &[u8], top_k: usize) -> Vec<usize> {
    let logits: Vec<f32> = decode_f32(logits).collect();
    let mut experts: Vec<usize> = (0..logits.len()).collect();
    experts.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    experts.truncate(top_k);
    experts
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::reference::Reference;
    use mainstem_kernels::{Activation, HostBuf, Scoring};

    fn buf(b: &mut Reference, values: &[f32]) -> HostBuf {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut buf = b.alloc(bytes.len()).expect("the reference backend allocates");
        b.upload(&mut buf, 0, &bytes);
        buf
    }

    fn means(seen: &Observations, name: &str, plane: usize) -> Option<Vec<f64>> {
        seen.mean_squares(&MatrixId::new(name, plane))
    }

    /// Computed by hand: a step of two rows and a step of one. The third row of the buffer is not part of the
    /// first step.
    #[test]
    fn squares_are_averaged_over_the_rows_of_all_steps() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let (q, o) = (MatrixId::new("qkv", 0), MatrixId::new("o", 0));
        let x = buf(&mut b, &[1.0, -2.0, 0.0, 3.0, 4.0, 0.0, 9.0, 9.0, 9.0]);
        // The three parts of a fused matrix have the same input.
        observer.observe(&mut b, (2, 3), &[&q, &q, &q], &x);
        assert_eq!(seen.mean_squares(&q), Some(vec![5.0, 10.0, 0.0]));
        let x = buf(&mut b, &[0.0, 1.0, 0.0]);
        observer.observe(&mut b, (1, 3), &[&q, &o], &x);
        assert_eq!(seen.mean_squares(&q), Some(vec![10.0 / 3.0, 7.0, 0.0]));
        assert_eq!(seen.mean_squares(&o), Some(vec![0.0, 1.0, 0.0]));
        let importance = seen.importance_matrix().unwrap();
        let mean = (10.0 / 3.0 + 7.0) / 3.0;
        // Three observed rows, and eight rows of the prior.
        let expected = [10.0 / 3.0, 7.0, 0.0].map(|x: f64| ((3.0 * x + 8.0 * mean) / (11.0 * mean)) as f32);
        let found = importance.column_weights(&q, None).unwrap();
        assert!(found.iter().zip(expected).all(|(found, x)| (found - x).abs() < 1e-6), "{found:?}");
        assert_eq!(importance.column_weights(&q, Some(1..3)), Some(&found[1..]));
        assert!(importance.column_weights(&MatrixId::new("k", 0), None).is_none());
    }

    /// Each row goes to the two experts with the largest logits; the local experts start at number 1.
    #[test]
    fn experts_see_the_rows_that_are_routed_to_them() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let shape = MoeShape {
            experts: 4,
            first_expert: 1,
            top_k: 2,
            scoring: Scoring::Softmax,
            normalize_scores: true,
            scale: 1.0,
            width: 1,
            activation: Activation::Silu,
        };
        let id = MatrixId::new;
        let ids =
            vec![vec![id("gate", 1), id("up", 1)], vec![id("both", 2), id("both", 2)], vec![id("gate", 3)]];
        // Experts 0 and 2, then 2 and 3, then 0 and 1 because all four logits are equal.
        let router = buf(&mut b, &[9.0, 1.0, 5.0, 2.0, -3.0, -4.0, -1.0, -2.0, 7.0, 7.0, 7.0, 7.0]);
        let x = buf(&mut b, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        observer.observe_experts(&mut b, (3, 2), (&shape, &ids), &router, &x);
        assert_eq!(means(&seen, "gate", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "up", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "both", 2), Some(vec![5.0, 10.0]));
        assert_eq!(means(&seen, "gate", 3), Some(vec![9.0, 16.0]));
        assert_eq!(means(&seen, "gate", 0), None);
        // The only local expert is the last one, and the row is routed to others.
        let (router, x) = (buf(&mut b, &[9.0, 0.0, 8.0, 0.0]), buf(&mut b, &[1.0, 1.0]));
        observer.observe_experts(
            &mut b,
            (1, 2),
            (&MoeShape { first_expert: 3, ..shape }, &[vec![id("idle", 3)]]),
            &router,
            &x,
        );
        assert_eq!(means(&seen, "idle", 3), None);
        assert!(seen.importance_matrix().unwrap().column_weights(&id("idle", 3), None).is_none());
    }

    #[test]
    fn what_is_no_number_is_an_error_and_what_is_all_zero_counts_alike() {
        let (mut b, seen) = (Reference::new(), Arc::<Observations>::default());
        let mut observer = Observer::new(seen.clone());
        let (dead, strange) = (MatrixId::new("dead", 0), MatrixId::new("strange", 0));
        let x = buf(&mut b, &[0.0, 0.0]);
        observer.observe(&mut b, (1, 2), &[&dead], &x);
        assert!(seen.importance_matrix().unwrap().column_weights(&dead, None).is_none());
        let x = buf(&mut b, &[1.0, f32::NAN]);
        observer.observe(&mut b, (1, 2), &[&strange], &x);
        assert!(seen.importance_matrix().unwrap_err().to_string().contains("'strange'"));
    }
}
