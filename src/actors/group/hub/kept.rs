//! What the keeper asks the meeting place, and says there.
//!
//! Invariant: a group serves only when every device has been built in the same build.

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

/// Numbers that members exchange at a time: as much as stays in a core's cache.
const EXCHANGED: usize = 1 << 15;

/// Bytes by which the members of a stage exchange them: each has two boxes.
pub(in crate::actors::group) fn exchange_bytes(members: usize) -> usize {
    if members > 1 { 2 * members * EXCHANGED * size_of::<f32>() } else { 0 }
}

impl Hub {
    /// Waits for what needs it; `None` at the end. Devices that are away are wanted after that time at the latest: nobody may
    /// send steps to who cannot serve them.
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
                // What is sent meanwhile is due later than this.
                (Phase::Serving, Some((timeout, due))) => {
                    self.wait(state, Some(due.unwrap_or(now + timeout)))
                }
                (Phase::Serving, None) => self.wait(state, None),
            }
        }
    }

    /// Whose silence it is will be seen.
    fn fail_for_silence(&self, state: &mut State, timeout: Duration) {
        let fault = DeviceError::Fault(format!("no answer within {timeout:?}"));
        let what = self.config.what();
        error!(step = state.steps.oldest(), %fault, "{what} failed; it is being rebuilt");
        state.give_up(&fault);
    }

    /// Whether the end has come.
    pub fn is_stopping(&self) -> bool {
        self.lock().phase == Phase::Stopping
    }

    /// Tells every device to drop what it has.
    pub fn clear(&self) {
        for member in self.lock().members.iter_mut().flatten() {
            member.cleared = false;
            member.mailbox.put(Order::Clear);
        }
    }

    /// Waits, until then at most, and gives the devices that have not done so. Of a device whose thread is gone nothing is
    /// left to wait for.
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

    /// The same, but a device of which another thread hangs already is waited for beyond that, lest ever more threads have
    /// a model each. Meanwhile steps are not: they are told.
    pub fn to_give_up(&self, until: Option<Instant>) -> Vec<Place> {
        let mut left = self.not_cleared(until);
        let mut state = self.lock();
        loop {
            let again = state.places(|member| member.is_busy() && member.hanging > 0);
            if again.is_empty() || state.phase == Phase::Stopping {
                left.retain(|place| state.member(*place).is_some_and(|member| member.is_busy()));
                return left;
            }
            self.tell_waiting(&mut state, &again, "hangs, as does the thread that it replaced");
            state = self.wait(state, None);
        }
    }

    /// Says who has not let go of its part yet after a silence gave the group up. At the end nobody need speak.
    pub fn name_stalled(&self, stalled: &[Place]) {
        if !stalled.is_empty() && !self.is_stopping() {
            warn!(devices = self.names(stalled), "not let go of their parts yet");
        }
    }

    /// Devices that have no thread.
    pub fn dead(&self) -> Vec<Place> {
        self.lock().places(|member| member.life == Life::Gone)
    }

    /// Whatever that thread still says is not heard, and its mailbox is closed: the device has no thread. Not if it has
    /// ended or dropped meanwhile what it had, nor at the end, when all have been told to go anyway.
    pub fn disown(&self, place: Place) -> bool {
        let mut state = self.lock();
        let stopping = state.phase == Phase::Stopping;
        match state.member(place) {
            Some(member) if !stopping && member.is_busy() => {
                member.mailbox.close();
                member.incarnation += 1;
                member.life = Life::Gone;
                member.hanging += 1;
                true
            }
            _ => false,
        }
    }

    /// A new thread takes the place of a device's that has none. Gives its place and mailbox; `None` at the end.
    pub fn replace(&self, old: Place) -> Option<(Place, Arc<Mailbox>)> {
        let mut state = self.lock();
        if state.phase == Phase::Stopping {
            return None;
        }
        let incarnation = old.incarnation + 1;
        let mailbox = Arc::new(Mailbox::new(self.config.lanes));
        let member = &mut state.members[old.stage][old.rank];
        let hanging = member.hanging;
        *member = Member {
            mailbox: mailbox.clone(),
            incarnation,
            life: Life::Lives,
            cleared: true,
            built: None,
            hanging,
        };
        Some((Place { incarnation, ..old }, mailbox))
    }

    /// There are no devices until further notice.
    pub fn away(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.phase = Phase::Away;
        }
    }

    /// Tells every device to build.
    pub fn build(&self) {
        let mut state = self.lock();
        state.build += 1;
        state.abort = Abort::new();
        for stage in 0..state.members.len() {
            self.build_stage(&mut state, stage);
        }
    }

    fn build_stage(&self, state: &mut State, stage: usize) {
        let (build, abort) = (state.build, state.abort.clone());
        let collectives: Vec<Box<dyn Collective>> = match state.members[stage].len() {
            1 => vec![Box::new(Alone)],
            members => {
                let members = local::stage(members, EXCHANGED, &abort);
                members.into_iter().map(|member| Box::new(member) as Box<dyn Collective>).collect()
            }
        };
        for (rank, collective) in collectives.into_iter().enumerate() {
            let duty = if rank == 0 { self.duty(state, stage) } else { Duty::Nothing };
            let member = &mut state.members[stage][rank];
            member.built = None;
            let seat = Seat { build, abort: abort.clone(), duty };
            member.mailbox.put(Order::Build(seat, collective));
        }
    }

    /// What becomes of a stage's part of a step.
    fn duty(&self, state: &State, stage: usize) -> Duty {
        let Some(next) = state.members.get(stage + 1) else { return Duty::Answer };
        let posts = next.iter().map(|member| Post::new(member.mailbox.clone(), state.build)).collect();
        Duty::HandOn((self.config.linking)(posts, self.config.room()))
    }

    /// Waits until every device has said how its build went. Of several errors, one that says why. Steps wait for it until
    /// then at most: from then on they are told. The device itself is waited for, for nobody else could build it: it has
    /// the memory, and what hinders it hinders others.
    pub fn wait_built(&self, until: Option<Instant>) -> Result<Vec<Vec<ExecutorReport>>> {
        let mut state = self.lock();
        loop {
            let left = state.places(|member| member.life == Life::Lives && member.built.is_none());
            if left.is_empty() || state.phase == Phase::Stopping {
                break;
            }
            let over = is_over(until);
            if over {
                self.tell_waiting(&mut state, &left, "is still being built, which takes too long");
            }
            state = self.wait(state, until.filter(|_| !over));
        }
        ensure!(state.phase != Phase::Stopping, "the group is stopped");
        let mut reports = Vec::with_capacity(state.members.len());
        let mut errors = Vec::new();
        for (members, names) in state.members.iter_mut().zip(&self.config.names) {
            let built = members.iter_mut().zip(names).filter_map(|(member, name)| {
                let ended = || Err(anyhow!("{name}: {THREAD_ENDED}"));
                member.built.take().unwrap_or_else(ended).map_err(|error| errors.push(error)).ok()
            });
            reports.push(built.collect());
        }
        let why = errors.iter().position(|error| !error.root_cause().is::<Aborted>()).unwrap_or(0);
        if errors.is_empty() { Ok(reports) } else { Err(errors.swap_remove(why)) }
    }

    /// The devices are there: steps go to them.
    pub fn serve(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.phase = Phase::Serving;
            state.start_waiting();
            // A thread that ended since it built was not heard of as a fault.
            for place in state.places(|member| member.life != Life::Lives) {
                self.fail_for_thread(&mut state, place);
            }
        }
    }

    /// There are none to be had, which whoever waits is told.
    pub fn turn_away(&self, fault: &DeviceError) {
        let mut state = self.lock();
        if state.phase != Phase::Stopping {
            state.steps.lose(fault);
        }
    }

    /// Those that wait are told that these devices are not to be had.
    fn tell_waiting(&self, state: &mut State, places: &[Place], why: &str) {
        if state.steps.wait() {
            let fault = DeviceError::Fault(format!("{}: {why}", self.names(places)));
            error!(%fault, "steps are turned away");
            state.steps.lose(&fault);
        }
    }

    fn names(&self, places: &[Place]) -> String {
        places.iter().map(|place| self.name(*place)).collect::<Vec<_>>().join(", ")
    }

    /// Waits at the end until all threads have ended, until then at most; gives those that have not.
    pub fn not_ended(&self, until: Instant) -> Vec<Place> {
        let mut state = self.lock();
        loop {
            let left = state.places(|member| member.life != Life::Gone);
            if left.is_empty() || is_over(Some(until)) {
                return left;
            }
            state = self.wait(state, Some(until));
        }
    }

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
    /// Whether it has not dropped yet what it had.
    fn is_busy(&self) -> bool {
        self.life != Life::Gone && !self.cleared
    }
}

fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::group::GroupConfig;
    use crate::actors::testing::LIMITS;

    /// A device whose thread has been told to drop what it has, and is to be given up for not doing so.
    fn given_up(hub: &Hub) -> Place {
        let (place, _) = hub.replace(hub.dead()[0]).expect("it is not the end");
        hub.clear();
        assert_eq!(hub.to_give_up(Some(Instant::now())), [place]);
        place
    }

    fn hanging(hub: &Hub) -> usize {
        hub.lock().members[0][0].hanging
    }

    /// Between the question who hangs and what follows from the answer it may have come to an end, or to itself.
    #[test]
    fn who_is_through_while_it_is_being_given_up_does_not_hang() {
        let hub = Hub::new(GroupConfig::new(vec![vec!["one".to_owned()]], LIMITS, 1));
        let place = given_up(&hub);
        hub.ends(place);
        hub.left(place);
        assert_eq!((hub.disown(place), hanging(&hub), hub.dead()), (false, 0, vec![place]));
        let place = given_up(&hub);
        hub.cleared(place);
        assert_eq!((hub.disown(place), hanging(&hub), hub.dead()), (false, 0, vec![]));
        hub.clear();
        assert_eq!((hub.disown(place), hanging(&hub), hub.dead().len()), (true, 1, 1));
        hub.left(place);
        assert_eq!(hanging(&hub), 0, "it woke");
    }
}
