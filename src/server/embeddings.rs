//! `POST /v1/embeddings`: takes texts or token ids, returns an embedding for each.
//!
//! Invariant: a vector is truncated before it is L2-normalized, so that the returned vector has length 1.

use super::ServeParts;
use super::encoders::{EncoderApi, EncoderInput, EncoderOutput, INLINE_INPUTS, check_finite, parse_texts};
use super::error::ApiError;
use super::fields::{self, Fields, NoOpValue, shorten};
use super::openapi::describe::Api;
use super::openapi::requests::EmbeddingsBody;
use super::respond::Turn;
use super::wire::InputUsage;
use super::wire::embedding::{Embedding, EmbeddingsResponse, EncodedVector};
use crate::actors::{EmbeddingDefaults, Kind};
use crate::decoding::apply_all;
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
    /// Whether layers after pooling are computed for the response.
    has_layers: bool,
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
        turn: &Turn,
        mut fields: Fields,
    ) -> Result<(EmbeddingsRequest, Vec<EncoderInput>), ApiError> {
        let prompting = defaults_of(parts)?;
        let request = EmbeddingsRequest::parse_options(&mut fields, prompting)?;
        if parts.model.kind == Kind::Decoder && request.pooling == Pooling::Cls {
            let message = "the first token of a decoder knows nothing of the text; use \"last\" or \"mean\"";
            return Err(ApiError::unsupported("pooling", message));
        }
        let prompt = parse_prompt(&mut fields, prompting)?;
        check_prompt(prompting, ("prompt", &prompt))?;
        let texts = parse_texts(fields, (parts, turn), UNSUPPORTED, &prompt)?;
        let task = Task::Embed(request.pooling);
        let input = |ids| EncoderInput { ids, second_text: None, task: task.clone() };
        Ok((request, texts.into_iter().map(input).collect()))
    }

    fn is_large(&self, texts: usize) -> bool {
        self.has_layers || texts > INLINE_INPUTS
    }

    fn build_response(
        &self,
        parts: &ServeParts,
        _id: &str,
        found: Vec<EncoderOutput>,
    ) -> Result<EmbeddingsResponse, ApiError> {
        let prompting = defaults_of(parts)?;
        let usage = InputUsage::new(found.iter().map(|found| found.input.ids.len()).sum());
        let one = |(index, found): (usize, EncoderOutput)| {
            let vector = found.events.into_iter().find_map(|event| match event {
                TokenEvent::Embedding(vector) => Some(vector),
                _ => None,
            });
            let missing = || ApiError::internal("the engine returned no embedding for a text; this is a bug");
            let vector = self.finish_vector(apply_all(&prompting.dense, vector.ok_or_else(missing)?));
            check_finite(&vector)?;
            Ok(Embedding { object: "embedding", index, embedding: (self.encode)(vector) })
        };
        let data = found.into_iter().enumerate().map(one).collect::<Result<_, ApiError>>()?;
        Ok(EmbeddingsResponse { object: "list", data, model: parts.model.name.clone(), usage })
    }
}

impl EmbeddingsRequest {
    /// Parses everything except the texts.
    fn parse_options(
        fields: &mut Fields,
        prompting: &EmbeddingDefaults,
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
        let pooling = pooling
            .map_or_else(|| default_pooling(prompting, ("pooling", "set 'pooling' in the request")), Ok)?;
        let most = prompting.dimensions;
        Ok(EmbeddingsRequest {
            pooling,
            normalize: fields.take_bool("normalize", prompting.normalize)?,
            dimensions: fields.take_integer("dimensions", 1, most as i64)?.map_or(most, |cut| cut as usize),
            has_layers: !prompting.dense.is_empty(),
            encode: form.unwrap_or(EncodedVector::List),
        })
    }

    /// Truncates and normalizes a vector as requested.
    fn finish_vector(&self, mut vector: Vec<f32>) -> Vec<f32> {
        vector.truncate(self.dimensions);
        if self.normalize { normalized(vector) } else { vector }
    }
}

/// Returns how the model embeds texts. Models that do not are not asked.
fn defaults_of(parts: &ServeParts) -> Result<&EmbeddingDefaults, ApiError> {
    let missing = || ApiError::internal("the model does not serve embeddings; this is a bug");
    parts.model.prompting.embedding().ok_or_else(missing)
}

/// Returns the model's own pooling. If it is not supported, the error is about the parameter `param` and
/// names the remedy.
pub fn default_pooling(
    prompting: &EmbeddingDefaults,
    (param, remedy): (&str, &str),
) -> Result<Pooling, ApiError> {
    match &prompting.pooling {
        PoolingConfig::Supported(own) => Ok(*own),
        PoolingConfig::Unsupported(UnsupportedSetting { reason: why, .. }) => {
            Err(ApiError::unsupported(param, format!("{why}: {remedy}")))
        }
    }
}

/// Returns the embedding that a model has by default, of a pooled vector.
pub fn finished_vector(prompting: &EmbeddingDefaults, vector: Vec<f32>) -> Vec<f32> {
    let vector = apply_all(&prompting.dense, vector);
    if prompting.normalize { normalized(vector) } else { vector }
}

/// Scales a vector to length 1. A zero vector cannot be scaled.
fn normalized(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}

/// Returns an error about `param` for a prompt whose tokens the model leaves out of its pooling.
pub fn check_prompt(prompting: &EmbeddingDefaults, (param, prompt): (&str, &str)) -> Result<(), ApiError> {
    if prompt.is_empty() || !prompting.prompts.are_left_out {
        return Ok(());
    }
    let message = "the model's pooling leaves prompts out (include_prompt is false), which is not supported";
    Err(ApiError::unsupported(param, message))
}

/// Takes the parameters out that choose the prompt of texts: the prompt itself, its name, or the use of the
/// texts, for which a model may have none.
fn parse_prompt(fields: &mut Fields, prompting: &EmbeddingDefaults) -> Result<String, ApiError> {
    let prompts = &prompting.prompts;
    let text = fields.take_string("prompt")?;
    let name = fields.take_string("prompt_name")?;
    let usage =
        fields.take_with("input_type", "a use of texts, such as \"query\" or \"document\"", |value| {
            let value = value.as_str()?;
            USES.iter().find(|names| names.contains(&value)).copied()
        })?;
    if text.is_some() && name.is_some() {
        return Err(ApiError::invalid("prompt_name", "'prompt' and 'prompt_name' are mutually exclusive"));
    }
    Ok(match (text, name, usage) {
        (Some(text), _, _) => text,
        (None, Some(name), _) => prompts.texts.get(&name).cloned().ok_or_else(|| {
            let known = prompts.texts.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let message = format!("the model has no prompt '{}' (known: {known})", shorten(&name));
            ApiError::invalid("prompt_name", message)
        })?,
        (None, None, Some(names)) => prompts.of_role(names).to_owned(),
        (None, None, None) => prompts.of_role(&[]).to_owned(),
    })
}

/// Uses of texts, each by its names in requests and in the prompts of models.
pub const USES: [&[&str]; 4] = [
    &["query", "search_query"],
    &["document", "passage", "search_document"],
    &["classification"],
    &["clustering"],
];
