//! Questions to requests, and replies to chunks of text. Chat goes to `/v1/chat/completions`; where there is
//! no chat template, or none is wanted, the question itself is completed by `/v1/completions`.
//!
//! Invariant: an answer is over when the server says so; a stream that just ends is a failure.

use super::settings::Settings;
use super::sse::Parser;
use super::transport::{Failure, NoChat, Reply, Transport};
use actix_web::web::Bytes;
use futures_util::StreamExt;
use futures_util::stream::LocalBoxStream;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::time::Instant;

/// Tokens of a plain completion, which seldom ends by itself, unless the user sets another number.
pub const RAW_MAX_TOKENS: u32 = 128;

/// What has been said. A turn without an answer is asked, but never repeated as part of the history: two
/// questions in a row are refused by many templates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dialog {
    pub system: Option<String>,
    pub turns: Vec<Turn>,
}

/// A question and what was answered, as far as it came.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    pub question: String,
    pub answer: String,
}

impl Dialog {
    /// Adds a question.
    pub fn ask(&mut self, question: impl Into<String>) {
        self.turns.push(Turn { question: question.into(), answer: String::new() });
    }

    /// The question that is to be answered.
    fn question(&self) -> &str {
        self.turns.last().map_or("", |turn| &turn.question)
    }

    /// Everything up to the last question, in the API's form.
    fn messages(&self) -> Vec<Value> {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let mut messages: Vec<Value> = self.system.iter().map(|text| message("system", text)).collect();
        if let Some((last, before)) = self.turns.split_last() {
            for turn in before.iter().filter(|turn| !turn.answer.is_empty()) {
                messages.push(message("user", &turn.question));
                messages.push(message("assistant", &turn.answer));
            }
            messages.push(message("user", &last.question));
        }
        messages
    }
}

/// Which of the two APIs is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Chat,
    /// The last question is completed as it stands.
    Raw,
}

/// How an answer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Stream,
    Whole,
}

/// Asks one model.
pub struct Client {
    pub transport: Box<dyn Transport>,
    /// The model's name in the API; `None` leaves it out.
    pub model: Option<String>,
    pub dialect: Dialect,
    pub delivery: Delivery,
    pub settings: Settings,
}

impl Client {
    /// Asks the dialog's last question.
    pub async fn ask(&self, dialog: &Dialog) -> Result<Answer, Failure> {
        let pace = Pace::start();
        let path = match self.dialect {
            Dialect::Chat => "/v1/chat/completions",
            Dialect::Raw => "/v1/completions",
        };
        let reply = self.transport.post(path, &self.body(dialog)).await?;
        Ok(Answer::new(reply, pace))
    }

    /// Why the model cannot chat, if `failure` says so. It is asked for plain completions from then on.
    pub fn falls_back(&mut self, failure: &Failure) -> Option<NoChat> {
        let why = failure.no_chat().filter(|_| self.dialect == Dialect::Chat)?;
        self.dialect = Dialect::Raw;
        Some(why)
    }

    fn body(&self, dialog: &Dialog) -> Value {
        let mut body = Map::new();
        body.extend(self.model.clone().map(|model| ("model".to_string(), model.into())));
        match self.dialect {
            Dialect::Chat => _ = body.insert("messages".to_string(), dialog.messages().into()),
            Dialect::Raw => _ = body.insert("prompt".to_string(), dialog.question().into()),
        }
        if self.dialect == Dialect::Raw && !self.settings.has("max_tokens") {
            body.insert("max_tokens".to_string(), RAW_MAX_TOKENS.into());
        }
        if self.delivery == Delivery::Stream {
            body.insert("stream".to_string(), true.into());
            body.insert("stream_options".to_string(), json!({"include_usage": true}));
        }
        self.settings.add_to(&mut body);
        Value::Object(body)
    }
}

/// A piece of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// The JSON that it came in, on one line.
    pub json: String,
    pub text: String,
}

/// An answer as it comes. Dropping it hangs up; see [`super::transport`].
pub struct Answer {
    source: Source,
    parser: Parser,
    /// Data of events that have arrived and not been read.
    events: VecDeque<String>,
    pace: Pace,
    finish: Option<String>,
    /// Tokens of the answer, as the server counts them.
    tokens: Option<u64>,
}

enum Source {
    Whole(Bytes),
    Events(LocalBoxStream<'static, Result<Bytes, Failure>>),
    Exhausted,
}

impl Answer {
    fn new(reply: Reply, pace: Pace) -> Answer {
        let source = match reply {
            Reply::Whole(bytes) => Source::Whole(bytes),
            Reply::Events(events) => Source::Events(events),
        };
        let (parser, events) = (Parser::default(), VecDeque::new());
        Answer { source, parser, events, pace, finish: None, tokens: None }
    }

    /// The next piece; `None` when the answer is complete.
    pub async fn next(&mut self) -> Result<Option<Chunk>, Failure> {
        let Some(data) = self.data().await? else { return Ok(None) };
        let value: Value = serde_json::from_str(&data)
            .map_err(|error| Failure::new(format!("the server sent what is no JSON: {error}")))?;
        if !value["error"].is_null() {
            return Err(Failure::told(value));
        }
        let choice = &value["choices"][0];
        let texts = [&choice["delta"]["content"], &choice["text"], &choice["message"]["content"]];
        let text = texts.into_iter().find_map(Value::as_str).unwrap_or_default().to_string();
        self.pace.note(&text);
        self.finish = choice["finish_reason"].as_str().map(str::to_string).or(self.finish.take());
        self.tokens = value["usage"]["completion_tokens"].as_u64().or(self.tokens);
        // Between the tokens of JSON a line feed is a space; within a text it is escaped.
        Ok(Some(Chunk { json: data.trim().replace(['\n', '\r'], " "), text }))
    }

    /// The next JSON text; `None` behind the last.
    async fn data(&mut self) -> Result<Option<String>, Failure> {
        loop {
            match self.events.pop_front() {
                Some(data) if data.trim() == "[DONE]" => {
                    self.source = Source::Exhausted;
                    self.events.clear();
                    return Ok(None);
                }
                Some(data) => return Ok(Some(data)),
                None => {}
            }
            let Source::Events(stream) = &mut self.source else { break };
            match stream.next().await {
                Some(bytes) => self.events.extend(self.parser.push(&bytes?).map_err(too_long)?),
                None => return Err(Failure::new("the connection ended before the answer did")),
            }
        }
        match std::mem::replace(&mut self.source, Source::Exhausted) {
            Source::Whole(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Ok(None),
        }
    }

    /// Whether the answer ended because it may not be longer.
    pub fn is_cut(&self) -> bool {
        self.finish.as_deref() == Some("length")
    }

    /// Tokens, tokens per second and time to the first, as far as they are known.
    pub fn stats(&self) -> String {
        self.pace.describe(self.tokens)
    }
}

fn too_long(error: super::sse::TooLong) -> Failure {
    Failure::new(error.to_string())
}

/// When text came.
struct Pace {
    asked: Instant,
    first: Option<Instant>,
    last: Instant,
}

impl Pace {
    fn start() -> Pace {
        let now = Instant::now();
        Pace { asked: now, first: None, last: now }
    }

    fn note(&mut self, text: &str) {
        if !text.is_empty() {
            self.last = Instant::now();
            self.first.get_or_insert(self.last);
        }
    }

    fn describe(&self, tokens: Option<u64>) -> String {
        let mut parts = Vec::new();
        parts.extend(tokens.map(|n| if n == 1 { "1 token".to_string() } else { format!("{n} tokens") }));
        if let Some(first) = self.first {
            // The first token takes the prompt's time; the rate is that of the others.
            let seconds = (self.last - first).as_secs_f64();
            let rate = tokens.filter(|&tokens| tokens > 1 && seconds > 0.0).map(|n| (n - 1) as f64 / seconds);
            parts.extend(rate.map(|rate| format!("{rate:.1} tokens/s")));
            parts.push(format!("first after {:.3} s", (first - self.asked).as_secs_f64()));
        } else {
            parts.push("no text".to_string());
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn unanswered_questions_are_not_repeated() {
        let mut dialog = Dialog { system: Some("Be brief.".to_string()), ..Dialog::default() };
        dialog.ask("lost");
        dialog.ask("one");
        dialog.turns[1].answer = "1".to_string();
        dialog.ask("two");
        let said: Vec<_> =
            dialog.messages().iter().map(|m| m["content"].as_str().unwrap().to_string()).collect();
        assert_eq!(said, ["Be brief.", "one", "1", "two"]);
    }

    #[test]
    fn the_rate_leaves_the_first_token_out() {
        let asked = Instant::now();
        let first = asked + Duration::from_millis(250);
        let pace = Pace { asked, first: Some(first), last: first + Duration::from_secs(2) };
        assert_eq!(pace.describe(Some(11)), "11 tokens, 5.0 tokens/s, first after 0.250 s");
        assert_eq!(pace.describe(Some(1)), "1 token, first after 0.250 s");
        assert_eq!(pace.describe(None), "first after 0.250 s");
        assert_eq!(Pace { first: None, ..pace }.describe(Some(1)), "1 token, no text");
    }
}
