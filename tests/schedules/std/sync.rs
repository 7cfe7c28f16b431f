//! `std::sync` of the scheduler, with timeouts and spurious wake-ups.

pub use ::std::sync::{Arc, LazyLock, LockResult, OnceLock, PoisonError, TryLockError, TryLockResult, Weak};
pub use shuttle::sync::{
    Barrier, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic, mpsc,
};

use crate::time::{Duration, Instant, advance_to};
use ::std::sync::atomic::{AtomicBool, Ordering};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

/// Mean number of waits from one that ends without a reason to the next.
const SPURIOUS_EVERY: u32 = 16;

/// Numbers of times that a timeout lets others run before it passes; one of them is drawn.
const TIMEOUT_YIELDS: [usize; 3] = [0, 20, 200];

/// A condition variable. A wait may end without a reason, and a timeout may pass at any time.
#[derive(Debug, Default)]
pub struct Condvar(Arc<shuttle::sync::Condvar>);

/// Whether a wait ended by its timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the wait ended by its timeout.
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable.
    pub fn new() -> Condvar {
        Condvar::default()
    }

    /// Wakes one of the waiting threads.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits until the thread is woken.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        if thread_rng().gen_range(0..SPURIOUS_EVERY) > 0 {
            return self.0.wait(guard);
        }
        // A timeout that passes at once is a wake-up without a reason.
        self.wait_with_timer(guard, None)
    }

    /// Waits until the condition is false.
    pub fn wait_while<'a, T, F>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: F,
    ) -> LockResult<MutexGuard<'a, T>>
    where
        F: FnMut(&mut T) -> bool,
    {
        while condition(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    /// Waits until the thread is woken or the time has passed.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let end = Instant::now() + time;
        let waited = self.wait_with_timer(guard, Some(end));
        let result = WaitTimeoutResult(Instant::now() >= end);
        match waited {
            Ok(guard) => Ok((guard, result)),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), result))),
        }
    }

    /// Waits until the condition is false or the time has passed.
    pub fn wait_timeout_while<'a, T, F>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut condition: F,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)>
    where
        F: FnMut(&mut T) -> bool,
    {
        let end = Instant::now() + time;
        loop {
            if !condition(&mut guard) {
                return Ok((guard, WaitTimeoutResult(false)));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            guard = self.wait_timeout(guard, left)?.0;
        }
    }

    /// Waits, at most until a thread for this wait has advanced the clock to `end`, or has run.
    fn wait_with_timer<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        end: Option<Instant>,
    ) -> LockResult<MutexGuard<'a, T>> {
        let condvar = self.0.clone();
        let is_over = Arc::new(AtomicBool::new(false));
        let is_awake = is_over.clone();
        let yields = end.map_or(0, |_| TIMEOUT_YIELDS[thread_rng().gen_range(0..TIMEOUT_YIELDS.len())]);
        drop(thread::spawn(move || {
            for _ in 0..yields {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                thread::yield_now();
            }
            while !is_over.load(Ordering::SeqCst) {
                end.into_iter().for_each(advance_to);
                // The thread may not have begun to wait.
                condvar.notify_all();
                thread::yield_now();
            }
        }));
        let waited = self.0.wait(guard);
        is_awake.store(true, Ordering::SeqCst);
        waited
    }
}
