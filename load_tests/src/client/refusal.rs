//! Answers that are none: what the server says instead, and when it wants to be asked again.
//!
//! Invariant: only what may pass by itself is asked again.

use std::time::Duration;

use hyper::{Response, body::Incoming, header::RETRY_AFTER};

use super::{connection::Connection, service::Service};
use crate::sample::{Failure, FailureKind};

/// The first pause before a request is sent again, which doubles each time.
const PAUSE_FIRST: Duration = Duration::from_millis(100);

/// Bytes of a refusal's text that are read.
const TEXT_BYTES_MAX: usize = 1 << 16;

/// Why a request brought no answer.
#[derive(Debug)]
pub struct Refusal {
    pub failure: Failure,
    /// When the server wants it again.
    retry_after: Option<Duration>,
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self { failure, retry_after: None }
    }
}

impl Refusal {
    /// A response whose status is not 200.
    pub async fn read(connection: &mut Connection, response: Response<Incoming>, service: &Service) -> Self {
        let kind = FailureKind::Status(response.status().as_u16());
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        // Servers that say a date instead of seconds are asked again as if they said nothing.
        let retry_after = retry_after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let text = connection.text(response.into_body(), TEXT_BYTES_MAX).await.unwrap_or_else(|cut| cut);
        Self { failure: kind.saying(service.without_keys(text.trim())), retry_after }
    }

    /// Whether the same request may fare better a little later.
    pub fn may_pass(&self) -> bool {
        matches!(self.failure.kind, FailureKind::Connect | FailureKind::Status(429 | 503))
    }

    /// How long to wait before it is sent again, after so many times.
    pub fn pause(&self, retries: u32) -> Duration {
        self.retry_after.unwrap_or(PAUSE_FIRST.saturating_mul(2u32.saturating_pow(retries)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_never_overflow_unless_the_server_says_how_long() {
        let silent = Refusal::from(FailureKind::Connect.saying(""));
        assert_eq!([0, 1, 2, 3].map(|n| silent.pause(n).as_millis()), [100, 200, 400, 800]);
        assert!(silent.pause(u32::MAX) > Duration::from_secs(1 << 20));
        let told = Refusal { retry_after: Some(Duration::from_secs(7)), ..silent };
        assert_eq!([0, 3].map(|n| told.pause(n).as_secs()), [7, 7]);
    }
}
