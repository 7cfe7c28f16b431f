//! The HTTP client: sends one streaming request, reads the response and classifies every failure.
//!
//! Invariant: whatever the server does, `send` returns a sample by the deadline.

pub mod clock;

mod connection;
mod event;
mod rejection;
mod server;
mod service;
mod streamed_response;
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

use clock::{Clock, Deadline};
pub use connection::Connection;
use connection::{body_failure, head_failure};
use rejection::Rejection;
pub use server::Server;
pub use service::Service;
use streamed_response::{NextAction, StreamedResponse};

/// Maximum number of idle connections that a client keeps.
const IDLE_MAX: usize = 512;

/// Bytes of a response that are read before the task yields to other tasks and to the deadline.
const YIELD_BYTES_MAX: usize = 1 << 15;

/// A single-threaded client of a service.
pub struct Client {
    service: Arc<Service>,
    connections: Connections,
    retries: u32,
    idle: RefCell<Vec<Connection>>,
    /// Becomes true when all requests in flight must end.
    stop: watch::Receiver<bool>,
    live: Arc<Progress>,
}

/// A prepared request: its body is serialized and it only needs to be sent.
#[derive(Clone, Debug)]
pub struct PreparedRequest {
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
    /// Creates a client of `service` that retries a request up to `retries` times. Received tokens are added
    /// to `live` while requests are in flight.
    pub fn new(
        service: Arc<Service>,
        connections: Connections,
        retries: u32,
        stop: watch::Receiver<bool>,
        live: Arc<Progress>,
    ) -> Self {
        Self { service, connections, retries, idle: RefCell::default(), stop, live }
    }

    /// Serializes `request`.
    pub fn prepare(&self, request: &Request) -> PreparedRequest {
        PreparedRequest {
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

    /// Sends a request that was due at `scheduled` and returns its sample.
    pub async fn send(&self, outgoing: PreparedRequest, scheduled: Duration, clock: Clock) -> Sample {
        let sent = clock.now();
        let deadline = clock.deadline(sent);
        let (mut answer, mut retries) = (StreamedResponse::new(outgoing.hang_up_after), 0);
        let end = tokio::select! {
            // The deadline is polled first: a server that never pauses would otherwise starve it.
            biased;
            failure = self.wait_for_abort(clock, deadline) => Err(failure),
            end = self.send_with_retries(&outgoing, clock, deadline, &mut answer, &mut retries) => end,
        };
        Sample {
            index: outgoing.index,
            model: outgoing.model,
            prompt_len: answer.prompt_len.unwrap_or(outgoing.prompt_len),
            requested_output_len: outgoing.output_len,
            output_len: answer.output_len(),
            scheduled,
            sent,
            ended: clock.now(),
            retries,
            deliveries: std::mem::take(&mut answer.deliveries),
            outcome: end.unwrap_or_else(|failure| {
                let message = self.service.redact_keys(&failure.message);
                Outcome::Failed(Failure { message, ..failure })
            }),
        }
    }

    /// Waits for the deadline or the stop signal and returns the resulting failure.
    async fn wait_for_abort(&self, clock: Clock, deadline: Deadline) -> Failure {
        tokio::select! {
            () = sleep_until(clock.instant(deadline.at).into()) => clock.deadline_failure(deadline),
            () = wait_until_stopped(self.stop.clone()) => {
                FailureKind::Interrupted.with_message("the run was interrupted")
            }
        }
    }

    /// Sends the request until it succeeds or must not be retried.
    async fn send_with_retries(
        &self,
        outgoing: &PreparedRequest,
        clock: Clock,
        deadline: Deadline,
        answer: &mut StreamedResponse,
        retries: &mut u32,
    ) -> Result<Outcome, Failure> {
        loop {
            let refusal = match self.send_once(outgoing, clock, answer).await {
                Ok(outcome) => return Ok(outcome),
                Err(refusal) => refusal,
            };
            let again = clock.now().saturating_add(refusal.retry_delay(*retries));
            // A retry after the deadline is pointless: the rejection is more informative than a timeout.
            if *retries >= self.retries || !refusal.is_retryable() || again >= deadline.at {
                return Err(refusal.failure);
            }
            sleep_until(clock.instant(again).into()).await;
            *retries += 1;
        }
    }

    /// Sends the request once. `answer` keeps what was received even if the caller drops this future at a
    /// deadline.
    async fn send_once(
        &self,
        outgoing: &PreparedRequest,
        clock: Clock,
        answer: &mut StreamedResponse,
    ) -> Result<Outcome, Rejection> {
        let (mut connection, response) = self.open_response(outgoing).await?;
        if response.status() != 200 {
            let refusal = Rejection::read(&mut connection, response, &self.service).await;
            self.return_idle(connection, outgoing);
            return Err(refusal);
        }
        let outcome = self.read_events(&mut connection, response, clock, answer).await?;
        if outcome == Outcome::Completed {
            self.return_idle(connection, outgoing);
        }
        Ok(outcome)
    }

    /// Sends the request on an idle or new connection and waits for the response head.
    async fn open_response(
        &self,
        outgoing: &PreparedRequest,
    ) -> Result<(Connection, Response<Incoming>), Failure> {
        let post = || self.service.http_request(outgoing.body.clone(), outgoing.key);
        if let Some(mut used) = self.take_idle(outgoing) {
            match used.request(post()).await {
                Ok(response) => return Ok((used, response)),
                Err(error) if used.has_received() => return Err(head_failure(&error)),
                // Most likely the server closed the connection while it was idle.
                Err(_) => {}
            }
        }
        let mut connection = Connection::open(&self.service.server, outgoing.read_rate).await?;
        let response = connection.request(post()).await.map_err(|error| head_failure(&error))?;
        Ok((connection, response))
    }

    /// Reads the events of a response until its end or until the client hangs up.
    async fn read_events(
        &self,
        connection: &mut Connection,
        response: Response<Incoming>,
        clock: Clock,
        answer: &mut StreamedResponse,
    ) -> Result<Outcome, Failure> {
        let ends_by_closing = [CONTENT_LENGTH, TRANSFER_ENCODING]
            .iter()
            .all(|framing| !response.headers().contains_key(framing));
        let (mut body, mut turn_bytes) = (response.into_body(), 0);
        while let Some(piece) = connection.next_chunk(&mut body).await {
            let (piece, read_at) = match piece {
                Ok(piece) => piece,
                // A body without framing is complete once `[DONE]` was received.
                Err(_) if ends_by_closing && answer.done => break,
                Err(error) => return Err(body_failure(&error)),
            };
            let before = answer.delivered;
            let next = answer.process_chunk(&piece, clock.time(read_at));
            self.live.tokens.fetch_add(u64::from(answer.delivered - before), Ordering::Relaxed);
            if next? == NextAction::HangUp {
                return Ok(Outcome::HungUp);
            }
            turn_bytes += piece.len();
            if turn_bytes >= YIELD_BYTES_MAX {
                turn_bytes = 0;
                yield_now().await;
            }
        }
        answer.finish()
    }

    /// Takes an idle connection that is not known to be closed.
    fn take_idle(&self, outgoing: &PreparedRequest) -> Option<Connection> {
        // A slow reader needs a connection with its own receive buffer size.
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

    /// Returns a connection to the pool of idle connections if it can be reused.
    fn return_idle(&self, mut connection: Connection, outgoing: &PreparedRequest) {
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
pub async fn wait_until_stopped(mut stop: watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        // The sender is gone, so the run can no longer be stopped.
        std::future::pending::<()>().await;
    }
}
