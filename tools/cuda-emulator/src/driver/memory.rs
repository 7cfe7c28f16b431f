//! Memory of devices and pinned memory of the host, and copies.

use super::code::{self, Result};
use super::entry::{interface, put};
use super::host;
use super::queue::{drain, drain_device, free_now, issue, machine, owner};
use super::state::{End, Handle, State, Work, context_of, lock, state};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, PoisonError};

fn alloc(to: *mut u64, bytes: usize) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    let device = it.healthy()?;
    if bytes == 0 {
        return Err(code::INVALID_VALUE);
    }
    if let Some(error) = it.injected_alloc(device) {
        return Err(error);
    }
    drop(guard);
    let machine = machine(device).ok_or(code::INVALID_DEVICE)?;
    let mut machine = machine.lock().unwrap_or_else(PoisonError::into_inner);
    put(to, machine.memory.alloc(bytes as u64).ok_or(code::OUT_OF_MEMORY)?)
}

/// Which end of a copy is the host's.
#[derive(Clone, Copy)]
enum Way {
    Up,
    Down,
    Across,
}

/// A copy that the caller waits for: on the legacy stream.
fn copy_now(way: Way, to: u64, from: u64, bytes: usize) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    it.healthy()?;
    it.forbid_in_capture()?;
    let stream = it.stream(0)?;
    let (to, from) = ends(way, to, from);
    guard = issue(guard, stream, Work::Copy { to, from, bytes })?;
    drain(guard, stream).map(drop)
}

fn ends(way: Way, to: u64, from: u64) -> (End, End) {
    match way {
        Way::Up => (End::Device(to), End::Host(from as usize)),
        Way::Down => (End::Host(to as usize), End::Device(from)),
        Way::Across => (End::Device(to), End::Device(from)),
    }
}

/// A copy in a stream. Memory that is not pinned is read at the call; for a copy to it, the caller waits.
fn copy_later(way: Way, to: u64, from: u64, bytes: usize, stream: Handle) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    it.healthy()?;
    let stream = it.stream(stream)?;
    let captured = it.streams[&stream].capture.is_some();
    let (target, mut source) = ends(way, to, from);
    if bytes == 0 {
        return Ok(());
    }
    let pageable = match way {
        Way::Up => !it.is_whole(from as usize, bytes)?,
        Way::Down => !it.is_whole(to as usize, bytes)?,
        Way::Across => false,
    };
    // A node of a graph uses the memory when it runs, whatever it is.
    if pageable
        && !captured
        && let End::Host(address) = source
    {
        // SAFETY: the caller promises that the source is readable until the call returns.
        source = End::Staged(Arc::new(unsafe { host::read(address, bytes) }));
    }
    guard = issue(guard, stream, Work::Copy { to: target, from: source, bytes })?;
    if pageable && !captured && matches!(way, Way::Down) {
        return drain(guard, stream).map(drop);
    }
    Ok(())
}

impl State {
    /// Whether a range is pinned; one that begins so and ends otherwise is refused.
    fn is_whole(&self, address: usize, bytes: usize) -> Result<bool> {
        match self.pinned_after(address) {
            0 => Ok(false),
            pinned if pinned < bytes => Err(code::INVALID_VALUE),
            _ => Ok(true),
        }
    }
}

fn set_later(to: u64, value: u32, size: usize, count: usize, stream: Handle) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    it.healthy()?;
    let stream = it.stream(stream)?;
    if !to.is_multiple_of(size as u64) {
        return Err(code::INVALID_VALUE);
    }
    issue(guard, stream, Work::Set { to, value, size, count }).map(drop)
}

fn set_now(to: u64, value: u32, size: usize, count: usize) -> Result {
    state(&mut lock())?.forbid_in_capture()?;
    set_later(to, value, size, count, 0)
}

fn pin(bytes: usize) -> Result<usize> {
    let mut guard = lock();
    let it = state(&mut guard)?;
    it.healthy()?;
    it.forbid_in_capture()?;
    let address = host::allocate(bytes);
    if address == 0 || bytes == 0 {
        return Err(code::OUT_OF_MEMORY);
    }
    it.pinned.insert(address, (bytes, true));
    Ok(address)
}

/// Forgets pinned memory once all work that could use it is done.
fn unpin(address: usize, allocated: bool) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    match it.pinned.get(&address) {
        Some((_, is)) if *is == allocated => {}
        _ => return Err(if allocated { code::INVALID_VALUE } else { code::NOT_REGISTERED }),
    }
    let live =
        |it: &State| (0..it.devices.len()).filter(|at| it.devices[*at].retained > 0).collect::<Vec<_>>();
    for device in live(it) {
        drop(guard);
        let _ = drain_device(lock(), device).map(drop);
        guard = lock();
    }
    let it = state(&mut guard)?;
    if let Some((bytes, true)) = it.pinned.remove(&address) {
        // SAFETY: it was allocated with this size, is forgotten, and queued copies are done.
        unsafe { host::free(address, bytes) };
    }
    Ok(())
}

interface! {
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        state(&mut lock())?.forbid_in_capture()?;
        alloc(to, bytes)
    }

    fn cuMemAllocAsync(to: *mut u64, bytes: usize, stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let stream = it.stream(stream)?;
        it.not_capturing(stream)?;
        drop(guard);
        alloc(to, bytes)
    }

    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return Ok(());
        }
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        it.forbid_in_capture()?;
        drop(guard);
        let device = owner(address).ok_or(code::INVALID_VALUE)?;
        drain_device(lock(), device).map(drop)?;
        if free_now(address) { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    fn cuMemFreeAsync(address: u64, stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        it.not_capturing(stream)?;
        issue(guard, stream, Work::Free(address)).map(drop)
    }

    fn cuMemAllocManaged(_to: *mut u64, _bytes: usize, _flags: u32) {
        Err(code::NOT_SUPPORTED)
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) {
        let machine = owner(address).and_then(machine).ok_or(code::NOT_FOUND)?;
        let machine = machine.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, bytes) = machine.memory.range(address).ok_or(code::NOT_FOUND)?;
        if !base.is_null() {
            put(base, start)?;
        }
        if size.is_null() { Ok(()) } else { put(size, bytes as usize) }
    }

    fn cuPointerGetAttribute(to: *mut c_void, attribute: c_int, address: u64) {
        let device = owner(address);
        match (attribute, device) {
            // Context, memory type (1 host, 2 device), device ordinal.
            (1, Some(device)) => put(to.cast(), context_of(device)),
            (2, _) => {
                let pinned = state(&mut lock())?.is_pinned(address as usize);
                let kind = if device.is_some() { 2u32 } else { 1 };
                if kind == 2 || pinned { put(to.cast(), kind) } else { Err(code::INVALID_VALUE) }
            }
            (9, Some(device)) => put(to.cast(), device as c_int),
            _ => Err(code::INVALID_VALUE),
        }
    }

    fn cuMemHostAlloc(to: *mut usize, bytes: usize, _flags: u32) {
        put(to, pin(bytes)?)
    }

    fn cuMemAllocHost_v2(to: *mut usize, bytes: usize) {
        put(to, pin(bytes)?)
    }

    fn cuMemFreeHost(address: usize) {
        unpin(address, true)
    }

    fn cuMemHostRegister_v2(address: usize, bytes: usize, _flags: u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        if address == 0 || bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        if it.is_pinned(address) || it.is_pinned(address + bytes - 1) {
            return Err(code::REGISTERED);
        }
        it.pinned.insert(address, (bytes, false));
        Ok(())
    }

    fn cuMemHostUnregister(address: usize) {
        unpin(address, false)
    }

    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now(Way::Up, to, from, bytes)
    }

    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) {
        copy_now(Way::Down, to, from, bytes)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now(Way::Across, to, from, bytes)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy_later(Way::Up, to, from, bytes, stream)
    }

    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy_later(Way::Down, to, from, bytes, stream)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy_later(Way::Across, to, from, bytes, stream)
    }

    fn cuMemcpyPeer(to: u64, _to_context: Handle, from: u64, _from_context: Handle, bytes: usize) {
        copy_now(Way::Across, to, from, bytes)
    }

    fn cuMemcpyPeerAsync(
        to: u64,
        _to_context: Handle,
        from: u64,
        _from_context: Handle,
        bytes: usize,
        stream: Handle,
    ) {
        copy_later(Way::Across, to, from, bytes, stream)
    }

    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        set_now(to, u32::from(value), 1, count)
    }

    fn cuMemsetD16_v2(to: u64, value: u16, count: usize) {
        set_now(to, u32::from(value), 2, count)
    }

    fn cuMemsetD32_v2(to: u64, value: u32, count: usize) {
        set_now(to, value, 4, count)
    }

    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) {
        set_later(to, u32::from(value), 1, count, stream)
    }

    fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: Handle) {
        set_later(to, u32::from(value), 2, count, stream)
    }

    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle) {
        set_later(to, value, 4, count, stream)
    }
}
