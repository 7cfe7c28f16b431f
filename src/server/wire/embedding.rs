//! Response of the embeddings API: one vector per text, as a list of numbers or as base64.
//!
//! Invariant: the base64 form encodes the numbers in single precision, little-endian.

use super::InputUsage;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// Response of `POST /v1/embeddings`.
#[derive(Debug, Serialize, ToSchema)]
pub struct EmbeddingsResponse {
    pub object: &'static str,
    pub data: Vec<Embedding>,
    pub model: String,
    pub usage: InputUsage,
}

/// The embedding of one text.
#[derive(Debug, Serialize, ToSchema)]
pub struct Embedding {
    pub object: &'static str,
    pub index: usize,
    /// A list of numbers, or a text in base64.
    #[schema(value_type = Value)]
    pub embedding: EncodedVector,
}

/// The numbers of a vector, in the requested encoding.
#[derive(Debug)]
pub enum EncodedVector {
    List(Vec<f32>),
    Base64(Vec<f32>),
}

impl Serialize for EncodedVector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            EncodedVector::List(numbers) => numbers.serialize(serializer),
            EncodedVector::Base64(numbers) => {
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                serializer.serialize_str(&BASE64_STANDARD.encode(bytes))
            }
        }
    }
}
