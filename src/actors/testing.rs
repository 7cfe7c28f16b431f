//! What the tests of the actors share: neighbours that only listen, requests, patience.

use super::intake::{Permit, Released};
use super::sequence::{Key, Sequence};
use super::stream::{TokenStream, channel};
use crate::request::Request;
use actix::{Actor, Context, Handler, Message, Recipient};
use mainstem_kernels::{Share, StepLimits};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Those of the smallest device that a test can ask for.
pub const LIMITS: StepLimits = StepLimits {
    slots: 1,
    rows: 4,
    logit_rows: 1,
    positions: 9,
    source_positions: 0,
    page_positions: 32,
    top_logprobs: 0,
    biases: 0,
    vocab: 9,
    hidden: 0,
    attended: Share::ALL,
};

/// Nothing a test waits for takes this long; whoever waits longer has found a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// The future's result, or a failed test when it hangs.
pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("something hangs")
}

/// A neighbour that only listens.
struct Ear<M>(UnboundedSender<M>);

impl<M: Unpin + 'static> Actor for Ear<M> {
    type Context = Context<Ear<M>>;
}

impl<M: Message<Result = ()> + Unpin + 'static> Handler<M> for Ear<M> {
    type Result = ();

    fn handle(&mut self, message: M, _: &mut Self::Context) {
        let _ = self.0.send(message);
    }
}

/// Where messages go to, and where they can be read.
pub fn ear<M: Message<Result = ()> + Unpin + Send + 'static>() -> (Recipient<M>, UnboundedReceiver<M>) {
    let (heard, messages) = unbounded_channel();
    (Ear(heard).start().recipient(), messages)
}

pub async fn next<M>(messages: &mut UnboundedReceiver<M>) -> M {
    within(messages.recv()).await.expect("the ear is there")
}

pub fn request(prompt: usize, max_tokens: u32) -> Request {
    Request { ignore_eos: true, ..Request::greedy("test", vec![3; prompt], max_tokens) }
}

/// An admitted request without pages, whose permit goes `home`, and its client.
pub fn sequence(key: u64, request: Request, home: Recipient<Released>) -> (Box<Sequence>, TokenStream) {
    let (events, stream) = channel();
    let (key, permit, arrived) = (Key(key), Permit::new(home), Instant::now());
    (Box::new(Sequence { key, request, events, permit, lease: None, arrived }), stream)
}
