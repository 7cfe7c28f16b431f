//! A warp: registers as planes, and its lanes in groups that are at the same place.
//!
//! The group that runs is the one deepest in calls, and among those the one at the lowest instruction, so
//! that lanes meet again where their paths join. Groups at the same place are merged.

use super::Random;
use crate::arith::Plane;
use crate::program::{POOL, Predicate, Source, Target, Width};

/// The place that a function returns to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) pc: u32,
    pub(super) place: Place,
}

/// A function's frame: where its registers, predicates and local memory begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Place {
    pub(super) function: u32,
    pub(super) planes: u32,
    pub(super) predicates: u32,
    pub(super) local: u32,
}

/// The reason why a group does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Wait {
    #[default]
    No,
    /// Waits at an exchange for other lanes to come to the same instruction.
    Meet,
    /// Waits at a barrier of these lanes.
    Lanes(u32),
    /// Waits at the barrier of the CTA with this number.
    Barrier(u32),
}

/// Lanes at the same place.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    pub(super) pc: u32,
    pub(super) mask: u32,
    pub(super) place: Place,
    pub(super) stack: Vec<Frame>,
    pub(super) wait: Wait,
    /// Whether the group passes the next exchange without the others, since they do not come.
    pub(super) forced: bool,
}

/// An asynchronous copy of one lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) lane: u32,
    /// Number of its group among the lane's.
    pub(super) group: u32,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: u32,
    pub(super) source_bytes: u32,
    pub(super) line: u32,
}

/// A warp.
#[derive(Clone, Debug, Default)]
pub(super) struct Warp {
    pub(super) index: usize,
    pub(super) regs: Vec<Plane>,
    pub(super) predicates: Vec<u32>,
    /// The carry flag of each lane.
    pub(super) carry: u32,
    /// Lanes that have not exited.
    pub(super) live: u32,
    /// The group that runs; its mask is 0 if none does.
    pub(super) now: Group,
    pub(super) others: Vec<Group>,
    /// The lowest instruction of another group that could run, at which it must be chosen again.
    pub(super) limit: u32,
    /// Words of local memory, those of the 32 lanes side by side.
    pub(super) local: Vec<Plane>,
    /// For each word and lane, a bit for each byte that was written.
    pub(super) local_written: Vec<[u8; 32]>,
    pub(super) copies: Vec<Copy>,
    /// Groups of copies that each lane has committed.
    pub(super) committed: [u32; 32],
    /// Whether the warp waits at a barrier of the CTA.
    pub(super) blocked: bool,
}

impl Warp {
    /// The register plane of a source.
    #[inline(always)]
    pub(super) fn plane<'a>(&'a self, pool: &'a [Plane], plane: u32) -> &'a Plane {
        if plane & POOL != 0 {
            &pool[(plane & !POOL) as usize]
        } else {
            &self.regs[(self.now.place.planes + plane) as usize]
        }
    }

    /// The values of a source as 64 bits.
    #[inline]
    pub(super) fn wide(&self, pool: &[Plane], source: Source) -> [u64; 32] {
        let mut values = [0; 32];
        self.wide_to(pool, source, &mut values);
        values
    }

    /// As [`Warp::wide`], written in place.
    #[inline(always)]
    pub(super) fn wide_to(&self, pool: &[Plane], source: Source, to: &mut [u64; 32]) {
        let low = self.plane(pool, source.plane);
        if !source.wide {
            to.iter_mut().zip(low).for_each(|(to, low)| *to = u64::from(*low));
            return;
        }
        let high = self.plane(pool, source.plane + 1);
        for (to, (low, high)) in to.iter_mut().zip(low.iter().zip(high)) {
            *to = u64::from(*low) | u64::from(*high) << 32;
        }
    }

    /// Writes a plane where `mask` says so.
    #[inline(always)]
    pub(super) fn put(&mut self, plane: u32, mask: u32, values: &Plane) {
        let to = &mut self.regs[(self.now.place.planes + plane) as usize];
        if mask == u32::MAX {
            *to = *values;
            return;
        }
        for lane in 0..32 {
            let take = (mask >> lane & 1).wrapping_neg();
            to[lane] = (values[lane] & take) | (to[lane] & !take);
        }
    }

    /// Writes values to a register, cut to its width.
    #[inline]
    pub(super) fn put_wide(&mut self, target: Target, mask: u32, values: &[u64; 32]) {
        let keep = if target.width == Width::W16 { 0xffff } else { u32::MAX };
        let low: Plane = std::array::from_fn(|lane| values[lane] as u32 & keep);
        self.put(target.plane, mask, &low);
        if target.width == Width::W64 {
            let high: Plane = std::array::from_fn(|lane| (values[lane] >> 32) as u32);
            self.put(target.plane + 1, mask, &high);
        }
    }

    /// A value of one lane to a register.
    pub(super) fn put_lane(&mut self, target: Target, lane: usize, value: u64) {
        let at = (self.now.place.planes + target.plane) as usize;
        self.regs[at][lane] = value as u32 & if target.width == Width::W16 { 0xffff } else { u32::MAX };
        if target.width == Width::W64 {
            self.regs[at + 1][lane] = (value >> 32) as u32;
        }
    }

    /// The lanes for which a predicate holds.
    #[inline(always)]
    pub(super) fn holds(&self, predicate: Predicate) -> u32 {
        let bits = self.predicates[(self.now.place.predicates + predicate.index) as usize];
        if predicate.negated { !bits } else { bits }
    }

    /// Writes a predicate where `mask` says so.
    #[inline(always)]
    pub(super) fn set_predicate(&mut self, index: u32, mask: u32, bits: u32) {
        let to = &mut self.predicates[(self.now.place.predicates + index) as usize];
        *to = (bits & mask) | (*to & !mask);
    }

    /// Sends the lanes in `taken` to `target`; the others go on.
    #[inline]
    pub(super) fn branch(&mut self, taken: u32, target: u32) {
        let rest = self.now.mask & !taken;
        if taken == 0 {
            return;
        }
        if rest != 0 {
            let mut other = self.now.clone();
            other.mask = rest;
            self.others.push(other);
            self.now.mask = taken;
        }
        self.now.pc = target;
        if !self.others.is_empty() {
            self.choose(None);
        }
    }

    /// Removes lanes from the group that runs.
    pub(super) fn drop_lanes(&mut self, lanes: u32) {
        self.live &= !lanes;
        self.now.mask &= !lanes;
        // Who waits for lanes that have exited tries again: exchanges are among those that have not.
        let mut woken = false;
        for group in self.others.iter_mut().filter(|group| group.wait == Wait::Meet) {
            group.wait = Wait::No;
            woken = true;
        }
        if woken || self.now.mask == 0 {
            self.choose(None);
        }
    }

    /// Lets the group wait, and chooses another.
    pub(super) fn suspend(&mut self, wait: Wait) {
        self.now.wait = wait;
        self.choose(None);
    }

    /// Chooses the group that runs: the deepest and lowest one, or a random one. None runs if all wait.
    pub(super) fn choose(&mut self, random: Option<&mut Random>) {
        let now = std::mem::take(&mut self.now);
        if now.mask != 0 {
            self.others.push(now);
        }
        self.merge();
        let ready = |group: &Group| group.wait == Wait::No;
        let rank = |group: &Group| (std::cmp::Reverse(group.stack.len()), group.pc);
        let count = self.others.iter().filter(|it| ready(it)).count();
        let best = match random {
            Some(random) if count > 1 => {
                let nth = random.below(count);
                self.others.iter().enumerate().filter(|(_, it)| ready(it)).map(|(at, _)| at).nth(nth)
            }
            _ => (0..self.others.len())
                .filter(|at| ready(&self.others[*at]))
                .min_by_key(|at| rank(&self.others[*at])),
        };
        let Some(best) = best else {
            self.limit = u32::MAX;
            return;
        };
        self.now = self.others.swap_remove(best);
        let depth = self.now.stack.len();
        let rivals = self.others.iter().filter(|it| ready(it) && it.stack.len() >= depth);
        self.limit = rivals.map(|it| it.pc).filter(|pc| *pc > self.now.pc).min().unwrap_or(u32::MAX);
        // Waiting lanes are joined at their place as well.
        let meeting = self.others.iter().filter(|it| it.wait == Wait::Meet && it.stack == self.now.stack);
        self.limit =
            meeting.map(|it| it.pc).filter(|pc| *pc > self.now.pc).min().unwrap_or(u32::MAX).min(self.limit);
    }

    /// Joins groups at the same place. Lanes that wait to meet others try again once they have.
    fn merge(&mut self) {
        let mut at = 0;
        while at < self.others.len() {
            let mut next = at + 1;
            while next < self.others.len() {
                let (a, b) = (&self.others[at], &self.others[next]);
                let passive = |wait| matches!(wait, Wait::Lanes(_) | Wait::Barrier(_));
                let joins = a.wait == b.wait || !(passive(a.wait) || passive(b.wait));
                if a.pc == b.pc && joins && a.place == b.place && a.stack == b.stack {
                    let other = self.others.swap_remove(next);
                    let group = &mut self.others[at];
                    group.mask |= other.mask;
                    group.forced |= other.forced;
                    if group.wait == Wait::Meet || other.wait == Wait::Meet {
                        group.wait = Wait::No;
                    }
                } else {
                    next += 1;
                }
            }
            at += 1;
        }
    }
}
