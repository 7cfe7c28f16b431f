//! Barriers of lanes and of warps, and fences.

use super::access::lanes;
use super::cta::{BARRIERS, BarrierState};
use super::launch::Engine;
use super::run::thread;
use super::warp::{Wait, Warp};
use crate::findings::Kind;
use crate::program::{Barrier, BarrierKind, Op, Source};

impl Warp {
    /// Lets the lanes of `mask` be a group of their own; the others go on.
    pub(super) fn isolate(&mut self, mask: u32) {
        let rest = self.now.mask & !mask;
        if rest != 0 {
            let mut other = self.now.clone();
            other.mask = rest;
            self.others.push(other);
            self.now.mask = mask;
        }
    }
}

impl Engine<'_> {
    /// `fence` and `membar`.
    pub(super) fn fence(&mut self, warp: &Warp, wide: bool) {
        if let Some(clock) = &mut self.cta.clock {
            clock.fence(warp.index, wide, &mut self.epochs);
        }
    }

    /// `bar.warp.sync`: waits for the lanes that it names, at whichever instruction they are.
    pub(super) fn warp_barrier(&mut self, warp: &mut Warp, named: Source, mask: u32, line: u32) {
        let masks = *warp.plane(&self.program.pool, named.plane);
        self.check_named(warp, &masks, mask, line);
        let named = masks[mask.trailing_zeros() as usize & 31];
        if lanes(mask).any(|lane| masks[lane as usize] != named) {
            // Lanes that name different ones wait apart.
            let same =
                lanes(mask).filter(|lane| masks[*lane as usize] == named).fold(0, |all, it| all | 1 << it);
            let mut other = warp.now.clone();
            other.mask = mask & !same;
            other.pc -= 1;
            warp.now.mask &= !other.mask;
            warp.others.push(other);
            return self.wait_for_lanes(warp, named, same);
        }
        self.wait_for_lanes(warp, named, mask);
    }

    fn wait_for_lanes(&mut self, warp: &mut Warp, named: u32, mask: u32) {
        if mask & warp.live == named & warp.live && warp.now.mask == mask {
            self.order_lanes(warp, named);
            return;
        }
        warp.isolate(mask);
        warp.suspend(Wait::Lanes(named));
        self.retry_lane_barriers(warp);
    }

    fn order_lanes(&mut self, warp: &Warp, named: u32) {
        if let Some(clock) = &mut self.cta.clock {
            clock.warp_barrier(warp.index, named, warp.live, &mut self.epochs);
        }
    }

    /// Releases barriers of lanes that all who live have reached.
    pub(super) fn retry_lane_barriers(&mut self, warp: &mut Warp) {
        let waiting: Vec<u32> = warp.others.iter().filter_map(|it| lane_barrier(it.wait)).collect();
        for named in waiting {
            let at = |wait| lane_barrier(wait) == Some(named);
            let there = warp.others.iter().filter(|it| at(it.wait)).fold(0, |all, it| all | it.mask);
            if there == 0 || named & warp.live & !there != 0 {
                continue;
            }
            warp.others.iter_mut().filter(|it| at(it.wait)).for_each(|it| it.wait = Wait::No);
            self.order_lanes(warp, named);
            warp.choose(None);
        }
    }

    /// Checks that lanes are among those that they name.
    pub(super) fn check_named(&mut self, warp: &Warp, masks: &[u32; 32], mask: u32, line: u32) {
        let strangers = lanes(mask).filter(|lane| masks[*lane as usize] >> lane & 1 == 0);
        let strangers = strangers.fold(0, |all, lane| all | 1 << lane);
        if strangers != 0 {
            let what = format!("lanes {strangers:#x} take part and are not in the mask that they give");
            self.note(Kind::Divergence, line, thread(warp, strangers), 0, what);
        }
    }

    /// The lanes that each lane names in an exchange, if all of them are here; else the group waits.
    pub(super) fn meet(&mut self, warp: &mut Warp, named: Source, mask: u32, line: u32) -> Option<[u32; 32]> {
        let masks = *warp.plane(&self.program.pool, named.plane);
        let needed = lanes(mask).fold(0, |all, lane| all | masks[lane as usize]) & warp.live;
        if needed & !mask == 0 || warp.now.forced {
            warp.now.forced = false;
            self.check_named(warp, &masks, mask, line);
            return Some(masks);
        }
        warp.isolate(mask);
        warp.now.pc -= 1;
        warp.suspend(Wait::Meet);
        None
    }

    /// All groups of a warp wait, some of them for lanes that will not come.
    pub(super) fn break_deadlock(&mut self, warp: &mut Warp) {
        let lane_wait = |wait| matches!(wait, Wait::Meet | Wait::Lanes(_));
        let stuck = warp.others.iter().enumerate().filter(|(_, it)| lane_wait(it.wait));
        let Some((at, _)) = stuck.min_by_key(|(_, it)| it.pc) else { return };
        let group = &mut warp.others[at];
        let pc = if group.wait == Wait::Meet { group.pc } else { group.pc - 1 };
        let (mask, line) = (group.mask, self.program.code[pc as usize].line);
        group.forced = group.wait == Wait::Meet;
        group.wait = Wait::No;
        let missing = warp.live & !mask;
        let what =
            format!("lanes {mask:#x} wait for others, of which {missing:#x} are elsewhere and do not come");
        self.note(Kind::Divergence, line, thread(warp, mask), 0, what);
        warp.choose(None);
    }

    /// `barrier` in all its forms.
    pub(super) fn barrier(&mut self, warp: &mut Warp, barrier: &Barrier, mask: u32, line: u32) {
        let lane = mask.trailing_zeros() as usize & 31;
        let id = warp.plane(&self.program.pool, barrier.id.plane)[lane];
        if id as usize >= BARRIERS {
            self.note(Kind::Barrier, line, thread(warp, mask), 0, format!("there is no barrier {id}"));
            self.fatal = true;
            return;
        }
        if barrier.kind == BarrierKind::Arrive {
            if mask != warp.live {
                let what = format!("lanes {:#x} of the warp do not arrive", warp.live & !mask);
                self.note(Kind::Barrier, line, thread(warp, mask), 0, what);
            }
            self.count_in(warp, barrier, id, lane, line);
            return;
        }
        warp.isolate(mask);
        warp.suspend(Wait::Barrier(id));
    }

    /// The state of a barrier, with this warp's arrival.
    fn count_in(
        &mut self,
        warp: &Warp,
        barrier: &Barrier,
        id: u32,
        lane: usize,
        line: u32,
    ) -> &mut BarrierState {
        let expected = barrier.count.map(|count| warp.plane(&self.program.pool, count.plane)[lane]);
        if expected.is_some_and(|count| count == 0 || count % 32 != 0) {
            let what = format!("{} threads; a count is a multiple of 32", expected.unwrap_or(0));
            self.note(Kind::Barrier, line, warp.index as u32 * 32, 0, what);
        }
        if let Some(other) = &self.cta.barriers[id as usize]
            && other.expected != expected
        {
            let what = format!("{expected:?} threads; others wait at barrier {id} for {:?}", other.expected);
            self.note(Kind::Barrier, line, warp.index as u32 * 32, 0, what);
        }
        let state = self.cta.barriers[id as usize].get_or_insert_with(|| BarrierState {
            expected,
            all: true,
            ..BarrierState::default()
        });
        state.arrived += 32;
        if let Some(clock) = &mut self.cta.clock {
            clock.arrive(warp.index, &mut state.clock, &mut self.epochs);
        }
        state
    }

    /// All groups of the warp wait at barriers of the CTA: the warp arrives. Gives false, because it cannot
    /// go on.
    pub(super) fn arrive(&mut self, warp: &mut Warp) -> bool {
        let program = self.program;
        let id = warp.others.iter().find_map(|it| cta_barrier(it.wait)).unwrap_or(0);
        let (first, line) = (warp.others[0].mask, program.code[warp.others[0].pc as usize - 1].line);
        let Op::Barrier(barrier) = &program.code[warp.others[0].pc as usize - 1].op else { return false };
        let elsewhere = warp.others.iter().any(|it| cta_barrier(it.wait) != Some(id));
        if elsewhere || (barrier.aligned && warp.others.len() > 1) {
            let what = format!("lanes {first:#x} reach it, and the others of the warp another one");
            self.note(Kind::Barrier, line, thread(warp, first), 0, what);
        }
        let mut inputs = (0, 0);
        for at in 0..warp.others.len() {
            if let Op::Barrier(it) = &program.code[warp.others[at].pc as usize - 1].op
                && let Some(input) = it.input
            {
                std::mem::swap(&mut warp.now, &mut warp.others[at]);
                inputs.0 |= warp.holds(input) & warp.now.mask;
                inputs.1 |= warp.now.mask;
                std::mem::swap(&mut warp.now, &mut warp.others[at]);
            }
        }
        let lane = warp.others[0].mask.trailing_zeros() as usize & 31;
        std::mem::swap(&mut warp.now.place, &mut warp.others[0].place);
        let index = warp.index;
        let state = self.count_in(warp, barrier, id, lane, line);
        state.warps |= 1 << index;
        state.count += u32::count_ones(inputs.0);
        state.all &= inputs.0 == inputs.1;
        state.any |= inputs.0 != 0;
        std::mem::swap(&mut warp.now.place, &mut warp.others[0].place);
        warp.others.iter_mut().for_each(|it| it.wait = Wait::Barrier(id));
        warp.blocked = true;
        false
    }

    /// Releases the barriers that are complete; tells whether there were any.
    pub(super) fn check_barriers(&mut self) -> bool {
        let mut released = false;
        for id in 0..BARRIERS {
            let Some(state) = &self.cta.barriers[id] else { continue };
            let missing = |(at, warp): (usize, &Warp)| warp.live != 0 && state.warps >> at & 1 == 0;
            let complete = match state.expected {
                Some(threads) => state.arrived >= threads,
                None => !self.cta.warps.iter().enumerate().any(missing),
            };
            if complete && let Some(state) = self.cta.barriers[id].take() {
                self.release(id as u32, &state);
                released = true;
            }
        }
        released
    }

    fn release(&mut self, id: u32, state: &BarrierState) {
        let program = self.program;
        for at in (0..self.cta.warps.len()).filter(|at| state.warps >> at & 1 == 1) {
            let warp = &mut self.cta.warps[at];
            for group in 0..warp.others.len() {
                if cta_barrier(warp.others[group].wait) != Some(id) {
                    continue;
                }
                warp.others[group].wait = Wait::No;
                let Op::Barrier(barrier) = &program.code[warp.others[group].pc as usize - 1].op else {
                    continue;
                };
                std::mem::swap(&mut warp.now, &mut warp.others[group]);
                let mask = warp.now.mask;
                if let Some(target) = barrier.target {
                    warp.put_wide(target, mask, &[u64::from(state.count); 32]);
                }
                if let Some(p) = barrier.predicate {
                    let holds = if barrier.kind == BarrierKind::And { state.all } else { state.any };
                    warp.set_predicate(p, mask, u32::from(holds).wrapping_neg());
                }
                std::mem::swap(&mut warp.now, &mut warp.others[group]);
            }
            warp.blocked = false;
            warp.choose(None);
            if let Some(clock) = &mut self.cta.clock {
                clock.leave(at, &state.clock);
            }
        }
    }

    /// No warp can run. Tells whether one can now; else the CTA has ended, or waits for ever.
    pub(super) fn unblock(&mut self) -> bool {
        if self.check_barriers() {
            return true;
        }
        let stuck = self.cta.warps.iter().find(|warp| warp.live != 0);
        if let Some((thread, group)) =
            stuck.and_then(|warp| Some((warp.index as u32 * 32, warp.others.first()?)))
        {
            let line = self.program.code[(group.pc as usize).saturating_sub(1)].line;
            let waiting = self.cta.warps.iter().filter(|warp| warp.live != 0).count();
            let what = format!("{waiting} warps wait for ever; others have exited or wait elsewhere");
            self.note(Kind::Barrier, line, thread, 0, what);
            self.fatal = true;
        }
        false
    }
}

fn lane_barrier(wait: Wait) -> Option<u32> {
    match wait {
        Wait::Lanes(named) => Some(named),
        _ => None,
    }
}

fn cta_barrier(wait: Wait) -> Option<u32> {
    match wait {
        Wait::Barrier(id) => Some(id),
        _ => None,
    }
}
