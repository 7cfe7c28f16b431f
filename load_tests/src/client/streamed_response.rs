//! The state of a streamed response: its tokens and their arrival times, its end, and the errors it can
//! contain.
//!
//! Invariant: tokens received before a failure are counted, however the bytes were split into chunks.

use std::time::Duration;

use mainstem_sse::SseDecoder;

use super::event::Event;
use crate::sample::{Delivery, Failure, FailureKind, Outcome};

/// The client's next action after a chunk of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAction {
    /// Read on.
    Read,
    /// Close the connection: the client hangs up as planned.
    HangUp,
}

/// The part of a streamed response that was received so far.
#[derive(Debug, Default)]
pub struct StreamedResponse {
    decoder: SseDecoder,
    hang_up_after: Option<u32>,
    /// Tokens received, one entry per event.
    pub deliveries: Vec<Delivery>,
    /// Number of tokens in `deliveries`.
    pub delivered: u32,
    /// Whether the server sends token ids, which makes `delivered` exact.
    has_token_ids: bool,
    /// Number of output tokens as reported by the server.
    usage: Option<u32>,
    /// Number of prompt tokens as reported by the server.
    pub prompt_len: Option<u32>,
    /// Whether `[DONE]` was received.
    pub done: bool,
}

impl StreamedResponse {
    /// Creates the response of a client that hangs up after `hang_up_after` tokens, if given.
    pub fn new(hang_up_after: Option<u32>) -> Self {
        Self { hang_up_after, ..Self::default() }
    }

    /// Processes a chunk of the body received at `now`. Fails when the chunk contains a malformed event or an
    /// error.
    pub fn process_chunk(&mut self, mut piece: &[u8], now: Duration) -> Result<NextAction, Failure> {
        // Moved out of `self` because events borrow from the decoder.
        let mut decoder = std::mem::take(&mut self.decoder);
        while let Some(data) =
            decoder.next(&mut piece).map_err(|error| FailureKind::BadSse.with_message(error))?
        {
            self.process_event(data, now)?;
            if self.hang_up_after.is_some_and(|tokens| self.delivered >= tokens) {
                return Ok(NextAction::HangUp);
            }
        }
        self.decoder = decoder;
        Ok(NextAction::Read)
    }

    fn process_event(&mut self, data: &str, now: Duration) -> Result<(), Failure> {
        let bad =
            |what: &dyn std::fmt::Display| FailureKind::BadSse.with_message(format_args!("{what}: {data}"));
        // Some servers send empty events to keep the connection alive.
        if data.is_empty() {
            return Ok(());
        }
        if self.done {
            return Err(bad(&"event after [DONE]"));
        }
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Event = serde_json::from_str(data).map_err(|error| bad(&error))?;
        if let Some(error) = event.error {
            return Err(FailureKind::ErrorEvent.with_message(error));
        }
        if event.choices.is_none() && event.usage.is_none() {
            return Err(bad(&"event with neither choices nor usage"));
        }
        self.count_tokens(&event, now);
        Ok(())
    }

    fn count_tokens(&mut self, event: &Event, now: Duration) {
        if let Some(usage) = &event.usage {
            self.usage = usage.completion_tokens.or(self.usage);
            self.prompt_len = usage.prompt_tokens.or(self.prompt_len);
        }
        let choices = event.choices.unwrap_or_default();
        self.has_token_ids |= choices.has_token_ids;
        if choices.tokens > 0 {
            self.deliveries.push(Delivery::new(now, choices.tokens));
            self.delivered += choices.tokens;
        }
    }

    /// Returns the number of output tokens: by token ids if the server sends them, else from its usage, else
    /// one per event with text.
    pub fn output_len(&self) -> u32 {
        match self.usage {
            Some(usage) if !self.has_token_ids => usage,
            _ => self.delivered,
        }
    }

    /// Returns the outcome once the body has ended with complete framing. Fails when `[DONE]` or every token
    /// is missing.
    pub fn finish(&self) -> Result<Outcome, Failure> {
        if !self.done {
            self.decoder.finish().map_err(|error| FailureKind::BadSse.with_message(error))?;
            return Err(FailureKind::EarlyClose.with_message("the stream ended without [DONE]"));
        }
        if self.delivered == 0 {
            return Err(FailureKind::NoTokens.with_message("[DONE] without any token"));
        }
        Ok(Outcome::Completed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(chunks: &[&str]) -> (StreamedResponse, Result<NextAction, Failure>) {
        let mut answer = StreamedResponse::new(None);
        let end = chunks
            .iter()
            .try_fold(NextAction::Read, |_, chunk| answer.process_chunk(chunk.as_bytes(), Duration::ZERO));
        (answer, end)
    }

    #[test]
    fn ids_count_before_usage_and_usage_before_events() {
        let text = "data: {\"choices\":[{\"text\":\"ab\"}]}\n\n";
        let ids = "data: {\"choices\":[{\"text\":\"\",\"token_ids\":[1,2,3]}]}\n\n";
        let usage = "data: {\"choices\":[],\
                     \"usage\":{\"prompt_tokens\":5,\"completion_tokens\":9,\"total_tokens\":14}}\n\n";
        let finish = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}],\"usage\":null}\n\n";
        let len = |chunks: &[&str]| answer(chunks).0.output_len();
        assert_eq!(len(&[text, text, finish]), 2);
        assert_eq!(len(&[text, finish, usage]), 9);
        assert_eq!(len(&[ids, ids, finish, usage]), 6);
        assert_eq!(answer(&[ids, finish]).0.deliveries, [Delivery::new(Duration::ZERO, 3)]);
        assert_eq!(answer(&[text]).0.prompt_len, None);
        assert_eq!(answer(&[text, usage, finish]).0.prompt_len, Some(5));
    }

    #[test]
    fn events_that_are_none_fail_and_keep_what_came_before() {
        let good = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        for (bad, kind) in [
            ("data: {\"error\":{\"message\":\"gone\"}}\n\n", FailureKind::ErrorEvent),
            ("data: {}\n\n", FailureKind::BadSse),
            ("data: [1]\n\n", FailureKind::BadSse),
            ("data: {\"choices\":\"x\"}\n\n", FailureKind::BadSse),
            ("rubbish\n", FailureKind::BadSse),
            ("data: [DONE]\n\ndata: {}\n\n", FailureKind::BadSse),
        ] {
            let (answer, end) = answer(&[&format!("{good}{bad}")]);
            assert_eq!(end.map_err(|failure| failure.kind), Err(kind), "{bad}");
            assert_eq!(answer.output_len(), 1, "{bad}");
        }
    }

    #[test]
    fn a_client_leaves_with_its_tokens_and_reads_nothing_more() {
        let mut answer = StreamedResponse::new(Some(3));
        let pair = b"data: {\"choices\":[{\"text\":\"\",\"token_ids\":[1,2]}]}\n\n";
        assert_eq!(answer.process_chunk(pair, Duration::ZERO), Ok(NextAction::Read));
        assert_eq!(
            answer.process_chunk(&[&pair[..], pair, b"rubbish\n"].concat(), Duration::ZERO),
            Ok(NextAction::HangUp)
        );
        assert_eq!(answer.delivered, 4);
    }

    #[test]
    fn an_answer_ends_with_its_mark_and_a_token() {
        let token = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        let done = "data: [DONE]\n\n";
        let end = |chunks: &[&str]| answer(chunks).0.finish().map_err(|failure| failure.kind);
        assert_eq!(end(&[token, done]), Ok(Outcome::Completed));
        assert_eq!(end(&[token]), Err(FailureKind::EarlyClose));
        assert_eq!(end(&[done]), Err(FailureKind::NoTokens));
    }
}
