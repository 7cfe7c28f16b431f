//! The kinds of requests of a soak test, and what must come of each.

use serde::{Deserialize, Serialize};

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A completion of a short prompt.
    Short,
    /// A streamed completion.
    Stream,
    /// A completion of a long prompt.
    Long,
    /// Several choices.
    Choices,
    /// A completion with log-probabilities.
    Logprobs,
    Chat,
    /// A chat completion whose answer follows a JSON schema.
    Schema,
    Embeddings,
    /// A streamed completion whose client disconnects.
    HangUp,
    /// A body that is not JSON.
    Malformed,
    /// A parameter with an invalid value.
    BadParameter,
    /// A prompt that exceeds the context.
    TooLong,
    WrongKey,
    UnknownPath,
    UnknownModel,
    /// A body that exceeds the limit of the server.
    HugeBody,
}

/// The expected reply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The recorded answer.
    Answer,
    /// An error with this status and code.
    Error(u16, &'static str),
    /// Nothing in particular, since the client disconnects.
    Nothing,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 16] = [
        Kind::Short,
        Kind::Stream,
        Kind::Long,
        Kind::Choices,
        Kind::Logprobs,
        Kind::Chat,
        Kind::Schema,
        Kind::Embeddings,
        Kind::HangUp,
        Kind::Malformed,
        Kind::BadParameter,
        Kind::TooLong,
        Kind::WrongKey,
        Kind::UnknownPath,
        Kind::UnknownModel,
        Kind::HugeBody,
    ];

    /// Returns what must come of a request of this kind.
    pub fn expected(self) -> Expected {
        match self {
            Kind::HangUp => Expected::Nothing,
            Kind::Malformed => Expected::Error(400, "malformed_body"),
            Kind::BadParameter => Expected::Error(400, "invalid_value"),
            Kind::TooLong => Expected::Error(400, "context_length_exceeded"),
            Kind::WrongKey => Expected::Error(401, "invalid_api_key"),
            Kind::UnknownPath => Expected::Error(404, "not_found"),
            Kind::UnknownModel => Expected::Error(404, "model_not_found"),
            Kind::HugeBody => Expected::Error(413, "body_too_large"),
            _ => Expected::Answer,
        }
    }

    /// Returns the number of choices that a request of this kind asks for.
    pub fn choices(self) -> u64 {
        if self == Kind::Choices { CHOICES } else { 1 }
    }
}

/// Choices of a request of the kind [`Kind::Choices`].
pub const CHOICES: u64 = 3;
