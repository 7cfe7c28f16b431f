//! Functions: attributes and occupancy.

use super::code::{self, Result};
use super::devices::largest_shared;
use super::entry::{interface, put};
use super::state::{Function, Handle, State, lock, state};
use std::ffi::{c_int, c_void};

/// Threads that a multiprocessor holds.
const THREADS: u32 = 2048;
/// CTAs that a multiprocessor holds.
const CTAS: u32 = 32;
/// Bytes of shared memory that the system takes of each CTA.
const RESERVED: u32 = 1024;

/// A function attribute by its number in `CUfunction_attribute`.
fn attribute(function: &Function, number: i32) -> Result<i32> {
    let kernel = &function.module.program.functions[function.kernel];
    let target = function.module.program.target as i32;
    Ok(match number {
        0 => kernel.max_threads.unwrap_or(1024).min(1024) as i32,
        1 => kernel.shared as i32,
        2 => 0,
        3 => kernel.local as i32,
        // Registers are PTX's here, of which ptxas needs fewer; 255 is the most.
        4 => kernel.planes.clamp(16, 255) as i32,
        5 | 6 => target,
        7 => 0,
        8 => function.max_dynamic_shared as i32,
        9 => -1,
        _ => return Err(code::INVALID_VALUE),
    })
}

impl State {
    /// CTAs of a function that a multiprocessor holds at once.
    pub(super) fn occupancy(&self, function: &Function, threads: u32, dynamic: u32) -> u32 {
        let kernel = &function.module.program.functions[function.kernel];
        let threads = threads.max(1).next_multiple_of(32);
        let shared = kernel.shared.next_multiple_of(128) + dynamic + RESERVED;
        let all_shared = largest_shared(self.settings.arch) as u32 + RESERVED;
        (THREADS / threads).min(all_shared / shared).min(CTAS)
    }
}

fn blocks(to: *mut c_int, function: Handle, threads: c_int, dynamic: usize) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    let found = it.functions.get(&function).ok_or(code::INVALID_HANDLE)?;
    put(to, it.occupancy(found, threads.max(0) as u32, dynamic as u32) as c_int)
}

interface! {
    fn cuFuncGetAttribute(to: *mut c_int, number: c_int, function: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        put(to, attribute(it.functions.get(&function).ok_or(code::INVALID_HANDLE)?, number)?)
    }

    fn cuFuncSetAttribute(function: Handle, number: c_int, value: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let most = largest_shared(it.settings.arch);
        let found = it.functions.get_mut(&function).ok_or(code::INVALID_HANDLE)?;
        let fixed = found.module.program.functions[found.kernel].shared as i32;
        match number {
            8 if (0..=most - fixed).contains(&value) => {
                found.max_dynamic_shared = value as u32;
                Ok(())
            }
            9..=15 => Ok(()),
            _ => Err(code::INVALID_VALUE),
        }
    }

    fn cuFuncSetCacheConfig(function: Handle, _config: c_int) {
        state(&mut lock())?.functions.get(&function).map(drop).ok_or(code::INVALID_HANDLE)
    }

    fn cuFuncGetModule(_to: *mut Handle, _function: Handle) {
        Err(code::NOT_SUPPORTED)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        to: *mut c_int,
        function: Handle,
        threads: c_int,
        dynamic: usize,
    ) {
        blocks(to, function, threads, dynamic)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        to: *mut c_int,
        function: Handle,
        threads: c_int,
        dynamic: usize,
        _flags: u32,
    ) {
        blocks(to, function, threads, dynamic)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(
        to: *mut usize,
        function: Handle,
        ctas: c_int,
        _threads: c_int,
    ) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let found = it.functions.get(&function).ok_or(code::INVALID_HANDLE)?;
        let kernel = &found.module.program.functions[found.kernel];
        let each = (largest_shared(it.settings.arch) as u32 + RESERVED) / ctas.max(1) as u32;
        put(to, each.saturating_sub(RESERVED + kernel.shared) as usize)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: *mut c_int,
        block: *mut c_int,
        function: Handle,
        _shared: *const c_void,
        _dynamic: usize,
        limit: c_int,
    ) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let most = attribute(it.functions.get(&function).ok_or(code::INVALID_HANDLE)?, 0)?;
        let threads = if limit > 0 { most.min(limit) } else { most };
        put(grid, super::devices::MULTIPROCESSORS * (THREADS as i32 / threads))?;
        put(block, threads)
    }
}
