//! K and V of layers that do not stay on the device: a file, or memory of the host, holds their caches.
//! Threads of their own read from it the pages that a step attends to, while the layers before compute, and
//! write to it the pages that the step changes, while the layers after compute.
//!
//! Buffers for a few layers, each as large as a layer's cache, go round: a page has the same place in each of
//! them and in the cache, so page tables and kernels need not know. What the other pages of a buffer hold is
//! never read.
//! Invariant: a buffer is in one place at a time: free, with a thread, ready, waiting to be written, or in a
//! layer between `acquire` and `release`. A step begins once all that the step before has changed is written.

use super::cache_places::CacheOffload;
use super::direct::DirectFile;
use super::link::{Direction, TransferPath};
use super::page_plan::{PageMarks, Plan};
use super::stream::HostBytes;
use super::tier::{Tier, host_memory};
use super::transfers::Stream;
use anyhow::{Context, Result};
use mainstem_kernels::{Backend, DeviceError, KvLayer, KvLayout, StepBatch, StepLimits};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// Number of threads that read and write, each a layer's K or V.
const THREADS: usize = 4;

/// The caches of a decoder's layers that are not on the device.
pub struct StreamedCaches<Buf> {
    /// For each layer its number among those that are not on the device.
    places: Vec<Option<usize>>,
    marks: PageMarks,
    /// The stand-ins of the acquired layer.
    stand_ins: Option<[Buf; 2]>,
    /// Whether the step reads or changes pages.
    has_pages: bool,
    ring: Arc<Ring<Buf>>,
    threads: Vec<JoinHandle<()>>,
}

const ENDED: &str = "the threads that read the KV cache have ended";

/// The K or V of a layer.
#[derive(Debug)]
struct Unit {
    /// The class of its buffers.
    class: usize,
    place: UnitPlace,
}

/// The place of the K or V of a layer.
#[derive(Debug)]
enum UnitPlace {
    /// In the file, from this offset on.
    File(u64),
    Host(Mutex<Box<[u8]>>),
}

impl UnitPlace {
    fn tier(&self) -> Tier {
        match self {
            UnitPlace::File(_) => Tier::Disk,
            UnitPlace::Host(_) => Tier::Host,
        }
    }
}

/// State that device and threads share.
struct Ring<Buf> {
    /// The file, if a cache is in it.
    file: Option<DirectFile>,
    path: TransferPath,
    /// K and V of each layer, in order.
    units: Vec<Unit>,
    pages: usize,
    bytes: HostBytes<Buf>,
    state: Mutex<RingState<Buf>>,
    /// Signals the device that something is read or written.
    done: Condvar,
    /// Signals the threads that there may be something to do.
    work: Condvar,
    is_stopped: AtomicBool,
}

struct RingState<Buf> {
    plan: Arc<Plan>,
    /// The unit that is read next.
    next_read: usize,
    /// Number of threads that have started, and of those that read or write.
    running: usize,
    busy: usize,
    /// Free buffers by class.
    free: Vec<Vec<Buf>>,
    /// Buffers that are read, by unit.
    ready: Vec<Option<Buf>>,
    writes: VecDeque<(usize, Buf)>,
    /// The reason for which reading or writing has failed.
    failed: Option<String>,
}

impl<Buf: Send + Sync + 'static> StreamedCaches<Buf> {
    /// Creates the caches `layers`, each with its tier. `buffers` are caches with the layouts and numbers of
    /// [`super::buffer_layouts`]. Fails if the file or the memory cannot have as many bytes.
    pub fn start(
        layers: &[(KvLayout, Tier)],
        buffers: Vec<(KvLayout, Vec<KvLayer<Buf>>)>,
        limits: &StepLimits,
        (offload, path, bytes): (&CacheOffload, &TransferPath, HostBytes<Buf>),
    ) -> Result<StreamedCaches<Buf>> {
        let mut count = 0..;
        let places = layers.iter().map(|(_, tier)| if *tier == Tier::Device { None } else { count.next() });
        let places: Vec<_> = places.collect();
        let mut classes = Vec::new();
        let layouts: Vec<KvLayout> = buffers.iter().map(|(layout, _)| *layout).collect();
        for (_, caches) in buffers {
            let (k, v) = caches.into_iter().map(|cache| (cache.k, cache.v)).unzip();
            classes.extend::<[Vec<Buf>; 2]>([k, v]);
        }
        let mut sizes = Vec::new();
        for class in &mut classes {
            let buffer = class.first_mut().and_then(|buf| bytes(buf));
            sizes.push(buffer.context("the device cannot read a KV cache from a disk")?.len());
        }
        let (mut units, mut end) = (Vec::new(), 0);
        for (layout, tier) in layers.iter().filter(|(_, tier)| *tier != Tier::Device) {
            let known = layouts.iter().position(|known| known == layout);
            let class = 2 * known.expect("there are buffers of all layouts; anything else is a bug");
            for class in [class, class + 1] {
                let place = match tier {
                    Tier::Host => UnitPlace::Host(Mutex::new(host_memory(sizes[class])?)),
                    Tier::Device | Tier::Disk => UnitPlace::File(end),
                };
                if place.tier() == Tier::Disk {
                    end += sizes[class] as u64;
                }
                units.push(Unit { class, place });
            }
        }
        let pages = layouts.first().map_or(1, |layout| layout.pages);
        let probe = classes.first_mut().and_then(|class| bytes(class.first_mut()?));
        let probe = probe.context("there are buffers; anything else is a bug")?;
        let is_aligned = sizes.iter().all(|size| (size / pages).is_multiple_of(DirectFile::SECTOR));
        let create = || DirectFile::unnamed(&offload.folder, end, is_aligned.then_some(probe));
        let file = (end > 0).then(create).transpose().with_context(|| {
            let folder = offload.folder.display();
            format!("tiers.disk_path: cannot reserve {end} bytes for the KV cache in {folder}")
        })?;
        let ring = Ring::new(file, units, (pages, classes), limits, (bytes, path.clone()));
        StreamedCaches::with_ring(places, limits, ring)
    }

    /// Creates the caches of layers with these places in `ring`, and starts the threads.
    fn with_ring(
        places: Vec<Option<usize>>,
        limits: &StepLimits,
        ring: Ring<Buf>,
    ) -> Result<StreamedCaches<Buf>> {
        let ring = Arc::new(ring);
        let mut caches = StreamedCaches {
            places,
            marks: PageMarks::new(ring.pages, limits.page_positions),
            stand_ins: None,
            has_pages: false,
            ring: ring.clone(),
            threads: Vec::new(),
        };
        for number in 0..THREADS {
            let ring = ring.clone();
            let thread = Builder::new().name(format!("kv-{number}")).spawn(move || ring.run_thread());
            caches.threads.push(thread.context("cannot start a thread that reads the KV cache")?);
        }
        ring.wait_for_threads();
        Ok(caches)
    }

    /// Begins a step: waits until the changes of the step before are written, and begins to read what this
    /// one attends to. `device` has the page tables of the step. Fails if something could not be written.
    pub fn begin(&mut self, device: &dyn Backend<Buf = Buf>, batch: &StepBatch) -> Result<(), DeviceError> {
        self.marks.mark(device, batch);
        let ring = self.ring.clone();
        let mut guard = ring.lock();
        guard.next_read = ring.units.len();
        let began = Instant::now();
        while (guard.busy > 0 || !guard.writes.is_empty()) && !ring.is_stopped() {
            guard = ring.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        if ring.is_stopped() {
            return Err(DeviceError::Fault(ENDED.into()));
        }
        ring.path.transfers.add_stall(Stream::StoreCache, began.elapsed());
        let state = &mut *guard;
        // A step that failed has not used everything.
        for (Unit { class, .. }, ready) in ring.units.iter().zip(&mut state.ready) {
            state.free[*class].extend(ready.take());
        }
        let plan = Arc::get_mut(&mut state.plan).expect("no thread reads or writes; this is a bug");
        self.marks.take_plan(batch, plan);
        if let Some(reason) = state.failed.take() {
            return Err(DeviceError::Fault(reason));
        }
        self.has_pages = !plan.is_empty();
        if self.has_pages {
            state.next_read = 0;
            drop(guard);
            ring.work.notify_all();
        }
        Ok(())
    }
}

impl<Buf> StreamedCaches<Buf> {
    /// Returns whether the cache of a layer is not on the device.
    pub fn contains(&self, layer: usize) -> bool {
        self.places[layer].is_some()
    }

    /// Returns whether the cache of a layer is not on the device, and the step reads or changes pages.
    pub fn has_work(&self, layer: usize) -> bool {
        self.contains(layer) && self.has_pages
    }

    /// Waits until the pages that the step attends to are in the cache of a layer, which is `cache` until it
    /// is released. Does nothing for a layer whose cache stays on the device. Fails if they cannot be read,
    /// or if something could not be written.
    pub fn acquire(&mut self, layer: usize, cache: &mut KvLayer<Buf>) -> Result<(), DeviceError> {
        let Some(place) = self.places[layer] else { return Ok(()) };
        let ring = &self.ring;
        let (began, mut is_late) = (Instant::now(), false);
        let mut state = ring.lock();
        loop {
            if let Some(reason) = state.failed.take() {
                return Err(DeviceError::Fault(reason));
            }
            if ring.is_stopped() {
                return Err(DeviceError::Fault(ENDED.into()));
            }
            if let [Some(_), Some(_)] = &state.ready[2 * place..2 * place + 2] {
                break;
            }
            is_late = true;
            state = ring.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let (Some(k), Some(v)) = (state.ready[2 * place].take(), state.ready[2 * place + 1].take()) {
            self.stand_ins = Some([std::mem::replace(&mut cache.k, k), std::mem::replace(&mut cache.v, v)]);
        }
        ring.path.transfers.add_layer(Stream::LoadCache, is_late.then(|| began.elapsed()));
        Ok(())
    }

    /// Ends the use of the acquired cache of a layer, and begins to write what the step has changed in it,
    /// unless the step has failed.
    pub fn release(&mut self, layer: usize, cache: &mut KvLayer<Buf>, has_failed: bool) {
        let (Some(place), Some([k, v])) = (self.places[layer], self.stand_ins.take()) else { return };
        let bufs = [std::mem::replace(&mut cache.k, k), std::mem::replace(&mut cache.v, v)];
        let mut state = self.ring.lock();
        for (unit, buf) in (2 * place..).zip(bufs) {
            if has_failed || state.plan.writes.is_empty() {
                state.free[self.ring.units[unit].class].push(buf);
            } else {
                state.writes.push_back((unit, buf));
            }
        }
        drop(state);
        self.ring.work.notify_all();
    }
}

/// The work of a thread on a buffer.
enum Task {
    Read,
    Write,
}

impl<Buf> Ring<Buf> {
    fn new(
        file: Option<DirectFile>,
        units: Vec<Unit>,
        (pages, free): (usize, Vec<Vec<Buf>>),
        limits: &StepLimits,
        (bytes, path): (HostBytes<Buf>, TransferPath),
    ) -> Ring<Buf> {
        let state = RingState {
            plan: Arc::new(Plan::with_capacity(limits, pages)),
            next_read: units.len(),
            running: 0,
            busy: 0,
            free,
            ready: units.iter().map(|_| None).collect(),
            writes: VecDeque::with_capacity(units.len()),
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
        }
    }

    fn lock(&self) -> MutexGuard<'_, RingState<Buf>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Reads and writes, until the ring is stopped.
    fn run_thread(&self) {
        // If this thread panics, nobody waits for it.
        let _stop = StopAtEnd(self);
        self.lock().running += 1;
        self.done.notify_all();
        while let Some((task, unit, mut buf, plan)) = self.take_task() {
            let outcome = self.transfer(&task, unit, &mut buf, &plan);
            // Before the device may change it.
            drop(plan);
            let mut state = self.lock();
            state.busy -= 1;
            if let Err(reason) = outcome {
                state.failed.get_or_insert(reason);
            }
            match task {
                Task::Read => state.ready[unit] = Some(buf),
                Task::Write => state.free[self.units[unit].class].push(buf),
            }
            drop(state);
            self.done.notify_all();
            self.work.notify_all();
        }
    }

    /// Waits until all threads run: starting a thread allocates, and steps must not.
    fn wait_for_threads(&self) {
        let mut state = self.lock();
        while state.running < THREADS && !self.is_stopped() {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for something to do: first to write, which frees buffers. `None` once the ring is stopped.
    fn take_task(&self) -> Option<(Task, usize, Buf, Arc<Plan>)> {
        let mut guard = self.lock();
        while !self.is_stopped() {
            let state = &mut *guard;
            let mut task = state.writes.pop_front().map(|(unit, buf)| (Task::Write, unit, buf));
            if task.is_none()
                && let Some(Unit { class, .. }) = self.units.get(state.next_read)
                && let Some(buf) = state.free[*class].pop()
            {
                task = Some((Task::Read, state.next_read, buf));
                state.next_read += 1;
            }
            if let Some((task, unit, buf)) = task {
                state.busy += 1;
                return Some((task, unit, buf, state.plan.clone()));
            }
            guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Reads the pages of a unit, or writes them.
    fn transfer(&self, task: &Task, unit: usize, buf: &mut Buf, plan: &Plan) -> Result<(), String> {
        let bytes = (self.bytes)(buf).ok_or("the KV cache is not on the host")?;
        let (page, place, began) = (bytes.len() / self.pages, &self.units[unit].place, Instant::now());
        let mut moved = 0;
        let outcome = match task {
            Task::Read => {
                let runs = plan.reads.iter().map(|run| (run.start, run.start..run.end));
                let copies = plan.copies.iter().map(|(from, to)| (*from, *to..to + 1));
                runs.chain(copies).try_for_each(|(from, to)| {
                    moved += to.len() * page;
                    self.read(place, from * page, &mut bytes[to.start * page..to.end * page])
                })
            }
            Task::Write => plan.writes.iter().try_for_each(|run| {
                moved += run.len() * page;
                self.write(place, run.start * page, &bytes[run.start * page..run.end * page])
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
                let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                bytes.copy_from_slice(&memory[at..at + bytes.len()]);
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
                let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                memory[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            UnitPlace::File(offset) => {
                let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
                file.write(offset + at as u64, bytes, &|| self.is_stopped())
            }
        }
    }

    /// Ends the threads, and the wait of the device.
    fn stop(&self) {
        let state = self.lock();
        self.is_stopped.store(true, Ordering::Release);
        drop(state);
        self.work.notify_all();
        self.done.notify_all();
    }
}

/// Stops a ring when it is dropped.
struct StopAtEnd<'a, Buf>(&'a Ring<Buf>);

impl<Buf> Drop for StopAtEnd<'_, Buf> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl<Buf> Drop for StreamedCaches<Buf> {
    fn drop(&mut self) {
        self.ring.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
    use mainstem_kernels::{
        ActivationPrecision, Fraction, KvTable, QuantType, Span, SpanModel, SpanOutput, SpanStack, SpanTable,
        SpanTokens, TableUpdate,
    };
    use std::fs::File;

    const LIMITS: StepLimits = StepLimits {
        slots: 2,
        rows: 64,
        batch_rows: usize::MAX,
        logit_rows: 1,
        positions: 128,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 0,
        vocab: 1,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        attended_fraction: Fraction::ONE,
    };

    /// Returns a step with one span, of the positions from `start` to `end`.
    fn step(start: u32, end: u32) -> StepBatch {
        let len = end - start;
        let page =
            |index| TableUpdate { slot: 1, table: KvTable::Own, index, page: [5, 6, 7, 2][index as usize] };
        StepBatch {
            table_updates: (0..4).map(page).collect(),
            spans: vec![Span {
                model: SpanModel::Target,
                stack: SpanStack::Decoder,
                slot: 1,
                start,
                tokens: SpanTokens::Given { at: 0, len },
                table: SpanTable::Own,
                reserved: 128,
                encoder_len: 0,
                output: SpanOutput::None,
            }],
            tokens: vec![0; len as usize],
            ..StepBatch::default()
        }
    }

    /// A cache of one layer in `file`, with the device that has its page tables.
    fn cache_in(file: File) -> (CpuBackend, StreamedCaches<mainstem_kernels::HostBuf>) {
        let config =
            CpuConfig { threads: 1, isa: Isa::Auto, activation_precision: ActivationPrecision::Int8 };
        let mut device = CpuBackend::new(config).unwrap();
        device.prepare(&LIMITS).unwrap();
        let free = (0..2).map(|_| vec![device.alloc(8 * 64).unwrap()]).collect();
        let units =
            (0..2).map(|half| Unit { class: half, place: UnitPlace::File(512 * half as u64) }).collect();
        let ring = Ring::new(
            Some(DirectFile::of(file)),
            units,
            (8, free),
            &LIMITS,
            (CpuBackend::host_bytes, TransferPath::default()),
        );
        (device, StreamedCaches::with_ring(vec![Some(0)], &LIMITS, ring).unwrap())
    }

    fn layer(device: &mut CpuBackend) -> KvLayer<mainstem_kernels::HostBuf> {
        let (ty, pages, page_positions) = (QuantType::F16, 8, 32);
        let layout = KvLayout { ty, pages, page_positions, kv_heads: 1, k_dim: 1, v_dim: 1 };
        KvLayer { k: device.alloc(0).unwrap(), v: device.alloc(0).unwrap(), layout }
    }

    /// Pages with earlier positions are read, those with new ones are written, and neighbours together.
    #[test]
    fn a_step_reads_and_writes_the_pages_of_its_positions() {
        let (mut device, mut caches) = cache_in(tempfile());
        for (start, end, reads, writes) in [
            (0, 32, vec![], vec![(5, 6)]),
            (32, 33, vec![(5, 6)], vec![(6, 7)]),
            (33, 65, vec![(5, 7)], vec![(6, 8)]),
            (65, 97, vec![(5, 8)], vec![(2, 3), (7, 8)]),
            (97, 98, vec![(2, 3), (5, 8)], vec![(2, 3)]),
        ] {
            let batch = step(start, end);
            device.begin_step(&batch);
            caches.begin(&device, &batch).unwrap();
            let plan = caches.ring.lock().plan.clone();
            let [read, written] = [&plan.reads, &plan.writes]
                .map(|runs| runs.iter().map(|run| (run.start, run.end)).collect::<Vec<_>>());
            assert_eq!((read, written), (reads, writes), "{start}..{end}");
            device.end_step();
            drop(plan);
        }
    }

    /// Returns a file without a name that has some bytes.
    fn tempfile() -> File {
        let folder = crate::testing::Scratch::new();
        let path = folder.path().join("cache");
        std::fs::write(&path, [0; 1024]).unwrap();
        File::options().read(true).write(true).open(&path).unwrap()
    }

    /// The step that comes next fails: nothing that was lost is read.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_cannot_be_written_fails_a_step() {
        let (mut device, mut caches) = cache_in(File::options().write(true).open("/dev/full").unwrap());
        let mut layer = layer(&mut device);
        let batch = step(0, 20);
        device.begin_step(&batch);
        caches.begin(&device, &batch).unwrap();
        caches.acquire(0, &mut layer).unwrap();
        assert_eq!(layer.k.len(), 512);
        caches.release(0, &mut layer, false);
        device.end_step();
        let batch = step(20, 21);
        device.begin_step(&batch);
        let failed = caches.begin(&device, &batch).unwrap_err().to_string();
        let expected = "device fault: cannot write the KV cache to its file: No space left on device";
        assert!(failed.starts_with(expected), "{failed}");
    }
}
