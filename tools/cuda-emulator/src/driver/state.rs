//! The state of the driver: devices, streams, events, modules and graphs, by handle.

use super::code::{self, Code, Result};
use super::settings::Settings;
use crate::exec::{Config, Random};
use crate::findings::{Finding, Kind};
use crate::machine::{Machine, Module, Shape};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::Instant;

/// A number that stands for an object, as a pointer of the interface.
pub(super) type Handle = u64;

/// One end of a copy.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// An address of a device.
    Device(u64),
    /// An address of the host, which is read or written when the copy runs.
    Host(usize),
    /// Bytes that were read at the call.
    Staged(Arc<Vec<u8>>),
}

/// A kernel launch.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) module: Module,
    pub(super) kernel: usize,
    pub(super) shape: Shape,
    pub(super) params: Vec<u8>,
}

/// A function of the host, with its argument.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostCall {
    pub(super) function: unsafe extern "C" fn(*mut c_void),
    pub(super) argument: usize,
}

/// The work of a command.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Kernel(Arc<Launch>),
    Copy {
        to: End,
        from: End,
        bytes: usize,
    },
    /// Sets `count` elements of `size` bytes to a value.
    Set {
        to: u64,
        value: u32,
        size: usize,
        count: usize,
    },
    Host(HostCall),
    Free(u64),
    /// Waits until a stream has completed so many commands.
    Wait {
        stream: Handle,
        seq: u64,
    },
    /// Notes the time of an event.
    Record {
        event: Handle,
    },
    Graph(Arc<Vec<Node>>),
    Nothing,
}

/// A node of a graph.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) work: Work,
    /// Nodes that come before it.
    pub(super) after: Vec<usize>,
}

/// A queue of work.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) device: usize,
    pub(super) queue: VecDeque<Work>,
    pub(super) issued: u64,
    pub(super) completed: u64,
    /// Whether a command runs now.
    pub(super) busy: bool,
    /// Whether the legacy stream waits for it, and it for the legacy stream.
    pub(super) blocking: bool,
    pub(super) destroyed: bool,
    pub(super) capture: Option<Handle>,
    /// Nodes of the capture that the next one comes after.
    pub(super) frontier: Vec<usize>,
}

/// An event.
#[derive(Debug, Default)]
pub(super) struct Event {
    /// The device whose context it belongs to.
    pub(super) device: usize,
    pub(super) recorded: Option<(Handle, u64)>,
    pub(super) time: Option<Instant>,
    pub(super) timing: bool,
    /// The capture that it was recorded in, and the nodes before it.
    pub(super) capture: Option<(Handle, Vec<usize>)>,
}

/// A capture that is going on.
#[derive(Debug)]
pub(super) struct Capture {
    pub(super) origin: Handle,
    pub(super) mode: u32,
    pub(super) thread: ThreadId,
    pub(super) nodes: Vec<Node>,
    pub(super) invalid: bool,
}

/// A function of a module.
#[derive(Clone, Debug)]
pub(super) struct Function {
    pub(super) device: usize,
    pub(super) module: Module,
    pub(super) kernel: usize,
    /// Bytes of dynamic shared memory that it may have.
    pub(super) max_dynamic_shared: u32,
}

/// A device and its context.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) machine: Arc<Mutex<Machine>>,
    /// Number of times that its primary context was retained.
    pub(super) retained: u32,
    /// The error that every call returns until the context ends.
    pub(super) error: u32,
    pub(super) launches: u64,
    pub(super) allocs: u64,
    pub(super) peers: Vec<usize>,
    /// Streams 0 and 2.
    pub(super) legacy: Handle,
    pub(super) per_thread: Handle,
}

/// Everything.
#[derive(Debug)]
pub(super) struct State {
    pub(super) settings: Settings,
    pub(super) devices: Vec<Device>,
    pub(super) streams: HashMap<Handle, Stream>,
    pub(super) events: HashMap<Handle, Event>,
    pub(super) modules: HashMap<Handle, (usize, Module)>,
    pub(super) functions: HashMap<Handle, Function>,
    pub(super) captures: HashMap<Handle, Capture>,
    pub(super) graphs: HashMap<Handle, Vec<Node>>,
    pub(super) execs: HashMap<Handle, Arc<Vec<Node>>>,
    /// Pinned memory: size, and whether the driver has allocated it.
    pub(super) pinned: BTreeMap<usize, (usize, bool)>,
    pub(super) findings: Vec<Finding>,
    pub(super) random: Random,
    /// Number of times that hanging launches were released.
    pub(super) releases: u64,
    next: Handle,
}

/// First context handle; the device's index is added.
const CONTEXTS: u64 = 0x7000_0000;

struct Global {
    state: Mutex<Option<State>>,
    progress: Condvar,
}

static GLOBAL: Global = Global { state: Mutex::new(None), progress: Condvar::new() };

thread_local! {
    /// Devices whose contexts are current in this thread, the last on top.
    static CURRENT: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) };
    /// The mode in which this thread treats calls that captures forbid: 0 global, 1 thread-local, 2 relaxed.
    pub(super) static CAPTURE_MODE: RefCell<u32> = const { RefCell::new(0) };
}

pub(super) type Guard = MutexGuard<'static, Option<State>>;

/// The state, or nothing before `cuInit`.
pub(super) fn lock() -> Guard {
    GLOBAL.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits until another thread completes a command.
pub(super) fn wait(guard: Guard) -> Guard {
    GLOBAL.progress.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Wakes threads that wait.
pub(super) fn notify() {
    GLOBAL.progress.notify_all();
}

/// The state in a lock.
pub(super) fn state(guard: &mut Guard) -> Result<&mut State> {
    guard.as_mut().ok_or(code::NOT_INITIALIZED)
}

/// Begins, if that has not happened.
pub(super) fn initialize() -> Result {
    let mut guard = lock();
    if guard.is_none() {
        *guard = Some(State::new(Settings::read()));
    }
    if state(&mut guard)?.devices.is_empty() { Err(code::NO_DEVICE) } else { Ok(()) }
}

/// The device whose context is current.
pub(super) fn current() -> Result<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied().flatten()).ok_or(code::INVALID_CONTEXT)
}

/// Makes a device's context current, or none.
pub(super) fn set_current(device: Option<usize>) {
    CURRENT.with_borrow_mut(|stack| match stack.last_mut() {
        Some(top) => *top = device,
        None => stack.push(device),
    });
}

/// Pushes a device's context.
pub(super) fn push_current(device: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(Some(device)));
}

/// Pops a context.
pub(super) fn pop_current() -> Result<usize> {
    CURRENT.with_borrow_mut(|stack| stack.pop().flatten()).ok_or(code::INVALID_CONTEXT)
}

/// The handle of a device's context.
pub(super) fn context_of(device: usize) -> Handle {
    CONTEXTS + device as u64
}

impl State {
    fn new(settings: Settings) -> State {
        let mut state = State {
            devices: Vec::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            captures: HashMap::new(),
            graphs: HashMap::new(),
            execs: HashMap::new(),
            pinned: BTreeMap::new(),
            findings: Vec::new(),
            random: Random(settings.seed),
            releases: 0,
            next: 0x5000_0000,
            settings,
        };
        for index in 0..state.settings.devices {
            let config = state.config(index);
            let machine = Machine::with(index, state.settings.memory, config);
            let legacy = state.add_stream(index, true);
            let per_thread = state.add_stream(index, true);
            state.devices.push(Device {
                machine: Arc::new(Mutex::new(machine)),
                retained: 0,
                error: 0,
                launches: 0,
                allocs: 0,
                peers: Vec::new(),
                legacy,
                per_thread,
            });
        }
        state
    }

    fn config(&self, device: usize) -> Config {
        let settings = &self.settings;
        Config {
            arch: settings.arch,
            seed: settings.seed.wrapping_add(device as u64),
            instructions: settings.instructions,
            global_races: settings.global_races,
            corners: settings.corners,
            coverage: settings.coverage.clone(),
        }
    }

    /// Applies settings anew: failures count from now on.
    pub(super) fn restart(&mut self) {
        self.settings = Settings { devices: self.devices.len(), ..Settings::read() };
        self.findings.clear();
        self.random = Random(self.settings.seed);
        for index in 0..self.devices.len() {
            let config = self.config(index);
            let device = &mut self.devices[index];
            (device.launches, device.allocs) = (0, 0);
            let mut machine = device.machine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            machine.config = config;
            if device.retained == 0 {
                machine.memory = crate::memory::GlobalMemory::new(index, self.settings.memory);
            }
        }
        self.releases += 1;
    }

    /// A number for a new object.
    pub(super) fn handle(&mut self) -> Handle {
        self.next += 0x10;
        self.next
    }

    /// A new stream.
    pub(super) fn add_stream(&mut self, device: usize, blocking: bool) -> Handle {
        let handle = self.handle();
        let stream = Stream {
            device,
            queue: VecDeque::new(),
            issued: 0,
            completed: 0,
            busy: false,
            blocking,
            destroyed: false,
            capture: None,
            frontier: Vec::new(),
        };
        self.streams.insert(handle, stream);
        handle
    }

    /// A device by its ordinal.
    pub(super) fn device(&self, ordinal: i32) -> Result<usize> {
        let index = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        if index < self.devices.len() { Ok(index) } else { Err(code::INVALID_DEVICE) }
    }

    /// The device of a context.
    pub(super) fn context(&self, handle: Handle) -> Result<usize> {
        let index = handle.checked_sub(CONTEXTS).ok_or(code::INVALID_CONTEXT)? as usize;
        if index < self.devices.len() { Ok(index) } else { Err(code::INVALID_CONTEXT) }
    }

    /// The current device, if its context is alive and has no error.
    pub(super) fn healthy(&self) -> Result<usize> {
        let device = current()?;
        match self.devices[device] {
            Device { retained: 0, .. } => Err(code::INVALID_CONTEXT),
            Device { error: 0, .. } => Ok(device),
            Device { error, .. } => Err(error),
        }
    }

    /// The stream that a handle of the interface names.
    pub(super) fn stream(&self, handle: Handle) -> Result<Handle> {
        match handle {
            0 | 1 => Ok(self.devices[current()?].legacy),
            2 => Ok(self.devices[current()?].per_thread),
            _ => match self.streams.get(&handle) {
                Some(stream) if !stream.destroyed => Ok(handle),
                _ => Err(code::INVALID_HANDLE),
            },
        }
    }

    /// Whether memory of the host is pinned.
    pub(super) fn is_pinned(&self, address: usize) -> bool {
        self.pinned_after(address) > 0
    }

    /// The pinned bytes from an address on.
    pub(super) fn pinned_after(&self, address: usize) -> usize {
        let before = self.pinned.range(..=address).next_back();
        before.map_or(0, |(base, (bytes, _))| (base + bytes).saturating_sub(address))
    }

    /// Keeps findings. Gives the error that they make, if any.
    pub(super) fn keep(&mut self, findings: Vec<Finding>) -> Code {
        let quiet =
            |kind| matches!(kind, Kind::Race | Kind::Uninitialised | Kind::PendingCopy | Kind::Divergence);
        let grave = findings.iter().find(|it| !quiet(it.kind));
        let first = if self.settings.record_only { grave } else { grave.or(findings.first()) };
        let error = first.map_or(0, |it| it.kind.error());
        for finding in findings {
            if self.findings.len() < 10_000 {
                self.findings.push(finding);
            }
        }
        error
    }
}
