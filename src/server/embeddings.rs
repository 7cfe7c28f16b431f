//! `POST /v1/embeddings`: takes texts or token ids, returns an embedding for each.
//!
//! Invariant: a vector is truncated before it is L2-normalized, so that the returned vector has length 1.

use super::ServeParts;
use super::encoders::{Found, Input, Question, texts};
use super::error::ApiError;
use super::fields::{self, Fields, Neutral};
use super::respond::fields_of;
use super::wire::InputUsage;
use super::wire::embedding::{Embedding, Embeddings, Numbers};
use crate::actors::{Conventions, EncoderConventions};
use crate::formats::{FoundPooling, Unserved};
use crate::request::{Pooling, Task, TokenEvent};

/// Parameters of an embeddings request, without its texts.
pub struct Wish {
    pooling: Pooling,
    normalize: bool,
    /// Length of the returned vectors, at most the model's.
    dimensions: usize,
    /// Constructor of the requested encoding.
    form: fn(Vec<f32>) -> Numbers,
}

/// Parameters of the OpenAI API and of other servers that are accepted only without effect.
const UNSERVED: fields::Unserved = &[
    ("user", Neutral::Anything),
    ("priority", Neutral::Number(0.0)),
    ("truncate", Neutral::Bool(false)),
    ("truncate_prompt_tokens", Neutral::Nothing),
];

impl Question for Wish {
    const PATH: &'static str = "/v1/embeddings";
    type Answer = Embeddings;

    fn read(parts: &ServeParts, body: &[u8]) -> Result<(Wish, Vec<Input>), ApiError> {
        let Conventions::Encoder(conventions) = &parts.model.conventions else {
            unreachable!("only encoder-only models serve embeddings; this is a bug");
        };
        let mut fields = fields_of(parts, body)?;
        let wish = Wish::parse(&mut fields, conventions)?;
        let texts = texts(fields, parts, UNSERVED)?;
        let task = Task::Embed(wish.pooling);
        Ok((wish, texts.into_iter().map(|ids| Input { ids, task: task.clone() }).collect()))
    }

    fn answer(&self, parts: &ServeParts, found: Vec<Found>) -> Result<Embeddings, ApiError> {
        let usage = InputUsage::of(found.iter().map(|found| found.input.ids.len()).sum());
        let one = |(index, found): (usize, Found)| {
            let vector = found.events.into_iter().find_map(|event| match event {
                TokenEvent::Embedding(vector) => Some(vector),
                _ => None,
            });
            let missing = || ApiError::internal("the engine returned no embedding for a text; this is a bug");
            let embedding = (self.form)(self.finished(vector.ok_or_else(missing)?));
            Ok(Embedding { object: "embedding", index, embedding })
        };
        let data = found.into_iter().enumerate().map(one).collect::<Result<_, ApiError>>()?;
        Ok(Embeddings { object: "list", data, model: parts.model.name.clone(), usage })
    }
}

impl Wish {
    fn parse(fields: &mut Fields, conventions: &EncoderConventions) -> Result<Wish, ApiError> {
        let pooling = fields.read("pooling", "one of \"mean\", \"cls\", \"last\"", |value| {
            Pooling::ALL.into_iter().find(|pooling| value.as_str() == Some(pooling.name()))
        })?;
        let form =
            fields.read("encoding_format", "\"float\" or \"base64\"", |value| match value.as_str()? {
                "float" => Some(Numbers::List as fn(Vec<f32>) -> Numbers),
                "base64" => Some(Numbers::Base64),
                _ => None,
            })?;
        let pooling = match (pooling, &conventions.pooling) {
            (Some(requested), _) => requested,
            (None, FoundPooling::Served(own)) => *own,
            (None, FoundPooling::Unserved(Unserved { why, .. })) => {
                let message = format!("{why}: set 'pooling' in the request");
                return Err(ApiError::unsupported("pooling", message));
            }
        };
        let most = conventions.dimensions;
        Ok(Wish {
            pooling,
            normalize: fields.flag("normalize", conventions.normalize)?,
            dimensions: fields.integer("dimensions", 1, most as i64)?.map_or(most, |cut| cut as usize),
            form: form.unwrap_or(Numbers::List),
        })
    }

    /// Truncates and normalizes a vector as requested.
    fn finished(&self, mut vector: Vec<f32>) -> Vec<f32> {
        vector.truncate(self.dimensions);
        let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        // A zero vector cannot be normalized.
        if self.normalize && length > 0.0 {
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
        vector
    }
}
