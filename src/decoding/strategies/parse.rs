//! From JSON to the checked value of a parameter.

use super::params::{Kind, Param, ParamError, Value, Vocabulary};
use serde_json::Value as Json;
use std::collections::BTreeSet;

/// Maximum number of words or texts of a list, each of which is tokenized.
const WORDS_MAX: usize = 1024;
/// Maximum number of texts of a list, for each of which the vocabulary is searched.
const SEARCHED_TEXTS_MAX: usize = 16;
/// Maximum number of bytes of all texts of a list together.
const TEXT_BYTES_MAX: usize = 16 << 10;
/// Maximum number of token ids of all sequences of a list together.
const SEQUENCE_TOKENS_MAX: usize = 16 << 10;
/// Largest absolute value of a bias; its negative forbids a token, as `false` does.
const BIAS_MAX: f64 = 100.0;

/// Returns the value of a parameter that the request spells `name`. Errors name it, the value and its bounds.
pub fn value(
    name: &str,
    param: &Param,
    json: &Json,
    vocabulary: &dyn Vocabulary,
) -> Result<Value, ParamError> {
    let refuse = |bounds: String| ParamError::new(name, format!("is {} but must be {bounds}", shown(json)));
    check_size(json, &param.kind, vocabulary).map_err(|problem| ParamError::new(name, problem))?;
    match param.kind {
        Kind::Float { bounds, .. } => {
            let number = json.as_f64().ok_or_else(|| refuse("a number".to_owned()))?;
            match bounds.contain(number) {
                true => Ok(Value::Float(number)),
                false if bounds.surround(number) && (number as f32).is_finite() => {
                    Err(refuse(format!("{bounds} as a 32-bit number")))
                }
                false => Err(refuse(bounds.to_string())),
            }
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
            // A search of the vocabulary takes up to a millisecond, so no text is searched twice.
            let texts: Option<BTreeSet<String>> =
                json.as_array().and_then(|texts| texts.iter().map(text).collect());
            let texts = texts.map(|texts| Value::Texts(texts.into_iter().collect()));
            texts.ok_or_else(|| refuse("a list of texts that are not empty".to_owned()))
        }
        Kind::Biases => match json {
            Json::Object(_) | Json::Array(_) => {
                let biases = biases(json, vocabulary).map_err(|problem| ParamError::new(name, problem))?;
                Ok(Value::Biases(biases))
            }
            _ => {
                Err(refuse("an object from token ids or texts to biases, or a list of such pairs".to_owned()))
            }
        },
    }
}

/// Checks the number of entries of a list, and their length. The error is the rest of a sentence about the
/// parameter. Work for a list within these limits takes some milliseconds.
fn check_size(json: &Json, kind: &Kind, vocabulary: &dyn Vocabulary) -> Result<(), String> {
    let most = match kind {
        Kind::Float { .. } | Kind::Integer { .. } | Kind::Choice(_) => return Ok(()),
        Kind::Tokens | Kind::Biases => vocabulary.size(),
        Kind::Sequences => WORDS_MAX,
        Kind::Texts(_) => SEARCHED_TEXTS_MAX,
    };
    let (mut entries, mut texts, mut bytes, mut tokens) = (0, 0, 0, 0);
    let mut count = |text: Option<&str>| {
        texts += usize::from(text.is_some());
        bytes += text.map_or(0, str::len);
    };
    match json {
        Json::Object(members) => {
            entries = members.len();
            members.keys().filter(|key| !is_number(key)).for_each(|key| count(Some(key)));
        }
        Json::Array(list) => {
            entries = list.len();
            for entry in list {
                let first = entry.as_array().and_then(|pair| pair.first());
                count(entry.as_str().or_else(|| first.and_then(Json::as_str)));
                tokens += entry.as_array().map_or(0, Vec::len);
            }
        }
        _ => {}
    }
    let tokens = if matches!(kind, Kind::Sequences) { tokens } else { 0 };
    let limits = [
        ("entries", entries, most),
        ("texts", texts, WORDS_MAX),
        ("bytes in its texts", bytes, TEXT_BYTES_MAX),
        ("token ids", tokens, SEQUENCE_TOKENS_MAX),
    ];
    match limits.iter().find(|(_, found, most)| found > most) {
        Some((what, found, most)) => Err(format!("has {found} {what}, but at most {most} are allowed")),
        None => Ok(()),
    }
}

/// Returns whether the key of an object stands for a token id rather than for a text.
fn is_number(key: &str) -> bool {
    let digits = key.strip_prefix(['-', '+']).unwrap_or(key);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
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

/// Returns biases, each token id once, in order. Those of the same token are added. The error is the rest of
/// a sentence about the parameter.
fn biases(json: &Json, vocabulary: &dyn Vocabulary) -> Result<Vec<(u32, f32)>, String> {
    let mut biases: Vec<(u32, f32)> = Vec::new();
    match json {
        Json::Object(entries) => {
            for (key, bias) in entries {
                // A number that is too large to be parsed is no token id either.
                let id = is_number(key).then(|| key.parse::<u32>().map_or(Json::Null, Json::from));
                add_bias(&mut biases, id.as_ref(), &Json::String(key.clone()), bias, vocabulary)?;
            }
        }
        _ => {
            for entry in json.as_array().into_iter().flatten() {
                let Some([key, bias]) = entry.as_array().map(Vec::as_slice) else {
                    return Err(format!("has {}, which is not a pair of a token and a bias", shown(entry)));
                };
                add_bias(&mut biases, Some(key).filter(|key| !key.is_string()), key, bias, vocabulary)?;
            }
        }
    }
    biases.sort_by_key(|&(id, _)| id);
    biases.dedup_by(|(id, bias), (kept, sum)| {
        let is_same = id == kept;
        *sum += if is_same { *bias } else { 0.0 };
        is_same
    });
    Ok(biases)
}

/// Adds the bias of a token `id`, or of the tokens of the text `key` if there is no id.
fn add_bias(
    biases: &mut Vec<(u32, f32)>,
    id: Option<&Json>,
    key: &Json,
    bias: &Json,
    vocabulary: &dyn Vocabulary,
) -> Result<(), String> {
    let value = match bias {
        Json::Bool(false) => f32::NEG_INFINITY,
        _ => match bias.as_f64().filter(|bias| bias.abs() <= BIAS_MAX) {
            Some(bias) if bias == -BIAS_MAX => f32::NEG_INFINITY,
            Some(bias) => bias as f32,
            None => {
                let (key, bias) = (shown(key), shown(bias));
                return Err(format!(
                    "has {bias} for {key}, but a bias must be false or a number from -{BIAS_MAX} to \
                     {BIAS_MAX}"
                ));
            }
        },
    };
    let ids = match (id, key) {
        (None, Json::String(text)) => vocabulary.encode(text),
        (id, key) => {
            let id = id.and_then(|id| token(id, vocabulary));
            vec![id.ok_or_else(|| {
                format!("has {}, which is not a token id below {}", shown(key), vocabulary.size())
            })?]
        }
    };
    if ids.is_empty() {
        return Err(format!("has {}, which has no tokens", shown(key)));
    }
    biases.extend(ids.into_iter().map(|id| (id, value)));
    Ok(())
}
