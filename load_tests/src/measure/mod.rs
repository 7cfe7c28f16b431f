//! Samples to figures: latencies with exact percentiles, throughput, counts.
//!
//! Invariant: latency runs from when a request was due, so that no lateness is lost, whoever's it is.

mod series;
mod stats;

use std::{collections::BTreeMap, time::Duration};

use crate::{
    report::RunReport,
    run::{Record, Settings},
    sample::Sample,
};

pub use stats::{Stats, percentile};

impl Sample {
    /// How late the generator sent the request.
    pub fn lateness(&self) -> Duration {
        self.sent.saturating_sub(self.scheduled)
    }

    /// Time to first token; `None` when none came.
    pub fn ttft(&self) -> Option<Duration> {
        self.deliveries.first().map(|delivery| delivery.at().saturating_sub(self.scheduled))
    }

    /// Time to the last token; `None` when none came.
    pub fn e2e(&self) -> Option<Duration> {
        self.deliveries.last().map(|delivery| delivery.at().saturating_sub(self.scheduled))
    }

    /// Mean time per token after the first; `None` when there was no more than one.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first = self.output_len.checked_sub(1).filter(|&n| n > 0)?;
        Some(self.e2e()?.saturating_sub(self.ttft()?) / after_first)
    }

    /// The gaps between events that brought tokens.
    pub fn itls(&self) -> impl Iterator<Item = Duration> {
        self.deliveries.windows(2).map(|pair| pair[1].at().saturating_sub(pair[0].at()))
    }
}

/// Limits a completed request must keep to be good, in milliseconds by measure: `ttft`, `tpot`, `e2el`.
pub type Limits = BTreeMap<String, f64>;

/// The report of a run.
pub fn report(_settings: &Settings, _record: &Record, _limits: &Limits) -> RunReport {
    todo!()
}
