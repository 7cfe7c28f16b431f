//! The table of rotary positions: angles from theta and scaling, cosines and sines for every position.
//!
//! Su et al., "RoFormer" (section 3.4.2); scaling as Llama's checkpoints define it.
//! Invariant: angles are products of F32 frequencies and positions, as the reference computes them.

use crate::formats::{RopeConfig, RopeScaling};
use std::f64::consts::TAU;

/// Frequencies of the rotated pairs, in radians per position: `dims / 2` of them.
pub fn frequencies(config: &RopeConfig, dims: usize) -> Vec<f32> {
    (0..dims / 2)
        .map(|pair| {
            let frequency = 1.0 / config.theta.powf(2.0 * pair as f64 / dims as f64);
            scaled(&config.scaling, frequency) as f32
        })
        .collect()
}

/// Cosine and sine for each position and pair: F32, `(positions, dims / 2, 2)`, little-endian.
pub fn table(config: &RopeConfig, dims: usize, positions: usize) -> Vec<u8> {
    let frequencies = frequencies(config, dims);
    let mut bytes = Vec::with_capacity(table_bytes(dims, positions));
    for position in 0..positions {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            bytes.extend_from_slice(&(angle.cos() as f32).to_le_bytes());
            bytes.extend_from_slice(&(angle.sin() as f32).to_le_bytes());
        }
    }
    bytes
}

/// Bytes of [`table`].
pub fn table_bytes(dims: usize, positions: usize) -> usize {
    positions * (dims / 2) * 2 * size_of::<f32>()
}

fn scaled(scaling: &RopeScaling, frequency: f64) -> f64 {
    match *scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            // Turns a pair makes within the original context: many keep their frequency, few are
            // slowed by the factor, those between are blended.
            let turns = original_context as f64 * frequency / TAU;
            if turns > high_freq_factor {
                frequency
            } else if turns < low_freq_factor {
                frequency / factor
            } else {
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                frequency * (kept + (1.0 - kept) / factor)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta: 10000.0, scaling }
    }

    #[test]
    fn plain_frequencies_fall_geometrically_from_one() {
        let plain = frequencies(&config(RopeScaling::None), 8);
        assert_eq!(plain[0], 1.0);
        assert!((plain[1] - 0.1).abs() < 1e-7 && (plain[3] - 0.001).abs() < 1e-9);
        let slowed = frequencies(&config(RopeScaling::Linear { factor: 4.0 }), 8);
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
            (frequencies(&config(RopeScaling::None), 16), frequencies(&config(scaling), 16));
        assert_eq!(scaled[0], plain[0]); // 10 turns
        assert!((scaled[7] * 8.0 - plain[7]).abs() < 1e-9); // 0.003 turns
        assert!(scaled[1] < plain[1] && scaled[1] > plain[1] / 8.0); // 3.2 turns: between
    }

    #[test]
    fn table_holds_the_unit_circle() {
        let bytes = table(&config(RopeScaling::None), 4, 3);
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(values.len(), 3 * 2 * 2);
        assert_eq!(&values[..4], [1.0, 0.0, 1.0, 0.0]);
        assert!((values[8] - 2f32.cos()).abs() < 1e-7 && (values[9] - 2f32.sin()).abs() < 1e-7);
        assert!((values[10] - 0.02f32.cos()).abs() < 1e-7);
    }
}
