//! Loads and stores of lanes, with every check.

use super::launch::Engine;
use super::warp::Warp;
use crate::findings::Kind;
use crate::memory::{Access as Kinds, Actor, Clash, Region};
use crate::program::{self, Address, LOCAL_WINDOW, Order, PARAM_WINDOW, Place, SHARED_WINDOW, WINDOW};

/// Whether a generic address lies in a window; no window is global memory.
pub(super) fn in_window(address: u64, window: Option<u64>) -> bool {
    let inside = |window| address.wrapping_sub(window) < WINDOW;
    match window {
        Some(window) => inside(window),
        None => !(inside(SHARED_WINDOW) || inside(LOCAL_WINDOW) || inside(PARAM_WINDOW)),
    }
}

/// A loaded value, with its sign repeated if it has one.
pub(super) fn extended(value: u64, bytes: u32, signed: bool) -> u64 {
    match (bytes, signed) {
        (1, true) => value as u8 as i8 as u64,
        (2, true) => value as u16 as i16 as u64,
        (4, true) => value as u32 as i32 as u64,
        _ => value,
    }
}

/// Most elements of a vector.
const ELEMENTS: usize = 8;

/// One access of one lane.
#[derive(Clone, Copy)]
pub(super) struct Touch {
    pub(super) place: Place,
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) lane: u32,
    pub(super) line: u32,
    pub(super) order: Order,
}

impl Engine<'_> {
    /// The addresses of all lanes.
    pub(super) fn addresses(&self, warp: &Warp, address: &Address) -> [u64; 32] {
        let mut all = warp.wide(&self.program.pool, address.base);
        let frame = if address.framed { u64::from(warp.now.place.local) } else { 0 };
        let offset = (address.offset as u64).wrapping_add(frame);
        for it in &mut all {
            *it = it.wrapping_add(offset);
            // Addresses of these spaces have 32 bits.
            if matches!(address.place, Place::Shared | Place::Local) {
                *it = u64::from(*it as u32);
            }
        }
        all
    }

    /// Loads elements to registers.
    pub(super) fn load(&mut self, warp: &mut Warp, access: &program::Access, mask: u32, line: u32) {
        match access.targets.len() {
            1 => self.load_elements::<1>(warp, access, mask, line),
            2 => self.load_elements::<2>(warp, access, mask, line),
            3 | 4 => self.load_elements::<4>(warp, access, mask, line),
            _ => self.load_elements::<ELEMENTS>(warp, access, mask, line),
        }
    }

    /// Loads at most `N` elements.
    fn load_elements<const N: usize>(
        &mut self,
        warp: &mut Warp,
        access: &program::Access,
        mask: u32,
        line: u32,
    ) {
        let addresses = self.addresses(warp, &access.address);
        let bytes = access.bytes;
        let total = bytes * access.targets.len() as u32;
        for lane in lanes(mask) {
            if !self.aligned(warp, lane, addresses[lane as usize], total, line) {
                return;
            }
        }
        let mut values = [[0; 32]; N];
        let values = &mut values[..access.targets.len()];
        for lane in lanes(mask) {
            let (place, address) = (access.address.place, addresses[lane as usize]);
            let whole = self.resolve(Touch { place, address, bytes: total, lane, line, order: access.order });
            if self.load_at_once(warp, whole, access, values) {
                continue;
            }
            for (at, values) in values.iter_mut().enumerate() {
                let touch = Touch { address: whole.address + at as u64 * u64::from(bytes), bytes, ..whole };
                values[lane as usize] = extended(self.read(warp, touch), bytes, access.signed);
                if self.fatal {
                    return;
                }
            }
        }
        for (target, values) in access.targets.iter().zip(values) {
            if let Some(target) = target {
                warp.put_wide(*target, mask, values);
            }
        }
    }

    /// Loads the elements of one lane together, if there is nothing to say of them but perhaps a race.
    fn load_at_once(
        &mut self,
        warp: &Warp,
        touch: Touch,
        access: &program::Access,
        values: &mut [[u64; 32]],
    ) -> bool {
        let n = touch.bytes as usize;
        let clock = self.cta.clock.as_ref().expect("a CTA that runs has a clock");
        let shared = &mut self.cta.shared;
        let (region, at, floor, space) = match touch.place {
            Place::Global => match self.memory.at(touch.address, n as u64) {
                Ok((region, at)) => (region, at, self.epochs.base(), "global"),
                Err(_) => return false,
            },
            Place::Shared if touch.address as usize + n <= shared.data.len() => {
                let at = touch.address as usize;
                if shared.is_pending(at, n) {
                    return false;
                }
                (shared, at, clock.first(), "shared")
            }
            _ => return false,
        };
        if touch.order.strong || !region.is_all_written(at, n) {
            return false;
        }
        let actor = Actor { clock, epochs: &self.epochs, warp: warp.index, lane: touch.lane, floor };
        let constant = touch.order.constant;
        let kinds = Kinds { write: false, strong: false, wide: false, constant, same: false };
        let is_recorded = touch.place == Place::Shared || self.config.global_races;
        let race = if is_recorded { region.record(at, n, kinds, &actor) } else { None };
        let each = access.bytes as usize;
        for (element, values) in values.iter_mut().enumerate() {
            let value = region.get(at + element * each, each);
            values[touch.lane as usize] = extended(value, access.bytes, access.signed);
        }
        if race.is_some() {
            self.report(warp, touch, false, race, false, space);
        }
        true
    }

    /// Stores registers.
    pub(super) fn store(&mut self, warp: &mut Warp, access: &program::Access, mask: u32, line: u32) {
        let addresses = self.addresses(warp, &access.address);
        let bytes = access.bytes;
        let total = bytes * access.sources.len() as u32;
        for lane in lanes(mask) {
            if !self.aligned(warp, lane, addresses[lane as usize], total, line) {
                return;
            }
        }
        for (at, source) in access.sources.iter().enumerate() {
            let values = warp.wide(&self.program.pool, *source);
            for lane in lanes(mask) {
                let address = addresses[lane as usize] + at as u64 * u64::from(bytes);
                let touch =
                    Touch { place: access.address.place, address, bytes, lane, line, order: access.order };
                self.write(warp, touch, values[lane as usize]);
                if self.fatal {
                    return;
                }
            }
        }
    }

    /// Records a fatal finding of a lane.
    pub(super) fn fault(&mut self, warp: &Warp, touch: Touch, kind: Kind, what: impl Into<String>) {
        self.note(kind, touch.line, warp.index as u32 * 32 + touch.lane, touch.address, what);
        self.fatal |= !matches!(kind, Kind::Race | Kind::Uninitialised | Kind::PendingCopy);
    }

    fn aligned(&mut self, warp: &Warp, lane: u32, address: u64, bytes: u32, line: u32) -> bool {
        // Sizes are powers of two.
        if bytes == 0 || address & u64::from(bytes.min(32) - 1) == 0 {
            return true;
        }
        let thread = warp.index as u32 * 32 + lane;
        self.note(Kind::Misaligned, line, thread, address, format!("not a multiple of {bytes}"));
        self.fatal = true;
        false
    }

    /// The space and the address in it that a generic address stands for.
    pub(super) fn resolve(&self, touch: Touch) -> Touch {
        if touch.place != Place::Generic {
            return touch;
        }
        let windows =
            [(SHARED_WINDOW, Place::Shared), (LOCAL_WINDOW, Place::Local), (PARAM_WINDOW, Place::Param)];
        for (window, place) in windows {
            if in_window(touch.address, Some(window)) {
                return Touch { place, address: touch.address - window, ..touch };
            }
        }
        Touch { place: Place::Global, ..touch }
    }

    /// The value at an address.
    #[inline]
    pub(super) fn read(&mut self, warp: &Warp, touch: Touch) -> u64 {
        let touch = self.resolve(touch);
        match touch.place {
            Place::Shared => self.touch_shared(warp, touch, None),
            Place::Local => self.read_local(warp, touch),
            Place::Param => self.read_param(warp, touch),
            _ => self.touch_global(warp, touch, None),
        }
    }

    /// Stores a value at an address.
    #[inline]
    pub(super) fn write(&mut self, warp: &mut Warp, touch: Touch, value: u64) {
        let touch = self.resolve(touch);
        match touch.place {
            Place::Shared => _ = self.touch_shared(warp, touch, Some(value)),
            Place::Local => self.write_local(warp, touch, value),
            Place::Param => self.fault(warp, touch, Kind::OutOfBounds, "a write to the kernel's parameters"),
            _ => _ = self.touch_global(warp, touch, Some(value)),
        }
    }

    fn touch_shared(&mut self, warp: &Warp, touch: Touch, value: Option<u64>) -> u64 {
        let size = self.cta.shared.data.len() as u64;
        if touch.address + u64::from(touch.bytes) > size {
            let what = format!("shared memory has {size} bytes");
            self.fault(warp, touch, Kind::OutOfBounds, what);
            return 0;
        }
        let n = touch.bytes as usize;
        let clock = self.cta.clock.as_ref().expect("a CTA that runs has a clock");
        let actor =
            Actor { clock, epochs: &self.epochs, warp: warp.index, lane: touch.lane, floor: clock.first() };
        let at = touch.address as usize;
        let pending = self.cta.shared.is_pending(at, n);
        let (result, race, unwritten) = apply(&mut self.cta.shared, at, touch, value, Some(&actor));
        if pending {
            self.fault(warp, touch, Kind::PendingCopy, "an asynchronous copy to it has not been waited for");
        }
        self.report(warp, touch, value.is_some(), race, unwritten && !pending, "shared");
        if touch.order.strong {
            self.synchronize(warp, touch, value.is_some(), SHARED_WINDOW + touch.address);
        }
        result
    }

    fn touch_global(&mut self, warp: &Warp, touch: Touch, value: Option<u64>) -> u64 {
        let clock = self.cta.clock.as_ref().expect("a CTA that runs has a clock");
        let actor = Actor {
            clock,
            epochs: &self.epochs,
            warp: warp.index,
            lane: touch.lane,
            floor: self.epochs.base(),
        };
        let actor = self.config.global_races.then_some(&actor);
        let (region, at) = match self.memory.at(touch.address, u64::from(touch.bytes)) {
            Ok(found) => found,
            Err(fault) => {
                let verb = if value.is_some() { "write" } else { "read" };
                self.fault(warp, touch, fault.kind, format!("{verb}: {}", fault.what));
                return 0;
            }
        };
        let (result, race, unwritten) = apply(region, at, touch, value, actor);
        if value.is_some() && !self.memory.writable(touch.address) {
            self.fault(warp, touch, Kind::OutOfBounds, "a write to constant memory");
        }
        self.report(warp, touch, value.is_some(), race, unwritten, "global");
        if touch.order.strong {
            self.synchronize(warp, touch, value.is_some(), touch.address);
        }
        result
    }

    #[inline]
    fn report(
        &mut self,
        warp: &Warp,
        touch: Touch,
        write: bool,
        race: Option<Clash>,
        unwritten: bool,
        space: &str,
    ) {
        let verb = if write { "write" } else { "read" };
        if let Some(clash) = race {
            self.fault(warp, touch, Kind::Race, format!("a {verb} of {space} memory {clash}"));
        }
        if unwritten {
            self.fault(
                warp,
                touch,
                Kind::Uninitialised,
                format!("a read of {space} memory that was never written"),
            );
        }
    }

    /// Publishes or acquires, as a strong access does.
    fn synchronize(&mut self, warp: &Warp, touch: Touch, write: bool, address: u64) {
        let Some(clock) = &mut self.cta.clock else { return };
        let Order { acquire, release, wide, .. } = touch.order;
        if write {
            clock.strong_write(warp.index, address, release, wide, &mut self.epochs);
        } else {
            clock.strong_read(warp.index, address, acquire, wide, &self.epochs);
        }
    }

    fn read_param(&mut self, warp: &Warp, touch: Touch) -> u64 {
        let from = touch.address as usize;
        let Some(bytes) = self.request.params.get(from..from + touch.bytes as usize) else {
            self.fault(warp, touch, Kind::OutOfBounds, "past the end of the kernel's parameters");
            return 0;
        };
        let mut raw = [0; 8];
        raw[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(raw)
    }

    fn local_fits(&mut self, warp: &Warp, touch: Touch) -> bool {
        let fits = touch.address + u64::from(touch.bytes) <= warp.local.len() as u64 * 4;
        if !fits {
            let what = format!("local memory has {} bytes", warp.local.len() * 4);
            self.fault(warp, touch, Kind::OutOfBounds, what);
        }
        fits
    }

    fn read_local(&mut self, warp: &Warp, touch: Touch) -> u64 {
        if !self.local_fits(warp, touch) {
            return 0;
        }
        let (lane, mut value, mut written) = (touch.lane as usize, 0, true);
        for at in 0..u64::from(touch.bytes) {
            let (word, byte) = ((touch.address + at) as usize / 4, (touch.address + at) % 4);
            value |= u64::from(warp.local[word][lane] >> (8 * byte) & 0xff) << (8 * at);
            written &= warp.local_written[word][lane] >> byte & 1 == 1;
        }
        if !written {
            self.fault(warp, touch, Kind::Uninitialised, "a read of local memory that was never written");
        }
        value
    }

    fn write_local(&mut self, warp: &mut Warp, touch: Touch, value: u64) {
        if !self.local_fits(warp, touch) {
            return;
        }
        let lane = touch.lane as usize;
        for at in 0..u64::from(touch.bytes) {
            let (word, byte) = ((touch.address + at) as usize / 4, (touch.address + at) % 4);
            let old = warp.local[word][lane] & !(0xff << (8 * byte));
            warp.local[word][lane] = old | ((value >> (8 * at)) as u32 & 0xff) << (8 * byte);
            warp.local_written[word][lane] |= 1 << byte;
        }
    }
}

/// Makes an access; gives the value before it, what it races with, and whether bytes that were read had not
/// been written.
#[inline]
fn apply(
    region: &mut Region,
    at: usize,
    touch: Touch,
    value: Option<u64>,
    actor: Option<&Actor>,
) -> (u64, Option<Clash>, bool) {
    let n = touch.bytes as usize;
    let before = region.get(at, n);
    let keep = if n == 8 { u64::MAX } else { (1 << (8 * n)) - 1 };
    let same = value.is_some_and(|value| value & keep == before);
    let Order { strong, wide, constant, .. } = touch.order;
    let kinds = Kinds { write: value.is_some(), strong, wide, constant, same };
    let race = actor.and_then(|actor| region.record(at, n, kinds, actor));
    let unwritten = value.is_none() && !region.is_written(at, n);
    if let Some(value) = value {
        region.put(at, n, value);
        region.mark(at, n);
    }
    (before, race, unwritten)
}

/// The lanes of a mask.
#[inline]
pub(super) fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros();
        left &= left.wrapping_sub(1);
        (lane < 32).then_some(lane)
    })
}
