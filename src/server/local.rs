//! The API without HTTP: the same bodies in, the same bytes out.
//!
//! Invariant: what is answered here is what a client would get, status line and headers apart.

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

/// The API of one engine, within this process.
#[derive(Clone)]
pub struct Local(Arc<App>);

impl Local {
    /// The API before `parts`. Of `config`, what concerns connections has no meaning here. Metrics are recorded only
    /// if the process has installed a recorder, which somebody must then keep up.
    pub fn new(parts: ServeParts, config: ServerConfig) -> Local {
        Local(Arc::new(App::new(parts, config)))
    }

    /// Answers a body posted to `path`, which is one of the model's endpoints.
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

    /// What is served.
    pub fn parts(&self) -> &ServeParts {
        &self.0.parts
    }
}
