//! From JSON to the checked value of a parameter.

use super::params::{Kind, Param, ParamError, Value, Vocabulary};
use serde_json::Value as Json;

/// Returns the value of a parameter that the request spells `name`. Errors name it, the value and its bounds.
pub fn value(
    name: &str,
    param: &Param,
    json: &Json,
    vocabulary: &dyn Vocabulary,
) -> Result<Value, ParamError> {
    let refuse = |bounds: String| ParamError::new(name, format!("is {} but must be {bounds}", shown(json)));
    match param.kind {
        Kind::Float { bounds, .. } => {
            let number = json.as_f64().ok_or_else(|| refuse("a number".to_owned()))?;
            if !bounds.contain(number) {
                return Err(refuse(bounds.to_string()));
            }
            Ok(Value::Float(number))
        }
        Kind::Integer { min, max, .. } => {
            let fits = whole(json).filter(|number| (min..=max).contains(number));
            fits.map(Value::Integer).ok_or_else(|| refuse(format!("a whole number from {min} to {max}")))
        }
        Kind::Choice(choices) => {
            let text = json.as_str().filter(|text| choices.contains(text));
            let text = text.ok_or_else(|| refuse(format!("one of {}", choices.join(", "))))?;
            Ok(Value::Text(text.to_owned()))
        }
        Kind::Tokens => {
            let ids = json.as_array().and_then(|ids| ids.iter().map(|id| token(id, vocabulary)).collect());
            ids.map(Value::Tokens).ok_or_else(|| refuse(list_of_tokens(vocabulary)))
        }
        Kind::Sequences => sequences(json, vocabulary).map(Value::Sequences).ok_or_else(|| {
            refuse(format!("a list of texts, or of lists that are each {}", list_of_tokens(vocabulary)))
        }),
        Kind::Texts(_) => {
            let text = |text: &Json| text.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
            let texts = json.as_array().and_then(|texts| texts.iter().map(text).collect());
            texts.map(Value::Texts).ok_or_else(|| refuse("a list of texts that are not empty".to_owned()))
        }
        Kind::Biases => biases(json, vocabulary).map(Value::Biases).ok_or_else(|| {
            let least = vocabulary.size();
            refuse(format!(
                "an object from token ids below {least} or texts to numbers or false, or a list of such pairs"
            ))
        }),
    }
}

/// Returns the JSON text of a value, shortened.
pub fn shown(json: &Json) -> String {
    const MOST: usize = 60;
    let text = json.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns a whole number, which may be written with a fraction of 0.
fn whole(json: &Json) -> Option<i64> {
    let exact = |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    json.as_i64().or_else(|| json.as_f64().and_then(exact))
}

/// Returns the id of a token of the vocabulary.
fn token(json: &Json, vocabulary: &dyn Vocabulary) -> Option<u32> {
    json.as_u64().filter(|&id| id < vocabulary.size() as u64).map(|id| id as u32)
}

/// Describes a list of token ids.
fn list_of_tokens(vocabulary: &dyn Vocabulary) -> String {
    format!("a list of token ids below {}", vocabulary.size())
}

/// Returns token sequences, none of them empty. A text gives its tokens with and without a space before it.
fn sequences(json: &Json, vocabulary: &dyn Vocabulary) -> Option<Vec<Vec<u32>>> {
    let mut sequences = Vec::new();
    for word in json.as_array()? {
        match word {
            Json::String(text) if !text.is_empty() => {
                sequences.push(vocabulary.encode(text));
                sequences.push(vocabulary.encode(&format!(" {}", text.trim_start())));
            }
            Json::Array(ids) if !ids.is_empty() => {
                sequences.push(ids.iter().map(|id| token(id, vocabulary)).collect::<Option<_>>()?);
            }
            _ => return None,
        }
    }
    sequences.retain(|sequence: &Vec<u32>| !sequence.is_empty());
    sequences.sort_unstable();
    sequences.dedup();
    Some(sequences)
}

/// Returns biases by token id.
fn biases(json: &Json, vocabulary: &dyn Vocabulary) -> Option<Vec<(u32, f32)>> {
    let mut biases = Vec::new();
    let mut add = |ids: Vec<u32>, bias: &Json| {
        let bias = match bias {
            Json::Bool(false) => f32::NEG_INFINITY,
            _ => bias.as_f64().map(|bias| bias as f32).filter(|bias| bias.is_finite())?,
        };
        biases.extend(ids.into_iter().map(|id| (id, bias)));
        Some(())
    };
    match json {
        Json::Object(entries) => {
            for (key, bias) in entries {
                let ids = match key.parse::<u64>() {
                    Ok(id) => vec![token(&id.into(), vocabulary)?],
                    Err(_) => vocabulary.encode(key),
                };
                add(ids, bias)?;
            }
        }
        Json::Array(entries) => {
            for entry in entries {
                let [key, bias] = entry.as_array()?.as_slice() else { return None };
                let ids = match key {
                    Json::String(text) => vocabulary.encode(text),
                    id => vec![token(id, vocabulary)?],
                };
                add(ids, bias)?;
            }
        }
        _ => return None,
    }
    Some(biases)
}
