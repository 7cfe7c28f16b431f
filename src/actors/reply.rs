//! The reply stream: a sequence's events as text. It turns ids into text that never ends amid a character,
//! ends it at a stop string, keeps the place of each token in that text, and measures the request from the
//! client's side. [`Replies`] are the reply streams of one request.
//!
//! Owned by the HTTP task; dropping it hangs up on the engine.
//! Invariant: the texts of all pieces together are the reply, every token leaves exactly once, and the last
//! thing that comes is an end or an error, once.

use super::stream::TokenStream;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use crate::telemetry;
use crate::text::stop::{Searched, StopMatcher};
use crate::text::{Detokenizer, Tokenizer};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tracing::info;

/// What is made of a sequence's events.
#[derive(Clone, Debug, Default)]
pub struct ReplySpec {
    /// The prompt's text opens the reply.
    pub echo: bool,
    /// Strings that end the reply; none is empty.
    pub stop: Arc<[String]>,
    /// The stop string or token that ends the reply is part of it.
    pub keeps_stop: bool,
    /// Special tokens are part of the text.
    pub shows_special: bool,
}

/// A part of the reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Whole characters; none where the piece's tokens have no text.
    pub text: String,
    pub tokens: Vec<PlacedToken>,
    pub origin: Origin,
    /// Set in the last piece.
    pub end: Option<End>,
}

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The engine ended the sequence.
    Engine(FinishReason),
    /// This stop string came.
    StopString(String),
}

impl End {
    /// The word of the OpenAI API.
    pub fn as_str(&self) -> &'static str {
        match self {
            End::Engine(reason) => reason.as_str(),
            End::StopString(_) => FinishReason::Stop.as_str(),
        }
    }
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
    matcher: StopMatcher,
    stop: Arc<[String]>,
    /// The stop string or token that ends the reply is part of it.
    keeps_stop: bool,
    /// Generated tokens whose text is not searched for stop strings.
    unsearched: usize,
    /// The prompt's tokens, while they are to be echoed from here: without log-probabilities the engine
    /// does not send them.
    unsent_prompt: Option<Arc<[u32]>>,
    /// Tokens whose text has not left whole, each with the characters of the reply up to its end.
    held: VecDeque<(PlacedToken, usize)>,
    /// Characters that tokens have given, and of these those that have left.
    chars: usize,
    left: usize,
    measure: Measure,
}

impl ReplyStream {
    /// The reply to `request`, whose events are `events`. The request was taken in just now.
    pub fn new(
        events: TokenStream,
        tokenizer: Arc<Tokenizer>,
        request: &Request,
        spec: &ReplySpec,
    ) -> ReplyStream {
        let fresh = Detokenizer::new(tokenizer, !spec.shows_special);
        let (detokenizer, unsent_prompt) = match spec.echo {
            false => (fresh.with_prompt(&request.prompt), None),
            true if request.prompt_logprobs => (fresh, None),
            true => (fresh, Some(request.prompt.clone())),
        };
        ReplyStream {
            events,
            detokenizer,
            matcher: StopMatcher::new(spec.stop.clone(), spec.keeps_stop),
            stop: spec.stop.clone(),
            keeps_stop: spec.keeps_stop,
            unsearched: request.min_tokens as usize,
            unsent_prompt,
            held: VecDeque::new(),
            chars: 0,
            left: 0,
            measure: Measure::new(request),
        }
    }

    /// The next piece; after the one with `end`, or an error, there is nothing more.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, RequestError>>> {
        if self.is_over() {
            return Poll::Ready(None);
        }
        if let Some(prompt) = self.unsent_prompt.take() {
            let bare = |id: &u32| Token { id: *id, logprob: None, top: Vec::new() };
            return Poll::Ready(Some(Ok(self.prompt_piece(prompt.iter().map(bare)))));
        }
        loop {
            let piece = match ready!(self.events.poll_next(cx)) {
                Some(TokenEvent::Prompt(tokens)) => Ok(self.prompt_piece(tokens.into_iter())),
                Some(TokenEvent::Token(token)) => match self.answer_piece(token) {
                    Some(piece) => Ok(piece),
                    None => continue,
                },
                Some(TokenEvent::Last(token)) => match self.ending_piece(token) {
                    Some(piece) => Ok(piece),
                    None => continue,
                },
                // No part of a text.
                Some(TokenEvent::Embedding(_) | TokenEvent::Filled(_)) => continue,
                Some(TokenEvent::Finished(reason)) => Ok(self.last_piece(reason)),
                Some(TokenEvent::Failed(error)) => Err(self.fail(error)),
                None => {
                    let error = self.measure.why_gone();
                    Err(self.fail(error))
                }
            };
            return Poll::Ready(Some(piece));
        }
    }

    /// [`ReplyStream::poll_next`] as a future. One that is dropped before its answer loses nothing.
    pub async fn next(&mut self) -> Option<Result<Piece, RequestError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Whether the end has been told.
    pub fn is_over(&self) -> bool {
        self.measure.is_over()
    }

    /// Ends the reply, unless it is over, because of `error`, which is given back.
    fn fail(&mut self, error: RequestError) -> RequestError {
        if !self.is_over() {
            self.measure.fail(&error);
            self.events.close();
        }
        error
    }

    /// Takes a generated token in. None if neither text nor a token can leave with it.
    fn answer_piece(&mut self, token: Token) -> Option<Piece> {
        self.measure.token(self.events.made_at());
        let given = self.push(token);
        let Searched { text, hit } = self.search(given);
        if let Some(index) = hit {
            return Some(self.stopped(text, index));
        }
        let piece = self.piece(text, Origin::Answer);
        (!piece.text.is_empty() || !piece.tokens.is_empty()).then_some(piece)
    }

    /// Looks for stop strings in more of the answer's text, if it is long enough for them.
    fn search(&mut self, text: String) -> Searched {
        if self.measure.usage.completion_tokens > self.unsearched {
            self.matcher.push(text)
        } else {
            Searched { text, hit: None }
        }
    }

    /// Takes the token in that ended the sequence. It has no part in the text, unless stops are kept.
    fn ending_piece(&mut self, token: Token) -> Option<Piece> {
        if self.keeps_stop {
            return self.answer_piece(token);
        }
        self.measure.token(self.events.made_at());
        // It leaves with the end.
        self.held.push_back((PlacedToken { token, offset: self.chars }, usize::MAX));
        None
    }

    /// Takes a token in and gives the text that is certain with it.
    fn push(&mut self, token: Token) -> String {
        let offset = self.chars;
        let text = self.detokenizer.push(token.id);
        self.chars += text.chars().count();
        // Of a character that is not complete, the token is a part.
        let end = self.chars + usize::from(!self.detokenizer.holds_nothing());
        self.held.push_back((PlacedToken { token, offset }, end));
        text
    }

    /// A piece of this text, with the tokens that have left whole with it.
    fn piece(&mut self, text: String, origin: Origin) -> Piece {
        self.left += text.chars().count();
        let whole = self.held.iter().take_while(|(_, end)| *end <= self.left).count();
        let tokens = self.held.drain(..whole).map(|(token, _)| token).collect();
        Piece { text, tokens, origin, end: None }
    }

    /// The prompt. Its tokens leave with it; a character that it begins leaves with the token that completes
    /// it.
    fn prompt_piece(&mut self, tokens: impl Iterator<Item = Token>) -> Piece {
        let text: String = tokens.map(|token| self.push(token)).collect();
        let rest = self.piece(text, Origin::Prompt);
        let tokens = rest.tokens.into_iter().chain(self.take_held()).collect();
        Piece { tokens, ..rest }
    }

    fn last_piece(&mut self, reason: FinishReason) -> Piece {
        let rest = self.detokenizer.finish();
        self.chars += rest.chars().count();
        // What was half a character may end a stop string too.
        let (text, end) = match self.search(rest) {
            Searched { text, hit: Some(index) } => (text, End::StopString(self.stop[index].clone())),
            Searched { text, hit: None } => (text + &self.matcher.finish(), End::Engine(reason)),
        };
        self.measure.end(end.as_str());
        let tokens = self.take_held().collect();
        Piece { text, tokens, origin: Origin::Answer, end: Some(end) }
    }

    /// The end by a stop string; the engine is hung up on.
    fn stopped(&mut self, text: String, index: usize) -> Piece {
        let end = End::StopString(self.stop[index].clone());
        self.measure.end(end.as_str());
        self.events.close();
        Piece { text, tokens: self.take_held().collect(), origin: Origin::Answer, end: Some(end) }
    }

    fn take_held(&mut self) -> impl Iterator<Item = PlacedToken> + use<> {
        std::mem::take(&mut self.held).into_iter().map(|(token, _)| token)
    }
}

/// What ends a request from outside: it is done when that happens, with the reason.
pub type Interrupt = Pin<Box<dyn Future<Output = RequestError>>>;

/// The reply streams of one request: one for each choice.
pub struct Replies {
    choices: Vec<ReplyStream>,
    /// Prompts' tokens, each prompt counted once.
    prompt_tokens: usize,
    /// The choice that is asked first, so that none goes hungry.
    turn: usize,
    over: bool,
    interrupt: Interrupt,
}

impl Replies {
    /// `choices` for prompts of `prompt_tokens` tokens in all.
    pub fn new(choices: Vec<ReplyStream>, prompt_tokens: usize, interrupt: Interrupt) -> Replies {
        Replies { choices, prompt_tokens, turn: 0, over: false, interrupt }
    }

    /// The next piece, and the choice it belongs to. After every choice's end, or an error, which ends all of
    /// them, there is nothing more.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(usize, Piece), RequestError>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let choices = self.choices.len();
        for index in (0..choices).map(|ahead| (self.turn + ahead) % choices) {
            match self.choices[index].poll_next(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    self.turn = index + 1;
                    return Poll::Ready(Some(Ok((index, piece))));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(self.fail(error)))),
                Poll::Ready(None) | Poll::Pending => {}
            }
        }
        if self.choices.iter().all(ReplyStream::is_over) {
            self.over = true;
            return Poll::Ready(None);
        }
        let error = ready!(self.interrupt.as_mut().poll(cx));
        Poll::Ready(Some(Err(self.fail(error))))
    }

    /// [`Replies::poll_next`] as a future. One that is dropped before its answer loses nothing.
    pub async fn next(&mut self) -> Option<Result<(usize, Piece), RequestError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Ends every choice because of `error`, which is given back.
    fn fail(&mut self, error: RequestError) -> RequestError {
        self.over = true;
        self.choices.iter_mut().fold(error, |error, choice| choice.fail(error))
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        let completion_tokens = self.choices.iter().map(|reply| reply.measure.usage.completion_tokens).sum();
        Usage { prompt_tokens: self.prompt_tokens, completion_tokens }
    }
}

/// A request's times and tokens, recorded as they come and summed up in one log line at the end, whichever
/// end that is: a measure dropped without one is a client that hung up.
pub struct Measure {
    id: Arc<str>,
    began: Instant,
    first_token_after: Option<Duration>,
    last_token: Instant,
    usage: Usage,
    over: bool,
    between_tokens: metrics::Histogram,
    time_limit: Option<Duration>,
}

impl Measure {
    /// Of a request that was taken in just now.
    pub fn new(request: &Request) -> Measure {
        Measure {
            id: request.id.clone(),
            began: request.arrived,
            first_token_after: None,
            last_token: request.arrived,
            usage: Usage { prompt_tokens: request.given_tokens(), completion_tokens: 0 },
            over: false,
            between_tokens: telemetry::INTER_TOKEN_LATENCY.histogram(),
            time_limit: request.time_limit,
        }
    }

    /// The same, of several texts together.
    pub fn of_tokens(mut self, prompt_tokens: usize) -> Measure {
        self.usage.prompt_tokens = prompt_tokens;
        self
    }

    pub fn is_over(&self) -> bool {
        self.over
    }

    /// One more generated token, made at `now`: a client that reads late does not count.
    fn token(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.last_token);
        match self.first_token_after {
            None => {
                self.first_token_after = Some(since);
                telemetry::TIME_TO_FIRST_TOKEN.record(since.as_secs_f64());
            }
            Some(_) => self.between_tokens.record(since.as_secs_f64()),
        }
        self.last_token = now;
        self.usage.completion_tokens += 1;
    }

    /// Why the engine let go without a word: time may be up, and it saw that first.
    pub fn why_gone(&self) -> RequestError {
        match self.time_limit {
            Some(limit) if self.began.elapsed() >= limit => {
                RequestError::TimedOut { limit_s: limit.as_secs() }
            }
            _ => RequestError::EngineGone,
        }
    }

    /// The request is over because of an error, unless it is over already.
    pub fn fail(&mut self, error: &RequestError) {
        if !self.over {
            self.end(match error {
                RequestError::TimedOut { .. } => "timeout",
                _ => "error",
            });
        }
    }

    /// The request is over: `reason` is a value of `finished_reason`.
    pub fn end(&mut self, reason: &'static str) {
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
