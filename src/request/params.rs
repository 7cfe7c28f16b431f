//! Sampling parameters by name, as requests, configurations and models' files give them.
//!
//! Invariant: this is plain data; [`SamplingPlan`] defines what it means.

use crate::decoding::SamplingPlan;
use crate::decoding::strategies::registry::request_params;
use crate::decoding::strategies::{AnyVocabulary, CheckedDefaults, ParamError};
use serde_json::Value;

/// Sampling parameters with their values, as in the body of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamList(pub Vec<(String, Value)>);

/// Default sampling parameters, where a request gives none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// From the configuration; they override those of the model.
    pub server: ParamList,
    /// From the model's files.
    pub model: ParamList,
}

impl ParamList {
    /// Returns the names of all sampling parameters, each followed by its other names.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SamplingPlan::param_names()
    }

    /// Returns the first name of the parameter that has this name; `None` if there is none.
    pub fn main_name(name: &str) -> Option<&'static str> {
        request_params().find(|param| param.is_named(name)).map(|param| param.name)
    }

    /// Returns the parameters by name.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Checks names, types and bounds, as far as no model needs to be known.
    pub fn check(&self) -> Result<(), ParamError> {
        CheckedDefaults::parse(self.pairs(), &AnyVocabulary).map(drop)
    }

    /// Parses the value of a parameter from text: JSON, or else a string.
    pub fn parse_value(text: &str) -> Value {
        serde_json::from_str(text).unwrap_or_else(|_| text.into())
    }

    /// Parses parameters such as `top_p=0.9,samplers=["top_k","top_p"]`. A value is JSON, or else a string.
    /// Commas within brackets and quotes belong to the value. The error is a message.
    pub fn parse_text(text: &str) -> Result<ParamList, String> {
        let mut list = ParamList::default();
        for entry in split_entries(text).filter(|entry| !entry.is_empty()) {
            let pair = entry.split_once('=').map(|(name, value)| (name.trim(), value.trim()));
            let Some((name, value)) = pair.filter(|(name, value)| !name.is_empty() && !value.is_empty())
            else {
                return Err(format!("expected parameters such as top_p=0.9,min_p=0.05, not \"{entry}\""));
            };
            list.0.push((name.to_owned(), ParamList::parse_value(value)));
        }
        Ok(list)
    }
}

/// Splits a text at its commas, except those within brackets and quotes.
fn split_entries(text: &str) -> impl Iterator<Item = &str> {
    let (mut depth, mut is_quoted, mut is_escaped) = (0i32, false, false);
    let entries = text.split(move |c| {
        match c {
            _ if std::mem::take(&mut is_escaped) => {}
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            '[' | '{' if !is_quoted => depth += 1,
            ']' | '}' if !is_quoted => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0 && !is_quoted
    });
    entries.map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_json_or_text_and_commas_within_them_are_kept() {
        let text = r#" top_p = 0.9,strategy=fsd,, samplers=["top_k","a,b\"]"],logit_bias={"5":false,"6":1},"#;
        let expected = [
            ("top_p", json!(0.9)),
            ("strategy", json!("fsd")),
            ("samplers", json!(["top_k", "a,b\"]"])),
            ("logit_bias", json!({"5": false, "6": 1})),
        ];
        let list = ParamList::parse_text(text).unwrap();
        assert!(list.pairs().eq(expected.iter().map(|(name, value)| (*name, value))), "{list:?}");
        assert_eq!(ParamList::parse_text(" ").unwrap(), ParamList::default());
        for wrong in ["top_p", "top_p=", "=1", "a=1,b"] {
            assert!(ParamList::parse_text(wrong).unwrap_err().contains("top_p=0.9"), "{wrong}");
        }
    }

    #[test]
    fn names_and_bounds_are_checked_without_a_model() {
        let check = |text: &str| ParamList::parse_text(text).unwrap().check().map_err(|error| error.message);
        let all = "top_p=0.9,logit_bias={\"99999\":1},bad_words=[\"x\"],thinking_token_budget=3,\
                   dry_multiplier=1,strategy=fsd,allowed_token_ids=[4000000]";
        assert_eq!(check(all), Ok(()));
        assert_eq!(check("top_p=2").unwrap_err(), "top_p is 2 but must be above 0 and at most 1");
        assert_eq!(check("top_q=2").unwrap_err(), "top_q is not a sampling parameter");
    }
}
