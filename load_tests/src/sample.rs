//! The measurements of one request, from which all metrics are computed.
//!
//! Invariant: all times are since the start of the run, and `deliveries` ascend.

use std::{fmt, time::Duration};

/// The measurements of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Index of the request in the run.
    pub index: usize,
    /// Index of the model among those of the run.
    pub model: usize,
    /// Number of prompt tokens: as reported by the server, else as planned.
    pub prompt_len: u32,
    /// Number of output tokens requested.
    pub requested_output_len: u32,
    /// Number of output tokens received: by token ids if the server sends them, else from its usage, else one
    /// per event with text.
    pub output_len: u32,
    /// Due time; latencies are measured from it.
    pub scheduled: Duration,
    /// Time of the first send.
    pub sent: Duration,
    /// Time at which the request ended, successfully or not.
    pub ended: Duration,
    /// Number of retries.
    pub retries: u32,
    /// Tokens received, one entry per event.
    pub deliveries: Vec<Delivery>,
    pub outcome: Outcome,
}

/// The time and number of tokens of one event, packed into eight bytes because a run may have many millions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Delivery(u64);

/// Number of low bits of a [`Delivery`] that hold the token count; the other bits hold nanoseconds, up to 78
/// hours.
const TOKEN_BITS: u32 = 16;

impl Delivery {
    /// The largest time that can be stored.
    pub const TIME_MAX: Duration = Duration::from_nanos((1 << (64 - TOKEN_BITS)) - 1);

    /// Packs the time and the token count (at most 65,535); larger values are clamped.
    pub fn new(at: Duration, tokens: u32) -> Self {
        let nanos = at.min(Self::TIME_MAX).as_nanos() as u64;
        Self(nanos << TOKEN_BITS | u64::from(tokens).min((1 << TOKEN_BITS) - 1))
    }

    /// Returns the time at which the tokens were received.
    pub fn at(self) -> Duration {
        Duration::from_nanos(self.0 >> TOKEN_BITS)
    }

    /// Returns the number of tokens.
    pub fn tokens(self) -> u32 {
        (self.0 & ((1 << TOKEN_BITS) - 1)) as u32
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:?}", self.tokens(), self.at())
    }
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed,
    /// The client hung up early, as planned.
    HungUp,
    Failed(Failure),
}

/// A failure with a short message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

/// The kinds of failure, counted separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// The connection could not be established.
    Connect,
    /// The TLS handshake failed.
    Tls,
    /// The response is not valid HTTP.
    BadHttp,
    /// The response status is not 200.
    Status(u16),
    /// The connection closed before the response was complete.
    EarlyClose,
    /// The body is not a valid stream of completion events.
    BadSse,
    /// The server sent an error event within the stream.
    ErrorEvent,
    /// The stream ended regularly, but without any token.
    NoTokens,
    /// The request exceeded its timeout.
    Timeout,
    /// The run reached its time limit.
    TimeLimit,
    /// The run was interrupted.
    Interrupted,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Connect => write!(f, "connect"),
            FailureKind::Tls => write!(f, "TLS"),
            FailureKind::BadHttp => write!(f, "bad HTTP"),
            FailureKind::Status(status) => write!(f, "status {status}"),
            FailureKind::EarlyClose => write!(f, "early close"),
            FailureKind::BadSse => write!(f, "bad SSE"),
            FailureKind::ErrorEvent => write!(f, "error event"),
            FailureKind::NoTokens => write!(f, "no tokens"),
            FailureKind::Timeout => write!(f, "timeout"),
            FailureKind::TimeLimit => write!(f, "time limit"),
            FailureKind::Interrupted => write!(f, "interrupted"),
        }
    }
}

impl FailureKind {
    /// Creates a failure of this kind with `message`, truncated to 200 characters.
    pub fn with_message(self, message: impl fmt::Display) -> Failure {
        Failure { kind: self, message: message.to_string().chars().take(200).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_keeps_its_time_to_the_nanosecond_and_its_count() {
        let at = Duration::new(172_800, 123_456_789);
        let delivery = Delivery::new(at, 65_535);
        assert_eq!((delivery.at(), delivery.tokens()), (at, 65_535));
        let beyond = Delivery::new(Duration::MAX, u32::MAX);
        assert_eq!((beyond.at(), beyond.tokens()), (Delivery::TIME_MAX, 65_535));
        assert!(Delivery::new(Duration::from_nanos(5), 1) < Delivery::new(Duration::from_nanos(6), 0));
    }
}
