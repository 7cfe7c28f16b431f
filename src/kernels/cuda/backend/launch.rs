//! A GPU with its loaded kernels.
//!
//! Invariant: every launch of a kernel is here, and its arguments are checked against the lengths of buffers.

use super::program::KernelName;
use crate::backend::DeviceError;
use crate::cuda::{Arguments, Context, CudaBuf, Grid, Kernel};
use std::collections::HashMap;
use std::panic::resume_unwind;

/// Threads of a block of kernels that work on single numbers.
pub(super) const THREADS: u32 = 256;

/// A GPU with its loaded kernels.
pub(super) struct Device {
    pub context: Context,
    kernels: HashMap<KernelName, Kernel>,
}

impl Device {
    /// Wraps a GPU.
    pub fn new(context: Context) -> Device {
        Device { context, kernels: HashMap::new() }
    }

    /// Compiles and loads a kernel, unless it is loaded.
    pub fn load(&mut self, name: KernelName) -> Result<(), DeviceError> {
        self.kernel(name).map(|_| ())
    }

    /// Queues a launch of a kernel with this number of blocks and threads of a block. Does nothing without
    /// blocks.
    pub fn launch(
        &mut self,
        name: KernelName,
        (blocks, threads): ([usize; 3], u32),
        arguments: Arguments,
    ) -> Result<(), DeviceError> {
        self.launch_shared(name, (blocks, threads, 0), arguments)
    }

    /// Queues a launch as [`Device::launch`] does, with bytes of shared memory besides those that the kernel
    /// declares, together at most 48 KiB.
    pub fn launch_shared(
        &mut self,
        name: KernelName,
        (blocks, threads, shared): ([usize; 3], u32, usize),
        arguments: Arguments,
    ) -> Result<(), DeviceError> {
        if blocks.contains(&0) {
            return Ok(());
        }
        let blocks = blocks.map(|count| u32::try_from(count).expect("the limits keep grids small"));
        let shared = u32::try_from(shared).expect("shared memory is checked when shapes are; this is a bug");
        let kernel = self.kernel(name)?;
        let grid = Grid { blocks, threads, shared };
        // Sound: each kernel of this crate is launched in one place, with its parameters in order; each
        // buffer is as long as the argument says, and lives until the work is done, since the driver frees
        // memory after all work that is queued. The suites run every kernel on the emulator, which checks all
        // accesses.
        unsafe { self.context.launch(kernel, grid, arguments) }
    }

    fn kernel(&mut self, name: KernelName) -> Result<Kernel, DeviceError> {
        if let Some(kernel) = self.kernels.get(&name) {
            return Ok(*kernel);
        }
        let kernel = self.context.kernel(name.source.program(), &name.defines(), name.entry, 0)?;
        self.kernels.insert(name, kernel);
        Ok(kernel)
    }
}

/// Returns the blocks of [`THREADS`] threads for `n` numbers.
pub(super) fn blocks_for(n: usize) -> [usize; 3] {
    [n.div_ceil(THREADS as usize), 1, 1]
}

/// Returns the value, or unwinds with the error as the payload, without calling the panic hook: operations
/// return no errors, and a device that fails is built anew.
pub(super) fn unwind<T>(outcome: Result<T, DeviceError>) -> T {
    outcome.unwrap_or_else(|error| resume_unwind(Box::new(error)))
}

/// Returns the bytes of `n` numbers.
pub(super) fn f32_bytes(n: usize) -> usize {
    n * size_of::<f32>()
}

/// Asserts that a buffer of numbers is as long as its shape, of `n` numbers.
pub(super) fn check_len(buf: &CudaBuf, n: usize) {
    assert!(buf.len() >= f32_bytes(n), "a buffer of {} bytes for {n} numbers", buf.len());
}
