//! Disks that are slow, hang or fail, as a test wants it.
//!
//! Invariant: a hook concerns only the files in the folder of its test.

use crate::model::spec::MlpSpec;
use crate::model::{ModelRef, ModelSource};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The kind of an access to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    /// The write of a matrix to a new store.
    Pack,
}

/// A function that is called before bytes at an offset of a file are read or written. It may wait, or fail.
pub type Hook = dyn Fn(Access, u64) -> io::Result<()> + Send + Sync;

static HOOKS: Mutex<Vec<(PathBuf, Arc<Hook>)>> = Mutex::new(Vec::new());

fn hooks() -> MutexGuard<'static, Vec<(PathBuf, Arc<Hook>)>> {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A hook for the files that are opened in a folder before this is dropped.
pub struct Hooked(PathBuf);

impl Hooked {
    /// Calls `hook` before each access to a file in `folder`.
    pub fn new(
        folder: &Path,
        hook: impl Fn(Access, u64) -> io::Result<()> + Send + Sync + 'static,
    ) -> Hooked {
        hooks().push((folder.to_owned(), Arc::new(hook)));
        Hooked(folder.to_owned())
    }
}

impl Drop for Hooked {
    fn drop(&mut self) {
        hooks().retain(|(folder, _)| *folder != self.0);
    }
}

/// Returns the hook for a file.
pub fn hook_for(path: &Path) -> Option<Arc<Hook>> {
    hooks().iter().find(|(folder, _)| path.starts_with(folder)).map(|(_, hook)| hook.clone())
}

/// Calls the hook for the files in a folder, before a matrix is written to a store at an offset.
pub fn before_packing(folder: &Path, offset: u64) -> io::Result<()> {
    hook_for(folder).map_or(Ok(()), |hook| hook(Access::Pack, offset))
}

/// A gate through which accesses pass only when the test lets them.
#[derive(Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    is_shut: bool,
    waiting: usize,
    /// Accesses that may pass a shut gate.
    permits: usize,
    is_over: bool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the gate is shut.
    pub fn pass(&self) {
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        while state.is_shut && state.permits == 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        state.permits = state.permits.saturating_sub(1);
        drop(state);
        self.changed.notify_all();
    }

    /// Lets accesses wait.
    pub fn shut(&self) {
        self.lock().is_shut = true;
    }

    /// Lets all accesses pass.
    pub fn open(&self) {
        self.lock().is_shut = false;
        self.changed.notify_all();
    }

    /// Waits until so many accesses wait.
    pub fn wait_for(&self, accesses: usize) {
        let mut state = self.lock();
        while state.waiting < accesses {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets accesses pass one after another while `work` runs: the disk has the least possible rate.
    pub fn slow_down<T>(&self, work: impl FnOnce() -> T) -> T {
        *self.lock() = GateState { is_shut: true, ..GateState::default() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut state = self.lock();
                while !state.is_over {
                    if state.waiting > 0 && state.permits == 0 {
                        state.permits = 1;
                        self.changed.notify_all();
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            });
            let _end = End(self);
            work()
        })
    }
}

/// Opens a gate for good when it is dropped.
struct End<'a>(&'a Gate);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.open();
    }
}

/// Returns the path of the fixture with the most layers with experts, which do not all fit into the least
/// pool.
pub fn mixture() -> String {
    let layers = |source: &ModelSource| {
        let layers = source.spec.decoder.iter().flat_map(|stack| &stack.layers);
        layers.filter(|layer| matches!(layer.mlp, MlpSpec::Experts(_))).count()
    };
    let by_layers = mixtures().into_iter().map(|(path, source)| (layers(&source), path));
    by_layers.max().unwrap().1
}

/// Returns the models of all families that have a mixture of experts.
pub fn mixtures() -> Vec<(String, ModelSource)> {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let paths = families.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let open = |path: PathBuf| {
        let source = ModelSource::open(&ModelRef::Path(path.clone()), None).unwrap();
        let layers = source.spec.decoder.iter().flat_map(|stack| &stack.layers);
        let has_experts = layers.into_iter().any(|layer| matches!(layer.mlp, MlpSpec::Experts(_)));
        has_experts.then(|| (path.display().to_string(), source))
    };
    paths.filter(|path| path.join("config.json").exists()).filter_map(open).collect()
}
