//! Text to token ids and back, whole or token by token.
//!
//! Invariant: what a [`Detokenizer`] hands out piece by piece is what [`Tokenizer::decode`] gives at once.

pub mod tokenizer;

mod jinja;

pub mod detokenizer;

pub mod stop;

pub mod chat_template;

pub use chat_template::ChatTemplate;
pub use detokenizer::Detokenizer;
pub use stop::StopMatcher;
pub use tokenizer::{GgufVocabulary, Tokenizer};
