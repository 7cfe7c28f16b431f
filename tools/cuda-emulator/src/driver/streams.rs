//! Streams and functions of the host in them.

use super::code;
use super::entry::{interface, put};
use super::queue::{drain, issue};
use super::state::{Handle, HostCall, Work, context_of, lock, state};
use std::ffi::{c_int, c_void};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

fn create(to: *mut Handle, flags: u32) -> super::code::Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    let device = it.healthy()?;
    if flags > NON_BLOCKING {
        return Err(code::INVALID_VALUE);
    }
    let handle = it.add_stream(device, flags & NON_BLOCKING == 0);
    put(to, handle)
}

interface! {
    fn cuStreamCreate(to: *mut Handle, flags: u32) {
        create(to, flags)
    }

    fn cuStreamCreateWithPriority(to: *mut Handle, flags: u32, _priority: c_int) {
        create(to, flags)
    }

    fn cuStreamDestroy_v2(stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        if stream <= 2 {
            return Err(code::INVALID_HANDLE);
        }
        let handle = it.stream(stream)?;
        let Some(queue) = it.streams.get_mut(&handle) else { return Err(code::INVALID_HANDLE) };
        queue.destroyed = true;
        let capture = queue.capture.take();
        if queue.queue.is_empty() && !queue.busy {
            it.streams.remove(&handle);
        }
        if let Some(capture) = capture {
            it.invalidate(capture);
        }
        Ok(())
    }

    fn cuStreamSynchronize(stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        it.not_capturing(stream)?;
        drain(guard, stream).map(drop)
    }

    fn cuStreamQuery(stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        it.not_capturing(stream)?;
        super::queue::progress(guard, stream)
    }

    fn cuStreamGetCtx(stream: Handle, to: *mut Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let stream = it.stream(stream)?;
        put(to, context_of(it.streams[&stream].device))
    }

    fn cuStreamGetFlags(stream: Handle, to: *mut u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let stream = it.stream(stream)?;
        put(to, u32::from(!it.streams[&stream].blocking))
    }

    fn cuStreamGetPriority(stream: Handle, to: *mut c_int) {
        state(&mut lock())?.stream(stream)?;
        put(to, 0)
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        let Some(found) = it.events.get(&event) else { return Err(code::INVALID_HANDLE) };
        if let Some((capture, nodes)) = found.capture.clone() {
            return it.join_capture(stream, capture, &nodes);
        }
        let recorded = found.recorded;
        if let Some(capture) = it.streams[&stream].capture {
            it.invalidate(capture);
            return Err(code::CAPTURE_ISOLATION);
        }
        match recorded {
            Some((other, seq)) if other != stream => {
                issue(guard, stream, Work::Wait { stream: other, seq }).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn cuLaunchHostFunc(
        stream: Handle,
        function: Option<unsafe extern "C" fn(*mut c_void)>,
        argument: *mut c_void,
    ) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let stream = it.stream(stream)?;
        let function = function.ok_or(code::INVALID_VALUE)?;
        let work = Work::Host(HostCall { function, argument: argument as usize });
        issue(guard, stream, work).map(drop)
    }
}
