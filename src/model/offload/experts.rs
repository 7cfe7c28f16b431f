//! Experts of mixtures that are read when rows choose them, into a pool for the experts of all layers.
//!
//! Invariant: a buffer is in one place at a time: in its slot, with a reading thread, or with the device
//! while it computes that expert. A slot whose matrices are being read is not given to another expert, and
//! only the device gives slots away, so an expert that it waits for is not pushed out.

use super::abort::StepAbort;
use super::direct::{DirectFile, to_blocks};
use super::expert_slots::ExpertSlots;
use super::link::{Direction, TransferPath};
use super::residency::Residency;
use super::store::PackedStore;
use super::stream::{HostBytes, READERS};
use super::tier::Tier;
use super::trace::{Activity, Trace};
use super::transfers::Stream;
use anyhow::{Context, Result};
use mainstem_kernels::{Abort, DeviceError, Expert, ExpertSource, Waiters, Weight};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Bytes of a pool that has no memory given to it. It holds the experts of a layer, if that takes no more, so
/// that these are read once for all row batches.
const LEAST_BYTES: usize = 128 << 20;

/// Number of experts that are read while another one computes. These keep the disk busy; more would push out
/// experts that are used again soon.
const READ_AHEAD: usize = 2;

/// Least number of experts in a pool: one that computes, and those that are read.
const LEAST_SLOTS: usize = 1 + READ_AHEAD;

/// The matrices of the experts of each layer of a stack, by expert, as indices in the store.
pub(super) type ExpertMatrices = Vec<Vec<Range<usize>>>;

/// The size of a pool.
pub(super) struct PoolSize {
    pub slots: usize,
    /// Bytes of the buffers of a slot.
    pub buffers: Vec<usize>,
}

impl PoolSize {
    /// Returns the size of the pool for the experts of a stack, given the bytes of all matrices in the store:
    /// the part of the experts that may stay in memory. All slots are alike, so each has room for the largest
    /// matrices.
    pub fn new(experts: &ExpertMatrices, bytes: &[usize], resident: Residency) -> PoolSize {
        let mut buffers = Vec::new();
        for (part, index) in experts.iter().flatten().flat_map(|expert| expert.clone().enumerate()) {
            buffers.resize(buffers.len().max(part + 1), 0);
            buffers[part] = to_blocks(bytes[index]).max(buffers[part]);
        }
        let all: usize = experts.iter().flatten().flat_map(|expert| &bytes[expert.clone()]).sum();
        let slot = buffers.iter().sum::<usize>().max(1);
        let of_layer = experts.iter().map(Vec::len).max().unwrap_or(0);
        let least = (LEAST_BYTES / slot).min(of_layer).max(LEAST_SLOTS);
        let given = (resident.0 * all as f64) as usize / slot;
        PoolSize { slots: given.max(least).min(experts.iter().map(Vec::len).sum()), buffers }
    }

    /// Returns the bytes of the pool.
    pub fn bytes(&self) -> usize {
        self.slots * self.buffers.iter().sum::<usize>()
    }
}

/// Experts of a stack's layers, of which a part is in memory.
pub(super) struct ExpertPool<Buf> {
    shared: Arc<Shared<Buf>>,
    readers: Vec<JoinHandle<()>>,
}

/// State that device and readers share.
struct Shared<Buf> {
    store: PackedStore,
    file: DirectFile,
    bytes: HostBytes<Buf>,
    path: TransferPath,
    /// Whether experts are read while others compute.
    overlaps: bool,
    /// The matrices of each unit, as indices in the store.
    units: Vec<Range<usize>>,
    /// Number of the name of the store's first matrix in the trace.
    names: usize,
    state: Mutex<PoolState<Buf>>,
    /// Signals the device that a matrix was read.
    read: Condvar,
    /// Signals the readers that matrices are to be read.
    wanted: Condvar,
    is_stopped: AtomicBool,
    /// Ends the waits of the device.
    abort: StepAbort,
}

struct PoolState<Buf> {
    contents: ExpertSlots,
    slots: Vec<Slot<Buf>>,
    /// Matrices to read: the slot, and the place of the matrix among those of the expert.
    queue: VecDeque<(usize, usize)>,
    /// Whether the checksum of a matrix has been verified, by its index in the store.
    is_verified: Vec<bool>,
    /// Number of passes that have begun.
    passes: u64,
    /// Number of readers that have started.
    running: usize,
}

/// The buffers of an expert.
struct Slot<Buf> {
    /// By matrix; `None` while it is being read or used.
    buffers: Vec<Option<Buf>>,
    /// Number of matrices that are still to be read.
    left: usize,
    /// The first error of reading them.
    error: Option<String>,
    /// Number of the pass that requested them.
    pass: u64,
    /// Whether the expert has not been used since it was read.
    is_new: bool,
}

impl<Buf: Send + Sync + 'static> ExpertPool<Buf> {
    /// Creates a pool with these buffers, by slot, for the experts of a stack's layers.
    pub fn start(
        experts: ExpertMatrices,
        mut slots: Vec<Vec<Buf>>,
        store: PackedStore,
        (bytes, path, overlaps): (HostBytes<Buf>, TransferPath, bool),
    ) -> Result<Arc<ExpertPool<Buf>>> {
        let data = store.data_file();
        let probe = slots.iter_mut().flatten().next().and_then(bytes);
        let probe = probe.context("the device cannot read experts from a disk")?;
        let file =
            DirectFile::open(&data, probe).with_context(|| format!("cannot read {}", data.display()))?;
        let counts: Vec<usize> = experts.iter().map(Vec::len).collect();
        let matrices = slots.iter().map(Vec::len).sum();
        let slot = |buffers: Vec<Buf>| Slot {
            buffers: buffers.into_iter().map(Some).collect(),
            left: 0,
            error: None,
            pass: 0,
            is_new: false,
        };
        let state = PoolState {
            contents: ExpertSlots::new(slots.len(), &counts),
            slots: slots.into_iter().map(slot).collect(),
            queue: VecDeque::with_capacity(matrices),
            is_verified: vec![false; store.matrices.len()],
            passes: 0,
            running: 0,
        };
        let names = path.transfers.trace().map_or(0, |trace| {
            let matrices = store.matrices.iter();
            trace.add_names(matrices.map(|matrix| matrix.name.clone()))
        });
        let shared = Arc::new(Shared {
            names,
            store,
            file,
            bytes,
            path,
            overlaps,
            units: experts.into_iter().flatten().collect(),
            state: Mutex::new(state),
            read: Condvar::new(),
            wanted: Condvar::new(),
            is_stopped: AtomicBool::new(false),
            abort: StepAbort::default(),
        });
        let mut pool = ExpertPool { shared: shared.clone(), readers: Vec::new() };
        for number in 0..READERS {
            let shared = shared.clone();
            let reader = Builder::new().name(format!("experts-{number}")).spawn(move || shared.run_reader());
            pool.readers.push(reader.context("cannot start a thread that reads experts")?);
        }
        shared.wait_for_readers();
        Ok(Arc::new(pool))
    }
}

impl<Buf> Drop for ExpertPool<Buf> {
    fn drop(&mut self) {
        self.shared.stop();
        if self.shared.abort.is_aborted() {
            // The disk may hang. Threads that read end later, and free their buffers then.
            self.shared.clear();
            self.shared.path.held.leave(self.readers.drain(..));
            return;
        }
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// The experts of one layer, in a pool.
pub(super) struct PooledExperts<Buf> {
    pub pool: Arc<ExpertPool<Buf>>,
    /// The number of the layer, of those of the pool.
    pub layer: usize,
}

impl<Buf: Send + Sync + 'static> ExpertSource<Buf> for PooledExperts<Buf> {
    fn for_each(
        &self,
        held: &[Expert<Buf>],
        chosen: &[u32],
        compute: &mut dyn FnMut(usize, &Expert<Buf>),
    ) -> Result<(), DeviceError> {
        let shared = &*self.pool.shared;
        let first = shared.begin_pass(self.layer, chosen);
        let mut waited = Duration::ZERO;
        let mut use_expert = |at: usize| {
            let index = chosen[at] as usize;
            let ahead = if shared.overlaps { &chosen[at..] } else { &chosen[at..=at] };
            let units = ahead.iter().map(|index| first + *index as usize);
            let (slot, expert) = shared.take(&held[index], units, &mut waited)?;
            compute(index, &expert);
            shared.put_back(slot, expert);
            Ok(())
        };
        let outcome = (0..chosen.len()).try_for_each(&mut use_expert);
        shared.path.transfers.add_stall(Stream::LoadWeights, waited);
        outcome
    }

    fn stop_on_abort(&self, abort: &Abort) {
        let shared: Weak<Shared<Buf>> = Arc::downgrade(&self.pool.shared);
        self.pool.shared.abort.set(abort, shared);
    }
}

impl<Buf: Send + Sync> Waiters for Shared<Buf> {
    fn wake_all(&self) {
        drop(self.lock());
        self.read.notify_all();
    }
}

impl<Buf> Shared<Buf> {
    fn lock(&self) -> MutexGuard<'_, PoolState<Buf>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Begins a pass through a layer, and returns its first unit.
    fn begin_pass(&self, layer: usize, chosen: &[u32]) -> usize {
        let mut state = self.lock();
        state.passes += 1;
        state.contents.begin_pass(layer, chosen);
        state.contents.first(layer)
    }

    /// Waits until the first of `units`, which is used next, is in a slot, and takes its buffers, while the
    /// others are read as far as there is room. Adds the time of waiting to `waited`. Fails if the expert
    /// cannot be read, or the step is aborted. An expert that could not be read in an earlier pass is read
    /// again.
    fn take(
        &self,
        of: &Expert<Buf>,
        units: impl Iterator<Item = usize> + Clone,
        waited: &mut Duration,
    ) -> Result<(usize, Expert<Buf>), DeviceError> {
        let unit = units.clone().next().expect("the expert to use is given; anything else is a bug");
        let mut guard = self.lock();
        guard.contents.move_to(unit);
        let mut began = None;
        loop {
            if self.is_stopped() {
                return Err(DeviceError::Fault("the threads that read experts have ended".into()));
            }
            let state = &mut *guard;
            self.request(state, units.clone());
            let slot = state.contents.find(unit).filter(|slot| state.slots[*slot].left == 0);
            if let Some(number) = slot {
                let slot = &mut state.slots[number];
                if let Some(error) = slot.error.take() {
                    state.contents.empty(number);
                    if slot.pass == state.passes {
                        return Err(DeviceError::Fault(error));
                    }
                    continue;
                }
                *waited += began.map_or(Duration::ZERO, |began: Instant| began.elapsed());
                self.path.transfers.add_expert(!std::mem::take(&mut slot.is_new));
                return Ok((number, slot.take(of)));
            }
            self.abort.check()?;
            began.get_or_insert_with(Instant::now);
            guard = self.read.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Requests the first of `units`, which is used next, and the following ones that are not in the pool, as
    /// long as there is room, until enough are read ahead.
    fn request(&self, state: &mut PoolState<Buf>, units: impl Iterator<Item = usize>) {
        let PoolState { contents, slots, queue, passes, .. } = state;
        let mut ahead = 0;
        for (place, unit) in units.enumerate() {
            let slot = contents.find(unit).or_else(|| {
                let number = contents.make_room(unit, |slot| slots[slot].left == 0)?;
                let (matrices, slot) = (self.units[unit].len(), &mut slots[number]);
                (slot.left, slot.error, slot.pass, slot.is_new) = (matrices, None, *passes, true);
                queue.extend((0..matrices).map(|matrix| (number, matrix)));
                self.wanted.notify_all();
                Some(number)
            });
            let Some(slot) = slot else { return };
            ahead += usize::from(place > 0 && slots[slot].is_new);
            if ahead == READ_AHEAD {
                return;
            }
        }
    }

    /// Puts back the buffers of an expert that was used.
    fn put_back(&self, slot: usize, expert: Expert<Buf>) {
        let Expert { gate, up, down } = expert;
        let buffers = [Some(gate), up, Some(down)].into_iter().flatten().map(|weight| weight.buf);
        let mut state = self.lock();
        state.slots[slot].buffers.iter_mut().zip(buffers).for_each(|(place, buf)| *place = Some(buf));
    }

    /// Reads matrices that are requested, until the pool is stopped.
    fn run_reader(&self) {
        // If this thread panics, nobody waits for it.
        let _stop = StopAtEnd(self);
        let name = || thread::current().name().unwrap_or_default().to_owned();
        let row = |trace: &Trace| trace.add_row(Activity::LoadWeights, name());
        let trace = self.path.transfers.trace().map(|trace| (trace, row(trace)));
        self.lock().running += 1;
        self.read.notify_one();
        while let Some((number, matrix, mut buf, stored, is_verified)) = self.next_matrix() {
            let began = Instant::now();
            let outcome = self.read(stored, &mut buf, !is_verified);
            if let Some((trace, row)) = trace {
                trace.record(row, self.names + stored, began);
            }
            let mut state = self.lock();
            state.is_verified[stored] |= outcome.is_ok();
            let slot = &mut state.slots[number];
            slot.buffers[matrix] = Some(buf);
            slot.left -= 1;
            slot.error = slot.error.take().or(outcome.err());
            self.read.notify_one();
        }
    }

    /// Waits for a matrix to read, and takes its buffer: the slot, its place there, the buffer, its index in
    /// the store, and whether it was verified. `None` once the pool is stopped.
    fn next_matrix(&self) -> Option<(usize, usize, Buf, usize, bool)> {
        let mut state = self.lock();
        loop {
            if self.is_stopped() {
                return None;
            }
            if let Some((number, matrix)) = state.queue.pop_front() {
                let unit = state.contents.unit(number).expect("a slot keeps its expert; this is a bug");
                let buf = state.slots[number].buffers[matrix].take();
                let stored = self.units[unit].start + matrix;
                let buf = buf.expect("the buffers of a slot to fill are there; this is a bug");
                return Some((number, matrix, buf, stored, state.is_verified[stored]));
            }
            state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(&self, stored: usize, buf: &mut Buf, verify: bool) -> Result<(), String> {
        let (matrix, began) = (&self.store.matrices[stored], Instant::now());
        let bytes = (self.bytes)(buf).ok_or("the buffer for an expert is not on the host; this is a bug")?;
        let blocks = &mut bytes[..to_blocks(matrix.bytes)];
        let mut read = || self.file.read(matrix.offset, blocks, &|| self.is_stopped());
        // Once more, because writing the store anew takes long.
        match read().or_else(|_| read()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err("stopped".into()),
            outcome => outcome.map_err(|error| self.store.read_failure(stored, &error))?,
        }
        self.path.transfers.add_bytes(Stream::LoadWeights, Tier::Disk, blocks.len());
        self.path.wait(Direction::ToDevice, blocks.len(), began, &|| self.is_stopped());
        if verify { self.store.verify(stored, &blocks[..matrix.bytes]) } else { Ok(()) }
    }

    /// Waits until all readers run: starting a thread allocates, and steps must not.
    fn wait_for_readers(&self) {
        let mut state = self.lock();
        while state.running < READERS && !self.is_stopped() {
            state = self.read.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Frees the buffers that no thread has.
    fn clear(&self) {
        self.lock().slots.iter_mut().flat_map(|slot| &mut slot.buffers).for_each(|buf| *buf = None);
    }

    /// Ends the readers, and the wait of the device.
    fn stop(&self) {
        let state = self.lock();
        self.is_stopped.store(true, Ordering::Release);
        drop(state);
        self.wanted.notify_all();
        self.read.notify_all();
    }
}

impl<Buf> Slot<Buf> {
    /// Takes the buffers, as those of an expert with the shapes of `of`.
    fn take(&mut self, of: &Expert<Buf>) -> Expert<Buf> {
        let mut buffers = self
            .buffers
            .iter_mut()
            .map(|buf| buf.take().expect("the buffers of a filled slot are there; anything else is a bug"));
        let mut weight = |of: &Weight<Buf>| {
            let buf = buffers.next().expect("a slot has a buffer for each matrix; anything else is a bug");
            Weight { id: None, buf, ty: of.ty, n: of.n, k: of.k }
        };
        Expert { gate: weight(&of.gate), up: of.up.as_ref().map(&mut weight), down: weight(&of.down) }
    }
}

/// Stops a pool when it is dropped.
struct StopAtEnd<'a, Buf>(&'a Shared<Buf>);

impl<Buf> Drop for StopAtEnd<'_, Buf> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::direct::BLOCK;
    use super::super::matrix::LayerMatrix;
    use super::super::store::StorePlace;
    use super::super::store_key::StoreKey;
    use super::*;
    use crate::model::offload::transfers::Transfers;
    use crate::model::{ModelRef, ModelSource};
    use crate::testing::Scratch;
    use mainstem_kernels::reference::{Reference, ReferenceSizes};
    use mainstem_kernels::{Backend, DeviceSizes, HostBuf, HostMemory, QuantType};

    /// A store of mixtures whose matrices have bytes that identify them.
    struct Case {
        folder: Scratch,
        experts: ExpertMatrices,
        bytes: Vec<usize>,
        store: PackedStore,
        /// By layer.
        held: Vec<Vec<Expert<HostBuf>>>,
        transfers: Arc<Transfers>,
    }

    /// Returns the bytes of the matrix at an index of the store.
    fn contents(index: usize, len: usize) -> Vec<u8> {
        (0..len).map(|at| (index * 31 + at * 7 + at / 4096) as u8).collect()
    }

    impl Case {
        /// Creates layers with these numbers of experts, of three matrices each, or of two in the last one.
        fn new(layers: &[usize]) -> Case {
            let (folder, memory) = (Scratch::new(), HostMemory::default());
            let (mut matrices, mut experts, mut held) = (Vec::new(), Vec::new(), Vec::new());
            for (layer, count) in layers.iter().enumerate() {
                let (mut of_layer, mut weights) = (Vec::new(), Vec::new());
                for expert in 0..*count {
                    let begin = matrices.len();
                    // Between one block and several.
                    let mut weight = |n: usize| {
                        let layout = ReferenceSizes.packed_layout(QuantType::F32, n, 32);
                        let name = format!("matrix {}", matrices.len());
                        matrices.push(LayerMatrix {
                            name,
                            role: "expert_gate",
                            part: String::new(),
                            layout,
                            expert: Some(expert),
                            is_for_openings: false,
                        });
                        Weight { id: None, buf: memory.zeroed(0).unwrap(), ty: QuantType::F32, n, k: 32 }
                    };
                    let gate = weight(20 + 17 * layer);
                    let up = (layer + 1 < layers.len()).then(|| weight(100));
                    weights.push(Expert { gate, up, down: weight(32 + layer) });
                    of_layer.push(begin..matrices.len());
                }
                experts.push(of_layer);
                held.push(weights);
            }
            let demo = ModelSource::open(&ModelRef::Demo, None).unwrap();
            let key = StoreKey::new(&demo.path, &[], matrices.iter());
            let mut writer = StorePlace(folder.path().join("stores")).write(key).unwrap();
            let bytes: Vec<usize> = matrices.iter().map(|matrix| matrix.layout.bytes).collect();
            for (index, len) in bytes.iter().enumerate() {
                writer.append(&contents(index, *len)).unwrap();
            }
            let store = writer.finish().unwrap();
            Case { folder, experts, bytes, store, held, transfers: Arc::default() }
        }

        fn pool(&self, slots: usize, overlaps: bool) -> Arc<ExpertPool<HostBuf>> {
            let (size, memory) =
                (PoolSize::new(&self.experts, &self.bytes, Residency(0.5)), HostMemory::default());
            let slot = || size.buffers.iter().map(|bytes| memory.zeroed(*bytes).unwrap()).collect();
            let slots = (0..slots).map(|_| slot()).collect();
            let device = (
                Reference::host_bytes as HostBytes<HostBuf>,
                TransferPath { transfers: self.transfers.clone(), ..TransferPath::default() },
                overlaps,
            );
            ExpertPool::start(self.experts.clone(), slots, self.store.clone(), device).unwrap()
        }

        /// Uses some experts of a layer, and checks their order and bytes.
        fn pass(
            &self,
            pool: &Arc<ExpertPool<HostBuf>>,
            layer: usize,
            chosen: &[u32],
        ) -> Result<(), DeviceError> {
            let mut used = Vec::new();
            let source = PooledExperts { pool: pool.clone(), layer };
            let outcome = source.for_each(&self.held[layer], chosen, &mut |index, expert| {
                let weights = [Some(&expert.gate), expert.up.as_ref(), Some(&expert.down)];
                let stored = self.experts[layer][index].clone();
                for (weight, stored) in weights.into_iter().flatten().zip(stored) {
                    let len = self.bytes[stored];
                    assert!(weight.buf.bytes()[..len] == contents(stored, len), "{layer}, {index}, {stored}");
                    assert_eq!(weight.n * weight.k * 4, len);
                }
                used.push(index as u32);
            });
            assert!(used == chosen[..used.len()] && (outcome.is_err() || used.len() == chosen.len()));
            outcome
        }
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % end
        }

        fn subset(&mut self, count: usize) -> Vec<u32> {
            let part = 1 + self.below(4);
            (0..count as u32).filter(|_| self.below(4) < part).collect()
        }
    }

    #[test]
    fn chosen_experts_have_their_bytes_in_pools_of_every_size() {
        let layers = [4, 1, 6, 3];
        let (case, mut random) = (Case::new(&layers), Random(3));
        for slots in 1..=14 {
            let pool = case.pool(slots, slots % 3 > 0);
            let mut is_chosen = vec![false; case.bytes.len()];
            let mut bytes = 0;
            for _ in 0..30 {
                let batches = 1 + random.below(3);
                for (layer, count) in layers.iter().enumerate() {
                    for _ in 0..batches {
                        let chosen = random.subset(*count);
                        let before = case.transfers.totals();
                        case.pass(&pool, layer, &chosen).unwrap();
                        let new = case.transfers.totals().since(&before);
                        let (hits, misses) = (new.expert_hits as usize, new.expert_misses as usize);
                        assert_eq!(hits + misses, chosen.len());
                        let of_chosen =
                            chosen.iter().flat_map(|it| case.experts[layer][*it as usize].clone());
                        for stored in of_chosen {
                            is_chosen[stored] = true;
                        }
                        bytes += new.bytes[0][1];
                    }
                }
            }
            let state = pool.shared.lock();
            assert!(state.queue.is_empty() && state.slots.iter().all(|slot| slot.left == 0), "{slots} slots");
            assert_eq!(state.is_verified, is_chosen, "{slots} slots: only chosen experts are read");
            let all: usize = case.bytes.iter().map(|bytes| to_blocks(*bytes)).sum();
            assert_eq!(bytes == all as u64, slots == 14, "{slots} slots: each is read once if all fit");
        }
    }

    /// One slot computes, two are read ahead, and one passes from layer to layer.
    #[test]
    fn experts_that_fit_are_not_read_again_though_others_are_read_ahead() {
        let case = Case::new(&[8; 4]);
        for (slots, overlaps, changing) in [(16, true, 4), (16, false, 2), (29, true, 4), (32, true, 0)] {
            let (pool, before) = (case.pool(slots, overlaps), case.transfers.totals());
            for _ in 0..20 {
                (0..4).for_each(|layer| case.pass(&pool, layer, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap());
            }
            let new = case.transfers.totals().since(&before);
            let least = 19 * (slots - changing) as u64;
            assert!(new.expert_hits >= least, "{slots} slots, {overlaps}: {new:?}, {least}");
            assert_eq!(new.expert_hits + new.expert_misses, 20 * 32);
        }
    }

    /// The pass fails with the cause. Later ones read again what they need.
    #[test]
    fn an_expert_that_cannot_be_read_fails_the_pass() {
        let (case, mut random) = (Case::new(&[5, 4]), Random(8));
        let data = case.store.data_file();
        let bytes = std::fs::read(&data).unwrap();
        for slots in [1, 3, 7] {
            let pool = case.pool(slots, true);
            for _ in 0..20 {
                case.pass(&pool, random.below(2), &random.subset(4)).unwrap();
                std::fs::write(&data, &bytes[..BLOCK]).unwrap();
                let pass = |layer| case.pass(&pool, layer, &[0, 1, 2, 3]);
                let failed =
                    (0..2).find_map(|layer| pass(layer).err()).expect("not all of them fit").to_string();
                assert!(failed.contains("cannot read matrix ") && failed.contains("weights.bin"), "{failed}");
                std::fs::write(&data, &bytes).unwrap();
                (0..2).for_each(|layer| pass(layer).unwrap());
            }
        }
    }

    /// A matrix may fail just before a pass fails, and the rest of its expert be read during the next one.
    #[test]
    fn an_error_of_an_earlier_pass_fails_no_later_one() {
        let case = Case::new(&[5, 4]);
        let pool = case.pool(3, true);
        case.pass(&pool, 0, &[1]).unwrap();
        let shared = &*pool.shared;
        let number = shared.lock().contents.find(1).unwrap();
        let slot = |left, error| {
            let slot = &mut shared.lock().slots[number];
            (slot.left, slot.error) = (left, error);
        };
        slot(1, Some("of an earlier pass".to_owned()));
        let first = shared.begin_pass(0, &[1]);
        slot(0, Some("of an earlier pass".to_owned()));
        let before = case.transfers.totals();
        let (number, expert) =
            shared.take(&case.held[0][1], [first + 1].into_iter(), &mut Duration::default()).unwrap();
        shared.put_back(number, expert);
        assert_eq!(case.transfers.totals().since(&before).expert_misses, 1, "it is read again");
        case.pass(&pool, 0, &[0, 1, 2, 3, 4]).unwrap();
    }

    #[test]
    fn an_expert_that_has_changed_is_noticed_when_it_is_first_read() {
        let case = Case::new(&[5, 4]);
        let data = case.store.data_file();
        let mut bytes = std::fs::read(&data).unwrap();
        bytes[case.store.matrices[7].offset as usize + 99] ^= 1;
        std::fs::write(&data, &bytes).unwrap();
        let pool = case.pool(9, true);
        case.pass(&pool, 0, &[0, 1, 3, 4]).unwrap();
        let failed = case.pass(&pool, 0, &[1, 2]).unwrap_err().to_string();
        assert!(failed.contains("matrix 7") && failed.contains("has changed"), "{failed}");
        case.pass(&pool, 1, &[0, 1, 2, 3]).unwrap();
        assert!(!case.folder.path().join("stores").join("index.json").exists());
    }

    #[test]
    fn a_pool_has_a_part_of_the_experts_and_no_less_than_it_needs() {
        let size = |layers: usize, experts: usize, bytes: usize, part: f64| {
            let matrices = 3 * experts;
            let of_layer = |layer: usize| {
                (0..experts).map(|at| layer * matrices + 3 * at..layer * matrices + 3 * at + 3).collect()
            };
            let all: ExpertMatrices = (0..layers).map(of_layer).collect();
            let size = PoolSize::new(&all, &vec![bytes; layers * matrices], Residency(part));
            assert_eq!(size.bytes(), size.slots * 3 * to_blocks(bytes));
            size.slots
        };
        assert_eq!(size(10, 8, 4096, 0.5), 40);
        assert_eq!(size(10, 8, 4096, 0.999), 79);
        assert_eq!(size(10, 8, 4096, 0.0), 8, "a layer's");
        assert_eq!(size(10, 8, 8 << 20, 0.0), 5, "128 MiB");
        assert_eq!(size(10, 8, 1 << 30, 0.0), 3);
        assert_eq!(size(1, 2, 1 << 30, 0.0), 2);
        assert_eq!(size(4, 6, 4097, 0.75), 9, "buffers have whole blocks");
        assert_eq!(PoolSize::new(&Vec::new(), &[5], Residency(0.5)).bytes(), 0);
    }
}
