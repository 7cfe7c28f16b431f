//! The frames of a translated stream: server-sent events, or lines of JSON.

use actix_web::web::{BufMut, Bytes, BytesMut};
use serde::Serialize;

/// Form of the frames of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events, with the name of each if `named` is set.
    Sse { named: bool },
    /// A line of JSON for each frame.
    Lines,
    /// JSON and an empty line for each frame.
    Blocks,
}

impl Framing {
    /// Returns the content type of a stream.
    pub fn content_type(self) -> &'static str {
        match self {
            Framing::Sse { .. } => "text/event-stream; charset=utf-8",
            Framing::Lines => "application/x-ndjson",
            Framing::Blocks => "application/json",
        }
    }
}

/// The frames that are to be sent next.
pub struct Frames {
    framing: Framing,
    bytes: BytesMut,
}

impl Frames {
    /// Creates an empty list of frames.
    pub fn new(framing: Framing) -> Frames {
        Frames { framing, bytes: BytesMut::new() }
    }

    /// Appends a frame. Only named server-sent events have its name.
    pub fn push(&mut self, name: &str, value: &impl Serialize) {
        let bytes = &mut self.bytes;
        match self.framing {
            Framing::Sse { named: true } => {
                bytes.extend_from_slice(b"event: ");
                bytes.extend_from_slice(name.as_bytes());
                bytes.extend_from_slice(b"\ndata: ");
            }
            Framing::Sse { named: false } => bytes.extend_from_slice(b"data: "),
            Framing::Lines | Framing::Blocks => {}
        }
        serde_json::to_writer(bytes.writer(), value).expect("frames always serialize; this is a bug");
        let end: &[u8] = if self.framing == Framing::Lines { b"\n" } else { b"\n\n" };
        self.bytes.extend_from_slice(end);
    }

    /// Appends a comment, which clients ignore. Only server-sent events have them.
    pub fn comment(&mut self) {
        if let Framing::Sse { .. } = self.framing {
            self.bytes.extend_from_slice(b": keep-alive\n\n");
        }
    }

    /// Takes the frames out; `None` if there are none.
    pub fn take(&mut self) -> Option<Bytes> {
        (!self.bytes.is_empty()).then(|| self.bytes.split().freeze())
    }
}
