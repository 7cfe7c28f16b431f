//! Access to the fields of a JSON object. Each is taken out once, so that the remaining, unknown ones can be
//! reported.
//!
//! Invariant: no field is silently ignored. A known one that is not supported is rejected unless its value
//! has no effect, and unknown ones are listed in [`UnknownFields`].

use super::error::ApiError;
use crate::config::UnknownFieldsPolicy;
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex, PoisonError};

/// Fields of a JSON object that have not been read yet.
pub struct Fields {
    /// Path of the object within the body, followed by a dot; empty for the body itself.
    prefix: String,
    members: Map<String, Value>,
    /// Shared by all objects of a body.
    unknown: UnknownFields,
}

/// The unknown fields of a body, by their paths. Clones share one list.
#[derive(Clone, Debug, Default)]
pub struct UnknownFields(Arc<Mutex<UnknownPaths>>);

#[derive(Debug, Default)]
struct UnknownPaths {
    /// Paths of the first ones.
    listed: Vec<String>,
    count: usize,
}

/// Maximum number of unknown fields of a body that are listed by name.
const UNKNOWN_LISTED_MAX: usize = 16;

impl UnknownFields {
    /// Adds a field.
    fn add(&self, path: String) {
        let mut unknown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        unknown.count += 1;
        if unknown.listed.len() < UNKNOWN_LISTED_MAX {
            unknown.listed.push(path);
        }
    }

    /// Returns the ignored fields. With [`UnknownFieldsPolicy::Reject`], any unknown field is an error.
    pub fn apply(&self, policy: UnknownFieldsPolicy) -> Result<IgnoredFields, ApiError> {
        let unknown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (policy, unknown.listed.first()) {
            (UnknownFieldsPolicy::Reject, Some(path)) => Err(ApiError::unknown_parameter(path)),
            (UnknownFieldsPolicy::Reject, None) | (UnknownFieldsPolicy::Ignore, _) => Ok(IgnoredFields {
                names: unknown.listed.iter().map(|path| to_header_text(path)).collect::<Vec<_>>().join(", "),
                count: unknown.count,
            }),
        }
    }
}

/// The fields of a request that were ignored because they are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IgnoredFields {
    /// Paths of the first ones, separated by ", ". Printable ASCII, so that they can be a header's value.
    pub names: String,
    pub count: usize,
}

/// Replaces the characters of a path that must not be in a header.
fn to_header_text(path: &str) -> String {
    path.chars().map(|c| if c.is_ascii_graphic() && c != ',' { c } else { '?' }).collect()
}

/// The value of an unsupported parameter that has no effect and is therefore accepted.
pub enum NoOpValue {
    Number(f64),
    Bool(bool),
    /// A number that is not larger.
    AtMost(f64),
    /// One of these texts, or a list of only such texts.
    Texts(&'static [&'static str]),
    /// An empty string, list or object.
    Empty,
    /// No value except null.
    OnlyNull,
    /// Any value: the parameter is accepted and ignored.
    Any,
}

/// Known parameters that are not supported, each with the value that is accepted nevertheless.
pub type UnsupportedParams = &'static [(&'static str, NoOpValue)];

impl Fields {
    /// Parses a request body, which must be a JSON object.
    pub fn parse(body: &[u8]) -> Result<Fields, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            let message = error.to_string();
            ApiError::malformed(match message.strip_prefix("recursion limit exceeded") {
                Some(place) => {
                    format!("request body has lists and objects nested too deep (over 127){place}")
                }
                None => format!("request body is not valid JSON: {message}"),
            })
        })?;
        match value {
            Value::Object(members) => {
                Ok(Fields { prefix: String::new(), members, unknown: UnknownFields::default() })
            }
            _ => Err(ApiError::malformed("request body is not a JSON object")),
        }
    }

    /// Returns the fields of an object within this one. `path` is its path in the body.
    pub fn nested(&self, path: &str, members: Map<String, Value>) -> Fields {
        Fields { prefix: format!("{path}."), members, unknown: self.unknown.clone() }
    }

    /// Returns the unknown fields of the whole body, which are known once all fields have been read.
    pub fn unknown(&self) -> UnknownFields {
        self.unknown.clone()
    }

    /// Returns the full name of a field for messages.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns a field that has not been taken out.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.members.get(name)
    }

    /// Takes a field out. Null counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.members.remove(name).filter(|value| !value.is_null())
    }

    /// Takes out the fields with these names. Those that are null or absent are left out.
    pub fn take_all(&mut self, names: impl Iterator<Item = &'static str>) -> Vec<(&'static str, Value)> {
        names.filter_map(|name| Some((name, self.take(name)?))).collect()
    }

    /// Takes a field out and converts it with `read`. `expected` describes the valid values in the error
    /// message.
    pub fn take_with<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => {
                let path = self.path(name);
                let message = format!("'{path}' must be {expected}, not {}", describe(&value));
                Err(ApiError::invalid(path, message))
            }
        }
    }

    /// Takes out a boolean field.
    pub fn take_bool(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        Ok(self.take_with(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Takes out a string field.
    pub fn take_string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take_with(name, "a string", |value| value.as_str().map(str::to_string))
    }

    /// Takes out an integer field from `min` to `max`.
    pub fn take_integer(&mut self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let expected = match max == i64::from(u32::MAX) {
            true => format!("an integer of at least {min}"),
            false => format!("an integer from {min} to {max}"),
        };
        self.take_with(name, &expected, |value| {
            to_integer(value).filter(|number| (min..=max).contains(number))
        })
    }

    /// Takes out an object field.
    pub fn take_object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.take_with(name, "an object", |value| value.as_object().cloned())
    }

    /// Ends the reading of this object: the remaining fields are unknown. Those in `unsupported` are an
    /// error instead, unless they have their accepted values.
    pub fn finish(self, unsupported: &[UnsupportedParams]) -> Result<(), ApiError> {
        let known = |name: &str| unsupported.iter().copied().flatten().find(|(known, _)| *known == name);
        for (name, value) in self.members.iter().filter(|(_, value)| !value.is_null()) {
            let path = self.path(&shorten(name));
            match known(name) {
                Some((_, no_op)) if no_op.matches(value) => {}
                Some(_) => {
                    let message = format!("'{path}' is not supported yet");
                    return Err(ApiError::unsupported(path, message));
                }
                None => self.unknown.add(path),
            }
        }
        Ok(())
    }
}

impl NoOpValue {
    fn matches(&self, value: &Value) -> bool {
        match self {
            NoOpValue::Number(number) => value.as_f64() == Some(*number),
            NoOpValue::Bool(flag) => value.as_bool() == Some(*flag),
            NoOpValue::AtMost(number) => value.as_f64().is_some_and(|value| value <= *number),
            NoOpValue::Texts(texts) => {
                let is_listed = |value: &Value| value.as_str().is_some_and(|text| texts.contains(&text));
                value.as_array().map_or(is_listed(value), |list| list.iter().all(is_listed))
            }
            NoOpValue::Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
            NoOpValue::OnlyNull => false,
            NoOpValue::Any => true,
        }
    }
}

/// Describes a value for an error message.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
        Value::String(text) if text.chars().count() > SHOWN_CHARS => "a long string".to_string(),
        value => value.to_string(),
    }
}

/// Maximum number of characters of a client's string that an error message repeats.
const SHOWN_CHARS: usize = 40;

/// Truncates a client's string for an error message.
pub fn shorten(name: &str) -> String {
    match name.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_string(),
    }
}

/// Returns the integer value of a number, which may be written with a decimal point.
fn to_integer(value: &Value) -> Option<i64> {
    let rounded = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 2f64.powi(53));
    value.as_i64().or_else(|| rounded().map(|number| number as i64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unused_fields_are_reported_with_their_path() {
        let unserved: UnsupportedParams = &[("tools", NoOpValue::Empty), ("note", NoOpValue::Any)];
        let left = |members: Value| {
            let body = Fields::parse(b"{}").unwrap();
            let fields = body.nested("messages[1]", members.as_object().unwrap().clone());
            fields.finish(&[unserved]).map_err(|error| error.to_string())?;
            let reject = body.unknown().apply(UnknownFieldsPolicy::Reject);
            reject.map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(left(json!({"tools": [], "note": [1], "unknown": null})), Ok(()));
        let refused = left(json!({"tools": [1]})).unwrap_err();
        assert_eq!(refused, "'messages[1].tools' is not supported yet");
        assert_eq!(left(json!({"x": 0})).unwrap_err(), "unknown parameter 'messages[1].x'");
    }
}
