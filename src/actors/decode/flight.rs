//! Steps in flight: how they are sent off, those of a turn and those ahead of it, and how they land.
//!
//! Invariant: a lane's steps land in the order in which they were sent. A turn has one step in flight at most; those ahead
//! of it are prompt chunks alone, which need nothing of what comes of the steps before them.

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

/// A step that is not travelling, and who waits for what comes of it.
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

/// What a step is to its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlightKind {
    /// Of the turn at hand: the next turn needs what comes of it.
    Turn,
    /// Of prompt chunks alone.
    Ahead,
}

impl Load {
    pub(super) fn with_capacity(limits: &StepLimits) -> Load {
        Load { step: Box::new(Step::with_capacity(limits)), waiting: Waiting::with_capacity(limits) }
    }
}

impl MainStem {
    /// Whether all steps of the turn have landed.
    pub(super) fn turn_is_through(&self) -> bool {
        self.due.is_empty() && self.flights_of(FlightKind::Turn) == 0
    }

    /// Sends what can be sent, and settles what lands first. With nothing in flight, returns at once.
    pub(super) async fn fly(&mut self) -> Result<(), DeviceError> {
        self.send_due()?;
        self.send_ahead().await?;
        self.land().await
    }

    /// Sends the turn's step, if it is not in flight; under [`Policy::Concurrent`] one for each sequence, one by one.
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

    /// Sends steps of prompt chunks alone, as many as lanes rest: the devices would have nothing to do meanwhile. The
    /// papers' baseline, a step for each request, does without.
    async fn send_ahead(&mut self) -> Result<(), DeviceError> {
        let goes = self.config.lanes > 1 && self.config.policy != Policy::Concurrent;
        while goes && self.live.iter().any(|live| !live.handed_out) {
            let ahead = self.flights_of(FlightKind::Ahead);
            let question = Ahead { lane: self.lane, budget: self.config.token_budget, ahead };
            let chunks = self.neighbours.prefill_ahead.send(question).await.unwrap_or_default();
            let work: Vec<Work> = chunks.into_iter().filter_map(|chunk| self.take_on(chunk)).collect();
            if work.is_empty() {
                return Ok(());
            }
            self.launch(None, &work, FlightKind::Ahead)?;
        }
        Ok(())
    }

    /// The work of a chunk of a prompt that began in a turn before.
    fn take_on(&mut self, Chunk { key, start, len, last, .. }: Chunk) -> Option<Work> {
        let at = self.live.iter().position(|live| live.key == key)?;
        self.live[at].handed_out = last;
        Some(Work::Chunk(at, Piece { start, len, last }))
    }

    /// Sends a step of these spans, and what changed its place with it.
    fn launch(&mut self, plan: Option<Plan>, work: &[Work], kind: FlightKind) -> Result<(), DeviceError> {
        let load = self.spare.pop();
        let mut load = load.unwrap_or_else(|| Load::with_capacity(&self.config.limits));
        self.fill(&mut load, plan, work);
        let Load { step, waiting } = load;
        let size = fill::size(&step.batch);
        let landing = self.neighbours.devices.send(step, self.epoch)?;
        let sent = self.meters.sent();
        self.flights.push_back(Flight { landing, waiting, kind, sent, size });
        self.flush();
        Ok(())
    }

    /// Waits for the step that was sent first, and settles its results.
    pub(super) async fn land(&mut self) -> Result<(), DeviceError> {
        self.flush();
        let Some(Flight { landing, waiting, sent, size, .. }) = self.flights.pop_front() else {
            return Ok(());
        };
        let Ran { step, result } = landing.await;
        self.neighbours.status.beat(self.lane);
        result?;
        self.made_at = self.meters.ran(sent, step.output.times, size);
        self.settle(&step.output, &waiting);
        self.meters.settled();
        self.spare.push(Load { step, waiting });
        Ok(())
    }

    fn flights_of(&self, kind: FlightKind) -> usize {
        self.flights.iter().filter(|flight| flight.kind == kind).count()
    }
}
