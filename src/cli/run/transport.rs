//! The way of a request to a server and of its answer back: JSON there, JSON or server-sent events back. One
//! trait, so that the engine in this process and a server elsewhere are the same to everything above.
//!
//! Invariant: whoever drops an answer waits for nothing. The engine learns of it at once, a server by the next that it
//! sends.

use crate::cli::escape;
use crate::server::{Answer, Local};
use actix_web::web::Bytes;
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::LocalBoxStream;
use serde_json::Value;

/// Carries requests.
pub trait Transport {
    /// Posts `body` to `path`, such as `/v1/completions`. What is not a success is a [`Failure`].
    fn post<'a>(&'a self, path: &'a str, body: &'a Value) -> LocalBoxFuture<'a, Result<Reply, Failure>>;
}

/// What comes back.
pub enum Reply {
    /// A JSON object.
    Whole(Bytes),
    /// The bytes of server-sent events, cut anywhere.
    Events(LocalBoxStream<'static, Result<Bytes, Failure>>),
}

/// Why a model can complete, and not chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoChat {
    NoTemplate,
    /// An encoder reads what it answers.
    ReadsSources,
}

/// Why there is no answer, or no more of it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// For the user; without control characters.
    pub message: String,
    /// What the server said, if it was JSON.
    pub body: Option<Value>,
}

impl Failure {
    pub fn new(message: impl AsRef<str>) -> Failure {
        Failure { message: escape::visible(message.as_ref()).into_owned(), body: None }
    }

    /// The failure that an error object tells of, in the forms that servers give it.
    pub fn told(body: Value) -> Failure {
        let texts = [&body["error"]["message"], &body["error"], &body["message"], &body["detail"]];
        let message = texts.into_iter().find_map(|text| text.as_str().map(str::to_string));
        let message = message.unwrap_or_else(|| body.to_string());
        Failure { body: Some(body), ..Failure::new(message) }
    }

    /// Why the model cannot chat, if that is what it says. Servers have a common code for it no more than a common
    /// text.
    pub fn no_chat(&self) -> Option<NoChat> {
        let code = self.body.as_ref().and_then(|body| body["error"]["code"].as_str());
        let texts = ["no chat template", "must provide a chat template"];
        match code {
            Some("wrong_endpoint") => {
                self.message.contains("/v1/completions").then_some(NoChat::ReadsSources)
            }
            Some("no_chat_template") => Some(NoChat::NoTemplate),
            _ => texts.iter().any(|text| self.message.contains(text)).then_some(NoChat::NoTemplate),
        }
    }
}

/// The engine in this process.
impl Transport for Local {
    fn post<'a>(&'a self, path: &'a str, body: &'a Value) -> LocalBoxFuture<'a, Result<Reply, Failure>> {
        Box::pin(async move {
            match Local::post(self, path, body).await {
                Ok(Answer::Whole(bytes)) => Ok(Reply::Whole(bytes)),
                Ok(Answer::Events(events)) => Ok(Reply::Events(events.map(Ok).boxed_local())),
                Err(error) => {
                    let body = serde_json::to_value(error.body()).ok();
                    Err(Failure { body, ..Failure::new(error.to_string()) })
                }
            }
        })
    }
}
