//! API keys and the settings of their clients: the lines of the key file.
//!
//! Invariant: an error message has the number of the line and nothing of what is written there, because that
//! may be a key.

use super::layers::ConfigSource;
use crate::request::client::{Class, ClientSettings, WEIGHT_MAX};
use std::fmt;
use std::path::{Path, PathBuf};

/// Maximum length of a client's name.
const NAME_CHARS_MAX: usize = 64;

/// Names of the settings of a key.
const NAMES: &str = "name, class, weight, priority, max_sequences, tokens_per_minute and requests_per_minute";

/// API keys, each non-empty printable ASCII. The `Debug` form shows only their number.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKeys(pub Vec<String>);

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// An accepted API key with its client. The `Debug` form does not show the key.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    pub key: String,
    /// Name of the client for the log.
    pub name: Option<String>,
    pub settings: ClientSettings,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKey({:?}, {:?})", self.name, self.settings)
    }
}

/// A file of API keys, one per line. It is opened only where keys are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    pub path: PathBuf,
    /// Source of the path.
    pub(super) origin: ConfigSource,
}

/// The key in packaging/environment.example.
const EXAMPLE_KEY: &str = "change-me";

/// Checks an API key: it must be non-empty printable ASCII without spaces, so that an HTTP header can carry
/// it, and not that of the example.
pub(super) fn api_key(key: &str) -> Result<(), String> {
    if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("an API key must be printable ASCII without spaces, and not empty".to_string());
    }
    if key == EXAMPLE_KEY {
        return Err(format!(
            "'{EXAMPLE_KEY}' is the key of the example, which everyone knows; choose another"
        ));
    }
    Ok(())
}

/// Reads the API keys of a file, one per line, each followed by the settings in which its client differs from
/// `defaults`; lines that start with `#` are comments. A file without keys is an error, because an empty list
/// of keys would admit every client.
pub(super) fn read_api_key_file(file: &Path, defaults: ClientSettings) -> Result<Vec<ApiKey>, String> {
    let text = std::fs::read_to_string(file).map_err(|e| e.to_string())?;
    let mut keys = Vec::new();
    for (index, line) in text.lines().map(str::trim).enumerate() {
        if !line.is_empty() && !line.starts_with('#') {
            keys.push(parse_line(line, defaults).map_err(|reason| format!("line {}: {reason}", index + 1))?);
        }
    }
    if keys.is_empty() { Err("the file contains no API key".to_string()) } else { Ok(keys) }
}

/// Parses a key and its settings, such as `KEY name=alice class=batch weight=2`.
fn parse_line(line: &str, defaults: ClientSettings) -> Result<ApiKey, String> {
    let mut words = line.split_ascii_whitespace();
    let key = words.next().unwrap_or_default();
    api_key(key)?;
    let mut parsed = ApiKey { key: key.to_string(), name: None, settings: defaults };
    let mut seen = Vec::new();
    for word in words {
        let setting = word
            .split_once('=')
            .ok_or_else(|| format!("after the key, settings must be name=value, with the names {NAMES}"));
        let (name, value) = setting?;
        if seen.contains(&name) {
            return Err("a setting is given twice".to_string());
        }
        seen.push(name);
        parsed.set(name, value)?;
    }
    Ok(parsed)
}

impl ApiKey {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let settings = &mut self.settings;
        match name {
            "name" if !value.is_empty() && value.len() <= NAME_CHARS_MAX && value.is_ascii() => {
                self.name = Some(value.to_string());
            }
            "name" => return Err(format!("name must have 1 to {NAME_CHARS_MAX} ASCII characters")),
            "class" => {
                let class = Class::ALL.into_iter().find(|class| class.name() == value);
                settings.class = class.ok_or("class must be interactive or batch")?;
            }
            "weight" => {
                let weight = value.parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight));
                settings.weight = weight.ok_or_else(|| format!("weight must be from 1 to {WEIGHT_MAX}"))?;
            }
            "priority" => {
                settings.may_prioritize = match value {
                    "yes" => true,
                    "no" => false,
                    _ => return Err("priority must be yes or no".to_string()),
                };
            }
            "max_sequences" => settings.max_sequences = limit(name, value)?.map(|limit| limit as usize),
            "tokens_per_minute" => settings.tokens_per_minute = limit(name, value)?,
            "requests_per_minute" => settings.requests_per_minute = limit(name, value)?,
            _ => return Err(format!("unknown setting; there are {NAMES}")),
        }
        Ok(())
    }
}

/// Parses a limit; 0 is none.
fn limit(name: &str, value: &str) -> Result<Option<u64>, String> {
    let limit =
        value.parse::<u32>().map_err(|_| format!("{name} must be a whole number from 0 to {}", u32::MAX))?;
    Ok((limit > 0).then_some(limit.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_key_and_its_settings() {
        let defaults = ClientSettings { tokens_per_minute: Some(7), ..ClientSettings::default() };
        let plain = parse_line("secret", defaults).unwrap();
        assert_eq!(plain, ApiKey { key: "secret".into(), name: None, settings: defaults });
        let line = "secret#1= name=alice class=batch\tweight=2 max_sequences=8 tokens_per_minute=0 \
                    requests_per_minute=120 priority=yes";
        let settings = ClientSettings {
            class: Class::Batch,
            weight: 2,
            may_prioritize: true,
            max_sequences: Some(8),
            tokens_per_minute: None,
            requests_per_minute: Some(120),
        };
        let expected = ApiKey { key: "secret#1=".into(), name: Some("alice".into()), settings };
        assert_eq!(parse_line(line, defaults).unwrap(), expected);
    }

    /// The systemd example would otherwise admit everyone who has read it.
    #[test]
    fn the_key_of_the_example_is_refused() {
        let example = include_str!("../../packaging/environment.example");
        let key = example.lines().find_map(|line| line.strip_prefix("MAINSTEM_SERVER_API_KEYS=")).unwrap();
        assert!(api_key(key).unwrap_err().contains("choose another"));
    }

    #[test]
    fn wrong_settings_are_reported_without_what_was_written() {
        for (settings, part) in [
            ("Qx", "must be name=value"),
            ("# Qx", "must be name=value"),
            ("Qx=1", "unknown setting; there are name,"),
            ("name=", "name must have 1 to 64"),
            ("class=Qx", "class must be interactive or batch"),
            ("weight=0", "weight must be from 1 to 1000"),
            ("weight=Qx", "weight must be from 1 to 1000"),
            ("priority=Qx", "priority must be yes or no"),
            ("max_sequences=-1", "max_sequences must be a whole number"),
            ("tokens_per_minute=1e6", "tokens_per_minute must be a whole number"),
            ("requests_per_minute=Qx", "requests_per_minute must be a whole number"),
            ("weight=1 weight=1", "given twice"),
        ] {
            let error = parse_line(&format!("secret {settings}"), ClientSettings::default()).unwrap_err();
            assert!(error.contains(part), "{settings}: {error}");
            assert!(!error.contains("secret") && !error.contains("Qx"), "{settings}: {error}");
        }
    }
}
