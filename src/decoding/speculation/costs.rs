//! An estimate of the time of a step from the times of the steps before.

use std::time::Duration;

/// Weight of an observation after the next one.
const DECAY: f64 = 0.99;

/// Weights of a small preference for small coefficients, which decides where observations do not. Time counts
/// as that of a step first: drafts that seem to cost nothing are made, which shows what they cost.
const RIDGE: [f64; 4] = [1e-6, 1e-4, 1e-4, 1e-4];

/// An observation counts as at most this times its estimate, once there are some others: a page fault or a
/// busy machine says nothing about the next step.
const OUTLIER: f64 = 4.0;

/// The parts of the work of a step that its time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Number of rows of the target.
    pub rows: usize,
    /// Number of passes of the draft model.
    pub passes: usize,
    /// Number of rows of all of these passes.
    pub draft_rows: usize,
}

/// The time of a step in seconds: `step` + `row` rows + `pass` passes + `draft_row` draft rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    pub step: f64,
    pub row: f64,
    pub pass: f64,
    pub draft_row: f64,
}

/// Fits a [`StepCost`] to the times of steps.
///
/// The coefficients θ >= 0 minimize Σ w (θ x - t)^2 + Σ_i r_i θ_i^2 Σ w x_i^2 over all steps, where x is (1,
/// rows, passes, draft rows), t the time, w falls by 1 % per step, and r is 1e-6 for the first term and 1e-4
/// for the others. If the time of drafts is known, the first two and the last two coefficients are fitted to
/// the two parts of the time. The second sum decides among terms that the observations do not tell apart: if
/// all steps have the same number of rows, nearly no time is counted as the cost of rows.
#[derive(Clone, Debug, Default)]
pub struct StepCosts {
    /// Σ w x x^T and Σ w x t.
    products: [[f64; 4]; 4],
    times: [f64; 4],
    fitted: StepCost,
}

impl StepCost {
    /// Returns the time of a step in seconds.
    pub fn seconds(&self, work: &StepWork) -> f64 {
        let terms = features(work).into_iter().zip(self.coefficients());
        terms.map(|(x, coefficient)| x * coefficient).sum()
    }

    fn coefficients(&self) -> [f64; 4] {
        [self.step, self.row, self.pass, self.draft_row]
    }
}

impl StepCosts {
    /// Adds a step, which took the time `whole`, of which `draft` for drafts; the latter is 0 if it is not
    /// known. Steps with prompt chunks should not be counted, because the time of their
    /// many rows says little about a few more.
    pub fn observe(&mut self, work: &StepWork, whole: Duration, draft: Duration) {
        self.products.iter_mut().flatten().chain(&mut self.times).for_each(|sum| *sum *= DECAY);
        if draft.is_zero() {
            self.add(features(work), whole);
        } else {
            let [one, rows, passes, draft_rows] = features(work);
            self.add([one, rows, 0.0, 0.0], whole.saturating_sub(draft));
            self.add([0.0, 0.0, passes, draft_rows], draft);
        }
        self.fit();
    }

    fn add(&mut self, x: [f64; 4], time: Duration) {
        let mut seconds = time.as_secs_f64();
        let estimate: f64 = x.iter().zip(self.fitted.coefficients()).map(|(x, value)| x * value).sum();
        // The first passes of the draft model have no estimate yet.
        if self.products[0][0] > 8.0 && estimate > 0.0 {
            seconds = seconds.min(OUTLIER * estimate);
        }
        for i in 0..4 {
            self.times[i] += x[i] * seconds;
            for j in 0..4 {
                self.products[i][j] += x[i] * x[j];
            }
        }
    }

    /// Returns the estimate; 0 for terms that no step had.
    pub fn estimate(&self) -> &StepCost {
        &self.fitted
    }

    /// Fits the coefficients: tries all sets of those that may be above 0.
    fn fit(&mut self) {
        let mut best = (f64::INFINITY, [0.0; 4]);
        for set in 0..16u8 {
            let coefficients = self.solve(|i| set >> i & 1 == 1 && self.products[i][i] > 0.0);
            if coefficients.iter().all(|&coefficient| coefficient >= 0.0) {
                let error = self.error(&coefficients);
                if error < best.0 {
                    best = (error, coefficients);
                }
            }
        }
        let [step, row, pass, draft_row] = best.1;
        self.fitted = StepCost { step, row, pass, draft_row };
    }

    /// Returns the best coefficients of which only some may differ from 0.
    fn solve(&self, is_free: impl Fn(usize) -> bool) -> [f64; 4] {
        let mut rows = [[0.0; 5]; 4];
        for (i, row) in rows.iter_mut().enumerate() {
            for (j, value) in row[..4].iter_mut().enumerate() {
                let product = if i == j { self.regular(i) } else { self.products[i][j] };
                *value = if is_free(i) && is_free(j) { product } else { f64::from(u8::from(i == j)) };
            }
            row[4] = if is_free(i) { self.times[i] } else { 0.0 };
        }
        // The matrix is positive definite, so no pivot is 0.
        for i in 0..4 {
            let pivot = rows[i].map(|value| value / rows[i][i]);
            for (j, row) in rows.iter_mut().enumerate() {
                let factor = row[i];
                for (value, pivot) in row.iter_mut().zip(pivot) {
                    *value = if i == j { pivot } else { *value - factor * pivot };
                }
            }
        }
        rows.map(|row| row[4])
    }

    /// Returns the error that is minimized, up to a constant.
    fn error(&self, coefficients: &[f64; 4]) -> f64 {
        let mut error = 0.0;
        for i in 0..4 {
            for j in 0..4 {
                let product = if i == j { self.regular(i) } else { self.products[i][j] };
                error += coefficients[i] * coefficients[j] * product;
            }
            error -= 2.0 * coefficients[i] * self.times[i];
        }
        error
    }

    fn regular(&self, i: usize) -> f64 {
        self.products[i][i] * (1.0 + RIDGE[i])
    }
}

fn features(work: &StepWork) -> [f64; 4] {
    [1.0, work.rows as f64, work.passes as f64, work.draft_rows as f64]
}
