//! The API within the process, without HTTP: it takes the same request bodies and returns the same response
//! bodies.
//!
//! Invariant: responses equal those that an HTTP client gets, except for the status line and headers.

use super::chat::Chats;
use super::completions::Completions;
use super::embeddings::Wish;
use super::encoders::{Question, ask};
use super::error::ApiError;
use super::fill_mask::Masks;
use super::respond::{Answer, Api, respond};
use super::{App, RequestId, ServeParts};
use crate::config::ServerConfig;
use serde_json::Value;
use std::sync::Arc;

/// The API of one engine, called within this process.
#[derive(Clone)]
pub struct Local(Arc<App>);

impl Local {
    /// Creates the API for the engine of `parts`. The connection settings of `config` are ignored. Metrics
    /// are recorded only if the process has installed a recorder, whose upkeep the caller must run.
    pub fn new(parts: ServeParts, config: ServerConfig) -> Local {
        Local(Arc::new(App::new(parts, config)))
    }

    /// Handles a request body posted to `path`. Fails if `path` is not one of the model's endpoints.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer, ApiError> {
        let (app, id) = (&self.0, RequestId::fresh().0);
        let body = body.to_string().into();
        match path {
            Completions::PATH => respond::<Completions>(app, id, body).await,
            Chats::PATH => respond::<Chats>(app, id, body).await,
            Wish::PATH => ask::<Wish>(app, id, body).await.map(Answer::Whole),
            Masks::PATH => ask::<Masks>(app, id, body).await.map(Answer::Whole),
            _ => Err(ApiError::not_found()),
        }
    }

    /// Returns the engine's handles and the model data.
    pub fn parts(&self) -> &ServeParts {
        &self.0.parts
    }
}
