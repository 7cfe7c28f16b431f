//! Serialization of numbers that may be infinite: like `vllm bench serve`, infinity is written as the string
//! `inf`.
//!
//! Invariant: deserialization restores the serialized value.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Word(String),
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        if value.is_finite() { Number::Finite(value) } else { Number::Word(value.to_string()) }
    }
}

/// Writes an optional number, as text if JSON cannot express it.
pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(Number::from).serialize(serializer)
}

/// Reads an optional number as [`serialize`] writes it.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    match Option::deserialize(deserializer)? {
        None => Ok(None),
        Some(Number::Finite(value)) => Ok(Some(value)),
        Some(Number::Word(word)) => {
            word.parse().map(Some).map_err(|_| D::Error::custom(format_args!("'{word}' is not a number")))
        }
    }
}
