//! Graphs.

use super::code;
use super::entry::{interface, put};
use super::queue::issue;
use super::state::{CAPTURE_MODE, Handle, Node, Work, lock, state};
use std::ffi::{c_char, c_int};
use std::mem::discriminant;
use std::sync::Arc;

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
pub struct UpdateResult {
    result: u32,
    node: usize,
    from: usize,
}

/// `CUgraphExecUpdateResult`.
const UPDATED: u32 = 0;
const TOPOLOGY_CHANGED: u32 = 2;
const TYPE_CHANGED: u32 = 3;

fn compare(old: &[Node], new: &[Node]) -> u32 {
    if old.len() != new.len() || old.iter().zip(new).any(|(old, new)| old.after != new.after) {
        return TOPOLOGY_CHANGED;
    }
    if old.iter().zip(new).any(|(old, new)| discriminant(&old.work) != discriminant(&new.work)) {
        return TYPE_CHANGED;
    }
    UPDATED
}

interface! {
    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        it.begin_capture(stream, mode)
    }

    fn cuStreamEndCapture(stream: Handle, to: *mut Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        put(to, 0)?;
        let stream = it.stream(stream)?;
        let nodes = it.end_capture(stream)?;
        let graph = it.handle();
        it.graphs.insert(graph, nodes);
        put(to, graph)
    }

    fn cuStreamIsCapturing(stream: Handle, to: *mut u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let stream = it.stream(stream)?;
        it.check_legacy(stream)?;
        let status = match it.streams[&stream].capture {
            None => 0,
            Some(capture) if it.capture_is_valid(capture).is_ok() => 1,
            Some(_) => 2,
        };
        put(to, status)
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: Handle,
        status: *mut u32,
        id: *mut u64,
        _graph: *mut Handle,
        _dependencies: *mut *const Handle,
        _count: *mut usize,
    ) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let stream = it.stream(stream)?;
        let capture = it.streams[&stream].capture;
        let valid = capture.is_some_and(|it_is| it.capture_is_valid(it_is).is_ok());
        put(status, if capture.is_none() { 0 } else if valid { 1 } else { 2 })?;
        if id.is_null() { Ok(()) } else { put(id, capture.unwrap_or(0)) }
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        if mode.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller passes a mode to read and write; null is refused above.
        let new = unsafe { mode.read() };
        if new > 2 {
            return Err(code::INVALID_VALUE);
        }
        let old = CAPTURE_MODE.with_borrow_mut(|it| std::mem::replace(it, new));
        put(mode, old)
    }

    fn cuGraphInstantiateWithFlags(to: *mut Handle, graph: Handle, flags: u64) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        // Launch from the device is not emulated; the other flags change nothing here.
        if flags & 4 != 0 {
            return Err(code::INVALID_VALUE);
        }
        let nodes = it.graphs.get(&graph).cloned().ok_or(code::INVALID_HANDLE)?;
        let exec = it.handle();
        it.execs.insert(exec, Arc::new(nodes));
        put(to, exec)
    }

    fn cuGraphInstantiate_v2(
        to: *mut Handle,
        graph: Handle,
        _node: *mut Handle,
        _log: *mut c_char,
        _len: usize,
    ) {
        // SAFETY: the arguments are handed on.
        match unsafe { cuGraphInstantiateWithFlags(to, graph, 0) } {
            0 => Ok(()),
            error => Err(error),
        }
    }

    fn cuGraphExecUpdate_v2(exec: Handle, graph: Handle, info: *mut UpdateResult) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let new = it.graphs.get(&graph).cloned().ok_or(code::INVALID_HANDLE)?;
        let old = it.execs.get_mut(&exec).ok_or(code::INVALID_HANDLE)?;
        let result = compare(old, &new);
        if !info.is_null() {
            put(info, UpdateResult { result, node: 0, from: 0 })?;
        }
        if result != UPDATED {
            return Err(code::GRAPH_UPDATE);
        }
        *old = Arc::new(new);
        Ok(())
    }

    fn cuGraphUpload(exec: Handle, stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.stream(stream)?;
        if it.execs.contains_key(&exec) { Ok(()) } else { Err(code::INVALID_HANDLE) }
    }

    fn cuGraphLaunch(exec: Handle, stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        let nodes = it.execs.get(&exec).cloned().ok_or(code::INVALID_HANDLE)?;
        issue(guard, stream, Work::Graph(nodes)).map(drop)
    }

    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let found = it.graphs.get(&graph).ok_or(code::INVALID_HANDLE)?.len();
        if nodes.is_null() {
            return put(count, found);
        }
        for at in 0..found {
            put(nodes.wrapping_add(at), graph + 1 + at as u64)?;
        }
        put(count, found)
    }

    fn cuGraphCreate(to: *mut Handle, _flags: u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let graph = it.handle();
        it.graphs.insert(graph, Vec::new());
        put(to, graph)
    }

    fn cuGraphDestroy(graph: Handle) {
        state(&mut lock())?.graphs.remove(&graph).map(drop).ok_or(code::INVALID_HANDLE)
    }

    fn cuGraphExecDestroy(exec: Handle) {
        state(&mut lock())?.execs.remove(&exec).map(drop).ok_or(code::INVALID_HANDLE)
    }

    fn cuDeviceGraphMemTrim(_device: c_int) {
        Ok(())
    }
}
