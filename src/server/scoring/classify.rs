//! `POST /v1/classify`: takes texts, returns the class of each, or of each of its tokens.
//!
//! Invariant: results are in the order of the texts.

use super::texts::TokenLimit;
use super::{token_count, unix_time, vector_of};
use crate::decoding::Classifier;
use crate::request::Task;
use crate::server::ServeParts;
use crate::server::encoders::{EncoderApi, EncoderInput, EncoderOutput, check_finite, check_input_count};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams};
use crate::server::openapi::describe::Api;
use crate::server::openapi::requests::ClassifyBody;
use crate::server::prompts::{Prompt, parse_prompts};
use crate::server::respond::Turn;
use crate::server::wire::InputUsage;
use crate::server::wire::scoring::{
    Classification, ClassifiedText, ClassifiedToken, ClassifiedTokens, ClassifyResponse,
};

/// Paths of the API.
pub const PATHS: [&str; 2] = ["/v1/classify", "/classify"];

/// Labels of tokens that are not returned by default.
const IGNORED: &str = "O";

/// Describes the paths of the API.
pub fn describe_paths(api: &mut Api) {
    for path in PATHS {
        api.post(path, "Classifies texts, or their tokens.")
            .body::<ClassifyBody>()
            .returns::<ClassifyResponse>();
    }
}

/// A parsed request.
pub struct ClassifyRequest {
    /// Whether scores are logits.
    raw: bool,
    /// Labels of tokens that are not returned.
    ignored: Vec<String>,
}

/// Parameters of other servers that are accepted only without effect.
const UNSUPPORTED: UnsupportedParams = &[("user", NoOpValue::Any)];

/// Takes the parameters out that ask for logits instead of scores.
pub fn take_raw(fields: &mut Fields) -> Result<bool, ApiError> {
    let activation = fields.take_bool("activation", true)?;
    Ok(!fields.take_bool("use_activation", activation)?)
}

impl EncoderApi for ClassifyRequest {
    const PATH: &'static str = "/v1/classify";
    type Response = ClassifyResponse;

    fn parse(
        parts: &ServeParts,
        _turn: &Turn,
        mut fields: Fields,
    ) -> Result<(Self, Vec<EncoderInput>), ApiError> {
        let raw = take_raw(&mut fields)?;
        let ignored = fields.take_with("ignore_labels", "a list of strings", |value| {
            value
                .as_array()?
                .iter()
                .map(|label| label.as_str().map(str::to_owned))
                .collect::<Option<Vec<_>>>()
        })?;
        let limit = TokenLimit::parse(parts, &mut fields)?;
        let value = fields.take("input");
        fields.finish(&[UNSUPPORTED])?;
        let is_list = value.as_ref().and_then(|value| value.get(0)).is_some_and(|first| !first.is_number());
        let texts = parse_prompts("input", value, parts.model.vocab)?;
        check_input_count("input", texts.len())?;
        let task = match classifier_of(parts)?.pooling {
            Some(pooling) => Task::Embed(pooling),
            None => Task::EmbedTokens,
        };
        let inputs = texts.into_iter().enumerate().map(|(index, text)| {
            let name = if is_list { format!("input[{index}]") } else { "input".to_owned() };
            if text.is_empty() {
                return Err(ApiError::empty("input", format!("'{name}' is empty")));
            }
            let ids = match text {
                Prompt::Text(text) => limit.tokenize(parts, (&text, None), &name)?.ids,
                Prompt::Ids(ids) => limit.take_ids(parts, ids, &name)?,
            };
            Ok(EncoderInput { ids: ids.into(), second_text: None, task: task.clone() })
        });
        let inputs = inputs.collect::<Result<_, ApiError>>()?;
        let ignored = ignored.unwrap_or_else(|| vec![IGNORED.to_owned()]);
        Ok((ClassifyRequest { raw, ignored }, inputs))
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
        let classifier = classifier_of(parts)?;
        let one = |(index, found): (usize, &EncoderOutput)| {
            let vectors = vector_of(found)?;
            Ok(match classifier.pooling {
                Some(_) => Classification::Text(self.text_class(classifier, index, vectors)?),
                None => {
                    Classification::Tokens(self.token_classes(parts, classifier, index, (found, vectors))?)
                }
            })
        };
        Ok(ClassifyResponse {
            id: format!("classify-{id}"),
            object: "list",
            created: unix_time(),
            model: parts.model.name.clone(),
            data: found.iter().enumerate().map(one).collect::<Result<_, ApiError>>()?,
            usage: InputUsage::new(token_count(&found)),
        })
    }
}

impl ClassifyRequest {
    fn scores(&self, classifier: &Classifier, vector: &[f32]) -> Result<Vec<f32>, ApiError> {
        let mut scores = classifier.logits(vector);
        if !self.raw {
            classifier.function.apply(&mut scores);
        }
        check_finite(&scores)?;
        Ok(scores)
    }

    fn text_class(
        &self,
        classifier: &Classifier,
        index: usize,
        vector: &[f32],
    ) -> Result<ClassifiedText, ApiError> {
        let probs = self.scores(classifier, vector)?;
        let label = classifier.labels[largest(&probs)].clone();
        Ok(ClassifiedText { index, label, num_classes: probs.len(), probs })
    }

    fn token_classes(
        &self,
        parts: &ServeParts,
        classifier: &Classifier,
        index: usize,
        (found, vectors): (&EncoderOutput, &[f32]),
    ) -> Result<ClassifiedTokens, ApiError> {
        let ids = &found.input.ids;
        let rows = vectors.chunks_exact(vectors.len() / ids.len());
        let mut entities = Vec::new();
        for (position, (token, vector)) in ids.iter().zip(rows).enumerate() {
            let scores = self.scores(classifier, vector)?;
            let best = largest(&scores);
            let entity = &classifier.labels[best];
            if !self.ignored.contains(entity) && !parts.tokenizer.is_special(*token) {
                entities.push(ClassifiedToken {
                    entity: entity.clone(),
                    score: scores[best],
                    index: position,
                    token: *token,
                    word: parts.tokenizer.token_text(*token),
                });
            }
        }
        Ok(ClassifiedTokens { index, entities, num_classes: classifier.labels.len() })
    }
}

/// Returns the model's classifier. Models without one do not serve the API.
fn classifier_of(parts: &ServeParts) -> Result<&Classifier, ApiError> {
    let missing = || ApiError::internal("the model has no classifier; this is a bug");
    parts.model.classifier.as_deref().ok_or_else(missing)
}

/// Returns the index of the largest number, the first one of several.
fn largest(numbers: &[f32]) -> usize {
    let later = |best: usize, (at, number): (usize, &f32)| if *number > numbers[best] { at } else { best };
    numbers.iter().enumerate().fold(0, later)
}
