//! RoPE settings of a model's config.json, in the older (`rope_scaling`) and the newer (`rope_parameters`)
//! form.
//!
//! Invariant: an unknown setting is rejected by its key, because ignoring it would change every output.

use super::HubConfig;
use anyhow::Result;
use serde_json::{Value, json};

/// Base of the rotary frequencies if `rope_theta` is absent.
const ROPE_THETA: f64 = 10_000.0;

/// Keys of the section with the RoPE settings, older first.
const SECTIONS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// YaRN defaults (`beta_fast`, `beta_slow`): rotations within the original context above which frequencies
/// stay unchanged, and below which they are fully interpolated.
const YARN_BETAS: (f64, f64) = (32.0, 1.0);

/// Rotary position embeddings: pair i of a head of `d` elements rotates by position * theta^(-2i/d), with
/// scaled frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// Change of the frequencies that extends the context beyond the training context. Contexts are in tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// For sequences longer than `context`, a base that grows with their length (dynamic NTK-aware scaling).
    Dynamic {
        factor: f64,
        context: usize,
    },
    /// A base that is multiplied by alpha^(d / (d - 2)), for heads with d rotated dimensions, whatever the
    /// length (NTK-aware scaling).
    Stretched {
        alpha: f64,
    },
    /// Llama 3.1: frequencies of wavelength above `original_context / low_freq_factor` are divided by
    /// `factor`, those below `original_context / high_freq_factor` are unchanged, and those between are
    /// blended.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023): frequencies with more than `beta_fast` rotations within the original context
    /// are unchanged, those with fewer than `beta_slow` are divided by `factor`, and those between are
    /// blended.
    Yarn {
        factor: f64,
        original_context: usize,
        beta_fast: f64,
        beta_slow: f64,
        /// Multiplier of cosines and sines.
        attention_factor: f64,
        /// Multiplier of the scores of latent attention, from `mscale_all_dim`.
        score_factor: f64,
        /// Whether the blend begins and ends at whole pairs.
        truncate: bool,
    },
    /// LongRoPE (Ding et al. 2024): each pair's frequency is divided by its own factor, from `short` or
    /// `long` depending on the sequence length.
    LongRope {
        short: Vec<f64>,
        long: Vec<f64>,
        original_context: usize,
        /// Multipliers of cosines and sines: up to the original context, and beyond.
        attention_factors: [f64; 2],
    },
    /// Each pair's frequency divided by its own factor; one factor per pair.
    Factors(Vec<f64>),
}

/// Configuration keys that the RoPE settings come from, nested ones with dots; empty where the format's
/// default applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RopeKeys {
    pub theta: Vec<String>,
    pub scaling: Vec<String>,
}

impl RopeConfig {
    /// Reads a model's RoPE settings: `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds
    /// both.
    pub fn from_config(config: &HubConfig) -> Result<RopeConfig> {
        let outer_theta = config.opt_positive("rope_theta")?.unwrap_or(ROPE_THETA);
        let read = |key| {
            let Some(section) = config.section(key)? else { return Ok(None) };
            let theta = section.opt_positive("rope_theta")?.unwrap_or(outer_theta);
            anyhow::Ok(Some(RopeConfig { theta, scaling: RopeScaling::from_section(&section, config)? }))
        };
        let [old, new] = SECTIONS;
        match (read(old)?, read(new)?) {
            (None, None) => Ok(RopeConfig { theta: outer_theta, scaling: RopeScaling::None }),
            (Some(old), Some(new)) if old != new => {
                Err(config.key_error("rope_parameters", "it contradicts rope_scaling"))
            }
            (Some(rope), _) | (_, Some(rope)) => Ok(rope),
        }
    }

    /// Returns the keys that [`RopeConfig::from_config`] reads theta and scaling from.
    pub fn keys(config: &HubConfig) -> Result<RopeKeys> {
        let mut keys = RopeKeys::default();
        for name in SECTIONS {
            let Some(section) = config.section(name)? else { continue };
            keys.scaling.extend(config.source_keys(name));
            if section.get("rope_theta").is_some() {
                keys.theta.push(section.file_key("rope_theta"));
            }
        }
        if keys.theta.is_empty() && config.get("rope_theta").is_some() {
            keys.theta.push(config.file_key("rope_theta"));
        }
        Ok(keys)
    }
}

impl RopeScaling {
    /// Parses the scaling section `section` of `config`.
    pub fn from_section(section: &HubConfig, config: &HubConfig) -> Result<RopeScaling> {
        check_known_keys(section)?;
        let key = if section.get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = section.opt_str(key)?.unwrap_or("default");
        if let Some(factors) = section.opt_positive_list("factors")? {
            return match kind {
                "default" => Ok(RopeScaling::Factors(factors)),
                _ => Err(section
                    .key_error("factors", format_args!("they cannot be combined with scaling '{kind}'"))),
            };
        }
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: section.required_positive("factor")? }),
            "dynamic" if section.get("alpha").is_some() => {
                Ok(RopeScaling::Stretched { alpha: section.required_positive("alpha")? })
            }
            "dynamic" => {
                let context = positive_context(config, "max_position_embeddings")?;
                Ok(RopeScaling::Dynamic { factor: section.required_positive("factor")?, context })
            }
            "llama3" => RopeScaling::llama3(section),
            "yarn" => RopeScaling::yarn(section, config),
            "longrope" | "su" => RopeScaling::long_rope(section, config),
            other => {
                let known = "default, linear, dynamic, llama3, yarn, longrope";
                Err(section.key_error(key, format_args!("'{other}' is not supported (supported: {known})")))
            }
        }
    }

    fn llama3(section: &HubConfig) -> Result<RopeScaling> {
        let low_freq_factor = section.required_positive("low_freq_factor")?;
        let high_freq_factor = section.required_positive("high_freq_factor")?;
        if high_freq_factor < low_freq_factor {
            return Err(section.key_error("high_freq_factor", "it must not be less than low_freq_factor"));
        }
        let original_context = positive_context(section, "original_max_position_embeddings")?;
        let factor = section.required_positive("factor")?;
        Ok(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context })
    }

    fn yarn(section: &HubConfig, config: &HubConfig) -> Result<RopeScaling> {
        let original_context = original_context(section, config)?;
        let factor = extension_factor(section, config, original_context)?;
        let given = section.opt_positive("attention_factor")?;
        let (scale, scale_all) = (section.opt_positive("mscale")?, section.opt_positive("mscale_all_dim")?);
        let scaled = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let attention_factor = given.unwrap_or_else(|| match (scale, scale_all) {
            (Some(scale), Some(all)) => scaled(scale) / scaled(all),
            _ => scaled(1.0),
        });
        let beta_fast = section.opt_positive("beta_fast")?.unwrap_or(YARN_BETAS.0);
        let beta_slow = section.opt_positive("beta_slow")?.unwrap_or(YARN_BETAS.1);
        let truncate = section.opt_bool("truncate")?.unwrap_or(true);
        let score_factor = scale_all.map_or(1.0, |all| scaled(all).powi(2));
        Ok(RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
            score_factor,
            truncate,
        })
    }

    fn long_rope(section: &HubConfig, config: &HubConfig) -> Result<RopeScaling> {
        let original_context = original_context(section, config)?;
        let factor = extension_factor(section, config, original_context)?;
        let by_length = || match factor <= 1.0 || original_context == 1 {
            true => 1.0,
            false => (1.0 + factor.ln() / (original_context as f64).ln()).sqrt(),
        };
        let attention_factor = section.opt_positive("attention_factor")?.unwrap_or_else(by_length);
        let [short, long] = ["short_mscale", "long_mscale"].map(|key| section.opt_positive(key));
        let attention_factors = [short?, long?].map(|factor| factor.unwrap_or(attention_factor));
        let [short, long] = ["short_factor", "long_factor"].map(|key| {
            let missing = || section.key_error(key, "it is missing");
            section.opt_positive_list(key)?.ok_or_else(missing)
        });
        Ok(RopeScaling::LongRope { short: short?, long: long?, original_context, attention_factors })
    }

    /// Returns key and length of every list with one factor per pair.
    pub fn per_pair_factors(&self) -> Vec<(&'static str, usize)> {
        match self {
            RopeScaling::LongRope { short, long, .. } => {
                vec![("short_factor", short.len()), ("long_factor", long.len())]
            }
            RopeScaling::Factors(factors) => vec![("factors", factors.len())],
            _ => Vec::new(),
        }
    }

    /// Returns the scaling as JSON, for reports.
    pub fn to_json(&self) -> Value {
        match self {
            RopeScaling::None => json!({"kind": "none"}),
            RopeScaling::Linear { factor } => json!({"kind": "linear", "factor": factor}),
            RopeScaling::Dynamic { factor, context } => {
                json!({"kind": "dynamic", "factor": factor, "context": context})
            }
            RopeScaling::Stretched { alpha } => json!({"kind": "stretched", "alpha": alpha}),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
                "kind": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_context": original_context,
            }),
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
                score_factor,
                truncate,
            } => json!({
                "kind": "yarn",
                "factor": factor,
                "original_context": original_context,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "score_factor": score_factor,
                "truncate": truncate,
            }),
            RopeScaling::LongRope { short, long, original_context, attention_factors } => json!({
                "kind": "longrope",
                "pairs": short.len(),
                "largest_short": largest(short),
                "largest_long": largest(long),
                "original_context": original_context,
                "attention_factors": attention_factors,
            }),
            RopeScaling::Factors(factors) => {
                json!({"kind": "factors", "pairs": factors.len(), "largest": largest(factors)})
            }
        }
    }
}

fn largest(factors: &[f64]) -> f64 {
    factors.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn check_known_keys(section: &HubConfig) -> Result<()> {
    const KNOWN: [&str; 22] = [
        "alpha",
        "finetuned",
        "type",
        "rope_type",
        "rope_theta",
        "factor",
        "factors",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "max_position_embeddings",
    ];
    match section.keys().find(|key| !KNOWN.contains(key)) {
        Some(unknown) => Err(section.key_error(unknown, "this RoPE setting is not supported")),
        None => Ok(()),
    }
}

/// Returns the training context: from the scaling section, or else from the model's config.
fn original_context(section: &HubConfig, config: &HubConfig) -> Result<usize> {
    const KEY: &str = "original_max_position_embeddings";
    match [section, config].into_iter().find(|settings| settings.get(KEY).is_some()) {
        Some(settings) => positive_context(settings, KEY),
        None => positive_context(config, "max_position_embeddings"),
    }
}

/// Returns the context extension factor: as given, or else the model's context divided by the training
/// context.
fn extension_factor(section: &HubConfig, config: &HubConfig, original_context: usize) -> Result<f64> {
    match section.opt_positive("factor")? {
        Some(factor) => Ok(factor),
        None => Ok(positive_context(config, "max_position_embeddings")? as f64 / original_context as f64),
    }
}

fn positive_context(settings: &HubConfig, key: &str) -> Result<usize> {
    match settings.usize(key)? {
        0 => Err(settings.key_error(key, "it must be greater than 0")),
        context => Ok(context),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    const CONFIG: &str = "config.json";

    fn config(text: &str) -> HubConfig {
        let folder = Scratch::new();
        folder.write(CONFIG, text.as_bytes());
        HubConfig::from_folder(&folder.folder()).unwrap()
    }

    #[test]
    fn rotary_settings_are_read_in_both_spellings() {
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let numbers = concat!(
            r#""factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"#,
            r#""original_max_position_embeddings":8192"#
        );
        let old = format!(r#"{{"rope_theta":5e5,"rope_scaling":{{"rope_type":"llama3",{numbers}}}}}"#);
        let new =
            format!(r#"{{"rope_parameters":{{"rope_type":"llama3","rope_theta":500000.0,{numbers}}}}}"#);
        let both = format!("{},{}", old.trim_end_matches('}').to_owned() + "}", &new[1..]);
        let linear = RopeScaling::Linear { factor: 2.0 };
        let cases = [
            ("{}", ROPE_THETA, RopeScaling::None),
            (r#"{"rope_theta":1000000,"rope_scaling":null}"#, 1e6, RopeScaling::None),
            (r#"{"rope_scaling":{"type":"linear","factor":2}}"#, ROPE_THETA, linear.clone()),
            (r#"{"rope_parameters":{"rope_type":"linear","factor":2.0,"rope_theta":7.0}}"#, 7.0, linear),
            (r#"{"rope_theta":9,"rope_parameters":{"rope_type":"default"}}"#, 9.0, RopeScaling::None),
            (&old, 5e5, llama3.clone()),
            (&new, 5e5, llama3.clone()),
            (&both, 5e5, llama3),
            (
                r#"{"rope_parameters":{"factors":[1.0,2.5]}}"#,
                ROPE_THETA,
                RopeScaling::Factors(vec![1.0, 2.5]),
            ),
        ];
        for (text, theta, scaling) in cases {
            assert_eq!(
                RopeConfig::from_config(&config(text)).unwrap(),
                RopeConfig { theta, scaling },
                "{text}"
            );
        }
    }

    #[test]
    fn rotary_settings_that_are_unknown_or_cannot_be_are_refused_by_key() {
        let cases = [
            (
                r#"{"rope_scaling":{"type":"static","factor":2}}"#,
                "'rope_scaling.type': 'static' is not supported",
            ),
            (r#"{"rope_scaling":{"type":"dynamic","factor":2}}"#, "'max_position_embeddings': it is missing"),
            (
                r#"{"max_position_embeddings":8,"rope_scaling":{"type":"longrope","short_factor":[1]}}"#,
                "'rope_scaling.long_factor': it is missing",
            ),
            (
                r#"{"max_position_embeddings":8,"rope_parameters":{"rope_type":"yarn","beta_fast":-1}}"#,
                "'rope_parameters.beta_fast': -1 is not a positive number",
            ),
            (r#"{"rope_parameters":{"full_attention":{}}}"#, "'rope_parameters.full_attention'"),
            (r#"{"rope_scaling":{"type":"linear"}}"#, "'rope_scaling.factor': it is missing"),
            (r#"{"rope_scaling":{"type":"linear","factor":0}}"#, "'rope_scaling.factor': 0 is not"),
            (
                r#"{"rope_scaling":{"rope_type":"llama3","factor":8}}"#,
                "'rope_scaling.low_freq_factor': it is missing",
            ),
            (r#"{"rope_parameters":{"factors":[1,0]}}"#, "'rope_parameters.factors': [1,0] is not a list of"),
            (
                r#"{"rope_parameters":{"factors":[1],"type":"linear","factor":2}}"#,
                "'rope_parameters.factors': they cannot be combined with scaling 'linear'",
            ),
            (r#"{"rope_theta":0}"#, "'rope_theta': 0 is not a positive number"),
            (r#"{"rope_scaling":"linear"}"#, "'rope_scaling': \"linear\" is not an object"),
            (
                concat!(
                    r#"{"rope_scaling":{"type":"linear","factor":2},"#,
                    r#""rope_parameters":{"type":"linear","factor":4}}"#
                ),
                "'rope_parameters': it contradicts rope_scaling",
            ),
            (
                r#"{"rope_scaling":{"type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":3}}"#,
                "'rope_scaling.high_freq_factor': it must not be less than",
            ),
        ];
        for (text, reason) in cases {
            let error = format!("{:#}", RopeConfig::from_config(&config(text)).unwrap_err());
            assert!(error.contains(reason) && error.contains(CONFIG), "{error}\nexpected: {reason}");
        }
    }
}
