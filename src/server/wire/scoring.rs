//! Responses of the APIs that compare and classify texts, in the shapes of vLLM, Jina and Cohere.
//!
//! Invariant: results refer to texts by their index in the request.

use super::InputUsage;
use serde::Serialize;
use utoipa::ToSchema;

/// Response of `POST /v1/rerank`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerankResponse {
    pub id: String,
    pub model: String,
    pub usage: InputUsage,
    /// The documents, the most relevant one first.
    pub results: Vec<RankedDocument>,
}

/// A document with its relevance.
#[derive(Debug, Serialize, ToSchema)]
pub struct RankedDocument {
    pub index: usize,
    pub relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<DocumentText>,
}

/// The text of a document.
#[derive(Debug, Serialize, ToSchema)]
pub struct DocumentText {
    pub text: String,
}

/// Response of `POST /v1/score`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ScoreResponse {
    pub id: String,
    /// Always `list`.
    pub object: &'static str,
    /// Creation time, in seconds of Unix time.
    pub created: u64,
    pub model: String,
    pub data: Vec<PairScore>,
    pub usage: InputUsage,
}

/// Response of `POST /v1/classify`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifyResponse {
    pub id: String,
    /// Always `list`.
    pub object: &'static str,
    /// Creation time, in seconds of Unix time.
    pub created: u64,
    pub model: String,
    pub data: Vec<Classification>,
    pub usage: InputUsage,
}

/// The score of a pair of texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct PairScore {
    pub index: usize,
    /// Always `score`.
    pub object: &'static str,
    pub score: f32,
}

/// The classes of a text, or of its tokens.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Classification {
    Text(ClassifiedText),
    Tokens(ClassifiedTokens),
}

/// The class of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifiedText {
    pub index: usize,
    /// The label with the largest score.
    pub label: String,
    /// The score of each label.
    pub probs: Vec<f32>,
    pub num_classes: usize,
}

/// The classes of the tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifiedTokens {
    pub index: usize,
    /// The tokens, without special ones and those with an ignored label.
    pub entities: Vec<ClassifiedToken>,
    pub num_classes: usize,
}

/// The class of a token.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifiedToken {
    /// The label with the largest score.
    pub entity: String,
    pub score: f32,
    /// Position of the token in the text, special tokens included.
    pub index: usize,
    pub token: u32,
    /// Text of the token.
    pub word: String,
}
