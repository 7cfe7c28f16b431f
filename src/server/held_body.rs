//! Bodies of responses that count as memory of responses until they have been passed to the connection.

use crate::actors::response_memory::HeldBytes;
use actix_web::web::Bytes;

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
