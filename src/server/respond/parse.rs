//! Parsing of request bodies off the event loop, and checks that several APIs share.

use crate::request::RequestError;
use crate::server::body::{INLINE_BYTES, RequestBody, parsing_memory};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, IgnoredFields};
use crate::server::params::GenerationParams;
use crate::server::turns::Share;
use crate::server::{App, ServeParts};
use actix_web::web;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Number of choices that one request may always ask for, even if the engine's limit is lower: the API's own
/// limit; some choices may need no slot.
const CHOICES_MAX: usize = 2048;

/// Parses a body into its fields and checks that `model` names the served model.
fn parse_fields(app: &App, body: &[u8]) -> Result<Fields, ApiError> {
    let mut fields = Fields::parse(body)?;
    app.check_model(fields.take_string("model")?.as_deref())?;
    Ok(fields)
}

/// The turn of a request to be parsed and tokenized, and the memory that it takes for that.
pub struct Turn {
    /// `None` on the event loop.
    share: Option<RefCell<Share>>,
    /// Memory that parsing the body takes, in bytes.
    parsing: usize,
    /// Memory that tokenizing takes per byte of text.
    per_byte: usize,
    /// Length in bytes beyond which no text is tokenized.
    longest_text: usize,
    /// Maximum length in bytes of a text that is made of the request.
    text_limit: usize,
    /// Length in bytes of a text for which the request has to wait for another turn, if there was one.
    deferred: Cell<Option<usize>>,
}

impl Turn {
    /// Holds the memory to tokenize a text of `bytes` bytes that was made of the parameter `param`, and may
    /// be longer than the body. Fails if the text is longer than a body may be. It also fails if there is no
    /// memory now, or the text is too long for the event loop: the request then waits for another turn.
    pub fn hold_text(&self, bytes: usize, param: &str) -> Result<(), ApiError> {
        if bytes > self.text_limit {
            let message = format!(
                "the text made of '{param}' has {bytes} bytes; the maximum is {}, as for a request body",
                self.text_limit
            );
            return Err(ApiError::invalid(param, message));
        }
        let may_go_on = match &self.share {
            Some(share) => share.borrow_mut().grow(bytes, self.memory(bytes)),
            None => bytes <= INLINE_BYTES,
        };
        if may_go_on {
            return Ok(());
        }
        self.deferred.set(Some(bytes));
        Err(RequestError::NoBodyMemory.into())
    }

    /// Returns the memory that the request takes if its texts have `bytes` bytes.
    fn memory(&self, bytes: usize) -> usize {
        self.parsing.saturating_add(bytes.min(self.longest_text).saturating_mul(self.per_byte))
    }
}

/// Parses a body with `read`, and returns its result and the fields that it did not know. A body that is
/// long, or is rendered to a long text, waits for its turn and is parsed on a thread of the blocking pool.
/// If its text turns out to take more memory than is left, it waits again, for so much, and is parsed again.
/// `longest_text` is the length in bytes beyond which `read` tokenizes no text.
pub async fn parse_off_loop<T: Send + 'static>(
    app: &Arc<App>,
    body: RequestBody,
    longest_text: usize,
    read: impl Fn(&ServeParts, &Turn, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, IgnoredFields), ApiError> {
    let policy = app.config.unknown_fields;
    let parse = move |app: &App, turn: &Turn, body: &[u8]| {
        let fields = parse_fields(app, body)?;
        let unknown = fields.unknown();
        let parsed = read(&app.parts, turn, fields)?;
        Ok((parsed, unknown.apply(policy)?))
    };
    let (parsing, text_limit) = (parsing_memory(&body.bytes), app.config.body_limit_bytes);
    let per_byte = app.parts.tokenizer.memory_per_byte();
    let turn = move |share: Option<Share>| {
        let share = share.map(RefCell::new);
        Turn { share, parsing, per_byte, longest_text, text_limit, deferred: Cell::new(None) }
    };
    let mut length = body.bytes.len();
    if length <= INLINE_BYTES {
        let turn = turn(None);
        let parsed = parse(app, &turn, &body.bytes);
        match turn.deferred.get() {
            None => return parsed,
            Some(bytes) => length = bytes,
        }
    }
    let mut job = (body, parse);
    loop {
        let client = job.0.client;
        let share = app.parsing.acquire(client, length, turn(None).memory(length)).await?;
        let app = app.clone();
        let read = web::block(move || {
            let (turn, (body, parse)) = (turn(Some(share)), &job);
            let parsed = parse(&app, &turn, &body.bytes);
            (parsed, turn.deferred.get(), job)
        });
        let (parsed, deferred, again) = read
            .await
            .map_err(|error| ApiError::internal(format!("parsing the request body failed: {error}")))?;
        match deferred {
            None => return parsed,
            Some(bytes) => (length, job) = (bytes, again),
        }
    }
}

/// Returns an error for more choices than the server can ever accept at once, before anything is allocated
/// per choice. Intake checks the exact limits.
pub fn check_choices(
    parts: &ServeParts,
    prompts: usize,
    generation: &GenerationParams,
) -> Result<(), ApiError> {
    let (computed, most) = (generation.computed_choices(), parts.model.max_choices.max(CHOICES_MAX));
    let choices = prompts.saturating_mul(computed as usize);
    if choices <= most {
        return Ok(());
    }
    let param = match (generation.n, computed) {
        (_, 1) => "prompt",
        (n, computed) if n == computed => "n",
        _ => "best_of",
    };
    let message =
        format!("{prompts} prompts with {computed} choices each make {choices}; the maximum is {most}");
    Err(ApiError::invalid(param, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::client::ClientId;
    use crate::server::tests::test_server::{app, wait_until};
    use futures_util::FutureExt;
    use futures_util::future::join;
    use std::thread;

    /// Regression: a template that makes much of a short body stalled the requests of its worker.
    #[actix_web::test]
    async fn a_short_body_that_renders_long_is_read_off_the_event_loop() {
        let app = Arc::new(app(|_| {}));
        for (bytes, is_elsewhere) in [(INLINE_BYTES, false), (INLINE_BYTES + 1, true)] {
            let event_loop = thread::current().id();
            let body = RequestBody::local(ClientId::Local, (&b"{}"[..]).into(), None);
            let read = move |_: &ServeParts, turn: &Turn, _: Fields| {
                turn.hold_text(bytes, "messages").map(|()| thread::current().id() != event_loop)
            };
            let read = parse_off_loop(&app, body, usize::MAX, read).await;
            assert_eq!(read.map(|(is_elsewhere, _)| is_elsewhere).ok(), Some(is_elsewhere));
        }
    }

    /// Regression: what a template makes of a body took any amount of memory; later, a text that was longer
    /// than its body was refused if others held the memory for the rest.
    #[actix_web::test]
    async fn a_rendered_text_holds_the_memory_that_it_takes() {
        let app = Arc::new(app(|config| config.request_memory_bytes = 40 << 20));
        let read = async |bytes, longest_text| {
            let body = RequestBody::local(ClientId::Local, format!("{:9000}", "{}").into(), None);
            let read = move |_: &ServeParts, turn: &Turn, _: Fields| turn.hold_text(bytes, "messages");
            let read = parse_off_loop(&app, body, longest_text, read).await;
            read.map_or_else(|error| error.to_string(), |_| String::new())
        };
        let other = app.parsing.acquire(ClientId::Key(1), 1 << 20, 20 << 20).now_or_never();
        let other = other.and_then(Result::ok).unwrap();
        assert_eq!(read(15_000, usize::MAX).await, "");
        assert_eq!(read(30_000, 1000).await, "");
        assert!(read(5 << 20, 1000).await.contains("the maximum is 4194304"));
        let until_it_waits = async {
            wait_until(|| app.parsing.is_contended()).await;
            drop(other);
        };
        assert_eq!(join(read(30_000, usize::MAX), until_it_waits).await.0, "");
        // Alone, it takes what it needs.
        assert_eq!(read(4 << 20, usize::MAX).await, "");
    }
}
