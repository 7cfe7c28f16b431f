//! A pool of worker threads for one calling thread. A job is a number of items; threads claim them one by
//! one, from the last to the first.
//!
//! The calling thread works too. Between jobs, workers spin briefly and then sleep, so that several pools
//! (and other programs) can share a machine. Dispatching a job allocates nothing.
//! Invariant: when [`ThreadPool::run`] returns, every item has run exactly once and no worker can see the
//! job.

#![allow(unsafe_code)]

use crate::backend::DeviceError;
use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time an idle thread spins, waiting for work or for the end of a job, before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(40);
/// Number of checks between two readings of the clock.
const SPINS_PER_CLOCK_CHECK: usize = 64;
/// Number of elements of a row-wise operation that justify a work item.
const MIN_ITEM_ELEMENTS: usize = 16 * 1024;

/// A pool of worker threads. Dropping it stops and joins them.
pub struct ThreadPool {
    shared: Arc<SharedState>,
    workers: Vec<JoinHandle<()>>,
}

/// State shared by the calling thread and the workers. The job's fields are written while no item can be
/// claimed, and read only by a thread that then claims an item of that job.
struct SharedState {
    /// Job number << 32 | number of unclaimed items. Zero items: nothing to claim.
    ticket: CacheLine<AtomicU64>,
    /// Number of finished items.
    done: CacheLine<AtomicUsize>,
    items: AtomicUsize,
    /// The caller's closure, and a function that knows its type.
    work: AtomicPtr<()>,
    call: AtomicPtr<()>,
    stop: AtomicBool,
    /// Number of workers that sleep or are about to.
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake: Condvar,
    finished: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Puts a frequently written value on a cache line of its own.
#[repr(align(128))]
struct CacheLine<T>(T);

type Call = unsafe fn(*const (), usize, usize);

impl ThreadPool {
    /// Creates a pool of `threads` threads for device `device`, including the calling thread. All of them run
    /// when this returns, because starting a thread allocates and no step may.
    pub fn new(device: u32, threads: usize) -> Result<ThreadPool, DeviceError> {
        let mut pool =
            ThreadPool { shared: Arc::new(SharedState::new()), workers: Vec::with_capacity(threads) };
        let (up, all_up) = std::sync::mpsc::channel();
        for worker in 1..threads {
            let (shared, up) = (pool.shared.clone(), up.clone());
            let thread = std::thread::Builder::new()
                .name(format!("cpu{device}-{worker}"))
                .spawn(move || {
                    let _ = up.send(());
                    drop(up);
                    shared.work_until_stopped(worker)
                })
                .map_err(|source| DeviceError::Fault(format!("cannot start a worker thread: {source}")))?;
            pool.workers.push(thread);
        }
        drop(up);
        let started = all_up.iter().count();
        assert_eq!(started, pool.workers.len(), "every worker reports once that it has started");
        Ok(pool)
    }

    /// Returns the number of threads that work on a job, including the calling thread. Worker numbers are
    /// below it.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(worker, item)` for each item below `items`, on all threads, and returns when all are done.
    /// If an item panics, the panic is resumed here once no thread is running an item.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, items: usize, work: F) {
        if self.workers.is_empty() || items < 2 {
            return (0..items).for_each(|item| work(0, item));
        }
        let shared = &*self.shared;
        shared.work.store(&raw const work as *mut (), Ordering::Relaxed);
        shared.call.store(call_work::<F> as Call as *mut (), Ordering::Relaxed);
        shared.items.store(items, Ordering::Relaxed);
        shared.done.0.store(0, Ordering::Relaxed);
        let job = (shared.ticket.0.load(Ordering::Relaxed) >> 32) + 1;
        let items_left = u64::from(u32::try_from(items).expect("a job has under 2^32 items; this is a bug"));
        shared.ticket.0.store(job << 32 | items_left, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.lock());
            shared.wake.notify_all();
        }
        shared.work_on_job(0);
        shared.wait_until_done(items);
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `work(part, elements)` for each part of `data` of `part_len` elements; the last part may be
    /// shorter.
    pub fn for_chunks<T: Send>(
        &mut self,
        data: &mut [T],
        part_len: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let len = data.len();
        let parts = SharedSlice::new(data);
        self.run(len.div_ceil(part_len), |_, part| {
            // SAFETY: each part belongs to one item.
            work(part, unsafe { parts.slice_mut(part * part_len..len.min((part + 1) * part_len)) });
        });
    }

    /// Calls `work(row, elements)` for each row of `data` (rows, width), on several threads if there are
    /// enough elements.
    pub fn for_rows(&mut self, data: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        let rows_each = (MIN_ITEM_ELEMENTS / width).max(1);
        self.for_chunks(data, rows_each * width, |part, rows| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                work(part * rows_each + i, row);
            }
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of items and cannot panic itself.
            let _ = worker.join();
        }
    }
}

impl SharedState {
    fn new() -> SharedState {
        SharedState {
            ticket: CacheLine(AtomicU64::new(0)),
            done: CacheLine(AtomicUsize::new(0)),
            items: AtomicUsize::new(0),
            work: AtomicPtr::default(),
            call: AtomicPtr::default(),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep_lock: Mutex::new(()),
            wake: Condvar::new(),
            finished: Condvar::new(),
            panic: Mutex::new(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work_until_stopped(&self, worker: usize) {
        while !self.stop.load(Ordering::SeqCst) {
            self.work_on_job(worker);
            if !spin_until(|| self.has_work_or_stop()) {
                self.sleep();
            }
        }
    }

    fn has_work_or_stop(&self) -> bool {
        self.ticket.0.load(Ordering::SeqCst) as u32 > 0 || self.stop.load(Ordering::SeqCst)
    }

    /// Blocks until there is work or the pool stops. The count of sleepers is raised before the last check of
    /// the ticket, and the calling thread reads it after publishing a ticket, so one of the two sees the
    /// other.
    fn sleep(&self) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut door = self.lock();
        while !self.has_work_or_stop() {
            door = self.wake.wait(door).unwrap_or_else(PoisonError::into_inner);
        }
        drop(door);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Claims and runs items until none are left.
    fn work_on_job(&self, worker: usize) {
        let mut ticket = self.ticket.0.load(Ordering::Acquire);
        while ticket as u32 > 0 {
            let (work, call) = (self.work.load(Ordering::Relaxed), self.call.load(Ordering::Relaxed));
            let items = self.items.load(Ordering::Relaxed);
            let taken =
                self.ticket.0.compare_exchange_weak(ticket, ticket - 1, Ordering::AcqRel, Ordering::Acquire);
            ticket = match taken {
                Err(now) => now,
                Ok(_) => {
                    let item = ticket as u32 as usize - 1;
                    // SAFETY: the ticket was unchanged, so its job was unfinished when the fields were read,
                    // and it stays unfinished until this item is counted: the closure is alive and has the
                    // type that `call` was instantiated for.
                    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe {
                        std::mem::transmute::<*mut (), Call>(call)(work, worker, item)
                    }));
                    self.finish_item(items, outcome);
                    self.ticket.0.load(Ordering::Acquire)
                }
            };
        }
    }

    fn finish_item(&self, items: usize, outcome: std::thread::Result<()>) {
        if let Err(panic) = outcome {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        if self.done.0.fetch_add(1, Ordering::AcqRel) + 1 == items {
            drop(self.lock());
            self.finished.notify_one();
        }
    }

    fn wait_until_done(&self, items: usize) {
        let is_done = || self.done.0.load(Ordering::Acquire) == items;
        if spin_until(is_done) {
            return;
        }
        let mut door = self.lock();
        while !is_done() {
            door = self.finished.wait(door).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Checks `condition` repeatedly for a bounded time; returns whether it became true.
fn spin_until(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..SPINS_PER_CLOCK_CHECK {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN_TIME {
            return false;
        }
    }
}

/// Calls the closure behind `work`.
///
/// # Safety
/// - `work` points to a live `F`.
unsafe fn call_work<F: Fn(usize, usize) + Sync>(work: *const (), worker: usize, item: usize) {
    // SAFETY: the caller's promise.
    unsafe { (*work.cast::<F>())(worker, item) }
}

/// The threads that do the items of a job: all of a pool, or the one that asks, by its number.
pub enum Workers<'a> {
    All(&'a mut ThreadPool),
    One(usize),
}

impl Workers<'_> {
    /// Calls `work(worker, item)` for each item below `items`, as [`ThreadPool::run`] does.
    pub fn run(self, items: usize, work: impl Fn(usize, usize) + Sync) {
        match self {
            Workers::All(pool) => pool.run(items, work),
            Workers::One(worker) => (0..items).for_each(|item| work(worker, item)),
        }
    }
}

/// A slice of which several threads may write disjoint parts.
pub struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedSlice<'_, T> {}

// SAFETY: `slice_mut` returns slices that are exclusive by its caller's promise; T may be sent to other
// threads.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Borrows the slice for as long as parts of it are used.
    pub fn new(slice: &'a mut [T]) -> SharedSlice<'a, T> {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Returns the slice from element `first` on.
    pub fn skip(self, first: usize) -> SharedSlice<'a, T> {
        assert!(first <= self.len);
        // SAFETY: within the slice (asserted).
        SharedSlice { start: unsafe { self.start.add(first) }, len: self.len - first, slice: PhantomData }
    }

    /// Returns a part of the slice for writing.
    ///
    /// # Safety
    /// - While the returned slice is alive, no other part that overlaps it is used.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's promise
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice (asserted), and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_in_every_of_many_jobs() {
        for threads in 1..4 {
            let mut pool = ThreadPool::new(0, threads).unwrap();
            for items in (0..200).chain([1000]) {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, |worker, item| {
                    assert!(worker < threads);
                    counts[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{items} items");
            }
        }
    }

    #[test]
    fn a_worker_is_never_in_two_items_at_once() {
        let mut pool = ThreadPool::new(0, 3).unwrap();
        let busy: Vec<AtomicBool> = (0..3).map(|_| AtomicBool::new(false)).collect();
        pool.run(500, |worker, _| {
            assert!(!busy[worker].swap(true, Ordering::SeqCst));
            busy[worker].store(false, Ordering::SeqCst);
        });
    }

    #[test]
    fn a_panic_reaches_the_driver_and_the_pool_lives_on() {
        let mut pool = ThreadPool::new(0, 3).unwrap();
        for bad in [0, 7, 63] {
            let ran = AtomicUsize::new(0);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, |_, item| {
                    ran.fetch_add(1, Ordering::Relaxed);
                    assert!(item != bad, "item {bad} fails");
                })
            }));
            let message = *outcome.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("item {bad} fails"));
            assert_eq!(ran.load(Ordering::Relaxed), 64);
        }
        let sum = AtomicUsize::new(0);
        pool.run(10, |_, item| {
            sum.fetch_add(item, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    #[test]
    fn rows_are_visited_once_each_with_their_number() {
        let mut pool = ThreadPool::new(0, 2).unwrap();
        for width in [1, 100, 20_000] {
            let mut data = vec![0f32; 37 * width];
            pool.for_rows(&mut data, width, |row, x| x.iter_mut().for_each(|x| *x += row as f32));
            assert!(data.chunks(width).enumerate().all(|(row, x)| x.iter().all(|x| *x == row as f32)));
        }
    }
}
