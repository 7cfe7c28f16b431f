//! Parsing and formatting of arrival processes.
//!
//! Invariant: except for a trace, the formatted text parses back to the same process, to the nanosecond.

use std::{fmt, str::FromStr, time::Duration};

use super::{Arrivals, RampKind};

const EXPECTED: &str = "expected all, constant:R, poisson:R, gamma:R:SHAPE, ramp:RATE-RATE:TIME, \
    ramp-exponential:RATE-RATE:TIME, users:N or users:N:THINK, with R a rate such as 20/s or a mean gap \
    such as 50ms";

const GAP_MIN: Duration = Duration::from_micros(1);
const DAY: Duration = Duration::from_secs(86_400);
/// Minimum rate in requests per second; with the maximum, it matches the bounds of a gap.
const RATE_MIN: f64 = 1.0 / 86_400.0;
const RATE_MAX: f64 = 1e6;
const SHAPE_MIN: f64 = 0.01;
const SHAPE_MAX: f64 = 1e4;
/// Maximum number of users; more than a machine has ports.
const USERS_MAX: usize = 100_000;

impl FromStr for Arrivals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        match (name, parts.collect::<Vec<_>>().as_slice()) {
            ("all", []) => Ok(Arrivals::AllAtOnce),
            ("constant", [gap]) => Ok(Arrivals::Constant { gap: parse_gap(gap)? }),
            ("poisson", [gap]) => Ok(Arrivals::Poisson { mean_gap: parse_gap(gap)? }),
            ("gamma", [gap, shape]) => {
                Ok(Arrivals::Gamma { mean_gap: parse_gap(gap)?, shape: parse_shape(shape)? })
            }
            ("ramp", [rates, over]) => parse_ramp(RampKind::Linear, rates, over),
            ("ramp-exponential", [rates, over]) => parse_ramp(RampKind::Exponential, rates, over),
            ("users", [count]) => Ok(Arrivals::Users { count: parse_users(count)?, think: Duration::ZERO }),
            ("users", [count, think]) => {
                let think = parse_time(think, Duration::ZERO)?;
                Ok(Arrivals::Users { count: parse_users(count)?, think })
            }
            _ => Err(EXPECTED.into()),
        }
    }
}

/// Parses a rate or a mean gap into a gap.
fn parse_gap(text: &str) -> Result<Duration, String> {
    let Some(rate) = text.strip_suffix("/s") else { return parse_time(text, GAP_MIN) };
    let rate: f64 =
        rate.parse().map_err(|_| format!("'{text}' is not a rate such as 20/s or a gap such as 50ms"))?;
    if !(RATE_MIN..=RATE_MAX).contains(&rate) {
        return Err(format!("the rate {text} is not between one per day and 1000000/s"));
    }
    Ok(Duration::from_secs_f64(1.0 / rate))
}

/// Parses a time of at least `min` and at most a day.
fn parse_time(text: &str, min: Duration) -> Result<Duration, String> {
    let units = [("us", 1e6), ("ms", 1e3), ("s", 1.0)];
    let unit = units.iter().find_map(|(unit, per_s)| Some((text.strip_suffix(unit)?, per_s)));
    let (number, per_s) = unit.unwrap_or((text, &1e3));
    let number: f64 =
        number.parse().map_err(|_| format!("'{text}' is not a time such as 50ms, 2s or 500us"))?;
    if !(min.as_secs_f64()..=DAY.as_secs_f64()).contains(&(number / per_s)) {
        return Err(format!("the time {text} is not between {} and one day", TimeDisplay(min)));
    }
    Ok(Duration::from_secs_f64(number / per_s))
}

fn parse_shape(text: &str) -> Result<f64, String> {
    let shape = text.parse().ok().filter(|shape| (SHAPE_MIN..=SHAPE_MAX).contains(shape));
    shape.ok_or_else(|| {
        format!("'{text}' is not a shape: expected a number from {SHAPE_MIN} to {SHAPE_MAX}; 1 is Poisson")
    })
}

fn parse_ramp(kind: RampKind, rates: &str, over: &str) -> Result<Arrivals, String> {
    let (from, to) =
        rates.split_once('-').ok_or_else(|| format!("'{rates}' is not a pair of rates such as 1/s-20/s"))?;
    let (from, to) = (parse_rate(from)?, parse_rate(to)?);
    if to == 0.0 {
        return Err("a ramp cannot end at 0: no request would be due after it".into());
    }
    if from == 0.0 && kind == RampKind::Exponential {
        return Err("an exponential ramp cannot start at 0".into());
    }
    Ok(Arrivals::Ramp { from, to, over: parse_time(over, GAP_MIN)?, kind })
}

/// Parses a rate in requests per second: 0, or within the bounds.
fn parse_rate(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    let rate = number.parse().ok().filter(|rate| *rate == 0.0 || (RATE_MIN..=RATE_MAX).contains(rate));
    // Turns negative zero into zero.
    rate.map(f64::abs).ok_or_else(|| {
        format!("'{text}' is not a rate: expected requests per second from one per day to 1000000, or 0")
    })
}

fn parse_users(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=USERS_MAX).contains(count));
    count.ok_or_else(|| format!("'{text}' is not a number of users from 1 to {USERS_MAX}"))
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Arrivals::AllAtOnce => write!(f, "all"),
            Arrivals::Constant { gap } => write!(f, "constant:{}", GapDisplay(gap)),
            Arrivals::Poisson { mean_gap } => write!(f, "poisson:{}", MeanGapDisplay(mean_gap)),
            Arrivals::Gamma { mean_gap, shape } => write!(f, "gamma:{}:{shape}", MeanGapDisplay(mean_gap)),
            Arrivals::Ramp { from, to, over, kind } => {
                let name = match kind {
                    RampKind::Linear => "ramp",
                    RampKind::Exponential => "ramp-exponential",
                };
                write!(f, "{name}:{from}/s-{to}/s:{}", TimeDisplay(over))
            }
            Arrivals::Trace(_) => write!(f, "trace"),
            Arrivals::Users { count, think: Duration::ZERO } => write!(f, "users:{count}"),
            Arrivals::Users { count, think } => write!(f, "users:{count}:{}", TimeDisplay(think)),
        }
    }
}

/// Formats a gap. A gap of whole milliseconds is shown as a time; any other as a rate if that is exact and
/// shorter, such as 3/s for 333.333333ms.
struct GapDisplay(Duration);

impl GapDisplay {
    /// Returns the rate with the fewest decimals that equals this gap to the nanosecond.
    fn as_rate(&self) -> Option<String> {
        let rate = 1.0 / self.0.as_secs_f64();
        (0..=6).map(|decimals| format!("{rate:.decimals$}/s")).find(|rate| parse_gap(rate) == Ok(self.0))
    }
}

impl fmt::Display for GapDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gap = TimeDisplay(self.0).to_string();
        let whole = self.0.as_nanos().is_multiple_of(1_000_000);
        let rate = if whole { None } else { self.as_rate() };
        f.write_str(&rate.filter(|rate| rate.len() < gap.len()).unwrap_or(gap))
    }
}

/// Formats a mean gap: as a rate if that is a whole number of requests per second, else as any gap.
struct MeanGapDisplay(Duration);

impl fmt::Display for MeanGapDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = format!("{:.0}/s", 1.0 / self.0.as_secs_f64());
        match parse_gap(&rate) == Ok(self.0) {
            true => f.write_str(&rate),
            false => GapDisplay(self.0).fmt(f),
        }
    }
}

/// Formats a time with its unit, exact to the nanosecond.
struct TimeDisplay(Duration);

impl fmt::Display for TimeDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        match nanos {
            0 => write!(f, "0ms"),
            _ if nanos.is_multiple_of(1_000_000_000) => write!(f, "{}s", nanos / 1_000_000_000),
            _ if nanos < 1_000_000 => write!(f, "{}us", nanos as f64 / 1e3),
            _ => write!(f, "{}ms", nanos as f64 / 1e6),
        }
    }
}

#[cfg(test)]
mod tests;
