//! `POST /v1/embeddings`: takes texts or token ids, returns an embedding for each.
//!
//! Invariant: a vector is truncated before it is L2-normalized, so that the returned vector has length 1.

use super::ServeParts;
use super::encoders::{EncoderApi, EncoderInput, EncoderOutput, parse_texts};
use super::error::ApiError;
use super::fields::{self, Fields, NoOpValue};
use super::openapi::describe::Api;
use super::openapi::requests::EmbeddingsBody;
use super::wire::InputUsage;
use super::wire::embedding::{Embedding, EmbeddingsResponse, EncodedVector};
use crate::actors::{EncoderOnlyPrompting, PromptingDefaults};
use crate::formats::{PoolingConfig, UnsupportedSetting};
use crate::request::{Pooling, Task, TokenEvent};

/// Describes the path of the API.
pub fn describe_paths(api: &mut Api) {
    api.post(EmbeddingsRequest::PATH, "Embeds texts.")
        .body::<EmbeddingsBody>()
        .returns::<EmbeddingsResponse>();
}

/// Parameters of an embeddings request, without its texts.
pub struct EmbeddingsRequest {
    pooling: Pooling,
    normalize: bool,
    /// Length of the returned vectors, at most the model's.
    dimensions: usize,
    /// Constructor of the requested encoding.
    encode: fn(Vec<f32>) -> EncodedVector,
}

/// Parameters of the OpenAI API and of other servers that are accepted only without effect.
const UNSUPPORTED: fields::UnsupportedParams = &[
    ("user", NoOpValue::Any),
    ("truncate", NoOpValue::Bool(false)),
    ("truncate_prompt_tokens", NoOpValue::OnlyNull),
];

impl EncoderApi for EmbeddingsRequest {
    const PATH: &'static str = "/v1/embeddings";
    type Response = EmbeddingsResponse;

    fn parse(
        parts: &ServeParts,
        mut fields: Fields,
    ) -> Result<(EmbeddingsRequest, Vec<EncoderInput>), ApiError> {
        let PromptingDefaults::Encoder(prompting) = &parts.model.prompting else {
            unreachable!("only encoder-only models serve embeddings; this is a bug");
        };
        let request = EmbeddingsRequest::parse_options(&mut fields, prompting)?;
        let texts = parse_texts(fields, parts, UNSUPPORTED)?;
        let task = Task::Embed(request.pooling);
        Ok((request, texts.into_iter().map(|ids| EncoderInput { ids, task: task.clone() }).collect()))
    }

    fn build_response(
        &self,
        parts: &ServeParts,
        found: Vec<EncoderOutput>,
    ) -> Result<EmbeddingsResponse, ApiError> {
        let usage = InputUsage::new(found.iter().map(|found| found.input.ids.len()).sum());
        let one = |(index, found): (usize, EncoderOutput)| {
            let vector = found.events.into_iter().find_map(|event| match event {
                TokenEvent::Embedding(vector) => Some(vector),
                _ => None,
            });
            let missing = || ApiError::internal("the engine returned no embedding for a text; this is a bug");
            let embedding = (self.encode)(self.finish_vector(vector.ok_or_else(missing)?));
            Ok(Embedding { object: "embedding", index, embedding })
        };
        let data = found.into_iter().enumerate().map(one).collect::<Result<_, ApiError>>()?;
        Ok(EmbeddingsResponse { object: "list", data, model: parts.model.name.clone(), usage })
    }
}

impl EmbeddingsRequest {
    /// Parses everything except the texts.
    fn parse_options(
        fields: &mut Fields,
        prompting: &EncoderOnlyPrompting,
    ) -> Result<EmbeddingsRequest, ApiError> {
        let pooling = fields.take_with("pooling", "one of \"mean\", \"cls\", \"last\"", |value| {
            Pooling::ALL.into_iter().find(|pooling| value.as_str() == Some(pooling.name()))
        })?;
        let form = fields.take_with("encoding_format", "\"float\" or \"base64\"", |value| {
            match value.as_str()? {
                "float" => Some(EncodedVector::List as fn(Vec<f32>) -> EncodedVector),
                "base64" => Some(EncodedVector::Base64),
                _ => None,
            }
        })?;
        let pooling = match (pooling, &prompting.pooling) {
            (Some(requested), _) => requested,
            (None, PoolingConfig::Supported(own)) => *own,
            (None, PoolingConfig::Unsupported(UnsupportedSetting { reason: why, .. })) => {
                let message = format!("{why}: set 'pooling' in the request");
                return Err(ApiError::unsupported("pooling", message));
            }
        };
        let most = prompting.dimensions;
        Ok(EmbeddingsRequest {
            pooling,
            normalize: fields.take_bool("normalize", prompting.normalize)?,
            dimensions: fields.take_integer("dimensions", 1, most as i64)?.map_or(most, |cut| cut as usize),
            encode: form.unwrap_or(EncodedVector::List),
        })
    }

    /// Truncates and normalizes a vector as requested.
    fn finish_vector(&self, mut vector: Vec<f32>) -> Vec<f32> {
        vector.truncate(self.dimensions);
        let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        // A zero vector cannot be normalized.
        if self.normalize && length > 0.0 {
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
        vector
    }
}
