//! The buffers, threads and files of the KV caches that do not stay on the device: who has which buffer, and
//! what is read and written next.
//!
//! Invariant: that of [`super::cache`].

use super::abort::StepAbort;
use super::direct::DirectFile;
use super::held::HostCopy;
use super::link::{Direction, TransferPath};
use super::page_plan::Plan;
use super::stream::HostBytes;
use super::tier::Tier;
use super::trace::Activity;
use super::transfers::Stream;
use mainstem_kernels::{DeviceError, StepLimits, Waiters};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of threads that read and write, each a layer's K or V.
pub(super) const THREADS: usize = 4;

/// Error of steps after the threads have ended.
pub(super) const ENDED: &str = "the threads that read the KV cache have ended";

/// The K or V of a layer.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) layer: usize,
    /// The class of its buffers.
    pub(super) class: usize,
    pub(super) place: UnitPlace,
}

/// The place of the K or V of a layer.
#[derive(Debug)]
pub(super) enum UnitPlace {
    /// In the file, from this offset on.
    File(u64),
    Host(HostCopy),
}

impl UnitPlace {
    pub(super) fn tier(&self) -> Tier {
        match self {
            UnitPlace::File(_) => Tier::Disk,
            UnitPlace::Host(_) => Tier::Host,
        }
    }
}

/// State that device and threads share.
pub(super) struct Ring<Buf> {
    /// The file, if a cache is in it.
    pub(super) file: Option<DirectFile>,
    pub(super) path: TransferPath,
    /// K and V of each layer, in order.
    pub(super) units: Vec<Unit>,
    pub(super) pages: usize,
    pub(super) bytes: HostBytes<Buf>,
    pub(super) state: Mutex<RingState<Buf>>,
    /// Signals the device that something is read or written.
    pub(super) done: Condvar,
    /// Signals the threads that there may be something to do.
    pub(super) work: Condvar,
    pub(super) is_stopped: AtomicBool,
    /// Ends the waits of the device.
    pub(super) abort: StepAbort,
    /// Number of the first unit's name in the trace.
    pub(super) names: usize,
}

pub(super) struct RingState<Buf> {
    /// The plans of the current step, and of the one before, for which there may be writes left.
    pub(super) plans: [Arc<Plan>; 2],
    /// The place of the current step's plan.
    pub(super) current: usize,
    /// The unit that is read next.
    pub(super) next_read: usize,
    /// Number of threads that have started, and of those that read.
    pub(super) running: usize,
    pub(super) reading: usize,
    /// Free buffers by class.
    pub(super) free: Vec<Vec<Buf>>,
    /// Buffers that are read, by unit.
    pub(super) ready: Vec<Option<Buf>>,
    /// Units to write, each with the plan of its step.
    pub(super) writes: VecDeque<(usize, Buf, Arc<Plan>)>,
    /// Whether the changes of a unit wait to be written, or are being written.
    pub(super) unwritten: Vec<bool>,
    /// The reason for which reading or writing has failed.
    pub(super) failed: Option<String>,
}

/// The work of a thread on a buffer.
#[derive(Clone, Copy)]
enum Task {
    Read,
    Write,
}

impl<Buf> Ring<Buf> {
    pub(super) fn new(
        file: Option<DirectFile>,
        units: Vec<Unit>,
        (pages, free): (usize, Vec<Vec<Buf>>),
        limits: &StepLimits,
        (bytes, path): (HostBytes<Buf>, TransferPath),
    ) -> Ring<Buf> {
        let names = (0..)
            .zip(&units)
            .map(|(at, unit): (usize, &Unit)| format!("{} of layer {}", ["K", "V"][at % 2], unit.layer));
        let names = path.transfers.trace().map_or(0, |trace| trace.add_names(names));
        let state = RingState {
            plans: [(); 2].map(|()| Arc::new(Plan::with_capacity(limits, pages))),
            current: 0,
            next_read: units.len(),
            running: 0,
            reading: 0,
            free,
            ready: units.iter().map(|_| None).collect(),
            writes: VecDeque::with_capacity(units.len()),
            unwritten: vec![false; units.len()],
            failed: None,
        };
        Ring {
            file,
            path,
            units,
            pages,
            bytes,
            state: Mutex::new(state),
            done: Condvar::new(),
            work: Condvar::new(),
            is_stopped: AtomicBool::new(false),
            abort: StepAbort::default(),
            names,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RingState<Buf>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Reads and writes, until the ring is stopped.
    pub(super) fn run_thread(&self) {
        // If this thread panics, nobody waits for it.
        let _stop = StopAtEnd(self);
        let name = thread::current().name().unwrap_or_default().to_owned();
        let trace = self.path.transfers.trace().map(|trace| {
            let row = |activity| trace.add_row(activity, name.clone());
            (trace, [Activity::LoadCache, Activity::StoreCache].map(row))
        });
        self.lock().running += 1;
        self.done.notify_all();
        while let Some((task, unit, mut buf, plan)) = self.take_task() {
            let began = Instant::now();
            let outcome = self.transfer(task, unit, &mut buf, &plan);
            if let Some((trace, rows)) = trace {
                trace.record(rows[task as usize], self.names + unit, began);
            }
            // Before the device may change it.
            drop(plan);
            let mut state = self.lock();
            if let Err(reason) = outcome {
                state.failed.get_or_insert(reason);
            }
            match task {
                Task::Read => {
                    state.reading -= 1;
                    state.ready[unit] = Some(buf);
                }
                Task::Write => {
                    state.unwritten[unit] = false;
                    state.free[self.units[unit].class].push(buf);
                }
            }
            drop(state);
            self.done.notify_all();
            self.work.notify_all();
        }
    }

    /// Waits until all threads run: starting a thread allocates, and steps must not.
    pub(super) fn wait_for_threads(&self) {
        let mut state = self.lock();
        while state.running < THREADS && !self.is_stopped() {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for something to do: first to write, which frees buffers. `None` once the ring is stopped.
    fn take_task(&self) -> Option<(Task, usize, Buf, Arc<Plan>)> {
        let mut guard = self.lock();
        while !self.is_stopped() {
            let unit = guard.next_read;
            let state = &mut *guard;
            if let Some((unit, buf, plan)) = state.writes.pop_front() {
                return Some((Task::Write, unit, buf, plan));
            }
            if let Some(Unit { class, .. }) = self.units.get(unit)
                && !state.unwritten[unit]
                && let Some(buf) = state.free[*class].pop()
            {
                state.next_read += 1;
                state.reading += 1;
                return Some((Task::Read, unit, buf, state.plans[state.current].clone()));
            }
            guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Ends the reads of the step before, if it has failed, and returns the place of a plan that no thread
    /// has.
    pub(super) fn end_reads(&self) -> Result<usize, DeviceError> {
        let mut guard = self.lock();
        guard.next_read = self.units.len();
        let mut stall = Duration::ZERO;
        let free = loop {
            // Threads have both only after a step that failed: any other has read what the one before it
            // has written.
            let free = guard.plans.iter_mut().position(|plan| Arc::get_mut(plan).is_some());
            if let Some(free) = free.filter(|_| guard.reading == 0) {
                break free;
            }
            let began = Instant::now();
            guard = self.wait(guard)?;
            stall += began.elapsed();
        };
        self.path.transfers.add_stall(Stream::StoreCache, stall);
        let state = &mut *guard;
        // A step that failed has not used everything.
        for (Unit { class, .. }, ready) in self.units.iter().zip(&mut state.ready) {
            state.free[*class].extend(ready.take());
        }
        Ok(free)
    }

    /// Waits until something is read or written. Fails if the threads have ended, or the step is aborted.
    pub(super) fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, RingState<Buf>>,
    ) -> Result<MutexGuard<'a, RingState<Buf>>, DeviceError> {
        if self.is_stopped() {
            return Err(DeviceError::Fault(ENDED.into()));
        }
        self.abort.check()?;
        Ok(self.done.wait(state).unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns whether a unit is V in the memory of the host, of which single positions can be read.
    pub(super) fn can_fetch(&self, unit: usize) -> bool {
        // V that is in K comes with it.
        let has_bytes = |place: &UnitPlace| match place {
            UnitPlace::Host(memory) => !memory.read().is_empty(),
            UnitPlace::File(_) => false,
        };
        unit % 2 == 1 && has_bytes(&self.units[unit].place)
    }

    /// Reads the pages of a unit, or writes them.
    fn transfer(&self, task: Task, unit: usize, buf: &mut Buf, plan: &Plan) -> Result<(), String> {
        let bytes = (self.bytes)(buf).ok_or("the KV cache is not on the host")?;
        let (page, place, began) = (bytes.len() / self.pages, &self.units[unit].place, Instant::now());
        let mut moved = 0;
        let outcome = match task {
            Task::Read => {
                let reads = if self.can_fetch(unit) { &plan.value_reads } else { &plan.reads };
                let runs = reads.iter().map(|run| (run.start, run.start..run.end));
                let copies = plan.copies.iter().map(|(from, to)| (*from, *to..to + 1));
                runs.chain(copies).try_for_each(|(from, to)| {
                    moved += to.len() * page;
                    let bytes = &mut bytes[to.start * page..to.end * page];
                    twice(|| self.read(place, from * page, bytes))
                })
            }
            Task::Write => plan.writes.iter().try_for_each(|run| {
                moved += run.len() * page;
                let bytes = &bytes[run.start * page..run.end * page];
                twice(|| self.write(place, run.start * page, bytes))
            }),
        };
        let (stream, direction) = match task {
            Task::Read => (Stream::LoadCache, Direction::ToDevice),
            Task::Write => (Stream::StoreCache, Direction::FromDevice),
        };
        self.path.transfers.add_bytes(stream, place.tier(), moved);
        self.path.wait(direction, moved, began, &|| self.is_stopped());
        outcome.map_err(|error| match (error.kind(), task) {
            (io::ErrorKind::Interrupted, _) => "stopped".to_owned(),
            (_, Task::Read) => format!("cannot read the KV cache from its file: {error}"),
            (_, Task::Write) => format!("cannot write the KV cache to its file: {error}"),
        })
    }

    /// Fills `bytes` with those at `at` of a cache.
    fn read(&self, place: &UnitPlace, at: usize, bytes: &mut [u8]) -> io::Result<()> {
        match place {
            UnitPlace::Host(memory) => {
                let memory = memory.read();
                // It is freed when the device is given up.
                let from = memory.get(at..at + bytes.len()).ok_or(io::ErrorKind::Interrupted)?;
                bytes.copy_from_slice(from);
                Ok(())
            }
            UnitPlace::File(offset) => {
                let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
                file.read(offset + at as u64, bytes, &|| self.is_stopped())
            }
        }
    }

    /// Writes `bytes` to a cache, from `at` on.
    fn write(&self, place: &UnitPlace, at: usize, bytes: &[u8]) -> io::Result<()> {
        match place {
            UnitPlace::Host(memory) => {
                let mut memory = memory.write();
                let to = memory.get_mut(at..at + bytes.len()).ok_or(io::ErrorKind::Interrupted)?;
                to.copy_from_slice(bytes);
                Ok(())
            }
            UnitPlace::File(offset) => {
                let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
                file.write(offset + at as u64, bytes, &|| self.is_stopped())
            }
        }
    }

    /// Frees the buffers that no thread has, and all copies.
    pub(super) fn clear(&self) {
        for unit in &self.units {
            if let UnitPlace::Host(copy) = &unit.place {
                copy.free();
            }
        }
        let mut state = self.lock();
        state.free.iter_mut().for_each(Vec::clear);
        state.ready.iter_mut().for_each(|ready| *ready = None);
        state.writes.clear();
    }

    /// Ends the threads, and the wait of the device.
    pub(super) fn stop(&self) {
        let state = self.lock();
        self.is_stopped.store(true, Ordering::Release);
        drop(state);
        self.work.notify_all();
        self.done.notify_all();
    }
}

/// Tries to read or write once more if it fails, because a failure costs all requests their caches.
fn twice(mut access: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    access().or_else(|_| access())
}

/// Stops a ring when it is dropped.
struct StopAtEnd<'a, Buf>(&'a Ring<Buf>);

impl<Buf> Drop for StopAtEnd<'_, Buf> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl<Buf: Send> Waiters for Ring<Buf> {
    fn wake_all(&self) {
        drop(self.lock());
        self.done.notify_all();
    }
}
