//! `POST /v1/rerank`: takes a query and documents, returns the documents by relevance.
//!
//! Invariant: documents with equal scores keep their order.

use super::pairs::{NamedText, PairScoring, PairTexts};
use super::texts::{TokenLimit, parse_text, parse_text_list};
use super::token_count;
use crate::server::ServeParts;
use crate::server::embeddings::USES;
use crate::server::encoders::{EncoderApi, EncoderInput, EncoderOutput};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams};
use crate::server::openapi::describe::Api;
use crate::server::openapi::requests::RerankBody;
use crate::server::respond::Turn;
use crate::server::wire::InputUsage;
use crate::server::wire::scoring::{DocumentText, RankedDocument, RerankResponse};

/// Paths of the API, of which the last has Cohere's defaults.
pub const PATHS: [&str; 3] = ["/v1/rerank", "/rerank", "/v2/rerank"];

/// Describes the paths of the API.
pub fn describe_paths(api: &mut Api) {
    for path in PATHS {
        api.post(path, "Sorts documents by their relevance to a query.")
            .body::<RerankBody>()
            .returns::<RerankResponse>();
    }
}

/// A parsed request. By default, documents are returned if `SHOWS` is true.
pub struct RerankRequest<const SHOWS: bool> {
    scoring: PairScoring,
    /// The documents, if they are returned.
    documents: Option<Vec<String>>,
    top_n: usize,
}

/// Parameters of other servers that are accepted only without effect.
const UNSUPPORTED: UnsupportedParams =
    &[("user", NoOpValue::Any), ("rank_fields", NoOpValue::Empty), ("max_chunks_per_doc", NoOpValue::Any)];

impl<const SHOWS: bool> EncoderApi for RerankRequest<SHOWS> {
    const PATH: &'static str = "/v1/rerank";
    type Response = RerankResponse;

    fn parse(
        parts: &ServeParts,
        turn: &Turn,
        mut fields: Fields,
    ) -> Result<(Self, Vec<EncoderInput>), ApiError> {
        let top_n = fields.take_integer("top_n", 0, i64::from(u32::MAX))?;
        let shows = fields.take_bool("return_documents", SHOWS)?;
        let raw = super::classify::take_raw(&mut fields)?;
        let mut limit = TokenLimit::parse(parts, &mut fields)?;
        let document = fields.take_integer("max_tokens_per_doc", 1, i64::from(u32::MAX))?;
        limit.document = document.map_or(usize::MAX, |most| most as usize);
        let query = fields.take("query").ok_or_else(|| ApiError::invalid("query", "'query' is missing"))?;
        let query = parse_text("query", query)?;
        let documents = fields.take("documents");
        fields.finish(&[UNSUPPORTED])?;
        let (documents, _) = parse_text_list("documents", documents)?;
        let second = documents.iter().enumerate();
        let second =
            second.map(|(index, text)| NamedText { name: format!("documents[{index}]"), text }).collect();
        let pairs = PairTexts {
            first: vec![NamedText { name: "query".to_owned(), text: &query }],
            second,
            pairs: (0..documents.len()).map(|index| [0, index]).collect(),
            roles: [USES[0], USES[1]],
            limit,
            raw,
        };
        let (scoring, inputs) = pairs.inputs(parts, turn)?;
        let top_n =
            top_n.filter(|top| *top > 0).map_or(documents.len(), |top| (top as usize).min(documents.len()));
        Ok((RerankRequest { scoring, documents: shows.then_some(documents), top_n }, inputs))
    }

    fn is_large(&self, _texts: usize) -> bool {
        true
    }

    fn build_response(
        &self,
        parts: &ServeParts,
        id: &str,
        found: Vec<EncoderOutput>,
    ) -> Result<RerankResponse, ApiError> {
        let scores = self.scoring.scores(parts, &found)?;
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let text =
            |index: usize| self.documents.as_ref().map(|all| DocumentText { text: all[index].clone() });
        let ranked = |index| RankedDocument { index, relevance_score: scores[index], document: text(index) };
        Ok(RerankResponse {
            id: format!("rerank-{id}"),
            model: parts.model.name.clone(),
            usage: InputUsage::new(token_count(&found)),
            results: order.into_iter().take(self.top_n).map(ranked).collect(),
        })
    }
}
