//! The loop over a warp's instructions.

use super::launch::Engine;
use super::warp::{Wait, Warp};
use crate::arith::Plane;
use crate::findings::Kind;
use crate::program::{Clock, Combine, Inst, Op, POOL, TestOutput};

impl Engine<'_> {
    /// Runs a warp for at most `quantum` instructions, or until all its lanes wait or have exited.
    pub(super) fn run(&mut self, warp: &mut Warp, quantum: u64) {
        let program = self.program;
        let mut made = 0;
        let mut lanes = 0;
        while made < quantum && !self.fatal {
            if warp.now.mask == 0 {
                if !self.all_wait(warp) {
                    break;
                }
                continue;
            }
            if warp.now.pc >= warp.limit {
                warp.choose(None);
                continue;
            }
            let inst = &program.code[warp.now.pc as usize];
            warp.now.pc += 1;
            made += 1;
            let guard = inst.guard.map_or(u32::MAX, |predicate| warp.holds(predicate));
            let mask = warp.now.mask & guard;
            lanes += u64::from(mask.count_ones());
            if mask != 0 {
                if let Some(executed) = self.executed.get_mut(warp.now.pc as usize - 1) {
                    *executed = true;
                }
                self.compute(warp, inst, mask);
            }
        }
        self.instructions += made;
        self.lane_operations += lanes;
    }

    /// Arithmetic and moves; all else is passed on.
    #[inline]
    fn compute(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let pool = &self.program.pool;
        match &inst.op {
            Op::Narrow { f, d, s } => {
                let mut out = [0; 32];
                let sources = [
                    warp.plane(pool, s[0]),
                    warp.plane(pool, s[1]),
                    warp.plane(pool, s[2]),
                    warp.plane(pool, s[3]),
                ];
                f(&sources, &mut out);
                warp.put(*d, mask, &out);
            }
            Op::Wide { f, d, s } => {
                let mut out = [0; 32];
                let mut sources = [[0; 32]; 4];
                // Most have fewer sources; the rest are zeros.
                for (to, source) in sources.iter_mut().zip(s).filter(|(_, it)| it.plane != POOL) {
                    warp.wide_to(pool, *source, to);
                }
                f(&sources, &mut out);
                warp.put_wide(*d, mask, &out);
            }
            Op::Copy { d, s, planes } => {
                for at in 0..*planes {
                    let plane = *warp.plane(pool, s + at);
                    warp.put(d + at, mask, &plane);
                }
            }
            Op::Test { f, a, b, out } => {
                let bits = f(warp.plane(pool, *a), warp.plane(pool, *b));
                finish_test(warp, out, mask, bits);
            }
            Op::TestWide { f, a, b, out } => {
                let bits = f(&warp.wide(pool, *a), &warp.wide(pool, *b));
                finish_test(warp, out, mask, bits);
            }
            Op::Select { d, a, b, p, planes } => {
                let take = warp.holds(*p);
                for at in 0..*planes {
                    let (a, b) = (warp.plane(pool, a.plane + at), warp.plane(pool, b.plane + at));
                    let out: Plane =
                        std::array::from_fn(|lane| if take >> lane & 1 == 1 { a[lane] } else { b[lane] });
                    warp.put(d + at, mask, &out);
                }
            }
            Op::Logic { f, d, a, b } => {
                let bits = f(warp.holds(*a), warp.holds(*b));
                warp.set_predicate(*d, mask, bits);
            }
            Op::SetPredicate { d, value } => warp.set_predicate(*d, mask, u32::from(*value).wrapping_neg()),
            Op::LoadParam { d, offset, bytes, signed } => {
                let value = self.param(*offset, *bytes, *signed);
                warp.put_wide(*d, mask, &[value; 32]);
            }
            Op::Branch { target } => warp.branch(mask, *target),
            _ => self.communicate(warp, inst, mask),
        }
    }

    /// Memory, other lanes and control.
    fn communicate(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        match &inst.op {
            Op::Load(access) => self.load(warp, access, mask, inst.line),
            Op::Store(access) => self.store(warp, access, mask, inst.line),
            Op::Atomic(atomic) => self.atomic(warp, atomic, mask, inst.line),
            Op::CopyAsync(copy) => self.copy_async(warp, copy, mask, inst.line),
            Op::CommitCopies => self.commit_copies(warp, mask),
            Op::WaitCopies(groups) => self.wait_copies(warp, *groups, mask),
            Op::LoadMatrix(matrix) => self.load_matrix(warp, matrix, mask, inst.line),
            Op::StoreMatrix(matrix) => self.store_matrix(warp, matrix, mask, inst.line),
            Op::Mma(mma) => self.mma(warp, mma, mask, inst.line),
            Op::Shuffle(shuffle) => self.shuffle(warp, shuffle, mask, inst.line),
            Op::Vote { .. }
            | Op::MatchAny { .. }
            | Op::MatchAll { .. }
            | Op::Redux { .. }
            | Op::Elect { .. } => {
                self.collective(warp, inst, mask);
            }
            Op::ActiveMask { d } => warp.put_wide(*d, mask, &[u64::from(mask); 32]),
            Op::Barrier(barrier) => self.barrier(warp, barrier, mask, inst.line),
            Op::WarpBarrier { mask: lanes } => self.warp_barrier(warp, *lanes, mask, inst.line),
            Op::Fence { wide } => self.fence(warp, *wide),
            Op::BranchIndexed { index, targets } => {
                self.branch_indexed(warp, *index, targets, mask, inst.line)
            }
            Op::Call(call) => self.call(warp, call, mask, inst.line),
            Op::Return => self.ret(warp, mask),
            Op::Exit => self.exit(warp, mask),
            Op::Trap => {
                self.note(Kind::Trap, inst.line, thread(warp, mask), 0, "trap");
                self.fatal = true;
            }
            _ => self.rest(warp, inst, mask),
        }
    }

    fn rest(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let pool = &self.program.pool;
        match &inst.op {
            Op::Carry { f, d, s, read, write } => {
                let [a, b, c] = s.map(|source| warp.wide(pool, source));
                let (mut out, mut carries) = ([0; 32], 0);
                for lane in 0..32 {
                    let carry = *read && warp.carry >> lane & 1 == 1;
                    let (value, over) = f(a[lane], b[lane], c[lane], carry);
                    out[lane] = value;
                    carries |= u32::from(over) << lane;
                }
                if *write {
                    warp.carry = (carries & mask) | (warp.carry & !mask);
                }
                warp.put_wide(*d, mask, &out);
            }
            Op::ReadClock { d, clock } => {
                let now = self.instructions + u64::from(warp.now.pc);
                let value = if *clock == Clock::Cycles { now * 4 } else { 1_700_000_000_000_000_000 + now };
                warp.put_wide(*d, mask, &[value; 32]);
            }
            Op::LocalAddress { d, offset } => {
                let address = u64::from(warp.now.place.local + offset);
                warp.put_wide(*d, mask, &[address; 32]);
            }
            Op::IsSpace { d, a, window } => {
                let addresses = warp.wide(pool, *a);
                let mut bits = 0;
                for (lane, address) in addresses.iter().enumerate() {
                    bits |= u32::from(super::access::in_window(*address, *window)) << lane;
                }
                warp.set_predicate(*d, mask, bits);
            }
            _ => {}
        }
    }

    /// A value of the kernel's parameters.
    fn param(&self, offset: u32, bytes: u32, signed: bool) -> u64 {
        let mut raw = [0; 8];
        let from = self.request.params.get(offset as usize..(offset + bytes) as usize).unwrap_or(&[]);
        raw[..from.len()].copy_from_slice(from);
        super::access::extended(u64::from_le_bytes(raw), bytes, signed)
    }

    fn branch_indexed(&mut self, warp: &mut Warp, index: u32, targets: &[u32], mask: u32, line: u32) {
        let indices = *warp.plane(&self.program.pool, index);
        let mut left = mask;
        let rest = warp.now.mask & !mask;
        let base = warp.now.clone();
        let mut groups = Vec::new();
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            let same = (0..32).filter(|it| left >> it & 1 == 1 && indices[*it] == indices[lane]);
            let lanes = same.fold(0, |all, lane| all | 1 << lane);
            left &= !lanes;
            let Some(target) = targets.get(indices[lane] as usize) else {
                self.note(Kind::Trap, line, thread(warp, lanes), 0, "an index past the branch's targets");
                self.fatal = true;
                return;
            };
            groups.push((lanes, *target));
        }
        for (lanes, pc) in groups {
            warp.others.push(super::warp::Group { pc, mask: lanes, ..base.clone() });
        }
        warp.now.mask = rest;
        warp.choose(None);
    }

    fn exit(&mut self, warp: &mut Warp, mask: u32) {
        warp.copies.retain(|copy| mask >> copy.lane & 1 == 0);
        warp.drop_lanes(mask);
        self.retry_lane_barriers(warp);
    }

    /// No group of the warp can run. Tells whether one can now.
    fn all_wait(&mut self, warp: &mut Warp) -> bool {
        if warp.live == 0 {
            return false;
        }
        let at_barrier = |wait| matches!(wait, Wait::Barrier(_));
        if warp.others.iter().all(|group| at_barrier(group.wait)) {
            return self.arrive(warp);
        }
        self.break_deadlock(warp);
        true
    }
}

/// The first thread of a mask, by its number in the CTA.
pub(super) fn thread(warp: &Warp, mask: u32) -> u32 {
    warp.index as u32 * 32 + mask.trailing_zeros().min(31)
}

#[inline]
fn finish_test(warp: &mut Warp, out: &TestOutput, mask: u32, bits: u32) {
    let combined = |bits: u32| match out.combine {
        None => bits,
        Some((Combine::And, p)) => bits & warp.holds(p),
        Some((Combine::Or, p)) => bits | warp.holds(p),
        Some((Combine::Xor, p)) => bits ^ warp.holds(p),
    };
    let (yes, no) = (combined(bits), combined(!bits));
    if let Some(p) = out.p {
        warp.set_predicate(p, mask, yes);
    }
    if let Some(q) = out.q {
        warp.set_predicate(q, mask, no);
    }
}
