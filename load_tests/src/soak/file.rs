//! Soak files in TOML: the server, the load, and the mix of requests. Unknown keys are errors.
//!
//! Invariant: a parsed file has enough rounds to compare its quarters, and at least one kind of request.

use std::{collections::BTreeMap, num::NonZeroU32, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{flat::SAMPLES_MIN, kind::Kind};

/// The built-in file.
pub const SHIPPED: &str = include_str!("../../scenarios/soak.toml");

/// A soak test.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoakFile {
    pub title: String,
    /// Description of what is tested.
    pub text: String,
    pub server: SoakServer,
    pub load: SoakLoad,
    pub flat: FlatLimits,
    /// Relative frequency of each kind of request.
    pub mix: BTreeMap<Kind, f64>,
}

/// The server to start.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoakServer {
    /// Model argument of `mainstem serve`; by default the built-in model.
    pub model: Option<String>,
    /// Additional arguments of `mainstem serve`.
    pub args: Vec<String>,
    /// Value of `--inject`.
    pub inject: String,
}

/// The traffic.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoakLoad {
    /// Time of all rounds together, without the waits between them.
    pub seconds: f64,
    pub rounds: u32,
    /// Number of clients, each of which sends one request after another.
    pub clients: NonZeroU32,
    pub seed: u64,
    /// Different requests of each kind.
    pub variants: NonZeroU32,
    /// Lengths of prompts, in words.
    pub short_words: u32,
    pub long_words: u32,
    /// Length of a prompt that no context has room for, in words.
    pub too_long_words: u32,
    /// Size of a body that exceeds the server's limit.
    pub huge_bytes: usize,
    /// Maximum output tokens of a request.
    pub max_tokens: NonZeroU32,
}

/// Differences of resources that are no leak.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlatLimits {
    /// Bytes of resident memory.
    pub rss_noise_bytes: u64,
}

impl SoakFile {
    /// Reads a file, or the built-in one if `path` is `None`.
    pub fn read(path: Option<&Path>) -> Result<SoakFile> {
        let Some(path) = path else { return SoakFile::parse(SHIPPED) };
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        SoakFile::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<SoakFile> {
        let file: SoakFile = toml::from_str(text)?;
        file.check()?;
        Ok(file)
    }

    /// Fails if the values make no sense.
    pub fn check(&self) -> Result<()> {
        let SoakLoad { rounds, seconds, .. } = self.load;
        ensure!(rounds as usize >= SAMPLES_MIN, "load.rounds is {rounds} but must be at least {SAMPLES_MIN}");
        ensure!(seconds > 0.0 && seconds.is_finite(), "load.seconds is {seconds} but must be above 0");
        ensure!(
            self.mix.values().all(|weight| *weight >= 0.0 && weight.is_finite())
                && self.mix.values().any(|weight| *weight > 0.0),
            "the weights of mix must not be negative, and one must be above 0"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(from: &str, to: &str) -> String {
        assert!(SHIPPED.contains(from));
        format!("{:#}", SoakFile::parse(&SHIPPED.replace(from, to)).expect_err(to))
    }

    #[test]
    fn the_shipped_file_has_every_kind() {
        let file = SoakFile::read(None).unwrap();
        assert_eq!(file.mix.len(), Kind::ALL.len());
        assert!(!file.server.inject.is_empty() && !file.text.is_empty());
    }

    /// A device gets a second step timeout before its thread is abandoned, which the test is to cover.
    #[test]
    fn the_shipped_hangs_outlast_two_step_timeouts() {
        let server = SoakFile::read(None).unwrap().server;
        let seconds = |text: &str| text.strip_suffix('s').and_then(|number| number.parse::<f64>().ok());
        let flag = server.args.iter().position(|arg| arg == "--step-timeout").unwrap();
        let timeout = seconds(&server.args[flag + 1]).unwrap();
        let hangs = server.inject.split(',').filter(|fault| fault.trim().starts_with("hang"));
        let times: Vec<_> = hangs.map(|hang| seconds(hang.split_once(':').unwrap().1).unwrap()).collect();
        assert!(!times.is_empty() && times.iter().all(|time| *time > 2.0 * timeout), "{times:?}");
    }

    #[test]
    fn files_that_make_no_sense_are_refused() {
        for (from, to, reason) in [
            ("rounds = 60", "rounds = 7", "load.rounds is 7 but must be at least 8"),
            ("seconds = 3600", "seconds = 0", "load.seconds is 0"),
            ("short = 12", "short = -1", "must not be negative"),
            ("short = 12", "brief = 12", "unknown variant `brief`"),
            ("clients = 12", "clients = 0", "nonzero"),
            ("seed = 1\n#", "speed = 1\n#", "unknown field `speed`"),
        ] {
            let error = error_of(from, to);
            assert!(error.contains(reason), "{to}: {error}");
        }
    }
}
