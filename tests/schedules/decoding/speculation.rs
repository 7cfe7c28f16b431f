//! The types of speculative decoding that the host's part of sampling passes on.

/// The way in which the token of a row is chosen that has a draft to verify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AcceptanceRule {
    /// The token is drawn as without speculation.
    #[default]
    Coupled,
    /// The draft is accepted with a probability.
    Rejection,
}

/// A draft to verify.
pub struct Proposal<'a> {
    pub token: u32,
    pub draft_logits: Option<&'a [f32]>,
}
