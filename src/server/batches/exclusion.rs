//! The turns of requests of batches that share devices: most run together, and one that failed devices runs
//! alone.
//!
//! Invariant: while a request runs alone, no other one does. Those alone take at most a fifth of the time
//! while others wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::time::{Instant, sleep_until};

/// Time that others have after a request was alone while they waited, as a multiple of the time that it took.
const REST: u32 = 4;

/// The turns of requests.
#[derive(Debug, Default)]
pub struct Exclusion {
    turns: RwLock<()>,
    /// Number of requests that wait to run together with others.
    waiting: AtomicUsize,
    /// The time before which none runs alone.
    next_alone: Mutex<Option<Instant>>,
}

/// The turn of a request, until it is dropped.
#[derive(Debug)]
pub enum Turn<'a> {
    /// Others may run at the same time.
    Together { _guard: RwLockReadGuard<'a, ()> },
    /// No other one runs.
    Alone(AloneTurn<'a>),
}

/// The turn of a request that runs alone.
#[derive(Debug)]
pub struct AloneTurn<'a> {
    exclusion: &'a Exclusion,
    /// When others began to wait for it.
    began: Instant,
    _guard: RwLockWriteGuard<'a, ()>,
}

impl Exclusion {
    /// Waits for a turn together with others.
    pub async fn together(&self) -> Turn<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waits = Waits(&self.waiting);
        Turn::Together { _guard: self.turns.read().await }
    }

    /// Waits for a turn alone.
    pub async fn alone(&self) -> Turn<'_> {
        loop {
            let next = self.next_alone();
            if let Some(next) = next {
                sleep_until(next).await;
            }
            // From here on, others wait.
            let (began, guard) = (Instant::now(), self.turns.write().await);
            // Another one may have been alone meanwhile.
            if self.next_alone() == next {
                return Turn::Alone(AloneTurn { exclusion: self, began, _guard: guard });
            }
        }
    }

    fn next_alone(&self) -> Option<Instant> {
        *self.next_alone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a turn alone that began at a time and ends now.
    fn end_alone(&self, began: Instant, now: Instant) {
        let rest = (self.waiting.load(Ordering::Relaxed) > 0).then(|| now + REST * (now - began));
        *self.next_alone.lock().unwrap_or_else(PoisonError::into_inner) = rest;
    }
}

impl Drop for AloneTurn<'_> {
    fn drop(&mut self) {
        self.exclusion.end_alone(self.began, Instant::now());
    }
}

/// A request that waits, until it is dropped.
struct Waits<'a>(&'a AtomicUsize);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::pin::{Pin, pin};
    use std::time::Duration;

    /// Returns whether a future waits.
    fn waits<F: Future>(future: &mut Pin<&mut F>) -> bool {
        future.as_mut().now_or_never().is_none()
    }

    #[actix_web::test]
    async fn one_alone_waits_for_those_together_and_they_for_it() {
        let exclusion = Exclusion::default();
        let [first, second] = [exclusion.together().await, exclusion.together().await];
        let mut alone = pin!(exclusion.alone());
        assert!(waits(&mut alone));
        drop((first, second));
        let turn = alone.await;
        assert!(exclusion.together().now_or_never().is_none() && exclusion.alone().now_or_never().is_none());
        drop(turn);
        assert!(exclusion.together().now_or_never().is_some());
    }

    /// Regression: one request after another ran alone, while those of all other batches waited.
    #[actix_web::test]
    async fn others_have_four_times_as_long_after_one_was_alone_while_they_waited() {
        let (exclusion, began, hour) = (Exclusion::default(), Instant::now(), Duration::from_secs(3600));
        exclusion.end_alone(began, began + hour);
        assert_eq!(exclusion.next_alone(), None, "nobody waited");
        let turn = exclusion.alone().await;
        let mut other = pin!(exclusion.together());
        assert!(waits(&mut other));
        exclusion.end_alone(began, began + hour);
        assert_eq!(exclusion.next_alone(), Some(began + 5 * hour));
        // Its end is that of the turn itself, which was short.
        let Turn::Alone(mut turn) = turn else { panic!("it is alone") };
        turn.began = Instant::now() - hour;
        drop(turn);
        drop(other.await);
        assert!(exclusion.alone().now_or_never().is_none(), "it has to wait");
        assert!(exclusion.together().now_or_never().is_some(), "and nobody for it");
    }
}
