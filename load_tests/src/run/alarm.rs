//! A timer more precise than the runtime's, which rounds up to whole milliseconds.
//!
//! A thread waits for the next timer on a condition variable, which is accurate to about 60 µs and uses no
//! CPU.
//! Invariant: no task is woken before its time.

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Instant,
};

use tokio::sync::oneshot;

/// A precise timer, usable from any thread.
#[derive(Debug)]
pub struct Alarm {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    timers: Mutex<Timers>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Timers {
    queue: BinaryHeap<Reverse<Timer>>,
    over: bool,
}

/// A pending timer.
#[derive(Debug)]
struct Timer {
    at: Instant,
    notify: oneshot::Sender<()>,
}

impl Ord for Timer {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.cmp(&other.at)
    }
}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Timer {}

impl Alarm {
    /// Starts the timer thread.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let ringing = Arc::clone(&shared);
        let thread = thread::Builder::new().name("alarm".into()).spawn(move || ringing.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Waits until `at`.
    pub async fn sleep_until(&self, at: Instant) {
        if at > Instant::now() {
            // The thread outlives `self`, so the notification always arrives.
            let _ = self.shared.add_timer(at).await;
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Timers> {
        self.timers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_timer(&self, at: Instant) -> oneshot::Receiver<()> {
        let (bell, rung) = oneshot::channel();
        let mut calls = self.lock();
        let is_first = calls.queue.peek().is_none_or(|Reverse(first)| at < first.at);
        calls.queue.push(Reverse(Timer { at, notify: bell }));
        drop(calls);
        if is_first {
            self.changed.notify_one();
        }
        rung
    }

    /// Runs the timer thread until `over` is set: wakes each waiter at its time.
    fn run(&self) {
        let mut calls = self.lock();
        while !calls.over {
            let now = Instant::now();
            calls = match calls.queue.peek().map(|Reverse(first)| first.at) {
                Some(at) if at <= now => {
                    if let Some(Reverse(call)) = calls.queue.pop() {
                        // The waiter may be gone.
                        let _ = call.notify.send(());
                    }
                    calls
                }
                Some(at) => match self.changed.wait_timeout(calls, at - now) {
                    Ok((calls, _)) => calls,
                    Err(poisoned) => poisoned.into_inner().0,
                },
                None => self.changed.wait(calls).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::run::local_runtime;

    /// Waits up to 30 seconds for a notification.
    fn wait_for(bell: oneshot::Receiver<()>) -> Result<(), oneshot::error::RecvError> {
        let heard = local_runtime().unwrap().block_on(async { timeout(Duration::from_secs(30), bell).await });
        heard.expect("the timer fires or is dropped")
    }

    #[test]
    fn nobody_is_woken_too_early_and_a_nearer_call_goes_before_a_farther_one() {
        let alarm = Alarm::start().unwrap();
        let mut far = alarm.shared.add_timer(Instant::now() + Duration::from_secs(3600));
        // The thread usually sleeps towards the far timer when these are added.
        for _ in 0..20 {
            let [near, next] = [1, 2].map(|ms| Instant::now() + Duration::from_millis(ms));
            for (time, bell) in [(near, alarm.shared.add_timer(near)), (next, alarm.shared.add_timer(next))] {
                wait_for(bell).unwrap();
                assert!(Instant::now() >= time);
            }
        }
        assert!(far.try_recv().is_err());
    }

    #[test]
    fn who_gives_up_waiting_disturbs_nobody_and_the_thread_ends() {
        let alarm = Alarm::start().unwrap();
        let at = Instant::now() + Duration::from_millis(5);
        drop(alarm.shared.add_timer(at));
        wait_for(alarm.shared.add_timer(at)).unwrap();
        let far = alarm.shared.add_timer(at + Duration::from_secs(1000));
        drop(alarm);
        assert!(wait_for(far).is_err());
    }
}
