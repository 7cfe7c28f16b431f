//! Helpers shared by the actors' tests: a recording actor, requests, sequences and a timeout.

use super::account::Account;
use super::response_memory::ResponseMemory;
use super::sequence::{Sequence, SequenceKey};
use super::stream::{TokenStream, event_channel};
use crate::request::Request;
use crate::request::client::ClientId;
use actix::{Actor, Context, Handler, Message, Recipient};
use mainstem_kernels::{Fraction, StepLimits};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Step limits of the smallest device that a test can use.
pub const LIMITS: StepLimits = StepLimits {
    slots: 1,
    rows: 4,
    batch_rows: usize::MAX,
    logit_rows: 1,
    positions: 9,
    encoder_positions: 0,
    page_positions: 32,
    window: None,
    top_logprobs: 0,
    vocab: 9,
    hidden: 0,
    drafts: 0,
    draft_logits: false,
    counts_tokens: false,
    opening_rows: 0,
    attended_fraction: Fraction::ONE,
};

/// Timeout of everything that a test waits for; exceeding it means that something hangs.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the future's output, and fails the test on a timeout.
pub async fn with_timeout<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(TIMEOUT, future).await.expect("the future completes within the timeout")
}

/// An actor that forwards every message it receives to the test.
struct Recorder<M>(UnboundedSender<M>);

impl<M: Unpin + 'static> Actor for Recorder<M> {
    type Context = Context<Recorder<M>>;
}

impl<M: Message<Result = ()> + Unpin + 'static> Handler<M> for Recorder<M> {
    type Result = ();

    fn handle(&mut self, message: M, _: &mut Self::Context) {
        let _ = self.0.send(message);
    }
}

/// Starts a recording actor; returns its address, and the channel of the messages it receives.
pub fn recorder<M: Message<Result = ()> + Unpin + Send + 'static>() -> (Recipient<M>, UnboundedReceiver<M>) {
    let (sender, messages) = unbounded_channel();
    (Recorder(sender).start().recipient(), messages)
}

/// Returns the next recorded message.
pub async fn next_message<M>(messages: &mut UnboundedReceiver<M>) -> M {
    with_timeout(messages.recv()).await.expect("the recording actor is running")
}

/// A greedy request of `prompt` prompt tokens that ignores end-of-sequence tokens.
pub fn request(prompt: usize, max_tokens: u32) -> Request {
    Request { ignore_eos: true, ..Request::greedy("test", vec![3; prompt], max_tokens) }
}

/// A sequence that has not begun, and its client's stream.
pub fn sequence(key: u64, request: Request) -> (Box<Sequence>, TokenStream) {
    let (events, stream) = event_channel(ResponseMemory::new(usize::MAX).hold(ClientId::Local));
    let sequence = Sequence {
        key: SequenceKey(key),
        group: key,
        events,
        followers: Vec::new(),
        account: Arc::new(Account::new(request.client.id, Arc::default())),
        request,
        permits: Vec::new(),
        lease: None,
        arrived: Instant::now(),
        progress: None,
        charged: Default::default(),
    };
    (Box::new(sequence), stream)
}
