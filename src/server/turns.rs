//! Fair turns: requests wait for a share of the memory that bodies may take while they are read, and for a
//! turn to be parsed and tokenized. The shares of a pool go to clients by bytes, not by requests, and a small
//! body does not wait for the large ones of the same client.
//!
//! Each client has a line per size class. The line whose first request would have the smallest virtual
//! counter is next: the counter of the request that began last, or of the line's own previous one, plus the
//! request's bytes (self-clocked fair queueing). So a line that has just had its turn is behind others by
//! what that turn cost, and an idle one gains nothing by having waited.
//!
//! Invariant: what is held never exceeds the limits of the pool, the number of waiting requests is bounded,
//! and one whose client is gone neither holds nor delays anything.

use crate::request::RequestError;
use crate::request::client::ClientId;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Upper limits of the size classes in bytes; there is one more without a limit.
const CLASS_BYTES: [usize; 2] = [64 << 10, 512 << 10];

/// Maximum number of requests that wait in one line, and in all lines of a pool.
pub const LINE_WAITERS_MAX: usize = 32;
const WAITERS_MAX: usize = 512;

/// The line in which a request waits: its client and its size class, 0 for the smallest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Line {
    client: ClientId,
    class: usize,
}

/// Limits of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolLimits {
    /// Memory of all shares together, in bytes.
    pub memory: usize,
    /// Number of shares at once, and in addition one of the smallest class; `None` is any number.
    pub turns: Option<usize>,
}

/// A pool of memory and turns.
#[derive(Clone, Debug)]
pub struct FairPool(Arc<Mutex<Pool>>);

#[derive(Debug)]
struct Pool {
    limits: PoolLimits,
    held: Held,
    lines: HashMap<Line, LineState>,
    waiting: usize,
    /// Virtual counter of the request that began last.
    now: u64,
    /// Id of the next request.
    next: u64,
}

/// Sum of all shares of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    memory: usize,
    /// Number of shares of the smallest class, and of the others.
    small: usize,
    large: usize,
}

#[derive(Debug, Default)]
struct LineState {
    waiting: VecDeque<Waiter>,
    /// Memory that the line's shares hold.
    held: usize,
    /// Number of shares.
    shares: usize,
    /// Virtual counter of the request that began last.
    counter: u64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    /// The pool's counter at the request's arrival.
    arrived: u64,
    bytes: u64,
    memory: usize,
    reply: oneshot::Sender<Share>,
}

/// A share of a pool, which ends when it is dropped.
#[derive(Debug)]
pub struct Share {
    pool: FairPool,
    line: Line,
    memory: usize,
}

/// Shares that were given, to be sent when the pool is unlocked: a share that nobody takes locks it.
type Given = Vec<(oneshot::Sender<Share>, Share)>;

impl FairPool {
    /// Creates a pool.
    pub fn new(limits: PoolLimits) -> FairPool {
        FairPool(Arc::new(Mutex::new(Pool {
            limits,
            held: Held::default(),
            lines: HashMap::new(),
            waiting: 0,
            now: 0,
            next: 0,
        })))
    }

    /// Waits for a share of `memory` bytes, or of three quarters of the pool if that is less, for a body of
    /// `bytes` bytes. Fails if too many requests wait already. Dropping the future gives the place up.
    pub async fn acquire(
        &self,
        client: ClientId,
        bytes: usize,
        memory: usize,
    ) -> Result<Share, RequestError> {
        let class = CLASS_BYTES.iter().take_while(|most| bytes > **most).count();
        let line = Line { client, class };
        let (reply, share) = oneshot::channel();
        let id = self.change(|pool| pool.enter(line, bytes, memory, reply))?;
        let mut place = Place { pool: self, line, id: Some(id) };
        let share = share.await.map_err(|_| RequestError::EngineStopped)?;
        place.id = None;
        Ok(share)
    }

    /// Changes the pool, and gives the shares that have become possible.
    fn change<T>(&self, change: impl FnOnce(&mut Pool) -> T) -> T {
        let (result, given) = {
            let mut pool = self.lock();
            let result = change(&mut pool);
            (result, pool.give(self))
        };
        for (reply, share) in given {
            // If the client is gone, the share is dropped here.
            _ = reply.send(share);
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a line, which is given up when it is dropped.
struct Place<'a> {
    pool: &'a FairPool,
    line: Line,
    /// `None` once the request has its share.
    id: Option<u64>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.pool.change(|pool| pool.leave(self.line, id));
        }
    }
}

impl Pool {
    /// Adds a request to the end of its line, and returns its id.
    fn enter(
        &mut self,
        line: Line,
        bytes: usize,
        memory: usize,
        reply: oneshot::Sender<Share>,
    ) -> Result<u64, RequestError> {
        let in_line = self.lines.get(&line).map_or(0, |state| state.waiting.len());
        for (waiting, limit) in [(in_line, LINE_WAITERS_MAX), (self.waiting, WAITERS_MAX)] {
            if waiting >= limit {
                return Err(RequestError::TooManyLongBodies { limit });
            }
        }
        // The largest body leaves memory to small ones.
        let quarter = self.limits.memory / 4;
        let (id, memory) = (self.next, memory.min(if line.class == 0 { quarter } else { 3 * quarter }));
        self.next += 1;
        self.waiting += 1;
        let waiter = Waiter { id, arrived: self.now, bytes: bytes as u64, memory, reply };
        self.lines.entry(line).or_default().waiting.push_back(waiter);
        Ok(id)
    }

    /// Removes a request that still waits.
    fn leave(&mut self, line: Line, id: u64) {
        let Some(state) = self.lines.get_mut(&line) else { return };
        let before = state.waiting.len();
        state.waiting.retain(|waiter| waiter.id != id);
        self.waiting -= before - state.waiting.len();
        self.forget_if_idle(line);
    }

    /// Takes back what a share held.
    fn end(&mut self, line: Line, memory: usize) {
        self.held.memory -= memory;
        *self.held.count(line) -= 1;
        if let Some(state) = self.lines.get_mut(&line) {
            state.held -= memory;
            state.shares -= 1;
        }
        self.forget_if_idle(line);
    }

    /// Forgets a line without requests: its counter is not ahead of the pool's.
    fn forget_if_idle(&mut self, line: Line) {
        let idle = |state: &LineState| state.waiting.is_empty() && state.shares == 0;
        if self.lines.get(&line).is_some_and(idle) {
            self.lines.remove(&line);
        }
    }

    /// Gives all shares that are possible, in the order of the counters.
    fn give(&mut self, pool: &FairPool) -> Given {
        let mut given = Vec::new();
        while let Some((line, counter)) = self.next_line() {
            let Some(state) = self.lines.get_mut(&line) else { break };
            let Some(Waiter { memory, reply, .. }) = state.waiting.pop_front() else { break };
            state.held += memory;
            state.shares += 1;
            state.counter = counter;
            self.waiting -= 1;
            self.now = self.now.max(counter);
            self.held.memory += memory;
            *self.held.count(line) += 1;
            given.push((reply, Share { pool: pool.clone(), line, memory }));
        }
        given
    }

    /// Returns the line whose first request is next, and that request's counter.
    fn next_line(&self) -> Option<(Line, u64)> {
        let heads = self.lines.iter().filter_map(|(line, state)| Some((line, state, state.waiting.front()?)));
        let mut heads: Vec<_> = heads
            .map(|(line, state, head)| (state.counter.max(head.arrived) + head.bytes, head.id, line, state))
            .collect();
        heads.sort_unstable_by_key(|(counter, id, ..)| (*counter, *id));
        let free = self.limits.memory - self.held.memory;
        let mut is_short = false;
        for (counter, _, line, state) in heads {
            let needed = state.waiting.front().map_or(0, |head| head.memory);
            // A line takes at most as much as it leaves to others, so one alone cannot take everything, and a
            // small share is nearly always possible.
            let fits = state.held.saturating_add(needed) <= free;
            if fits && self.has_turn(*line) && !(is_short && line.class > 0) {
                return Some((*line, counter));
            }
            // Where turns are short, later ones must not take the memory that one waits for.
            is_short |= self.limits.turns.is_some() && needed > free;
        }
        None
    }

    /// Returns whether another request of the line's class may begin.
    fn has_turn(&self, line: Line) -> bool {
        let Some(turns) = self.limits.turns else { return true };
        match line.class {
            0 => self.held.small + self.held.large <= turns,
            _ => self.held.large < turns,
        }
    }
}

impl Held {
    /// Returns the number of shares of a line's class.
    fn count(&mut self, line: Line) -> &mut usize {
        if line.class == 0 { &mut self.small } else { &mut self.large }
    }
}

impl Share {
    /// Extends the share to `memory` bytes, without waiting: requests that wait for more while they hold some
    /// could wait for each other. Returns whether there is so much memory.
    pub fn grow(&mut self, memory: usize) -> bool {
        let extra = memory.saturating_sub(self.memory);
        let mut pool = self.pool.lock();
        let Pool { limits, held, lines, .. } = &mut *pool;
        let free = limits.memory - held.memory;
        let Some(state) = lines.get_mut(&self.line).filter(|_| extra <= free) else { return false };
        held.memory += extra;
        state.held += extra;
        self.memory += extra;
        true
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.change(|pool| pool.end(self.line, self.memory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::future::Future;
    use std::pin::Pin;

    const MIB: usize = 1 << 20;

    type Waiting = Pin<Box<dyn Future<Output = Result<Share, RequestError>>>>;

    fn pool(memory: usize, turns: Option<usize>) -> FairPool {
        FairPool::new(PoolLimits { memory, turns })
    }

    /// Returns a request that waits for a share.
    fn wait(pool: &FairPool, client: u64, bytes: usize, memory: usize) -> Waiting {
        let pool = pool.clone();
        let mut waiting: Waiting =
            Box::pin(async move { pool.acquire(ClientId::Key(client), bytes, memory).await });
        assert!(waiting.as_mut().now_or_never().is_none(), "the request has to wait");
        waiting
    }

    fn take(pool: &FairPool, client: u64, bytes: usize, memory: usize) -> Share {
        let share = pool.acquire(ClientId::Key(client), bytes, memory).now_or_never();
        share.expect("there is a share at once").expect("the line is not full")
    }

    fn lines_and_waiting(pool: &FairPool) -> (usize, usize) {
        let pool = pool.lock();
        (pool.lines.len(), pool.waiting)
    }

    /// Returns the places of the waiting requests that have a share now.
    fn ready(waiting: &mut [Option<Waiting>]) -> Vec<(usize, Share)> {
        let ready = waiting.iter_mut().enumerate().filter_map(|(at, place)| {
            let share = place.as_mut()?.as_mut().now_or_never()?;
            *place = None;
            Some((at, share.unwrap()))
        });
        ready.collect()
    }

    /// Regression: 36 clients with bodies of 4 MB kept out every body of more than 8 KiB.
    #[test]
    fn a_small_body_passes_the_large_ones_of_all_clients_and_of_its_own() {
        let pool = pool(256 * MIB, Some(2));
        let running: Vec<_> = (0..2).map(|client| take(&pool, client, 4 * MIB, MIB)).collect();
        let large: Vec<_> = (0..36).map(|at| wait(&pool, at % 3, 4 * MIB, MIB)).collect();
        for client in [0, 7] {
            let small = take(&pool, client, 12_000, MIB);
            let mut next = [Some(wait(&pool, client, 12_000, MIB))];
            assert!(ready(&mut next).is_empty(), "there is one turn more for small bodies, not several");
            drop(small);
            assert_eq!(ready(&mut next).len(), 1);
        }
        drop((running, large));
        assert_eq!(pool.lock().held, Held::default());
        assert_eq!(lines_and_waiting(&pool), (0, 0));
    }

    #[test]
    fn clients_share_turns_by_bytes() {
        let pool = pool(256 * MIB, Some(1));
        let mut running = Some(take(&pool, 9, MIB, 0));
        let arrivals = [(1, 2), (1, 2), (1, 2), (2, 1), (2, 1), (2, 1), (2, 1), (3, 4)];
        let mut waiting: Vec<_> =
            arrivals.iter().map(|(client, size)| Some(wait(&pool, *client, size * MIB, 0))).collect();
        let mut order = Vec::new();
        while running.take().is_some() {
            let mut shares = ready(&mut waiting);
            assert!(shares.len() <= 1, "there is one turn");
            running = shares.pop().map(|(at, share)| {
                order.push(arrivals[at].0);
                share
            });
        }
        // Client 2 has two bodies of 1 MiB for each of 2 MiB, and the one of 4 MiB comes after as many bytes.
        assert_eq!(order, [2, 1, 2, 2, 1, 2, 3, 1]);
    }

    #[test]
    fn lines_are_bounded_and_a_client_that_is_gone_leaves_its_place() {
        let pool = pool(MIB, Some(1));
        let running = take(&pool, 0, MIB, 0);
        let mut waiting: Vec<_> = (0..LINE_WAITERS_MAX).map(|_| Some(wait(&pool, 1, MIB, 0))).collect();
        let refused =
            |client, bytes| pool.acquire(ClientId::Key(client), bytes, 0).now_or_never().map(|it| it.err());
        let full = |limit| Some(Some(RequestError::TooManyLongBodies { limit }));
        assert_eq!(refused(1, MIB), full(LINE_WAITERS_MAX));
        waiting.remove(0);
        waiting.push(Some(wait(&pool, 1, MIB, 0)));
        // One that is gone when its turn comes passes it on.
        drop(running);
        waiting.remove(0);
        let (at, share) = ready(&mut waiting).pop().expect("the next one has its turn");
        assert_eq!(at, 0);
        waiting.remove(0);
        for client in 2.. {
            if pool.lock().waiting == WAITERS_MAX {
                break;
            }
            waiting.push(Some(wait(&pool, client, MIB, 0)));
        }
        assert_eq!(refused(1, MIB), full(WAITERS_MAX));
        drop((waiting, share));
        assert_eq!(lines_and_waiting(&pool), (0, 0));
    }

    /// Announcing a body is free, so one client must not reserve everything.
    #[test]
    fn a_client_leaves_half_of_the_memory_and_many_leave_some() {
        let pool = pool(64 * MIB, None);
        let held: Vec<_> = (0..8).map(|_| take(&pool, 1, 4 * MIB, 4 * MIB)).collect();
        let waiting = wait(&pool, 1, 4 * MIB, 4 * MIB);
        let others: Vec<_> = (0..3).map(|_| take(&pool, 2, 4 * MIB, 4 * MIB)).collect();
        let small = take(&pool, 3, 12_000, 12_000);
        assert_eq!(pool.lock().held.memory, 44 * MIB + 12_000);
        drop(held);
        assert_eq!(ready(&mut [Some(waiting)]).len(), 1);
        drop((others, small));
        assert_eq!(pool.lock().held.memory, 0);
    }

    #[test]
    fn a_share_grows_as_far_as_there_is_memory() {
        let pool = pool(8 * MIB, None);
        let mut share = take(&pool, 1, MIB, MIB);
        assert!(share.grow(7 * MIB));
        assert!(!share.grow(9 * MIB));
        let other = take(&pool, 2, 1, MIB);
        assert!(!share.grow(8 * MIB));
        assert_eq!(pool.lock().held.memory, 8 * MIB);
        drop((share, other));
        assert_eq!(pool.lock().held, Held::default());
    }

    /// Whatever comes, ends and is given up in any order: the limits hold, and nobody is forgotten.
    #[test]
    fn no_order_of_events_exceeds_the_limits_or_forgets_a_request() {
        let mut dice = crate::testing::vocabularies::Dice::new(20);
        for turns in [None, Some(1), Some(2)] {
            let pool = pool(32 * MIB, turns);
            let (mut waiting, mut shares) = (Vec::<Option<Waiting>>::new(), Vec::new());
            for _ in 0..3000 {
                match dice.below(4) {
                    0 | 1 if waiting.len() < 40 => {
                        let bytes = *dice.pick(&[9_000, 100_000, MIB, 4 * MIB]);
                        let (client, memory) = (dice.below(5) as u64, bytes * (1 + dice.below(20)));
                        let pool = pool.clone();
                        let request = async move { pool.acquire(ClientId::Key(client), bytes, memory).await };
                        waiting.push(Some(Box::pin(request)));
                    }
                    2 if !waiting.is_empty() => drop(waiting.swap_remove(dice.below(waiting.len()))),
                    _ if !shares.is_empty() => drop(shares.swap_remove(dice.below(shares.len()))),
                    _ => {}
                }
                shares.extend(ready(&mut waiting));
                waiting.retain(Option::is_some);
                let held = pool.lock().held;
                assert!(held.memory <= 32 * MIB && held.large <= turns.unwrap_or(usize::MAX), "{held:?}");
                assert_eq!(held.small + held.large, shares.len());
            }
            while !waiting.is_empty() {
                assert!(shares.pop().is_some(), "requests wait although nothing is held");
                shares.extend(ready(&mut waiting));
                waiting.retain(Option::is_some);
            }
            drop(shares);
            assert_eq!(lines_and_waiting(&pool), (0, 0));
            assert_eq!(pool.lock().held, Held::default());
        }
    }
}
