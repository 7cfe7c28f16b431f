//! Transport of API requests: JSON bodies, answered by JSON or server-sent events. One trait serves the
//! engine in this process and remote servers.
//!
//! Invariant: dropping an answer does not block. The engine notices at once, a server when it sends the next
//! data.

use crate::cli::escape;
use crate::server::{LocalApi, ResponseBody};
use actix_web::web::Bytes;
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::LocalBoxStream;
use serde_json::Value;

/// A way to send API requests.
pub trait Transport {
    /// Posts `body` to `path`, such as `/v1/completions`. Any unsuccessful response is a [`Failure`].
    fn post<'a>(&'a self, path: &'a str, body: &'a Value) -> LocalBoxFuture<'a, Result<Reply, Failure>>;
}

/// A successful response.
pub enum Reply {
    /// A JSON object.
    Whole(Bytes),
    /// Bytes of server-sent events, split anywhere.
    Events(LocalBoxStream<'static, Result<Bytes, Failure>>),
}

/// The reason why a model supports completions but not chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatUnsupported {
    NoTemplate,
    /// The model is an encoder-decoder.
    EncoderDecoder,
}

/// A failed or broken-off answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Message for the user, without control characters.
    pub message: String,
    /// The server's response, if it was JSON.
    pub body: Option<Value>,
}

impl Failure {
    /// Creates a failure with a message, whose control characters are escaped.
    pub fn new(message: impl AsRef<str>) -> Failure {
        Failure { message: escape::visible(message.as_ref()).into_owned(), body: None }
    }

    /// Creates a failure from an error object, in any of the formats that servers use.
    pub fn from_body(body: Value) -> Failure {
        let texts = [&body["error"]["message"], &body["error"], &body["message"], &body["detail"]];
        let message = texts.into_iter().find_map(|text| text.as_str().map(str::to_string));
        let message = message.unwrap_or_else(|| body.to_string());
        Failure { body: Some(body), ..Failure::new(message) }
    }

    /// Returns why the model does not support chat, if that is the failure. Servers share neither an error
    /// code nor a message for it, so several are recognized.
    pub fn chat_unsupported(&self) -> Option<ChatUnsupported> {
        let code = self.body.as_ref().and_then(|body| body["error"]["code"].as_str());
        let texts = ["no chat template", "must provide a chat template"];
        match code {
            Some("wrong_endpoint") => {
                self.message.contains("/v1/completions").then_some(ChatUnsupported::EncoderDecoder)
            }
            Some("no_chat_template") => Some(ChatUnsupported::NoTemplate),
            _ => texts.iter().any(|text| self.message.contains(text)).then_some(ChatUnsupported::NoTemplate),
        }
    }
}

/// The engine in this process.
impl Transport for LocalApi {
    fn post<'a>(&'a self, path: &'a str, body: &'a Value) -> LocalBoxFuture<'a, Result<Reply, Failure>> {
        Box::pin(async move {
            match LocalApi::post(self, path, body).await {
                Ok(ResponseBody::Json(bytes)) => Ok(Reply::Whole(bytes)),
                Ok(ResponseBody::Events(events)) => Ok(Reply::Events(events.map(Ok).boxed_local())),
                Err(error) => {
                    let body = serde_json::to_value(error.body()).ok();
                    Err(Failure { body, ..Failure::new(error.to_string()) })
                }
            }
        })
    }
}
