//! Steps in flight: sends the steps of an iteration and those ahead of it, and processes them as they
//! complete.
//!
//! Invariant: the steps of a lane complete in the order in which they were sent. An iteration has at most one
//! step in flight; the steps ahead of it contain prefill chunks only, which do not depend on the results of
//! the steps before them.

use super::live::Piece;
use super::settle::Waiting;
use super::{MainStem, Work, fill};
use crate::actors::device::{Ran, Step};
use crate::actors::group::Running;
use crate::actors::kv::Plan;
use crate::actors::meters::StepSize;
use crate::actors::prefill::{Ahead, Chunk};
use crate::config::Policy;
use mainstem_kernels::{DeviceError, StepLimits};
use std::time::Instant;

/// The reusable buffers of a step that is not in flight, and the targets of its results.
pub(super) struct Load {
    pub(super) step: Box<Step>,
    pub(super) waiting: Waiting,
}

/// A step in flight.
pub(super) struct Flight {
    landing: Running,
    waiting: Waiting,
    kind: FlightKind,
    sent: Instant,
    size: StepSize,
}

/// Why a step was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlightKind {
    /// A step of the current iteration: the next iteration depends on its results.
    Turn,
    /// A step of prefill chunks only.
    Ahead,
}

impl Load {
    pub(super) fn with_capacity(limits: &StepLimits) -> Load {
        Load { step: Box::new(Step::with_capacity(limits)), waiting: Waiting::with_capacity(limits) }
    }
}

impl MainStem {
    /// Whether all steps of the current iteration have been processed.
    pub(super) fn turn_is_through(&self) -> bool {
        self.due.is_empty() && self.flights_of(FlightKind::Turn) == 0
    }

    /// Sends what can be sent, and processes the oldest step in flight. Returns at once if nothing is in
    /// flight.
    pub(super) async fn fly(&mut self) -> Result<(), DeviceError> {
        self.send_due()?;
        self.send_ahead().await?;
        self.land().await
    }

    /// Sends the iteration's step, if it is not in flight. Under [`Policy::Concurrent`] there is one step per
    /// sequence, sent one after the other.
    fn send_due(&mut self) -> Result<(), DeviceError> {
        if self.due.is_empty() || self.flights_of(FlightKind::Turn) > 0 {
            return Ok(());
        }
        let spans = match self.config.policy {
            Policy::Concurrent => 1,
            Policy::Fused | Policy::Window { .. } => self.due.len(),
        };
        let work: Vec<Work> = self.due.drain(..spans).collect();
        let plan = self.plan.take();
        self.launch(plan, &work, FlightKind::Turn)
    }

    /// Sends steps of prefill chunks only, as many as there are idle lanes, which leave the devices idle. The
    /// papers' baseline, one step per request, does not do this.
    async fn send_ahead(&mut self) -> Result<(), DeviceError> {
        let may_send = self.config.lanes > 1 && self.config.policy != Policy::Concurrent;
        while may_send && self.live.iter().any(|running| !running.handed_out) {
            let steps_ahead = self.flights_of(FlightKind::Ahead);
            let request = Ahead { lane: self.lane, budget: self.config.token_budget, ahead: steps_ahead };
            let chunks = self.neighbours.prefill_ahead.send(request).await.unwrap_or_default();
            let work: Vec<Work> = chunks.into_iter().filter_map(|chunk| self.take_on(chunk)).collect();
            if work.is_empty() {
                return Ok(());
            }
            self.launch(None, &work, FlightKind::Ahead)?;
        }
        Ok(())
    }

    /// Returns the work of a chunk of a prompt that started in an earlier iteration; `None` if its sequence
    /// has left.
    fn take_on(&mut self, Chunk { key, start, len, last, .. }: Chunk) -> Option<Work> {
        let at = self.live.iter().position(|running| running.key == key)?;
        self.live[at].handed_out = last;
        Some(Work::Chunk(at, Piece { start, len, last }))
    }

    /// Builds and sends a step of these spans and the slot plan's changes; then sends the events of the
    /// previous step.
    fn launch(&mut self, plan: Option<Plan>, work: &[Work], kind: FlightKind) -> Result<(), DeviceError> {
        let spare = self.spare.pop();
        let mut buffers = spare.unwrap_or_else(|| Load::with_capacity(&self.config.limits));
        self.fill(&mut buffers, plan, work);
        let Load { step, waiting: routing } = buffers;
        let size = fill::size(&step.batch);
        let result = self.neighbours.devices.send(step, self.epoch)?;
        let sent_at = self.meters.sent();
        self.flights.push_back(Flight { landing: result, waiting: routing, kind, sent: sent_at, size });
        self.flush();
        Ok(())
    }

    /// Waits for the oldest step in flight, and processes its results.
    pub(super) async fn land(&mut self) -> Result<(), DeviceError> {
        self.flush();
        let Some(Flight { landing: result, waiting: routing, sent: sent_at, size, .. }) =
            self.flights.pop_front()
        else {
            return Ok(());
        };
        let Ran { step, result } = result.await;
        self.neighbours.status.beat(self.lane);
        result?;
        self.made_at = self.meters.ran(sent_at, step.output.times, size);
        self.settle(&step.output, &routing);
        self.meters.settled();
        self.spare.push(Load { step, waiting: routing });
        Ok(())
    }

    /// Returns the number of steps of a kind in flight.
    fn flights_of(&self, kind: FlightKind) -> usize {
        self.flights.iter().filter(|step| step.kind == kind).count()
    }
}
