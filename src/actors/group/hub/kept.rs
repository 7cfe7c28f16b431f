//! The supervisor's interface to the group state.
//!
//! Invariant: a group serves steps only when every device has been built in the same build.

use super::{Hub, Life, Member, News, Phase, Place, State, THREAD_ENDED};
use crate::actors::group::link::Post;
use crate::actors::group::mailbox::{Duty, Mailbox, Order, Seat};
use crate::model::executor::ExecutorReport;
use anyhow::{Result, anyhow, ensure};
use mainstem_kernels::collective::local;
use mainstem_kernels::{Abort, Aborted, Alone, Collective, DeviceError};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// Numbers per collective exchange: as many as fit into a core's cache.
const EXCHANGED: usize = 1 << 15;

/// Returns the bytes that a stage's ranks need for collectives: two buffers per rank.
pub(in crate::actors::group) fn exchange_bytes(ranks: usize) -> usize {
    if ranks > 1 { 2 * ranks * EXCHANGED * size_of::<f32>() } else { 0 }
}

impl Hub {
    /// Waits until recovery is necessary, and returns the reason; `None` when the group stops. While the
    /// devices are unavailable, recovery is retried after `again` at the latest, because nobody may send
    /// steps to a group that cannot serve.
    pub fn next_news(&self, again: Duration) -> Option<News> {
        let again = Instant::now() + again;
        let mut state = self.lock();
        loop {
            let due = self.config.step_timeout.map(|timeout| (timeout, state.steps.due(timeout)));
            let now = Instant::now();
            state = match (state.phase, due) {
                (Phase::Stopping, _) => return None,
                (Phase::Failed, _) => return Some(News::Failed),
                (Phase::Away, _) if state.steps.wait() || again <= now => return Some(News::Wanted),
                (Phase::Away, _) => self.wait(state, Some(again)),
                (Phase::Serving, Some((timeout, Some(due)))) if due <= now => {
                    self.fail_for_silence(&mut state, timeout);
                    return Some(News::Stalled);
                }
                // A step sent meanwhile has a later deadline.
                (Phase::Serving, Some((timeout, due))) => {
                    self.wait(state, Some(due.unwrap_or(now + timeout)))
                }
                (Phase::Serving, None) => self.wait(state, None),
            }
        }
    }

    /// Fails the group because of a timeout; which devices stalled is found out later.
    fn fail_for_silence(&self, state: &mut State, timeout: Duration) {
        let fault = DeviceError::Fault(format!("no answer within {timeout:?}"));
        let label = self.config.what();
        error!(step = state.steps.oldest(), %fault, "{label} failed; it is being rebuilt");
        state.give_up(&fault);
    }

    /// Whether the group is stopping.
    pub fn is_stopping(&self) -> bool {
        self.lock().phase == Phase::Stopping
    }

    /// Commands every device to drop its executor.
    pub fn clear(&self) {
        for rank_state in self.lock().members.iter_mut().flatten() {
            rank_state.cleared = false;
            rank_state.mailbox.put(Order::Clear);
        }
    }

    /// Waits until every device has dropped its executor, at most until `until`. Returns the devices that
    /// have not. A device without a thread holds nothing.
    pub fn not_cleared(&self, until: Option<Instant>) -> Vec<Place> {
        let mut state = self.lock();
        loop {
            let left = state.places(Member::is_busy);
            if left.is_empty() || is_over(until) || state.phase == Phase::Stopping {
                return left;
            }
            state = self.wait(state, until);
        }
    }

    /// Waits like [`GroupState::wait_cleared`], but without time limit for a device that already has another
    /// hung thread, so that the number of threads holding a model stays bounded. Meanwhile, waiting steps
    /// fail. Returns the devices whose threads are to be abandoned.
    pub fn to_give_up(&self, until: Option<Instant>) -> Vec<Place> {
        let mut left = self.not_cleared(until);
        let mut state = self.lock();
        loop {
            let again = state.places(|rank_state| rank_state.is_busy() && rank_state.hanging > 0);
            if again.is_empty() || state.phase == Phase::Stopping {
                left.retain(|id| state.member(*id).is_some_and(|rank_state| rank_state.is_busy()));
                return left;
            }
            self.tell_waiting(&mut state, &again, "hangs, as does its previous thread");
            state = self.wait(state, None);
        }
    }

    /// Logs the devices that have not dropped their executors after a timeout, unless the group is stopping.
    pub fn name_stalled(&self, stalled: &[Place]) {
        if !stalled.is_empty() && !self.is_stopping() {
            warn!(devices = self.names(stalled), "devices have not released their model parts yet");
        }
    }

    /// Returns the devices without a thread.
    pub fn dead(&self) -> Vec<Place> {
        self.lock().places(|rank_state| rank_state.life == Life::Gone)
    }

    /// Abandons the thread of a device: closes its mailbox, and ignores its reports from now on. Returns
    /// false, and does nothing, if the thread has ended or dropped its executor meanwhile, or if the group is
    /// stopping.
    pub fn disown(&self, id: Place) -> bool {
        let mut state = self.lock();
        let stopping = state.phase == Phase::Stopping;
        match state.member(id) {
            Some(rank_state) if !stopping && rank_state.is_busy() => {
                rank_state.mailbox.close();
                rank_state.incarnation += 1;
                rank_state.life = Life::Gone;
                rank_state.hanging += 1;
                true
            }
            _ => false,
        }
    }

    /// Registers a new thread for a device that has none. Returns its id and mailbox; `None` if the group is
    /// stopping.
    pub fn replace(&self, old: Place) -> Option<(Place, Arc<Mailbox>)> {
        let mut state = self.lock();
        if state.phase == Phase::Stopping {
            return None;
        }
        let incarnation = old.incarnation + 1;
        let mailbox = Arc::new(Mailbox::new(self.config.lanes));
        let rank_state = &mut state.members[old.stage][old.rank];
        let hung_threads = rank_state.hanging;
        *rank_state = Member {
            mailbox: mailbox.clone(),
            incarnation,
            life: Life::Lives,
            cleared: true,
            built: None,
            hanging: hung_threads,
        };
        Some((Place { incarnation, ..old }, mailbox))
    }

    /// Marks the devices as unavailable.
    pub fn away(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.phase = Phase::Away;
        }
    }

    /// Commands every device to build its executor.
    pub fn build(&self) {
        let mut state = self.lock();
        state.build += 1;
        state.abort = Abort::new();
        for stage in 0..state.members.len() {
            self.build_stage(&mut state, stage);
        }
    }

    /// Commands the devices of a stage to build their executors, with collectives among them.
    fn build_stage(&self, state: &mut State, stage: usize) {
        let (build, abort) = (state.build, state.abort.clone());
        let collectives: Vec<Box<dyn Collective>> = match state.members[stage].len() {
            1 => vec![Box::new(Alone)],
            ranks => {
                let ranks = local::stage(ranks, EXCHANGED, &abort);
                ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Collective>).collect()
            }
        };
        for (rank, collective) in collectives.into_iter().enumerate() {
            let role = if rank == 0 { self.duty(state, stage) } else { Duty::Nothing };
            let rank_state = &mut state.members[stage][rank];
            rank_state.built = None;
            let assignment = Seat { build, abort: abort.clone(), duty: role };
            rank_state.mailbox.put(Order::Build(assignment, collective));
        }
    }

    /// Returns the role of the first rank of a stage.
    fn duty(&self, state: &State, stage: usize) -> Duty {
        let Some(next) = state.members.get(stage + 1) else { return Duty::Answer };
        let senders =
            next.iter().map(|rank_state| Post::new(rank_state.mailbox.clone(), state.build)).collect();
        Duty::HandOn((self.config.linking)(senders, self.config.room()))
    }

    /// Waits until every device has reported its build. If several failed, the error is one that is not a
    /// mere consequence of another. Waiting steps fail after `until`, but the builds themselves are waited
    /// for without limit: a device cannot be rebuilt elsewhere, as it holds the memory.
    pub fn wait_built(&self, until: Option<Instant>) -> Result<Vec<Vec<ExecutorReport>>> {
        let mut state = self.lock();
        loop {
            let left =
                state.places(|rank_state| rank_state.life == Life::Lives && rank_state.built.is_none());
            if left.is_empty() || state.phase == Phase::Stopping {
                break;
            }
            let is_late = is_over(until);
            if is_late {
                self.tell_waiting(&mut state, &left, "is still being built and exceeds its time limit");
            }
            state = self.wait(state, until.filter(|_| !is_late));
        }
        ensure!(state.phase != Phase::Stopping, "the group is stopped");
        let mut reports = Vec::with_capacity(state.members.len());
        let mut errors = Vec::new();
        for (ranks, names) in state.members.iter_mut().zip(&self.config.names) {
            let built = ranks.iter_mut().zip(names).filter_map(|(rank_state, name)| {
                let ended = || Err(anyhow!("{name}: {THREAD_ENDED}"));
                rank_state.built.take().unwrap_or_else(ended).map_err(|error| errors.push(error)).ok()
            });
            reports.push(built.collect());
        }
        let cause = errors.iter().position(|error| !error.root_cause().is::<Aborted>()).unwrap_or(0);
        if errors.is_empty() { Ok(reports) } else { Err(errors.swap_remove(cause)) }
    }

    /// Marks the group as serving, and sends the waiting steps.
    pub fn serve(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.phase = Phase::Serving;
            state.start_waiting();
            // A thread that ended after its build was not treated as a fault then.
            for id in state.places(|rank_state| rank_state.life != Life::Lives) {
                self.fail_for_thread(&mut state, id);
            }
        }
    }

    /// Fails all pending steps, because there are no devices to run them.
    pub fn turn_away(&self, fault: &DeviceError) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.steps.lose(fault);
        }
    }

    /// Fails the waiting steps, because the devices `ids` are unavailable.
    fn tell_waiting(&self, state: &mut State, ids: &[Place], why: &str) {
        if state.steps.wait() {
            let fault = DeviceError::Fault(format!("{}: {why}", self.names(ids)));
            error!(%fault, "the waiting steps failed");
            state.steps.lose(&fault);
        }
    }

    /// Returns the names of devices, for messages.
    fn names(&self, ids: &[Place]) -> String {
        ids.iter().map(|id| self.name(*id)).collect::<Vec<_>>().join(", ")
    }

    /// Waits until all threads have ended, at most until `until`. Returns the devices whose threads have not.
    pub fn not_ended(&self, until: Instant) -> Vec<Place> {
        let mut state = self.lock();
        loop {
            let left = state.places(|rank_state| rank_state.life != Life::Gone);
            if left.is_empty() || is_over(Some(until)) {
                return left;
            }
            state = self.wait(state, Some(until));
        }
    }

    /// Waits for a change of the state, at most until `until`.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        match until {
            None => self.news.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.news.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

impl Member {
    /// Whether the device has not dropped its executor yet.
    fn is_busy(&self) -> bool {
        self.life != Life::Gone && !self.cleared
    }
}

/// Whether the time has passed.
fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::group::GroupConfig;
    use crate::actors::testing::LIMITS;

    /// Starts a thread that is commanded to drop its executor and does not; returns its device.
    fn given_up(group: &Hub) -> Place {
        let (id, _) = group.replace(group.dead()[0]).expect("the group is not stopping");
        group.clear();
        assert_eq!(group.to_give_up(Some(Instant::now())), [id]);
        id
    }

    fn hanging(group: &Hub) -> usize {
        group.lock().members[0][0].hanging
    }

    /// A thread may end or respond between the query for hung threads and its abandonment.
    #[test]
    fn who_is_through_while_it_is_being_given_up_does_not_hang() {
        let group = Hub::new(GroupConfig::new(vec![vec!["one".to_owned()]], LIMITS, 1));
        let id = given_up(&group);
        group.ends(id);
        group.left(id);
        assert_eq!((group.disown(id), hanging(&group), group.dead()), (false, 0, vec![id]));
        let id = given_up(&group);
        group.cleared(id);
        assert_eq!((group.disown(id), hanging(&group), group.dead()), (false, 0, vec![]));
        group.clear();
        assert_eq!((group.disown(id), hanging(&group), group.dead().len()), (true, 1, 1));
        group.left(id);
        assert_eq!(hanging(&group), 0, "the thread resumed and ended");
    }
}
