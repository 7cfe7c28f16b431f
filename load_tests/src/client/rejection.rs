//! Rejected requests: the failure, and whether and when to retry.
//!
//! Invariant: only failures that may be temporary are retried.

use std::time::Duration;

use hyper::{Response, body::Incoming, header::RETRY_AFTER};

use super::{connection::Connection, service::Service};
use crate::sample::{Failure, FailureKind};

/// Delay before the first retry; it doubles with each retry.
const RETRY_DELAY_FIRST: Duration = Duration::from_millis(100);

/// Maximum number of bytes read from the body of a rejection.
const TEXT_BYTES_MAX: usize = 1 << 16;

/// The reason why a request got no response.
#[derive(Debug)]
pub struct Rejection {
    pub failure: Failure,
    /// Value of the `Retry-After` header.
    retry_after: Option<Duration>,
}

impl From<Failure> for Rejection {
    fn from(failure: Failure) -> Self {
        Self { failure, retry_after: None }
    }
}

impl Rejection {
    /// Reads a response whose status is not 200.
    pub async fn read(connection: &mut Connection, response: Response<Incoming>, service: &Service) -> Self {
        let kind = FailureKind::Status(response.status().as_u16());
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        // A date instead of a number of seconds is ignored.
        let retry_after = retry_after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let text = connection.read_text(response.into_body(), TEXT_BYTES_MAX).await.unwrap_or_else(|cut| cut);
        Self { failure: kind.with_message(service.redact_keys(text.trim())), retry_after }
    }

    /// Returns whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self.failure.kind, FailureKind::Connect | FailureKind::Status(429 | 503))
    }

    /// Returns the delay before the next retry, after `retries` retries.
    pub fn retry_delay(&self, retries: u32) -> Duration {
        self.retry_after.unwrap_or(RETRY_DELAY_FIRST.saturating_mul(2u32.saturating_pow(retries)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_never_overflow_unless_the_server_says_how_long() {
        let silent = Rejection::from(FailureKind::Connect.with_message(""));
        assert_eq!([0, 1, 2, 3].map(|n| silent.retry_delay(n).as_millis()), [100, 200, 400, 800]);
        assert!(silent.retry_delay(u32::MAX) > Duration::from_secs(1 << 20));
        let with_header = Rejection { retry_after: Some(Duration::from_secs(7)), ..silent };
        assert_eq!([0, 3].map(|n| with_header.retry_delay(n).as_secs()), [7, 7]);
    }
}
