//! Faults that devices are made to have, so that operators can rehearse them: `faults.inject`.
//!
//! A fault is `KIND[/DEVICE]@WHEN[:TIME]`, as in `fail@100`, `hang/cpu:1@200:5s` or `nan@0.001`.
//! Invariant: every fault of a plan is for a device of the configuration, and its time is one that can
//! happen.

use super::devices::{parse_device, returning_device};
use super::sections::{DeviceKind, DeviceName, FaultKind, FaultPlan, FaultRule, FaultTime, Groups};
use super::values;
use std::time::Duration;
use toml::Value;

/// Parses the faults of devices. `default` is the kind of devices that are given by their number alone.
pub(super) fn parse_faults(
    value: &Value,
    groups: &Groups,
    default: DeviceKind,
    kinds: &[DeviceKind],
    step_timeout: Option<Duration>,
) -> Result<FaultPlan, String> {
    let mut plan = FaultPlan::default();
    let text = values::string(value)?;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        if let Some(seed) = part.strip_prefix("seed=") {
            plan.seed = seed.parse().map_err(|_| format!("\"{part}\": the seed must be a whole number"))?;
            continue;
        }
        let device = |name: &str| parse_device(name, default, kinds);
        let rule = parse_rule(part, groups, device, step_timeout);
        plan.rules.push(rule.map_err(|reason| format!("\"{part}\": {reason}"))?);
    }
    Ok(plan)
}

fn parse_rule(
    part: &str,
    groups: &Groups,
    device: impl Fn(&str) -> Result<DeviceName, String>,
    step_timeout: Option<Duration>,
) -> Result<FaultRule, String> {
    let (what, when) = part.split_once('@').ok_or("expected KIND@STEP or KIND@PROBABILITY")?;
    let (kind, name) = what.split_once('/').map_or((what, None), |(kind, name)| (kind, Some(name)));
    let (when, time) = when.split_once(':').map_or((when, None), |(when, time)| (when, Some(time)));
    let returning = returning_device(groups);
    let device = name.map_or(Ok(returning), device)?;
    if !groups.iter().flatten().any(|known| *known == device) {
        return Err(format!("{device} is not among the devices of device.groups"));
    }
    let kind = parse_kind(kind, time, step_timeout)?;
    if kind == FaultKind::Nan && device != returning {
        return Err(format!("only {returning} can have it, which returns the results"));
    }
    Ok(FaultRule { kind, device, when: parse_when(when)? })
}

fn parse_kind(kind: &str, time: Option<&str>, step_timeout: Option<Duration>) -> Result<FaultKind, String> {
    let needed = || {
        let text = time.ok_or_else(|| format!("{kind} needs a time, such as {kind}@100:5s"))?;
        values::non_zero_duration(&text.into())
    };
    let kind = match kind {
        "fail" => FaultKind::Fail,
        "panic" => FaultKind::Panic,
        "nan" => FaultKind::Nan,
        "slow" => return needed().map(FaultKind::Slow),
        "hang" => {
            let time = needed()?;
            return match step_timeout {
                Some(timeout) if time > timeout => Ok(FaultKind::Hang(time)),
                Some(_) => Err("a hang must be longer than device.step_timeout, which ends it".to_string()),
                None => Err("a hang requires device.step_timeout, which ends it".to_string()),
            };
        }
        _ => return Err(format!("the kind must be one of {}", FaultKind::NAMES.join(", "))),
    };
    match time {
        None => Ok(kind),
        Some(_) => Err(format!("{} takes no time", kind.name())),
    }
}

/// Parses the number of a step, or a probability, which has a decimal point.
fn parse_when(text: &str) -> Result<FaultTime, String> {
    let step = text.parse().ok().filter(|step| *step > 0).map(FaultTime::Step);
    let chance = text.parse().ok().filter(|chance| text.contains('.') && *chance > 0.0 && *chance <= 1.0);
    step.or(chance.map(FaultTime::Chance)).ok_or_else(|| {
        "expected a step from 1 on, such as 100, or a probability of at most 1.0, such as 0.01".to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};

    fn plan(spec: &str, settings: &[(&'static str, &str)]) -> Result<FaultPlan, String> {
        let mut flags = Overrides::default();
        flags.set("faults.enabled", Some(true));
        flags.set("faults.inject", Some(spec));
        for (key, value) in settings {
            flags.set(key, Some(*value));
        }
        Config::load(None, flags).map(|config| config.faults).map_err(|error| error.to_string())
    }

    #[test]
    fn a_plan_has_what_its_text_says() {
        let settings = [("device.groups", "0&1;2"), ("device.step_timeout", "1s")];
        let spec = "fail@100, hang/cpu:1@7:5s,slow/0@0.5:200ms,nan@1.0,panic/2@1,seed=9";
        let cpu = |number| DeviceName { kind: DeviceKind::Cpu, number };
        let rule = |kind, device, when| FaultRule { kind, device: cpu(device), when };
        let (step, chance) = (FaultTime::Step, FaultTime::Chance);
        let rules = vec![
            rule(FaultKind::Fail, 2, step(100)),
            rule(FaultKind::Hang(Duration::from_secs(5)), 1, step(7)),
            rule(FaultKind::Slow(Duration::from_millis(200)), 0, chance(0.5)),
            rule(FaultKind::Nan, 2, chance(1.0)),
            rule(FaultKind::Panic, 2, step(1)),
        ];
        assert_eq!(plan(spec, &settings), Ok(FaultPlan { seed: 9, rules }));
        assert_eq!(plan(" ,", &[]), Ok(FaultPlan::default()));
    }

    #[test]
    fn wrong_faults_are_refused_with_their_part_and_the_reason() {
        for (spec, reason) in [
            ("fail", "\"fail\": expected KIND@STEP or KIND@PROBABILITY"),
            ("fail@1,burn@3", "\"burn@3\": the kind must be one of fail, panic, hang, slow, nan"),
            ("fail@0", "expected a step from 1 on"),
            ("fail@-1", "expected a step from 1 on"),
            ("fail@0.0", "a probability of at most 1.0"),
            ("fail@1.5", "a probability of at most 1.0"),
            ("fail@nan", "a probability of at most 1.0"),
            ("fail@1:5s", "fail takes no time"),
            ("slow@1", "slow needs a time, such as slow@100:5s"),
            ("slow@1:0s", "must not be zero"),
            ("slow@1:5 years", "the unit must be"),
            ("hang@1:5s", "a hang requires device.step_timeout"),
            ("fail/cpu:1@1", "cpu:1 is not among the devices of device.groups"),
            ("fail/disk@1", "there is no device 'disk'"),
            ("seed=x", "the seed must be a whole number"),
        ] {
            let error = plan(spec, &[]).unwrap_err();
            assert!(error.contains("faults.inject = ") && error.contains(reason), "{spec}: {error}");
        }
        let timeout = [("device.step_timeout", "5s")];
        assert!(plan("hang@1:5s", &timeout).unwrap_err().contains("must be longer than device.step_timeout"));
        let two = [("device.groups", "0;1")];
        assert!(plan("nan/cpu:0@1", &two).unwrap_err().contains("only cpu:1 can have it"));
    }

    #[test]
    fn faults_must_be_enabled() {
        let mut flags = Overrides::default();
        flags.set("faults.inject", Some("fail@1"));
        let error = Config::load(None, flags).unwrap_err().to_string();
        assert_eq!(
            error,
            "command line: faults.inject = \"fail@1\": requires faults.enabled, which is false, so that \
             nobody injects faults by mistake"
        );
    }
}
