//! K and V of layers that do not stay on the device: a file, or memory of the host, holds their caches.
//! Threads of their own read from it the pages that a step attends to, while the layers before compute, and
//! write to it the pages that the step changes, while the layers after compute.
//!
//! Buffers for a few layers, each as large as a layer's cache, go round: a page has the same place in each of
//! them and in the cache, so page tables and kernels need not know. What the other pages of a buffer hold is
//! never read.
//! Invariant: a buffer is in one place at a time: free, with a thread, ready, waiting to be written, or in a
//! layer between `acquire` and `release`. K or V of a layer is read once all changes of it are written, so a
//! step may begin while late layers of the step before are still being written. Threads keep to the plan of
//! the step that they read or write for: a plan changes only while no thread has it.

use super::cache_places::CacheOffload;
use super::cache_ring::{Ring, THREADS, Unit, UnitPlace};
use super::chosen_values::ChosenValues;
use super::direct::DirectFile;
use super::held::HostCopy;
use super::link::TransferPath;
use super::page_plan::PageMarks;
use super::stream::HostBytes;
use super::tier::{Tier, host_memory};
use super::transfers::Stream;
use anyhow::{Context, Result};
use mainstem_kernels::{Abort, Backend, DeviceError, KvLayer, KvLayout, StepBatch, StepLimits};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The caches of a decoder's layers whose pages are copied to the device.
pub struct StreamedCaches<Buf> {
    /// For each layer its number among those whose pages are copied.
    places: Vec<Option<usize>>,
    marks: PageMarks,
    /// The stand-ins of the acquired layer.
    stand_ins: Option<[Buf; 2]>,
    /// Whether the step reads or changes pages.
    has_pages: bool,
    ring: Arc<Ring<Buf>>,
    threads: Vec<JoinHandle<()>>,
}

impl<Buf: Send + Sync + 'static> StreamedCaches<Buf> {
    /// Creates the caches `layers`, each with its tier. Caches without pages that are copied
    /// ([`CacheOffload::streams_from`]) are left out. `buffers` are caches with the layouts and numbers of
    /// [`super::buffer_layouts`]. Fails if the file or the memory cannot have as many bytes.
    pub fn start(
        layers: &[(KvLayout, Tier)],
        buffers: Vec<(KvLayout, Vec<KvLayer<Buf>>)>,
        limits: &StepLimits,
        (offload, path, bytes): (&CacheOffload, &TransferPath, HostBytes<Buf>),
    ) -> Result<StreamedCaches<Buf>> {
        let mut count = (0..).peekable();
        let places = layers.iter().map(|(_, tier)| count.next_if(|_| offload.streams_from(*tier)));
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
        for (layer, (layout, tier)) in
            layers.iter().enumerate().filter(|(_, (_, tier))| offload.streams_from(*tier))
        {
            let known = layouts.iter().position(|known| known == layout);
            let class = 2 * known.expect("there are buffers of all layouts; anything else is a bug");
            for class in [class, class + 1] {
                let place = match tier {
                    Tier::Host => {
                        let memory = host_memory(sizes[class]).context("tiers.host_kv")?;
                        UnitPlace::Host(HostCopy::new(memory, &path.held))
                    }
                    Tier::Device | Tier::Disk => UnitPlace::File(end),
                };
                if place.tier() == Tier::Disk {
                    end += sizes[class] as u64;
                }
                units.push(Unit { layer, class, place });
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
            marks: PageMarks::new(ring.pages, limits),
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

    /// Begins a step, and begins to read what it attends to. `device` has the page tables of the step. Fails
    /// if something could not be written.
    pub fn begin(&mut self, device: &dyn Backend<Buf = Buf>, batch: &StepBatch) -> Result<(), DeviceError> {
        let free = self.ring.end_reads()?;
        self.marks.mark(device, batch);
        let mut guard = self.ring.lock();
        let state = &mut *guard;
        let plan = Arc::get_mut(&mut state.plans[free]).expect("no thread has it; this is a bug");
        self.marks.take_plan(batch, plan);
        self.has_pages = !plan.is_empty();
        state.current = free;
        if let Some(reason) = state.failed.take() {
            return Err(DeviceError::Fault(reason));
        }
        if self.has_pages {
            state.next_read = 0;
            drop(guard);
            self.ring.work.notify_all();
        }
        Ok(())
    }

    /// Lets `abort` end the waits of a step, which then fails.
    pub fn stop_on_abort(&self, abort: &Abort) {
        let ring: Weak<Ring<Buf>> = Arc::downgrade(&self.ring);
        self.ring.abort.set(abort, ring);
    }
}

impl<Buf> StreamedCaches<Buf> {
    /// Returns whether pages of a layer's cache are copied to the device.
    pub fn contains(&self, layer: usize) -> bool {
        self.places[layer].is_some()
    }

    /// Returns whether pages of a layer's cache are copied, and the step reads or changes pages.
    pub fn has_work(&self, layer: usize) -> bool {
        self.contains(layer) && self.has_pages
    }

    /// Waits until the pages that the step attends to are in the cache of a layer, which is `cache` until it
    /// is released. Does nothing for a layer whose pages are not copied. Fails if they cannot be read, or if
    /// something could not be written. Returns the source of the pages of V that the cache lacks, because
    /// rows attend to single positions of them.
    pub fn acquire(
        &mut self,
        layer: usize,
        cache: &mut KvLayer<Buf>,
    ) -> Result<Option<ChosenValues<Buf>>, DeviceError> {
        let Some(place) = self.places[layer] else { return Ok(None) };
        let (ring, units) = (&self.ring, 2 * place..2 * place + 2);
        let ([mut for_reads, mut for_writes], mut is_late) = ([Duration::ZERO; 2], false);
        let mut state = ring.lock();
        loop {
            if let Some(reason) = state.failed.take() {
                return Err(DeviceError::Fault(reason));
            }
            if let [Some(_), Some(_)] = &state.ready[units.clone()] {
                break;
            }
            // Writes have the buffers or the threads, or change what is to be read.
            let wait = match state.next_read < units.end && state.unwritten.contains(&true) {
                true => &mut for_writes,
                false => &mut for_reads,
            };
            let began = Instant::now();
            state = ring.wait(state)?;
            *wait += began.elapsed();
            is_late = true;
        }
        if let (Some(k), Some(v)) = (state.ready[2 * place].take(), state.ready[2 * place + 1].take()) {
            self.stand_ins = Some([std::mem::replace(&mut cache.k, k), std::mem::replace(&mut cache.v, v)]);
        }
        let plan = state.plans[state.current].clone();
        drop(state);
        ring.path.transfers.add_layer(Stream::LoadCache, is_late.then_some(for_reads));
        ring.path.transfers.add_stall(Stream::StoreCache, for_writes);
        Ok(ChosenValues::new(ring, 2 * place + 1, plan))
    }

    /// Ends the use of the acquired cache of a layer, and begins to write what the step has changed in it,
    /// unless the step has failed.
    pub fn release(&mut self, layer: usize, cache: &mut KvLayer<Buf>, has_failed: bool) {
        let (Some(place), Some([k, v])) = (self.places[layer], self.stand_ins.take()) else { return };
        let bufs = [std::mem::replace(&mut cache.k, k), std::mem::replace(&mut cache.v, v)];
        let mut guard = self.ring.lock();
        let state = &mut *guard;
        let plan = &state.plans[state.current];
        for (unit, buf) in (2 * place..).zip(bufs) {
            if has_failed || plan.writes.is_empty() {
                state.free[self.ring.units[unit].class].push(buf);
            } else {
                state.unwritten[unit] = true;
                state.writes.push_back((unit, buf, plan.clone()));
            }
        }
        drop(guard);
        self.ring.work.notify_all();
    }
}

impl<Buf> Drop for StreamedCaches<Buf> {
    fn drop(&mut self) {
        self.ring.stop();
        if self.ring.abort.is_aborted() {
            // The disk may hang. Threads that read or write end later, and free their buffers then.
            self.ring.clear();
            self.ring.path.held.leave(self.threads.drain(..));
            return;
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Access, Gate};
    use super::*;
    use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
    use mainstem_kernels::{
        ActivationPrecision, Fraction, HostBuf, KvTable, QuantType, Span, SpanModel, SpanOutput, SpanStack,
        SpanTable, SpanTokens, TableUpdate,
    };
    use std::fs::File;
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, Ordering};

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
        counts_tokens: false,
        opening_rows: 0,
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

    /// The caches of so many layers in `file`, with the device that has their page tables.
    fn caches_in(file: DirectFile, layers: usize) -> (CpuBackend, StreamedCaches<HostBuf>) {
        let config =
            CpuConfig { threads: 1, isa: Isa::Auto, activation_precision: ActivationPrecision::Int8 };
        let mut device = CpuBackend::new(config).unwrap();
        device.prepare(&LIMITS).unwrap();
        let mut class = || (0..layers.min(3)).map(|_| device.alloc(8 * 64).unwrap()).collect();
        let free = vec![class(), class()];
        let unit = |at| Unit { layer: at / 2, class: at % 2, place: UnitPlace::File(512 * at as u64) };
        let units = (0..2 * layers).map(unit).collect();
        let path = TransferPath::default();
        let ring = Ring::new(Some(file), units, (8, free), &LIMITS, (CpuBackend::host_bytes, path));
        let places = (0..layers).map(Some).collect();
        (device, StreamedCaches::with_ring(places, &LIMITS, ring).unwrap())
    }

    fn layer(device: &mut CpuBackend) -> KvLayer<HostBuf> {
        let (ty, pages, page_positions) = (QuantType::F16, 8, 32);
        let layout = KvLayout { ty, pages, page_positions, kv_heads: 1, k_dim: 1, v_dim: 1, v_in_k: false };
        KvLayer { k: device.alloc(0).unwrap(), v: device.alloc(0).unwrap(), layout }
    }

    /// Pages with earlier positions are read, those with new ones are written, and neighbours together.
    #[test]
    fn a_step_reads_and_writes_the_pages_of_its_positions() {
        let (mut device, mut caches) = caches_in(DirectFile::of(tempfile()), 1);
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
            let state = caches.ring.lock();
            let plan = state.plans[state.current].clone();
            drop(state);
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
        std::fs::write(&path, [0; 3 * 1024]).unwrap();
        File::options().read(true).write(true).open(&path).unwrap()
    }

    /// Runs a step of three layers, of which `use_layer` gets K and V.
    fn run_step(
        (device, caches): (&mut CpuBackend, &mut StreamedCaches<HostBuf>),
        (start, end): (u32, u32),
        layers: Range<usize>,
        mut use_layer: impl FnMut(usize, [&mut [u8]; 2]),
    ) -> Result<(), DeviceError> {
        for index in layers {
            if index == 0 {
                let batch = step(start, end);
                device.begin_step(&batch);
                caches.begin(device, &batch)?;
            }
            let mut layer = layer(device);
            caches.acquire(index, &mut layer)?;
            use_layer(index, [layer.k.bytes_mut(), layer.v.bytes_mut()]);
            caches.release(index, &mut layer, false);
            if index == 2 {
                device.end_step();
            }
        }
        Ok(())
    }

    /// Returns three layers in a file whose writes of the last layer, and of all layers if the flag is set,
    /// pass a gate.
    fn gated() -> (CpuBackend, StreamedCaches<HostBuf>, Arc<(Gate, AtomicBool)>) {
        let (gate, mut file) =
            (Arc::new((Gate::default(), AtomicBool::new(false))), DirectFile::of(tempfile()));
        let in_file = gate.clone();
        file.hook = Some(Arc::new(move |access, offset| {
            if access == Access::Write && (offset >= 2048 || in_file.1.load(Ordering::SeqCst)) {
                in_file.0.pass();
            }
            Ok(())
        }));
        let (device, caches) = caches_in(file, 3);
        gate.0.shut();
        (device, caches, gate)
    }

    /// The bytes of the page that has the first positions.
    const PAGE: Range<usize> = 5 * 64..6 * 64;

    /// Regression: a step began once the last layer of the step before was written.
    #[test]
    fn early_layers_are_used_while_late_ones_are_written() {
        let (mut device, mut caches, gate) = gated();
        let fill = |layer: usize, halves: [&mut [u8]; 2]| {
            halves
                .into_iter()
                .enumerate()
                .for_each(|(half, bytes)| bytes[PAGE].fill((2 * layer + half) as u8));
        };
        run_step((&mut device, &mut caches), (0, 20), 0..3, fill).unwrap();
        gate.0.wait_for(2);
        let mut seen = Vec::new();
        let mut look = |_: usize, [k, v]: [&mut [u8]; 2]| {
            assert!(k[PAGE].iter().all(|byte| *byte == k[PAGE.start]));
            seen.extend([k[PAGE.start], v[PAGE.start]]);
        };
        run_step((&mut device, &mut caches), (20, 21), 0..2, &mut look).unwrap();
        {
            let state = caches.ring.lock();
            assert_eq!(state.unwritten[4..], [true, true], "the last layer is still being written");
            assert!(state.ready[4].is_none() && state.ready[5].is_none(), "it is read after that");
        }
        gate.0.open();
        run_step((&mut device, &mut caches), (20, 21), 2..3, &mut look).unwrap();
        // The third step may use the plan of the first one.
        run_step((&mut device, &mut caches), (21, 22), 0..3, &mut look).unwrap();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]);
    }

    /// A step that fails leaves writes of the step before it; the next one has a plan of its own.
    #[test]
    fn steps_after_one_that_failed_early_see_all_that_was_written() {
        let (mut device, mut caches, gate) = gated();
        let fill = |layer: usize, [k, _]: [&mut [u8]; 2]| k[PAGE].fill(1 + layer as u8);
        run_step((&mut device, &mut caches), (0, 20), 0..3, fill).unwrap();
        gate.0.wait_for(2);
        // It ends after its first layer, which is being written.
        gate.1.store(true, Ordering::SeqCst);
        run_step((&mut device, &mut caches), (20, 21), 0..1, |_, _| ()).unwrap();
        device.end_step();
        gate.0.wait_for(4);
        gate.0.open();
        let mut seen = Vec::new();
        let look = |_: usize, [k, _]: [&mut [u8]; 2]| seen.push(k[PAGE.start]);
        run_step((&mut device, &mut caches), (20, 21), 0..3, look).unwrap();
        assert_eq!(seen, [1, 2, 3]);
    }

    /// The wait for a plan, and the wait for what is read.
    #[test]
    fn an_abort_ends_waits_for_a_file_that_hangs() {
        for steps in [1, 2] {
            let (mut device, mut caches, gate) = gated();
            let abort = Abort::new();
            caches.stop_on_abort(&abort);
            run_step((&mut device, &mut caches), (0, 20), 0..3, |_, _| ()).unwrap();
            gate.0.wait_for(2);
            if steps == 2 {
                // It fails, and the threads have the plans of both steps.
                gate.1.store(true, Ordering::SeqCst);
                run_step((&mut device, &mut caches), (20, 21), 0..1, |_, _| ()).unwrap();
                device.end_step();
                gate.0.wait_for(4);
            }
            let outcome = std::thread::scope(|scope| {
                let waits = scope.spawn(|| run_step((&mut device, &mut caches), (20, 21), 0..3, |_, _| ()));
                abort.abort();
                waits.join().unwrap()
            });
            assert_eq!(outcome.unwrap_err().to_string(), "device fault: the stage was aborted");
            drop(caches);
            gate.0.open();
        }
    }

    /// The step that comes next fails: nothing that was lost is read.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_cannot_be_written_fails_a_step() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (mut device, mut caches) = caches_in(DirectFile::of(full), 1);
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
        let begun = caches.begin(&device, &batch);
        let failed = begun.and_then(|()| caches.acquire(0, &mut layer)).err().unwrap().to_string();
        let expected = "device fault: cannot write the KV cache to its file: No space left on device";
        assert!(failed.starts_with(expected), "{failed}");
    }
}
