//! Syntax of device groups: pipeline stages, each a list of devices in rank order.
//!
//! Groups are a list of lists, `[["cpu:0", "cpu:1"], ["cpu:2"]]`, or its short form `0&1;2`. Layer counts per
//! stage and shares per rank use the same two forms.
//! Invariant: a device is named once, and the devices of a stage are of one kind.

use super::sections::{DeviceKind, DeviceName, ExpertPlacement, Groups};
use strsim::levenshtein;
use toml::Value;

/// Expert splits by their names in the configuration.
pub(super) const EXPERTS: [(&str, ExpertPlacement); 2] =
    [("column", ExpertPlacement::Column), ("expert", ExpertPlacement::Expert)];

/// Maximum number of devices of one model.
const DEVICES_MAX: usize = 256;

/// Formats groups in the short form. Parsing the result gives the same groups.
pub fn format_groups(groups: &[Vec<DeviceName>]) -> String {
    let stage = |ranks: &Vec<DeviceName>| ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join("&");
    groups.iter().map(stage).collect::<Vec<_>>().join(";")
}

/// Parses device groups. A bare number is a device of the `default` kind, a bare kind is its device 0, and an
/// empty value is device 0 of the `default` kind. Other names must be of one of `kinds`.
pub(super) fn parse_groups(
    value: &Value,
    default: DeviceKind,
    kinds: &[DeviceKind],
) -> Result<Groups, String> {
    let name = |text: &String| parse_device(text, default, kinds);
    let stages = parse_stages(value)?.into_iter().map(|stage| stage.iter().map(name).collect());
    let groups = stages.collect::<Result<Groups, String>>()?;
    if groups.is_empty() {
        return Ok(vec![vec![DeviceName { kind: default, number: 0 }]]);
    }
    if groups.iter().map(Vec::len).sum::<usize>() > DEVICES_MAX {
        return Err(format!("names more than {DEVICES_MAX} devices"));
    }
    check_named_once(&groups)?;
    check_kinds(&groups)?;
    Ok(groups)
}

/// Returns the device that returns the results of steps: the first of the last stage.
pub(super) fn returning_device(groups: &Groups) -> DeviceName {
    *groups.last().and_then(|stage| stage.first()).expect("a model has a device; anything else is a bug")
}

/// Parses the name of a device. A bare number is a device of the `default` kind, and a bare kind is its
/// device 0.
pub(super) fn parse_device(
    text: &str,
    default: DeviceKind,
    kinds: &[DeviceKind],
) -> Result<DeviceName, String> {
    let of_name = |name| kinds.iter().find(|known| known.name() == name);
    let bare = if of_name(text).is_some() { (text, "0") } else { (default.name(), text) };
    let (kind, number) = text.split_once(':').unwrap_or(bare);
    let found = of_name(kind);
    // At most 5 digits, so that the number always fits.
    let number = Some(number).filter(|number| number.len() <= 5 && is_number(number));
    match (found, number.and_then(|number| number.parse().ok())) {
        (Some(kind), Some(number)) => Ok(DeviceName { kind: *kind, number }),
        _ => Err(format!("there is no device '{text}'; did you mean '{}'?", nearest(text, kinds))),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the device name most similar to `text`, for a suggestion.
fn nearest(text: &str, kinds: &[DeviceKind]) -> String {
    let (words, digits): (String, String) = text.chars().partition(|c| !c.is_ascii_digit());
    let words = words.replace("gpu", DeviceKind::Cuda.name());
    let near =
        kinds.iter().map(|kind| kind.name()).min_by_key(|kind| levenshtein(words.trim_matches(':'), kind));
    let number = if digits.is_empty() || digits.len() > 5 { "0" } else { &digits };
    format!("{}:{number}", near.expect("there are kinds"))
}

fn check_named_once(groups: &Groups) -> Result<(), String> {
    let mut seen = Vec::new();
    for device in groups.iter().flatten() {
        if seen.contains(device) {
            return Err(format!("{device} is listed twice; {}", nearest_groups(groups)));
        }
        seen.push(*device);
    }
    Ok(())
}

/// Checks that each stage has devices of one kind, whose partial sums are added, and that fake and real
/// devices are not mixed, because a fake device produces no activations.
fn check_kinds(groups: &Groups) -> Result<(), String> {
    let all = || groups.iter().flatten();
    if let (Some(fake), Some(real)) = (all().find(is_fake), all().find(|device| !is_fake(device))) {
        let nearest = nearest_groups(groups);
        return Err(format!("{fake} produces no activations for {real}; {nearest}"));
    }
    for stage in groups {
        if let Some(other) = stage.iter().find(|device| device.kind != stage[0].kind) {
            return Err(format!(
                "{} and {other} are in one stage, whose devices must be of one kind; {}",
                stage[0],
                nearest_groups(groups)
            ));
        }
    }
    Ok(())
}

fn is_fake(device: &&DeviceName) -> bool {
    matches!(device.kind, DeviceKind::Fake { .. })
}

/// Suggests valid groups: each device once, fake devices only if all are fake, and a stage for each kind.
fn nearest_groups(groups: &Groups) -> String {
    let only_fake = groups.iter().flatten().all(|device| is_fake(&device));
    let mut seen = Vec::new();
    let mut can_be = |device: &DeviceName| {
        let can_be = !seen.contains(device) && (only_fake || !is_fake(&device));
        seen.push(*device);
        can_be
    };
    let stages = groups
        .iter()
        .map(|stage| -> Vec<DeviceName> { stage.iter().copied().filter(|device| can_be(device)).collect() });
    let nearest: Groups = stages.flat_map(|stage| by_kind(&stage)).collect();
    format!("the nearest possible is {}", format_groups(&nearest))
}

/// Splits a stage into one per kind.
fn by_kind(stage: &[DeviceName]) -> Groups {
    let mut groups = Groups::new();
    for device in stage {
        match groups.iter_mut().find(|group| group[0].kind == device.kind) {
            Some(group) => group.push(*device),
            None => groups.push(vec![*device]),
        }
    }
    groups
}

/// Parses the layers per stage; empty for an automatic split.
pub(super) fn parse_layers(value: &Value, groups: &Groups) -> Result<Vec<usize>, String> {
    let stages = parse_stages(value)?;
    let count = |stage: &Vec<String>| match &stage[..] {
        [count] => parse_count(count),
        _ => Err("expected one number for each stage".to_string()),
    };
    let layers = stages.iter().map(count).collect::<Result<Vec<_>, _>>()?;
    if !layers.is_empty() && layers.len() != groups.len() {
        return Err(format!(
            "is for {}, but device.groups has {} ({}); [] splits automatically",
            pluralize(layers.len(), "stage"),
            groups.len(),
            format_groups(groups)
        ));
    }
    Ok(layers)
}

/// Parses the relative share per rank; empty for equal shares.
pub(super) fn parse_shares(value: &Value, groups: &Groups) -> Result<Vec<Vec<u32>>, String> {
    let share = |text: &String| parse_count(text).map(|share| share as u32);
    let shares = parse_stages(value)?.into_iter().map(|stage| stage.iter().map(share).collect());
    let shares = shares.collect::<Result<Vec<Vec<u32>>, String>>()?;
    let sizes = |lists: &[Vec<u32>]| lists.iter().map(Vec::len).collect::<Vec<_>>();
    let equal: Vec<Vec<u32>> = groups.iter().map(|stage| vec![1; stage.len()]).collect();
    match shares.is_empty() || sizes(&shares) == sizes(&equal) {
        true => Ok(shares),
        false => Err(format!(
            "does not fit the devices of device.groups ({}); the nearest possible is {equal:?}",
            format_groups(groups)
        )),
    }
}

/// Parses a layer count or a share, from 1.
fn parse_count(text: &str) -> Result<usize, String> {
    const MOST: usize = 1_000_000;
    let number =
        Some(text).filter(|text| is_number(text) && text.len() <= 7).and_then(|text| text.parse().ok());
    number
        .filter(|number| (1..=MOST).contains(number))
        .ok_or_else(|| format!("'{text}' must be a whole number from 1 to {MOST}"))
}

fn pluralize(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Parses a list of lists in either form into strings.
fn parse_stages(value: &Value) -> Result<Vec<Vec<String>>, String> {
    match value {
        Value::String(text) if text.trim_start().starts_with('[') => match text.parse() {
            Ok(Value::Array(items)) => parse_list(&items),
            _ => Err(expected_format()),
        },
        Value::String(text) if text.trim().is_empty() => Ok(Vec::new()),
        Value::String(text) => parse_short_form(text),
        Value::Array(items) => parse_list(items),
        _ => Err(expected_format()),
    }
}

fn parse_list(items: &[Value]) -> Result<Vec<Vec<String>>, String> {
    let mut stages = Vec::new();
    for item in items {
        match item {
            Value::String(text) => stages.extend(parse_short_form(text)?),
            Value::Array(ranks) => stages.push(ranks.iter().map(parse_item).collect::<Result<_, _>>()?),
            alone => stages.push(vec![parse_item(alone)?]),
        }
    }
    match stages.iter().position(Vec::is_empty) {
        Some(empty) => Err(format!("stage {} is empty", empty + 1)),
        None => Ok(stages),
    }
}

fn parse_item(value: &Value) -> Result<String, String> {
    match value {
        Value::String(name) => Ok(name.trim().to_string()),
        Value::Integer(number) => Ok(number.to_string()),
        _ => Err(expected_format()),
    }
}

/// Parses the short form `0&1;2`. A comma may replace `;` and a bar may replace `&`.
fn parse_short_form(text: &str) -> Result<Vec<Vec<String>>, String> {
    let stages: Vec<Vec<String>> = text
        .split([';', ','])
        .map(|stage| stage.split(['&', '|']).map(|rank| rank.trim().to_string()).collect())
        .collect();
    match stages.iter().flatten().any(String::is_empty) {
        true => Err(format!("'{text}' has an empty entry; the format is 0&1;2&3")),
        false => Ok(stages),
    }
}

fn expected_format() -> String {
    "expected a list for each stage, such as [[0, 1], [2]], or the same as \"0&1;2\"".to_string()
}

#[cfg(test)]
mod tests;
