//! Sampling parameters set by the user. Parameters that are not set are not sent, so that the defaults of the
//! server or model apply.
//!
//! Invariant: a parameter is one of the table here or of the strategies. The server checks their ranges.

use super::constraint::{FORMS, TOOLS};
use crate::request::ParamList;
use serde_json::{Map, Number, Value};
use strsim::levenshtein;

/// Parser of a parameter's value.
type ParseValue = fn(&str) -> Result<Value, String>;

/// The parameters that are always listed, by their names in the API.
const PARAMETERS: [(&str, ParseValue); 6] = [
    ("temperature", number),
    ("top_p", number),
    ("top_k", whole_number),
    ("min_p", number),
    ("seed", whole_number),
    ("max_tokens", whole_number),
];

/// The parameters of a beam search, with their first names.
const BEAM_PARAMETERS: [(&str, &str); 5] = [
    ("use_beam_search", "use_beam_search"),
    (BEAM_WIDTH, BEAM_WIDTH),
    ("num_beams", BEAM_WIDTH),
    ("length_penalty", "length_penalty"),
    ("early_stopping", "early_stopping"),
];

const BEAM_WIDTH: &str = "beam_width";

/// Parameters with their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingSettings(Map<String, Value>);

impl SamplingSettings {
    /// Sets the parameter if `value` is `Some`.
    pub fn insert(&mut self, name: &str, value: Option<impl Into<Value>>) {
        self.0.extend(value.map(|value| (name.to_string(), value.into())));
    }

    /// Sets the parameter from text; "default" resets it. Fails with a message for an unknown name or an
    /// invalid value.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
        let name = name.replace('-', "_");
        if let Some((_, param, read)) = FORMS.iter().find(|(known, ..)| *known == name) {
            return self.set_with((&name, param), text, *read);
        }
        if let Some((_, param)) = BEAM_PARAMETERS.iter().find(|(known, _)| *known == name) {
            return self.set_with((&name, param), text, any_value);
        }
        let read = match PARAMETERS.iter().find(|(known, _)| *known == name) {
            Some((_, read)) => *read,
            None if ParamList::names().any(|known| known == name) => any_value,
            None => return Err(format!("there is no parameter '{name}'; did you mean {}?", similar(&name))),
        };
        self.set_with((&name, main_name(&name)), text, read)
    }

    /// Sets a parameter of the API, which the user called `name`.
    fn set_with(&mut self, (name, param): (&str, &str), text: &str, read: ParseValue) -> Result<(), String> {
        match text {
            "default" => _ = self.0.shift_remove(param),
            text => self.insert(param, Some(read(text).map_err(|error| format!("{name}: {error}"))?)),
        }
        Ok(())
    }

    /// Sets a parameter from text such as `min_p=0.1`, as [`Self::set`] does.
    pub fn set_pair(&mut self, pair: &str) -> Result<(), String> {
        match pair.split_once('=') {
            Some((name, value)) => self.set(name.trim(), value.trim()),
            None => Err(format!("'{pair}' is not of the form NAME=VALUE")),
        }
    }

    /// Whether the parameter is set.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns the names of the tools that the model may call.
    pub fn tool_names(&self) -> Vec<&str> {
        let tools = self.0.get(TOOLS).and_then(Value::as_array).into_iter().flatten();
        tools.filter_map(|tool| tool["function"]["name"].as_str()).collect()
    }

    /// Returns the number of beams of a beam search; 1 without one.
    pub fn beams(&self) -> u64 {
        self.0.get(BEAM_WIDTH).and_then(Value::as_u64).unwrap_or(1).max(1)
    }

    /// Adds the parameters that are set to a request's body.
    pub fn add_to(&self, body: &mut Map<String, Value>) {
        body.extend(self.0.clone());
    }

    /// Formats the parameters of the table and all others that are set, with their values.
    pub fn describe(&self) -> String {
        let value = |name| self.0.get(name).map_or("default".to_string(), Value::to_string);
        let of_table = PARAMETERS.map(|(name, _)| format!("{name} {}", value(name)));
        let is_other = |name: &str| PARAMETERS.iter().all(|(known, _)| *known != name);
        let others = self.0.iter().filter(|(name, _)| is_other(name));
        let others = others.map(|(name, value)| format!("{name} {value}"));
        of_table.into_iter().chain(others).collect::<Vec<_>>().join(", ")
    }
}

/// The names of the parameters that are always listed.
pub fn names() -> String {
    PARAMETERS.map(|(name, _)| name).join(", ")
}

/// Returns the first of a sampling parameter's names, so that another name of it replaces its value.
fn main_name(name: &str) -> &str {
    ParamList::main_name(name).unwrap_or(name)
}

/// Returns the names that are most similar to an unknown one.
fn similar(name: &str) -> String {
    const MOST: usize = 3;
    let forms = FORMS.iter().map(|(name, ..)| *name).chain(BEAM_PARAMETERS.map(|(name, _)| name));
    let mut names: Vec<&str> =
        PARAMETERS.iter().map(|(name, _)| *name).chain(ParamList::names()).chain(forms).collect();
    names.sort_by_key(|known| (levenshtein(name, known), *known));
    names.dedup();
    names.truncate(MOST);
    names.join(", ")
}

/// Parses JSON; other text is a string.
fn any_value(text: &str) -> Result<Value, String> {
    Ok(ParamList::parse_value(text))
}

/// Parses a number such as 0.7.
pub fn number(text: &str) -> Result<Value, String> {
    let number = text.parse().ok().and_then(Number::from_f64);
    number.map(Value::Number).ok_or_else(|| format!("'{text}' is not a number"))
}

/// Parses an integer such as 40 or -1.
pub fn whole_number(text: &str) -> Result<Value, String> {
    let signed = text.parse::<i64>().map(Value::from);
    signed
        .or_else(|_| text.parse::<u64>().map(Value::from))
        .map_err(|_| format!("'{text}' is not a whole number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(settings: &SamplingSettings) -> Value {
        let mut body = Map::new();
        settings.add_to(&mut body);
        Value::Object(body)
    }

    #[test]
    fn what_is_set_is_sent_and_nothing_else() {
        let mut settings = SamplingSettings::default();
        assert_eq!(body(&settings), json!({}));
        settings.set("temperature", "0.7").unwrap();
        settings.set("top-k", "-1").unwrap();
        settings.set("seed", "18446744073709551615").unwrap();
        assert_eq!(body(&settings), json!({"temperature": 0.7, "top_k": -1, "seed": u64::MAX}));
        settings.set("top_k", "default").unwrap();
        settings.set("seed", "default").unwrap();
        assert_eq!(body(&settings), json!({"temperature": 0.7}));
    }

    #[test]
    fn parameters_of_all_strategies_can_be_set() {
        let mut settings = SamplingSettings::default();
        for pair in ["mirostat = 2", "strategy=fsd", "strategy_params={\"k\": 4}", "xtc-probability=0.5"] {
            settings.set_pair(pair).unwrap();
        }
        let all =
            json!({ "mirostat": 2, "strategy": "fsd", "strategy_params": {"k": 4}, "xtc_probability": 0.5 });
        assert_eq!(body(&settings), all);
        let described = settings.describe();
        assert!(
            described.starts_with("temperature default, ") && described.contains(", mirostat 2, "),
            "{described}"
        );
        settings.set("mirostat", "default").unwrap();
        assert!(!settings.describe().contains("mirostat"));
        assert!(settings.set("repetition_penalti", "1").unwrap_err().contains("repetition_penalty"));
        assert!(settings.set_pair("top_p").unwrap_err().contains("NAME=VALUE"));
    }

    #[test]
    fn beam_searches_can_be_set() {
        let mut settings = SamplingSettings::default();
        assert_eq!(settings.beams(), 1);
        for pair in ["use_beam_search=true", "num-beams=3", "length_penalty=-0.5", "early_stopping=never"] {
            settings.set_pair(pair).unwrap();
        }
        let all = json!({
            "use_beam_search": true, "beam_width": 3, "length_penalty": -0.5, "early_stopping": "never"
        });
        assert_eq!((body(&settings), settings.beams()), (all, 3));
        settings.set("beam_width", "many").unwrap();
        assert_eq!(settings.beams(), 1);
        assert!(settings.set("beam_with", "4").unwrap_err().contains("beam_width"));
    }

    /// The names of a parameter are one setting: a request with two of them is refused.
    #[test]
    fn another_name_of_a_parameter_replaces_it() {
        let mut settings = SamplingSettings::default();
        settings.set("temp", "0.5").unwrap();
        settings.set("temperature", "0.7").unwrap();
        settings.set("repetition_penalty", "1.1").unwrap();
        settings.set("repeat_penalty", "1.2").unwrap();
        assert_eq!(body(&settings), json!({ "temperature": 0.7, "repetition_penalty": 1.2 }));
        assert!(settings.describe().contains("temperature 0.7"));
        settings.set("temp", "default").unwrap();
        assert_eq!(body(&settings), json!({ "repetition_penalty": 1.2 }));
    }

    #[test]
    fn forms_of_answers_are_texts_or_files() {
        let mut settings = SamplingSettings::default();
        settings.set("json-schema", "{\"type\": \"null\"}").unwrap();
        let schema = json!({ "name": "answer", "schema": { "type": "null" } });
        let format = json!({ "type": "json_schema", "json_schema": schema });
        assert_eq!(body(&settings), json!({ "response_format": format }));
        settings.set("json_schema", "default").unwrap();
        let folder = crate::testing::Scratch::new();
        let file = folder.write("answer.gbnf", b"root ::= \"a\"");
        settings.set("grammar", file.to_str().unwrap()).unwrap();
        assert_eq!(body(&settings), json!({ "grammar": "root ::= \"a\"" }));
        assert!(settings.set("grammar", "/no/such/file").unwrap_err().contains("cannot read /no/such/file"));
        assert!(settings.set("json_schema", "{").unwrap_err().contains("not valid JSON"));
        let error = settings.set("json-schema", "/no/such/file").unwrap_err();
        assert!(error.starts_with("json_schema: cannot read /no/such/file"), "{error}");
        for (text, error) in [
            ("[]", "a list of tools"),
            ("[{\"function\": {}}]", "[0].function.name"),
            ("/no/such/file", "tools: cannot read /no/such/file"),
        ] {
            assert!(settings.set("tools", text).unwrap_err().contains(error), "{text}");
        }
        assert!(settings.tool_names().is_empty());
        for (name, meant) in [("json_shema", "json_schema"), ("gramar", "grammar")] {
            assert!(settings.set(name, "x").unwrap_err().contains(meant), "{name}");
        }
    }

    #[test]
    fn a_wrong_setting_is_named_and_changes_nothing() {
        let mut settings = SamplingSettings::default();
        for (name, text, named) in [
            ("heat", "1", "heat"),
            ("temperature", "warm", "warm"),
            ("temperature", "nan", "nan"),
            ("top_k", "1.5", "1.5"),
            ("stop", "x", "stop"),
        ] {
            let error = settings.set(name, text).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
        assert_eq!(settings, SamplingSettings::default());
    }
}
