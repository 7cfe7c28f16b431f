//! The best evenly spaced numbers for a block's own, by weighted least squares: where they begin and how far they are apart.
//!
//! From some first grids around the block's range: round to codes; solve for the base and the scale that suit those codes
//! best, a system of two equations; take what the block can hold of them; and again. The least error wins, as the bytes
//! give it back.
//! Invariant: base and scale are held as bytes before an error counts.

use super::affine::Affine;
use super::search::{halved, inverse};
use super::{blocks, group, put_half};
use half::f16;

/// `base + code * scale`, for codes from 0 to a highest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    pub base: f32,
    pub scale: f32,
}

/// A format's block as the search sees it.
pub(super) trait Grid {
    /// The largest code.
    const HIGHEST: u8;
    /// The code that stands for zero, where blocks hold no base.
    const ZERO: Option<u8> = None;
    /// How far base and scale lie from their neighbours, where that is so far that neighbours are worth a try.
    const COARSE: Option<Line> = None;

    /// What a block holds that should have these.
    fn held(line: Line) -> Line;

    /// Writes a block.
    fn write(line: Line, codes: &[u8], block: &mut [u8]);
}

/// Numbers of the longest block.
const LONGEST: usize = 64;

/// Numbers that are summed side by side.
const LANES: usize = 8;

/// How many steps more than it has codes for each first grid divides the range into.
const STARTS: [f32; 7] = [-0.6, 0.0, 0.4, 0.8, 1.2, 1.6, 2.2];

/// Rounds from each first grid, and from the best of what came of them.
const ROUNDS: usize = 2;
const LAST_ROUNDS: usize = 4;

/// Writes the block that loses least of the values, each square times its weight. They are finite and not all the same.
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
    let mut codes = [0; LONGEST];
    let inverse = inverse(line.scale);
    for (to, value) in codes.iter_mut().zip(values) {
        *to = code(*value, line, inverse, f32::from(G::HIGHEST)) as u8;
    }
    G::write(line, &codes[..values.len()], block);
}

/// Grids around the range of the values.
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
        // The number of the largest magnitude becomes code 0, which lies the furthest from zero.
        Some(zero) => {
            let scale = extreme / -(f32::from(zero) + more - 1.0);
            Line { base: -f32::from(zero) * scale, scale }
        }
    })
}

/// The code whose number is nearest, ties to even.
fn code(value: f32, line: Line, inverse: f32, highest: f32) -> f32 {
    /// Added to a number below 2^22 it leaves no room for a fraction.
    const WHOLE: f32 = 12_582_912.0;
    ((value - line.base) * inverse).max(0.0).min(highest) + WHOLE - WHOLE
}

/// The best grid so far, and what it loses.
#[derive(Default)]
struct Best {
    line: Option<Line>,
    error: f32,
}

impl Best {
    /// Tries a grid, then what suits its codes best, so many times.
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

    /// Tries the grids around the best.
    fn look_around<G: Grid>(&mut self, run: &Run, step: Line) {
        let Some(line) = self.line else { return };
        for (across, along) in (-2i8..=2).flat_map(|across| (-2i8..=2).map(move |along| (across, along))) {
            let base = line.base + f32::from(across) * step.base;
            let scale = line.scale + f32::from(along) * step.scale;
            self.weigh::<G>(run, G::held(Line { base, scale }));
        }
    }

    fn weigh<G: Grid>(&mut self, run: &Run, line: Line) -> Sums {
        let sums = run.sums(line, f32::from(G::HIGHEST));
        // What a block cannot hold has an error that is no number.
        if sums.error.is_finite() && (self.line.is_none() || sums.error < self.error) {
            (self.line, self.error) = (Some(line), sums.error);
        }
        sums
    }
}

/// Numbers with their weights.
struct Run<'a> {
    values: &'a [[f32; LANES]],
    weights: &'a [[f32; LANES]],
    /// Sums of the weights, and of the weighted numbers.
    w: f32,
    wx: f32,
}

/// What a grid's codes add up to.
struct Sums {
    wc: f32,
    wcc: f32,
    wcx: f32,
    /// Weighted squares of what is lost.
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
                let code = code(value, line, inverse, highest);
                let off = value - (line.base + code * line.scale);
                sums[0][lane] += weight * code;
                sums[1][lane] += weight * code * code;
                sums[2][lane] += weight * code * value;
                sums[3][lane] += weight * off * off;
            }
        }
        let [wc, wcc, wcx, error] = sums.map(|lanes| lanes.iter().sum());
        Sums { wc, wcc, wcx, error }
    }
}

impl Sums {
    /// The grid that suits these codes best, as far as a block can hold it. `None` where all codes are the same, or where it
    /// would not be a grid.
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
        // The base that suits the scale as it is held.
        let scale = G::held(Line { base: 0.0, scale }).scale;
        let base = match G::ZERO {
            None => (run.wx - scale * wc) / run.w,
            Some(zero) => -f32::from(zero) * scale,
        };
        let line = G::held(Line { base, scale });
        (line.base.is_finite() && line.scale.is_finite() && line.scale != 0.0).then_some(line)
    }
}

impl<T: Affine> Grid for T {
    const HIGHEST: u8 = if T::CENTRES { T::STEPS - 1.0 } else { T::STEPS } as u8;
    const COARSE: Option<Line> = T::COARSE;

    fn held(line: Line) -> Line {
        let mut head = [0; 4];
        T::put_head(line.base, line.scale, &mut head[..T::HEAD]);
        let (base, scale) = T::head(&head[..T::HEAD]);
        Line { base, scale }
    }

    fn write(line: Line, codes: &[u8], block: &mut [u8]) {
        let (head, packed) = block.split_at_mut(T::HEAD);
        T::put_head(line.base, line.scale, head);
        T::pack(codes, packed);
    }
}

/// FlexGen's: the block holds one over the scale.
pub(super) struct G4B64;

impl G4B64 {
    /// As large as F16 holds.
    fn multiplier(line: Line) -> f32 {
        (1.0 / line.scale).min(f16::MAX.to_f32())
    }
}

impl Grid for G4B64 {
    const HIGHEST: u8 = 15;

    fn held(line: Line) -> Line {
        Line { base: halved(line.base), scale: 1.0 / halved(G4B64::multiplier(line)) }
    }

    fn write(line: Line, codes: &[u8], block: &mut [u8]) {
        let mut head = [0; 4];
        put_half(&mut head, 0, G4B64::multiplier(line));
        put_half(&mut head, 2, line.base);
        group::join(codes, &head, block);
    }
}

/// ggml's of a scale and a least number.
pub(super) struct Least<const HIGHEST: u8>;

impl<const HIGHEST: u8> Grid for Least<HIGHEST> {
    const HIGHEST: u8 = HIGHEST;

    fn held(line: Line) -> Line {
        Line { base: halved(line.base), scale: halved(line.scale) }
    }

    fn write(line: Line, codes: &[u8], block: &mut [u8]) {
        put_half(block, 0, line.scale);
        put_half(block, 2, line.base);
        blocks::put_codes(HIGHEST, codes, &mut block[4..]);
    }
}

/// ggml's of a scale alone.
pub(super) struct Centred<const HIGHEST: u8, const ZERO: u8>;

impl<const HIGHEST: u8, const ZERO: u8> Grid for Centred<HIGHEST, ZERO> {
    const HIGHEST: u8 = HIGHEST;
    const ZERO: Option<u8> = Some(ZERO);

    fn held(line: Line) -> Line {
        let scale = halved(line.scale);
        Line { base: -f32::from(ZERO) * scale, scale }
    }

    fn write(line: Line, codes: &[u8], block: &mut [u8]) {
        put_half(block, 0, line.scale);
        blocks::put_codes(HIGHEST, codes, &mut block[2..]);
    }
}
