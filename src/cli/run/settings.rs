//! The sampling parameters of a request that the user has set. What is not set is not sent, so that the
//! server's, or the model's, own defaults hold.
//!
//! Invariant: every parameter is in one table; its range is the server's to check.

use serde_json::{Map, Number, Value};

/// How the text of a value is read.
type Read = fn(&str) -> Result<Value, String>;

/// What can be set, by its name in the API.
const PARAMETERS: [(&str, Read); 6] = [
    ("temperature", number),
    ("top_p", number),
    ("top_k", whole_number),
    ("min_p", number),
    ("seed", whole_number),
    ("max_tokens", whole_number),
];

/// Parameters with their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings(Map<String, Value>);

impl Settings {
    /// Sets the parameter, if there is a value.
    pub fn insert(&mut self, name: &str, value: Option<impl Into<Value>>) {
        self.0.extend(value.map(|value| (name.to_string(), value.into())));
    }

    /// Sets the parameter to what `text` says; "default" takes the setting back. An unknown name or a text
    /// that is no such value is an error for the user.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
        let name = name.replace('-', "_");
        let Some((name, read)) = PARAMETERS.iter().find(|(known, _)| *known == name) else {
            return Err(format!("there is no parameter '{name}'; there are {}", names()));
        };
        match text {
            "default" => _ = self.0.remove(*name),
            text => self.insert(name, Some(read(text).map_err(|error| format!("{name}: {error}"))?)),
        }
        Ok(())
    }

    /// Whether the parameter is set.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Writes what is set into a request's body.
    pub fn add_to(&self, body: &mut Map<String, Value>) {
        body.extend(self.0.clone());
    }

    /// Every parameter with its value, for the user.
    pub fn describe(&self) -> String {
        let value = |name| self.0.get(name).map_or("default".to_string(), Value::to_string);
        PARAMETERS.map(|(name, _)| format!("{name} {}", value(name))).join(", ")
    }
}

/// The names of all parameters.
pub fn names() -> String {
    PARAMETERS.map(|(name, _)| name).join(", ")
}

/// Reads a number such as 0.7.
pub fn number(text: &str) -> Result<Value, String> {
    let number = text.parse().ok().and_then(Number::from_f64);
    number.map(Value::Number).ok_or_else(|| format!("'{text}' is no number"))
}

/// Reads a number such as 40 or -1.
pub fn whole_number(text: &str) -> Result<Value, String> {
    let signed = text.parse::<i64>().map(Value::from);
    signed
        .or_else(|_| text.parse::<u64>().map(Value::from))
        .map_err(|_| format!("'{text}' is no whole number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(settings: &Settings) -> Value {
        let mut body = Map::new();
        settings.add_to(&mut body);
        Value::Object(body)
    }

    #[test]
    fn what_is_set_is_sent_and_nothing_else() {
        let mut settings = Settings::default();
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
    fn a_wrong_setting_is_named_and_changes_nothing() {
        let mut settings = Settings::default();
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
        assert_eq!(settings, Settings::default());
    }
}
