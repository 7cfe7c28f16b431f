//! The reply stream: converts a sequence's events to text. It detokenizes without splitting characters, ends
//! the text at stop strings, tracks each token's offset in the text, and measures the request as the client
//! sees it. [`ChoiceStreams`] are the reply streams of one request.
//!
//! Owned by the HTTP task; dropping it cancels the sequence.
//! Invariant: the concatenated texts of all deltas are the reply, every token is emitted exactly once, and
//! the last item is an end or an error, once.

use super::request_metrics::{RequestMetrics, Usage};
use super::speculation::DraftCounts;
use super::stream::TokenStream;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use crate::text::stop::{StopMatcher, StopSearch};
use crate::text::{Detokenizer, Tokenizer};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Add;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Options for converting a sequence's events to text.
#[derive(Clone, Debug, Default)]
pub struct ReplySpec {
    /// Whether the reply starts with the prompt's text.
    pub echo: bool,
    /// Whether the tokens of this text have log-probabilities. Those of a prompt's first choice come with its
    /// events, and the others get them from [`ChoiceStreams`].
    pub echo_scores: bool,
    /// Whether the prompt's scored tokens are kept for [`ChoiceStreams::take_prompts`].
    pub keep_prompt: bool,
    /// Strings that end the reply; none is empty.
    pub stop: Arc<[String]>,
    /// Whether the reply includes the stop string or token that ends it.
    pub include_stop: bool,
    /// Whether the text includes special tokens.
    pub show_special: bool,
    /// Special tokens that the text includes in any case.
    pub shown_tokens: Arc<[u32]>,
    /// Name of the operation in traces.
    pub operation: &'static str,
}

/// A part of the reply: text, and the tokens whose text is complete with it.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplyDelta {
    /// Whole characters; empty if the tokens have no text.
    pub text: String,
    pub tokens: Vec<PlacedToken>,
    pub origin: DeltaOrigin,
    /// The reason of the end; set in the last delta only.
    pub end: Option<ReplyEnd>,
    /// The score of a beam search's result; set in the last delta only, unless a stop string cut the result.
    pub beam_score: Option<f32>,
}

/// The reason for which a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyEnd {
    /// The engine ended the sequence.
    Engine(FinishReason),
    /// The reply contains this stop string.
    StopString(String),
}

impl ReplyEnd {
    /// Returns the `finish_reason` of the OpenAI API.
    pub fn as_str(&self) -> &'static str {
        match self {
            ReplyEnd::Engine(reason) => reason.as_str(),
            ReplyEnd::StopString(_) => FinishReason::Stop.as_str(),
        }
    }
}

/// Whether a delta's tokens are from the prompt or generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaOrigin {
    Prompt,
    Answer,
}

/// A token and the offset of its text in the reply.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedToken {
    pub token: Token,
    /// Number of characters (Unicode scalar values) of the reply before the first one that the token
    /// contributes to.
    pub offset: usize,
}

/// Converts a sequence's events to text deltas.
pub struct ReplyStream {
    events: TokenStream,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stop: Arc<[String]>,
    /// Whether the reply includes the stop string or token that ends it.
    include_stop: bool,
    /// Number of leading generated tokens whose text is not searched for stop strings (`min_tokens`).
    unsearched_tokens: usize,
    echo: Echo,
    /// The prompt's tokens with their log-probabilities, if they are to be kept.
    prompt: Option<Vec<Token>>,
    /// Tokens whose text is not emitted completely, each with the reply's length in characters up to the
    /// token's end.
    pending: VecDeque<(PlacedToken, usize)>,
    /// Characters decoded from tokens.
    decoded_chars: usize,
    /// Characters emitted so far.
    emitted_chars: usize,
    beam_score: Option<f32>,
    metrics: RequestMetrics,
}

/// The prompt's text that is still to come at the start of the reply.
enum Echo {
    Nothing,
    /// Text of these tokens, without log-probabilities: the engine does not send them.
    Bare(Arc<[u32]>),
    /// Text of the tokens that the engine sends.
    FromEngine,
    /// Text of the tokens that the engine sends for the prompt's first choice: the next `awaited` ones, of
    /// which `runs` are there.
    FromFirst {
        awaited: usize,
        runs: VecDeque<Arc<[Token]>>,
    },
}

impl Echo {
    fn new(spec: &ReplySpec, request: &Request) -> Echo {
        match spec.echo {
            false => Echo::Nothing,
            true if request.prompt_logprobs.is_some() => Echo::FromEngine,
            true if spec.echo_scores => {
                Echo::FromFirst { awaited: request.prompt.len(), runs: VecDeque::new() }
            }
            true => Echo::Bare(request.prompt.clone()),
        }
    }
}

impl ReplyStream {
    /// Creates the reply stream of `request`, which was just accepted, from its `events`.
    pub fn new(
        events: TokenStream,
        tokenizer: Arc<Tokenizer>,
        request: &Request,
        spec: &ReplySpec,
    ) -> ReplyStream {
        let fresh = Detokenizer::new(tokenizer, !spec.show_special).with_kept(spec.shown_tokens.clone());
        let detokenizer = if spec.echo { fresh } else { fresh.with_prompt(&request.prompt) };
        ReplyStream {
            events,
            detokenizer,
            matcher: StopMatcher::new(spec.stop.clone(), spec.include_stop),
            stop: spec.stop.clone(),
            include_stop: spec.include_stop,
            unsearched_tokens: request.min_tokens as usize,
            echo: Echo::new(spec, request),
            prompt: spec.keep_prompt.then(Vec::new),
            pending: VecDeque::new(),
            decoded_chars: 0,
            emitted_chars: 0,
            beam_score: None,
            metrics: RequestMetrics::new(request).with_operation(spec.operation),
        }
    }

    /// Polls for the next delta. There is nothing after the delta with `end`, or after an error.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<ReplyDelta, RequestError>>> {
        if self.is_finished() {
            return Poll::Ready(None);
        }
        if let Some(delta) = ready!(self.echo_delta()) {
            return Poll::Ready(Some(Ok(delta)));
        }
        loop {
            let delta = match ready!(self.events.poll_next(cx)) {
                Some(TokenEvent::Prompt(tokens)) => {
                    self.prompt.iter_mut().for_each(|kept| kept.extend_from_slice(&tokens));
                    match self.echo {
                        Echo::FromEngine => Ok(self.prompt_delta(tokens.into_iter())),
                        Echo::Nothing | Echo::Bare(_) | Echo::FromFirst { .. } => continue,
                    }
                }
                Some(TokenEvent::Token(token)) => match self.answer_delta(token) {
                    Some(delta) => Ok(delta),
                    None => continue,
                },
                Some(TokenEvent::EndToken(token)) => match self.end_token_delta(token) {
                    Some(delta) => Ok(delta),
                    None => continue,
                },
                Some(TokenEvent::Started { cached_tokens }) => {
                    self.metrics.usage.cached_tokens = cached_tokens;
                    self.metrics.record_scheduled(self.events.produced_at());
                    continue;
                }
                Some(TokenEvent::BeamScore(score)) => {
                    self.beam_score = Some(score);
                    continue;
                }
                Some(TokenEvent::Speculated { drafted, accepted }) => {
                    self.metrics.usage.drafts = Some(DraftCounts { drafted, accepted });
                    continue;
                }
                // These events are not text.
                Some(TokenEvent::Embedding(_) | TokenEvent::MaskFilled(_)) => continue,
                Some(TokenEvent::Finished(reason)) => Ok(self.final_delta(reason)),
                Some(TokenEvent::Failed(error)) => Err(self.fail(error)),
                None => {
                    let error = self.metrics.closed_error();
                    Err(self.fail(error))
                }
            };
            return Poll::Ready(Some(delta));
        }
    }

    /// Returns the next delta; the polling form is [`ReplyStream::poll_next`]. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<ReplyDelta, RequestError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Whether the end, or an error, has been returned.
    pub fn is_finished(&self) -> bool {
        self.metrics.is_finished()
    }

    /// Ends the reply with `error`, unless it has ended, and returns the error.
    fn fail(&mut self, error: RequestError) -> RequestError {
        if !self.is_finished() {
            self.metrics.fail(&error);
            self.events.close();
        }
        error
    }

    /// Returns the next delta of the prompt, unless it comes with the events. Nothing wakes the task of a
    /// stream that is pending here: [`ChoiceStreams`] polls it again after the first choice.
    fn echo_delta(&mut self) -> Poll<Option<ReplyDelta>> {
        match std::mem::replace(&mut self.echo, Echo::Nothing) {
            Echo::Bare(prompt) => {
                let bare = |id: &u32| Token { id: *id, logprob: None, rank: None, top: Vec::new() };
                Poll::Ready(Some(self.prompt_delta(prompt.iter().map(bare))))
            }
            Echo::FromFirst { awaited, mut runs } if awaited > 0 => {
                let run = runs.pop_front();
                let awaited = awaited.saturating_sub(run.as_ref().map_or(0, |run| run.len()));
                self.echo = Echo::FromFirst { awaited, runs };
                run.map_or(Poll::Pending, |run| Poll::Ready(Some(self.prompt_delta(run.iter().cloned()))))
            }
            echo => {
                self.echo = echo;
                Poll::Ready(None)
            }
        }
    }

    /// Adds tokens of the prompt, if they are to come from the prompt's first choice.
    fn add_prompt(&mut self, run: &Arc<[Token]>) {
        if let Echo::FromFirst { runs, .. } = &mut self.echo {
            runs.push_back(run.clone());
        }
    }

    /// Processes a generated token. Returns `None` if neither text nor tokens can be emitted yet.
    fn answer_delta(&mut self, token: Token) -> Option<ReplyDelta> {
        self.record_token();
        let decoded = self.decode(token);
        let StopSearch { text, hit } = self.search(decoded);
        if let Some(index) = hit {
            return Some(self.stop_string_delta(text, index));
        }
        let delta = self.delta(text, DeltaOrigin::Answer);
        (!delta.text.is_empty() || !delta.tokens.is_empty()).then_some(delta)
    }

    fn record_token(&mut self) {
        self.metrics.slot = self.events.slot();
        self.metrics.record_token(self.events.produced_at());
    }

    /// Searches the next text of the answer for stop strings, once `min_tokens` are generated.
    fn search(&mut self, text: String) -> StopSearch {
        if self.metrics.usage.completion_tokens > self.unsearched_tokens {
            self.matcher.push(text)
        } else {
            StopSearch { text, hit: None }
        }
    }

    /// Processes the token that ended the sequence. Its text is omitted, unless stops are included.
    fn end_token_delta(&mut self, token: Token) -> Option<ReplyDelta> {
        if self.include_stop {
            return self.answer_delta(token);
        }
        self.record_token();
        // The token is emitted with the last delta.
        self.pending.push_back((PlacedToken { token, offset: self.decoded_chars }, usize::MAX));
        None
    }

    /// Decodes a token, and returns the text that is final with it.
    fn decode(&mut self, token: Token) -> String {
        let offset = self.decoded_chars;
        let text = self.detokenizer.push(token.id);
        self.decoded_chars += text.chars().count();
        // A token that begins an incomplete character takes part in that character.
        let end = self.decoded_chars + usize::from(!self.detokenizer.is_flushed());
        self.pending.push_back((PlacedToken { token, offset }, end));
        text
    }

    /// Builds a delta of `text`, with the tokens whose text is complete with it.
    fn delta(&mut self, text: String, origin: DeltaOrigin) -> ReplyDelta {
        self.emitted_chars += text.chars().count();
        let complete = self.pending.iter().take_while(|(_, end)| *end <= self.emitted_chars).count();
        let tokens = self.pending.drain(..complete).map(|(token, _)| token).collect();
        ReplyDelta { text, tokens, origin, end: None, beam_score: None }
    }

    /// Builds the delta of the prompt. It contains all prompt tokens; a character that the prompt leaves
    /// incomplete is emitted with the token that completes it.
    fn prompt_delta(&mut self, tokens: impl Iterator<Item = Token>) -> ReplyDelta {
        let text: String = tokens.map(|token| self.decode(token)).collect();
        let rest = self.delta(text, DeltaOrigin::Prompt);
        let tokens = rest.tokens.into_iter().chain(self.take_pending()).collect();
        ReplyDelta { tokens, ..rest }
    }

    /// Builds the last delta: flushes the detokenizer and the stop matcher.
    fn final_delta(&mut self, reason: FinishReason) -> ReplyDelta {
        let rest = self.detokenizer.finish();
        self.decoded_chars += rest.chars().count();
        // The text of an incomplete character may complete a stop string, too.
        let StopSearch { text, hit } = self.search(rest);
        if let Some(index) = hit {
            return self.stop_string_delta(text, index);
        }
        let (text, end) = (text + &self.matcher.finish(), ReplyEnd::Engine(reason));
        self.metrics.finish(end.as_str());
        let tokens = self.take_pending().collect();
        let origin = DeltaOrigin::Answer;
        ReplyDelta { text, tokens, origin, end: Some(end), beam_score: self.beam_score }
    }

    /// Builds the last delta after a stop string was found, and cancels the sequence.
    fn stop_string_delta(&mut self, text: String, index: usize) -> ReplyDelta {
        let end = ReplyEnd::StopString(self.stop[index].clone());
        self.metrics.finish(end.as_str());
        self.events.close();
        ReplyDelta {
            text,
            tokens: self.take_pending().collect(),
            origin: DeltaOrigin::Answer,
            end: Some(end),
            beam_score: None,
        }
    }

    /// Takes all tokens that are not emitted yet.
    fn take_pending(&mut self) -> impl Iterator<Item = PlacedToken> + use<> {
        std::mem::take(&mut self.pending).into_iter().map(|(token, _)| token)
    }
}

/// A future that completes when the request must end early, with the reason.
pub type Interrupt = Pin<Box<dyn Future<Output = RequestError>>>;

/// The reply streams of one request, one per choice.
pub struct ChoiceStreams {
    choices: Vec<ReplyStream>,
    /// Number of prompt tokens, each prompt counted once.
    prompt_tokens: usize,
    /// Number of choices of each prompt; they are next to each other.
    choices_per_prompt: usize,
    /// Index of the choice that is polled first, so that polling is fair.
    next_choice: usize,
    finished: bool,
    interrupt: Interrupt,
}

impl ChoiceStreams {
    /// Creates the streams of a request from its `choices`, `choices_per_prompt` (at least 1) for each of its
    /// prompts, which have `prompt_tokens` tokens in total.
    pub fn new(
        choices: Vec<ReplyStream>,
        choices_per_prompt: usize,
        prompt_tokens: usize,
        interrupt: Interrupt,
    ) -> ChoiceStreams {
        let (next_choice, finished) = (0, false);
        ChoiceStreams { choices, prompt_tokens, choices_per_prompt, next_choice, finished, interrupt }
    }

    /// Polls for the next delta and the index of its choice. There is nothing after the end of every choice,
    /// or after an error, which ends all choices.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<(usize, ReplyDelta), RequestError>>> {
        if self.finished {
            return Poll::Ready(None);
        }
        let choices = self.choices.len();
        for index in (0..choices).map(|ahead| (self.next_choice + ahead) % choices) {
            match self.choices[index].poll_next(cx) {
                Poll::Ready(Some(Ok(delta))) => {
                    self.next_choice = index + 1;
                    if delta.origin == DeltaOrigin::Prompt {
                        self.share_prompt(index, &delta);
                    }
                    return Poll::Ready(Some(Ok((index, delta))));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(self.fail(error)))),
                Poll::Ready(None) | Poll::Pending => {}
            }
        }
        if self.choices.iter().all(ReplyStream::is_finished) {
            self.finished = true;
            return Poll::Ready(None);
        }
        let error = ready!(self.interrupt.as_mut().poll(cx));
        Poll::Ready(Some(Err(self.fail(error))))
    }

    /// Gives the prompt of a first choice to the others of the same prompt.
    fn share_prompt(&mut self, index: usize, delta: &ReplyDelta) {
        let others = match index.is_multiple_of(self.choices_per_prompt) {
            true => &mut self.choices[index + 1..index + self.choices_per_prompt],
            false => return,
        };
        if others.iter().any(|other| matches!(other.echo, Echo::FromFirst { .. })) {
            let run: Arc<[Token]> = delta.tokens.iter().map(|placed| placed.token.clone()).collect();
            others.iter_mut().for_each(|other| other.add_prompt(&run));
        }
    }

    /// Returns the next delta; the polling form is [`ChoiceStreams::poll_next`]. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<(usize, ReplyDelta), RequestError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Ends every choice with `error`, and returns it.
    fn fail(&mut self, error: RequestError) -> RequestError {
        self.finished = true;
        self.choices.iter_mut().fold(error, |error, choice| choice.fail(error))
    }

    /// Takes the scored tokens of each prompt, if the streams keep them: those of its first choice.
    pub fn take_prompts(&mut self) -> Vec<Vec<Token>> {
        let first_choices = self.choices.iter_mut().step_by(self.choices_per_prompt);
        first_choices.filter_map(|reply| reply.prompt.take()).collect()
    }

    /// Returns the token counts so far. Each prompt counts once, with the cached tokens of its first choice.
    pub fn usage(&self) -> Usage {
        let counts = || self.choices.iter().map(|reply| reply.metrics.usage);
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: counts().map(|usage| usage.completion_tokens).sum(),
            cached_tokens: counts().step_by(self.choices_per_prompt).map(|usage| usage.cached_tokens).sum(),
            drafts: counts().filter_map(|usage| usage.drafts).reduce(DraftCounts::add),
        }
    }
}
