//! The trait of dialects: their requests, responses, chunks and errors.

use super::frames::{Frames, Framing};
use crate::actors::response_memory::HeldBytes;
use crate::request::Client;
use crate::server::ServeParts;
use crate::server::auth::Owner;
use crate::server::batches::Service;
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use actix_web::web::Data;
use serde_json::Value;
use std::sync::Arc;

/// A request of another server's API, answered by the native API.
pub trait Dialect: Sized + Send + 'static {
    /// Form of the frames of a stream.
    const FRAMING: Framing;

    /// Reads a request body, from which `model` has been taken out and checked. Runs off the event loop if
    /// the body is long, and may run again. Errors name the dialect's own parameters.
    fn open(fields: Fields, context: &DialectContext<'_>) -> Result<(Self, Inner), ApiError>;

    /// Completes the native request with what has to be waited for, such as an earlier response.
    fn prepare(&mut self, _: &mut Inner, _: &Caller) -> impl Future<Output = Result<(), ApiError>> {
        async { Ok(()) }
    }

    /// Returns the whole response body, made of the native one. Runs off the event loop if that is long.
    fn response(&mut self, inner: Value) -> Value;

    /// Appends the frames of a chunk of the native stream.
    fn chunk(&mut self, inner: Value, out: &mut Frames);

    /// Keeps what later requests may refer to. Called when the answer is complete, before the end of a
    /// stream is written.
    fn keep(&mut self, _: &Caller) -> impl Future<Output = Result<(), ApiError>> {
        async { Ok(()) }
    }

    /// Appends the frames at the end of a stream without an error.
    fn end(&mut self, out: &mut Frames);

    /// Appends the frames that keep an idle connection open.
    fn heartbeat(&mut self, out: &mut Frames) {
        out.comment();
    }

    /// Returns the body of an error response.
    fn error(error: ErrorParts<'_>) -> Value;

    /// Appends the frames of an error, the last ones of a stream.
    fn fail(&mut self, error: ErrorParts<'_>, out: &mut Frames) {
        out.push("error", &Self::error(error));
    }

    /// Renames the native parameters of an error to those of the dialect.
    fn rename(error: ApiError) -> ApiError {
        error
    }
}

/// The request to the native API.
#[derive(Debug)]
pub struct Inner {
    /// A path of [`LocalApi::PATHS`](crate::server::LocalApi::PATHS).
    pub path: &'static str,
    /// The body: an object, without `model`. With `stream`, its answer is a stream.
    pub body: Value,
}

/// The facts about a request that a dialect knows besides its body.
pub struct DialectContext<'a> {
    pub parts: &'a ServeParts,
    /// Id of the request.
    pub id: &'a str,
    /// Time of the request, in seconds of Unix time.
    pub created: u64,
    /// Whether the server can keep responses for later requests.
    pub keeps_responses: bool,
}

/// The sender of a request, and the place where responses are kept.
pub struct Caller {
    /// Id of the request.
    pub id: Arc<str>,
    pub client: Arc<Client>,
    /// Owner of the responses that are kept.
    pub owner: Owner,
    pub service: Data<Service>,
    /// Memory that the dialect takes for the response.
    pub held: HeldBytes,
    /// Length of the body.
    pub body_bytes: usize,
    /// Maximum length of the body of the native request.
    pub native_bytes_max: usize,
}
