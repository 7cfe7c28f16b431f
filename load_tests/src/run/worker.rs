//! The worker threads of a run: each sends a part of the requests and reads the responses.
//!
//! Invariant: every request sent yields a sample, or the run fails with the reason.

use std::{
    any::Any,
    iter::StepBy,
    ops::Range,
    panic::resume_unwind,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread::{self, ScopedJoinHandle},
    time::{Duration, SystemTime},
};

use anyhow::{Context, anyhow};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinError,
    time::sleep_until,
};

use super::{
    Connections, Progress, RunSettings, alarm::Alarm, closed, local_runtime, open, watcher::StopSignal,
};
use crate::{
    client::{Client, PreparedRequest, Service, clock::Clock, wait_until_stopped},
    plan::{arrivals::Schedule, requests::LoadSpec},
    sample::{Outcome, Sample},
};

/// The state shared by the workers of a run.
pub struct Job {
    service: Arc<Service>,
    connections: Connections,
    retries: u32,
    request_timeout: Duration,
    time_limit: Duration,
    load: LoadSpec,
    schedule: Schedule,
    /// One permit per request that may be in flight; `None` is unlimited.
    permits: Option<Arc<Semaphore>>,
    pub alarm: Alarm,
    /// Index of the next request of a closed loop.
    next: AtomicUsize,
    live: Arc<Progress>,
    stop: StopSignal,
}

impl Job {
    /// Creates the job of one worker.
    pub fn new(
        settings: &RunSettings,
        service: Arc<Service>,
        schedule: Schedule,
        live: &Arc<Progress>,
        stop: StopSignal,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            service,
            connections: settings.connections,
            retries: settings.retries,
            request_timeout: settings.request_timeout,
            time_limit: settings.time_limit,
            load: settings.load.clone(),
            schedule,
            permits: settings.max_concurrency.map(semaphore),
            alarm: Alarm::start().context("starting a thread")?,
            next: AtomicUsize::new(0),
            live: Arc::clone(live),
            stop,
        })
    }
}

fn semaphore(max_concurrency: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(max_concurrency.clamp(1, Semaphore::MAX_PERMITS)))
}

/// Runs the job on `workers` threads. Returns the start time and the samples by index.
pub fn run_workers(job: &Arc<Job>, workers: usize) -> anyhow::Result<(SystemTime, Vec<Sample>)> {
    thread::scope(|scope| {
        let (ready, all_ready) = mpsc::channel();
        let mut threads = Vec::new();
        for number in 0..workers {
            let (start, started) = mpsc::channel();
            let (job, ready) = (Arc::clone(job), ready.clone());
            let thread =
                thread::Builder::new().name(format!("worker {number}")).spawn_scoped(scope, move || {
                    run_worker(job, WorkerShare { number, workers }, ready, started)
                });
            threads.push((thread.context("starting a thread")?, start));
        }
        drop(ready);
        // Ends early if a worker failed, because its sender is dropped.
        let _ = all_ready.iter().take(workers).count();
        let (began, clock) = (SystemTime::now(), Clock::start(job.request_timeout, job.time_limit));
        let threads: Vec<_> = threads
            .into_iter()
            .map(|(thread, start)| {
                // The error of a failed worker is reported on join.
                let _ = start.send(clock);
                thread
            })
            .collect();
        Ok((began, join_all(threads)?))
    })
}

fn join_all(threads: Vec<ScopedJoinHandle<'_, anyhow::Result<Vec<Sample>>>>) -> anyhow::Result<Vec<Sample>> {
    let ends: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    let mut samples = Vec::new();
    for end in ends {
        samples.append(&mut end.unwrap_or_else(|panic| Err(panic_error(&*panic)))?);
    }
    samples.sort_by_key(|sample| sample.index);
    Ok(samples)
}

fn panic_error(panic: &(dyn Any + Send)) -> anyhow::Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    anyhow!("a worker thread panicked (this is a bug): {text}")
}

/// A guard that stops the whole run if its worker ends before completing its part.
struct StopUnlessCompleted {
    stop: StopSignal,
    is_done: bool,
}

impl Drop for StopUnlessCompleted {
    fn drop(&mut self) {
        if !self.is_done {
            self.stop.trigger();
        }
    }
}

/// The part of the requests that one of `workers` workers sends.
#[derive(Clone, Copy, Debug)]
pub struct WorkerShare {
    number: usize,
    workers: usize,
}

impl WorkerShare {
    /// Returns this worker's part of the indices `0..count`.
    pub fn indices(self, count: usize) -> StepBy<Range<usize>> {
        (self.number.min(count)..count).step_by(self.workers)
    }
}

/// Runs a worker thread. Returns its samples.
fn run_worker(
    job: Arc<Job>,
    share: WorkerShare,
    ready: mpsc::Sender<()>,
    started: mpsc::Receiver<Clock>,
) -> anyhow::Result<Vec<Sample>> {
    let mut end = StopUnlessCompleted { stop: job.stop.clone(), is_done: false };
    let runtime = local_runtime().context("starting a runtime")?;
    let start = move || {
        let _ = ready.send(());
        // The main thread must not wait for this sender any more.
        drop(ready);
        started.recv().context("the run was aborted before it started")
    };
    let samples = runtime.block_on(Worker::new(job).run(share, start))?;
    end.is_done = true;
    Ok(samples)
}

/// A worker: one thread of a run.
pub struct Worker {
    pub job: Arc<Job>,
    client: Client,
}

impl Worker {
    fn new(job: Arc<Job>) -> Rc<Self> {
        let (service, live) = (Arc::clone(&job.service), Arc::clone(&job.live));
        let client = Client::new(service, job.connections, job.retries, job.stop.receiver(), live);
        Rc::new(Self { job, client })
    }

    /// Prepares the first requests, waits for the common start, and sends the worker's part of the requests.
    async fn run(
        self: Rc<Self>,
        share: WorkerShare,
        start: impl FnOnce() -> anyhow::Result<Clock>,
    ) -> anyhow::Result<Vec<Sample>> {
        match &self.job.schedule {
            Schedule::Open(dues) => {
                let mut ahead = open::PreparedQueue::new(&self, dues, share.indices(dues.len()));
                ahead.fill();
                Ok(open::send_all(&self, ahead, start()?).await)
            }
            Schedule::Closed { users, think } => {
                let firsts = share.indices(*users).map_while(|_| self.take_next()).collect();
                Ok(closed::send_all(&self, firsts, *think, start()?).await)
            }
        }
    }

    /// Prepares the request of this index.
    pub fn prepare(&self, index: usize) -> PreparedRequest {
        self.client.prepare(&self.job.load.request(index))
    }

    /// Takes and prepares the next request of a closed loop, if one is left.
    pub fn take_next(&self) -> Option<PreparedRequest> {
        let index = self.job.next.fetch_add(1, Relaxed);
        (index < self.job.load.requests).then(|| self.prepare(index))
    }

    /// Waits until another request may be in flight. The permit must be held while it is.
    pub async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        let permits = Arc::clone(self.job.permits.as_ref()?);
        Some(permits.acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// Awaits `what`. Returns `None` if the run ends first.
    pub async fn unless_ended<T>(&self, clock: Clock, what: impl Future<Output = T>) -> Option<T> {
        let value = tokio::select! {
            biased;
            () = sleep_until(clock.end().into()) => None,
            () = wait_until_stopped(self.job.stop.receiver()) => None,
            value = what => Some(value),
        };
        // The stop signal may reach another task first, and its end may be what completed `what`.
        value.filter(|_| !self.job.stop.is_triggered() && !clock.is_over(clock.now()))
    }

    /// Sends a request now and updates the live counts.
    pub async fn send(&self, outgoing: PreparedRequest, scheduled: Duration, clock: Clock) -> Sample {
        let live = &self.job.live;
        live.sent.fetch_add(1, Relaxed);
        live.in_flight.fetch_add(1, Relaxed);
        let sample = self.client.send(outgoing, scheduled, clock).await;
        live.in_flight.fetch_sub(1, Relaxed);
        let ended = match &sample.outcome {
            Outcome::Completed => &live.completed,
            Outcome::HungUp => &live.hung_up,
            Outcome::Failed(_) => &live.failed,
        };
        ended.fetch_add(1, Relaxed);
        sample
    }
}

/// Returns the output of a task, or resumes its panic.
pub fn unwrap_join<T>(end: Result<T, JoinError>) -> T {
    match end {
        Ok(value) => value,
        Err(error) => resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_all_workers_are_everything_once() {
        for (count, workers) in [(10, 3), (2, 4), (0, 2), (5, 1)] {
            let mut all: Vec<usize> =
                (0..workers).flat_map(|number| WorkerShare { number, workers }.indices(count)).collect();
            all.sort_unstable();
            assert_eq!(all, Vec::from_iter(0..count), "{count} over {workers}");
        }
    }

    #[test]
    fn a_panic_in_a_thread_is_an_error_that_says_what_it_was() {
        let error = thread::scope(|scope| join_all(vec![scope.spawn(|| panic!("number {}", 7))]));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("number 7") && text.contains("bug"), "{text}");
    }

    #[test]
    fn a_worker_that_panics_stops_the_others() {
        crate::run::with_watcher(&Progress::default(), |_, stop| {
            let failing = || {
                let _end = StopUnlessCompleted { stop: stop.clone(), is_done: false };
                panic!("as planned");
            };
            assert!(thread::scope(|scope| scope.spawn(failing).join()).is_err());
            assert!(stop.is_triggered());
        });
    }
}
