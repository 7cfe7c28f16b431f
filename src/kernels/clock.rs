//! The times of a step on a backend that computes while its caller waits.
//!
//! Invariant: steps do not overlap: each is ended before the next begins.

use crate::batch::StepTimes;
use std::time::{Duration, Instant};

/// Measures the step between `begin_step` and `end_step`.
#[derive(Debug, Default)]
pub(crate) struct StepClock {
    began: Option<Instant>,
    sample: Duration,
}

impl StepClock {
    /// Starts a step. Panics if the previous one has not been ended.
    pub(crate) fn begin(&mut self) {
        let open = self.began.replace(Instant::now());
        assert!(open.is_none(), "begin_step before the end of the previous step; this is a bug");
        self.sample = Duration::ZERO;
    }

    /// Runs `work`, which counts as sampling.
    pub(crate) fn sample(&mut self, work: impl FnOnce()) {
        let began = Instant::now();
        work();
        self.sample += began.elapsed();
    }

    /// Ends the step and returns its times. Panics without a step.
    pub(crate) fn end(&mut self) -> StepTimes {
        let began = self.began.take().expect("end_step without begin_step; this is a bug");
        let forward = began.elapsed().saturating_sub(self.sample);
        StepTimes { forward, sample: self.sample, draft: Duration::ZERO }
    }
}
