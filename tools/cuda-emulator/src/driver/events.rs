//! Events.

use super::code;
use super::entry::{interface, put};
use super::queue::{complete, issue, progress_to};
use super::state::{Event, Handle, State, Work, lock, state};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

impl State {
    /// The place of an event, if it can be waited for by the host.
    fn place(&mut self, event: Handle) -> super::code::Result<Option<(Handle, u64)>> {
        let found = self.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        if let Some((capture, _)) = found.capture {
            self.invalidate(capture);
            return Err(code::CAPTURED_EVENT);
        }
        Ok(found.recorded)
    }

    fn milliseconds(&self, start: Handle, end: Handle) -> super::code::Result<f32> {
        let find = |handle| self.events.get(&handle).ok_or(code::INVALID_HANDLE);
        let (start, end) = (find(start)?, find(end)?);
        if start.device != end.device
            || !(start.timing && end.timing)
            || start.recorded.is_none()
            || end.recorded.is_none()
        {
            return Err(code::INVALID_HANDLE);
        }
        let (Some(from), Some(to)) = (start.time, end.time) else { return Err(code::NOT_READY) };
        Ok(to.saturating_duration_since(from).as_secs_f32() * 1000.0)
    }
}

interface! {
    fn cuEventCreate(to: *mut Handle, flags: u32) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.healthy()?;
        let handle = it.handle();
        let timing = flags & DISABLE_TIMING == 0;
        it.events.insert(handle, Event { device, timing, ..Event::default() });
        put(to, handle)
    }

    fn cuEventDestroy_v2(event: Handle) {
        state(&mut lock())?.events.remove(&event).map(drop).ok_or(code::INVALID_HANDLE)
    }

    fn cuEventRecord(event: Handle, stream: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let stream = it.stream(stream)?;
        // Both belong to one context.
        let device = it.streams[&stream].device;
        if it.events.get(&event).is_none_or(|it| it.device != device) {
            return Err(code::INVALID_HANDLE);
        }
        if let Some(capture) = it.streams[&stream].capture {
            it.capture_is_valid(capture)?;
            let nodes = it.streams[&stream].frontier.clone();
            if let Some(found) = it.events.get_mut(&event) {
                found.capture = Some((capture, nodes));
            }
            return Ok(());
        }
        // The place is noted before anything can run: an eager command may complete it at once.
        guard = issue(guard, stream, Work::Nothing)?;
        let it = state(&mut guard)?;
        let seq = it.push(stream, Work::Record { event });
        if let Some(found) = it.events.get_mut(&event) {
            *found = Event { recorded: Some((stream, seq)), time: None, capture: None, ..*found };
        }
        Ok(())
    }

    fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: u32) {
        // SAFETY: the arguments are handed on.
        match unsafe { cuEventRecord(event, stream) } {
            0 => Ok(()),
            error => Err(error),
        }
    }

    fn cuEventSynchronize(event: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.healthy()?;
        if let Some((stream, seq)) = it.place(event)? {
            guard = complete(guard, stream, seq)?;
        }
        match state(&mut guard)?.devices[device].error {
            0 => Ok(()),
            error => Err(error),
        }
    }

    fn cuEventQuery(event: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        match it.place(event)? {
            Some((stream, seq)) => progress_to(guard, stream, seq),
            None => Ok(()),
        }
    }

    fn cuEventElapsedTime(to: *mut f32, start: Handle, end: Handle) {
        put(to, state(&mut lock())?.milliseconds(start, end)?)
    }

    fn cuEventElapsedTime_v2(to: *mut f32, start: Handle, end: Handle) {
        put(to, state(&mut lock())?.milliseconds(start, end)?)
    }
}
