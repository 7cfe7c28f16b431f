//! Streams: what is queued, and who runs it.

use super::code::{self, Result};
use super::host;
use super::settings::Injection;
use super::state::{End, Guard, Handle, Launch, Node, State, Work, lock, notify, state, wait};
use crate::exec::Random;
use crate::findings::{Finding, Kind};
use crate::machine::{Machine, Report};
use crate::memory::device_of;
use std::sync::{Arc, Mutex, MutexGuard};

/// The next step towards the end of a stream.
enum Step {
    Run(Handle),
    /// Another thread runs what is needed, or it hangs.
    Wait,
}

/// Queues work on a stream, or adds it to the capture that the stream takes part in.
pub(super) fn issue(mut guard: Guard, stream: Handle, work: Work) -> Result<Guard> {
    let it = state(&mut guard)?;
    let Some(queue) = it.streams.get(&stream) else { return Err(code::INVALID_HANDLE) };
    let device = queue.device;
    if queue.capture.is_some() {
        it.capture_node(stream, work)?;
        return Ok(guard);
    }
    it.check_legacy(stream)?;
    match it.devices[device].error {
        0 => {}
        error => return Err(error),
    }
    for (other, seq) in it.implicit(stream) {
        it.push(stream, Work::Wait { stream: other, seq });
    }
    it.push(stream, work);
    let chance = it.settings.eager;
    if it.random.next() % 100 < chance { run_something(guard) } else { Ok(guard) }
}

impl State {
    /// Appends a command; gives how many the stream has had.
    pub(super) fn push(&mut self, stream: Handle, work: Work) -> u64 {
        let Some(queue) = self.streams.get_mut(&stream) else { return 0 };
        queue.queue.push_back(work);
        queue.issued += 1;
        queue.issued
    }

    /// The commands that a new one of a stream comes after, by the rules of the legacy stream.
    fn implicit(&self, stream: Handle) -> Vec<(Handle, u64)> {
        let queue = &self.streams[&stream];
        let device = &self.devices[queue.device];
        let unfinished = |handle: Handle| {
            let it = &self.streams[&handle];
            (it.completed < it.issued).then_some((handle, it.issued))
        };
        if stream != device.legacy {
            return if queue.blocking { unfinished(device.legacy).into_iter().collect() } else { Vec::new() };
        }
        let others = self.streams.iter().filter(|(handle, it)| {
            it.blocking && it.device == queue.device && **handle != stream && it.capture.is_none()
        });
        others.filter_map(|(handle, _)| unfinished(*handle)).collect()
    }

    fn is_done(&self, stream: Handle, seq: u64) -> bool {
        self.streams.get(&stream).is_none_or(|it| it.completed >= seq)
    }

    /// The command that must run next, so that a stream goes on.
    fn step(&self, stream: Handle) -> Step {
        let mut at = stream;
        // Waits cannot go in a circle: each is for commands that were queued before it.
        for _ in 0..10_000 {
            let Some(queue) = self.streams.get(&at) else { return Step::Wait };
            if queue.busy {
                return Step::Wait;
            }
            match queue.queue.front() {
                None => return Step::Wait,
                Some(Work::Wait { stream, seq }) if !self.is_done(*stream, *seq) => at = *stream,
                Some(_) => return Step::Run(at),
            }
        }
        Step::Wait
    }

    /// The failure that was asked for the next launch on a device.
    fn injected_launch(&mut self, device: usize) -> Option<Injection> {
        self.devices[device].launches += 1;
        let number = self.devices[device].launches;
        let hits = |it: &&Injection| it.launch == number && it.device.is_none_or(|it| it == device);
        self.settings.injections.iter().find(hits).cloned()
    }

    /// The failure that was asked for the next allocation on a device.
    pub(super) fn injected_alloc(&mut self, device: usize) -> Option<u32> {
        self.devices[device].allocs += 1;
        let number = self.devices[device].allocs;
        let hits = |it: &&Injection| it.alloc == number && it.device.is_none_or(|it| it == device);
        self.settings.injections.iter().find(hits).map(|it| it.error)
    }
}

/// Waits until a stream has completed so many commands, running what is needed.
pub(super) fn complete(mut guard: Guard, stream: Handle, seq: u64) -> Result<Guard> {
    loop {
        let it = state(&mut guard)?;
        if it.is_done(stream, seq) {
            return Ok(guard);
        }
        guard = match it.step(stream) {
            Step::Run(at) => run_one(guard, at)?,
            Step::Wait => wait(guard),
        };
    }
}

/// Waits for all that was queued on a stream; gives the context's error.
pub(super) fn drain(mut guard: Guard, stream: Handle) -> Result<Guard> {
    let (device, seq) = match state(&mut guard)?.streams.get(&stream) {
        Some(queue) => (queue.device, queue.issued),
        None => return Err(code::INVALID_HANDLE),
    };
    guard = complete(guard, stream, seq)?;
    match state(&mut guard)?.devices[device].error {
        0 => Ok(guard),
        error => Err(error),
    }
}

/// Waits for all streams of a device.
pub(super) fn drain_device(mut guard: Guard, device: usize) -> Result<Guard> {
    let mut streams: Vec<(Handle, u64)> = {
        let all = state(&mut guard)?.streams.iter();
        all.filter(|(_, it)| it.device == device).map(|(handle, it)| (*handle, it.issued)).collect()
    };
    streams.sort_unstable();
    for (stream, seq) in streams {
        guard = complete(guard, stream, seq)?;
    }
    match state(&mut guard)?.devices[device].error {
        0 => Ok(guard),
        error => Err(error),
    }
}

/// Runs one queued command of a random stream, if one can run.
fn run_something(mut guard: Guard) -> Result<Guard> {
    let it = state(&mut guard)?;
    let waiting = it.streams.iter().filter(|(_, it)| !it.queue.is_empty());
    let mut streams: Vec<Handle> = waiting.map(|(handle, _)| *handle).collect();
    streams.sort_unstable();
    let at = it.random.below(streams.len());
    let Some(Step::Run(stream)) = streams.get(at).map(|stream| it.step(*stream)) else { return Ok(guard) };
    // A launch that hangs must not hang the call that only queues.
    let launches = |work: &Work| matches!(work, Work::Kernel(_) | Work::Graph(_));
    if !it.settings.injections.is_empty() && it.streams[&stream].queue.front().is_some_and(launches) {
        return Ok(guard);
    }
    run_one(guard, stream)
}

/// Runs the first command of a stream.
fn run_one(mut guard: Guard, stream: Handle) -> Result<Guard> {
    let it = state(&mut guard)?;
    let Some(queue) = it.streams.get_mut(&stream) else { return Ok(guard) };
    let Some(work) = queue.queue.pop_front() else { return Ok(guard) };
    queue.busy = true;
    let device = queue.device;
    let dead = it.devices[device].error != 0;
    drop(guard);
    if !dead {
        perform(device, &work);
    }
    let mut guard = lock();
    if let Some(it) = guard.as_mut()
        && let Some(queue) = it.streams.get_mut(&stream)
    {
        queue.busy = false;
        queue.completed += 1;
        if queue.destroyed && queue.queue.is_empty() {
            it.streams.remove(&stream);
        }
    }
    notify();
    Ok(guard)
}

/// Runs a command, with no lock held.
fn perform(device: usize, work: &Work) {
    let error = match work {
        Work::Kernel(launch) => run_kernel(device, launch),
        Work::Copy { to, from, bytes } => copy(to, from, *bytes).err(),
        Work::Set { to, value, size, count } => set(*to, *value, *size, *count).err(),
        Work::Host(call) => {
            // SAFETY: the caller of `cuLaunchHostFunc` promises that the function can be called.
            unsafe { host::call(*call) };
            None
        }
        Work::Free(address) => (!free_now(*address)).then(|| wrong_free(*address)),
        Work::Record { event } => {
            if let Some(it) = lock().as_mut().and_then(|it| it.events.get_mut(event)) {
                it.time = Some(std::time::Instant::now());
            }
            None
        }
        Work::Graph(nodes) => {
            run_graph(device, nodes);
            None
        }
        Work::Wait { .. } | Work::Nothing => None,
    };
    if let Some(error) = error.filter(|error| *error != 0) {
        fail(device, error);
    }
}

/// Notes that what a queue frees is no allocation; gives the error.
fn wrong_free(address: u64) -> u32 {
    let kind = Kind::UseAfterFree;
    let what = "cuMemFreeAsync of what is no allocation, or no longer".to_owned();
    let finding =
        Finding { kind, kernel: String::new(), line: 0, cta: [0; 3], thread: 0, address, what, count: 1 };
    eprintln!("cuda-emulator: {finding}");
    if let Some(it) = lock().as_mut() {
        it.findings.push(finding);
    }
    kind.error()
}

/// Sets the error of a device's context.
fn fail(device: usize, error: u32) {
    if let Some(it) = lock().as_mut()
        && it.devices[device].error == 0
    {
        it.devices[device].error = error;
    }
}

/// Runs nodes in a random order among those that their dependencies allow.
fn run_graph(device: usize, nodes: &[Node]) {
    let mut random = match lock().as_mut() {
        Some(it) => Random(it.random.next()),
        None => return,
    };
    let mut done = vec![false; nodes.len()];
    for _ in 0..nodes.len() {
        let ready = |at: &usize| !done[*at] && nodes[*at].after.iter().all(|it| done[*it]);
        let ready: Vec<usize> = (0..nodes.len()).filter(ready).collect();
        let Some(at) = ready.get(random.below(ready.len())).copied() else { return };
        if lock().as_ref().is_none_or(|it| it.devices[device].error != 0) {
            return;
        }
        perform(device, &nodes[at].work);
        done[at] = true;
    }
}

/// The memory of a device.
pub(super) fn machine(device: usize) -> Option<Arc<Mutex<Machine>>> {
    lock().as_ref().and_then(|it| it.devices.get(device)).map(|it| it.machine.clone())
}

fn enter(machine: &Mutex<Machine>) -> MutexGuard<'_, Machine> {
    machine.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn run_kernel(device: usize, launch: &Launch) -> Option<u32> {
    let injected = lock().as_mut()?.injected_launch(device);
    if let Some(injection) = injected {
        let function = &launch.module.program.functions[launch.kernel];
        let kind = if injection.error == 0 { Kind::Hang } else { Kind::Injected };
        let what = if injection.error == 0 { "hangs, as asked" } else { "fails, as asked" };
        let finding = Finding {
            kind,
            kernel: function.name.clone(),
            line: 0,
            cta: [0; 3],
            thread: 0,
            address: 0,
            what: format!("launch {} of device {device} {what}", injection.launch),
            count: 1,
        };
        if injection.error != 0 {
            lock().as_mut()?.findings.push(finding);
            return Some(injection.error);
        }
        return hang(finding);
    }
    let machine = machine(device)?;
    let start = std::time::Instant::now();
    let report = enter(&machine).run(&launch.module.program, launch.kernel, launch.shape, &launch.params);
    if std::env::var_os("CUDA_EMULATOR_STATS").is_some() {
        let function = &launch.module.program.functions[launch.kernel];
        let (seconds, lanes) = (start.elapsed().as_secs_f64(), report.lane_operations);
        let rate = lanes as f64 / seconds / 1e6;
        eprintln!("cuda-emulator: {}: {lanes} lane operations, {rate:.0} million a second", function.name);
    }
    Some(conclude(report))
}

fn conclude(report: Report) -> u32 {
    if !report.printed.is_empty() {
        print!("{}", report.printed);
    }
    for finding in report.findings.iter().take(5) {
        eprintln!("cuda-emulator: {finding}");
    }
    lock().as_mut().map_or(0, |it| it.keep(report.findings))
}

/// Waits until hanging launches are released.
fn hang(finding: Finding) -> Option<u32> {
    let mut guard = lock();
    let before = {
        let it = guard.as_mut()?;
        it.findings.push(finding);
        it.releases
    };
    while guard.as_ref().is_some_and(|it| it.releases == before) {
        guard = wait(guard);
    }
    Some(code::TIMEOUT)
}

/// The device that an address belongs to.
pub(super) fn owner(address: u64) -> Option<usize> {
    let guard = lock();
    let it = guard.as_ref()?;
    let index = device_of(address)?;
    (index < it.devices.len()).then_some(index)
}

fn machine_of(address: u64) -> Result<Arc<Mutex<Machine>>> {
    owner(address).and_then(machine).ok_or(code::INVALID_VALUE)
}

fn copy(to: &End, from: &End, bytes: usize) -> Result {
    let note = |finding: Finding| {
        eprintln!("cuda-emulator: {finding}");
        let error = finding.kind.error();
        if let Some(it) = lock().as_mut() {
            it.findings.push(finding);
        }
        error
    };
    // Bytes, and which of them were never written.
    let mut unwritten = Vec::new();
    let mut gap = None;
    let data = match from {
        End::Staged(data) => data.as_ref().clone(),
        // SAFETY: the caller of the copy promises that the source is readable until it is complete.
        End::Host(address) => unsafe { host::read(*address, bytes) },
        End::Device(address) => {
            let machine = machine_of(*address)?;
            let mut machine = enter(&machine);
            if matches!(to, End::Device(_)) {
                unwritten = machine.unwritten(*address, bytes);
            }
            let read = machine.read(*address, bytes);
            if let End::Host(_) = to
                && let Some(at) = machine.first_unwritten(*address, bytes)
            {
                gap = Some(address + at as u64);
            }
            // The state is never locked by who holds a machine.
            drop(machine);
            read.map_err(note)?
        }
    };
    match to {
        End::Device(address) => {
            let machine = machine_of(*address)?;
            let mut machine = enter(&machine);
            let written = machine.write(*address, &data);
            machine.unwrite(*address, &unwritten);
            drop(machine);
            written.map_err(note)?;
        }
        // SAFETY: the caller of the copy promises that the target is writable until it is complete.
        End::Host(address) => unsafe { host::write(*address, &data) },
        End::Staged(_) => {}
    }
    match gap {
        Some(address) => unwritten_download(address, bytes),
        None => Ok(()),
    }
}

/// Notes that the host reads bytes that nobody wrote; gives the error that findings of that kind make.
fn unwritten_download(address: u64, bytes: usize) -> Result {
    let kind = Kind::Uninitialised;
    let what = format!("a copy of {bytes} bytes to the host reads memory that was never written");
    let finding =
        Finding { kind, kernel: String::new(), line: 0, cta: [0; 3], thread: 0, address, what, count: 1 };
    eprintln!("cuda-emulator: {finding}");
    match lock().as_mut().map_or(0, |it| it.keep(vec![finding])) {
        0 => Ok(()),
        error => Err(error),
    }
}

fn set(to: u64, value: u32, size: usize, count: usize) -> Result {
    let machine = machine_of(to)?;
    if value == 0 && enter(&machine).zero_sparsely(to, size * count) {
        return Ok(());
    }
    let data = value.to_le_bytes()[..size].repeat(count);
    copy(&End::Device(to), &End::Staged(Arc::new(data)), size * count)
}

/// Frees an allocation; tells whether there was one.
pub(super) fn free_now(address: u64) -> bool {
    match machine_of(address) {
        Ok(machine) => enter(&machine).free(address),
        Err(_) => false,
    }
}

/// Runs one command towards a place of a stream; tells by an error that it is not reached.
pub(super) fn progress_to(mut guard: Guard, stream: Handle, seq: u64) -> Result {
    let it = state(&mut guard)?;
    if it.is_done(stream, seq) {
        return Ok(());
    }
    if let Step::Run(at) = it.step(stream) {
        guard = run_one(guard, at)?;
        let it = state(&mut guard)?;
        let error = it.streams.get(&stream).map_or(0, |queue| it.devices[queue.device].error);
        if error != 0 {
            return Err(error);
        }
    }
    // The caller learns of it when it asks again, as it would of work that ends meanwhile.
    Err(code::NOT_READY)
}

/// Runs one command towards the end of a stream.
pub(super) fn progress(mut guard: Guard, stream: Handle) -> Result {
    let seq = state(&mut guard)?.streams.get(&stream).map_or(0, |it| it.issued);
    progress_to(guard, stream, seq)
}
