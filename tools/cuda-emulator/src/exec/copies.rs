//! Asynchronous copies to shared memory, which land when they are waited for and not before (PTX ISA,
//! 9.7.9.25).

use super::access::{Touch, lanes};
use super::launch::Engine;
use super::warp::{Copy, Warp};
use crate::findings::Kind;
use crate::memory::{Access, Actor};
use crate::program::{AsyncCopy, Order, Place};

impl Engine<'_> {
    /// `cp.async`: notes the copy, and checks both ends.
    pub(super) fn copy_async(&mut self, warp: &mut Warp, copy: &AsyncCopy, mask: u32, line: u32) {
        let (to, from) = (self.addresses(warp, &copy.to), self.addresses(warp, &copy.from));
        let source_bytes = copy.source_bytes.map(|it| *warp.plane(&self.program.pool, it.plane));
        let ignored = copy.ignore.map_or(0, |it| warp.holds(it));
        for lane in lanes(mask) {
            let at = lane as usize;
            let source_bytes =
                if ignored >> lane & 1 == 1 { 0 } else { source_bytes.map_or(copy.bytes, |it| it[at]) };
            let noted = Copy {
                lane,
                group: warp.committed[at],
                to: to[at],
                from: from[at],
                bytes: copy.bytes,
                source_bytes: source_bytes.min(copy.bytes),
                line,
            };
            self.check_copy(warp, &noted);
            if self.fatal {
                return;
            }
            self.cta.shared.set_pending(noted.to as usize, noted.bytes as usize, true);
            warp.copies.push(noted);
        }
    }

    fn touch_of(copy: &Copy, place: Place, address: u64, bytes: u32) -> Touch {
        Touch { place, address, bytes, lane: copy.lane, line: copy.line, order: Order::default() }
    }

    fn check_copy(&mut self, warp: &Warp, copy: &Copy) {
        let to = Self::touch_of(copy, Place::Shared, copy.to, copy.bytes);
        let from = Self::touch_of(copy, Place::Global, copy.from, copy.source_bytes);
        let bytes = u64::from(copy.bytes);
        if !copy.to.is_multiple_of(bytes) {
            return self.fault(warp, to, Kind::Misaligned, format!("not a multiple of {bytes}"));
        }
        if !copy.from.is_multiple_of(bytes) && copy.source_bytes > 0 {
            return self.fault(warp, from, Kind::Misaligned, format!("not a multiple of {bytes}"));
        }
        let size = self.cta.shared.data.len() as u64;
        if copy.to + bytes > size {
            return self.fault(warp, to, Kind::OutOfBounds, format!("shared memory has {size} bytes"));
        }
        if copy.source_bytes > 0
            && let Err(fault) = self.memory.at(copy.from, u64::from(copy.source_bytes))
        {
            return self.fault(warp, from, fault.kind, format!("read by cp.async: {}", fault.what));
        }
        // The bytes may be written from now on.
        if self.cta.shared.is_pending(copy.to as usize, copy.bytes as usize) {
            self.fault(
                warp,
                to,
                Kind::PendingCopy,
                "another asynchronous copy to it has not been waited for",
            );
        }
        self.order_of_copy(warp, copy);
    }

    fn order_of_copy(&mut self, warp: &Warp, copy: &Copy) {
        let clock = self.cta.clock.as_ref().expect("a CTA that runs has a clock");
        let actor =
            Actor { clock, epochs: &self.epochs, warp: warp.index, lane: copy.lane, floor: clock.first() };
        let access = Access { write: true, strong: false, wide: false, constant: false, same: false };
        let race = self.cta.shared.record(copy.to as usize, copy.bytes as usize, access, &actor);
        if let Some(clash) = race {
            let to = Self::touch_of(copy, Place::Shared, copy.to, copy.bytes);
            self.fault(warp, to, Kind::Race, format!("a copy to shared memory {clash}"));
        }
    }

    /// `cp.async.commit_group`.
    pub(super) fn commit_copies(&mut self, warp: &mut Warp, mask: u32) {
        for lane in lanes(mask) {
            warp.committed[lane as usize] += 1;
        }
    }

    /// `cp.async.wait_group`: all but the last groups of each lane land.
    pub(super) fn wait_copies(&mut self, warp: &mut Warp, groups: u32, mask: u32) {
        let copies = std::mem::take(&mut warp.copies);
        let mut left = Vec::new();
        for copy in copies {
            let lands =
                mask >> copy.lane & 1 == 1 && copy.group + groups < warp.committed[copy.lane as usize];
            if lands && !self.fatal {
                self.land(warp, &copy);
            } else {
                left.push(copy);
            }
        }
        warp.copies = left;
    }

    fn land(&mut self, warp: &mut Warp, copy: &Copy) {
        self.cta.shared.set_pending(copy.to as usize, copy.bytes as usize, false);
        let unit = copy.bytes.min(8);
        for at in (0..copy.bytes).step_by(unit as usize) {
            let mut value = 0;
            let n = copy.source_bytes.saturating_sub(at).min(unit);
            for byte in 0..n {
                let whole = n == unit && byte == 0;
                let address = copy.from + u64::from(at + byte);
                let touch = Self::touch_of(copy, Place::Global, address, if whole { unit } else { 1 });
                value |= self.read(warp, touch) << (8 * byte);
                if self.fatal {
                    return;
                }
                if whole {
                    break;
                }
            }
            let touch = Self::touch_of(copy, Place::Shared, copy.to + u64::from(at), unit);
            self.write(warp, touch, value);
        }
    }
}
