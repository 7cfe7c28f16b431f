//! Server-sent events of another server, decoded in pieces and at once. The first byte chooses the length of
//! the pieces.

#![no_main]

use mainstem_sse::{SseDecoder, SseError};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let Some((length, stream)) = bytes.split_first() else { return };
    let whole = decode([stream]);
    assert_eq!(
        decode(stream.chunks(1 + *length as usize % 16)),
        whole,
        "the edges of pieces must not matter"
    );
}

/// Returns the events before the first error, and that error.
fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<String>, Option<SseError>) {
    let (mut decoder, mut events) = (SseDecoder::default(), Vec::new());
    for mut piece in pieces {
        loop {
            match decoder.next(&mut piece) {
                Ok(Some(event)) => events.push(event.to_owned()),
                Ok(None) => break,
                Err(error) => return (events, Some(error)),
            }
        }
    }
    let end = decoder.finish().err();
    (events, end)
}
