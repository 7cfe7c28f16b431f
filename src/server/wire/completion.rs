//! Choices of text completions: text, and log-probabilities in four parallel lists.
//!
//! Invariant: the lists have one entry per token, and offsets count characters of the choice's text.

use super::{ChoiceOutput, Finish, PromptLogprobs, TokenIds, TokenNames, finite_logprob};
use crate::actors::reply::PlacedToken;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// A choice of a JSON response, or of a stream's chunk.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
    /// Log-probabilities of the prompt, if the request asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Value>>)]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Log-probabilities of a choice's tokens, as parallel lists.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    /// Null for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    #[schema(value_type = Vec<Option<HashMap<String, f32>>>)]
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// Number of characters of the text before each token.
    pub text_offset: Vec<usize>,
}

/// Texts of the most likely tokens with their log-probabilities, most likely first, then the generated token.
/// If two tokens have the same text, the more likely one is kept.
#[derive(Debug)]
pub struct TopLogprobs(Vec<(String, f32)>);

impl CompletionLogprobs {
    /// Builds the log-probabilities of the tokens of `part`, with the `top` most likely ones of each.
    pub fn from_output(part: &ChoiceOutput, top: u8, names: &TokenNames<'_>) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        part.tokens.iter().for_each(|placed| logprobs.push(placed, top, names));
        logprobs
    }

    fn push(&mut self, PlacedToken { token, offset }: &PlacedToken, top: u8, names: &TokenNames<'_>) {
        let text = names.name(token.id);
        let own = token.logprob.map(finite_logprob);
        // A prompt's tokens may have more, for `prompt_logprobs`.
        let likely = &token.top[..token.top.len().min(top.into())];
        self.top_logprobs.push(own.map(|own| TopLogprobs::new(likely, (&text, own), names)));
        self.tokens.push(text);
        self.token_logprobs.push(own);
        self.text_offset.push(*offset);
    }
}

impl TopLogprobs {
    fn new(top: &[(u32, f32)], (text, own): (&str, f32), names: &TokenNames<'_>) -> TopLogprobs {
        let likely = top.iter().map(|(id, logprob)| (names.name(*id), finite_logprob(*logprob)));
        let mut entries: Vec<(String, f32)> = Vec::with_capacity(top.len() + 1);
        for (name, logprob) in likely.chain([(text.to_string(), own)]) {
            if entries.iter().all(|(known, _)| *known != name) {
                entries.push((name, logprob));
            }
        }
        TopLogprobs(entries)
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (text, logprob) in &self.0 {
            map.serialize_entry(text, logprob)?;
        }
        map.end()
    }
}
