//! What became of one request: the raw material of every figure.
//!
//! Invariant: all times run from the start of the run, and `deliveries` ascend.

use std::{fmt, time::Duration};

/// What became of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The request's place in the run.
    pub index: usize,
    /// Which of the run's models was asked.
    pub model: usize,
    /// Tokens of the prompt: by the server's count where it tells one, else as planned.
    pub prompt_len: u32,
    /// Tokens asked for.
    pub output_len_asked: u32,
    /// Tokens that came: counted by their ids where the server sends them, else by its closing usage, else
    /// one per event with text.
    pub output_len: u32,
    /// When the request was due. Latency counts from here.
    pub scheduled: Duration,
    /// When it was sent first.
    pub sent: Duration,
    /// When it was over, however it ended.
    pub ended: Duration,
    /// Times it was sent again.
    pub retries: u32,
    /// When tokens came: one entry per event.
    pub deliveries: Vec<Delivery>,
    pub outcome: Outcome,
}

/// Tokens that came at once, in eight bytes: a run may have many millions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Delivery(u64);

/// Bits of a [`Delivery`] that hold its number of tokens; the rest are nanoseconds: 78 hours.
const TOKEN_BITS: u32 = 16;

impl Delivery {
    /// The longest time from the start of a run that can be told.
    pub const TIME_MAX: Duration = Duration::from_nanos((1 << (64 - TOKEN_BITS)) - 1);

    /// `tokens` (at most 65,535) that came at `at`. What is beyond the bounds is taken for the bound.
    pub fn new(at: Duration, tokens: u32) -> Self {
        let nanos = at.min(Self::TIME_MAX).as_nanos() as u64;
        Self(nanos << TOKEN_BITS | u64::from(tokens).min((1 << TOKEN_BITS) - 1))
    }

    /// When they came.
    pub fn at(self) -> Duration {
        Duration::from_nanos(self.0 >> TOKEN_BITS)
    }

    /// How many.
    pub fn tokens(self) -> u32 {
        (self.0 & ((1 << TOKEN_BITS) - 1)) as u32
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:?}", self.tokens(), self.at())
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed,
    /// This client left early, as planned.
    HungUp,
    Failed(Failure),
}

/// A failure, and in a few words what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

/// The kinds of failure that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// No connection.
    Connect,
    /// No TLS session.
    Tls,
    /// The answer does not begin as HTTP.
    BadHttp,
    /// Any status but 200.
    Status(u16),
    /// The connection ended before the answer did.
    EarlyClose,
    /// The body is not a stream of completion events.
    BadSse,
    /// The server reported an error within the stream.
    ErrorEvent,
    /// The stream ended well, without a single token.
    NoTokens,
    /// The request took longer than a request may.
    Timeout,
    /// The run's time was over.
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
    /// A failure of this kind that says at most 200 characters of `message`.
    pub fn saying(self, message: impl fmt::Display) -> Failure {
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
