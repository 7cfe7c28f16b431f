//! One streaming request: sent, read to its end, and every way it can go wrong told apart.
//!
//! Invariant: whatever the server does, `send` returns a sample by the deadline.

pub mod clock;

mod answer;
mod connection;
mod event;
mod refusal;
mod server;
mod service;
mod sse;
mod tls;
mod wire;

use std::{
    cell::RefCell,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use hyper::{
    Response,
    body::{Bytes, Incoming},
    header::{CONTENT_LENGTH, TRANSFER_ENCODING},
};
use tokio::{sync::watch, task::yield_now, time::sleep_until};

use crate::{
    plan::requests::Request,
    run::{Connections, Progress},
    sample::{Failure, FailureKind, Outcome, Sample},
};

use answer::{Answer, Next};
use clock::{Clock, Deadline};
use connection::{Connection, no_end, no_head};
use refusal::Refusal;
pub use server::Server;
pub use service::Service;

/// Idle connections a client keeps for its next requests.
const IDLE_MAX: usize = 512;

/// Bytes of an answer that are read in one turn: then come the others, and the deadline.
const TURN_BYTES_MAX: usize = 1 << 15;

/// Sends requests to a service from one thread.
pub struct Client {
    service: Arc<Service>,
    connections: Connections,
    retries: u32,
    idle: RefCell<Vec<Connection>>,
    /// Becomes true when everything in flight is to end.
    stop: watch::Receiver<bool>,
    live: Arc<Progress>,
}

/// A request made ready: all that is left to do is to send it.
#[derive(Clone, Debug)]
pub struct Outgoing {
    index: usize,
    model: usize,
    key: Option<usize>,
    prompt_len: u32,
    output_len: u32,
    hang_up_after: Option<u32>,
    read_rate: Option<u32>,
    body: Bytes,
}

impl Client {
    /// A client of `service` that sends a request again up to `retries` times. What becomes of requests while they
    /// are in flight is added to `live`.
    pub fn new(
        service: Arc<Service>,
        connections: Connections,
        retries: u32,
        stop: watch::Receiver<bool>,
        live: Arc<Progress>,
    ) -> Self {
        Self { service, connections, retries, idle: RefCell::default(), stop, live }
    }

    /// Makes `request` ready.
    pub fn prepare(&self, request: &Request) -> Outgoing {
        Outgoing {
            index: request.index,
            model: request.model,
            key: request.key,
            prompt_len: request.prompt_len,
            output_len: request.output_len,
            hang_up_after: request.hang_up_after,
            read_rate: request.read_rate,
            body: self.service.body(request),
        }
    }

    /// Sends a request, due at `scheduled`, now.
    pub async fn send(&self, outgoing: Outgoing, scheduled: Duration, clock: Clock) -> Sample {
        let sent = clock.now();
        let deadline = clock.deadline(sent);
        let (mut answer, mut retries) = (Answer::new(outgoing.hang_up_after), 0);
        let end = tokio::select! {
            // First the deadline: a server that never pauses would use up the task's turn before it.
            biased;
            failure = self.cut_off(clock, deadline) => Err(failure),
            end = self.attempts(&outgoing, clock, deadline, &mut answer, &mut retries) => end,
        };
        Sample {
            index: outgoing.index,
            model: outgoing.model,
            prompt_len: answer.prompt_len.unwrap_or(outgoing.prompt_len),
            output_len_asked: outgoing.output_len,
            output_len: answer.output_len(),
            scheduled,
            sent,
            ended: clock.now(),
            retries,
            deliveries: std::mem::take(&mut answer.deliveries),
            outcome: end.unwrap_or_else(|failure| {
                let message = self.service.without_keys(&failure.message);
                Outcome::Failed(Failure { message, ..failure })
            }),
        }
    }

    /// Waits for what ends a request from outside.
    async fn cut_off(&self, clock: Clock, deadline: Deadline) -> Failure {
        tokio::select! {
            () = sleep_until(clock.at(deadline.at).into()) => clock.given_up(deadline),
            () = stopped(self.stop.clone()) => FailureKind::Interrupted.saying("the run was interrupted"),
        }
    }

    /// Sends it until it is answered or not to be sent again.
    async fn attempts(
        &self,
        outgoing: &Outgoing,
        clock: Clock,
        deadline: Deadline,
        answer: &mut Answer,
        retries: &mut u32,
    ) -> Result<Outcome, Failure> {
        loop {
            let refusal = match self.exchange(outgoing, clock, answer).await {
                Ok(outcome) => return Ok(outcome),
                Err(refusal) => refusal,
            };
            let again = clock.now().saturating_add(refusal.pause(*retries));
            // A pause that outlasts the request is not begun: the refusal says more than a timeout would.
            if *retries >= self.retries || !refusal.may_pass() || again >= deadline.at {
                return Err(refusal.failure);
            }
            sleep_until(clock.at(again).into()).await;
            *retries += 1;
        }
    }

    /// Sends it once. `answer` keeps what came even when the caller drops this at a deadline.
    async fn exchange(
        &self,
        outgoing: &Outgoing,
        clock: Clock,
        answer: &mut Answer,
    ) -> Result<Outcome, Refusal> {
        let (mut connection, response) = self.begin(outgoing).await?;
        if response.status() != 200 {
            let refusal = Refusal::read(&mut connection, response, &self.service).await;
            self.keep(connection, outgoing);
            return Err(refusal);
        }
        let outcome = self.read(&mut connection, response, clock, answer).await?;
        if outcome == Outcome::Completed {
            self.keep(connection, outgoing);
        }
        Ok(outcome)
    }

    /// Sends it on a connection, and waits for the head of the answer.
    async fn begin(&self, outgoing: &Outgoing) -> Result<(Connection, Response<Incoming>), Failure> {
        let post = || self.service.post(outgoing.body.clone(), outgoing.key);
        if let Some(mut used) = self.take_idle(outgoing) {
            match used.request(post()).await {
                Ok(response) => return Ok((used, response)),
                Err(error) if used.has_received() => return Err(no_head(&error)),
                // It was closed while it was idle, as far as can be told.
                Err(_) => {}
            }
        }
        let mut connection = Connection::open(&self.service.server, outgoing.read_rate).await?;
        let response = connection.request(post()).await.map_err(|error| no_head(&error))?;
        Ok((connection, response))
    }

    /// Reads the events of an answer to their end, or until the client leaves.
    async fn read(
        &self,
        connection: &mut Connection,
        response: Response<Incoming>,
        clock: Clock,
        answer: &mut Answer,
    ) -> Result<Outcome, Failure> {
        let ends_by_closing = [CONTENT_LENGTH, TRANSFER_ENCODING]
            .iter()
            .all(|framing| !response.headers().contains_key(framing));
        let (mut body, mut turn_bytes) = (response.into_body(), 0);
        while let Some(piece) = connection.piece(&mut body).await {
            let (piece, read_at) = match piece {
                Ok(piece) => piece,
                // Such a body has no end to miss but its end mark.
                Err(_) if ends_by_closing && answer.done => break,
                Err(error) => return Err(no_end(&error)),
            };
            let before = answer.delivered;
            let next = answer.take(&piece, clock.time(read_at));
            self.live.tokens.fetch_add(u64::from(answer.delivered - before), Ordering::Relaxed);
            if next? == Next::Leave {
                return Ok(Outcome::HungUp);
            }
            turn_bytes += piece.len();
            if turn_bytes >= TURN_BYTES_MAX {
                turn_bytes = 0;
                yield_now().await;
            }
        }
        answer.end()
    }

    /// An idle connection that has not been closed, as far as is known.
    fn take_idle(&self, outgoing: &Outgoing) -> Option<Connection> {
        // A slow reader's buffer is its own.
        if outgoing.read_rate.is_some() {
            return None;
        }
        let mut idle = self.idle.borrow_mut();
        while let Some(mut connection) = idle.pop() {
            if connection.is_idle() {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps a connection whose answer is over for the next request, where that is wanted and possible.
    fn keep(&self, mut connection: Connection, outgoing: &Outgoing) {
        if self.connections == Connections::New || outgoing.read_rate.is_some() || !connection.is_idle() {
            return;
        }
        let mut idle = self.idle.borrow_mut();
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }
}

/// Waits until the run is stopped.
pub async fn stopped(mut stop: watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        // Nobody is left who could stop it.
        std::future::pending::<()>().await;
    }
}
