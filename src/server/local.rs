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
use super::respond::{GenerationApi, ResponseBody, respond};
use super::scoring::classify::ClassifyRequest;
use super::scoring::rerank::RerankRequest;
use super::scoring::score::ScoreRequest;
use super::tokenize::{detokenize, run_tokenizer_request, tokenize};
use super::turns::Share;
use super::{App, RequestId, ServeParts};
use crate::config::ServerConfig;
use crate::request::Client;
use actix_web::web::Bytes;
use serde_json::Value;
use std::sync::Arc;

const TOKENIZE: &str = "/v1/tokenize";
const DETOKENIZE: &str = "/v1/detokenize";

/// The API of one engine, called within this process.
#[derive(Clone)]
pub struct LocalApi {
    app: Arc<App>,
    client: Arc<Client>,
}

impl LocalApi {
    /// Creates the API for the engine of `parts`. The connection settings of `config` are ignored. Metrics
    /// are recorded only if the process has installed a recorder, whose upkeep the caller must run.
    pub fn new(parts: ServeParts, config: ServerConfig) -> LocalApi {
        LocalApi { app: Arc::new(App::new(parts, config)), client: Client::local() }
    }

    /// Returns the API for requests of `client` that the server of `app` makes itself.
    pub(super) fn of_server(app: Arc<App>, client: Arc<Client>) -> LocalApi {
        LocalApi { app, client }
    }

    /// The paths of [`LocalApi::post`]. Which of them a model supports depends on its kind.
    pub const PATHS: [&str; 9] = [
        ChatApi::PATH,
        CompletionsApi::PATH,
        EmbeddingsRequest::PATH,
        FillMaskRequest::PATH,
        Rerank::PATH,
        ScoreRequest::PATH,
        ClassifyRequest::PATH,
        TOKENIZE,
        DETOKENIZE,
    ];

    /// Sets the client of the requests; it is [`Client::local`] otherwise.
    pub fn with_client(self, client: Arc<Client>) -> LocalApi {
        LocalApi { client, ..self }
    }

    /// Handles a request body posted to `path`. Fails if `path` is not one of the model's endpoints.
    pub async fn post(&self, path: &str, body: &Value) -> Result<ResponseBody, ApiError> {
        self.post_bytes(path, body.to_string().into()).await
    }

    /// Handles a request body posted to `path`, which need not be JSON, like [`LocalApi::post`].
    pub async fn post_bytes(&self, path: &str, body: Bytes) -> Result<ResponseBody, ApiError> {
        self.post_with_id(RequestId::generate().0, path, body, None).await
    }

    /// Handles a request body posted to `path` as the request `id`, like [`LocalApi::post_bytes`]. `memory`
    /// is that of the body, if it is counted.
    pub(super) async fn post_with_id(
        &self,
        id: Arc<str>,
        path: &str,
        body: Bytes,
        memory: Option<Share>,
    ) -> Result<ResponseBody, ApiError> {
        let (app, client) = (&self.app, self.client.clone());
        let body = RequestBody::local(client.id, body, memory);
        match path {
            CompletionsApi::PATH => Ok(respond::<CompletionsApi>(app, id, client, body).await?.body),
            ChatApi::PATH => Ok(respond::<ChatApi>(app, id, client, body).await?.body),
            EmbeddingsRequest::PATH => encode::<EmbeddingsRequest>(app, id, client, body).await,
            FillMaskRequest::PATH => encode::<FillMaskRequest>(app, id, client, body).await,
            Rerank::PATH => encode::<Rerank>(app, id, client, body).await,
            ScoreRequest::PATH => encode::<ScoreRequest>(app, id, client, body).await,
            ClassifyRequest::PATH => encode::<ClassifyRequest>(app, id, client, body).await,
            TOKENIZE => Ok(ResponseBody::Json(run_tokenizer_request(app, body, tokenize).await?.0)),
            DETOKENIZE => Ok(ResponseBody::Json(run_tokenizer_request(app, body, detokenize).await?.0)),
            _ => Err(ApiError::not_found(&app.parts.model.endpoints)),
        }
    }

    /// Returns the engine's handles and the model data.
    pub fn parts(&self) -> &ServeParts {
        &self.app.parts
    }
}

/// The ranking API with its own defaults.
type Rerank = RerankRequest<true>;

/// Handles a request to an API of encoders.
async fn encode<Q: EncoderApi>(
    app: &Arc<App>,
    id: Arc<str>,
    client: Arc<Client>,
    body: RequestBody,
) -> Result<ResponseBody, ApiError> {
    Ok(ResponseBody::Json(run_encoder_request::<Q>(app, id, client, body).await?.0))
}
