//! An estimate of the time of a step from the times of the steps before.

use crate::decoding::time_fit::{TimeFit, dot};
use std::time::Duration;

/// Weights of a small preference for small coefficients, which decides where observations do not. Time counts
/// as that of a step first: drafts that seem to cost nothing are made, which shows what they cost.
const RIDGE: [f64; 4] = [1e-6, 1e-4, 1e-4, 1e-4];

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
#[derive(Clone, Debug)]
pub struct StepCosts {
    fit: TimeFit<4>,
    fitted: StepCost,
}

impl Default for StepCosts {
    fn default() -> StepCosts {
        StepCosts { fit: TimeFit::new(RIDGE), fitted: StepCost::default() }
    }
}

impl StepCost {
    /// Returns the time of a step in seconds.
    pub fn seconds(&self, work: &StepWork) -> f64 {
        dot(&features(work), &[self.step, self.row, self.pass, self.draft_row])
    }
}

impl StepCosts {
    /// Adds a step, which took the time `whole`, of which `draft` for drafts; the latter is 0 if it is not
    /// known. Steps with prompt chunks should not be counted, because the time of their
    /// many rows says little about a few more.
    pub fn observe(&mut self, work: &StepWork, whole: Duration, draft: Duration) {
        self.fit.decay();
        if draft.is_zero() {
            self.fit.add(features(work), whole);
        } else {
            let [one, rows, passes, draft_rows] = features(work);
            self.fit.add([one, rows, 0.0, 0.0], whole.saturating_sub(draft));
            self.fit.add([0.0, 0.0, passes, draft_rows], draft);
        }
        let [step, row, pass, draft_row] = self.fit.solve();
        self.fitted = StepCost { step, row, pass, draft_row };
    }

    /// Returns the estimate; 0 for terms that no step had.
    pub fn estimate(&self) -> &StepCost {
        &self.fitted
    }
}

fn features(work: &StepWork) -> [f64; 4] {
    [1.0, work.rows as f64, work.passes as f64, work.draft_rows as f64]
}
