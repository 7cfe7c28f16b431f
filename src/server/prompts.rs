//! Parsing of texts and token ids in request bodies: one, or a list.
//!
//! Invariant: every id is below the vocabulary size, and all elements of a list have the same type.

use super::error::ApiError;
use super::fields::describe;
use serde_json::Value;

/// A prompt as the client gives it.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    /// Token ids, each below the vocabulary size.
    Ids(Vec<u32>),
}

impl Prompt {
    /// Returns whether the prompt has no characters or no ids.
    pub fn is_empty(&self) -> bool {
        match self {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Ids(ids) => ids.is_empty(),
        }
    }
}

/// Parser of a list parameter; the first element determines the type of all.
struct PromptParser<'a> {
    /// Name of the parameter.
    name: &'a str,
    vocab: usize,
}

/// Parses the parameter `name`: a text, a list of texts, a list of token ids, or a list of lists of token
/// ids. An empty list is parsed as one prompt without ids. `vocab` is the vocabulary size.
pub fn parse_prompts(name: &str, value: Option<Value>, vocab: usize) -> Result<Vec<Prompt>, ApiError> {
    let list = PromptParser { name, vocab };
    match value {
        None => Err(list.error("is missing".to_owned())),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(members)) => list.parse_list(members),
        Some(other) => {
            Err(list.error(format!("must be a string or a list of token ids, not {}", describe(&other))))
        }
    }
}

/// Parses a parameter that is one text or one list of token ids.
pub fn parse_prompt(name: &str, value: Value, vocab: usize) -> Result<Prompt, ApiError> {
    let list = PromptParser { name, vocab };
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => list.parse_ids(&ids),
        other => {
            Err(list.error(format!("must be a string or a list of token ids, not {}", describe(&other))))
        }
    }
}

impl PromptParser<'_> {
    fn parse_list(&self, members: Vec<Value>) -> Result<Vec<Prompt>, ApiError> {
        match members.first() {
            None => Ok(vec![Prompt::Ids(Vec::new())]),
            Some(Value::String(_)) => members.into_iter().map(|member| self.parse_text(member)).collect(),
            Some(Value::Array(_)) => members.iter().map(|member| self.parse_nested_ids(member)).collect(),
            Some(_) => Ok(vec![self.parse_ids(&members)?]),
        }
    }

    fn parse_text(&self, member: Value) -> Result<Prompt, ApiError> {
        match member {
            Value::String(text) => Ok(Prompt::Text(text)),
            other => Err(self.mixed_types_error(&other)),
        }
    }

    fn parse_nested_ids(&self, member: &Value) -> Result<Prompt, ApiError> {
        match member {
            Value::Array(ids) => self.parse_ids(ids),
            other => Err(self.mixed_types_error(other)),
        }
    }

    fn parse_ids(&self, list: &[Value]) -> Result<Prompt, ApiError> {
        let ids: Result<_, String> = list.iter().map(|value| parse_token_id(value, self.vocab)).collect();
        ids.map(Prompt::Ids).map_err(|message| ApiError::invalid(self.name, message))
    }

    fn mixed_types_error(&self, member: &Value) -> ApiError {
        self.error(format!("must not mix types: {} differs from the first element", describe(member)))
    }

    fn error(&self, problem: String) -> ApiError {
        ApiError::invalid(self.name, format!("'{}' {problem}", self.name))
    }
}

/// Parses a token id below `vocab`. The error is a message.
pub fn parse_token_id(value: &Value, vocab: usize) -> Result<u32, String> {
    match value.as_u64() {
        Some(id) if id < vocab as u64 => Ok(id as u32),
        Some(id) => Err(format!("token id {id} is not in the vocabulary of {vocab} tokens")),
        None => Err(format!("{} is not a token id", describe(value))),
    }
}
