//! Response of the fill-mask API: the texts, their masks, and the candidates of each mask.
//!
//! Invariant: a candidate has the fields of transformers' fill-mask pipeline, and its log-probability.

use super::InputUsage;
use serde::Serialize;
use utoipa::ToSchema;

/// Response of `POST /v1/fill-mask`.
#[derive(Debug, Serialize, ToSchema)]
pub struct FillMaskResponse {
    pub object: &'static str,
    pub data: Vec<FilledText>,
    pub model: String,
    pub usage: InputUsage,
}

/// The masks of one text.
#[derive(Debug, Serialize, ToSchema)]
pub struct FilledText {
    pub object: &'static str,
    pub index: usize,
    /// Masks in the order of the text.
    pub masks: Vec<FilledMask>,
}

/// The candidates of one mask.
#[derive(Debug, Serialize, ToSchema)]
pub struct FilledMask {
    /// Number of tokens before the mask, including those that the tokenizer adds before the text.
    pub position: usize,
    /// Candidates, most likely first.
    pub candidates: Vec<MaskCandidate>,
}

/// A token that may replace a mask.
#[derive(Debug, Serialize, ToSchema)]
pub struct MaskCandidate {
    pub token: u32,
    pub token_str: String,
    /// Probability of the token.
    pub score: f32,
    pub logprob: f32,
    /// The text with the mask replaced; it includes special tokens if the text has further masks.
    pub sequence: String,
}
