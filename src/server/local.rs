//! The API within the process, without HTTP: it takes the same request bodies and returns the same response
//! bodies.
//!
//! Invariant: responses equal those that an HTTP client gets, except for the status line and headers.

use super::body::RequestBody;
use super::chat::ChatApi;
use super::completions::CompletionsApi;
use super::embeddings::EmbeddingsRequest;
use super::encoders::{EncoderApi, run_encoder_request};
use super::error::ApiError;
use super::fill_mask::FillMaskRequest;
use super::respond::{GenerationApi, ResponseBody, parse_off_loop, respond};
use super::tokenize::{detokenize, tokenize};
use super::{App, RequestId, ServeParts};
use crate::config::ServerConfig;
use crate::request::Client;
use actix_web::web::Bytes;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// The API of one engine, called within this process.
#[derive(Clone)]
pub struct LocalApi(Arc<App>);

impl LocalApi {
    /// Creates the API for the engine of `parts`. The connection settings of `config` are ignored. Metrics
    /// are recorded only if the process has installed a recorder, whose upkeep the caller must run.
    pub fn new(parts: ServeParts, config: ServerConfig) -> LocalApi {
        LocalApi(Arc::new(App::new(parts, config)))
    }

    /// Handles a request body posted to `path`. Fails if `path` is not one of the model's endpoints.
    pub async fn post(&self, path: &str, body: &Value) -> Result<ResponseBody, ApiError> {
        self.post_bytes(path, body.to_string().into()).await
    }

    /// Handles a request body posted to `path`, which need not be JSON, like [`LocalApi::post`].
    pub async fn post_bytes(&self, path: &str, body: Bytes) -> Result<ResponseBody, ApiError> {
        let (app, id, client) = (&self.0, RequestId::generate().0, Client::local());
        let body = RequestBody::local(body);
        match path {
            CompletionsApi::PATH => Ok(respond::<CompletionsApi>(app, id, client, body).await?.body),
            ChatApi::PATH => Ok(respond::<ChatApi>(app, id, client, body).await?.body),
            EmbeddingsRequest::PATH => {
                let (json, _) = run_encoder_request::<EmbeddingsRequest>(app, id, client, body).await?;
                Ok(ResponseBody::Json(json))
            }
            FillMaskRequest::PATH => {
                let (json, _) = run_encoder_request::<FillMaskRequest>(app, id, client, body).await?;
                Ok(ResponseBody::Json(json))
            }
            "/v1/tokenize" => json(parse_off_loop(app, body, usize::MAX, tokenize).await?.0),
            "/v1/detokenize" => json(parse_off_loop(app, body, usize::MAX, detokenize).await?.0),
            _ => Err(ApiError::not_found(&app.parts.model.endpoints)),
        }
    }

    /// Returns the engine's handles and the model data.
    pub fn parts(&self) -> &ServeParts {
        &self.0.parts
    }
}

/// Returns the body of a response.
fn json(response: impl Serialize) -> Result<ResponseBody, ApiError> {
    let json = serde_json::to_vec(&response).map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(ResponseBody::Json(json.into()))
}
