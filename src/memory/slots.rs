//! The slot map of a lane: which sequence holds which slot, and the window of slots that a step computes.
//!
//! The changes of an iteration come in this order: finished sequences leave, new ones join (in holes first,
//! which saves moves), and [`SlotMap::compact`] closes the remaining holes. With the shuffle on, the window
//! then has no holes; with it off, holes remain until a new sequence takes them or an edge of the window
//! passes them. Each lane has a map of its part of the device's slots.
//! Invariant: a key holds one slot, and a slot one key. Everything else (window, holes, number of occupied
//! slots) is derived from the slots and not stored.

use super::shuffle;
use mainstem_kernels::SlotMove;
use mainstem_kernels::batch::Slot;
use std::ops::Range;

/// Splits the slots `0..slots` into `runs` contiguous ranges whose lengths differ by at most one; the longer
/// ones come first.
pub fn split_slots(slots: usize, runs: usize) -> impl Iterator<Item = Range<Slot>> {
    let (len, longer) = (slots / runs, slots % runs);
    (0..runs).map(move |run| {
        let first = run * len + run.min(longer);
        first as Slot..(first + len + usize::from(run < longer)) as Slot
    })
}

/// A range of slots, numbered as on the device, and their holders. Every method is O(slots) and does not
/// allocate.
#[derive(Clone, Debug)]
pub struct SlotMap<K> {
    /// The lowest slot.
    first: Slot,
    /// Holder of each slot, from `first` on.
    holders: Vec<Option<K>>,
    shuffle: bool,
    /// Input of the shuffle; valid during `compact` only.
    occupied: Vec<bool>,
}

impl<K: Copy + Eq> SlotMap<K> {
    /// Creates a map of free slots. `shuffle` enables the moves of [`SlotMap::compact`].
    pub fn new(slots: Range<Slot>, shuffle: bool) -> SlotMap<K> {
        let len = slots.len();
        SlotMap { first: slots.start, holders: vec![None; len], shuffle, occupied: Vec::with_capacity(len) }
    }

    /// Assigns `key` a slot: the lowest hole of the window, else the slot above it, else the slot below it.
    /// `None` when all slots are occupied.
    pub fn join(&mut self, key: K) -> Option<Slot> {
        assert!(self.slot_of(key).is_none(), "a key joins once");
        let window = self.window();
        let above = (window.end < self.end()).then_some(window.end);
        let below = (window.start > self.first).then(|| window.start - 1);
        let slot = self.holes().next().or(above).or(below)?;
        let at = self.index_of(slot);
        self.holders[at] = Some(key);
        Some(slot)
    }

    /// Frees an occupied slot, and returns its holder.
    pub fn leave(&mut self, slot: Slot) -> K {
        let at = self.index_of(slot);
        self.holders[at].take().expect("only a taken slot is freed; anything else is a bug")
    }

    /// Closes the holes of the window with the fewest moves, and appends these to `moves`. Does nothing with
    /// the shuffle off.
    pub fn compact(&mut self, moves: &mut Vec<SlotMove>) {
        if !self.shuffle {
            return;
        }
        self.occupied.clear();
        self.occupied.extend(self.holders.iter().map(Option::is_some));
        let first = moves.len();
        shuffle::append_moves(&self.occupied, &shuffle::best_window(&self.occupied), moves);
        for m in &mut moves[first..] {
            self.holders[m.to as usize] = self.holders[m.from as usize].take();
            // The shuffle numbers slots from the lowest one.
            *m = SlotMove { from: self.first + m.from, to: self.first + m.to };
        }
        assert_eq!(self.window().len(), self.occupied_slots(), "a compacted window has no holes");
    }

    /// Returns the range from the lowest to the highest occupied slot; empty, at the first slot, if none is
    /// occupied.
    pub fn window(&self) -> Range<Slot> {
        let low = self.holders.iter().position(Option::is_some);
        let high = self.holders.iter().rposition(Option::is_some);
        let (low, high) = low.zip(high).map_or((0, 0), |(low, high)| (low as Slot, high as Slot + 1));
        self.first + low..self.first + high
    }

    /// Returns the free slots of the window, ascending.
    pub fn holes(&self) -> impl Iterator<Item = Slot> + '_ {
        self.window().filter(|&slot| self.get(slot).is_none())
    }

    /// Returns the slot's holder.
    pub fn get(&self, slot: Slot) -> Option<K> {
        self.holders.get(slot.checked_sub(self.first)? as usize).copied().flatten()
    }

    /// Returns the key's slot.
    pub fn slot_of(&self, key: K) -> Option<Slot> {
        self.iter().find(|&(_, holder)| holder == key).map(|(slot, _)| slot)
    }

    /// Returns the number of occupied slots.
    pub fn occupied_slots(&self) -> usize {
        self.iter().count()
    }

    /// Returns the occupied slots and their holders, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, K)> + '_ {
        (self.first..).zip(&self.holders).filter_map(|(slot, holder)| Some((slot, (*holder)?)))
    }

    /// One past the highest slot.
    fn end(&self) -> Slot {
        self.first + self.holders.len() as Slot
    }

    /// Returns the index of a slot in `holders`.
    fn index_of(&self, slot: Slot) -> usize {
        (slot - self.first) as usize
    }

    /// Asserts that the map is consistent.
    pub fn check(&self) {
        let window = self.window();
        assert_eq!(window.len(), self.occupied_slots() + self.holes().count());
        for (slot, key) in self.iter() {
            assert!(window.contains(&slot));
            assert_eq!(self.slot_of(key), Some(slot), "a key holds one slot");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dice::Dice;
    use super::*;

    fn filled(slots: usize, shuffle: bool) -> SlotMap<char> {
        let mut map = SlotMap::new(0..slots as Slot, shuffle);
        for (slot, key) in ('a'..).take(slots).enumerate() {
            assert_eq!(map.join(key), Some(slot as Slot));
        }
        map
    }

    fn holders(map: &SlotMap<char>) -> String {
        (0..map.holders.len() as Slot).map(|slot| map.get(slot).unwrap_or('.')).collect()
    }

    #[test]
    fn a_full_map_refuses() {
        let mut map = filled(3, true);
        assert_eq!(map.join('x'), None);
        assert_eq!(SlotMap::<char>::new(0..0, true).join('x'), None);
        assert_eq!(holders(&map), "abc");
    }

    #[test]
    fn joins_take_holes_then_the_high_edge_then_the_low_edge() {
        let mut map = filled(7, false);
        for slot in [0, 1, 3, 6] {
            map.leave(slot);
        }
        assert_eq!((holders(&map).as_str(), map.window()), ("..c.ef.", 2..6));
        assert_eq!(map.holes().collect::<Vec<_>>(), [3]);
        let slots: Vec<_> = ('u'..='y').map(|key| map.join(key)).collect();
        assert_eq!(slots, [Some(3), Some(6), Some(1), Some(0), None]);
    }

    #[test]
    fn compaction_moves_holders_and_reports_it() {
        let mut map = filled(8, true);
        assert_eq!((map.leave(2), map.leave(5)), ('c', 'f'));
        // The existing content of the list is kept and not applied.
        let before = SlotMove { from: 0, to: 7 };
        let mut moves = vec![before];
        map.compact(&mut moves);
        assert_eq!(moves, [before, SlotMove { from: 6, to: 2 }, SlotMove { from: 7, to: 5 }]);
        assert_eq!(holders(&map), "abgdeh..");
        assert_eq!((map.slot_of('h'), map.slot_of('c')), (Some(5), None));
    }

    #[test]
    fn without_the_shuffle_holes_stay_until_an_edge_passes_them() {
        let mut map = filled(5, false);
        let mut moves = Vec::new();
        map.leave(1);
        map.leave(3);
        map.compact(&mut moves);
        assert_eq!((holders(&map).as_str(), moves.len(), map.window()), ("a.c.e", 0, 0..5));
        map.leave(0);
        assert_eq!((map.window(), map.occupied_slots()), (2..5, 2));
        map.leave(2);
        map.leave(4);
        assert_eq!((map.window(), map.occupied_slots()), (0..0, 0));
    }

    #[test]
    fn split_slots_are_contiguous_and_even() {
        for slots in 0..20 {
            for runs in 1..8 {
                let divided: Vec<_> = split_slots(slots, runs).collect();
                assert_eq!(
                    divided.iter().cloned().flatten().collect::<Vec<_>>(),
                    (0..slots as Slot).collect::<Vec<_>>()
                );
                let lens: Vec<usize> = divided.iter().map(|run| run.len()).collect();
                let (most, minimum) = (lens.iter().max().unwrap(), lens.iter().min().unwrap());
                assert!(
                    lens.len() == runs && most - minimum <= 1 && lens.is_sorted_by(|a, b| a >= b),
                    "{lens:?}"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "joins once")]
    fn a_key_does_not_join_twice() {
        let mut map = filled(2, true);
        map.leave(1);
        map.join('a');
    }

    #[test]
    #[should_panic(expected = "taken slot")]
    fn a_free_slot_is_not_left() {
        let mut map = filled(2, true);
        map.leave(1);
        map.leave(1);
    }

    /// Returns the slot that a joining key must get: a hole, the high edge, or the low edge.
    fn expected_slot(model: &[Option<u64>]) -> Option<usize> {
        let taken: Vec<usize> = (0..model.len()).filter(|&slot| model[slot].is_some()).collect();
        let (Some(&low), Some(&high)) = (taken.first(), taken.last()) else {
            return (!model.is_empty()).then_some(0);
        };
        let hole = (low..high).find(|slot| !taken.contains(slot));
        let edges = [Some(high + 1).filter(|&slot| slot < model.len()), low.checked_sub(1)];
        hole.or(edges.into_iter().flatten().next())
    }

    /// First slot of the maps that are compared with a list, so that a map with an offset is tested.
    const FIRST: Slot = 7;

    fn assert_agree(map: &SlotMap<u64>, model: &[Option<u64>]) {
        map.check();
        let taken: Vec<(Slot, u64)> = (FIRST..).zip(model).filter_map(|(s, k)| Some((s, (*k)?))).collect();
        assert_eq!(map.iter().collect::<Vec<_>>(), taken);
        assert_eq!(map.occupied_slots(), taken.len());
        let window = match taken.as_slice() {
            [] => FIRST..FIRST,
            [only] => only.0..only.0 + 1,
            [first, .., last] => first.0..last.0 + 1,
        };
        assert_eq!(map.window(), window);
        let free = |slot: &Slot| model[(slot - FIRST) as usize].is_none();
        assert!(map.holes().eq(window.filter(free)));
        for (slot, key) in taken {
            assert_eq!((map.get(slot), map.slot_of(key)), (Some(key), Some(slot)));
        }
    }

    /// Whether new keys join before or after the compaction; the map must be right in both cases.
    #[derive(Clone, Copy, PartialEq)]
    enum JoinOrder {
        BeforeCompact,
        AfterCompact,
    }

    /// A slot map and a plain list of holders, which must agree.
    struct CheckedMap {
        map: SlotMap<u64>,
        model: Vec<Option<u64>>,
        dice: Dice,
        next_key: u64,
        moved: usize,
    }

    impl CheckedMap {
        fn leave(&mut self) {
            for (slot, holder) in (FIRST..).zip(&mut self.model) {
                if holder.is_some() && self.dice.below(4) == 0 {
                    assert_eq!(Some(self.map.leave(slot)), holder.take());
                }
            }
            assert_agree(&self.map, &self.model);
        }

        fn join(&mut self) {
            for _ in 0..self.dice.below(self.model.len() / 2 + 1) {
                let slot = expected_slot(&self.model);
                assert_eq!(self.map.join(self.next_key), slot.map(|slot| FIRST + slot as Slot));
                if let Some(slot) = slot {
                    self.model[slot] = Some(self.next_key);
                }
                self.next_key += 1;
                assert_agree(&self.map, &self.model);
            }
        }

        fn compact(&mut self) {
            let mut moves = Vec::new();
            self.map.compact(&mut moves);
            for m in &moves {
                let [from, to] = [m.from, m.to].map(|slot| (slot - FIRST) as usize);
                assert!(self.model[to].is_none());
                self.model[to] = self.model[from].take();
            }
            self.moved += moves.len();
            assert_agree(&self.map, &self.model);
        }
    }

    /// Random iterations; with the shuffle on, no hole remains at the end of each.
    fn run_iterations(seed: u32, slots: usize, shuffle: bool, joins: JoinOrder) {
        let map = SlotMap::new(FIRST..FIRST + slots as Slot, shuffle);
        let mut pair =
            CheckedMap { map, model: vec![None; slots], dice: Dice::new(seed), next_key: 0, moved: 0 };
        for _ in 0..300 {
            pair.leave();
            match joins {
                JoinOrder::BeforeCompact => {
                    pair.join();
                    pair.compact();
                }
                JoinOrder::AfterCompact => {
                    pair.compact();
                    pair.join();
                }
            }
            assert!(!shuffle || pair.map.window().len() == pair.map.occupied_slots());
        }
        assert!(pair.next_key > 0);
        assert_eq!(pair.moved > 0, shuffle && slots > 2);
    }

    #[test]
    fn random_iterations_agree_with_a_plain_list() {
        for (seed, slots) in [(1, 2), (2, 3), (3, 8), (4, 17), (5, 32)] {
            for joins in [JoinOrder::BeforeCompact, JoinOrder::AfterCompact] {
                run_iterations(seed, slots, true, joins);
                run_iterations(seed, slots, false, joins);
            }
        }
    }
}
