//! Text to token ids and back, whole or token by token.
//!
//! Invariant: what a [`Detokenizer`] hands out piece by piece is what [`Tokenizer::decode`] gives at once.

pub mod tokenizer;

mod pieces;
mod scored_bpe;

pub mod detokenizer;

#[cfg(test)]
mod samples;

pub use detokenizer::Detokenizer;
pub use tokenizer::Tokenizer;
