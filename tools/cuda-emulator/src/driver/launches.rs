//! Launches of kernels.

use super::code::{self, Result};
use super::devices::MULTIPROCESSORS;
use super::entry::interface;
use super::queue::issue;
use super::state::{Function, Handle, Launch, State, Work, lock, state};
use crate::machine::Shape;
use std::ffi::c_void;
use std::sync::Arc;

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// `CUlaunchAttribute`.
#[repr(C)]
pub struct Attribute {
    id: u32,
    pad: u32,
    value: [u32; 16],
}

/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `CU_LAUNCH_PARAM_BUFFER_SIZE`.
const EXTRA_POINTER: usize = 1;
const EXTRA_SIZE: usize = 2;

/// Reads a kernel's parameters: an array of pointers, or one buffer.
fn params(
    function: &Function,
    pointers: *const *const c_void,
    extra: *const *const c_void,
) -> Result<Vec<u8>> {
    let kernel = &function.module.program.functions[function.kernel];
    let mut bytes = vec![0; kernel.param_bytes() as usize];
    if !extra.is_null() && pointers.is_null() {
        let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
        let mut at = 0;
        loop {
            // SAFETY: the caller ends the list with a zero, and gives a value after each key.
            let (key, value) = unsafe { (*extra.add(at) as usize, *extra.add(at + 1)) };
            match key {
                0 => break,
                EXTRA_POINTER => buffer = value.cast(),
                // SAFETY: the caller passes a pointer to the size.
                EXTRA_SIZE => size = unsafe { *value.cast::<usize>() },
                _ => return Err(code::INVALID_VALUE),
            }
            at += 2;
        }
        if buffer.is_null() || size < bytes.len() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller passes a buffer of that size.
        return Ok(unsafe { std::slice::from_raw_parts(buffer, bytes.len()) }.to_vec());
    }
    for (at, (offset, size)) in kernel.params.iter().enumerate() {
        if pointers.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller passes a pointer for each parameter of the kernel.
        let from = unsafe { *pointers.add(at) };
        if from.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let (offset, size) = (*offset as usize, *size as usize);
        // SAFETY: each pointer leads to as many bytes as the kernel declares.
        bytes[offset..offset + size]
            .copy_from_slice(unsafe { std::slice::from_raw_parts(from.cast(), size) });
    }
    Ok(bytes)
}

impl State {
    fn check(&self, function: &Function, shape: &Shape) -> Result {
        let kernel = &function.module.program.functions[function.kernel];
        let threads = shape.block.iter().map(|it| u64::from(*it)).product::<u64>();
        let limits = shape.block[0] <= 1024 && shape.block[1] <= 1024 && shape.block[2] <= 64;
        let grid = shape.grid[0] <= i32::MAX as u32 && shape.grid[1] <= 65_535 && shape.grid[2] <= 65_535;
        let empty = shape.grid.contains(&0) || shape.block.contains(&0);
        if empty || !limits || !grid || threads > 1024 {
            return Err(code::INVALID_VALUE);
        }
        if threads > u64::from(kernel.max_threads.unwrap_or(1024)) {
            return Err(code::OUT_OF_RESOURCES);
        }
        if kernel.required_threads.is_some_and(|required| required != shape.block) {
            return Err(code::INVALID_VALUE);
        }
        if shape.dynamic_shared > function.max_dynamic_shared {
            return Err(code::INVALID_VALUE);
        }
        if shape.cooperative {
            let ctas: u64 = shape.grid.iter().map(|it| u64::from(*it)).product();
            let resident = self.occupancy(function, threads as u32, shape.dynamic_shared);
            if ctas > u64::from(resident) * MULTIPROCESSORS as u64 {
                return Err(code::COOPERATIVE_TOO_LARGE);
            }
        }
        Ok(())
    }
}

fn launch(
    handle: Handle,
    shape: Shape,
    stream: Handle,
    pointers: *const *const c_void,
    extra: *const *const c_void,
) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    let device = it.healthy()?;
    let stream = it.stream(stream)?;
    let function = it.functions.get(&handle).cloned().ok_or(code::INVALID_HANDLE)?;
    if function.device != device || it.streams[&stream].device != device {
        return Err(code::INVALID_HANDLE);
    }
    it.check(&function, &shape)?;
    let params = params(&function, pointers, extra)?;
    let launch = Launch { module: function.module, kernel: function.kernel, shape, params };
    issue(guard, stream, Work::Kernel(Arc::new(launch))).map(drop)
}

interface! {
    fn cuLaunchKernel(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        dynamic_shared: u32,
        stream: Handle,
        params: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch(function, Shape { grid, block, dynamic_shared, cooperative: false }, stream, params, extra)
    }

    fn cuLaunchCooperativeKernel(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        dynamic_shared: u32,
        stream: Handle,
        params: *const *const c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, dynamic_shared, cooperative: true };
        launch(function, shape, stream, params, std::ptr::null())
    }

    fn cuLaunchKernelEx(
        config: *const Config,
        function: Handle,
        params: *const *const c_void,
        extra: *const *const c_void,
    ) {
        if config.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller passes a configuration, and as many attributes as it says.
        let (config, attributes) = unsafe {
            let config = &*config;
            let none = config.attributes.is_null() || config.count == 0;
            let count = if none { 0 } else { config.count as usize };
            let list = if none { &[] } else { std::slice::from_raw_parts(config.attributes, count) };
            (config, list)
        };
        let mut cooperative = false;
        for attribute in attributes {
            let _ = attribute.pad;
            match attribute.id {
                2 => cooperative = attribute.value[0] != 0,
                // Clusters of more than one CTA are not emulated.
                4 if attribute.value[..3] != [1, 1, 1] => return Err(code::NOT_SUPPORTED),
                _ => {}
            }
        }
        let (grid, block) = (config.grid, config.block);
        let shape = Shape { grid, block, dynamic_shared: config.dynamic_shared, cooperative };
        launch(function, shape, config.stream, params, extra)
    }
}
