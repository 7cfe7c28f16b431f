//! Importance matrix: the mean squared input of each matrix column, collected over the tokens of a text.
//!
//! Devices that are [`super::Observed`] add the inputs of their GEMMs to the shared [`Observations`]; an
//! [`ImportanceMatrix`] is computed from these. Projections that are fused in one stored matrix have the same
//! inputs.
//!
//! Invariant: every number is finite, and the mean over a matrix is 1. A matrix whose inputs were never
//! observed, or were all 0, has no entry.

use super::requantize::Rounding;
use anyhow::{Result, ensure};
use mainstem_kernels::MatrixId;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

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
            ensure!(mean.is_finite(), "the input of tensor '{}' is not finite", id.tensor());
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

    /// Adds rows of inputs (width) of a matrix.
    pub(super) fn add<'a>(&self, id: &MatrixId, width: usize, rows: impl Iterator<Item = &'a [f32]>) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let squares = match seen.entry(id.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(SquareSums { sums: vec![0.0; width], rows: 0 }),
        };
        for row in rows {
            squares.rows += 1;
            for (sum, value) in squares.sums.iter_mut().zip(row) {
                *sum += f64::from(*value).powi(2);
            }
        }
    }
}
