//! Parser of server-sent events: turns bytes, split anywhere, into the data of each event. Comments and all
//! fields but `data` are ignored, since the APIs use no others.
//!
//! Invariant: the result does not depend on where the bytes are split.

/// Maximum size of an event.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Incremental parser; holds the incomplete event.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    data: Option<Vec<u8>>,
    /// Whether the last byte was a carriage return, which a following line feed belongs to.
    returned: bool,
}

/// The error for an event longer than 16 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server sent an event of more than 16 MiB")]
pub struct TooLong;

impl Parser {
    /// Parses further bytes and returns the data of the events that end in them. Fails if an event is too
    /// long.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, TooLong> {
        let mut events = Vec::new();
        for &byte in bytes {
            match byte {
                b'\n' if self.returned => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                _ => self.line.push(byte),
            }
            self.returned = byte == b'\r';
        }
        let held = self.line.len() + self.data.as_ref().map_or(0, Vec::len);
        if held > EVENT_BYTES_MAX { Err(TooLong) } else { Ok(events) }
    }

    /// Processes a complete line. An empty line ends an event, whose data is returned; any other line adds to
    /// it.
    fn end_line(&mut self) -> Option<String> {
        if self.line.is_empty() {
            return self.data.take().map(|data| String::from_utf8_lossy(&data).into_owned());
        }
        let colon = self.line.iter().position(|&byte| byte == b':').unwrap_or(self.line.len());
        let (name, value) = self.line.split_at(colon);
        if name == b"data" {
            let value = value.strip_prefix(b":").unwrap_or(value);
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut self.data {
                None => self.data = Some(value.to_vec()),
                Some(data) => {
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
            }
        }
        self.line.clear();
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": a comment\n\nid: 7\nevent: note\n\
                          data: {\"text\":\"Grüße 🌊\"}\n\ndata:first\r\ndata:  second\r\
                          \r\ndata\n\n:keep-alive\n\ndata: [DONE]\n\ndata: never ended\n";

    fn expected() -> Vec<&'static str> {
        vec!["{\"text\":\"Grüße 🌊\"}", "first\n second", "", "[DONE]"]
    }

    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let mut parser = Parser::default();
        pieces.into_iter().flat_map(|piece| parser.push(piece).expect("the events are short")).collect()
    }

    #[test]
    fn a_stream_cut_at_any_byte_reads_the_same() {
        let bytes = STREAM.as_bytes();
        assert_eq!(read([bytes]), expected());
        assert_eq!(read(bytes.chunks(1)), expected());
        for cut in 0..=bytes.len() {
            let (before, after) = bytes.split_at(cut);
            assert_eq!(read([before, after]), expected(), "cut at {cut}");
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut parser = Parser::default();
        let piece = vec![b'x'; 1 << 20];
        let refused = (0..17).map(|_| parser.push(&piece)).find_map(Result::err);
        assert_eq!(refused, Some(TooLong));
    }
}
