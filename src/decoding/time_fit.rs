//! A fit of times to the work that took them.
//!
//! Invariant: no coefficient is negative, whatever was observed.

use std::time::Duration;

/// Weight of an observation after the next one.
const DECAY: f64 = 0.99;

/// An observation counts as at most this times its estimate, once there are some others: a page fault or a
/// busy machine says nothing about the next step.
const OUTLIER: f64 = 4.0;

/// Fits coefficients θ >= 0 to times t of work with features x: they minimize
/// Σ w (θ x - t)^2 + Σ_i r_i θ_i^2 Σ w x_i^2 over all observations, whose weight w falls by 1 % with each
/// [`TimeFit::decay`]. The weights r of the second sum decide among terms that the observations do not tell
/// apart.
#[derive(Clone, Debug)]
pub struct TimeFit<const N: usize> {
    ridge: [f64; N],
    /// Σ w x x^T and Σ w x t.
    products: [[f64; N]; N],
    times: [f64; N],
    fitted: [f64; N],
}

impl<const N: usize> TimeFit<N> {
    /// Creates a fit without observations, with the weights r > 0.
    pub fn new(ridge: [f64; N]) -> TimeFit<N> {
        TimeFit { ridge, products: [[0.0; N]; N], times: [0.0; N], fitted: [0.0; N] }
    }

    /// Lets the observations so far weigh less.
    pub fn decay(&mut self) {
        self.products.iter_mut().flatten().chain(&mut self.times).for_each(|sum| *sum *= DECAY);
    }

    /// Adds an observation.
    pub fn add(&mut self, x: [f64; N], time: Duration) {
        let mut seconds = time.as_secs_f64();
        let estimate = dot(&x, &self.fitted);
        // The first observations of a kind have no estimate yet.
        if self.products[0][0] > 8.0 && estimate > 0.0 {
            seconds = seconds.min(OUTLIER * estimate);
        }
        for i in 0..N {
            self.times[i] += x[i] * seconds;
            for j in 0..N {
                self.products[i][j] += x[i] * x[j];
            }
        }
    }

    /// Returns the coefficients, in seconds; 0 for features that no observation had. Tries all sets of those
    /// that may be above 0.
    pub fn solve(&mut self) -> [f64; N] {
        let mut best = (f64::INFINITY, [0.0; N]);
        for set in 0..1u32 << N {
            let coefficients = self.solve_for(|i| set >> i & 1 == 1 && self.products[i][i] > 0.0);
            if coefficients.iter().all(|&coefficient| coefficient >= 0.0) {
                let error = self.error(&coefficients);
                if error < best.0 {
                    best = (error, coefficients);
                }
            }
        }
        self.fitted = best.1;
        self.fitted
    }

    /// Returns the best coefficients of which only some may differ from 0.
    fn solve_for(&self, is_free: impl Fn(usize) -> bool) -> [f64; N] {
        let mut rows = [[0.0; N]; N];
        let mut values = [0.0; N];
        for (i, row) in rows.iter_mut().enumerate() {
            for (j, entry) in row.iter_mut().enumerate() {
                let product = if i == j { self.regular(i) } else { self.products[i][j] };
                *entry = if is_free(i) && is_free(j) { product } else { f64::from(u8::from(i == j)) };
            }
            values[i] = if is_free(i) { self.times[i] } else { 0.0 };
        }
        // The matrix is positive definite, so no pivot is 0.
        for i in 0..N {
            let (pivot, share) = (rows[i].map(|entry| entry / rows[i][i]), values[i] / rows[i][i]);
            for (j, (row, value)) in rows.iter_mut().zip(&mut values).enumerate() {
                let factor = row[i];
                if i == j {
                    (*row, *value) = (pivot, share);
                } else {
                    row.iter_mut().zip(pivot).for_each(|(entry, pivot)| *entry -= factor * pivot);
                    *value -= factor * share;
                }
            }
        }
        values
    }

    /// Returns the error that is minimized, up to a constant.
    fn error(&self, coefficients: &[f64; N]) -> f64 {
        let mut error = 0.0;
        for i in 0..N {
            for j in 0..N {
                let product = if i == j { self.regular(i) } else { self.products[i][j] };
                error += coefficients[i] * coefficients[j] * product;
            }
            error -= 2.0 * coefficients[i] * self.times[i];
        }
        error
    }

    fn regular(&self, i: usize) -> f64 {
        self.products[i][i] * (1.0 + self.ridge[i])
    }
}

/// Returns Σ a_i b_i.
pub fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
