//! Texts and documents of requests, and their tokens.
//!
//! Invariant: what is tokenized has at most as many tokens as the model accepts, or the request is refused.

use super::TEXTS_MAX;
use crate::server::ServeParts;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, describe};
use crate::server::prompt_ids::check_vocabulary;
use crate::text::{TokenLimits, TypedIds};
use serde_json::Value;

/// A text is read for a bound of its number of tokens if it has more bytes than this for each token that it
/// may have.
const BYTES_PER_TOKEN: usize = 16;

/// Parses a text, or an object with one, of the parameter `name`.
pub fn parse_text(name: &str, value: Value) -> Result<String, ApiError> {
    let text = match value {
        Value::String(text) => text,
        Value::Object(mut members) if members.get("text").is_some_and(Value::is_string) => {
            members["text"].take().as_str().unwrap_or_default().to_owned()
        }
        other => {
            let found = describe(&other);
            let message = format!("'{name}' must be a string or an object with a 'text', not {found}");
            return Err(ApiError::invalid(base_name(name), message));
        }
    };
    match text.is_empty() {
        true => Err(ApiError::empty(base_name(name), format!("'{name}' is empty"))),
        false => Ok(text),
    }
}

/// Parses the texts of the parameter `name`: one, or a list of at least one. Returns whether it is a list.
pub fn parse_text_list(name: &str, value: Option<Value>) -> Result<(Vec<String>, bool), ApiError> {
    match value {
        None => Err(ApiError::invalid(name, format!("'{name}' is missing"))),
        Some(Value::Array(members)) if members.is_empty() => {
            Err(ApiError::empty(name, format!("'{name}' is empty")))
        }
        Some(Value::Array(members)) if members.len() > TEXTS_MAX => {
            let message = format!("'{name}' has {} elements; the maximum is {TEXTS_MAX}", members.len());
            Err(ApiError::invalid(name, message))
        }
        Some(Value::Array(members)) => {
            let texts = members.into_iter().enumerate();
            let texts = texts.map(|(index, member)| parse_text(&format!("{name}[{index}]"), member));
            Ok((texts.collect::<Result<_, _>>()?, true))
        }
        Some(other) => Ok((vec![parse_text(name, other)?], false)),
    }
}

/// Joins the names of two texts that are tokenized together, for errors about the second one.
pub fn join_names(first: &str, second: &str) -> String {
    [first, second].join(WITH)
}

/// Separator of the names of two texts.
const WITH: &str = "' with '";

/// Returns the name of a parameter, of two the second one, without the index of an element.
pub fn base_name(name: &str) -> &str {
    let second = name.rsplit(WITH).next().unwrap_or(name);
    second.split('[').next().unwrap_or(second)
}

/// The limits of the tokens of an input.
#[derive(Clone, Copy, Debug)]
pub struct TokenLimit {
    /// Maximum number of tokens.
    pub most: usize,
    /// Whether longer inputs are truncated instead of refused.
    pub truncates: bool,
    /// Length in bytes of a text beyond which truncation drops it before it is tokenized.
    bytes: usize,
    /// Maximum number of tokens of a document, which is truncated in any case.
    pub document: usize,
}

impl TokenLimit {
    /// Takes the parameters out that say how long inputs are truncated.
    pub fn parse(parts: &ServeParts, fields: &mut Fields) -> Result<TokenLimit, ApiError> {
        let accepted = parts.model.text_context();
        let bytes = accepted.saturating_mul(BYTES_PER_TOKEN);
        let most = fields.take_integer("truncate_prompt_tokens", -1, accepted as i64)?;
        let truncates = fields.take_bool("truncate", false)?;
        let document = usize::MAX;
        match most {
            Some(0) => {
                let message = format!("'truncate_prompt_tokens' must be -1 or from 1 to {accepted}, not 0");
                Err(ApiError::invalid("truncate_prompt_tokens", message))
            }
            Some(most) if most > 0 => {
                Ok(TokenLimit { most: most as usize, truncates: true, bytes, document })
            }
            most => {
                Ok(TokenLimit { most: accepted, truncates: truncates || most.is_some(), bytes, document })
            }
        }
    }

    /// Tokenizes a text, or two. Errors name the parameter `name`.
    pub fn tokenize(
        self,
        parts: &ServeParts,
        texts: (&str, Option<&str>),
        name: &str,
    ) -> Result<TypedIds, ApiError> {
        let second = texts.1.map(|text| self.cut_document(text));
        self.check_bytes(parts, [Some(texts.0), second].into_iter().flatten(), name)?;
        let whole = if self.truncates { self.most } else { usize::MAX };
        let (first, most) = (self.cut(texts.0), TokenLimits { whole, second: self.document });
        let typed = parts.tokenizer.encode_texts(first, second, true, most);
        self.checked(parts, typed.map_err(|error| not_tokenized(name, &error))?, name)
    }

    /// Tokenizes a document with a text before and after it, as a template has them. If it is too long, the
    /// document is truncated.
    pub fn tokenize_within(
        self,
        parts: &ServeParts,
        (before, text, after): (&str, &str, &str),
        name: &str,
    ) -> Result<TypedIds, ApiError> {
        let text = self.cut_document(text);
        self.check_bytes(parts, [before, text, after].into_iter(), name)?;
        let no_room = || {
            let query = name.split(['\'', '[']).next().unwrap_or(name);
            let message = format!(
                "'{name}': what is around the document leaves no token to the document, of the {} there are",
                self.most
            );
            ApiError::too_long(query, message)
        };
        if self.truncates && before.len().saturating_add(after.len()) > self.bytes {
            return Err(no_room());
        }
        let encode = |text: &str| -> Result<Vec<u32>, ApiError> {
            let typed = parts.tokenizer.encode_texts(text, None, true, TokenLimits::whole(usize::MAX));
            Ok(typed.map_err(|error| not_tokenized(name, &error))?.ids)
        };
        let whole = encode(&[before, text, after].concat())?;
        let most = if self.truncates { self.most } else { usize::MAX };
        let within = |ids: Vec<u32>| self.checked(parts, TypedIds { ids, second: None }, name);
        if whole.len() <= most.min(self.document) {
            return within(whole);
        }
        // Tokens may span the borders of the document, so its tokens are those that change without it: all
        // but those at the beginning that the text before it has, and those that the text after it adds.
        let added = encode("")?;
        let added_after = added.len() - common_len(&encode("x")?, &added);
        let begins_as = |text: &str| -> Result<usize, ApiError> {
            let ids = encode(text)?;
            Ok(common_len(&whole, &ids[..ids.len().saturating_sub(added_after)]))
        };
        let begin = begins_as(before)?;
        let end =
            begins_as(&[before, text].concat())?.min(whole.len().saturating_sub(added_after)).max(begin);
        let kept = whole.len() - end;
        if whole.len() > most && begin + kept >= most {
            return Err(no_room());
        }
        let document = most.saturating_sub(begin + kept).min(self.document).min(end - begin);
        within([&whole[..begin + document], &whole[end..]].concat())
    }

    /// Returns the beginning of a document, of which truncation could keep something.
    pub fn cut_document(self, text: &str) -> &str {
        if self.document < usize::MAX { self.cut_to_bytes(text) } else { self.cut(text) }
    }

    /// Returns the beginning of a text, of which truncation could keep something.
    pub fn cut(self, text: &str) -> &str {
        if self.truncates { self.cut_to_bytes(text) } else { text }
    }

    fn cut_to_bytes(self, text: &str) -> &str {
        let end = (0..=self.bytes.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
        &text[..end.unwrap_or_default()]
    }

    /// Returns given token ids within the limit. Errors name the parameter `name`.
    pub fn take_ids(self, parts: &ServeParts, mut ids: Vec<u32>, name: &str) -> Result<Vec<u32>, ApiError> {
        if self.truncates {
            ids.truncate(self.most);
        }
        Ok(self.checked(parts, TypedIds { ids, second: None }, name)?.ids)
    }

    /// Refuses texts that are certainly too long, before they are tokenized.
    fn check_bytes<'t>(
        self,
        parts: &ServeParts,
        mut texts: impl Iterator<Item = &'t str>,
        name: &str,
    ) -> Result<(), ApiError> {
        let bound = |text: &str| parts.tokenizer.fewest_above(text, self.most);
        let is_long = |text: &&str| text.len() > self.most.saturating_mul(BYTES_PER_TOKEN);
        let tokens = if self.truncates { None } else { texts.find(is_long).and_then(bound) };
        tokens.map_or(Ok(()), |tokens| Err(self.too_long(name, format_args!("at least {tokens}"))))
    }

    fn checked(self, parts: &ServeParts, typed: TypedIds, name: &str) -> Result<TypedIds, ApiError> {
        let tokens = typed.ids.len();
        if tokens == 0 {
            return Err(ApiError::empty(base_name(name), format!("'{name}' has no tokens")));
        }
        if tokens > self.most {
            return Err(self.too_long(name, format_args!("{tokens}")));
        }
        check_vocabulary(parts, base_name(name), &format!("'{name}'"), &typed.ids)?;
        Ok(typed)
    }

    fn too_long(self, name: &str, tokens: std::fmt::Arguments) -> ApiError {
        let message = format!(
            "'{name}' has {tokens} tokens, more than the {} that the model accepts; \
             'truncate_prompt_tokens' truncates it",
            self.most
        );
        ApiError::too_long(base_name(name), message)
    }
}

/// Returns the number of equal tokens at the beginnings of two lists.
fn common_len(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn not_tokenized(name: &str, error: &anyhow::Error) -> ApiError {
    ApiError::invalid(base_name(name), format!("'{name}' cannot be tokenized: {error}"))
}
