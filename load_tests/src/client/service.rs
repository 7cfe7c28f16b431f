//! An OpenAI-compatible service: its models, API keys and the form of its requests.
//!
//! Invariant: API keys are stored only as header values marked as sensitive.

use std::time::Duration;

use anyhow::{Context, ensure};
use http_body_util::Full;
use hyper::{
    Method, Request, Uri,
    body::Bytes,
    header::{ACCEPT, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, USER_AGENT},
};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::{
    connection::{Connection, RequestBody, head_failure},
    server::Server,
};
use crate::{
    plan::requests::{self, Endpoint},
    run::{Connections, Secret, Target},
};

/// Maximum size in bytes of a model list or a metrics page.
const PAGE_BYTES_MAX: usize = 16 << 20;

const BEARER: &str = "Bearer ";

const AGENT: &str = concat!("load_tests/", env!("CARGO_PKG_VERSION"));

/// The service under test: everything that the requests of a run have in common.
#[derive(Debug)]
pub struct Service {
    pub server: Server,
    pub models: Vec<String>,
    keys: Vec<HeaderValue>,
    endpoint: Endpoint,
    extra_body: Map<String, Value>,
    uri: Uri,
    headers: HeaderMap,
}

impl Service {
    /// Resolves the service of `target`. If it names no model, the first model that the server lists is used;
    /// the query takes at most `patience`.
    pub async fn resolve(
        target: &Target,
        connections: Connections,
        patience: Duration,
    ) -> anyhow::Result<Self> {
        let server = Server::resolve(&target.url, target.ca.as_deref()).context("the server's URL")?;
        ensure!(!server.path().contains('?'), "the server's URL must not have a query");
        let keys = key_headers(&target.keys)?;
        let prefix = server.path().trim_end_matches('/').to_string();
        let models = match target.models.as_slice() {
            [] => vec![first_model(&server, &prefix, keys.first(), patience).await.with_context(|| {
                format!("listing the models at {prefix}/v1/models (use --model to name one)")
            })?],
            models => models.to_vec(),
        };
        let path = match target.endpoint {
            Endpoint::Completions => "completions",
            Endpoint::Chat => "chat/completions",
        };
        Ok(Self {
            models,
            keys,
            endpoint: target.endpoint,
            extra_body: target.extra_body.clone(),
            uri: format!("{prefix}/v1/{path}").parse().context("the server's URL")?,
            headers: common_headers(&server, connections),
            server,
        })
    }

    /// Serializes the body of `request`.
    pub fn body(&self, request: &requests::Request) -> Bytes {
        request.body(self.endpoint, &self.models[request.model], &self.extra_body).into()
    }

    /// Builds the HTTP request with `body` and the API key of index `key`.
    pub fn http_request(&self, body: Bytes, key: Option<usize>) -> Request<RequestBody> {
        let mut post = Request::new(Full::new(body));
        *post.method_mut() = Method::POST;
        *post.uri_mut() = self.uri.clone();
        *post.headers_mut() = self.headers.clone();
        if let Some(key) = key {
            post.headers_mut().insert(AUTHORIZATION, self.keys[key].clone());
        }
        post
    }

    /// Replaces API keys in a text sent by the server.
    pub fn redact_keys(&self, text: &str) -> String {
        let keys = self.keys.iter().filter_map(|header| header.to_str().ok()?.strip_prefix(BEARER));
        keys.fold(text.to_string(), |text, key| text.replace(key, "[key]"))
    }

    /// Returns the number of API keys.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Fetches the page at the URL of `server`. An API key is sent only if `server` has the origin of this
    /// service.
    pub async fn fetch_page(&self, server: &Server, patience: Duration) -> anyhow::Result<String> {
        let key = self.keys.first().filter(|_| server.has_same_origin(&self.server));
        fetch_text(server, server.path(), key, patience).await
    }
}

fn key_headers(keys: &[Secret]) -> anyhow::Result<Vec<HeaderValue>> {
    let header = |(place, key): (usize, &Secret)| {
        let mut value = HeaderValue::from_str(&format!("{BEARER}{}", key.0)).ok().with_context(|| {
            format!("key {} contains characters that are not allowed in a header", place + 1)
        })?;
        ensure!(!key.0.trim().is_empty(), "key {} is empty", place + 1);
        value.set_sensitive(true);
        Ok(value)
    };
    keys.iter().enumerate().map(header).collect()
}

fn common_headers(server: &Server, connections: Connections) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(HOST, server.host().clone());
    headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
    if connections == Connections::New {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    headers
}

async fn first_model(
    server: &Server,
    prefix: &str,
    key: Option<&HeaderValue>,
    patience: Duration,
) -> anyhow::Result<String> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    let text = fetch_text(server, &format!("{prefix}/v1/models"), key, patience).await?;
    let models: Models = serde_json::from_str(&text).context("the response is not a list of models")?;
    models.data.into_iter().next().map(|model| model.id).context("the list is empty")
}

/// Fetches the text at `path`, within `patience`.
async fn fetch_text(
    server: &Server,
    path: &str,
    key: Option<&HeaderValue>,
    patience: Duration,
) -> anyhow::Result<String> {
    let mut request = Request::new(RequestBody::default());
    *request.uri_mut() = path.parse().context("the path")?;
    *request.headers_mut() = common_headers(server, Connections::New);
    request.headers_mut().remove(CONTENT_TYPE);
    request.headers_mut().insert(ACCEPT, HeaderValue::from_static("*/*"));
    if let Some(key) = key {
        request.headers_mut().insert(AUTHORIZATION, key.clone());
    }
    timeout(patience, fetch(server, request))
        .await
        .with_context(|| format!("no response after {patience:?}"))?
}

async fn fetch(server: &Server, request: Request<RequestBody>) -> anyhow::Result<String> {
    let to_error = |failure: crate::sample::Failure| anyhow::anyhow!("{}: {}", failure.kind, failure.message);
    let mut connection = Connection::open(server, None).await.map_err(to_error)?;
    let answer = connection.request(request).await.map_err(|error| to_error(head_failure(&error)))?;
    let status = answer.status();
    let text = connection.read_text(answer.into_body(), PAGE_BYTES_MAX).await;
    ensure!(status == 200, "the response status is {status}");
    text.ok().context("the response is incomplete or larger than 16 MiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_headers_that_debug_hides_and_bad_ones_are_reported_by_their_place() {
        let keys =
            |keys: &[&str]| key_headers(&Vec::from_iter(keys.iter().map(|key| Secret(key.to_string()))));
        let good = keys(&["sk-1", "sk-2"]).unwrap();
        assert_eq!(good[1], "Bearer sk-2");
        assert!(!format!("{good:?}").contains("sk-"));
        let error = format!("{:?}", keys(&["sk-1", "sk-\u{7}"]).unwrap_err());
        assert!(error.contains("key 2") && !error.contains("sk-"), "{error}");
        assert!(keys(&[" "]).is_err());
    }
}
