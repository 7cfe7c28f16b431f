//! Tokenization, incremental detokenization, stop strings, chat templates, tools, and parsing of answers with
//! reasoning and tool calls.
//!
//! Invariant: the concatenated output of a `Detokenizer` equals `Tokenizer::decode` of all its ids.

pub mod tokenizer;

mod jinja;

mod template_limits;

pub mod detokenizer;

pub mod stop;

pub mod tools;

pub mod output;

pub mod grammar_vocabulary;

pub mod chat_template;

pub use chat_template::ChatTemplate;
pub use detokenizer::Detokenizer;
pub use grammar_vocabulary::grammar_vocabulary;
pub use stop::StopMatcher;
pub use tokenizer::{Encoded, GgufVocabulary, TokenLimits, Tokenizer, TokenizerFiles, TypedIds};
