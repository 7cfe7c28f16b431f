//! The sliding-window shuffle: makes occupied slots contiguous with the fewest moves.
//!
//! Algorithm 3 of Yao et al., "Flover: A Temporal Fusion Framework for Efficient Autoregressive Model
//! Parallel Inference", section V-D. As printed there, the algorithm scores windows from offset 1 on only and
//! so moves slots that may stay; here the window at offset 0 is scored first.
//! Invariant: every move goes from outside the window into a hole inside it, so the moves of one shuffle are
//! independent of each other and of their order.

use mainstem_kernels::SlotMove;
use mainstem_kernels::batch::Slot;
use std::ops::Range;

/// The range of slots that a shuffle makes contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First slot.
    pub offset: usize,
    /// Number of slots; equals the number of occupied slots.
    pub len: usize,
    /// Number of occupied slots outside the window, which is the number of moves.
    pub moves: usize,
}

impl Window {
    /// Returns the window as a range of slot indices.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Returns the window that needs the fewest moves; of several, the one at the lowest offset. O(slots).
pub fn best_window(occupied: &[bool]) -> Window {
    let len = count_occupied(occupied);
    let mut inside = count_occupied(&occupied[..len]);
    let mut best = Window { offset: 0, len, moves: len - inside };
    for end in len..occupied.len() {
        // The window steps from `end - len..end` to `end - len + 1..end + 1`.
        inside = inside + usize::from(occupied[end]) - usize::from(occupied[end - len]);
        if len - inside < best.moves {
            best = Window { offset: end - len + 1, len, moves: len - inside };
        }
    }
    best
}

/// Appends the moves that fill the holes of `window`, both ascending: the first occupied slot outside goes to
/// the first hole inside. `window` must be computed from the same `occupied`. O(slots).
pub fn append_moves(occupied: &[bool], window: &Window, into: &mut Vec<SlotMove>) {
    let inside = window.range();
    let holes = inside.clone().filter(|&slot| !occupied[slot]);
    let movers = (0..inside.start).chain(inside.end..occupied.len()).filter(|&slot| occupied[slot]);
    into.extend(movers.zip(holes).map(|(from, to)| SlotMove { from: from as Slot, to: to as Slot }));
}

fn count_occupied(occupied: &[bool]) -> usize {
    occupied.iter().filter(|&&slot| slot).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A move as (from, to).
    type Move = (Slot, Slot);

    fn shuffle(occupied: &[bool]) -> (Window, Vec<Move>) {
        let window = best_window(occupied);
        let mut list = Vec::new();
        append_moves(occupied, &window, &mut list);
        (window, list.iter().map(|m| (m.from, m.to)).collect())
    }

    #[test]
    fn worked_examples() {
        let cases: [(&str, usize, &[Move]); 10] = [
            ("11011011", 0, &[(6, 2), (7, 5)]),
            ("11000", 0, &[]),
            ("011011", 1, &[(5, 3)]),
            ("10101010", 0, &[(4, 1), (6, 3)]),
            ("1000111", 3, &[(0, 3)]),
            ("001110", 2, &[]),
            ("1111011011", 0, &[(8, 4), (9, 7)]),
            ("100110111001", 2, &[(0, 2), (11, 5)]),
            ("1111", 0, &[]),
            ("0000", 0, &[]),
        ];
        for (text, offset, expected) in cases {
            let occupied: Vec<bool> = text.bytes().map(|c| c == b'1').collect();
            let (window, moves) = shuffle(&occupied);
            assert_eq!((window.offset, moves.as_slice()), (offset, expected), "{text}");
        }
    }

    /// Returns the first offset with the fewest occupied slots outside, counting each offset from scratch.
    fn brute_force(occupied: &[bool]) -> Window {
        let len = occupied.iter().filter(|&&slot| slot).count();
        (0..=occupied.len() - len)
            .map(|offset| {
                let outside = |&slot: &usize| occupied[slot] && !(offset..offset + len).contains(&slot);
                Window { offset, len, moves: (0..occupied.len()).filter(outside).count() }
            })
            .min_by_key(|window| (window.moves, window.offset))
            .expect("offset 0 is always there")
    }

    fn ascending(mut slots: impl Iterator<Item = Slot>) -> bool {
        let mut last = None;
        slots.all(|slot| last.replace(slot).is_none_or(|before| before < slot))
    }

    #[test]
    fn every_occupancy_of_up_to_twelve_slots() {
        for slots in 0..=12 {
            for bits in 0..1u32 << slots {
                let occupied: Vec<bool> = (0..slots).map(|slot| bits >> slot & 1 == 1).collect();
                let (window, moves) = shuffle(&occupied);
                assert_eq!(window, brute_force(&occupied), "{occupied:?}");
                assert_eq!(moves.len(), window.moves);
                assert!(ascending(moves.iter().map(|m| m.0)) && ascending(moves.iter().map(|m| m.1)));

                let mut after = occupied.clone();
                for &(from, to) in &moves {
                    // No other move has the same source or target, so the order of the moves does not matter.
                    assert!(occupied[from as usize] && !occupied[to as usize], "{occupied:?}");
                    after[from as usize] = false;
                    after[to as usize] = true;
                }
                assert!((0..slots).all(|slot| after[slot] == window.range().contains(&slot)), "{occupied:?}");
            }
        }
    }

    #[test]
    fn moves_are_appended() {
        let kept = SlotMove { from: 9, to: 8 };
        let mut list = vec![kept];
        let occupied = [true, false, true];
        append_moves(&occupied, &best_window(&occupied), &mut list);
        assert_eq!(list, [kept, SlotMove { from: 2, to: 1 }]);
    }
}
