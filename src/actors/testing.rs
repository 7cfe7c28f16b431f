//! What the tests of the actors share: neighbours that only listen, requests, patience.

use super::intake::{Permit, Released};
use super::sequence::{Key, Sequence};
use super::stream::{TokenStream, channel};
use crate::request::Request;
use actix::{Actor, Context, Handler, Message, Recipient};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

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
