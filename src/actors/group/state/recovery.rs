//! The supervisor's interface to the group state.
//!
//! Invariant: a group serves steps only when every device has been built in the same build.

use super::{DeviceId, GroupState, Inner, Phase, RankState, RecoveryReason, THREAD_ENDED, ThreadState};
use crate::actors::group::link::StepSender;
use crate::actors::group::mailbox::{Assignment, Command, Mailbox, Role};
use crate::model::executor::ExecutorReport;
use anyhow::{Result, anyhow, ensure};
use mainstem_kernels::collective::local;
use mainstem_kernels::{Abort, Aborted, Collective, DeviceError, SingleRank};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// Numbers per collective exchange: as many as fit into a core's cache.
const EXCHANGE_LEN: usize = 1 << 15;

/// Returns the bytes that a stage's ranks need for collectives: two buffers per rank.
pub(in crate::actors::group) fn collective_bytes(ranks: usize) -> usize {
    if ranks > 1 { 2 * ranks * EXCHANGE_LEN * size_of::<f32>() } else { 0 }
}

impl GroupState {
    /// Waits until recovery is necessary, and returns the reason; `None` when the group stops. While the
    /// devices are unavailable, recovery is retried after `again` at the latest, because nobody may send
    /// steps to a group that cannot serve.
    pub fn wait_for_recovery(&self, again: Duration) -> Option<RecoveryReason> {
        let again = Instant::now() + again;
        let mut state = self.lock();
        loop {
            let due = self.config.step_timeout.map(|timeout| (timeout, state.steps.deadline(timeout)));
            let now = Instant::now();
            state = match (state.phase, due) {
                (Phase::Stopping, _) => return None,
                (Phase::Failed, _) => return Some(RecoveryReason::DeviceFailed),
                (Phase::Unavailable, _) if state.steps.has_waiting() || again <= now => {
                    return Some(RecoveryReason::RetryDue);
                }
                (Phase::Unavailable, _) => self.wait_for_change(state, Some(again)),
                (Phase::Serving, Some((timeout, Some(due)))) if due <= now => {
                    self.fail_timeout(&mut state, timeout);
                    return Some(RecoveryReason::Timeout);
                }
                // A step sent meanwhile has a later deadline.
                (Phase::Serving, Some((timeout, due))) => {
                    self.wait_for_change(state, Some(due.unwrap_or(now + timeout)))
                }
                (Phase::Serving, None) => self.wait_for_change(state, None),
            }
        }
    }

    /// Fails the group because of a timeout; which devices stalled is found out later.
    fn fail_timeout(&self, state: &mut Inner, timeout: Duration) {
        let fault = DeviceError::Fault(format!("no step result within {timeout:?}"));
        let label = self.config.label();
        error!(step = state.steps.oldest_number(), %fault, "{label} failed; it is being rebuilt");
        state.fail_build(&fault);
    }

    /// Whether the group is stopping.
    pub fn is_stopping(&self) -> bool {
        self.lock().phase == Phase::Stopping
    }

    /// Commands every device to drop its executor.
    pub fn clear_all(&self) {
        for rank_state in self.lock().ranks.iter_mut().flatten() {
            rank_state.cleared = false;
            rank_state.mailbox.send(Command::Clear);
        }
    }

    /// Waits until every device has dropped its executor, at most until `until`. Returns the devices that
    /// have not. A device without a thread holds nothing.
    pub fn wait_cleared(&self, until: Option<Instant>) -> Vec<DeviceId> {
        let mut state = self.lock();
        loop {
            let left = state.ids_where(RankState::is_clearing);
            if left.is_empty() || has_passed(until) || state.phase == Phase::Stopping {
                return left;
            }
            state = self.wait_for_change(state, until);
        }
    }

    /// Waits like [`GroupState::wait_cleared`], but without time limit for a device that already has another
    /// hung thread, so that the number of threads holding a model stays bounded. Meanwhile, waiting steps
    /// fail. Returns the devices whose threads are to be abandoned.
    pub fn devices_to_abandon(&self, until: Option<Instant>) -> Vec<DeviceId> {
        let mut left = self.wait_cleared(until);
        let mut state = self.lock();
        loop {
            let again = state.ids_where(|rank_state| rank_state.is_clearing() && rank_state.hung_threads > 0);
            if again.is_empty() || state.phase == Phase::Stopping {
                left.retain(|id| state.rank_state(*id).is_some_and(|rank_state| rank_state.is_clearing()));
                return left;
            }
            self.fail_waiting(&mut state, &again, "hangs, as does its previous thread");
            state = self.wait_for_change(state, None);
        }
    }

    /// Logs the devices that have not dropped their executors after a timeout, unless the group is stopping.
    pub fn log_stalled(&self, stalled: &[DeviceId]) {
        if !stalled.is_empty() && !self.is_stopping() {
            warn!(devices = self.device_names(stalled), "devices have not released their model parts yet");
        }
    }

    /// Returns the devices without a thread.
    pub fn devices_without_thread(&self) -> Vec<DeviceId> {
        self.lock().ids_where(|rank_state| rank_state.thread == ThreadState::Absent)
    }

    /// Abandons the thread of a device: closes its mailbox, and ignores its reports from now on. Returns
    /// false, and does nothing, if the thread has ended or dropped its executor meanwhile, or if the group is
    /// stopping.
    pub fn abandon_thread(&self, id: DeviceId) -> bool {
        let mut state = self.lock();
        let stopping = state.phase == Phase::Stopping;
        match state.rank_state(id) {
            Some(rank_state) if !stopping && rank_state.is_clearing() => {
                rank_state.mailbox.close();
                rank_state.incarnation += 1;
                rank_state.thread = ThreadState::Absent;
                rank_state.hung_threads += 1;
                true
            }
            _ => false,
        }
    }

    /// Registers a new thread for a device that has none. Returns its id and mailbox; `None` if the group is
    /// stopping.
    pub fn register_thread(&self, old: DeviceId) -> Option<(DeviceId, Arc<Mailbox>)> {
        let mut state = self.lock();
        if state.phase == Phase::Stopping {
            return None;
        }
        let incarnation = old.incarnation + 1;
        let mailbox = Arc::new(Mailbox::new(self.config.lanes));
        let rank_state = &mut state.ranks[old.stage][old.rank];
        let hung_threads = rank_state.hung_threads;
        *rank_state = RankState {
            mailbox: mailbox.clone(),
            incarnation,
            thread: ThreadState::Running,
            cleared: true,
            built: None,
            hung_threads,
        };
        Some((DeviceId { incarnation, ..old }, mailbox))
    }

    /// Marks the devices as unavailable.
    pub fn set_unavailable(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.phase = Phase::Unavailable;
        }
    }

    /// Commands every device to build its executor.
    pub fn start_build(&self) {
        let mut state = self.lock();
        state.build += 1;
        state.abort = Abort::new();
        for stage in 0..state.ranks.len() {
            self.build_stage(&mut state, stage);
        }
    }

    /// Commands the devices of a stage to build their executors, with collectives among them.
    fn build_stage(&self, state: &mut Inner, stage: usize) {
        let (build, abort) = (state.build, state.abort.clone());
        let collectives: Vec<Box<dyn Collective>> = match state.ranks[stage].len() {
            1 => vec![Box::new(SingleRank)],
            ranks => {
                let ranks = local::create_ranks(ranks, EXCHANGE_LEN, &abort);
                ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Collective>).collect()
            }
        };
        for (rank, collective) in collectives.into_iter().enumerate() {
            let role = if rank == 0 { self.role(state, stage) } else { Role::Nothing };
            let rank_state = &mut state.ranks[stage][rank];
            rank_state.built = None;
            let assignment = Assignment { build, abort: abort.clone(), role };
            rank_state.mailbox.send(Command::Build(assignment, collective));
        }
    }

    /// Returns the role of the first rank of a stage.
    fn role(&self, state: &Inner, stage: usize) -> Role {
        let Some(next) = state.ranks.get(stage + 1) else { return Role::ReturnResults };
        let senders =
            next.iter().map(|rank_state| StepSender::new(rank_state.mailbox.clone(), state.build)).collect();
        Role::HandOver((self.config.link_factory)(senders, self.config.link_capacity()))
    }

    /// Waits until every device has reported its build. If several failed, the error is one that is not a
    /// mere consequence of another. Waiting steps fail after `until`, but the builds themselves are waited
    /// for without limit: a device cannot be rebuilt elsewhere, as it holds the memory.
    pub fn wait_built(&self, until: Option<Instant>) -> Result<Vec<Vec<ExecutorReport>>> {
        let mut state = self.lock();
        loop {
            let left = state.ids_where(|rank_state| {
                rank_state.thread == ThreadState::Running && rank_state.built.is_none()
            });
            if left.is_empty() || state.phase == Phase::Stopping {
                break;
            }
            let is_late = has_passed(until);
            if is_late {
                self.fail_waiting(&mut state, &left, "is still being built and exceeds its time limit");
            }
            state = self.wait_for_change(state, until.filter(|_| !is_late));
        }
        ensure!(state.phase != Phase::Stopping, "the group is stopped");
        let mut reports = Vec::with_capacity(state.ranks.len());
        let mut errors = Vec::new();
        for (ranks, names) in state.ranks.iter_mut().zip(&self.config.names) {
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
    pub fn start_serving(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.phase = Phase::Serving;
            state.dispatch_waiting();
            // A thread that ended after its build was not treated as a fault then.
            for id in state.ids_where(|rank_state| rank_state.thread != ThreadState::Running) {
                self.fail_ended_thread(&mut state, id);
            }
        }
    }

    /// Fails all pending steps, because there are no devices to run them.
    pub fn fail_pending(&self, fault: &DeviceError) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.steps.fail_all(fault);
        }
    }

    /// Fails the waiting steps, because the devices `ids` are unavailable.
    fn fail_waiting(&self, state: &mut Inner, ids: &[DeviceId], why: &str) {
        if state.steps.has_waiting() {
            let fault = DeviceError::Fault(format!("{}: {why}", self.device_names(ids)));
            error!(%fault, "the waiting steps failed");
            state.steps.fail_all(&fault);
        }
    }

    /// Returns the names of devices, for messages.
    fn device_names(&self, ids: &[DeviceId]) -> String {
        ids.iter().map(|id| self.name(*id)).collect::<Vec<_>>().join(", ")
    }

    /// Waits until all threads have ended, at most until `until`. Returns the devices whose threads have not.
    pub fn wait_exited(&self, until: Instant) -> Vec<DeviceId> {
        let mut state = self.lock();
        loop {
            let left = state.ids_where(|rank_state| rank_state.thread != ThreadState::Absent);
            if left.is_empty() || has_passed(Some(until)) {
                return left;
            }
            state = self.wait_for_change(state, Some(until));
        }
    }

    /// Waits for a change of the state, at most until `until`.
    fn wait_for_change<'a>(
        &self,
        state: MutexGuard<'a, Inner>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, Inner> {
        match until {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

impl RankState {
    /// Whether the device has not dropped its executor yet.
    fn is_clearing(&self) -> bool {
        self.thread != ThreadState::Absent && !self.cleared
    }
}

/// Whether the time has passed.
fn has_passed(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::group::GroupConfig;
    use crate::actors::testing::LIMITS;

    /// Starts a thread that is commanded to drop its executor and does not; returns its device.
    fn stuck_device(group: &GroupState) -> DeviceId {
        let (id, _) =
            group.register_thread(group.devices_without_thread()[0]).expect("the group is not stopping");
        group.clear_all();
        assert_eq!(group.devices_to_abandon(Some(Instant::now())), [id]);
        id
    }

    fn hung_threads(group: &GroupState) -> usize {
        group.lock().ranks[0][0].hung_threads
    }

    /// A thread may end or respond between the query for hung threads and its abandonment.
    #[test]
    fn a_thread_that_responds_while_being_abandoned_is_kept() {
        let group = GroupState::new(GroupConfig::new(vec![vec!["one".to_owned()]], LIMITS, 1));
        let id = stuck_device(&group);
        group.report_exiting(id);
        group.report_exited(id);
        assert_eq!(
            (group.abandon_thread(id), hung_threads(&group), group.devices_without_thread()),
            (false, 0, vec![id])
        );
        let id = stuck_device(&group);
        group.report_cleared(id);
        assert_eq!(
            (group.abandon_thread(id), hung_threads(&group), group.devices_without_thread()),
            (false, 0, vec![])
        );
        group.clear_all();
        assert_eq!(
            (group.abandon_thread(id), hung_threads(&group), group.devices_without_thread().len()),
            (true, 1, 1)
        );
        group.report_exited(id);
        assert_eq!(hung_threads(&group), 0, "the thread resumed and ended");
    }
}
