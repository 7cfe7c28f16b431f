//! Capture of streams into graphs, and what it forbids.

use super::code::{self, Result};
use super::state::{CAPTURE_MODE, Capture, Handle, Node, State, Work};
use std::thread;

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

impl State {
    /// Begins to capture a stream.
    pub(super) fn begin_capture(&mut self, stream: Handle, mode: u32) -> Result {
        let queue = &self.streams[&stream];
        if mode > RELAXED {
            return Err(code::INVALID_VALUE);
        }
        if stream == self.devices[queue.device].legacy {
            return Err(code::CAPTURE_UNSUPPORTED);
        }
        if queue.capture.is_some() {
            return Err(code::CAPTURE_UNSUPPORTED);
        }
        let handle = self.handle();
        let capture = Capture {
            origin: stream,
            mode,
            thread: thread::current().id(),
            nodes: Vec::new(),
            invalid: false,
        };
        self.captures.insert(handle, capture);
        self.enter_capture(stream, handle, Vec::new());
        Ok(())
    }

    fn enter_capture(&mut self, stream: Handle, capture: Handle, frontier: Vec<usize>) {
        if let Some(queue) = self.streams.get_mut(&stream) {
            queue.capture = Some(capture);
            queue.frontier = frontier;
        }
    }

    /// Ends a capture; gives its nodes.
    pub(super) fn end_capture(&mut self, stream: Handle) -> Result<Vec<Node>> {
        let Some(handle) = self.streams[&stream].capture else { return Err(code::CAPTURE_UNSUPPORTED) };
        let capture = &self.captures[&handle];
        if capture.origin != stream {
            return Err(code::CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(code::CAPTURE_WRONG_THREAD);
        }
        let frontier = self.streams[&stream].frontier.clone();
        self.streams.values_mut().filter(|it| it.capture == Some(handle)).for_each(|it| it.capture = None);
        for event in
            self.events.values_mut().filter(|it| it.capture.as_ref().is_some_and(|it| it.0 == handle))
        {
            event.capture = None;
        }
        let Some(capture) = self.captures.remove(&handle) else { return Err(code::CAPTURE_INVALIDATED) };
        if capture.invalid {
            return Err(code::CAPTURE_INVALIDATED);
        }
        let is_leaf = |at: usize| !capture.nodes.iter().any(|node| node.after.contains(&at));
        if (0..capture.nodes.len()).any(|at| is_leaf(at) && !frontier.contains(&at)) {
            return Err(code::CAPTURE_UNJOINED);
        }
        Ok(capture.nodes)
    }

    /// Adds work to the capture that a stream takes part in.
    pub(super) fn capture_node(&mut self, stream: Handle, work: Work) -> Result {
        let Some(handle) = self.streams[&stream].capture else { return Ok(()) };
        self.capture_is_valid(handle)?;
        if matches!(work, Work::Nothing) {
            return Ok(());
        }
        let after = self.streams[&stream].frontier.clone();
        let Some(capture) = self.captures.get_mut(&handle) else { return Err(code::CAPTURE_INVALIDATED) };
        capture.nodes.push(Node { work, after });
        let node = capture.nodes.len() - 1;
        self.enter_capture(stream, handle, vec![node]);
        Ok(())
    }

    /// Lets a stream wait for an event of a capture: it takes part from now on.
    pub(super) fn join_capture(&mut self, stream: Handle, capture: Handle, nodes: &[usize]) -> Result {
        self.capture_is_valid(capture)?;
        let queue = &self.streams[&stream];
        match queue.capture {
            Some(own) if own != capture => {
                self.invalidate(own);
                self.invalidate(capture);
                Err(code::CAPTURE_MERGE)
            }
            own => {
                let mut frontier = if own.is_some() { queue.frontier.clone() } else { Vec::new() };
                frontier.extend(nodes.iter().filter(|node| !queue.frontier.contains(node) || own.is_none()));
                self.enter_capture(stream, capture, frontier);
                Ok(())
            }
        }
    }

    /// Whether a capture has not failed.
    pub(super) fn capture_is_valid(&self, capture: Handle) -> Result {
        match self.captures.get(&capture) {
            Some(Capture { invalid: false, .. }) => Ok(()),
            _ => Err(code::CAPTURE_INVALIDATED),
        }
    }

    /// Lets a capture fail.
    pub(super) fn invalidate(&mut self, capture: Handle) {
        if let Some(it) = self.captures.get_mut(&capture) {
            it.invalid = true;
        }
    }

    /// Refuses to wait for a stream that is captured.
    pub(super) fn not_capturing(&mut self, stream: Handle) -> Result {
        match self.streams[&stream].capture {
            Some(capture) => {
                self.invalidate(capture);
                Err(code::CAPTURE_UNSUPPORTED)
            }
            None => self.check_legacy(stream),
        }
    }

    /// Refuses work on the legacy stream while a stream that it would wait for is captured.
    pub(super) fn check_legacy(&mut self, stream: Handle) -> Result {
        let queue = &self.streams[&stream];
        if stream != self.devices[queue.device].legacy {
            return Ok(());
        }
        let device = queue.device;
        let captured =
            |it: &&super::state::Stream| it.device == device && it.blocking && it.capture.is_some();
        match self.streams.values().find(captured).and_then(|it| it.capture) {
            Some(capture) => {
                self.invalidate(capture);
                Err(code::CAPTURE_IMPLICIT)
            }
            None => Ok(()),
        }
    }

    /// Refuses a call that may not be made while this thread, or in global mode any thread, captures.
    pub(super) fn forbid_in_capture(&mut self) -> Result {
        let mode = CAPTURE_MODE.with_borrow(|mode| *mode);
        if mode == RELAXED {
            return Ok(());
        }
        let me = thread::current().id();
        let forbids =
            |it: &Capture| (it.thread == me && it.mode != RELAXED) || (it.mode == GLOBAL && mode == GLOBAL);
        let mut found = false;
        for capture in self.captures.values_mut().filter(|it| forbids(it)) {
            capture.invalid = true;
            found = true;
        }
        if found { Err(code::CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }
}
