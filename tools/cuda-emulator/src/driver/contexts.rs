//! Contexts: primary ones, and which is current in a thread.

use super::code::{self, Result};
use super::entry::{interface, put};
use super::queue::{drain_device, machine};
use super::state::{Guard, Handle, context_of, current, lock, pop_current, push_current, set_current, state};
use crate::findings::{Finding, Kind};
use std::ffi::c_int;

/// Ends a device's context: work that is queued is dropped, memory freed, the error forgotten.
fn end_context(guard: &mut Guard, device: usize) -> Result {
    let it = state(guard)?;
    it.devices[device].retained = 0;
    it.devices[device].error = 0;
    it.devices[device].peers.clear();
    let (legacy, per_thread) = (it.devices[device].legacy, it.devices[device].per_thread);
    for stream in it.streams.values_mut().filter(|stream| stream.device == device) {
        stream.completed += stream.queue.len() as u64;
        stream.queue.clear();
    }
    it.streams.retain(|handle, stream| {
        stream.device != device || stream.busy || *handle == legacy || *handle == per_thread
    });
    let modules = it.modules.iter().filter(|(_, (owner, _))| *owner == device);
    let own: Vec<u64> = modules.filter_map(|(_, (_, module))| module.base).collect();
    it.modules.retain(|_, (owner, _)| *owner != device);
    it.functions.retain(|_, function| function.device != device);
    it.events.retain(|_, event| event.device != device);
    let machine = it.devices[device].machine.clone();
    let left = machine.lock().unwrap_or_else(std::sync::PoisonError::into_inner).memory.free_all();
    for (address, bytes) in left.into_iter().filter(|(address, _)| !own.contains(address)) {
        it.findings.push(Finding {
            kind: Kind::Leak,
            kernel: String::new(),
            line: 0,
            cta: [0; 3],
            thread: 0,
            address,
            what: format!("{bytes} bytes of device {device} are left when its context ends"),
            count: 1,
        });
    }
    Ok(())
}

fn release(device: c_int, all: bool) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    let device = it.device(device)?;
    let retained = it.devices[device].retained;
    if retained == 0 {
        return if all { Ok(()) } else { Err(code::INVALID_CONTEXT) };
    }
    if !all && retained > 1 {
        it.devices[device].retained -= 1;
        return Ok(());
    }
    // Work that is queued is finished, unless the context has failed.
    if it.devices[device].error == 0 {
        drop(guard);
        let finished = drain_device(lock(), device).map(drop);
        guard = lock();
        let _ = finished;
    }
    end_context(&mut guard, device)
}

interface! {
    fn cuDevicePrimaryCtxRetain(to: *mut Handle, device: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.device(device)?;
        if it.devices[device].error != 0 && it.devices[device].retained > 0 {
            return Err(it.devices[device].error);
        }
        it.devices[device].retained += 1;
        put(to, context_of(device))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        release(device, false)
    }

    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.device(device)?;
        end_context(&mut guard, device)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: u32) {
        state(&mut lock())?.device(device).map(drop)
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, active: *mut c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.device(device)?;
        put(flags, 0)?;
        put(active, c_int::from(it.devices[device].retained > 0))
    }

    fn cuCtxSetCurrent(context: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = if context == 0 { None } else { Some(it.context(context)?) };
        if device.is_some_and(|device| it.devices[device].retained == 0) {
            return Err(code::INVALID_CONTEXT);
        }
        set_current(device);
        Ok(())
    }

    fn cuCtxGetCurrent(to: *mut Handle) {
        state(&mut lock())?;
        put(to, current().map_or(0, context_of))
    }

    fn cuCtxPushCurrent_v2(context: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.context(context)?;
        if it.devices[device].retained == 0 {
            return Err(code::INVALID_CONTEXT);
        }
        push_current(device);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(to: *mut Handle) {
        let device = pop_current()?;
        if to.is_null() { Ok(()) } else { put(to, context_of(device)) }
    }

    fn cuCtxGetDevice(to: *mut c_int) {
        state(&mut lock())?;
        put(to, current()? as c_int)
    }

    fn cuCtxGetApiVersion(_context: Handle, to: *mut u32) {
        put(to, 3020)
    }

    fn cuCtxSetFlags(_flags: u32) {
        current().map(drop)
    }

    fn cuCtxGetFlags(to: *mut u32) {
        current()?;
        put(to, 0)
    }

    fn cuCtxGetLimit(to: *mut usize, _limit: c_int) {
        current()?;
        put(to, 1024)
    }

    fn cuCtxSetLimit(_limit: c_int, _value: usize) {
        current().map(drop)
    }

    fn cuCtxSetCacheConfig(_config: c_int) {
        current().map(drop)
    }

    fn cuCtxGetCacheConfig(to: *mut c_int) {
        current()?;
        put(to, 0)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        current()?;
        put(least, 0)?;
        put(greatest, -5)
    }

    fn cuCtxSynchronize() {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.healthy()?;
        it.forbid_in_capture()?;
        drain_device(guard, device).map(drop)
    }

    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let (device, peer) = (it.healthy()?, it.context(peer)?);
        if flags != 0 || device == peer {
            return Err(code::INVALID_VALUE);
        }
        if it.devices[device].peers.contains(&peer) {
            return Err(code::PEER_ENABLED);
        }
        it.devices[device].peers.push(peer);
        Ok(())
    }

    fn cuCtxDisablePeerAccess(peer: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let (device, peer) = (it.healthy()?, it.context(peer)?);
        let before = it.devices[device].peers.len();
        it.devices[device].peers.retain(|it| *it != peer);
        if it.devices[device].peers.len() == before { Err(code::PEER_NOT_ENABLED) } else { Ok(()) }
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let device = state(&mut lock())?.healthy()?;
        let machine = machine(device).ok_or(code::INVALID_DEVICE)?;
        let machine = machine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        put(free, machine.memory.free_bytes() as usize)?;
        put(total, machine.memory.total_bytes() as usize)
    }

    fn cuProfilerStart() {
        Ok(())
    }

    fn cuProfilerStop() {
        Ok(())
    }
}
