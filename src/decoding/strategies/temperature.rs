//! Temperature, fixed or chosen by the entropy of the candidates.

use super::params::{Bounds, Param, ParamError, Values, Vocabulary};
use super::unit::{Context, Filter, Place, Strategy, Unit};
use mainstem_kernels::candidates::Candidates;

/// Divisor of the logits.
pub const TEMPERATURE: Param = Param::float(
    "temperature",
    1.0,
    Bounds::within(0.0, f64::INFINITY),
    "divisor of the logits; 0 takes the most likely token",
)
.or(&["temp"]);
const RANGE: Param = Param::float(
    "dynatemp_range",
    0.0,
    Bounds::within(0.0, f64::INFINITY),
    "the temperature varies by up to this; 0: off",
);
const EXPONENT: Param = Param::float(
    "dynatemp_exponent",
    1.0,
    Bounds::within(0.0, f64::INFINITY),
    "exponent of the normalized entropy",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "temperature",
    aliases: &["temp"],
    place: Place::Filter,
    params: &[TEMPERATURE, RANGE, EXPONENT],
    summary: "Divides the logits by the temperature. With `dynatemp_range` r, the temperature is low + (high \
              - low) h^`dynatemp_exponent`, where low and high are the temperature minus (at least 0) and \
              plus r, and h is the entropy of the n candidates divided by ln n.",
    build,
};

/// The temperature of a request.
#[derive(Debug)]
pub struct Temperature {
    low: f32,
    high: f32,
    exponent: f32,
}

impl Temperature {
    /// Temperatures are at least this; below it, the difference to greedy sampling cannot be computed.
    const LEAST: f32 = 1e-5;

    /// A fixed temperature.
    pub fn fixed(temperature: f32) -> Temperature {
        Temperature { low: temperature, high: temperature, exponent: 1.0 }
    }

    /// Returns the highest temperature that the values allow.
    pub fn warmest(values: &Values) -> f32 {
        values.float(&TEMPERATURE) + values.float(&RANGE)
    }
}

fn build(values: &Values, _: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let (temperature, range) = (values.float(&TEMPERATURE), values.float(&RANGE));
    let (low, high) = ((temperature - range).max(0.0), Temperature::warmest(values));
    if !high.is_finite() {
        return Err(ParamError::new(
            RANGE.name,
            format!("is {range}, too large for temperature {temperature}"),
        ));
    }
    if low == 1.0 && high == 1.0 {
        return Ok(None);
    }
    Ok(Some(Unit::Filter(Box::new(Temperature { low, high, exponent: values.float(&EXPONENT) }))))
}

impl Filter for Temperature {
    fn filter(&self, candidates: &mut Candidates<'_>, _: &Context<'_>) {
        let mut temperature = self.high;
        if self.low < self.high {
            let most = (candidates.count() as f64).ln();
            let normalized = if most > 0.0 { (candidates.entropy() / most).clamp(0.0, 1.0) } else { 0.0 };
            temperature = self.low + (self.high - self.low) * normalized.powf(self.exponent.into()) as f32;
        }
        if temperature < Temperature::LEAST {
            return candidates.keep_most_likely();
        }
        candidates.divide_by(temperature);
    }
}
