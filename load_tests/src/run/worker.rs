//! The threads of a run: each sends its share of the requests and reads their answers.
//!
//! Invariant: every request that was sent leaves a sample, or the run fails with the reason.

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

use super::{Connections, Progress, Settings, alarm::Alarm, closed, local_runtime, open, watch::Stop};
use crate::{
    client::{Client, Outgoing, Service, clock::Clock, stopped},
    plan::{arrivals::Schedule, requests::Load},
    sample::{Outcome, Sample},
};

/// What the workers of a run share.
pub struct Job {
    service: Arc<Service>,
    connections: Connections,
    retries: u32,
    request_timeout: Duration,
    time_limit: Duration,
    load: Load,
    schedule: Schedule,
    /// As many as requests may be in flight; `None` knows no limit.
    permits: Option<Arc<Semaphore>>,
    pub alarm: Alarm,
    /// The index of the next request that a user sends, in a closed loop.
    next: AtomicUsize,
    live: Arc<Progress>,
    stop: Stop,
}

impl Job {
    pub fn new(
        settings: &Settings,
        service: Arc<Service>,
        schedule: Schedule,
        live: &Arc<Progress>,
        stop: Stop,
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

/// Does the whole job on so many threads. Returns when it began, and the samples by index.
pub fn work_all(job: &Arc<Job>, workers: usize) -> anyhow::Result<(SystemTime, Vec<Sample>)> {
    thread::scope(|scope| {
        let (ready, all_ready) = mpsc::channel();
        let mut threads = Vec::new();
        for number in 0..workers {
            let (start, started) = mpsc::channel();
            let (job, ready) = (Arc::clone(job), ready.clone());
            let thread = thread::Builder::new()
                .name(format!("worker {number}"))
                .spawn_scoped(scope, move || work(job, Share { number, workers }, ready, started));
            threads.push((thread.context("starting a thread")?, start));
        }
        drop(ready);
        // Ends early when a worker failed: its end of the channel is gone.
        let _ = all_ready.iter().take(workers).count();
        let (began, clock) = (SystemTime::now(), Clock::start(job.request_timeout, job.time_limit));
        let threads: Vec<_> = threads
            .into_iter()
            .map(|(thread, start)| {
                // A worker that failed shows when it is joined.
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
        samples.append(&mut end.unwrap_or_else(|panic| Err(panicked(&*panic)))?);
    }
    samples.sort_by_key(|sample| sample.index);
    Ok(samples)
}

fn panicked(panic: &(dyn Any + Send)) -> anyhow::Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    anyhow!("a worker panicked: {text}; this is a bug")
}

/// Stops the whole run when the worker that holds it ends before it has done its part.
struct StopUnlessDone {
    stop: Stop,
    is_done: bool,
}

impl Drop for StopUnlessDone {
    fn drop(&mut self) {
        if !self.is_done {
            self.stop.now();
        }
    }
}

/// Which of `workers` a worker is, from 0.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    number: usize,
    workers: usize,
}

impl Share {
    /// This worker's part of `0..count`.
    pub fn of(self, count: usize) -> StepBy<Range<usize>> {
        (self.number.min(count)..count).step_by(self.workers)
    }
}

/// A thread.
fn work(
    job: Arc<Job>,
    share: Share,
    ready: mpsc::Sender<()>,
    started: mpsc::Receiver<Clock>,
) -> anyhow::Result<Vec<Sample>> {
    let mut end = StopUnlessDone { stop: job.stop.clone(), is_done: false };
    let runtime = local_runtime().context("starting a runtime")?;
    let start = move || {
        let _ = ready.send(());
        // Who waits for all to be ready must not wait for this end of the channel.
        drop(ready);
        started.recv().context("the run was given up")
    };
    let samples = runtime.block_on(Worker::new(job).work(share, start))?;
    end.is_done = true;
    Ok(samples)
}

/// One thread's share of a run.
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

    /// Makes the first requests, waits for `start` as all the others do, and works.
    async fn work(
        self: Rc<Self>,
        share: Share,
        start: impl FnOnce() -> anyhow::Result<Clock>,
    ) -> anyhow::Result<Vec<Sample>> {
        match &self.job.schedule {
            Schedule::Open(dues) => {
                let mut ahead = open::Ahead::new(&self, dues, share.of(dues.len()));
                ahead.fill();
                Ok(open::send_all(&self, ahead, start()?).await)
            }
            Schedule::Closed { users, think } => {
                let firsts = share.of(*users).map_while(|_| self.take_next()).collect();
                Ok(closed::send_all(&self, firsts, *think, start()?).await)
            }
        }
    }

    /// The request of this index, made ready.
    pub fn prepare(&self, index: usize) -> Outgoing {
        self.client.prepare(&self.job.load.request(index))
    }

    /// The next request that nobody has taken, if there is one.
    pub fn take_next(&self) -> Option<Outgoing> {
        let index = self.job.next.fetch_add(1, Relaxed);
        (index < self.job.load.requests).then(|| self.prepare(index))
    }

    /// Waits until one request more may be in flight; it is while what this returns is held.
    pub async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        let permits = Arc::clone(self.job.permits.as_ref()?);
        Some(permits.acquire_owned().await.expect("permits are never closed; this is a bug"))
    }

    /// Waits for `what`, unless the run is over before.
    pub async fn unless_over<T>(&self, clock: Clock, what: impl Future<Output = T>) -> Option<T> {
        let value = tokio::select! {
            biased;
            () = sleep_until(clock.limit().into()) => None,
            () = stopped(self.job.stop.receiver()) => None,
            value = what => Some(value),
        };
        // The word to stop reaches one before the other, who may wait for nothing but the first one's end.
        value.filter(|_| !self.job.stop.is_now() && !clock.is_over(clock.now()))
    }

    /// Sends a request now, and counts what becomes of it.
    pub async fn send(&self, outgoing: Outgoing, scheduled: Duration, clock: Clock) -> Sample {
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

/// What a task brought; its panic goes on in the thread that awaited it.
pub fn brought<T>(end: Result<T, JoinError>) -> T {
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
                (0..workers).flat_map(|number| Share { number, workers }.of(count)).collect();
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
        crate::run::watched(&Progress::default(), |_, stop| {
            let failing = || {
                let _end = StopUnlessDone { stop: stop.clone(), is_done: false };
                panic!("as planned");
            };
            assert!(thread::scope(|scope| scope.spawn(failing).join()).is_err());
            assert!(stop.is_now());
        });
    }
}
