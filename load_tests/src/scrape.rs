//! The server's own Prometheus metrics, before a run and after it.

/// One reading of `/metrics`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape {
    /// The text as it came.
    pub text: String,
}
