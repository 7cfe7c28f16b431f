//! API client: turns questions into requests, and replies into chunks of text. Chats use
//! `/v1/chat/completions`; if there is no chat template, or with `--raw`, the question is completed by
//! `/v1/completions`.
//!
//! Invariant: an answer is complete only if the server says so; a stream that ends without it is a failure.

use super::constraint::TOOLS;
use super::settings::SamplingSettings;
use super::tool_calls::{ToolCall, ToolRound};
use super::transport::{ChatUnsupported, Failure, Reply, Transport};
use actix_web::web::Bytes;
use futures_util::StreamExt;
use futures_util::stream::LocalBoxStream;
use mainstem_sse::{SseDecoder, SseError};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::time::Instant;

/// Default maximum tokens of a raw completion, which seldom ends by itself.
pub const RAW_MAX_TOKENS: u32 = 128;

/// A conversation. A turn without an answer is not repeated as part of the history, because many templates
/// reject two questions in a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dialog {
    pub system: Option<String>,
    pub turns: Vec<Turn>,
}

/// A question and the part of its answer that was received.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    pub question: String,
    /// Calls of tools before the answer, with their results.
    pub rounds: Vec<ToolRound>,
    pub answer: String,
}

impl Turn {
    /// Begins with a question.
    pub fn new(question: impl Into<String>) -> Turn {
        Turn { question: question.into(), rounds: Vec::new(), answer: String::new() }
    }

    /// Returns the messages of question and calls, in the API's format.
    fn messages(&self) -> impl Iterator<Item = Value> + '_ {
        let question = json!({"role": "user", "content": self.question});
        std::iter::once(question).chain(self.rounds.iter().flat_map(ToolRound::messages))
    }
}

impl Dialog {
    /// Adds a question.
    pub fn ask(&mut self, question: impl Into<String>) {
        self.turns.push(Turn::new(question));
    }

    /// The question to answer: the last one.
    fn question(&self) -> &str {
        self.turns.last().map_or("", |turn| &turn.question)
    }

    /// Returns the messages up to the last question and the calls after it, in the API's format.
    fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let mut messages: Vec<Value> = system.collect();
        if let Some((last, before)) = self.turns.split_last() {
            for turn in before.iter().filter(|turn| !turn.answer.is_empty() || !turn.rounds.is_empty()) {
                messages.extend(turn.messages());
                if !turn.answer.is_empty() {
                    messages.push(json!({"role": "assistant", "content": turn.answer}));
                }
            }
            messages.extend(last.messages());
        }
        messages
    }
}

/// The API endpoint that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Chat completions.
    Chat,
    /// Completions: the last question is the prompt.
    Raw,
}

/// Delivery of an answer: in pieces or at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Stream,
    Whole,
}

/// A client of one model.
pub struct Client {
    pub transport: Box<dyn Transport>,
    /// The model's name in the API; `None` leaves it out.
    pub model: Option<String>,
    pub dialect: Dialect,
    pub delivery: Delivery,
    pub settings: SamplingSettings,
}

impl Client {
    /// Sends the dialog's last question.
    pub async fn ask(&self, dialog: &Dialog) -> Result<Answer, Failure> {
        let pace = Timing::start();
        let path = match self.dialect {
            Dialect::Chat => "/v1/chat/completions",
            Dialect::Raw => "/v1/completions",
        };
        let reply = self.transport.post(path, &self.body(dialog)).await?;
        Ok(Answer::new(reply, pace))
    }

    /// Switches to raw completions if `failure` means that the model does not support chat, and returns the
    /// reason. There are no tools in completions, so with tools it stays.
    pub fn fall_back_to_raw(&mut self, failure: &Failure) -> Option<ChatUnsupported> {
        let why = failure
            .chat_unsupported()
            .filter(|_| self.dialect == Dialect::Chat && !self.settings.has(TOOLS))?;
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

/// A chunk of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// The JSON of the event, on one line.
    pub json: String,
    /// Text to show: reasoning and content.
    pub text: String,
    /// Content, which is the answer in later requests.
    pub content: String,
}

/// An answer as it arrives. Dropping it closes the connection; see [`super::transport`].
pub struct Answer {
    source: ReplySource,
    decoder: SseDecoder,
    /// Data of events that have arrived but have not been processed.
    events: VecDeque<String>,
    timing: Timing,
    /// Finish reason that the server reported.
    finish: Option<String>,
    /// Token count of the answer that the server reported.
    tokens: Option<u64>,
    /// Number of cached prompt tokens that the server reported.
    cached: u64,
    /// Calls of tools so far.
    calls: Vec<ToolCall>,
    /// Whether the text so far ends with reasoning.
    ends_with_reasoning: bool,
}

/// The source of an answer's data.
enum ReplySource {
    Whole(Bytes),
    Events(LocalBoxStream<'static, Result<Bytes, Failure>>),
    Exhausted,
}

impl Answer {
    fn new(reply: Reply, pace: Timing) -> Answer {
        let source = match reply {
            Reply::Whole(bytes) => ReplySource::Whole(bytes),
            Reply::Events(events) => ReplySource::Events(events),
        };
        let (decoder, events) = (SseDecoder::default(), VecDeque::new());
        Answer {
            source,
            decoder,
            events,
            timing: pace,
            finish: None,
            tokens: None,
            cached: 0,
            calls: Vec::new(),
            ends_with_reasoning: false,
        }
    }

    /// Returns the next chunk; `None` when the answer is complete.
    pub async fn next(&mut self) -> Result<Option<Chunk>, Failure> {
        let Some(data) = self.next_data().await? else { return Ok(None) };
        let value: Value = serde_json::from_str(&data)
            .map_err(|error| Failure::new(format!("the server sent invalid JSON: {error}")))?;
        if !value["error"].is_null() {
            return Err(Failure::from_body(value));
        }
        let choice = &value["choices"][0];
        let (text, content) = self.texts(choice);
        self.timing.note(&text);
        self.finish = choice["finish_reason"].as_str().map(str::to_string).or(self.finish.take());
        let usage = &value["usage"];
        self.tokens = usage["completion_tokens"].as_u64().or(self.tokens);
        self.cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(self.cached);
        // Line feeds are whitespace in JSON; in strings they are escaped.
        Ok(Some(Chunk { json: data.trim().replace(['\n', '\r'], " "), text, content }))
    }

    /// Returns the text of a choice to show, reasoning and after an empty line content, and the content
    /// alone.
    fn texts(&mut self, choice: &Value) -> (String, String) {
        let message = if choice["message"].is_null() { &choice["delta"] } else { &choice["message"] };
        ToolCall::collect(message, &mut self.calls);
        let mut text = message["reasoning_content"].as_str().unwrap_or_default().to_string();
        self.ends_with_reasoning |= !text.is_empty();
        let content = message["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !content.is_empty() {
            if std::mem::take(&mut self.ends_with_reasoning) {
                text += "\n\n";
            }
            text += content;
        }
        (text, content.to_string())
    }

    /// Returns the next JSON text; `None` after the last.
    async fn next_data(&mut self) -> Result<Option<String>, Failure> {
        loop {
            match self.events.pop_front() {
                Some(data) if data.trim() == "[DONE]" => {
                    self.source = ReplySource::Exhausted;
                    self.events.clear();
                    return Ok(None);
                }
                Some(data) => return Ok(Some(data)),
                None => {}
            }
            let ReplySource::Events(stream) = &mut self.source else { break };
            match stream.next().await {
                Some(bytes) => {
                    let bytes = bytes?;
                    let mut rest = &bytes[..];
                    while let Some(data) = self.decoder.next(&mut rest).map_err(invalid_stream)? {
                        self.events.push_back(data.to_owned());
                    }
                }
                None => return Err(Failure::new("the connection ended before the answer was complete")),
            }
        }
        match std::mem::replace(&mut self.source, ReplySource::Exhausted) {
            ReplySource::Whole(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Ok(None),
        }
    }

    /// Returns the calls of tools that the answer ended with.
    pub fn take_calls(&mut self) -> Vec<ToolCall> {
        std::mem::take(&mut self.calls)
    }

    /// Whether the answer ended at its maximum number of tokens.
    pub fn is_cut(&self) -> bool {
        self.finish.as_deref() == Some("length")
    }

    /// Formats token count, tokens per second and time to first token, as far as they are known, and the
    /// number of cached prompt tokens, if there are any.
    pub fn stats(&self) -> String {
        let stats = self.timing.describe(self.tokens);
        match self.cached {
            0 => stats,
            cached => format!("{stats}, {cached} prompt tokens cached"),
        }
    }
}

fn invalid_stream(error: SseError) -> Failure {
    Failure::new(format!("the server sent an invalid event stream: {error}"))
}

/// Timing of an answer.
struct Timing {
    /// When the request was sent.
    sent: Instant,
    /// When the first text arrived.
    first: Option<Instant>,
    /// When the last text arrived.
    last: Instant,
}

impl Timing {
    fn start() -> Timing {
        let now = Instant::now();
        Timing { sent: now, first: None, last: now }
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
            // The time of the first token includes the prompt, so the rate is that of the others.
            let seconds = (self.last - first).as_secs_f64();
            let rate = tokens.filter(|&tokens| tokens > 1 && seconds > 0.0).map(|n| (n - 1) as f64 / seconds);
            parts.extend(rate.map(|rate| format!("{rate:.1} tokens/s")));
            parts.push(format!("first token after {:.3} s", (first - self.sent).as_secs_f64()));
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
        let contents: Vec<_> =
            dialog.messages().iter().map(|m| m["content"].as_str().unwrap().to_string()).collect();
        assert_eq!(contents, ["Be brief.", "one", "1", "two"]);
    }

    #[test]
    fn the_rate_leaves_the_first_token_out() {
        let sent = Instant::now();
        let first = sent + Duration::from_millis(250);
        let pace = Timing { sent, first: Some(first), last: first + Duration::from_secs(2) };
        assert_eq!(pace.describe(Some(11)), "11 tokens, 5.0 tokens/s, first token after 0.250 s");
        assert_eq!(pace.describe(Some(1)), "1 token, first token after 0.250 s");
        assert_eq!(pace.describe(None), "first token after 0.250 s");
        assert_eq!(Timing { first: None, ..pace }.describe(Some(1)), "1 token, no text");
    }
}
