//! `std::thread` of the scheduler.

pub use shuttle::thread::{Result, Scope, ScopedJoinHandle, current, panicking, scope, yield_now};

use crate::time::{Duration, Instant, advance_to};
use ::std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use ::std::sync::Arc;
use ::std::sync::atomic::{AtomicBool, Ordering};
use shuttle::thread;

/// The payload with which a thread unwinds to its end, without failing the scenario as a panic does.
pub struct End;

/// The handle of a thread.
#[derive(Debug)]
pub struct JoinHandle<T> {
    thread: thread::JoinHandle<Option<T>>,
    /// Whether the thread has ended; not a point at which the scheduler chooses.
    has_ended: Arc<AtomicBool>,
}

impl<T> JoinHandle<T> {
    /// Waits for the thread's result.
    pub fn join(self) -> Result<T> {
        self.thread.join()?.ok_or_else(|| Box::new(End) as _)
    }

    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }
}

/// Sets the flag when it is dropped.
struct Ending(Arc<AtomicBool>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Creates threads with names.
#[derive(Debug, Default)]
pub struct Builder(Option<String>);

impl Builder {
    /// Creates a builder.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Names the thread.
    pub fn name(self, name: String) -> Builder {
        Builder(Some(name))
    }

    /// Starts the thread.
    pub fn spawn<F, T>(self, work: F) -> ::std::io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let has_ended = Arc::new(AtomicBool::new(false));
        let ending = Ending(has_ended.clone());
        let builder = thread::Builder::new().name(self.0.unwrap_or_default());
        let thread = builder.spawn(move || {
            let _ending = ending;
            match catch_unwind(AssertUnwindSafe(work)) {
                Ok(result) => Some(result),
                Err(payload) if payload.is::<End>() => None,
                Err(payload) => resume_unwind(payload),
            }
        })?;
        Ok(JoinHandle { thread, has_ended })
    }
}

/// Starts a thread.
pub fn spawn<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    Builder::new().spawn(work).expect("the scheduler has threads without end")
}

/// Lets other threads run, and advances the clock.
pub fn sleep(time: Duration) {
    let end = Instant::now() + time;
    yield_now();
    advance_to(end);
}
