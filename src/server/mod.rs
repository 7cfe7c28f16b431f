//! The HTTP server: the OpenAI APIs for completions, chat and embeddings, mask filling, tokenization, server
//! information, and the server's startup and shutdown.
//!
//! The handler's future and then the response body own the reply stream, so a client that disconnects drops
//! it; nothing else needs to be notified.
//! Invariant: every error response carries the OpenAI error object, except from `/health`, for rejected CORS
//! preflights, and from dialects, which have their own.

pub mod lifecycle;

pub mod access;

pub mod auth;

pub mod tls;

mod connections;

mod listener;

mod open_files;

mod held_body;

mod log_limit;

mod failed_keys;

mod hosts;

mod routes;

mod respond;

pub mod local;

mod dialects;

pub mod batches;

pub mod completions;

pub mod chat;

pub mod embeddings;

pub mod fill_mask;

mod scoring;

pub mod tokenize;

mod encoders;

mod grammars;

mod params;

mod decoder_start;

mod fill_in_the_middle;

mod prompts;

mod prompt_ids;

mod turns;

mod body;

mod special_tokens;

mod fields;

mod origin;

pub mod wire;

pub mod error;

pub mod info;

mod inflight;

mod openapi;

mod web_page;

#[cfg(test)]
mod tests;

pub use body::request_memory_max;
pub use lifecycle::{BoundServer, Server, ShutdownOutcome, blocking_threads};
pub use local::LocalApi;
pub use respond::ResponseBody;

use crate::actors::engine::Fact;
use crate::actors::{Engine, IntakeHandle, LiveView, ModelInfo, ModelSampling, Status};
use crate::config::ServerConfig;
use crate::request::RequestError;
use crate::text::Tokenizer;
use access::RequestId;
use error::ApiError;
use fields::shorten;
use grammars::Grammars;
use special_tokens::SpecialTokens;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use turns::{FairPool, PoolLimits};

/// Handles to the engine and the model data that the server needs.
#[derive(Clone)]
pub struct ServeParts {
    pub intake: IntakeHandle,
    pub status: Arc<Status>,
    /// The view of the sequences in flight for those who watch.
    pub live: Arc<LiveView>,
    /// The report of the engine's start.
    pub facts: Arc<[Fact]>,
    pub tokenizer: Arc<Tokenizer>,
    pub model: ModelInfo,
    pub sampling: Arc<ModelSampling>,
    special_tokens: SpecialTokens,
    /// Length in bytes beyond which no prompt is tokenized.
    longest_text: usize,
}

impl ServeParts {
    /// Collects the parts of a server.
    pub fn new(
        intake: IntakeHandle,
        status: Arc<Status>,
        (live, facts): (Arc<LiveView>, Arc<[Fact]>),
        tokenizer: Arc<Tokenizer>,
        model: ModelInfo,
        sampling: Arc<ModelSampling>,
    ) -> ServeParts {
        let tokens = SpecialTokens::new(&tokenizer, &model.prompting, &model.output_formats);
        let longest_text = tokenizer.longest_text(model.context.max(model.encoder_context));
        ServeParts {
            intake,
            status,
            live,
            facts,
            tokenizer,
            model,
            sampling,
            special_tokens: tokens,
            longest_text,
        }
    }
}

impl From<&Engine> for ServeParts {
    fn from(engine: &Engine) -> ServeParts {
        let Engine { intake, status, live, tokenizer, model, sampling, facts, .. } = engine;
        let view = (live.clone(), facts.as_slice().into());
        let (tokenizer, sampling) = (tokenizer.clone(), sampling.clone());
        ServeParts::new(intake.clone(), status.clone(), view, tokenizer, model.clone(), sampling)
    }
}

/// The fraction of `server.request_memory` that is for the bodies themselves; the rest is for parsing them.
const BODIES_SHARE: usize = 4;

/// State that all request handlers share.
pub struct App {
    pub parts: ServeParts,
    pub config: ServerConfig,
    grammars: Arc<Grammars>,
    /// Memory of the long request bodies that are received, wait or are parsed.
    bodies: FairPool,
    /// Turns of long request bodies to be parsed and tokenized, and the memory that this takes.
    parsing: FairPool,
    open_responses: Arc<AtomicUsize>,
    /// Set to true when shutdown aborts the requests in flight.
    abort: watch::Sender<bool>,
}

impl App {
    fn new(parts: ServeParts, config: ServerConfig) -> App {
        let bodies_bytes = config.request_memory_bytes / BODIES_SHARE;
        App {
            grammars: Arc::new(Grammars::new(&parts, &config.grammar)),
            bodies: FairPool::new(PoolLimits { memory: bodies_bytes, turns: None }),
            parsing: FairPool::new(PoolLimits {
                memory: config.request_memory_bytes - bodies_bytes,
                turns: Some(config.workers),
            }),
            parts,
            config,
            open_responses: Arc::default(),
            abort: watch::Sender::new(false),
        }
    }

    /// Returns the state for requests without a time limit, which shares everything else with this one.
    fn without_time_limit(&self) -> App {
        let App { parts, config, grammars, bodies, parsing, open_responses, abort } = self;
        App {
            parts: parts.clone(),
            config: ServerConfig { request_timeout: None, ..config.clone() },
            grammars: grammars.clone(),
            bodies: bodies.clone(),
            parsing: parsing.clone(),
            open_responses: open_responses.clone(),
            abort: abort.clone(),
        }
    }

    /// Returns all names of the model, the one that responses have first.
    pub fn model_names(&self) -> impl Iterator<Item = &str> {
        let more = self.config.model_names.iter().map(String::as_str);
        let own = self.parts.model.name.as_str();
        std::iter::once(own).chain(more.filter(move |name| *name != own))
    }

    /// Returns an error if a request names another model than the served one. Ollama's clients add the tag
    /// `latest` to names.
    fn check_model(&self, requested: Option<&str>) -> Result<(), ApiError> {
        let is_own = |model: &str| {
            self.model_names()
                .any(|name| name == model.strip_suffix(":latest").unwrap_or(model) || name == model)
        };
        match requested {
            Some(model) if !self.config.accept_any_model && !is_own(model) => {
                let served = self.parts.model.name.clone();
                Err(RequestError::UnknownModel { model: shorten(model), served }.into())
            }
            _ => Ok(()),
        }
    }

    /// Registers a response that shutdown waits for until the returned value is dropped.
    fn open_response(&self) -> OpenResponse {
        self.open_responses.fetch_add(1, Ordering::SeqCst);
        OpenResponse(self.open_responses.clone())
    }

    /// Returns whether a response is still being sent to a client.
    fn has_open_responses(&self) -> bool {
        self.open_responses.load(Ordering::SeqCst) > 0
    }

    /// Returns whether nothing is in flight, neither in the engine nor on its way to a client.
    fn is_idle(&self) -> bool {
        !self.has_open_responses() && self.parts.status.pending() == 0
    }
}

/// A semaphore with a bounded number of waiters.
struct BoundedSemaphore {
    semaphore: Arc<Semaphore>,
    waiting: AtomicUsize,
    /// Maximum number of waiters.
    waiters_max: usize,
    /// Makes the error for further requests, with the maximum number of waiters.
    busy: fn(usize) -> RequestError,
}

impl BoundedSemaphore {
    /// Default of the maximum number of waiters; further requests are rejected as busy.
    const WAITERS_MAX: usize = 32;

    fn new(permits: usize, busy: fn(usize) -> RequestError) -> BoundedSemaphore {
        let semaphore = Arc::new(Semaphore::new(permits));
        let waiters_max = BoundedSemaphore::WAITERS_MAX;
        BoundedSemaphore { semaphore, waiting: AtomicUsize::new(0), waiters_max, busy }
    }

    /// Sets the maximum number of waiters.
    fn with_waiters(self, waiters_max: usize) -> BoundedSemaphore {
        BoundedSemaphore { waiters_max, ..self }
    }

    /// Waits for a permit. Fails with the error of a busy server if too many requests wait already.
    async fn acquire(&self) -> Result<OwnedSemaphorePermit, RequestError> {
        let waiting = WaiterGuard::new(&self.waiting);
        if waiting.waiting_before >= self.waiters_max {
            return Err((self.busy)(self.waiters_max));
        }
        self.semaphore.clone().acquire_owned().await.map_err(|_| RequestError::EngineStopped)
    }
}

/// Counts one waiter until it is dropped, so that a client that disconnects while it waits is no longer
/// counted.
struct WaiterGuard<'a> {
    count: &'a AtomicUsize,
    waiting_before: usize,
}

impl WaiterGuard<'_> {
    fn new(count: &AtomicUsize) -> WaiterGuard<'_> {
        WaiterGuard { count, waiting_before: count.fetch_add(1, Ordering::SeqCst) }
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A response in progress, counted until it is dropped. Held by the handler, then by the response body.
struct OpenResponse(Arc<AtomicUsize>);

impl Drop for OpenResponse {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
