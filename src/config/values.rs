//! Value parsers: each converts a TOML value to the type of its consumer, or returns a message about what was
//! expected.
//!
//! Invariant: an error message about a secret never contains it.

use super::sections::{
    HostTier, KernelCache, KvSize, LaneCount, PAGE_UNIT, TierName, TierPattern, TraceEndpoint,
};
use crate::request::ParamList;
use mainstem_kernels::Fraction;
use regex::Regex;
use std::path::PathBuf;
use std::time::Duration;
use toml::Value;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

pub(super) fn string(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_string).ok_or_else(|| "expected a string".to_string())
}

pub(super) fn boolean(value: &Value) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| "expected true or false".to_string())
}

pub(super) fn non_empty_string(value: &Value) -> Result<String, String> {
    string(value).and_then(|s| if s.is_empty() { Err("must not be empty".to_string()) } else { Ok(s) })
}

/// Parses the path of a file or folder; "" is `None`.
pub(super) fn path(value: &Value) -> Result<Option<PathBuf>, String> {
    string(value).map(|path| (!path.is_empty()).then(|| path.into()))
}

/// Parses the folder of compiled kernels; "" is the usual one.
pub(super) fn kernel_cache(value: &Value) -> Result<KernelCache, String> {
    Ok(match string(value)?.as_str() {
        "" => KernelCache::Usual,
        "off" => KernelCache::Off,
        folder => KernelCache::Folder(folder.into()),
    })
}

/// Parses a list of strings, each of which `check` must accept.
pub(super) fn strings(value: &Value, check: fn(&str) -> Result<(), String>) -> Result<Vec<String>, String> {
    let expected = || "expected a list of strings".to_string();
    let mut texts = Vec::new();
    for item in value.as_array().ok_or_else(expected)? {
        let text = item.as_str().ok_or_else(expected)?;
        check(text)?;
        texts.push(text.to_string());
    }
    Ok(texts)
}

/// Checks a name of the model.
pub(super) fn model_name(name: &str) -> Result<(), String> {
    if name.is_empty() { Err("a name must not be empty".to_string()) } else { Ok(()) }
}

/// Parses a list of origins as browsers send them, or "*" alone.
pub(super) fn origins(value: &Value) -> Result<Vec<String>, String> {
    let origins = strings(value, origin)?;
    if origins.len() > 1 && origins.iter().any(|origin| origin == "*") {
        return Err("\"*\" allows every origin and must be the only entry".to_string());
    }
    Ok(origins)
}

/// Parses a list of host names, or "*" alone.
pub(super) fn hosts(value: &Value) -> Result<Vec<String>, String> {
    let hosts = strings(value, host)?;
    if hosts.len() > 1 && hosts.iter().any(|host| host == "*") {
        return Err("\"*\" allows every host and must be the only entry".to_string());
    }
    Ok(hosts)
}

fn host(host: &str) -> Result<(), String> {
    let name = host.strip_prefix("*.").unwrap_or(host);
    let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    if host == "*" || !name.is_empty() && name.chars().all(is_name) {
        return Ok(());
    }
    Err("a host must be \"*\" or a name without port, like \"llm.example.com\" or \"*.example.com\""
        .to_string())
}

fn origin(origin: &str) -> Result<(), String> {
    let host = origin.split_once("://").filter(|(scheme, _)| !scheme.is_empty()).map(|(_, host)| host);
    let is_host = |host: &str| {
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && !b"/*?#@,".contains(&byte))
    };
    if origin == "*" || host.is_some_and(is_host) {
        return Ok(());
    }
    Err("an origin must be \"*\" or like \"https://example.com\" or \"http://localhost:3000\"".to_string())
}

/// Parses an HTTP or HTTPS URL; "" is `None`.
pub(super) fn url(value: &Value) -> Result<Option<String>, String> {
    let url = string(value)?;
    let host = url.strip_prefix("https://").or(url.strip_prefix("http://"));
    match host.map(str::is_empty) {
        None if url.is_empty() => Ok(None),
        Some(false) => Ok(Some(url)),
        _ => Err("must begin with https:// or http://".to_string()),
    }
}

/// Parses the address that traces are sent to; "" is `None`.
pub(super) fn trace_endpoint(value: &Value) -> Result<Option<TraceEndpoint>, String> {
    match string(value)?.as_str() {
        "env" => Ok(Some(TraceEndpoint::Environment)),
        _ => {
            Ok(url(value).map_err(|reason| format!("must be \"env\", or {reason}"))?.map(TraceEndpoint::Url))
        }
    }
}

pub(super) fn integer(value: &Value, min: i64, max: i64) -> Result<usize, String> {
    let number = value.as_integer().ok_or("expected a whole number")?;
    if !(min..=max).contains(&number) {
        return Err(format!("must be from {min} to {max}"));
    }
    Ok(number as usize)
}

/// Looks a word up among `words`. An error lists them all.
pub(super) fn one_of<T: Copy>(value: &Value, words: &[(&str, T)]) -> Result<T, String> {
    let hit = value.as_str().and_then(|word| words.iter().find(|(name, _)| *name == word));
    hit.map(|(_, meaning)| *meaning).ok_or_else(|| {
        let names: Vec<_> = words.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        format!("must be one of {}", names.join(", "))
    })
}

/// Splits a number from the unit that follows it.
fn number_and_unit(text: &str) -> Result<(f64, &str), String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text[..end].parse().map_err(|_| "must begin with a number".to_string())?;
    Ok((number, text[end..].trim()))
}

pub(super) fn duration(value: &Value) -> Result<Duration, String> {
    let text = value.as_str().ok_or("expected a duration such as \"250ms\" or \"4s\"")?;
    let (number, unit) = number_and_unit(text)?;
    let seconds = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err("the unit must be ns, us, ms, s, m or h".to_string()),
    };
    let limit_s = 366.0 * 86400.0;
    if number * seconds > limit_s {
        return Err("must be at most a year".to_string());
    }
    Ok(Duration::from_secs_f64(number * seconds))
}

pub(super) fn non_zero_duration(value: &Value) -> Result<Duration, String> {
    duration(value).and_then(|d| if d.is_zero() { Err("must not be zero".to_string()) } else { Ok(d) })
}

pub(super) fn whole_seconds(value: &Value) -> Result<Duration, String> {
    let duration = non_zero_duration(value)?;
    if duration.subsec_nanos() > 0 { Err("must be whole seconds".to_string()) } else { Ok(duration) }
}

fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = number_and_unit(text)?;
    let scale: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err("the unit must be B, KiB, MiB, GiB, TiB, kB, MB, GB or TB".to_string()),
    };
    let bytes = number * scale as f64;
    if bytes > (1u64 << 50) as f64 { Err("must be at most 1024TiB".to_string()) } else { Ok(bytes as u64) }
}

/// Parses a size in bytes, given as a string with a unit or as a number; at least `min`.
pub(super) fn size(value: &Value, min: u64) -> Result<u64, String> {
    let size = match value {
        Value::String(text) => bytes(text)?,
        Value::Integer(number) => bytes(&number.to_string())?,
        _ => return Err("expected a size such as \"4MiB\"".to_string()),
    };
    if size < min { Err(format!("must be at least {min} bytes")) } else { Ok(size) }
}

/// Parses a size in bytes; "" is `None`.
pub(super) fn optional_size(value: &Value) -> Result<Option<u64>, String> {
    if value.as_str().is_some_and(str::is_empty) { Ok(None) } else { size(value, 1).map(Some) }
}

/// Parses a number of bytes per second such as "8GB/s"; "" is `None`.
pub(super) fn optional_rate(value: &Value) -> Result<Option<f64>, String> {
    let text = value.as_str().ok_or("expected a rate such as \"8GB/s\"")?;
    if text.is_empty() {
        return Ok(None);
    }
    let per_second = text.trim().strip_suffix("/s").ok_or("the unit must end with /s, as in \"8GB/s\"")?;
    size(&Value::from(per_second), 1).map(|bytes| Some(bytes as f64))
}

/// Parses a list of texts like `PATTERN=disk`, each with a regular expression and a tier.
pub(super) fn tier_patterns(value: &Value) -> Result<Vec<TierPattern>, String> {
    let mut all = Vec::new();
    strings(value, |_| Ok(()))?.into_iter().try_for_each(|text| {
        let expected = || format!("'{text}': expected PATTERN=device, PATTERN=host or PATTERN=disk");
        let (pattern, tier) = text.rsplit_once('=').ok_or_else(expected)?;
        let tiers = [("device", TierName::Device), ("host", TierName::Host), ("disk", TierName::Disk)];
        let tier = tiers.into_iter().find(|(name, _)| *name == tier).ok_or_else(expected)?.1;
        // Its message has several lines.
        let is_valid = !pattern.is_empty() && Regex::new(pattern).is_ok();
        is_valid.then_some(()).ok_or_else(|| format!("'{pattern}' is not a valid regular expression"))?;
        all.push(TierPattern { pattern: pattern.to_owned(), tier });
        Ok::<_, String>(())
    })?;
    Ok(all)
}

pub(super) fn lanes(value: &Value) -> Result<LaneCount, String> {
    Ok(auto_or_integer(value, 1 << 16)?.map_or(LaneCount::PerStage, LaneCount::Number))
}

/// Parses "auto", which is `None`, or a whole number from 1 to `max`.
pub(super) fn auto_or_integer(value: &Value, max: i64) -> Result<Option<usize>, String> {
    let number = match value {
        Value::String(word) if word == "auto" => return Ok(None),
        // Flags give numbers as strings.
        Value::String(text) => text.parse().map_or_else(|_| value.clone(), Value::Integer),
        _ => value.clone(),
    };
    let parsed = integer(&number, 1, max).map(Some);
    parsed.map_err(|reason| format!("{reason}, or be \"auto\"").replace("number, or be", "number, or"))
}

pub(super) fn kv_size(value: &Value) -> Result<KvSize, String> {
    let text = value.as_str().ok_or("expected \"auto\", \"65536 tokens\" or \"2GiB\"")?;
    if text == "auto" {
        return Ok(KvSize::Auto);
    }
    if let Some(number) = text.strip_suffix("tokens") {
        let tokens = number.trim().parse().ok().filter(|tokens| (1..=1usize << 40).contains(tokens));
        return tokens.map(KvSize::Tokens).ok_or_else(|| "expected a whole number of tokens".to_string());
    }
    size(value, 1).map(KvSize::Bytes)
}

/// Parses the memory for weights or caches: a word, a percentage or a size.
pub(super) fn host_tier(value: &Value) -> Result<HostTier, String> {
    let text = match value {
        Value::String(text) => text.trim(),
        Value::Integer(_) => return size(value, 0).map(HostTier::Bytes),
        _ => return Err("expected \"all\", \"auto\", \"20%\" or a size such as \"2GiB\"".to_string()),
    };
    match (text, text.strip_suffix('%')) {
        ("all", _) => Ok(HostTier::All),
        ("auto", _) => Ok(HostTier::Auto),
        (_, Some(percent)) => {
            let percent = percent.trim().parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
            let fraction = percent.map(|percent: f64| HostTier::Fraction(percent / 100.0));
            fraction.ok_or_else(|| "a percentage must be from 0% to 100%".to_string())
        }
        _ => size(value, 0).map(HostTier::Bytes),
    }
}

pub(super) fn page_size(value: &Value) -> Result<usize, String> {
    let positions = integer(value, PAGE_UNIT as i64, 1 << 24)?;
    if positions % PAGE_UNIT != 0 {
        return Err(format!("must be a multiple of {PAGE_UNIT}"));
    }
    Ok(positions)
}

/// Parses a fraction greater than 0 and at most 1.
pub(super) fn fraction(value: &Value) -> Result<Fraction, String> {
    let number = value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64));
    number.and_then(Fraction::new).ok_or_else(|| "must be more than 0 and at most 1".to_string())
}

/// Parses sampling parameters, given as a table or as text.
pub(super) fn sampling(value: &Value) -> Result<ParamList, String> {
    let list = match value {
        Value::String(text) => ParamList::parse_text(text)?,
        Value::Table(table) => {
            let entries = table.iter().map(|(name, value)| Ok((name.clone(), json(name, value)?)));
            ParamList(entries.collect::<Result<_, String>>()?)
        }
        _ => return Err("expected a table, or text such as \"top_p=0.9,min_p=0.05\"".to_string()),
    };
    list.check().map_err(|error| error.message)?;
    Ok(list)
}

/// Converts the TOML value of a parameter to JSON, which has no infinities and no NaN.
fn json(name: &str, value: &Value) -> Result<serde_json::Value, String> {
    if !is_finite(value) {
        return Err(format!("{name} is {value} but numbers must be finite"));
    }
    serde_json::to_value(value).map_err(|error| error.to_string())
}

/// Returns whether all numbers within a value are finite.
fn is_finite(value: &Value) -> bool {
    match value {
        Value::Float(number) => number.is_finite(),
        Value::Array(values) => values.iter().all(is_finite),
        Value::Table(table) => table.values().all(is_finite),
        _ => true,
    }
}

/// Parses a level or filter directives. A word alone must be a level: as the name of a target it would be
/// valid, and turn the rest of the log off.
pub(super) fn log_level(value: &Value) -> Result<String, String> {
    let text = non_empty_string(value)?;
    let directives: Vec<_> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    for part in &directives {
        let is_word = !part.contains(['=', '[', ':']);
        if is_word && part.parse::<LevelFilter>().is_err() {
            return Err(format!(
                "\"{part}\" is not a level: expected error, warn, info, debug, trace or off; for a target, \
                 write \"{part}=LEVEL\""
            ));
        }
    }
    if directives.is_empty() {
        return Err("names no level".to_string());
    }
    let level = directives.join(",");
    EnvFilter::try_new(&level).map(|_| level).map_err(|error| error.to_string())
}
