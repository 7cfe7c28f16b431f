//! Policy files, which `mainstem plan` writes: settings of some keys, the model that they were planned for,
//! and the speed that was predicted.
//!
//! Invariant: a policy sets only keys of [`POLICY_KEYS`].

use serde::{Deserialize, Serialize};
use std::fmt::Write;
use toml::Value;

/// The section of a policy file that is no section of the configuration.
pub const POLICY_SECTION: &str = "policy";

/// Version of the files.
pub const POLICY_VERSION: u32 = 1;

/// The keys that a policy may set.
pub const POLICY_KEYS: [&str; 10] = [
    "model.weights",
    "scheduler.slots",
    "scheduler.token_budget",
    "scheduler.batch_rows",
    "kv.type",
    "kv.size",
    "tiers.device",
    "tiers.host",
    "tiers.kv",
    "tiers.host_kv",
];

/// A policy: what its file says apart from the settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementPolicy {
    pub version: u32,
    /// Name of the model.
    pub model: String,
    /// Number of the model's parameters.
    pub parameters: u64,
    pub workload: PolicyWorkload,
    pub predicted: PolicyPrediction,
}

/// The requests that a policy was planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyWorkload {
    pub requests: usize,
    /// Tokens per request.
    pub prompt: usize,
    pub output: usize,
}

/// The predictions for these requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyPrediction {
    /// Tokens per second in steps of prompts only, and in steps that decode all sequences.
    pub prefill_tokens_per_second: f64,
    pub decode_tokens_per_second: f64,
    /// Seconds of all requests, and of one among others.
    pub job_seconds: f64,
    pub request_seconds: f64,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

impl PlacementPolicy {
    /// Returns the text of a policy file with these settings.
    pub fn to_toml(&self, settings: &[(&'static str, Value)]) -> String {
        let mut text =
            "# A policy of `mainstem plan`, for --policy-file; docs/plan.md describes it.\n".to_owned();
        let mut table = toml::Table::new();
        let policy = Value::try_from(self).expect("a policy is plain data; anything else is a bug");
        table.insert(POLICY_SECTION.to_owned(), policy);
        for (key, value) in settings {
            let (section, name) = key.split_once('.').expect("a key has a section; anything else is a bug");
            let section = table.entry(section).or_insert_with(|| Value::Table(toml::Table::new()));
            if let Value::Table(section) = section {
                section.insert(name.to_owned(), value.clone());
            }
        }
        let _ = write!(text, "{table}");
        text
    }

    /// Parses the section of a policy file, given its keys without the section's name.
    pub(super) fn parse(keys: toml::Table) -> Result<PlacementPolicy, String> {
        let version = keys.get("version").and_then(Value::as_integer);
        if let Some(other) = version.filter(|version| *version != i64::from(POLICY_VERSION)) {
            return Err(format!("policy.version is {other}, but this program reads {POLICY_VERSION}"));
        }
        Value::Table(keys).try_into().map_err(|error: toml::de::Error| error.message().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::super::layers::LayeredSettings;
    use super::super::{Config, HostTier, KvSize, Overrides};
    use super::*;
    use crate::testing::Scratch;
    use std::path::Path;

    fn policy() -> PlacementPolicy {
        PlacementPolicy {
            version: POLICY_VERSION,
            model: "some model".to_owned(),
            parameters: 1_100_048_384,
            workload: PolicyWorkload { requests: 256, prompt: 64, output: 65 },
            predicted: PolicyPrediction {
                prefill_tokens_per_second: 99.5,
                decode_tokens_per_second: 1.0 / 3.0,
                job_seconds: 1e4,
                request_seconds: 0.0,
                memory_bytes: 1 << 40,
            },
        }
    }

    fn settings() -> Vec<(&'static str, Value)> {
        vec![
            ("scheduler.slots", 64.into()),
            ("scheduler.token_budget", 1024.into()),
            ("kv.size", "8192 tokens".into()),
            ("tiers.host", 123_456_789.into()),
        ]
    }

    fn error_of(text: &str) -> String {
        LayeredSettings::new().add_policy(Path::new("p.toml"), text).unwrap_err().to_string()
    }

    /// A flag overrides the policy, and the policy a configuration file.
    #[test]
    fn a_policy_is_read_as_it_was_written() {
        let folder = Scratch::new();
        let [file, other] = ["policy.toml", "config.toml"].map(|name| folder.path().join(name));
        std::fs::write(&file, policy().to_toml(&settings())).unwrap();
        std::fs::write(&other, "[scheduler]\nslots = 5\nmax_waiting = 7\n[kv]\nsize = \"64 tokens\"")
            .unwrap();
        let mut flags = Overrides::default();
        flags.set("tiers.policy_file", Some(file.display().to_string()));
        flags.set("scheduler.token_budget", Some(600));
        let config = Config::load(Some(&other), flags).unwrap();
        assert_eq!(config.tiers.policy, Some(policy()));
        assert_eq!((config.scheduler.slots, config.scheduler.token_budget), (64, 600));
        assert_eq!((config.scheduler.max_waiting, config.kv.size), (7, KvSize::Tokens(8192)));
        assert_eq!(config.tiers.host, HostTier::Bytes(123_456_789));
    }

    #[test]
    fn what_is_no_policy_is_refused_with_its_place() {
        let valid = policy().to_toml(&settings());
        for (text, part) in [
            (valid.replace("[policy]", "[polcy]"), "there is no section 'polcy'"),
            (
                "[scheduler]\nslots = 3".to_owned(),
                "p.toml: this is no policy file: it has no section [policy]",
            ),
            (valid.replace("version = 1", "version = 2"), "policy.version is 2, but this program reads 1"),
            (valid.replace("parameters = 1100048384\n", ""), "missing field `parameters`"),
            (valid.clone() + "\n[server]\nport = 1", "a policy cannot set server.port"),
            (valid.replace("slots = 64", "slots = "), "p.toml:"),
        ] {
            let error = error_of(&text);
            assert!(error.starts_with("p.toml") && error.contains(part), "{text}: {error}");
        }
        let mut flags = Overrides::default();
        flags.set("tiers.policy_file", Some("/no/such/policy.toml"));
        let error = Config::load(None, flags).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/policy.toml: "), "{error}");
    }
}
