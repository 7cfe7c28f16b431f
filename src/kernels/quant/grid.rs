//! Weighted least-squares search for the best evenly spaced levels of a block: their minimum and their scale.
//!
//! For several initial grids around the range of the block: round to quants; solve for the minimum and the
//! scale that fit these quants best, a system of two equations; round the solution to what the block can
//! store; repeat. The smallest error wins.
//!
//! Invariant: errors are computed with the minimum and the scale as the block stores them.

use super::affine::AffineFormat;
use super::search::{halved, inverse};
use super::{blocks, group, put_half};
use half::f16;

/// Evenly spaced levels `base + quant * scale`, for quants from 0 to a maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    /// Level of quant 0.
    pub base: f32,
    /// Spacing of the levels.
    pub scale: f32,
}

/// The properties of a block format that the search needs.
pub(super) trait Grid {
    /// The largest quant.
    const HIGHEST: u8;
    /// The quant that represents zero, if blocks store no minimum.
    const ZERO: Option<u8> = None;
    /// Spacing of the representable minima and scales, if it is so coarse that the search also tries
    /// neighbors.
    const COARSE: Option<Line> = None;

    /// Rounds a minimum and a scale to what a block stores.
    fn held(line: Line) -> Line;

    /// Writes a block.
    fn write(line: Line, quants: &[u8], block: &mut [u8]);
}

/// Elements of the longest block.
const LONGEST: usize = 64;

/// Elements that are summed in parallel.
const LANES: usize = 8;

/// Initial grids: each divides the range into this many steps more than the largest quant.
const STARTS: [f32; 7] = [-0.6, 0.0, 0.4, 0.8, 1.2, 1.6, 2.2];

/// Refinement rounds from each initial grid, and from the best result of these.
const ROUNDS: usize = 2;
const LAST_ROUNDS: usize = 4;

/// Writes the block with the smallest weighted squared error. The values are finite and not all equal.
pub(super) fn search<G: Grid>(values: &[f32], weights: &[f32], block: &mut [u8]) {
    let run = Run::new(values, weights);
    let mut best = Best::default();
    for start in starts::<G>(values) {
        best.descend::<G>(&run, start, ROUNDS);
    }
    let Some(line) = best.line else { return };
    best.descend::<G>(&run, line, LAST_ROUNDS);
    if let Some(step) = G::COARSE {
        best.look_around::<G>(&run, step);
    }
    let line = best.line.unwrap_or(line);
    let mut quants = [0; LONGEST];
    let inverse = inverse(line.scale);
    for (to, value) in quants.iter_mut().zip(values) {
        *to = code(*value, line, inverse, f32::from(G::HIGHEST)) as u8;
    }
    G::write(line, &quants[..values.len()], block);
}

/// Returns initial grids around the range of the values.
fn starts<G: Grid>(values: &[f32]) -> impl Iterator<Item = Line> {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let highest = f32::from(G::HIGHEST);
    let extreme = if -low > high { low } else { high };
    STARTS.into_iter().map(move |more| match G::ZERO {
        None => {
            let scale = (high - low) / (highest + more);
            Line { base: (low + high - scale * highest) / 2.0, scale }
        }
        // The element with the largest magnitude becomes quant 0, which is furthest from zero.
        Some(zero) => {
            let scale = extreme / -(f32::from(zero) + more - 1.0);
            Line { base: -f32::from(zero) * scale, scale }
        }
    })
}

/// Returns the quant of the nearest level, ties to even.
fn code(value: f32, line: Line, inverse: f32, highest: f32) -> f32 {
    /// Rounding constant: added to a number below 2^22, it leaves no bits for a fraction.
    const WHOLE: f32 = 12_582_912.0;
    ((value - line.base) * inverse).max(0.0).min(highest) + WHOLE - WHOLE
}

/// The best grid so far, and its error.
#[derive(Default)]
struct Best {
    line: Option<Line>,
    error: f32,
}

impl Best {
    /// Evaluates a grid, then refines it up to `rounds` times.
    fn descend<G: Grid>(&mut self, run: &Run, start: Line, rounds: usize) {
        let mut line = G::held(start);
        for _ in 0..=rounds {
            let sums = self.weigh::<G>(run, line);
            let Some(next) = sums.solved::<G>(run) else { return };
            if next == line {
                return;
            }
            line = next;
        }
    }

    /// Evaluates the neighbors of the best grid.
    fn look_around<G: Grid>(&mut self, run: &Run, step: Line) {
        let Some(line) = self.line else { return };
        for (across, along) in (-2i8..=2).flat_map(|across| (-2i8..=2).map(move |along| (across, along))) {
            let base = line.base + f32::from(across) * step.base;
            let scale = line.scale + f32::from(along) * step.scale;
            self.weigh::<G>(run, G::held(Line { base, scale }));
        }
    }

    /// Evaluates a grid and keeps it if it is the best.
    fn weigh<G: Grid>(&mut self, run: &Run, line: Line) -> Sums {
        let sums = run.sums(line, f32::from(G::HIGHEST));
        // The error is not finite if the block cannot store the grid.
        if sums.error.is_finite() && (self.line.is_none() || sums.error < self.error) {
            (self.line, self.error) = (Some(line), sums.error);
        }
        sums
    }
}

/// The elements of a block with their weights.
struct Run<'a> {
    values: &'a [[f32; LANES]],
    weights: &'a [[f32; LANES]],
    /// Sum of the weights, and weighted sum of the elements.
    w: f32,
    wx: f32,
}

/// Weighted sums for the quants of a grid.
struct Sums {
    wc: f32,
    wcc: f32,
    wcx: f32,
    /// Weighted squared error.
    error: f32,
}

impl<'a> Run<'a> {
    fn new(values: &'a [f32], weights: &'a [f32]) -> Run<'a> {
        let wx = values.iter().zip(weights).map(|(value, weight)| value * weight).sum();
        Run { values: values.as_chunks().0, weights: weights.as_chunks().0, w: weights.iter().sum(), wx }
    }

    fn sums(&self, line: Line, highest: f32) -> Sums {
        let inverse = inverse(line.scale);
        let mut sums = [[0f32; LANES]; 4];
        for (values, weights) in self.values.iter().zip(self.weights) {
            for lane in 0..LANES {
                let (value, weight) = (values[lane], weights[lane]);
                let quant = code(value, line, inverse, highest);
                let off = value - (line.base + quant * line.scale);
                sums[0][lane] += weight * quant;
                sums[1][lane] += weight * quant * quant;
                sums[2][lane] += weight * quant * value;
                sums[3][lane] += weight * off * off;
            }
        }
        let [wc, wcc, wcx, error] = sums.map(|lanes| lanes.iter().sum());
        Sums { wc, wcc, wcx, error }
    }
}

impl Sums {
    /// Solves for the grid that best fits these quants, rounded to what a block stores. Returns `None` if all
    /// quants are equal or the result is not a valid grid.
    fn solved<G: Grid>(&self, run: &Run) -> Option<Line> {
        let Sums { wc, wcc, wcx, .. } = *self;
        let (scale, determinant) = match G::ZERO.map(f32::from) {
            None => (run.w * wcx - wc * run.wx, run.w * wcc - wc * wc),
            Some(zero) => (wcx - zero * run.wx, wcc - 2.0 * zero * wc + zero * zero * run.w),
        };
        let scale = scale / determinant;
        if determinant <= 0.0 || !scale.is_finite() || G::ZERO.is_none() && scale <= 0.0 {
            return None;
        }
        // The minimum that fits the rounded scale.
        let scale = G::held(Line { base: 0.0, scale }).scale;
        let base = match G::ZERO {
            None => (run.wx - scale * wc) / run.w,
            Some(zero) => -f32::from(zero) * scale,
        };
        let line = G::held(Line { base, scale });
        (line.base.is_finite() && line.scale.is_finite() && line.scale != 0.0).then_some(line)
    }
}

impl<T: AffineFormat> Grid for T {
    const HIGHEST: u8 = if T::BIN_CENTERS { T::STEPS - 1.0 } else { T::STEPS } as u8;
    const COARSE: Option<Line> = T::PARAM_STEP;

    fn held(line: Line) -> Line {
        let mut params = [0; 4];
        T::write_params(line.base, line.scale, &mut params[..T::PARAM_BYTES]);
        let (base, scale) = T::read_params(&params[..T::PARAM_BYTES]);
        Line { base, scale }
    }

    fn write(line: Line, quants: &[u8], block: &mut [u8]) {
        let (params, packed) = block.split_at_mut(T::PARAM_BYTES);
        T::write_params(line.base, line.scale, params);
        T::pack(quants, packed);
    }
}

/// The grid of FlexGen's format, whose blocks store the reciprocal of the scale.
pub(super) struct G4B64;

impl G4B64 {
    /// Returns the reciprocal of the scale, limited to the largest F16.
    fn multiplier(line: Line) -> f32 {
        (1.0 / line.scale).min(f16::MAX.to_f32())
    }
}

impl Grid for G4B64 {
    const HIGHEST: u8 = 15;

    fn held(line: Line) -> Line {
        Line { base: halved(line.base), scale: 1.0 / halved(G4B64::multiplier(line)) }
    }

    fn write(line: Line, quants: &[u8], block: &mut [u8]) {
        let mut params = [0; 4];
        put_half(&mut params, 0, G4B64::multiplier(line));
        put_half(&mut params, 2, line.base);
        group::join(quants, &params, block);
    }
}

/// The grid of ggml's formats with scale and minimum.
pub(super) struct Least<const HIGHEST: u8>;

impl<const HIGHEST: u8> Grid for Least<HIGHEST> {
    const HIGHEST: u8 = HIGHEST;

    fn held(line: Line) -> Line {
        Line { base: halved(line.base), scale: halved(line.scale) }
    }

    fn write(line: Line, quants: &[u8], block: &mut [u8]) {
        put_half(block, 0, line.scale);
        put_half(block, 2, line.base);
        blocks::put_codes(HIGHEST, quants, &mut block[4..]);
    }
}

/// The grid of ggml's formats with a scale alone.
pub(super) struct Centred<const HIGHEST: u8, const ZERO: u8>;

impl<const HIGHEST: u8, const ZERO: u8> Grid for Centred<HIGHEST, ZERO> {
    const HIGHEST: u8 = HIGHEST;
    const ZERO: Option<u8> = Some(ZERO);

    fn held(line: Line) -> Line {
        let scale = halved(line.scale);
        Line { base: -f32::from(ZERO) * scale, scale }
    }

    fn write(line: Line, quants: &[u8], block: &mut [u8]) {
        put_half(block, 0, line.scale);
        blocks::put_codes(HIGHEST, quants, &mut block[2..]);
    }
}
