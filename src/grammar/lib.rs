//! Constrained output: JSON schemas, regular expressions and grammars become masks over a vocabulary.
//!
//! [`Vocabulary`] is made once per model, from the bytes of its tokens. [`GrammarCache`] compiles a [`Spec`],
//! and [`Grammar::matcher`] follows one sequence. All of it is computed on the caller's thread and bounded by
//! [`Limits`], which count work, not time.
//!
//! Invariant: text whose end a matcher accepts satisfies the specification, and what cannot be served is an
//! error, never ignored. This crate knows neither models nor requests, and imports no other crate of
//! Mainstem.

#![deny(unsafe_code)]

mod error;

mod limits;

mod vocabulary;

mod spec;

mod lark;

mod gbnf;

mod json_schema;

mod compile;

mod matcher;

mod cache;

pub use cache::GrammarCache;
pub use compile::Grammar;
pub use error::GrammarError;
pub use limits::Limits;
pub use matcher::Matcher;
pub use spec::{Call, Calls, ConstraintStart, Form, Piece, Spec};
pub use vocabulary::{Token, Tokenize, Vocabulary};

#[cfg(test)]
mod tests;
