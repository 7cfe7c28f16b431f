//! HTTP: the OpenAI completions API, what the server says about itself, and how it comes and goes.
//!
//! A request's future and its response's body hold the reply stream, so a client that hangs up drops it and
//! nothing else has to be told.
//! Invariant: every answer that is not a success carries the OpenAI error object, `/health` excepted.

pub mod lifecycle;

pub mod access;

pub mod completions;

pub mod params;

pub mod wire;

pub mod error;

pub mod about;

#[cfg(test)]
mod tests;

pub use lifecycle::{Ending, Server};

use crate::actors::{IntakeHandle, ModelInfo, Status};
use crate::config::ServerConfig;
use crate::request::RequestError;
use crate::text::Tokenizer;
use actix_web::http::header::{ALLOW, HeaderValue};
use actix_web::{Resource, ResponseError, web};
use error::ApiError;
use metrics_exporter_prometheus::PrometheusHandle;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What the server needs of the engine.
#[derive(Clone)]
pub struct ServeParts {
    pub intake: IntakeHandle,
    pub status: Arc<Status>,
    pub tokenizer: Arc<Tokenizer>,
    pub model: ModelInfo,
}

/// What every handler may look at.
pub struct App {
    pub parts: ServeParts,
    pub config: ServerConfig,
    pub metrics: PrometheusHandle,
    /// Long bodies being read, and those that wait for it.
    long_bodies: Turns,
    open: Arc<AtomicUsize>,
}

impl App {
    fn new(parts: ServeParts, config: ServerConfig, metrics: PrometheusHandle) -> App {
        let long_bodies = Turns::new(config.workers);
        App { parts, config, metrics, long_bodies, open: Arc::default() }
    }

    /// Notes a response that shutdown waits for, until the value is dropped.
    fn open_response(&self) -> OpenResponse {
        self.open.fetch_add(1, Ordering::SeqCst);
        OpenResponse(self.open.clone())
    }

    /// Whether nothing is in flight, neither in the engine nor on its way to a client.
    fn is_idle(&self) -> bool {
        self.open.load(Ordering::SeqCst) == 0 && self.parts.status.pending() == 0
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
            return Err(RequestError::Busy { waiting: waiting.before, limit: Turns::WAITING_MAX });
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

/// All paths with their handlers.
fn routes(config: &mut web::ServiceConfig) {
    config
        .service(resource("/v1/completions", "POST").route(web::post().to(completions::completions)))
        .service(resource("/v1/models", "GET").route(web::get().to(about::models)))
        .service(resource("/health", "GET").route(web::get().to(about::health)))
        .service(resource("/metrics", "GET").route(web::get().to(about::metrics)))
        .service(resource("/version", "GET").route(web::get().to(about::version)))
        .default_service(web::to(async || ApiError::not_found().error_response()));
}

/// A path that answers 405 to all methods but the ones it is given.
fn resource(path: &str, allowed: &'static str) -> Resource {
    web::resource(path).default_service(web::to(move || async move {
        let mut response = ApiError::method_not_allowed(allowed).error_response();
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        response
    }))
}
