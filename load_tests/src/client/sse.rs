//! A decoder of server-sent events that accepts a byte stream split at any position.
//!
//! The decoder is stricter than the standard, which ignores unknown fields: here they are an error, because
//! they show that the body is not an event stream.
//! Invariant: the events depend on the bytes, never on how they were split into chunks.

/// Maximum size of an event in bytes, so that a stream without line ends does not exhaust memory.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// An error in an event stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    #[error("event larger than {EVENT_BYTES_MAX} bytes")]
    TooLong,
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
    /// The data lines of an incomplete event.
    data: Option<String>,
    /// The data returned last; its allocation is reused.
    last_data: String,
    /// Whether the last byte was a CR that already ended its line, so that a following LF belongs to it.
    after_cr: bool,
}

/// The meaning of one line.
enum Line<'a> {
    /// The end of an event.
    Blank,
    /// A comment or an unused field.
    Ignored,
    Data(&'a str),
}

/// The location of an event's data.
enum EventData<'a> {
    /// In the chunk: a single complete line, the common case.
    Chunk(&'a str),
    /// In the decoder's `last_data` buffer.
    Buffer,
}

impl SseDecoder {
    /// Consumes bytes from the front of `bytes` until an event is complete and returns its data, or `None`
    /// when all bytes are consumed. The decoder must not be used after an error.
    pub fn next<'a, 'b: 'a>(&'a mut self, bytes: &mut &'b [u8]) -> Result<Option<&'a str>, SseError> {
        Ok(self.decode_event(bytes)?.map(|found| match found {
            EventData::Chunk(data) => data,
            EventData::Buffer => self.last_data.as_str(),
        }))
    }

    /// Checks the state at the end of the stream. An incomplete event is dropped; an incomplete line that is
    /// not part of an event is an error.
    pub fn finish(&self) -> Result<(), SseError> {
        if self.line.contains(&b':') {
            parse_line(&self.line)?;
        }
        Ok(())
    }

    fn decode_event<'b>(&mut self, bytes: &mut &'b [u8]) -> Result<Option<EventData<'b>>, SseError> {
        while let Some(rest) = self.take_line(bytes)? {
            if !self.line.is_empty() {
                self.finish_split_line(rest)?;
            } else if let Some(found) = self.finish_line(rest, bytes)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Returns the bytes up to the next line end and consumes both. Without a line end, buffers all bytes and
    /// returns `None`.
    fn take_line<'b>(&mut self, bytes: &mut &'b [u8]) -> Result<Option<&'b [u8]>, SseError> {
        self.skip_line_feed(bytes);
        let end = memchr::memchr2(b'\n', b'\r', bytes);
        let rest = &bytes[..end.unwrap_or(bytes.len())];
        if self.line.len() + self.data.as_ref().map_or(0, String::len) + rest.len() > EVENT_BYTES_MAX {
            return Err(SseError::TooLong);
        }
        let Some(end) = end else {
            self.line.extend_from_slice(rest);
            *bytes = &[];
            return Ok(None);
        };
        self.after_cr = bytes[end] == b'\r';
        *bytes = &bytes[end + 1..];
        Ok(Some(rest))
    }

    fn finish_line<'b>(
        &mut self,
        line: &'b [u8],
        bytes: &mut &'b [u8],
    ) -> Result<Option<EventData<'b>>, SseError> {
        match parse_line(line)? {
            Line::Blank => Ok(self.data.take().map(|data| {
                self.last_data = data;
                EventData::Buffer
            })),
            Line::Ignored => Ok(None),
            Line::Data(value) if self.data.is_none() && self.take_blank(bytes) => {
                Ok(Some(EventData::Chunk(value)))
            }
            Line::Data(value) => {
                self.append(value);
                Ok(None)
            }
        }
    }

    fn finish_split_line(&mut self, rest: &[u8]) -> Result<(), SseError> {
        let mut line = std::mem::take(&mut self.line);
        line.extend_from_slice(rest);
        if let Line::Data(value) = parse_line(&line)? {
            self.append(value);
        }
        line.clear();
        self.line = line;
        Ok(())
    }

    /// Consumes a blank line at the front of `bytes`. Returns whether there was one.
    fn take_blank(&mut self, bytes: &mut &[u8]) -> bool {
        self.skip_line_feed(bytes);
        let Some(&end @ (b'\n' | b'\r')) = bytes.first() else { return false };
        self.after_cr = end == b'\r';
        *bytes = &bytes[1..];
        true
    }

    /// Consumes the line feed of a CRLF whose CR ended the previous line.
    fn skip_line_feed(&mut self, bytes: &mut &[u8]) {
        let Some(first) = bytes.first() else { return };
        if std::mem::take(&mut self.after_cr) && *first == b'\n' {
            *bytes = &bytes[1..];
        }
    }

    /// Appends a data line; the data lines of one event are joined by line feeds.
    fn append(&mut self, value: &str) {
        let mut data = match self.data.take() {
            Some(data) => data + "\n",
            None => {
                self.last_data.clear();
                std::mem::take(&mut self.last_data)
            }
        };
        data.push_str(value);
        self.data = Some(data);
    }
}

fn parse_line(line: &[u8]) -> Result<Line<'_>, SseError> {
    let line = std::str::from_utf8(line).map_err(|_| SseError::NotUtf8)?;
    if line.is_empty() {
        return Ok(Line::Blank);
    }
    let (field, value) = line.split_once(':').unwrap_or((line, ""));
    match field {
        "" | "event" | "id" | "retry" => Ok(Line::Ignored),
        "data" => Ok(Line::Data(value.strip_prefix(' ').unwrap_or(value))),
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
        let lines = b"data: 0123456789\n".repeat(EVENT_BYTES_MAX / 10);
        assert_eq!(decode(&[&lines]), Err(SseError::TooLong));
        let many = b"data: 0123456789\n\n".repeat(EVENT_BYTES_MAX / 10);
        assert_eq!(decode(&[&many]).map(|events| events.len()), Ok(EVENT_BYTES_MAX / 10));
    }
}
