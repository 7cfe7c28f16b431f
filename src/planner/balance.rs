//! Distributes layers to stages, in order, so that the slowest stage is as fast as possible.
//!
//! A pipeline is as fast as its slowest stage. `least[s][n]` is the minimal time of the slowest of s stages
//! that hold the first n layers; the last of these stages holds the layers from some k on, so
//!
//! ```text
//! least[s][n] = min over k of max(least[s - 1][k], time(s, k..n))
//! ```
//!
//! Several splits may reach the minimum; of these, the one with the smallest sum of squared times is chosen,
//! which is the most even.
//!
//! Invariant: every layer is in one stage, every stage has at least one, and none has more than its memory
//! holds.

use std::ops::Range;

/// Returns the number of layers of each stage. `time` returns the time of a stage for a range of layers,
/// infinite if they do not fit. Returns `None` if there are fewer layers than stages, or nothing fits.
pub fn balance_layers(
    layers: usize,
    stages: usize,
    time: impl Fn(usize, Range<usize>) -> f64,
) -> Option<Vec<usize>> {
    let times = StageTimes { layers, stages, time };
    let slowest = times.best_split(f64::INFINITY, f64::max)?.0;
    // Sums differ in their last bits depending on the order of addition.
    let bound = slowest * (1.0 + 1e-9);
    times.best_split(bound, |sum, time| sum + time * time).map(|(_, counts)| counts)
}

struct StageTimes<F> {
    layers: usize,
    stages: usize,
    /// Returns the time of a stage with these layers.
    time: F,
}

impl<F: Fn(usize, Range<usize>) -> f64> StageTimes<F> {
    /// Returns the split that minimizes the times of its stages, combined with `join`, where no stage exceeds
    /// `bound`; with the combined time.
    fn best_split(&self, bound: f64, join: impl Fn(f64, f64) -> f64) -> Option<(f64, Vec<usize>)> {
        let StageTimes { layers, stages, .. } = *self;
        let mut min_times = vec![f64::INFINITY; layers + 1];
        min_times[0] = 0.0;
        let mut begins = Vec::with_capacity(stages);
        for stage in 0..stages {
            let mut next = vec![f64::INFINITY; layers + 1];
            let mut begin = vec![0; layers + 1];
            for end in stage + 1..=layers {
                for (start, before) in min_times.iter().enumerate().take(end).skip(stage) {
                    let time = (self.time)(stage, start..end);
                    let joined = if time <= bound { join(*before, time) } else { f64::INFINITY };
                    if joined < next[end] {
                        (next[end], begin[end]) = (joined, start);
                    }
                }
            }
            min_times = next;
            begins.push(begin);
        }
        min_times[layers].is_finite().then(|| (min_times[layers], layer_counts(&begins, layers)))
    }
}

/// Walks back from the last layer through the first layers of the stages, and returns the layer counts.
fn layer_counts(begins: &[Vec<usize>], layers: usize) -> Vec<usize> {
    let mut counts = Vec::with_capacity(begins.len());
    let mut end = layers;
    for begin in begins.iter().rev() {
        counts.push(end - begin[end]);
        end = begin[end];
    }
    counts.reverse();
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::random::philox;

    /// The cost of a layer.
    #[derive(Clone, Copy, Debug)]
    struct Cost {
        work: f64,
        bytes: f64,
    }

    /// The speed and memory of a stage.
    #[derive(Clone, Copy, Debug)]
    struct StageCapacity {
        speed: f64,
        memory: f64,
    }

    fn balance(layers: &[Cost], stages: &[StageCapacity]) -> Option<Vec<usize>> {
        let time = |stage: usize, own: Range<usize>| {
            let sum = |of: fn(&Cost) -> f64| layers[own.clone()].iter().map(of).sum::<f64>();
            let fits = sum(|layer| layer.bytes) <= stages[stage].memory;
            if fits { sum(|layer| layer.work) / stages[stage].speed } else { f64::INFINITY }
        };
        balance_layers(layers.len(), stages.len(), time)
    }

    fn cost(work: f64) -> Cost {
        Cost { work, bytes: work }
    }

    const UNLIMITED: StageCapacity = StageCapacity { speed: 1.0, memory: f64::INFINITY };

    /// Returns every distribution of `layers` to `stages`.
    fn all_splits(layers: usize, stages: usize) -> Vec<Vec<usize>> {
        if stages == 1 {
            return vec![vec![layers]];
        }
        let with_first = |first: usize| {
            let rest = all_splits(layers - first, stages - 1);
            rest.into_iter().map(move |rest| [vec![first], rest].concat())
        };
        (1..=layers + 1 - stages).flat_map(with_first).collect()
    }

    /// Returns the time of the slowest stage; `None` if a stage holds too much.
    fn slowest(split: &[usize], layers: &[Cost], stages: &[StageCapacity]) -> Option<f64> {
        let (mut at, mut slowest) = (0, 0f64);
        for (count, room) in split.iter().zip(stages) {
            let own = &layers[at..at + count];
            at += count;
            if own.iter().map(|layer| layer.bytes).sum::<f64>() > room.memory {
                return None;
            }
            slowest = slowest.max(own.iter().map(|layer| layer.work).sum::<f64>() / room.speed);
        }
        Some(slowest)
    }

    #[test]
    fn the_slowest_stage_is_as_fast_as_in_the_best_of_all_splits() {
        for case in 0..300u32 {
            let number = |place: u32, below: u32| philox([case, place, 0, 0], [7, 0])[0] % below;
            let layers: Vec<Cost> = (0..1 + number(0, 9))
                .map(|layer| Cost {
                    work: f64::from(1 + number(10 + layer, 8)),
                    bytes: f64::from(number(30 + layer, 9)),
                })
                .collect();
            let stages: Vec<StageCapacity> = (0..1 + number(1, 4))
                .map(|stage| StageCapacity {
                    speed: f64::from(1 + number(50 + stage, 4)),
                    memory: f64::from(number(60 + stage, 60)),
                })
                .collect();
            let found = balance(&layers, &stages);
            let best = match layers.len() >= stages.len() {
                true => all_splits(layers.len(), stages.len())
                    .iter()
                    .filter_map(|split| slowest(split, &layers, &stages))
                    .min_by(f64::total_cmp),
                false => None,
            };
            assert_eq!(found.is_some(), best.is_some(), "{layers:?} on {stages:?}: {found:?}");
            if let (Some(found), Some(best)) = (found, best) {
                assert_eq!(found.iter().sum::<usize>(), layers.len());
                assert!(found.len() == stages.len() && found.iter().all(|count| *count > 0), "{found:?}");
                let time = slowest(&found, &layers, &stages).expect("it fits");
                assert!(time <= best * (1.0 + 1e-9), "{found:?} takes {time}, but {best} is possible");
            }
        }
    }

    #[test]
    fn of_equal_splits_the_most_even_is_taken() {
        let layers = vec![cost(1.0); 10];
        assert_eq!(balance(&layers, &[UNLIMITED; 4]).map(|counts| counts.iter().sum()), Some(10));
        assert_eq!(balance(&layers, &[UNLIMITED; 2]), Some(vec![5, 5]));
        // The head makes the last stage take 6 in any case; the others are split evenly all the same.
        let mut headed = layers.clone();
        headed[9] = cost(6.0);
        assert_eq!(balance(&headed, &[UNLIMITED; 4]), Some(vec![3, 3, 3, 1]));
    }

    #[test]
    fn speed_and_memory_decide() {
        let layers = vec![cost(1.0); 9];
        let fast = StageCapacity { speed: 2.0, ..UNLIMITED };
        assert_eq!(balance(&layers, &[fast, UNLIMITED]), Some(vec![6, 3]));
        let small = StageCapacity { memory: 4.0, ..fast };
        assert_eq!(balance(&layers, &[small, UNLIMITED]), Some(vec![4, 5]));
        assert_eq!(balance(&layers, &[small, small]), None);
        assert_eq!(balance(&layers[..1], &[UNLIMITED, UNLIMITED]), None);
    }
}
