//! The slots of a pool of experts: which experts are in them, and which one makes room for another.
//!
//! A step uses layers in ascending order, and the chosen experts of a layer in ascending order, once for each
//! row batch. The expert makes room whose next use is expected to be the last: which layers and row batches
//! come before it is known, and how often rows choose it is estimated. If rows choose all experts and some do
//! not fit, the most recently used one makes room, so that the others are still there in the next step; the
//! least recently used one would always be the next to be needed. If few are chosen, those that are chosen
//! often or lately stay.
//!
//! Invariant: an expert is in one slot at most, and none makes room for one that is needed later than itself.

use std::ops::Range;

/// Part of the estimated frequency of an expert that the last pass through its layer makes up.
const LAST_PASS: f64 = 0.125;

/// Least frequency that is estimated.
const RARE: f64 = 1e-4;

/// The contents of a pool's slots. A unit is an expert of a layer; units are numbered in the order of use.
pub(super) struct ExpertSlots {
    /// The units of each layer.
    layers: Vec<Range<usize>>,
    units: Vec<Unit>,
    /// The unit in each slot.
    unit_of: Vec<Option<usize>>,
    /// Sum of the weights of all passes through each layer, of which frequencies are the chosen part.
    weights: Vec<f64>,
    /// The layer of the current pass, and the unit that is used in it.
    layer: usize,
    position: usize,
    /// Passes through this layer so far, one per row batch, and those through the layer before.
    passes: usize,
    passes_before: usize,
}

#[derive(Clone, Copy)]
struct Unit {
    layer: usize,
    slot: Option<usize>,
    /// Weights of the passes in which it was chosen.
    chosen_weight: f64,
    /// Whether it was chosen in the last pass through its layer.
    is_chosen: bool,
}

impl ExpertSlots {
    /// Creates so many empty slots for layers with these numbers of experts.
    pub fn new(slots: usize, experts: &[usize]) -> ExpertSlots {
        let mut end = 0;
        let layers: Vec<_> = experts
            .iter()
            .map(|count| {
                end += count;
                end - count..end
            })
            .collect();
        let unit = |layer| Unit { layer, slot: None, chosen_weight: 0.0, is_chosen: false };
        let units =
            layers.iter().enumerate().flat_map(|(layer, units)| units.clone().map(move |_| unit(layer)));
        ExpertSlots {
            units: units.collect(),
            unit_of: vec![None; slots],
            weights: vec![0.0; layers.len()],
            layers,
            layer: usize::MAX,
            position: 0,
            passes: 0,
            passes_before: 0,
        }
    }

    /// Returns the first unit of a layer.
    pub fn first(&self, layer: usize) -> usize {
        self.layers[layer].start
    }

    /// Begins a pass through a layer, in which some rows choose these of its experts.
    pub fn begin_pass(&mut self, layer: usize, chosen: &[u32]) {
        if layer == self.layer {
            self.passes += 1;
        } else {
            (self.layer, self.passes_before, self.passes) = (layer, self.passes, 1);
        }
        let units = &mut self.units[self.layers[layer].clone()];
        let older = |weight: f64| weight * (1.0 - LAST_PASS);
        self.weights[layer] = older(self.weights[layer]) + LAST_PASS;
        for unit in &mut *units {
            (unit.chosen_weight, unit.is_chosen) = (older(unit.chosen_weight), false);
        }
        for index in chosen {
            let unit = &mut units[*index as usize];
            (unit.chosen_weight, unit.is_chosen) = (unit.chosen_weight + LAST_PASS, true);
        }
        self.position = self.layers[layer].start;
    }

    /// Notes that the pass uses a unit, and needs none before it any more.
    pub fn move_to(&mut self, unit: usize) {
        self.position = unit;
    }

    /// Returns the slot of a unit, if it is in one.
    pub fn find(&self, unit: usize) -> Option<usize> {
        self.units[unit].slot
    }

    /// Returns the unit in a slot, if there is one.
    pub fn unit(&self, slot: usize) -> Option<usize> {
        self.unit_of[slot]
    }

    /// Puts a unit that is in no slot into one of those that `is_free` allows: into an empty one, or in place
    /// of the unit that is needed last. `None` if all of them are needed earlier.
    pub fn make_room(&mut self, unit: usize, is_free: impl Fn(usize) -> bool) -> Option<usize> {
        let next_use = |other: &Option<usize>| other.map_or(f64::INFINITY, |other| self.next_use(other));
        let free = self.unit_of.iter().enumerate().filter(|(slot, _)| is_free(*slot));
        let uses = free.map(|(slot, other)| (slot, next_use(other)));
        let (slot, last) = uses.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        if last <= self.next_use(unit) {
            return None;
        }
        self.empty(slot);
        (self.units[unit].slot, self.unit_of[slot]) = (Some(slot), Some(unit));
        Some(slot)
    }

    /// Makes a slot empty.
    pub fn empty(&mut self, slot: usize) {
        if let Some(unit) = self.unit_of[slot].take() {
            self.units[unit].slot = None;
        }
    }

    /// Estimates when a unit is used next, as the number of units that are passed until then.
    fn next_use(&self, number: usize) -> f64 {
        let unit = &self.units[number];
        if unit.layer == self.layer && unit.is_chosen && number >= self.position {
            return (number - self.position) as f64;
        }
        let all = self.units.len() as f64;
        let own = &self.layers[self.layer];
        // As many row batches as in the layer before.
        let more_passes = self.passes_before.saturating_sub(self.passes);
        let ahead = number as f64 - self.position as f64;
        let (first, period) = if unit.layer != self.layer {
            let batches = (more_passes * own.len()) as f64;
            (batches + if ahead < 0.0 { ahead + all } else { ahead }, all)
        } else if more_passes > 0 {
            (ahead + own.len() as f64, own.len() as f64)
        } else {
            (ahead + all, all)
        };
        let frequency = unit.chosen_weight / self.weights[unit.layer].max(LAST_PASS);
        first + period * (1.0 / frequency.max(RARE) - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the hits and uses of steps, each given as the chosen experts of each pass with its layer, with
    /// the slots, or with those that were used last. Checks that each expert is in one slot.
    fn hits(slots: usize, experts: &[usize], passes: &[(usize, Vec<u32>)]) -> [usize; 3] {
        let mut pool = ExpertSlots::new(slots, experts);
        let mut recent: Vec<usize> = Vec::new();
        let (mut of_pool, mut of_recent, mut uses) = (0, 0, 0);
        for (layer, chosen) in passes {
            pool.begin_pass(*layer, chosen);
            for index in chosen {
                let unit = pool.first(*layer) + *index as usize;
                pool.move_to(unit);
                of_pool += usize::from(pool.find(unit).is_some());
                uses += 1;
                if pool.find(unit).is_none() {
                    pool.make_room(unit, |_| true).expect("others are needed later");
                }
                let known = recent.iter().position(|other| *other == unit);
                of_recent += usize::from(known.is_some());
                known.map(|at| recent.remove(at));
                recent.push(unit);
                recent.drain(..recent.len().saturating_sub(slots));
            }
            for slot in 0..slots {
                assert!(pool.unit(slot).is_none_or(|unit| pool.find(unit) == Some(slot)));
            }
            let held = (0..pool.units.len()).filter(|unit| pool.find(*unit).is_some()).count();
            assert_eq!(held, (0..slots).filter(|slot| pool.unit(*slot).is_some()).count());
        }
        [of_pool, of_recent, uses]
    }

    /// The part that fits is not read again, in steps of any number of row batches.
    #[test]
    fn experts_that_are_all_chosen_are_read_once_per_step_as_far_as_they_do_not_fit() {
        let (layers, experts, steps) = (6, 8, 40);
        for batches in [1, 3] {
            for slots in [11, 24, 47, 48] {
                let all: Vec<u32> = (0..experts as u32).collect();
                let step = (0..layers).flat_map(|layer| vec![(layer, all.clone()); batches]);
                let passes: Vec<_> = (0..steps).flat_map(|_| step.clone()).collect();
                let [hits, recent, uses] = hits(slots, &[experts; 6], &passes);
                let misses = uses - hits;
                let units = layers * experts;
                // One slot, or the slots of a layer with several row batches, pass from one to the next.
                let kept =
                    if slots == units { units } else { slots - if batches == 1 { 1 } else { experts } };
                let bound = units + (steps - 1) * (units - kept);
                assert!(misses <= bound, "{misses} of {uses}, {slots} slots, {batches} batches: {bound}");
                assert!(hits >= recent, "{slots} slots, {batches} batches");
            }
        }
    }

    /// Few of them are chosen, some more often than others.
    #[test]
    fn experts_that_are_chosen_often_stay() {
        let mut random = 7u64;
        let mut below = |end: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % end
        };
        for (rows, slots) in [(1, 20), (1, 64), (4, 64), (16, 100)] {
            let mut passes = Vec::new();
            for step in 0..300 {
                for layer in 0..4 {
                    // The minimum of three is small, from a place that wanders.
                    let mut choose = || (below(32).min(below(32)).min(below(32)) + step / 40) % 32;
                    let mut chosen: Vec<u32> = (0..2 * rows).map(|_| choose() as u32).collect();
                    chosen.sort_unstable();
                    chosen.dedup();
                    passes.push((layer, chosen));
                }
            }
            let [hits, recent, uses] = hits(slots, &[32; 4], &passes);
            assert!(hits * 20 > recent * 19, "{rows} rows, {slots} slots: {hits}, {recent} of {uses}");
            assert!(hits * 128 > uses * slots, "{rows} rows, {slots} slots: {hits} of {uses} by chance");
        }
    }

    /// An expert that is read ahead does not push out one that is needed before it.
    #[test]
    fn none_makes_room_for_one_that_is_needed_later() {
        let mut slots = ExpertSlots::new(3, &[4, 4]);
        slots.begin_pass(0, &[0, 1, 2, 3]);
        for unit in 0..3 {
            assert!(slots.make_room(unit, |_| true).is_some(), "{unit}");
        }
        assert_eq!(slots.make_room(3, |_| true), None);
        slots.move_to(1);
        let used = slots.find(0).unwrap();
        assert_eq!(slots.make_room(3, |slot| slot != used), None, "the only one that could is in use");
        assert_eq!(slots.make_room(3, |_| true), Some(used));
        assert_eq!([0, 1, 2, 3].map(|unit| slots.find(unit).is_some()), [false, true, true, true]);
        // The next layer needs none of them.
        slots.begin_pass(1, &[2]);
        slots.move_to(6);
        assert!(slots.make_room(6, |_| true).is_some());
        assert_eq!(slots.unit(slots.find(6).unwrap()), Some(6));
    }
}
