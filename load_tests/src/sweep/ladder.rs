//! The steps of a sweep: the loads, and the number of requests at each.
//!
//! Invariant: a ladder has at least one load, and loads ascend.

use std::{str::FromStr, time::Duration};

use super::{LoadUnit, SweepStep};

/// The loads of a sweep. Text form: comma-separated values and ranges such as `1,2,4,8`, `1..64x2` (doubling
/// up to 64) and `10..100+10`. Numbers of users have the prefix `users:`; rates may have the prefix `rates:`.
#[derive(Clone, Debug, PartialEq)]
pub enum Ladder {
    /// Requests per second, with the arrival process of the settings, or Poisson if it has no rate.
    Rates(Vec<f64>),
    /// Numbers of users of a closed loop.
    Users(Vec<usize>),
}

/// The size of a step. Text form: a number of requests, or a duration such as `30s` or `2m`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepSize {
    Requests(usize),
    /// As many requests as arrive in this time, by the rate or the throughput of the previous step. At least
    /// [`StepSize::REQUESTS_MIN`], and [`StepSize::REQUESTS_PER_USER_MIN`] per user.
    Time(Duration),
}

/// Maximum number of steps of a ladder.
const STEPS_MAX: usize = 1000;

/// Maximum number of requests of a step.
const REQUESTS_MAX: f64 = 1e7;

const RATES: std::ops::RangeInclusive<f64> = 1e-4..=1e6;
const USERS: std::ops::RangeInclusive<f64> = 1.0..=1e5;

impl Ladder {
    /// Parses a ladder of rates; numbers may have the suffix `/s`.
    pub fn rates(text: &str) -> Result<Ladder, String> {
        let rates = parse_values(text, |value| value.strip_suffix("/s").unwrap_or(value), |rate| rate)?;
        match rates.iter().find(|rate| !RATES.contains(rate)) {
            Some(rate) => Err(format!("{rate} requests per second is not between 0.0001 and 1000000")),
            None => Ok(Ladder::Rates(rates)),
        }
    }

    /// Parses a ladder of numbers of users; the values of a range are rounded.
    pub fn users(text: &str) -> Result<Ladder, String> {
        let users = parse_values(text, |value| value, f64::round)?;
        match users.iter().find(|users| !USERS.contains(users) || users.fract() != 0.0) {
            Some(users) => Err(format!("{users} is not a number of users from 1 to 100000")),
            None => Ok(Ladder::Users(users.into_iter().map(|users| users as usize).collect())),
        }
    }

    /// Returns the unit of the values.
    pub fn unit(&self) -> LoadUnit {
        match self {
            Ladder::Rates(_) => LoadUnit::Rate,
            Ladder::Users(_) => LoadUnit::Users,
        }
    }

    /// Returns the loads, ascending.
    pub fn values(&self) -> Vec<f64> {
        match self {
            Ladder::Rates(rates) => rates.clone(),
            Ladder::Users(users) => users.iter().map(|users| *users as f64).collect(),
        }
    }
}

impl FromStr for Ladder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("users", text)) => Ladder::users(text),
            Some(("rates", text)) => Ladder::rates(text),
            None => Ladder::rates(text),
            Some((unit, _)) => Err(format!("unknown prefix '{unit}:'; expected rates: or users:")),
        }
    }
}

impl LoadUnit {
    /// Returns the geometric mean of two loads, rounded, or `None` if there is no load between them.
    pub(super) fn midpoint(self, low: f64, high: f64) -> Option<f64> {
        let middle = (low * high).sqrt();
        let middle = match self {
            // Rounded to three digits.
            LoadUnit::Rate => format!("{middle:.2e}").parse().unwrap_or(middle),
            LoadUnit::Users => middle.round(),
        };
        (low < middle && middle < high).then_some(middle)
    }
}

impl StepSize {
    /// Minimum number of requests of a step whose size is a time.
    pub const REQUESTS_MIN: usize = 40;
    /// Minimum number of requests per user of a step whose size is a time.
    pub const REQUESTS_PER_USER_MIN: usize = 4;

    /// Returns the number of requests of the step at load `x`, given the steps of lower load.
    pub(super) fn requests(self, unit: LoadUnit, x: f64, lower: &[SweepStep]) -> usize {
        let time = match self {
            StepSize::Requests(requests) => return requests,
            StepSize::Time(time) => time.as_secs_f64(),
        };
        let (rate, minimum) = match unit {
            LoadUnit::Rate => (x, Self::REQUESTS_MIN),
            LoadUnit::Users => {
                let pace = lower.last().map_or(0.0, |step| step.run.request_throughput);
                (pace, Self::REQUESTS_MIN.max(Self::REQUESTS_PER_USER_MIN * x as usize))
            }
        };
        ((rate * time).ceil().min(REQUESTS_MAX) as usize).max(minimum)
    }
}

impl FromStr for StepSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("'{text}' is neither a number of requests nor a time such as 30s or 2m");
        if let Ok(requests) = text.parse() {
            return match requests {
                1..=10_000_000 => Ok(StepSize::Requests(requests)),
                _ => Err("the number of requests of a step must be from 1 to 10000000".into()),
            };
        }
        let (number, seconds) = match (text.strip_suffix('s'), text.strip_suffix('m')) {
            (Some(number), _) => (number, 1.0),
            (None, Some(number)) => (number, 60.0),
            (None, None) => return Err(refused()),
        };
        let seconds = number.parse::<f64>().map_err(|_| refused())? * seconds;
        match (0.1..=86_400.0).contains(&seconds) {
            true => Ok(StepSize::Time(Duration::from_secs_f64(seconds))),
            false => Err(format!("the duration of a step must be from 0.1 s to one day, not {seconds} s")),
        }
    }
}

/// Parses a list of values, which must ascend. `bare` strips the unit of a number, and `made` rounds the
/// values of a range.
fn parse_values(text: &str, bare: fn(&str) -> &str, made: fn(f64) -> f64) -> Result<Vec<f64>, String> {
    let number = |text: &str| -> Result<f64, String> {
        let number = bare(text.trim()).parse().ok().filter(|number: &f64| number.is_finite());
        number.ok_or_else(|| format!("'{}' is not a number", text.trim()))
    };
    let mut values = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            None => values.push(number(part)?),
            Some((low, rest)) => {
                values.extend(parse_range(part, number(low)?, rest, number)?.into_iter().map(made))
            }
        }
        if values.len() > STEPS_MAX {
            return Err(format!("'{text}' has more than {STEPS_MAX} steps"));
        }
    }
    values.dedup();
    match values.windows(2).find(|pair| pair[0] > pair[1]) {
        Some(pair) => Err(format!("the steps must ascend, but {} comes after {}", pair[1], pair[0])),
        None => Ok(values),
    }
}

/// Returns the values of `LOW..HIGHxFACTOR` or `LOW..HIGH+STEP`; `rest` is the text after the dots.
fn parse_range(
    part: &str,
    low: f64,
    rest: &str,
    number: impl Fn(&str) -> Result<f64, String>,
) -> Result<Vec<f64>, String> {
    let refused = |why: &str| Err(format!("'{}': {why}", part.trim()));
    let (high, by, is_factor) = match (rest.split_once('x'), rest.split_once('+')) {
        (Some((high, factor)), _) => (number(high)?, number(factor)?, true),
        (None, Some((high, step))) => (number(high)?, number(step)?, false),
        (None, None) => {
            return refused("a range must end in xFACTOR or +STEP, such as 1..64x2 or 10..100+10");
        }
    };
    if low <= 0.0 || low > high {
        return refused("a range must start above 0 and not end below its start");
    }
    if is_factor && by <= 1.0 {
        return refused("the factor must be above 1");
    }
    if by <= 0.0 {
        return refused("the step must be above 0");
    }
    // Tolerates rounding errors, so that the end of the range is included.
    let is_within = |value: &f64| *value <= high * (1.0 + 1e-9);
    let value = |n: usize| if is_factor { low * by.powi(n as i32) } else { low + by * n as f64 };
    Ok((0..=STEPS_MAX).map(value).take_while(is_within).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ladder(text: &str) -> Ladder {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn lists_and_ranges_are_read() {
        assert_eq!(ladder("1,2, 4,8/s"), Ladder::Rates(vec![1.0, 2.0, 4.0, 8.0]));
        assert_eq!(ladder("1..64x2").values(), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
        assert_eq!(ladder("rates:1..100x2").values().last(), Some(&64.0));
        assert_eq!(ladder("10..40+10,100").values(), [10.0, 20.0, 30.0, 40.0, 100.0]);
        // In floating point, 30 times 0.1 is slightly more than 3.
        assert_eq!(ladder("0.1..3+0.1").values().len(), 30);
        assert_eq!(ladder("users:1..4x1.5,10"), Ladder::Users(vec![1, 2, 3, 10]));
        assert_eq!(ladder("users:5"), Ladder::Users(vec![5]));
    }

    #[test]
    fn what_is_no_ladder_is_refused_by_what_is_wrong() {
        for (text, part) in [
            ("", "'' is not a number"),
            ("1,,2", "'' is not a number"),
            ("1,x", "'x' is not a number"),
            ("NaN", "'NaN' is not a number"),
            ("1..64", "'1..64': a range must end in"),
            ("1..64x1", "the factor must be above 1"),
            ("1..64x-2", "the factor must be above 1"),
            ("1..64+0", "the step must be above 0"),
            ("64..1x2", "'64..1x2': a range must start"),
            ("0..8+1", "a range must start above 0"),
            ("4,2", "the steps must ascend, but 2 comes after 4"),
            ("1..8x2,4", "4 comes after 8"),
            ("0", "0 requests per second is not between"),
            ("2e6", "is not between"),
            ("1..1000000+1", "more than 1000 steps"),
            ("users:1.5", "1.5 is not a number of users"),
            ("users:0", "0 is not a number of users"),
            ("loads:1", "unknown prefix 'loads:'"),
        ] {
            let error = text.parse::<Ladder>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_are_numbers_or_times() {
        assert_eq!("200".parse(), Ok(StepSize::Requests(200)));
        assert_eq!("1.5m".parse(), Ok(StepSize::Time(Duration::from_secs(90))));
        for (text, part) in [
            ("", "neither"),
            ("s", "neither"),
            ("5h", "neither"),
            ("0", "from 1 to"),
            ("0s", "0.1 s"),
            ("-3", "neither"),
        ] {
            let error = text.parse::<StepSize>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_time_is_made_requests_by_the_rate_but_never_too_few() {
        let size = StepSize::Time(Duration::from_secs(30));
        assert_eq!(size.requests(LoadUnit::Rate, 12.3, &[]), 369);
        assert_eq!(size.requests(LoadUnit::Rate, 0.5, &[]), StepSize::REQUESTS_MIN);
        assert_eq!(size.requests(LoadUnit::Users, 64.0, &[]), 256);
        assert_eq!(StepSize::Requests(7).requests(LoadUnit::Rate, 100.0, &[]), 7);
    }

    #[test]
    fn halfway_lies_between_and_has_few_digits() {
        assert_eq!(LoadUnit::Rate.midpoint(8.0, 16.0), Some(11.3));
        assert_eq!(LoadUnit::Rate.midpoint(0.01, 0.02), Some(0.0141));
        assert_eq!(LoadUnit::Users.midpoint(8.0, 16.0), Some(11.0));
        assert_eq!(LoadUnit::Users.midpoint(8.0, 9.0), None);
        assert_eq!(LoadUnit::Rate.midpoint(1.0, 1.001), None);
    }
}
