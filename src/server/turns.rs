//! Fair turns: requests wait for a share of the memory that bodies may take while they are read, and for a
//! turn to be parsed and tokenized. The shares of a pool go to clients by bytes, not by requests, and a small
//! body does not wait for the large ones of the same client.
//!
//! Each client has a line per size class. The line whose first request would have the smallest virtual
//! counter is next: the counter of the request that began last, or of the line's own previous one, plus the
//! request's bytes (self-clocked fair queueing). So a line that has just had its turn is behind others by
//! what that turn cost, and an idle one gains nothing by having waited.
//!
//! If the next request lacks memory, larger ones behind it wait too, and small ones pass it only as long as
//! they hold no more than a quarter of the pool, so that it gets its share once others end. One that lacks
//! only what its own client holds delays no one else.
//!
//! A share can grow, without waiting, and then counts as a request of its new size: it moves to the line of
//! that size, whose counter is charged, and does not take what others wait for.
//!
//! Invariant: what is held never exceeds the limits of the pool, the number of waiting requests is bounded,
//! and one whose client is gone neither holds nor delays anything.

use crate::request::RequestError;
use crate::request::client::ClientId;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Upper limits of the size classes in bytes of the body; there is one more without a limit. A body that
/// takes more memory than is left to small ones is not in the first class, however short it is.
const CLASS_BYTES: [usize; 2] = [64 << 10, 512 << 10];

/// Maximum number of requests that wait in one line, and in all lines of a pool, apart from the first one of
/// each line.
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

impl PoolLimits {
    /// Returns the memory of the largest share, which leaves some to small ones.
    fn largest(&self) -> usize {
        3 * self.small()
    }

    /// Returns the memory that is left to small shares: that of the largest one of the smallest class, and of
    /// all together while a large one waits for memory.
    fn small(&self) -> usize {
        self.memory / 4
    }

    /// Returns the size class of a body of `bytes` bytes that takes `memory` bytes.
    fn class(&self, bytes: usize, memory: usize) -> usize {
        let class = CLASS_BYTES.iter().take_while(|most| bytes > **most).count();
        class.max(usize::from(memory > self.small()))
    }
}

/// A pool of memory and turns, shared by those that hold and wait for its parts.
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
    /// Memory of the shares of the smallest class.
    small_memory: usize,
    /// Sum of [`Part::unwaited`].
    unwaited: usize,
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

/// The first request of a line.
#[derive(Debug)]
struct Head {
    /// Virtual counter at its end.
    counter: u64,
    id: u64,
    line: Line,
    memory: usize,
}

/// The line and the memory of a share.
#[derive(Clone, Copy, Debug)]
struct Part {
    line: Line,
    bytes: u64,
    memory: usize,
    /// The part of its memory for which it has not waited behind larger requests: by which it has grown, and
    /// all of it in the smallest class.
    unwaited: usize,
}

/// A share of a pool, which ends when it is dropped.
#[derive(Debug)]
pub struct Share {
    pool: FairPool,
    part: Part,
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
        let (reply, share) = oneshot::channel();
        let (line, id) = self.change(|pool| {
            let line = Line { client, class: pool.limits.class(bytes, memory) };
            Ok::<_, RequestError>((line, pool.enter(line, bytes, memory, reply)?))
        })?;
        let mut place = Place { pool: self, line, id: Some(id) };
        let share = share.await.map_err(|_| RequestError::EngineStopped)?;
        place.id = None;
        Ok(share)
    }

    /// Whether a request waits for memory that other clients hold.
    pub fn is_contended(&self) -> bool {
        self.lock().is_contended()
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
            // A body for which there may be a share at once is not refused for those that wait for theirs.
            if in_line > 0 && waiting >= limit {
                return Err(RequestError::TooManyLongBodies { limit });
            }
        }
        let (id, memory) = (self.next, memory.min(self.limits.largest()));
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

    /// Counts what a share holds.
    fn begin(&mut self, part: &Part) {
        self.held.add(part);
        let state = self.lines.entry(part.line).or_default();
        state.held += part.memory;
        state.shares += 1;
    }

    /// Takes back what a share held.
    fn end(&mut self, part: &Part) {
        self.held.remove(part);
        if let Some(state) = self.lines.get_mut(&part.line) {
            state.held -= part.memory;
            state.shares -= 1;
        }
    }

    /// Extends a share, as if it began now with what it has. Returns whether there is so much for it.
    fn grow(&mut self, part: &mut Part, bytes: usize, memory: usize) -> bool {
        let extra = memory.min(self.limits.largest()).saturating_sub(part.memory);
        if extra == 0 {
            return true;
        }
        let class = self.limits.class(bytes, part.memory + extra).max(part.line.class);
        let grown = Part {
            line: Line { class, ..part.line },
            bytes: part.bytes.max(bytes as u64),
            memory: part.memory + extra,
            unwaited: part.unwaited + extra,
        };
        let is_contended = self.is_contended();
        self.end(part);
        let fits = self.line_memory(grown.line) + grown.memory <= self.free()
            && self.has_turn(grown.line)
            && (!is_contended || self.held.unwaited + grown.unwaited <= self.limits.small());
        if fits {
            self.begin(&grown);
            self.charge(grown.line, grown.bytes - part.bytes);
            self.forget_if_idle(part.line);
            *part = grown;
        } else {
            self.begin(part);
        }
        fits
    }

    /// Charges a line for a request that begins now, or grows.
    fn charge(&mut self, line: Line, bytes: u64) {
        let state = self.lines.entry(line).or_default();
        state.counter = state.counter.max(self.now) + bytes;
        self.now = state.counter;
    }

    /// Returns the memory that no share holds.
    fn free(&self) -> usize {
        self.limits.memory - self.held.memory
    }

    /// Returns the memory that a line's shares hold.
    fn line_memory(&self, line: Line) -> usize {
        self.lines.get(&line).map_or(0, |state| state.held)
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
        while let Some(Head { counter, line, .. }) = self.next_head() {
            let Some(state) = self.lines.get_mut(&line) else { break };
            let Some(Waiter { memory, bytes, reply, .. }) = state.waiting.pop_front() else { break };
            state.counter = counter;
            self.waiting -= 1;
            self.now = self.now.max(counter);
            let unwaited = if line.class == 0 { memory } else { 0 };
            let part = Part { line, bytes, memory, unwaited };
            self.begin(&part);
            given.push((reply, Share { pool: pool.clone(), part }));
        }
        given
    }

    /// Returns the request that is next.
    fn next_head(&self) -> Option<Head> {
        let heads = self.lines.iter().filter_map(|(line, state)| Some((line, state, state.waiting.front()?)));
        let mut heads: Vec<_> = heads
            .map(|(line, state, Waiter { id, arrived, bytes, memory, .. })| Head {
                counter: state.counter.max(*arrived) + bytes,
                id: *id,
                line: *line,
                memory: *memory,
            })
            .collect();
        heads.sort_unstable_by_key(|head| (head.counter, head.id));
        // Clients whose requests lack memory that they hold themselves.
        let (mut is_short, mut own_fault) = (false, HashSet::new());
        heads.into_iter().find(|Head { line, memory, .. }| {
            // A line takes at most as much as it leaves to others, so one alone cannot take everything, and a
            // small share is nearly always possible.
            let fits = self.line_memory(*line).saturating_add(*memory) <= self.free();
            let may_pass = line.class == 0 && self.held.small_memory + memory <= self.limits.small();
            let has_to_wait = is_short || own_fault.contains(&line.client);
            if fits && self.has_turn(*line) && (may_pass || !has_to_wait) {
                return true;
            }
            if self.is_short(*line, *memory) {
                is_short = true;
            } else if *memory > self.free() {
                own_fault.insert(line.client);
            }
            false
        })
    }

    /// Whether the first request of some line lacks memory that others hold.
    fn is_contended(&self) -> bool {
        let mut heads = self.lines.iter().filter_map(|(line, state)| Some((line, state.waiting.front()?)));
        heads.any(|(line, head)| self.is_short(*line, head.memory))
    }

    /// Whether the first request of a line lacks memory that others hold: later ones must not take what it
    /// waits for. It is not the others' fault if what its client holds keeps it from having so much.
    fn is_short(&self, line: Line, needed: usize) -> bool {
        let large = (1..=CLASS_BYTES.len()).map(|class| self.line_memory(Line { class, ..line }));
        let own = self.line_memory(line) + large.sum::<usize>();
        needed > self.free() && own + needed <= self.limits.largest()
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
    fn add(&mut self, part: &Part) {
        self.memory += part.memory;
        self.unwaited += part.unwaited;
        match part.line.class {
            0 => (self.small_memory, self.small) = (self.small_memory + part.memory, self.small + 1),
            _ => self.large += 1,
        }
    }

    fn remove(&mut self, part: &Part) {
        self.memory -= part.memory;
        self.unwaited -= part.unwaited;
        match part.line.class {
            0 => (self.small_memory, self.small) = (self.small_memory - part.memory, self.small - 1),
            _ => self.large -= 1,
        }
    }
}

impl Share {
    /// Extends the share to `memory` bytes, or to three quarters of the pool if that is less, for a body of
    /// `bytes` bytes, without waiting: requests that wait for more while they hold some could wait for each
    /// other. Returns whether it may take so much.
    pub fn grow(&mut self, bytes: usize, memory: usize) -> bool {
        let Share { pool, part } = self;
        pool.change(|pool| pool.grow(part, bytes, memory))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.change(|pool| {
            pool.end(&self.part);
            pool.forget_if_idle(self.part.line);
        });
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
        // The first of its line is bounded by the number of connections.
        waiting.push(Some(wait(&pool, u64::MAX, MIB, 0)));
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

    /// Regression: uploads of one client without a length took all of the memory.
    #[test]
    fn shares_that_grow_leave_memory_to_other_clients() {
        let pool = pool(64 * MIB, None);
        let mut shares: Vec<_> = (0..32).map(|_| take(&pool, 1, 16 << 10, 16 << 10)).collect();
        for memory in (1..16).map(|at| at * MIB / 4) {
            shares.iter_mut().for_each(|share| _ = share.grow(MIB, memory));
        }
        assert!((30 * MIB..34 * MIB).contains(&pool.lock().held.memory));
        assert!(!shares[0].grow(MIB, 4 * MIB));
        let mut other = take(&pool, 2, 16 << 10, 16 << 10);
        assert!(other.grow(MIB, 16 * MIB) && other.grow(MIB, 16 * MIB));
        drop((shares, other));
        assert_eq!(pool.lock().held, Held::default());
    }

    /// Regression: bodies that need little memory took what a large one waited for, one after the other.
    #[test]
    fn a_large_body_gets_its_share_while_smaller_ones_keep_coming() {
        for (bytes, turns) in [(60_000, None), (60_000, Some(8)), (100_000, None)] {
            let pool = pool(8 * MIB, turns);
            let mut running: VecDeque<_> = (0..6).map(|client| take(&pool, client, bytes, MIB)).collect();
            let mut large = [Some(wait(&pool, 1000, 4 * MIB, 6 * MIB))];
            let mut smaller = Vec::new();
            let served = (2000..2200).find_map(|client| {
                let other = pool.clone();
                let request = async move { other.acquire(ClientId::Key(client), bytes, MIB).await };
                smaller.push(Some(Box::pin(request) as Waiting));
                running.extend(ready(&mut smaller).into_iter().map(|(_, share)| share));
                smaller.retain(Option::is_some);
                drop(running.pop_front());
                ready(&mut large).pop()
            });
            assert!(served.is_some(), "{bytes} {turns:?}");
        }
    }

    /// Regression: chunked bodies stayed in the line for small ones, and were charged as such.
    #[test]
    fn a_share_that_grows_counts_in_the_line_of_its_size() {
        let pool = pool(64 * MIB, None);
        let mut grown: Vec<_> = (0..4).map(|_| take(&pool, 1, 16 << 10, 16 << 10)).collect();
        assert!(grown.iter_mut().all(|share| share.grow(4 * MIB, 8 * MIB)));
        drop(take(&pool, 1, 10_000, 10_000));
        drop(grown);
        let running = take(&pool, 9, MIB, 32 * MIB);
        let mut waiting =
            [(1, 1), (2, 2)].map(|(client, size)| Some(wait(&pool, client, size * MIB, 36 * MIB)));
        let mut grown = take(&pool, 1, 16 << 10, 16 << 10);
        assert!(grown.grow(4 * MIB, 8 * MIB));
        drop(running);
        let next = ready(&mut waiting);
        assert_eq!(next.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1], "client 1 was served 4 MiB");
        drop((grown, next, waiting));
        assert_eq!(pool.lock().held, Held::default());
        assert_eq!(lines_and_waiting(&pool), (0, 0));
    }

    /// Regression: uploads that grew took what a large body waited for.
    #[test]
    fn a_share_does_not_grow_by_what_others_wait_for() {
        let pool = pool(64 * MIB, None);
        let running = take(&pool, 9, 4 * MIB, 40 * MIB);
        let mut large = [Some(wait(&pool, 1, 4 * MIB, 30 * MIB))];
        let mut share = take(&pool, 2, 16 << 10, 16 << 10);
        assert!(pool.is_contended());
        assert!(share.grow(2 * MIB, 16 * MIB), "a quarter is left to those that do not wait");
        assert!(!share.grow(2 * MIB, 17 * MIB));
        drop(running);
        assert_eq!(ready(&mut large).len(), 1);
        assert!(share.grow(2 * MIB, 17 * MIB));
    }

    /// Regression: in a small pool, short bodies were given less memory than they take.
    #[test]
    fn a_short_body_that_takes_much_memory_counts_as_a_large_one() {
        let pool = pool(8 * MIB, Some(8));
        let _first = take(&pool, 1, 60_000, 6 * MIB);
        assert_eq!(pool.lock().held.memory, 6 * MIB);
        let _second = wait(&pool, 2, 60_000, 6 * MIB);
    }

    /// Regression: it held up all others.
    #[test]
    fn a_client_that_lacks_what_another_of_its_lines_holds_holds_up_no_other() {
        let pool = pool(64 * MIB, None);
        let held = [1, 2].map(|client| take(&pool, client, 4 * MIB, 30 * MIB));
        let waiting = wait(&pool, 1, 100_000, 20 * MIB);
        assert!(!pool.is_contended());
        drop(take(&pool, 3, MIB, 2 * MIB));
        drop((held, waiting));
        // Those of its own behind it wait: it would never begin.
        let own = take(&pool, 1, 500_000, 20 * MIB);
        let mut large = [Some(wait(&pool, 1, 600_000, 48 * MIB))];
        let own = (own, take(&pool, 1, 500_000, 2 * MIB));
        let mut next = [Some(wait(&pool, 1, 500_000, 2 * MIB))];
        drop((take(&pool, 3, 600_000, 2 * MIB), take(&pool, 1, 10_000, 10_000), own));
        assert_eq!((ready(&mut large).len(), ready(&mut next).len()), (1, 1));
    }

    /// A line that waits for its own shares to end must not hold up others.
    #[test]
    fn a_client_that_holds_much_holds_up_no_other() {
        let pool = pool(64 * MIB, None);
        let held: Vec<_> = (0..6).map(|_| take(&pool, 1, 4 * MIB, 4 * MIB)).collect();
        let others: Vec<_> = (2..10).map(|client| take(&pool, client, 4 * MIB, 4 * MIB)).collect();
        let waiting = wait(&pool, 1, 16 * MIB, 16 * MIB);
        let other = take(&pool, 20, 32 * MIB, 2 * MIB);
        drop((held, others, other));
        assert_eq!(ready(&mut [Some(waiting)]).len(), 1);
    }

    /// Like a share whose size is known before.
    #[test]
    fn a_share_alone_grows_to_any_size_and_leaves_a_quarter() {
        let pool = pool(8 * MIB, None);
        let mut share = take(&pool, 1, MIB, MIB);
        assert!(share.grow(MIB, 7 * MIB) && share.grow(MIB, 90 * MIB));
        let mut other = take(&pool, 2, 1, 2 * MIB);
        assert!(!other.grow(MIB, 3 * MIB));
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
            let (mut waiting, mut shares) = (Vec::<Option<Waiting>>::new(), Vec::<(usize, Share)>::new());
            for _ in 0..3000 {
                match dice.below(5) {
                    0 | 1 if waiting.len() < 40 => {
                        let bytes = *dice.pick(&[9_000, 100_000, MIB, 4 * MIB]);
                        let (client, memory) = (dice.below(5) as u64, bytes * (1 + dice.below(20)));
                        let pool = pool.clone();
                        let request = async move { pool.acquire(ClientId::Key(client), bytes, memory).await };
                        waiting.push(Some(Box::pin(request)));
                    }
                    2 if !waiting.is_empty() => drop(waiting.swap_remove(dice.below(waiting.len()))),
                    3 if !shares.is_empty() => {
                        let at = dice.below(shares.len());
                        _ = shares[at].1.grow(dice.below(2 * MIB), dice.below(40 * MIB));
                    }
                    _ if !shares.is_empty() => drop(shares.swap_remove(dice.below(shares.len()))),
                    _ => {}
                }
                // A request that enters may end what held up an earlier one.
                (0..2).for_each(|_| shares.extend(ready(&mut waiting)));
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
