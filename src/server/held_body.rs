//! Bodies of responses, which count as memory of responses until they have been passed to the connection.

use crate::actors::response_memory::HeldBytes;
use crate::request::RequestError;
use actix_web::web::Bytes;
use serde::Serialize;
use std::io::{self, Write};

/// A body with the memory that it takes.
struct HeldBody {
    body: Vec<u8>,
    _held: HeldBytes,
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

/// Returns a body that holds as much of `held` as it takes, until it is dropped.
pub fn held_body(held: HeldBytes, body: Vec<u8>) -> Bytes {
    held.shrink_to(body.capacity());
    Bytes::from_owner(HeldBody { body, _held: held })
}

/// Returns a response as JSON, which `held` holds until it is dropped. Fails, before anything is written, if
/// it does not fit into the memory of responses.
pub fn json_body(held: HeldBytes, response: &impl Serialize) -> Result<Bytes, RequestError> {
    const BUG: &str = "wire types always serialize; this is a bug";
    let mut length = ByteCount(0);
    serde_json::to_writer(&mut length, response).expect(BUG);
    held.grow(length.0)?;
    let mut body = Vec::with_capacity(length.0);
    serde_json::to_writer(&mut body, response).expect(BUG);
    Ok(held_body(held, body))
}

/// Counts the bytes that are written to it.
struct ByteCount(usize);

impl Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
