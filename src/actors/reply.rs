//! The reply stream: a sequence's events as text. It turns ids into text that never ends amid a character,
//! keeps the place of each token in that text, and measures the request from the client's side.
//!
//! Owned by the HTTP task; dropping it hangs up on the engine.
//! Invariant: the texts of all pieces together are the reply, and every token leaves exactly once.

use super::stream::TokenStream;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use crate::telemetry;
use crate::text::{Detokenizer, Tokenizer};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::info;

/// Whether the prompt's text opens the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Echo {
    Prompt,
    Nothing,
}

/// A part of the reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Whole characters; none where the piece's tokens have no text.
    pub text: String,
    pub tokens: Vec<PlacedToken>,
    pub origin: Origin,
    /// Set in the last piece.
    pub finish: Option<FinishReason>,
}

/// Whose tokens a piece carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Prompt,
    Answer,
}

/// A token and where its text begins.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedToken {
    pub token: Token,
    /// Characters (Unicode scalar values) of the reply before the first one that the token takes part in.
    pub offset: usize,
}

/// What a request took, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
}

/// A sequence's events as text.
pub struct ReplyStream {
    events: TokenStream,
    detokenizer: Detokenizer,
    /// The prompt's tokens, while they are to be echoed from here: without log-probabilities the engine
    /// does not send them.
    unsent_prompt: Option<Arc<[u32]>>,
    /// Tokens whose text is not certain yet.
    held: Vec<PlacedToken>,
    /// Characters that have left.
    chars: usize,
    measure: Measure,
}

impl ReplyStream {
    /// The reply to `request`, whose events are `events`. The request was taken in just now.
    pub fn new(events: TokenStream, tokenizer: Arc<Tokenizer>, request: &Request, echo: Echo) -> ReplyStream {
        let fresh = Detokenizer::new(tokenizer, true);
        let (detokenizer, unsent_prompt) = match echo {
            Echo::Nothing => (fresh.with_prompt(&request.prompt), None),
            Echo::Prompt if request.prompt_logprobs => (fresh, None),
            Echo::Prompt => (fresh, Some(request.prompt.clone())),
        };
        let measure = Measure::new(request.id.clone(), request.prompt.len());
        ReplyStream { events, detokenizer, unsent_prompt, held: Vec::new(), chars: 0, measure }
    }

    /// The next piece; after the one with `finish`, or an error, there is nothing more. A call that is
    /// dropped before its answer loses nothing.
    pub async fn next(&mut self) -> Option<Result<Piece, RequestError>> {
        if self.measure.is_over() {
            return None;
        }
        if let Some(prompt) = self.unsent_prompt.take() {
            let bare = |id: &u32| Token { id: *id, logprob: None, top: Vec::new() };
            return Some(Ok(self.prompt_piece(prompt.iter().map(bare))));
        }
        loop {
            match self.events.next().await {
                Some(TokenEvent::Prompt(tokens)) => return Some(Ok(self.prompt_piece(tokens.into_iter()))),
                Some(TokenEvent::Token(token)) => {
                    self.measure.token(self.events.sent_at());
                    let text = self.push(token);
                    // A token without text leaves at once too, unless it waits for the rest of a character.
                    if !text.is_empty() || self.detokenizer.holds_nothing() {
                        return Some(Ok(self.piece(text, Origin::Answer)));
                    }
                }
                Some(TokenEvent::Finished(reason)) => return Some(Ok(self.last_piece(reason))),
                Some(TokenEvent::Failed(error)) => return Some(Err(self.fail(error))),
                None => {
                    return Some(Err(self.fail(RequestError::EngineGone)));
                }
            }
        }
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        self.measure.usage
    }

    /// Takes a token in and gives the text that is certain with it.
    fn push(&mut self, token: Token) -> String {
        let text = self.detokenizer.push(token.id);
        self.held.push(PlacedToken { token, offset: self.chars });
        self.chars += text.chars().count();
        text
    }

    fn piece(&mut self, text: String, origin: Origin) -> Piece {
        Piece { text, tokens: std::mem::take(&mut self.held), origin, finish: None }
    }

    /// A run of the prompt. A character that it begins leaves with the token that completes it.
    fn prompt_piece(&mut self, tokens: impl Iterator<Item = Token>) -> Piece {
        let text = tokens.map(|token| self.push(token)).collect();
        self.piece(text, Origin::Prompt)
    }

    fn last_piece(&mut self, reason: FinishReason) -> Piece {
        self.measure.end(reason.as_str());
        let text = self.detokenizer.finish();
        self.chars += text.chars().count();
        Piece { finish: Some(reason), ..self.piece(text, Origin::Answer) }
    }

    fn fail(&mut self, error: RequestError) -> RequestError {
        self.measure.end("error");
        error
    }
}

/// A request's times and tokens, recorded as they come and summed up in one log line at the end, whichever
/// end that is: a measure dropped without one is a client that hung up.
struct Measure {
    id: Arc<str>,
    began: Instant,
    first_token_after: Option<Duration>,
    last_token: Instant,
    usage: Usage,
    over: bool,
    generated: metrics::Counter,
    between_tokens: metrics::Histogram,
}

impl Measure {
    fn new(id: Arc<str>, prompt_tokens: usize) -> Measure {
        let now = Instant::now();
        Measure {
            id,
            began: now,
            first_token_after: None,
            last_token: now,
            usage: Usage { prompt_tokens, completion_tokens: 0 },
            over: false,
            generated: telemetry::GENERATION_TOKENS.counter(),
            between_tokens: telemetry::INTER_TOKEN_LATENCY.histogram(),
        }
    }

    fn is_over(&self) -> bool {
        self.over
    }

    /// One more generated token, made at `now`: a client that reads late does not count.
    fn token(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.last_token);
        match self.first_token_after {
            None => {
                self.first_token_after = Some(since);
                telemetry::PROMPT_TOKENS.add(self.usage.prompt_tokens as u64);
                telemetry::TIME_TO_FIRST_TOKEN.record(since.as_secs_f64());
            }
            Some(_) => self.between_tokens.record(since.as_secs_f64()),
        }
        self.last_token = now;
        self.usage.completion_tokens += 1;
        self.generated.increment(1);
    }

    /// The request is over: `reason` is a value of `finished_reason`.
    fn end(&mut self, reason: &'static str) {
        self.over = true;
        let took = self.began.elapsed();
        let Usage { prompt_tokens, completion_tokens } = self.usage;
        telemetry::REQUEST_SUCCESS.count([reason]);
        telemetry::E2E_LATENCY.record(took.as_secs_f64());
        telemetry::REQUEST_PROMPT_TOKENS.record(prompt_tokens as f64);
        telemetry::REQUEST_GENERATION_TOKENS.record(completion_tokens as f64);
        let first_token_ms = self.first_token_after.map(|after| after.as_secs_f64() * 1e3);
        info!(
            request = &*self.id,
            reason,
            prompt_tokens,
            completion_tokens,
            first_token_ms,
            took_ms = took.as_secs_f64() * 1e3,
            "request over"
        );
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        if !self.over {
            telemetry::CLIENTS_GONE.add(1);
            self.end("abort");
        }
    }
}
