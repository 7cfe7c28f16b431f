//! `POST /v1/score`: takes pairs of texts, returns a score for each.
//!
//! Invariant: results are in the order of the pairs.

use super::pairs::{NamedText, PairScoring, PairTexts};
use super::texts::{TokenLimit, parse_text_list};
use super::{token_count, unix_time};
use crate::server::ServeParts;
use crate::server::encoders::{EncoderApi, EncoderInput, EncoderOutput};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams};
use crate::server::openapi::describe::Api;
use crate::server::openapi::requests::ScoreBody;
use crate::server::respond::Turn;
use crate::server::wire::InputUsage;
use crate::server::wire::scoring::{PairScore, ScoreResponse};

/// Paths of the API.
pub const PATHS: [&str; 2] = ["/v1/score", "/score"];

/// Describes the paths of the API.
pub fn describe_paths(api: &mut Api) {
    for path in PATHS {
        api.post(path, "Scores pairs of texts.").body::<ScoreBody>().returns::<ScoreResponse>();
    }
}

/// A parsed request.
pub struct ScoreRequest {
    scoring: PairScoring,
}

/// Parameters of other servers that are accepted only without effect.
const UNSUPPORTED: UnsupportedParams = &[("user", NoOpValue::Any)];

/// The names of the two lists, of which a request has those of one pair.
const NAMES: [[&str; 2]; 4] =
    [["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]];

impl EncoderApi for ScoreRequest {
    const PATH: &'static str = "/v1/score";
    type Response = ScoreResponse;

    fn parse(
        parts: &ServeParts,
        turn: &Turn,
        mut fields: Fields,
    ) -> Result<(Self, Vec<EncoderInput>), ApiError> {
        let raw = super::classify::take_raw(&mut fields)?;
        let limit = TokenLimit::parse(parts, &mut fields)?;
        let given = |names: &[&str; 2]| names.iter().filter(|name| fields.get(name).is_some()).count();
        let of = |count: usize| NAMES.iter().find(|names| given(names) == count);
        let names = *of(2).or_else(|| of(1)).unwrap_or(&NAMES[0]);
        let values = names.map(|name| fields.take(name));
        fields.finish(&[UNSUPPORTED])?;
        let [first, second] = values;
        let (first, first_is_list) = parse_text_list(names[0], first)?;
        let (second, second_is_list) = parse_text_list(names[1], second)?;
        let pairs: Vec<[usize; 2]> = match (first.len(), second.len()) {
            (1, count) => (0..count).map(|index| [0, index]).collect(),
            (one, other) if one == other => (0..one).map(|index| [index, index]).collect(),
            (one, other) => {
                let message = format!(
                    "'{}' has {one} texts and '{}' {other}: there must be one, or as many as there",
                    names[0], names[1]
                );
                return Err(ApiError::invalid(names[0], message));
            }
        };
        let pairs = PairTexts {
            first: named(names[0], &first, first_is_list),
            second: named(names[1], &second, second_is_list),
            pairs,
            roles: [&[], &[]],
            limit,
            raw,
        };
        let (scoring, inputs) = pairs.inputs(parts, turn)?;
        Ok((ScoreRequest { scoring }, inputs))
    }

    fn is_large(&self, _texts: usize) -> bool {
        true
    }

    fn build_response(
        &self,
        parts: &ServeParts,
        id: &str,
        found: Vec<EncoderOutput>,
    ) -> Result<Self::Response, ApiError> {
        let scores = self.scoring.scores(parts, &found)?;
        let one = |(index, score)| PairScore { index, object: "score", score };
        Ok(ScoreResponse {
            id: format!("score-{id}"),
            object: "list",
            created: unix_time(),
            model: parts.model.name.clone(),
            data: scores.into_iter().enumerate().map(one).collect(),
            usage: InputUsage::new(token_count(&found)),
        })
    }
}

/// Returns texts with the names that errors call them.
fn named<'t>(name: &str, texts: &'t [String], is_list: bool) -> Vec<NamedText<'t>> {
    let name = |index| if is_list { format!("{name}[{index}]") } else { name.to_owned() };
    texts.iter().enumerate().map(|(index, text)| NamedText { name: name(index), text }).collect()
}
