//! The OpenAI wire types that leave: completions, models, and our small objects beside them.
//!
//! Invariant: what is `None` here is `null` on the wire where the API has the field, and absent where the
//! field is an extension.

use crate::actors::reply::{Origin, Piece, PlacedToken, Usage as Tokens};
use crate::text::Tokenizer;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// The logarithm written for a probability of zero, as JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

/// A completion, whole or one chunk of its stream.
#[derive(Debug, Serialize)]
pub struct Completion<'a> {
    pub id: &'a str,
    pub object: &'static str,
    /// Seconds of Unix time.
    pub created: u64,
    pub model: &'a str,
    /// Empty in the chunk that carries the usage.
    pub choices: &'a [Choice],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// The answer, or a part of it.
#[derive(Debug, Serialize)]
pub struct Choice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<&'static str>,
    /// Ids of the generated tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Ids of the prompt, if asked for; in a stream, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// One entry for each token, in four lists.
#[derive(Debug, Default, Serialize)]
pub struct Logprobs {
    pub tokens: Vec<String>,
    /// Null for a prompt's first token.
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// Characters before the token in the text.
    pub text_offset: Vec<usize>,
}

/// Texts of the most likely tokens with their log-probabilities, most likely first, and the token itself.
/// No text stands twice; the more likely token has it.
#[derive(Debug)]
pub struct TopLogprobs(Vec<(String, f32)>);

/// Tokens taken.
#[derive(Debug, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

/// `GET /v1/models`.
#[derive(Debug, Serialize)]
pub struct ModelList<'a> {
    pub object: &'static str,
    pub data: [Model<'a>; 1],
}

/// What is served.
#[derive(Debug, Serialize)]
pub struct Model<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Tokens of prompt and answer together, at most.
    pub max_model_len: usize,
}

/// `GET /health`.
#[derive(Debug, Serialize)]
pub struct Health {
    pub status: &'static str,
}

/// `GET /version`.
#[derive(Debug, Serialize)]
pub struct Version {
    pub version: &'static str,
}

impl From<Tokens> for Usage {
    fn from(tokens: Tokens) -> Usage {
        let Tokens { prompt_tokens, completion_tokens } = tokens;
        Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

impl Choice {
    /// Nothing yet.
    pub fn empty() -> Choice {
        Choice {
            index: 0,
            text: String::new(),
            logprobs: None,
            finish_reason: None,
            token_ids: None,
            prompt_token_ids: None,
        }
    }

    /// Puts a piece behind what is there; its tokens into those lists that are there.
    pub fn append(&mut self, piece: Piece, tokenizer: &Tokenizer) {
        self.text += &piece.text;
        self.finish_reason = piece.finish.map(|reason| reason.as_str());
        if let Some(ids) = &mut self.token_ids
            && piece.origin == Origin::Answer
        {
            ids.extend(piece.tokens.iter().map(|placed| placed.token.id));
        }
        if let Some(logprobs) = &mut self.logprobs {
            piece.tokens.iter().for_each(|placed| logprobs.push(placed, tokenizer));
        }
    }
}

impl Logprobs {
    fn push(&mut self, PlacedToken { token, offset }: &PlacedToken, tokenizer: &Tokenizer) {
        let text = tokenizer.token_text(token.id);
        let own = token.logprob.map(writable);
        self.top_logprobs.push(own.map(|own| TopLogprobs::of(&token.top, (&text, own), tokenizer)));
        self.tokens.push(text);
        self.token_logprobs.push(own);
        self.text_offset.push(*offset);
    }
}

impl TopLogprobs {
    fn of(top: &[(u32, f32)], (text, own): (&str, f32), tokenizer: &Tokenizer) -> TopLogprobs {
        let likely = top.iter().map(|(id, logprob)| (tokenizer.token_text(*id), writable(*logprob)));
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

fn writable(logprob: f32) -> f32 {
    logprob.max(LOGPROB_MIN)
}
