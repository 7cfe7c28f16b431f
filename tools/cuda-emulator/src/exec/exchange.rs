//! Exchanges between the lanes of a warp (PTX ISA, 9.7.9.6 and 9.7.13).

use super::access::lanes;
use super::launch::Engine;
use super::run::thread;
use super::warp::Warp;
use crate::findings::Kind;
use crate::program::{Inst, Op, Predicate, ReduxOp, Shuffle, ShuffleMode, Source, VoteMode};

impl Engine<'_> {
    /// `shfl.sync`.
    pub(super) fn shuffle(&mut self, warp: &mut Warp, shuffle: &Shuffle, mask: u32, line: u32) {
        let Some(named) = self.meet(warp, shuffle.mask, mask, line) else { return };
        let pool = &self.program.pool;
        let values = warp.plane(pool, shuffle.value.plane);
        let (b, c) = (warp.plane(pool, shuffle.lane.plane), warp.plane(pool, shuffle.clamp.plane));
        let (mut out, mut found, mut silent) = ([0; 32], 0, 0);
        for lane in lanes(mask) {
            let at = lane as usize;
            let (from, inside) = source_lane(shuffle.mode, lane, b[at], c[at]);
            let from = if inside { from } else { lane };
            out[at] = u64::from(values[from as usize]);
            found |= u32::from(inside) << lane;
            silent |= u32::from((mask & named[at]) >> from & 1 == 0) << lane;
        }
        warp.put_wide(shuffle.d, mask, &out);
        if let Some(p) = shuffle.p {
            warp.set_predicate(p, mask, found);
        }
        if silent != 0 {
            let what =
                format!("lanes {silent:#x} read from lanes that do not take part, or that they do not name");
            self.note(Kind::Divergence, line, thread(warp, silent), 0, what);
        }
    }

    /// Votes, matches, reductions and the election of a lane.
    pub(super) fn collective(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let named = match &inst.op {
            Op::Vote { mask, .. }
            | Op::MatchAny { mask, .. }
            | Op::MatchAll { mask, .. }
            | Op::Redux { mask, .. }
            | Op::Elect { mask, .. } => *mask,
            _ => return,
        };
        let Some(masks) = self.meet(warp, named, mask, inst.line) else { return };
        // Lanes that name the same lanes are one party.
        let mut left = mask;
        while left != 0 {
            let named = masks[left.trailing_zeros() as usize];
            let party = lanes(mask & named).filter(|lane| masks[*lane as usize] == named);
            let party = party.fold(0, |all, lane| all | 1 << lane) | 1 << left.trailing_zeros();
            left &= !party;
            self.party(warp, &inst.op, party);
        }
    }

    fn party(&self, warp: &mut Warp, op: &Op, party: u32) {
        let pool = &self.program.pool;
        match op {
            Op::Vote { mode, d, p, input, .. } => self.vote(warp, *mode, *d, *p, *input, party),
            Op::MatchAny { d, value, .. } => {
                let values = warp.wide(pool, *value);
                let same = |lane: usize| {
                    lanes(party)
                        .filter(|it| values[*it as usize] == values[lane])
                        .fold(0, |all, it| all | 1 << it)
                };
                let out = std::array::from_fn(same);
                warp.put_wide(*d, party, &out);
            }
            Op::MatchAll { d, p, value, .. } => {
                let values = warp.wide(pool, *value);
                let first = values[party.trailing_zeros() as usize];
                let all = lanes(party).all(|lane| values[lane as usize] == first);
                warp.put_wide(*d, party, &[if all { u64::from(party) } else { 0 }; 32]);
                if let Some(p) = p {
                    warp.set_predicate(*p, party, u32::from(all).wrapping_neg());
                }
            }
            Op::Redux { op, d, value, .. } => {
                let result = self.reduce(warp, *op, *value, party);
                warp.put_wide(*d, party, &[u64::from(result); 32]);
            }
            Op::Elect { d, p, .. } => {
                let leader = party.trailing_zeros();
                if let Some(d) = d {
                    warp.put_wide(*d, party, &[u64::from(leader); 32]);
                }
                warp.set_predicate(*p, party, 1 << leader);
            }
            _ => {}
        }
    }

    fn vote(
        &self,
        warp: &mut Warp,
        mode: VoteMode,
        d: Option<crate::program::Target>,
        p: Option<u32>,
        input: Predicate,
        party: u32,
    ) {
        let yes = warp.holds(input) & party;
        let result = match mode {
            VoteMode::All => yes == party,
            VoteMode::Any => yes != 0,
            VoteMode::Uniform => yes == party || yes == 0,
            VoteMode::Ballot => {
                if let Some(d) = d {
                    warp.put_wide(d, party, &[u64::from(yes); 32]);
                }
                return;
            }
        };
        if let Some(p) = p {
            warp.set_predicate(p, party, u32::from(result).wrapping_neg());
        }
    }

    fn reduce(&self, warp: &Warp, op: ReduxOp, value: Source, party: u32) -> u32 {
        let values = warp.plane(&self.program.pool, value.plane);
        let all = lanes(party).map(|lane| values[lane as usize]);
        let result = match op {
            ReduxOp::Add => all.reduce(u32::wrapping_add),
            ReduxOp::MinU => all.min(),
            ReduxOp::MaxU => all.max(),
            ReduxOp::MinS => all.map(|it| it as i32).min().map(|it| it as u32),
            ReduxOp::MaxS => all.map(|it| it as i32).max().map(|it| it as u32),
            ReduxOp::And => all.reduce(|a, b| a & b),
            ReduxOp::Or => all.reduce(|a, b| a | b),
            ReduxOp::Xor => all.reduce(|a, b| a ^ b),
        };
        result.unwrap_or(0)
    }
}

/// The lane that a lane reads from, and whether it is within the segment (the pseudocode of `shfl.sync`).
fn source_lane(mode: ShuffleMode, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (b, clamp, segment) = ((b & 31) as i32, (c & 31) as i32, (c >> 8 & 31) as i32);
    let lane = lane as i32;
    let last = (lane & segment) | (clamp & !segment);
    let first = lane & segment;
    let (from, inside) = match mode {
        ShuffleMode::Up => (lane - b, lane - b >= last),
        ShuffleMode::Down => (lane + b, lane + b <= last),
        ShuffleMode::Butterfly => (lane ^ b, lane ^ b <= last),
        ShuffleMode::Index => (first | (b & !segment), (first | (b & !segment)) <= last),
    };
    (from as u32, inside)
}
