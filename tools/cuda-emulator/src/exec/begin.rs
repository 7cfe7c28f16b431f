//! The beginning of CTAs and of functions: registers, special registers, local and shared memory.

use super::cta::BARRIERS;
use super::launch::Engine;
use super::warp::{Group, Place, Warp};
use crate::arith::Plane;
use crate::memory::{CtaClock, Region};
use crate::program::{Function, Special};

impl Engine<'_> {
    /// Begins a CTA in the place of the one before.
    pub(super) fn begin_cta(&mut self, number: u32, index: [u32; 3]) {
        let [x, y, z] = self.request.block;
        let threads = x * y * z;
        let warps = threads.div_ceil(32) as usize;
        let shared = self.kernel.shared.next_multiple_of(128) + self.request.dynamic_shared;
        let cta = &mut self.cta;
        cta.index = index;
        if cta.shared.data.len() == shared as usize {
            cta.shared.clear();
        } else {
            cta.shared = Region::new(shared as usize);
        }
        cta.barriers = vec![None; BARRIERS];
        cta.clock = Some(CtaClock::new(number, warps, &mut self.epochs));
        let mut old = std::mem::take(&mut cta.warps);
        old.truncate(warps);
        for (at, warp) in old.iter_mut().enumerate() {
            // Buffers are kept.
            let (regs, predicates) = (std::mem::take(&mut warp.regs), std::mem::take(&mut warp.predicates));
            *warp = Warp { regs, predicates, index: at, ..Warp::default() };
        }
        while old.len() < warps {
            old.push(Warp { index: old.len(), ..Warp::default() });
        }
        for warp in &mut old {
            let first = warp.index as u32 * 32;
            warp.live = if threads - first >= 32 { u32::MAX } else { (1 << (threads - first)) - 1 };
            warp.now = Group { pc: self.kernel.start, mask: warp.live, ..Group::default() };
            warp.now.place.function = self.request.kernel as u32;
            warp.limit = u32::MAX;
            self.enter(warp, self.kernel);
        }
        self.cta.warps = old;
    }

    /// Makes room for a function's frame, and fills its special registers.
    pub(super) fn enter(&self, warp: &mut Warp, function: &Function) {
        let Place { planes, predicates, local, .. } = warp.now.place;
        let planes_end = (planes + function.planes) as usize;
        if warp.regs.len() < planes_end {
            warp.regs.resize(planes_end, [0xdead_beef; 32]);
        }
        let predicates_end = (predicates + function.predicates) as usize;
        if warp.predicates.len() < predicates_end {
            warp.predicates.resize(predicates_end, 0);
        }
        let words = (local + function.local).div_ceil(4) as usize;
        if warp.local.len() < words {
            warp.local.resize(words, [0xcbcb_cbcb; 32]);
            warp.local_written.resize(words, [0; 32]);
        }
        for word in &mut warp.local_written[(local / 4) as usize..words] {
            for (lane, written) in word.iter_mut().enumerate() {
                if warp.now.mask >> lane & 1 == 1 {
                    *written = 0;
                }
            }
        }
        let mask = warp.now.mask;
        for (special, plane) in &function.specials {
            let values = self.special(warp.index as u32, *special);
            warp.put(*plane, mask, &values);
        }
    }

    fn special(&self, warp: u32, special: Special) -> Plane {
        let ([nx, ny, nz], grid) = (self.request.block, self.request.grid);
        let thread = |lane: usize| warp * 32 + lane as u32;
        let lanes = |f: &dyn Fn(usize) -> u32| std::array::from_fn(f);
        match special {
            Special::Tid(0) => lanes(&|lane| thread(lane) % nx),
            Special::Tid(1) => lanes(&|lane| thread(lane) / nx % ny),
            Special::Tid(_) => lanes(&|lane| thread(lane) / nx / ny),
            Special::Ntid(at) => [self.request.block[usize::from(at)]; 32],
            Special::Ctaid(at) => [self.cta.index[usize::from(at)]; 32],
            Special::Nctaid(at) => [grid[usize::from(at)]; 32],
            Special::Laneid => lanes(&|lane| lane as u32),
            Special::Warpid => [warp; 32],
            Special::Nwarpid => [(nx * ny * nz).div_ceil(32); 32],
            Special::Smid => [self.cta.index[0] % 4; 32],
            Special::Nsmid => [4; 32],
            Special::Gridid | Special::Zero => [0; 32],
            Special::One => [1; 32],
            Special::LanemaskEq => lanes(&|lane| 1 << lane),
            Special::LanemaskLt => lanes(&|lane| (1 << lane) - 1),
            Special::LanemaskLe => lanes(&|lane| (2u64 << lane) as u32).map(|it| it.wrapping_sub(1)),
            Special::LanemaskGt => lanes(&|lane| !((2u64 << lane) - 1) as u32),
            Special::LanemaskGe => lanes(&|lane| !((1 << lane) - 1)),
            Special::DynamicShared => [self.request.dynamic_shared; 32],
            Special::TotalShared => [self.kernel.shared + self.request.dynamic_shared; 32],
        }
    }
}
