//! Layers whose matrices are read ahead of use from a [`PackedStore`], or copied from the memory of the host,
//! by threads of their own.
//!
//! The matrices that do not stay in memory are read in the order of use, again and again, each into a free
//! buffer of its size. There are buffers for several layers, so the next ones are read while one computes.
//! Invariant: a buffer is in one place at a time: free, with a reading thread, ready, or in a layer between
//! `acquire` and `release`. Nobody waits for two things at once, and matrices get buffers in the order in
//! which they are used, so no layer waits for a buffer that a later one has.

use super::super::weights::{LayerWeights, WeightSource};
use super::abort::StepAbort;
use super::direct::{DirectFile, to_blocks};
use super::held::HostCopy;
use super::link::{Direction, TransferPath};
use super::store::PackedStore;
use super::tier::Tier;
use super::trace::{Activity, Trace};
use super::transfers::Stream;
use anyhow::{Context, Result};
use mainstem_kernels::{Abort, Backend, DeviceError, Waiters};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, Builder, JoinHandle};
use std::time::Instant;

/// Number of threads that read, each another matrix: disks reach their full rate with several reads at once.
pub(super) const READERS: usize = 4;

/// Returns the bytes of a host buffer, by which a backend gives access to it.
pub type HostBytes<Buf> = fn(&mut Buf) -> Option<&mut [u8]>;

/// The layers of a stack, of which some matrices are read for each step.
pub struct StreamedLayers<Buf> {
    layers: Vec<LayerWeights<Buf>>,
    /// For each layer its matrices that are read: their places among the layer's, and their units.
    streamed: Vec<Vec<(usize, usize)>>,
    /// Stand-ins of the matrices that have been put into the acquired layer: fewer than it has only after an
    /// error.
    stand_ins: Vec<Buf>,
    /// The acquired layer.
    acquired: Option<usize>,
    /// The layer whose matrices are read next, or have been, if no step fails; `usize::MAX` after a failure.
    expected: usize,
    /// Whether the step has openings.
    has_openings: bool,
    ring: Arc<Ring<Buf>>,
    readers: Vec<JoinHandle<()>>,
}

/// The place of a matrix that does not stay on the device.
#[derive(Debug)]
pub enum Place {
    /// A copy in the memory of the host: its packed bytes.
    Host(HostCopy),
    /// The store.
    Disk,
}

/// A matrix that is read for each step.
#[derive(Debug)]
struct Unit {
    place: Place,
    /// Its index in the store.
    stored: usize,
    /// Its size class.
    class: usize,
    /// Whether it is read only for steps with openings.
    is_for_openings: bool,
}

/// State that device and readers share.
struct Ring<Buf> {
    store: PackedStore,
    units: Vec<Unit>,
    /// Number of all buffers.
    buffers: usize,
    /// Number of the first unit's name in the trace.
    names: usize,
    file: DirectFile,
    bytes: HostBytes<Buf>,
    path: TransferPath,
    state: Mutex<RingState<Buf>>,
    /// Signals the device that a matrix is ready.
    ready: Condvar,
    /// Signals the readers that a buffer is free.
    freed: Condvar,
    is_stopped: AtomicBool,
    /// Ends the waits of the device.
    abort: StepAbort,
}

struct RingState<Buf> {
    /// The unit that is read next, or one before it that is not read.
    next: usize,
    /// Whether what only openings use is read.
    has_openings: bool,
    /// Number of times that reading began anew at another unit. What was read before is not used.
    restarts: usize,
    /// Number of readers that have started.
    running: usize,
    /// Free buffers by size class.
    free: Vec<Vec<Buf>>,
    /// Results of reading, by unit.
    ready: Vec<Option<(Buf, Result<(), String>)>>,
    /// Whether the checksum of a unit has been verified.
    is_verified: Vec<bool>,
}

impl<Buf: Send + Sync + 'static> StreamedLayers<Buf> {
    /// Creates the source of `layers`, whose matrices in `streamed` are stand-ins. `streamed` has for each
    /// layer the places of such matrices among the layer's, and their indices in the store. `places` are
    /// where they are read from, in the same order, with flags of those that only openings use. `buffers` are
    /// those of [`super::buffers::buffer_sizes`], by size.
    pub fn start(
        layers: Vec<LayerWeights<Buf>>,
        streamed: Vec<Vec<(usize, usize)>>,
        mut buffers: Vec<(usize, Vec<Buf>)>,
        (store, places): (PackedStore, Vec<(Place, bool)>),
        (bytes, path): (HostBytes<Buf>, TransferPath),
    ) -> Result<StreamedLayers<Buf>> {
        let data = store.data_file();
        let probe = buffers.iter_mut().flat_map(|(_, buffers)| buffers).next().and_then(|buf| bytes(buf));
        let probe = probe.context("the device cannot read weights from a disk")?;
        let file =
            DirectFile::open(&data, probe).with_context(|| format!("cannot read {}", data.display()))?;
        let class_of = |stored: usize| {
            let size = to_blocks(store.matrices[stored].bytes);
            let class = buffers.iter().position(|(buffers, _)| *buffers == size);
            class.expect("there are buffers of all sizes; anything else is a bug")
        };
        let unit = |((_, stored), (place, is_for_openings)): (&(usize, usize), _)| {
            let (stored, class) = (*stored, class_of(*stored));
            Unit { place, stored, class, is_for_openings }
        };
        let units: Vec<Unit> = streamed.iter().flatten().zip(places).map(unit).collect();
        let mut number = 0..;
        let mut numbered =
            |layer: Vec<(usize, usize)>| layer.into_iter().map(|(place, _)| place).zip(&mut number).collect();
        let streamed: Vec<Vec<(usize, usize)>> = streamed.into_iter().map(&mut numbered).collect();
        let most = streamed.iter().map(Vec::len).max().unwrap_or(0);
        let name = |unit: &Unit| store.matrices[unit.stored].name.clone();
        let names = path.transfers.trace().map_or(0, |trace| trace.add_names(units.iter().map(name)));
        let state = RingState {
            next: 0,
            has_openings: false,
            restarts: 0,
            running: 0,
            free: buffers.into_iter().map(|(_, buffers)| buffers).collect(),
            ready: units.iter().map(|_| None).collect(),
            is_verified: vec![false; units.len()],
        };
        let ring = Arc::new(Ring {
            store,
            units,
            buffers: state.free.iter().map(Vec::len).sum(),
            names,
            file,
            bytes,
            path,
            state: Mutex::new(state),
            ready: Condvar::new(),
            freed: Condvar::new(),
            is_stopped: AtomicBool::new(false),
            abort: StepAbort::default(),
        });
        let mut source = StreamedLayers {
            layers,
            streamed,
            stand_ins: Vec::with_capacity(most),
            acquired: None,
            expected: 0,
            has_openings: false,
            ring: ring.clone(),
            readers: Vec::new(),
        };
        for number in 0..READERS {
            let ring = ring.clone();
            let reader = Builder::new().name(format!("weights-{number}")).spawn(move || ring.run_reader());
            source.readers.push(reader.context("cannot start a thread that reads weights")?);
        }
        ring.wait_for_readers();
        Ok(source)
    }

    /// Frees the buffers in the acquired layer.
    fn put_back(&mut self, layer: usize) {
        self.acquired = None;
        let StreamedLayers { layers, streamed, stand_ins, ring, has_openings, .. } = self;
        let units = streamed[layer].iter().filter(|(_, unit)| ring.is_wanted(*unit, *has_openings));
        let mut units = units.take(stand_ins.len()).peekable();
        let mut place = 0;
        layers[layer].for_each_matrix(&mut |matrix| {
            if let Some((_, unit)) = units.next_if(|(at, _)| *at == place)
                && let Some(mut buf) = stand_ins.pop()
            {
                std::mem::swap(&mut matrix.buf, &mut buf);
                ring.free(*unit, buf);
            }
            place += 1;
        });
    }
}

/// A unit to read, with the buffer for it.
struct Taken<Buf> {
    unit: usize,
    buf: Buf,
    is_verified: bool,
    restarts: usize,
}

impl<Buf> Ring<Buf> {
    fn lock(&self) -> MutexGuard<'_, RingState<Buf>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Reads units in their order, until the ring is stopped.
    fn run_reader(&self) {
        // If this thread panics, nobody waits for it.
        let _stop = StopAtEnd(self);
        let name = || thread::current().name().unwrap_or_default().to_owned();
        let row = |trace: &Trace| trace.add_row(Activity::LoadWeights, name());
        let trace = self.path.transfers.trace().map(|trace| (trace, row(trace)));
        self.lock().running += 1;
        self.ready.notify_one();
        while let Some(Taken { unit, mut buf, is_verified, restarts }) = self.take_next() {
            let began = Instant::now();
            let outcome = self.read(unit, &mut buf, !is_verified);
            if let Some((trace, row)) = trace {
                trace.record(row, self.names + unit, began);
            }
            let mut state = self.lock();
            state.is_verified[unit] |= outcome.is_ok();
            if state.restarts == restarts {
                state.ready[unit] = Some((buf, outcome));
                self.ready.notify_one();
            } else {
                state.free[self.units[unit].class].push(buf);
                self.freed.notify_one();
            }
        }
    }

    /// Waits until all readers run: starting a thread allocates, and steps must not.
    fn wait_for_readers(&self) {
        let mut state = self.lock();
        while state.running < READERS && !self.is_stopped() {
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for a buffer for the next unit, and takes it. `None` once the ring is stopped.
    fn take_next(&self) -> Option<Taken<Buf>> {
        let mut state = self.lock();
        loop {
            if self.is_stopped() {
                return None;
            }
            let is_wanted = |unit: &usize| self.is_wanted(*unit, state.has_openings);
            let wanted = (state.next..self.units.len()).chain(0..state.next).find(is_wanted);
            // The unit of the step before may not have been used yet.
            if let Some(unit) = wanted
                && state.ready[unit].is_none()
                && let Some(buf) = state.free[self.units[unit].class].pop()
            {
                state.next = (unit + 1) % self.units.len();
                // Another reader may have a buffer for the one after.
                self.freed.notify_one();
                let (is_verified, restarts) = (state.is_verified[unit], state.restarts);
                return Some(Taken { unit, buf, is_verified, restarts });
            }
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns whether steps with or without openings use a unit.
    fn is_wanted(&self, unit: usize, has_openings: bool) -> bool {
        has_openings || !self.units[unit].is_for_openings
    }

    /// Begins or ends reading what only openings use. What was skipped so far is read again in its order.
    fn read_for_openings(&self, has_openings: bool) {
        self.lock().has_openings = has_openings;
        self.restart(0);
    }

    fn read(&self, unit: usize, buf: &mut Buf, verify: bool) -> Result<(), String> {
        let Unit { place, stored, .. } = &self.units[unit];
        let (stored, began) = (*stored, Instant::now());
        let matrix = &self.store.matrices[stored];
        let bytes = (self.bytes)(buf).ok_or("the buffer for weights is not on the host; this is a bug")?;
        let moved = |tier: Tier, bytes: usize| {
            self.path.transfers.add_bytes(Stream::LoadWeights, tier, bytes);
            self.path.wait(Direction::ToDevice, bytes, began, &|| self.is_stopped());
        };
        if let Place::Host(copy) = place {
            let copy = copy.read();
            bytes[..copy.len()].copy_from_slice(&copy);
            let copied = copy.len();
            drop(copy);
            moved(Tier::Host, copied);
            return Ok(());
        }
        let blocks = &mut bytes[..to_blocks(matrix.bytes)];
        let mut read = || self.file.read(matrix.offset, blocks, &|| self.is_stopped());
        // Once more, because writing the store anew takes long.
        match read().or_else(|_| read()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err("stopped".into()),
            outcome => outcome.map_err(|error| self.store.read_failure(stored, &error))?,
        }
        moved(Tier::Disk, blocks.len());
        // Once, because it takes as long as reading from a fast disk.
        if verify { self.store.verify(stored, &blocks[..matrix.bytes]) } else { Ok(()) }
    }

    /// Waits for a unit that is read, and sets `is_late` if it is not ready. Fails if the readers have ended,
    /// or the step is aborted.
    fn wait_for(&self, unit: usize, is_late: &mut bool) -> Result<(Buf, Result<(), String>), DeviceError> {
        let mut state = self.lock();
        loop {
            if let Some(ready) = state.ready[unit].take() {
                return Ok(ready);
            }
            if self.is_stopped() {
                return Err(DeviceError::Fault("the threads that read weights have ended".into()));
            }
            self.abort.check()?;
            *is_late = true;
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Counts the buffers that are ready when the device needs a layer.
    fn count_ready(&self) {
        let ready = self.lock().ready.iter().flatten().count();
        self.path.transfers.add_occupancy(ready, self.buffers);
    }

    /// Frees the buffers that no thread has, and all copies.
    fn clear(&self) {
        for unit in &self.units {
            if let Place::Host(copy) = &unit.place {
                copy.free();
            }
        }
        let mut state = self.lock();
        state.free.iter_mut().for_each(Vec::clear);
        state.ready.iter_mut().for_each(|ready| *ready = None);
    }

    /// Ends the readers, and the wait of the device.
    fn stop(&self) {
        let state = self.lock();
        self.is_stopped.store(true, Ordering::Release);
        drop(state);
        self.freed.notify_all();
        self.ready.notify_all();
    }

    /// Begins to read at another unit, because a step has ended early.
    fn restart(&self, unit: usize) {
        let mut guard = self.lock();
        let state = &mut *guard;
        for (Unit { class, .. }, ready) in self.units.iter().zip(&mut state.ready) {
            state.free[*class].extend(ready.take().map(|(buf, _)| buf));
        }
        state.next = unit;
        state.restarts += 1;
        self.freed.notify_one();
    }

    /// Takes back the buffer of a unit.
    fn free(&self, unit: usize, buf: Buf) {
        self.lock().free[self.units[unit].class].push(buf);
        self.freed.notify_one();
    }
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
        self.ready.notify_all();
    }
}

impl<Buf: Send + Sync + 'static> WeightSource<Buf> for StreamedLayers<Buf> {
    fn begin_step(&mut self, has_openings: bool) {
        // A step that failed has not released its layer, whose matrices are those of that step.
        if let Some(left) = self.acquired {
            self.put_back(left);
        }
        if has_openings != self.has_openings && self.ring.units.iter().any(|unit| unit.is_for_openings) {
            self.has_openings = has_openings;
            self.ring.read_for_openings(has_openings);
            self.expected = 0;
        }
    }

    fn acquire(&mut self, _: &mut dyn Backend<Buf = Buf>, layer: usize) -> Result<(), DeviceError> {
        // A step that failed has not released its layer.
        if let Some(left) = self.acquired {
            self.put_back(left);
        }
        if layer != self.expected
            && let Some((_, first)) = self.streamed[layer..].iter().chain(&self.streamed).flatten().next()
        {
            self.ring.restart(*first);
        }
        self.acquired = Some(layer);
        self.expected = (layer + 1) % self.layers.len();
        let StreamedLayers { layers, streamed, stand_ins, ring, has_openings, .. } = self;
        let mut units =
            streamed[layer].iter().filter(|(_, unit)| ring.is_wanted(*unit, *has_openings)).peekable();
        let (mut place, mut outcome) = (0, Ok(()));
        let (began, mut is_late) = (Instant::now(), false);
        if !streamed[layer].is_empty() {
            ring.count_ready();
        }
        layers[layer].for_each_matrix(&mut |matrix| {
            if let Some((_, unit)) = units.next_if(|(at, _)| *at == place && outcome.is_ok()) {
                match ring.wait_for(*unit, &mut is_late) {
                    Ok((mut buf, read)) => {
                        std::mem::swap(&mut matrix.buf, &mut buf);
                        stand_ins.push(buf);
                        outcome = read.map_err(DeviceError::Fault);
                    }
                    Err(error) => outcome = Err(error),
                }
            }
            place += 1;
        });
        if !streamed[layer].is_empty() {
            ring.path.transfers.add_layer(Stream::LoadWeights, is_late.then(|| began.elapsed()));
        }
        if outcome.is_err() {
            // What was read ahead may have failed as well.
            self.expected = usize::MAX;
        }
        outcome
    }

    fn layer(&self, layer: usize) -> &LayerWeights<Buf> {
        &self.layers[layer]
    }

    fn release(&mut self, _: &mut dyn Backend<Buf = Buf>, layer: usize) {
        self.put_back(layer);
    }

    fn stop_on_abort(&mut self, abort: &Abort) {
        let ring: Weak<Ring<Buf>> = Arc::downgrade(&self.ring);
        self.ring.abort.set(abort, ring);
        self.layers.iter().for_each(|layer| layer.stop_on_abort(abort));
    }
}

impl<Buf> Drop for StreamedLayers<Buf> {
    fn drop(&mut self) {
        self.ring.stop();
        if self.ring.abort.is_aborted() {
            // The disk may hang. Threads that read end later, and free their buffers then.
            self.ring.clear();
            self.ring.path.held.leave(self.readers.drain(..));
            return;
        }
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}
