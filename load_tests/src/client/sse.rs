//! Server-sent events out of a byte stream that may be cut anywhere.
//!
//! Stricter than the standard, which ignores fields it does not know: here they mean that this is no stream.
//! Invariant: the events depend on the bytes, never on how they were cut into chunks.

/// Bytes one event may have; a stream without line ends must not fill the memory.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// Why bytes are not a stream of events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    #[error("an event has more than {EVENT_BYTES_MAX} bytes")]
    TooLong,
    #[error("a line is not UTF-8")]
    NotUtf8,
    #[error("'{0}' is not a field of an event")]
    UnknownField(String),
}

/// Takes chunks, gives the data of whole events.
#[derive(Debug, Default)]
pub struct SseDecoder {
    line: Vec<u8>,
    data: Option<String>,
    /// The last byte was CR, whose line is done already: a LF now belongs to it.
    after_cr: bool,
}

impl SseDecoder {
    /// Appends to `events` the data of every event that `chunk` completes. An error leaves the decoder spent.
    pub fn push(&mut self, chunk: &[u8], events: &mut Vec<String>) -> Result<(), SseError> {
        for &byte in chunk {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => self.end_line(events)?,
                _ => self.extend_line(byte)?,
            }
        }
        Ok(())
    }

    fn extend_line(&mut self, byte: u8) -> Result<(), SseError> {
        if self.line.len() + self.data.as_ref().map_or(0, String::len) >= EVENT_BYTES_MAX {
            return Err(SseError::TooLong);
        }
        self.line.push(byte);
        Ok(())
    }

    fn end_line(&mut self, events: &mut Vec<String>) -> Result<(), SseError> {
        let line = std::str::from_utf8(&self.line).map_err(|_| SseError::NotUtf8)?;
        if line.is_empty() {
            events.extend(self.data.take());
            return Ok(());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        match field {
            // A comment, or what this client has no use for.
            "" | "event" | "id" | "retry" => {}
            "data" => append_line(&mut self.data, value.strip_prefix(' ').unwrap_or(value)),
            _ => return Err(SseError::UnknownField(field.chars().take(80).collect())),
        }
        self.line.clear();
        Ok(())
    }
}

/// The data lines of one event are joined by line feeds.
fn append_line(data: &mut Option<String>, value: &str) {
    match data {
        None => *data = Some(value.to_string()),
        Some(data) => {
            data.push('\n');
            data.push_str(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(chunks: &[&[u8]]) -> Result<Vec<String>, SseError> {
        let (mut decoder, mut events) = (SseDecoder::default(), Vec::new());
        chunks.iter().try_for_each(|chunk| decoder.push(chunk, &mut events)).map(|()| events)
    }

    const STREAM: &str = ": hello\n\ndata: {\"a\":1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n\
                          id: 7\rretry: 5\rdata:  \u{e9}\u{1f30a} \r\rdata\n\n\n\ndata: cut";

    #[test]
    fn every_cut_gives_the_same_events() {
        let bytes = STREAM.as_bytes();
        let whole = decode(&[bytes]).unwrap();
        assert_eq!(whole, ["{\"a\":1}", "two\nlines", " \u{e9}\u{1f30a} ", ""]);
        for cut in 0..=bytes.len() {
            assert_eq!(decode(&[&bytes[..cut], &bytes[cut..]]).as_ref(), Ok(&whole), "cut at {cut}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(decode(&single), Ok(whole));
    }

    #[test]
    fn garbage_is_an_error_at_every_cut() {
        for garbage in [&b"<html>\n"[..], b"data: ok\n\nhello: x\n", b"data: \xff\xfe\n\n", b"\0\0\n"] {
            for cut in 0..=garbage.len() {
                assert!(decode(&[&garbage[..cut], &garbage[cut..]]).is_err(), "{garbage:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn an_event_without_end_is_refused_before_it_fills_the_memory() {
        let endless = vec![b'x'; EVENT_BYTES_MAX / 4];
        assert_eq!(decode(&[b"data: ", &endless, &endless, &endless, &endless]), Err(SseError::TooLong));
        let lines = b"data: 0123456789\n".repeat(EVENT_BYTES_MAX / 10);
        assert_eq!(decode(&[&lines]), Err(SseError::TooLong));
        let many = b"data: 0123456789\n\n".repeat(EVENT_BYTES_MAX / 10);
        assert_eq!(decode(&[&many]).map(|events| events.len()), Ok(EVENT_BYTES_MAX / 10));
    }
}
