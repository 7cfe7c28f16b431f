//! Search for marked tool calls in the text of an answer.
//!
//! Invariant: text that is not part of a call is content, unchanged, except for white space and markers
//! around calls. Text that is taken for a call and turns out not to be one is content, and the search
//! continues after it.

use super::events::{EventSink, Progress};
use super::formats::{Body, Markers};
use super::json_calls::JsonCalls;
use super::pythonic::PythonicCalls;
use super::xml_calls::XmlCalls;
use crate::text::tools::Tool;
use std::sync::Arc;

/// Reader of the text of an answer, without reasoning.
#[derive(Debug)]
pub(super) struct CallReader {
    markers: &'static Markers,
    tools: Arc<[Tool]>,
    /// The calls that are being read; `None` outside of calls.
    body: Option<BodyReader>,
    /// Characters that may be the beginning of a marker.
    held: String,
    /// White space and markers, which are dropped if a call follows.
    gap: String,
    /// Text of the current calls of which nothing has been returned.
    raw: String,
    /// Whether there was no content and no call before.
    is_beginning: bool,
    /// Whether there was no content since the last call.
    is_after_call: bool,
}

#[derive(Debug)]
enum BodyReader {
    Json(JsonCalls),
    Pythonic(PythonicCalls),
    Xml(XmlCalls),
}

/// Kind of a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MarkerKind {
    Opener,
    Prelude,
    Closer,
    Bare,
}

impl CallReader {
    pub(super) fn new(markers: &'static Markers, tools: Arc<[Tool]>) -> CallReader {
        CallReader {
            markers,
            tools,
            body: None,
            held: String::new(),
            gap: String::new(),
            raw: String::new(),
            is_beginning: true,
            is_after_call: false,
        }
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, c: char, sink: &mut EventSink) {
        let Some(body) = &mut self.body else { return self.text_character(c, sink) };
        let progress = body.push(c, sink);
        if progress != Progress::Invalid {
            self.raw.push(c);
        }
        self.drop_delivered(sink);
        match progress {
            Progress::More => {}
            Progress::Done => self.end_calls(),
            Progress::Invalid => {
                self.leave_calls(sink);
                self.text_character(c, sink);
            }
        }
    }

    /// Returns what is held back at the end of the output.
    pub(super) fn finish(&mut self, sink: &mut EventSink) {
        self.search(true, sink);
        self.leave_calls(sink);
        let gap = std::mem::take(&mut self.gap);
        if !(self.is_after_call && gap.trim().is_empty()) {
            sink.content(&gap);
        }
    }

    /// Forgets text that has been returned as a part of a call.
    fn drop_delivered(&mut self, sink: &mut EventSink) {
        if sink.take_delivered() {
            self.raw.clear();
            self.gap.clear();
        }
    }

    fn end_calls(&mut self) {
        self.body = None;
        self.raw.clear();
        self.is_beginning = false;
        self.is_after_call = true;
    }

    /// Leaves calls whose text is not in the format or has ended. What has not been returned is content.
    fn leave_calls(&mut self, sink: &mut EventSink) {
        let Some(body) = &mut self.body else { return };
        let is_ended = match body {
            BodyReader::Json(calls) => calls.end_early(sink),
            BodyReader::Pythonic(_) | BodyReader::Xml(_) => false,
        };
        if is_ended {
            sink.take_delivered();
            return self.end_calls();
        }
        sink.abandon();
        sink.take_delivered();
        let raw = std::mem::take(&mut self.raw);
        self.end_calls();
        // Between two calls of a list, there is at most a comma.
        if !raw.trim_matches(|c: char| c == ',' || c.is_whitespace()).is_empty() {
            sink.content(&std::mem::take(&mut self.gap));
            sink.content(&raw);
            self.is_after_call = false;
        }
    }

    /// Reads a character outside of calls.
    fn text_character(&mut self, c: char, sink: &mut EventSink) {
        self.held.push(c);
        self.search(false, sink);
    }

    /// Searches the held characters for the longest marker, and returns those that are not the beginning of
    /// one. At the end of the output, no longer marker follows.
    fn search(&mut self, is_end: bool, sink: &mut EventSink) {
        while let Some(first) = self.held.chars().next() {
            if !is_end && self.may_be_longer_marker() {
                return;
            }
            let Some((kind, marker)) = self.marker() else {
                self.held.remove(0);
                self.content_character(first, sink);
                continue;
            };
            let rest = self.held.split_off(marker.len());
            self.held.clear();
            self.read_marker(kind, marker, sink);
            rest.chars().for_each(|c| self.push(c, sink));
        }
    }

    /// Returns the kinds of markers that may come next.
    fn active_markers(&self) -> impl Iterator<Item = (MarkerKind, &'static str)> + use<> {
        let markers = self.markers;
        let list = |kind, list: &'static [&'static str], is_active: bool| {
            list.iter().filter(move |_| is_active).map(move |marker| (kind, *marker))
        };
        list(MarkerKind::Opener, markers.openers, true)
            .chain(list(MarkerKind::Prelude, markers.preludes, true))
            .chain(list(MarkerKind::Closer, markers.closers, self.is_after_call))
            .chain(list(MarkerKind::Bare, markers.bare, self.is_beginning || self.is_after_call))
    }

    /// Returns the longest marker with which the held characters begin.
    fn marker(&self) -> Option<(MarkerKind, &'static str)> {
        let begin = self.active_markers().filter(|(_, marker)| self.held.starts_with(marker));
        begin.max_by_key(|(_, marker)| marker.len())
    }

    fn may_be_longer_marker(&self) -> bool {
        let is_longer = |marker: &str| marker.len() > self.held.len() && marker.starts_with(&self.held);
        self.active_markers().any(|(_, marker)| is_longer(marker))
    }

    fn read_marker(&mut self, kind: MarkerKind, marker: &str, sink: &mut EventSink) {
        match kind {
            MarkerKind::Prelude => self.gap.push_str(marker),
            MarkerKind::Closer => self.gap.clear(),
            MarkerKind::Opener => {
                self.body = Some(self.new_body(true));
                self.raw = marker.to_owned();
            }
            MarkerKind::Bare => {
                self.body = Some(self.new_body(false));
                marker.chars().for_each(|c| self.push(c, sink));
            }
        }
    }

    fn new_body(&self, is_marked: bool) -> BodyReader {
        let tools = self.tools.clone();
        match self.markers.body {
            Body::Json { header } => BodyReader::Json(JsonCalls::new(is_marked, tools, header)),
            Body::Pythonic => BodyReader::Pythonic(PythonicCalls::new(is_marked, tools)),
            Body::Xml => BodyReader::Xml(XmlCalls::new(tools)),
        }
    }

    /// Returns a character as content; white space only once a character of content follows.
    fn content_character(&mut self, c: char, sink: &mut EventSink) {
        if c.is_whitespace() {
            self.gap.push(c);
            return;
        }
        self.is_beginning = false;
        self.is_after_call = false;
        sink.content(&std::mem::take(&mut self.gap));
        sink.content(c.encode_utf8(&mut [0; 4]));
    }
}

impl BodyReader {
    fn push(&mut self, c: char, sink: &mut EventSink) -> Progress {
        match self {
            BodyReader::Json(calls) => calls.push(c, sink),
            BodyReader::Pythonic(calls) => calls.push(c, sink),
            BodyReader::Xml(calls) => calls.push(c, sink),
        }
    }
}
