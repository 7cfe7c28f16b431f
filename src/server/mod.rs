//! HTTP: the OpenAI APIs of completions, chats and embeddings, masks to fill, what the server says about itself, and how it comes and goes.
//!
//! A request's future and its response's body hold the reply stream, so a client that hangs up drops it and
//! nothing else has to be told.
//! Invariant: every answer that is not a success carries the OpenAI error object, `/health` and refused CORS
//! preflights excepted.

pub mod lifecycle;

pub mod access;

pub mod auth;

pub mod tls;

mod routes;

mod respond;

pub mod local;

pub mod completions;

pub mod chat;

pub mod embeddings;

pub mod fill_mask;

pub mod tokenize;

mod encoders;

mod params;

mod opening;

mod inputs;

mod tokens;

mod fields;

pub mod wire;

pub mod error;

pub mod about;

#[cfg(test)]
mod tests;

pub use lifecycle::{Ending, Place, Server};
pub use local::Local;
pub use respond::Answer;

use crate::actors::{Engine, IntakeHandle, ModelInfo, Status};
use crate::config::ServerConfig;
use crate::request::RequestError;
use crate::text::Tokenizer;
use access::RequestId;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokens::Tokens;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// What the server needs of the engine.
#[derive(Clone)]
pub struct ServeParts {
    pub intake: IntakeHandle,
    pub status: Arc<Status>,
    pub tokenizer: Arc<Tokenizer>,
    pub model: ModelInfo,
    tokens: Tokens,
}

impl ServeParts {
    pub fn new(
        intake: IntakeHandle,
        status: Arc<Status>,
        tokenizer: Arc<Tokenizer>,
        model: ModelInfo,
    ) -> ServeParts {
        let tokens = Tokens::of(&tokenizer, &model.conventions);
        ServeParts { intake, status, tokenizer, model, tokens }
    }
}

impl From<&Engine> for ServeParts {
    fn from(engine: &Engine) -> ServeParts {
        let Engine { intake, status, tokenizer, model, .. } = engine;
        ServeParts::new(intake.clone(), status.clone(), tokenizer.clone(), model.clone())
    }
}

/// What every handler may look at.
pub struct App {
    pub parts: ServeParts,
    pub config: ServerConfig,
    /// Long bodies being read, and those that wait for it.
    long_bodies: Turns,
    open: Arc<AtomicUsize>,
    /// Set when what is in flight is cut off.
    cut: watch::Sender<bool>,
}

impl App {
    fn new(parts: ServeParts, config: ServerConfig) -> App {
        let long_bodies = Turns::new(config.workers);
        App { parts, config, long_bodies, open: Arc::default(), cut: watch::Sender::new(false) }
    }

    /// Notes a response that shutdown waits for, until the value is dropped.
    fn open_response(&self) -> OpenResponse {
        self.open.fetch_add(1, Ordering::SeqCst);
        OpenResponse(self.open.clone())
    }

    /// Whether an answer is still on its way to a client.
    fn has_open_responses(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// Whether nothing is in flight, neither in the engine nor on its way to a client.
    fn is_idle(&self) -> bool {
        !self.has_open_responses() && self.parts.status.pending() == 0
    }
}

/// Work of which a few go on at a time and a few more may wait.
struct Turns {
    free: Arc<Semaphore>,
    waiting: AtomicUsize,
}

impl Turns {
    /// Who waits beyond this is refused.
    const WAITING_MAX: usize = 32;

    fn new(at_a_time: usize) -> Turns {
        Turns { free: Arc::new(Semaphore::new(at_a_time)), waiting: AtomicUsize::new(0) }
    }

    /// Waits for a turn, which ends when the permit is dropped.
    async fn wait(&self) -> Result<OwnedSemaphorePermit, RequestError> {
        let waiting = Counted::new(&self.waiting);
        if waiting.before >= Turns::WAITING_MAX {
            return Err(RequestError::Busy { coming: 1, waiting: waiting.before, limit: Turns::WAITING_MAX });
        }
        self.free.clone().acquire_owned().await.map_err(|_| RequestError::EngineGone)
    }
}

/// One more, until dropped: a client that hangs up while it waits is counted no longer.
struct Counted<'a> {
    count: &'a AtomicUsize,
    before: usize,
}

impl Counted<'_> {
    fn new(count: &AtomicUsize) -> Counted<'_> {
        Counted { count, before: count.fetch_add(1, Ordering::SeqCst) }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A response that is not over. Held by the handler, then by the body.
struct OpenResponse(Arc<AtomicUsize>);

impl Drop for OpenResponse {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
