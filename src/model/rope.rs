//! Tables of rotary position embeddings: frequencies from theta and scaling, cosines and sines for every
//! position.
//!
//! Su et al., "RoFormer" (section 3.4.2). Scalings: Llama's as its checkpoints define it; Peng et al. 2023,
//! "YaRN" (section 3.2); Ding et al. 2024, "LongRoPE".
//!
//! Invariant: angles are products of F32 frequencies and positions, as the reference computes them.

use super::spec::{GrowthSpec, ModelSpec};
use crate::formats::{RopeConfig, RopeScaling};
use mainstem_kernels::DynamicNtk;
use std::f64::consts::TAU;

/// Returns the frequencies of the `dims / 2` rotated pairs in radians per position. `reserved`, the reserved
/// sequence length in tokens, selects the frequencies where the scaling depends on the length.
pub fn frequencies(config: &RopeConfig, dims: usize, reserved: usize) -> Vec<f32> {
    let scale = frequency_scale(config, dims, reserved);
    (0..dims / 2)
        .map(|pair| {
            let frequency = 1.0 / config.theta.powf(2.0 * pair as f64 / dims as f64);
            (frequency * scale(pair, frequency)) as f32
        })
        .collect()
}

/// Returns the upper bounds of the reserved lengths of each table, ascending. The last table is for all
/// longer sequences.
pub fn length_bounds(config: &RopeConfig) -> Vec<usize> {
    match &config.scaling {
        RopeScaling::LongRope { original_context, .. } => vec![*original_context, usize::MAX],
        _ => vec![usize::MAX],
    }
}

/// Classes of reserved lengths: sequences of one class have the same rotations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReservedLengths {
    /// The upper bounds of lengths with a table of their own, ascending; the last table is for all longer
    /// sequences.
    bounds: Vec<usize>,
    /// The length beyond which each length has rotations of its own.
    dynamic_above: Option<usize>,
}

impl ReservedLengths {
    /// Returns the lengths that make a difference for one of the models.
    pub fn of<'a>(models: impl Iterator<Item = &'a ModelSpec> + Clone) -> ReservedLengths {
        let ropes = || models.clone().flat_map(|spec| &spec.decoder).flat_map(|stack| &stack.ropes);
        let mut bounds: Vec<usize> = ropes().flat_map(|rope| length_bounds(&rope.config)).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let stretches = ropes().filter_map(|rope| dynamic_stretch(&rope.config));
        ReservedLengths::new(bounds, stretches.map(|stretch| stretch.context).min())
    }

    /// Creates the classes of lengths up to each of the `bounds`, which ascend, and of each length above
    /// `dynamic_above`.
    pub fn new(bounds: Vec<usize>, dynamic_above: Option<usize>) -> ReservedLengths {
        ReservedLengths { bounds, dynamic_above }
    }

    /// Returns the class of sequences with `reserved` reserved tokens.
    pub fn class_of(&self, reserved: usize) -> usize {
        match self.dynamic_above {
            Some(context) if reserved > context => self.bounds.len() + reserved,
            _ => self.bounds.partition_point(|bound| *bound < reserved),
        }
    }
}

/// Returns how the base changes beyond some sequence length, for dynamic scaling.
pub fn dynamic_stretch(config: &RopeConfig) -> Option<DynamicNtk> {
    match config.scaling {
        RopeScaling::Dynamic { factor, context } => Some(DynamicNtk { theta: config.theta, factor, context }),
        _ => None,
    }
}

/// Returns cosine and sine of each position and pair: F32, `(positions, dims / 2, 2)`, little-endian.
pub fn table(config: &RopeConfig, dims: usize, positions: usize, reserved: usize) -> Vec<u8> {
    let frequencies = frequencies(config, dims, reserved);
    let factor = match config.scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor,
        RopeScaling::LongRope { original_context, attention_factors: [short, long], .. } => {
            if reserved > original_context { long } else { short }
        }
        _ => 1.0,
    };
    let mut bytes = Vec::with_capacity(table_bytes(dims, positions));
    for position in 0..positions {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            bytes.extend_from_slice(&((angle.cos() * factor) as f32).to_le_bytes());
            bytes.extend_from_slice(&((angle.sin() * factor) as f32).to_le_bytes());
        }
    }
    bytes
}

/// Returns the table that multiplies by the growth of each position instead of rotating, in the form of
/// [`table`].
pub fn growth_table(growth: GrowthSpec, dims: usize, positions: usize) -> Vec<u8> {
    let GrowthSpec { factor, interval } = growth;
    let pairs = (0..positions).flat_map(|position| {
        let size = ((position as f32 + 1.0) / interval).floor().ln_1p() * factor + 1.0;
        std::iter::repeat_n([size, 0.0], dims / 2)
    });
    pairs.flatten().flat_map(f32::to_le_bytes).collect()
}

/// Returns the size of [`table`] in bytes.
pub fn table_bytes(dims: usize, positions: usize) -> usize {
    positions * (dims / 2) * 2 * size_of::<f32>()
}

/// Returns the factor of each pair's frequency, as a function of the pair's index and the frequency.
fn frequency_scale(config: &RopeConfig, dims: usize, reserved: usize) -> Box<dyn Fn(usize, f64) -> f64 + '_> {
    match &config.scaling {
        // A stretched base does not change the table.
        RopeScaling::None | RopeScaling::Dynamic { .. } => Box::new(|_, _| 1.0),
        RopeScaling::Stretched { alpha } => {
            Box::new(move |pair, _| alpha.powf(-2.0 * pair as f64 / (dims as f64 - 2.0).max(1.0)))
        }
        RopeScaling::Factors(factors) => Box::new(|pair, _| 1.0 / factors[pair]),
        RopeScaling::Linear { factor } => Box::new(move |_, _| 1.0 / factor),
        RopeScaling::LongRope { short, long, original_context, .. } => {
            let factors = if reserved > *original_context { long } else { short };
            Box::new(|pair, _| 1.0 / factors[pair])
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            Box::new(move |_, frequency| {
                // Number of full turns of a pair within the original context: with many turns the frequency
                // is kept, with few it is divided by the factor, between them it is interpolated.
                let rotations = *original_context as f64 * frequency / TAU;
                let kept = match high_freq_factor - low_freq_factor {
                    0.0 => f64::from(u8::from(rotations >= *low_freq_factor)),
                    range => (rotations - low_freq_factor) / range,
                };
                blend_scale(kept, *factor)
            })
        }
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            // The pair that makes so many turns within the original context.
            let pair_of = |rotations: f64| {
                dims as f64 * (*original_context as f64 / (rotations * TAU)).ln() / (2.0 * config.theta.ln())
            };
            let (mut low, mut high) = (pair_of(*beta_fast), pair_of(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            Box::new(move |pair, _| blend_scale(1.0 - (pair as f64 - low) / (high - low), *factor))
        }
    }
}

/// Returns the factor of a frequency of which the fraction `kept`, clamped to 0..1, is unscaled and the rest
/// is divided by `factor`.
fn blend_scale(kept: f64, factor: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    kept + (1.0 - kept) / factor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta: 10000.0, scaling }
    }

    #[test]
    fn plain_frequencies_fall_geometrically_from_one() {
        let plain = frequencies(&config(RopeScaling::None), 8, 0);
        assert_eq!(plain[0], 1.0);
        assert!((plain[1] - 0.1).abs() < 1e-7 && (plain[3] - 0.001).abs() < 1e-9);
        let slowed = frequencies(&config(RopeScaling::Linear { factor: 4.0 }), 8, 0);
        assert!((slowed[1] - 0.025).abs() < 1e-8);
    }

    #[test]
    fn llama3_keeps_fast_pairs_and_slows_slow_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        };
        let (plain, scaled) =
            (frequencies(&config(RopeScaling::None), 16, 0), frequencies(&config(scaling), 16, 0));
        assert_eq!(scaled[0], plain[0]); // 10 turns
        assert!((scaled[7] * 8.0 - plain[7]).abs() < 1e-9); // 0.003 turns
        assert!(scaled[1] < plain[1] && scaled[1] > plain[1] / 8.0); // 3.2 turns: between
    }

    /// Without a range between the factors, a pair is kept or slowed as a whole.
    #[test]
    fn equal_factors_of_llama3_make_a_step() {
        let scaling = RopeScaling::Llama3 {
            factor: 16.0,
            low_freq_factor: 1.0,
            high_freq_factor: 1.0,
            original_context: 64,
        };
        let (plain, scaled) =
            (frequencies(&config(RopeScaling::None), 16, 0), frequencies(&config(scaling), 16, 0));
        let kept = plain.iter().zip(&scaled).map(|(plain, scaled)| (plain == scaled, plain / scaled));
        for (pair, (is_kept, ratio)) in kept.enumerate() {
            // The third pair makes 1.02 turns, the fourth 0.3.
            assert!(if pair < 3 { is_kept } else { (ratio - 16.0).abs() < 1e-3 }, "pair {pair}: {ratio}");
        }
    }

    #[test]
    fn reserved_lengths_are_of_one_class_where_they_share_a_table() {
        let classes = |bounds: &[usize], dynamic_above, lengths: &[usize]| {
            let all = ReservedLengths::new(bounds.to_vec(), dynamic_above);
            lengths.iter().map(|length| all.class_of(*length)).collect::<Vec<_>>()
        };
        assert_eq!(classes(&[usize::MAX], None, &[1, 500, 100_000]), [0, 0, 0]);
        assert_eq!(classes(&[64, usize::MAX], None, &[1, 64, 65, 900]), [0, 0, 1, 1]);
        let dynamic = classes(&[usize::MAX], Some(64), &[1, 64, 65, 66, 65]);
        assert!(dynamic[0] == dynamic[1] && dynamic[2] == dynamic[4]);
        assert!(dynamic[1] != dynamic[2] && dynamic[2] != dynamic[3]);
    }

    #[test]
    fn growth_is_constant_within_an_interval_and_turns_nothing() {
        let bytes = growth_table(GrowthSpec { factor: 0.5, interval: 3.0 }, 4, 6);
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(values.len() * 4, table_bytes(4, 6));
        let sizes: Vec<f32> = values.chunks_exact(4).map(|row| row[0]).collect();
        assert!(values.chunks_exact(4).all(|row| row[0] == row[2] && row[1] == 0.0 && row[3] == 0.0));
        let [two, three] = [2f32, 3.0].map(|number| 1.0 + 0.5 * number.ln());
        let wanted = [1.0, 1.0, two, two, two, three];
        assert!(sizes.iter().zip(wanted).all(|(size, wanted)| (size - wanted).abs() < 1e-6), "{sizes:?}");
    }

    #[test]
    fn table_holds_the_unit_circle() {
        let bytes = table(&config(RopeScaling::None), 4, 3, 0);
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(values.len(), 3 * 2 * 2);
        assert_eq!(&values[..4], [1.0, 0.0, 1.0, 0.0]);
        assert!((values[8] - 2f32.cos()).abs() < 1e-7 && (values[9] - 2f32.sin()).abs() < 1e-7);
        assert!((values[10] - 0.02f32.cos()).abs() < 1e-7);
    }
}
