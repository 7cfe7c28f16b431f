//! A decoder of server-sent events that accepts a byte stream split at any position.
//!
//! The decoder is stricter than the standard, which ignores unknown fields: here they are an error, because
//! they show that the body is not an event stream.
//! Invariant: the events depend on the bytes, never on how they were split into chunks.

/// Maximum size of an event in bytes, so that a stream without line ends does not exhaust memory.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// An error in an event stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// The event exceeds 16 MiB.
    #[error("event larger than {EVENT_BYTES_MAX} bytes")]
    TooLong,
    /// A line is not valid UTF-8.
    #[error("line is not valid UTF-8")]
    NotUtf8,
    /// The line does not begin with a known field; holds its first 80 characters.
    #[error("'{0}' does not begin with a known event field")]
    UnknownField(String),
}

/// An incremental decoder: takes chunks of bytes and returns the data of complete events.
#[derive(Debug, Default)]
pub struct SseDecoder {
    /// The start of an incomplete line.
    line: Vec<u8>,
    /// The data of the incomplete event, or of the event returned last if there is none.
    data: String,
    /// Number of data lines of the incomplete event.
    data_lines: usize,
    /// Whether the last byte was a CR that already ended its line, so that a following LF belongs to it.
    after_cr: bool,
}

impl SseDecoder {
    /// Consumes bytes from the front of `bytes` until an event is complete and returns its data, or `None`
    /// when all bytes are consumed.
    ///
    /// # Errors
    /// The bytes are not an event stream, or an event is too long. The decoder must not be used afterwards.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<&str>, SseError> {
        loop {
            if !bytes.is_empty() && std::mem::take(&mut self.after_cr) {
                *bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
            }
            let end = memchr::memchr2(b'\n', b'\r', bytes);
            let (rest, after) = bytes.split_at(end.unwrap_or(bytes.len()));
            let data = if self.data_lines > 0 { self.data.len() } else { 0 };
            if self.line.len() + data + rest.len() > EVENT_BYTES_MAX {
                return Err(SseError::TooLong);
            }
            self.line.extend_from_slice(rest);
            let Some((end, after)) = after.split_first() else {
                *bytes = after;
                return Ok(None);
            };
            self.after_cr = *end == b'\r';
            *bytes = after;
            if self.end_line()? {
                return Ok(Some(&self.data));
            }
        }
    }

    /// Checks the state at the end of the stream. An incomplete event is dropped.
    ///
    /// # Errors
    /// The stream ends with an incomplete line that is not part of an event.
    pub fn finish(&self) -> Result<(), SseError> {
        if self.line.contains(&b':') {
            parse_line(&self.line)?;
        }
        Ok(())
    }

    /// Processes the complete line in `line`. Returns whether it ends an event.
    fn end_line(&mut self) -> Result<bool, SseError> {
        let is_end = self.line.is_empty() && self.data_lines > 0;
        if is_end {
            self.data_lines = 0;
        } else if let Some(value) = parse_line(&self.line)? {
            match self.data_lines {
                0 => self.data.clear(),
                _ => self.data.push('\n'),
            }
            self.data.push_str(value);
            self.data_lines += 1;
        }
        self.line.clear();
        Ok(is_end)
    }
}

/// Returns the value of a data line, or `None` for an empty line, a comment or an unused field.
fn parse_line(line: &[u8]) -> Result<Option<&str>, SseError> {
    let line = std::str::from_utf8(line).map_err(|_| SseError::NotUtf8)?;
    let (field, value) = line.split_once(':').unwrap_or((line, ""));
    match field {
        "" | "event" | "id" | "retry" => Ok(None),
        "data" => Ok(Some(value.strip_prefix(' ').unwrap_or(value))),
        _ => Err(SseError::UnknownField(line.chars().take(80).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(chunks: &[&[u8]]) -> Result<Vec<String>, SseError> {
        let (mut decoder, mut events) = (SseDecoder::default(), Vec::new());
        for chunk in chunks {
            let mut bytes = *chunk;
            while let Some(data) = decoder.next(&mut bytes)? {
                events.push(data.to_string());
            }
            assert!(bytes.is_empty(), "all bytes are taken");
        }
        Ok(events)
    }

    const STREAM: &str = ": hello\n\ndata: {\"a\":1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n\
                          id: 7\rretry: 5\rdata:  \u{e9}\u{1f30a} \r\rdata\n\n\n\ndata: 3\r\n\ndata: cut";

    #[test]
    fn every_cut_gives_the_same_events() {
        let bytes = STREAM.as_bytes();
        let whole = decode(&[bytes]).unwrap();
        assert_eq!(whole, ["{\"a\":1}", "two\nlines", " \u{e9}\u{1f30a} ", "", "3"]);
        for cut in 0..=bytes.len() {
            assert_eq!(decode(&[&bytes[..cut], &bytes[cut..]]).as_ref(), Ok(&whole), "cut at {cut}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(decode(&single).as_ref(), Ok(&whole));
        let with_empty: Vec<&[u8]> = bytes.chunks(1).flat_map(|byte| [byte, &[]]).collect();
        assert_eq!(decode(&with_empty), Ok(whole));
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
    fn a_stream_cut_off_is_one_still_and_a_line_of_something_else_is_none() {
        let end = |bytes: &[u8]| {
            let mut decoder = SseDecoder::default();
            while decoder.next(&mut &*bytes).unwrap().is_some() {}
            decoder.finish()
        };
        for cut in [&b""[..], b"da", b"data: x", b": hello", b"data: x\n"] {
            assert_eq!(end(cut), Ok(()), "{cut:?}");
        }
        for other in [&b"{\"id\":1}"[..], b"data: x\nhello: y"] {
            assert!(end(other).is_err(), "{other:?}");
        }
    }

    #[test]
    fn an_event_without_end_is_refused_before_it_fills_the_memory() {
        let endless = vec![b'x'; EVENT_BYTES_MAX / 4];
        assert_eq!(decode(&[b"data: ", &endless, &endless, &endless, &endless]), Err(SseError::TooLong));
        let line = [b"data: ", &endless[..(1 << 16) - 100], b"\n"].concat();
        assert_eq!(decode(&[&line.repeat(EVENT_BYTES_MAX >> 16)]), Ok(vec![]));
        assert_eq!(decode(&[&line.repeat((EVENT_BYTES_MAX >> 16) + 1)]), Err(SseError::TooLong));
        let event = [&line[..], b"\n"].concat();
        let count = (EVENT_BYTES_MAX >> 16) + 1;
        assert_eq!(decode(&[&event.repeat(count)]).map(|events| events.len()), Ok(count));
    }
}
