//! Weighted least-squares search for the best evenly spaced levels of a block: their minimum and their scale.
//!
//! For several initial grids around the range of the block: round to quants; solve for the minimum and the
//! scale that fit these quants best, a system of two equations; round the solution to what the block can
//! store; repeat. The smallest error wins.
//!
//! Invariant: errors are computed with the minimum and the scale as the block stores them.

use super::affine::{AffineFormat, Levels};
use super::scale_search::{reciprocal, round_to_f16};
use super::{blocks, group, write_f16};
use half::f16;

/// The properties of a block format that the search needs.
pub(super) trait GridFormat {
    /// The largest quant.
    const MAX_QUANT: u8;
    /// The quant that represents zero, if blocks store no minimum.
    const ZERO_QUANT: Option<u8> = None;
    /// Spacing of the representable minima and scales, if it is so coarse that the search also tries
    /// neighbors.
    const NEIGHBOR_STEP: Option<Levels> = None;

    /// Rounds a minimum and a scale to what a block stores.
    fn round_levels(line: Levels) -> Levels;

    /// Writes a block.
    fn write_block(line: Levels, quants: &[u8], block: &mut [u8]);
}

/// Elements of the longest block.
const MAX_BLOCK_LEN: usize = 64;

/// Elements that are summed in parallel.
const LANES: usize = 8;

/// Initial grids: each divides the range into this many steps more than the largest quant.
const START_EXTRA_STEPS: [f32; 7] = [-0.6, 0.0, 0.4, 0.8, 1.2, 1.6, 2.2];

/// Refinement rounds from each initial grid, and from the best result of these.
const ROUNDS: usize = 2;
const LAST_ROUNDS: usize = 4;

/// Writes the block with the smallest weighted squared error. The values are finite and not all equal.
pub(super) fn search_block<G: GridFormat>(values: &[f32], weights: &[f32], block: &mut [u8]) {
    let run = WeightedBlock::new(values, weights);
    let mut best = BestLevels::default();
    for start in initial_levels::<G>(values) {
        best.refine::<G>(&run, start, ROUNDS);
    }
    let Some(line) = best.levels else { return };
    best.refine::<G>(&run, line, LAST_ROUNDS);
    if let Some(step) = G::NEIGHBOR_STEP {
        best.try_neighbors::<G>(&run, step);
    }
    let line = best.levels.unwrap_or(line);
    let mut quants = [0; MAX_BLOCK_LEN];
    let inverse = reciprocal(line.scale);
    for (to, value) in quants.iter_mut().zip(values) {
        *to = nearest_quant(*value, line, inverse, f32::from(G::MAX_QUANT)) as u8;
    }
    G::write_block(line, &quants[..values.len()], block);
}

/// Returns initial grids around the range of the values.
fn initial_levels<G: GridFormat>(values: &[f32]) -> impl Iterator<Item = Levels> {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let highest = f32::from(G::MAX_QUANT);
    let extreme = if -low > high { low } else { high };
    START_EXTRA_STEPS.into_iter().map(move |more| match G::ZERO_QUANT {
        None => {
            let scale = (high - low) / (highest + more);
            Levels { minimum: (low + high - scale * highest) / 2.0, scale }
        }
        // The element with the largest magnitude becomes quant 0, which is furthest from zero.
        Some(zero) => {
            let scale = extreme / -(f32::from(zero) + more - 1.0);
            Levels { minimum: -f32::from(zero) * scale, scale }
        }
    })
}

/// Returns the quant of the nearest level, ties to even.
fn nearest_quant(value: f32, line: Levels, inverse: f32, highest: f32) -> f32 {
    /// Rounding constant: added to a number below 2^22, it leaves no bits for a fraction.
    const WHOLE: f32 = 12_582_912.0;
    ((value - line.minimum) * inverse).max(0.0).min(highest) + WHOLE - WHOLE
}

/// The best grid so far, and its error.
#[derive(Default)]
struct BestLevels {
    levels: Option<Levels>,
    error: f32,
}

impl BestLevels {
    /// Evaluates a grid, then refines it up to `rounds` times.
    fn refine<G: GridFormat>(&mut self, run: &WeightedBlock, start: Levels, rounds: usize) {
        let mut line = G::round_levels(start);
        for _ in 0..=rounds {
            let sums = self.evaluate::<G>(run, line);
            let Some(next) = sums.solve::<G>(run) else { return };
            if next == line {
                return;
            }
            line = next;
        }
    }

    /// Evaluates the neighbors of the best grid.
    fn try_neighbors<G: GridFormat>(&mut self, run: &WeightedBlock, step: Levels) {
        let Some(line) = self.levels else { return };
        for (across, along) in (-2i8..=2).flat_map(|across| (-2i8..=2).map(move |along| (across, along))) {
            let minimum = line.minimum + f32::from(across) * step.minimum;
            let scale = line.scale + f32::from(along) * step.scale;
            self.evaluate::<G>(run, G::round_levels(Levels { minimum, scale }));
        }
    }

    /// Evaluates a grid and keeps it if it is the best.
    fn evaluate<G: GridFormat>(&mut self, run: &WeightedBlock, line: Levels) -> QuantSums {
        let sums = run.sums(line, f32::from(G::MAX_QUANT));
        // The error is not finite if the block cannot store the grid.
        if sums.error.is_finite() && (self.levels.is_none() || sums.error < self.error) {
            (self.levels, self.error) = (Some(line), sums.error);
        }
        sums
    }
}

/// The elements of a block with their weights.
struct WeightedBlock<'a> {
    values: &'a [[f32; LANES]],
    weights: &'a [[f32; LANES]],
    /// Sum of the weights, and weighted sum of the elements.
    w: f32,
    wx: f32,
}

/// Weighted sums for the quants of a grid.
struct QuantSums {
    wc: f32,
    wcc: f32,
    wcx: f32,
    /// Weighted squared error.
    error: f32,
}

impl<'a> WeightedBlock<'a> {
    fn new(values: &'a [f32], weights: &'a [f32]) -> WeightedBlock<'a> {
        let wx = values.iter().zip(weights).map(|(value, weight)| value * weight).sum();
        WeightedBlock {
            values: values.as_chunks().0,
            weights: weights.as_chunks().0,
            w: weights.iter().sum(),
            wx,
        }
    }

    fn sums(&self, line: Levels, highest: f32) -> QuantSums {
        let inverse = reciprocal(line.scale);
        let mut sums = [[0f32; LANES]; 4];
        for (values, weights) in self.values.iter().zip(self.weights) {
            for lane in 0..LANES {
                let (value, weight) = (values[lane], weights[lane]);
                let quant = nearest_quant(value, line, inverse, highest);
                let off = value - (line.minimum + quant * line.scale);
                sums[0][lane] += weight * quant;
                sums[1][lane] += weight * quant * quant;
                sums[2][lane] += weight * quant * value;
                sums[3][lane] += weight * off * off;
            }
        }
        let [wc, wcc, wcx, error] = sums.map(|lanes| lanes.iter().sum());
        QuantSums { wc, wcc, wcx, error }
    }
}

impl QuantSums {
    /// Solves for the grid that best fits these quants, rounded to what a block stores. Returns `None` if all
    /// quants are equal or the result is not a valid grid.
    fn solve<G: GridFormat>(&self, run: &WeightedBlock) -> Option<Levels> {
        let QuantSums { wc, wcc, wcx, .. } = *self;
        let (scale, determinant) = match G::ZERO_QUANT.map(f32::from) {
            None => (run.w * wcx - wc * run.wx, run.w * wcc - wc * wc),
            Some(zero) => (wcx - zero * run.wx, wcc - 2.0 * zero * wc + zero * zero * run.w),
        };
        let scale = scale / determinant;
        if determinant <= 0.0 || !scale.is_finite() || G::ZERO_QUANT.is_none() && scale <= 0.0 {
            return None;
        }
        // The minimum that fits the rounded scale.
        let scale = G::round_levels(Levels { minimum: 0.0, scale }).scale;
        let minimum = match G::ZERO_QUANT {
            None => (run.wx - scale * wc) / run.w,
            Some(zero) => -f32::from(zero) * scale,
        };
        let line = G::round_levels(Levels { minimum, scale });
        (line.minimum.is_finite() && line.scale.is_finite() && line.scale != 0.0).then_some(line)
    }
}

impl<T: AffineFormat> GridFormat for T {
    const MAX_QUANT: u8 = if T::BIN_CENTERS { T::STEPS - 1.0 } else { T::STEPS } as u8;
    const NEIGHBOR_STEP: Option<Levels> = T::PARAM_STEP;

    fn round_levels(line: Levels) -> Levels {
        let mut params = [0; 4];
        T::write_params(line.minimum, line.scale, &mut params[..T::PARAM_BYTES]);
        let (minimum, scale) = T::read_params(&params[..T::PARAM_BYTES]);
        Levels { minimum, scale }
    }

    fn write_block(line: Levels, quants: &[u8], block: &mut [u8]) {
        let (params, packed) = block.split_at_mut(T::PARAM_BYTES);
        T::write_params(line.minimum, line.scale, params);
        T::pack(quants, packed);
    }
}

/// The grid of FlexGen's format, whose blocks store the reciprocal of the scale.
pub(super) struct G4B64;

impl G4B64 {
    /// Returns the reciprocal of the scale, limited to the largest F16.
    fn multiplier(line: Levels) -> f32 {
        (1.0 / line.scale).min(f16::MAX.to_f32())
    }
}

impl GridFormat for G4B64 {
    const MAX_QUANT: u8 = 15;

    fn round_levels(line: Levels) -> Levels {
        Levels { minimum: round_to_f16(line.minimum), scale: 1.0 / round_to_f16(G4B64::multiplier(line)) }
    }

    fn write_block(line: Levels, quants: &[u8], block: &mut [u8]) {
        let mut params = [0; 4];
        write_f16(&mut params, 0, G4B64::multiplier(line));
        write_f16(&mut params, 2, line.minimum);
        group::join(quants, &params, block);
    }
}

/// The grid of ggml's formats with scale and minimum.
pub(super) struct ScaleAndMinimum<const HIGHEST: u8>;

impl<const HIGHEST: u8> GridFormat for ScaleAndMinimum<HIGHEST> {
    const MAX_QUANT: u8 = HIGHEST;

    fn round_levels(line: Levels) -> Levels {
        Levels { minimum: round_to_f16(line.minimum), scale: round_to_f16(line.scale) }
    }

    fn write_block(line: Levels, quants: &[u8], block: &mut [u8]) {
        write_f16(block, 0, line.scale);
        write_f16(block, 2, line.minimum);
        blocks::write_quants(HIGHEST, quants, &mut block[4..]);
    }
}

/// The grid of ggml's formats with a scale alone.
pub(super) struct ScaleOnly<const HIGHEST: u8, const ZERO: u8>;

impl<const HIGHEST: u8, const ZERO: u8> GridFormat for ScaleOnly<HIGHEST, ZERO> {
    const MAX_QUANT: u8 = HIGHEST;
    const ZERO_QUANT: Option<u8> = Some(ZERO);

    fn round_levels(line: Levels) -> Levels {
        let scale = round_to_f16(line.scale);
        Levels { minimum: -f32::from(ZERO) * scale, scale }
    }

    fn write_block(line: Levels, quants: &[u8], block: &mut [u8]) {
        write_f16(block, 0, line.scale);
        blocks::write_quants(HIGHEST, quants, &mut block[2..]);
    }
}
