//! Atomic operations, lane by lane in a seeded order.

use super::access::{Touch, lanes};
use super::launch::Engine;
use super::warp::Warp;
use crate::arith::half::{bf16, f16, to_bf16, to_f16};
use crate::arith::single::{bits, flush, max, min};
use crate::findings::Kind;
use crate::program::{Atomic, AtomicOp, AtomicType, Place};

impl Engine<'_> {
    /// `atom` and `red`.
    pub(super) fn atomic(&mut self, warp: &mut Warp, atomic: &Atomic, mask: u32, line: u32) {
        let addresses = self.addresses(warp, &atomic.address);
        let pool = &self.program.pool;
        let sources: Vec<[u64; 32]> = atomic.sources.iter().map(|it| warp.wide(pool, *it)).collect();
        let swap = atomic.swap.map(|it| warp.wide(pool, it));
        // Hardware gives no order.
        let start = self.random.below(32) as u32;
        let total = u64::from(atomic.bytes) * sources.len() as u64;
        for lane in lanes(mask.rotate_right(start)).map(|lane| (lane + start) % 32) {
            let at = lane as usize;
            for (element, source) in sources.iter().enumerate() {
                let address = addresses[at] + element as u64 * u64::from(atomic.bytes);
                let touch = Touch {
                    place: atomic.address.place,
                    address,
                    bytes: atomic.bytes,
                    lane,
                    line,
                    order: atomic.order,
                };
                if !addresses[at].is_multiple_of(total) {
                    self.fault(warp, touch, Kind::Misaligned, format!("not a multiple of {total}"));
                    return;
                }
                let old = self.read(warp, touch);
                if self.fatal {
                    return;
                }
                let swap = swap.as_ref().map(|it| it[at]);
                let is_global = self.resolve(touch).place == Place::Global;
                if let Some(new) = combine(atomic, is_global, old, source[at], swap) {
                    self.write(warp, touch, new);
                }
                if let Some(target) = atomic.targets[element] {
                    warp.put_lane(target, at, old);
                }
                if self.fatal {
                    return;
                }
            }
        }
    }
}

/// The value that is stored; none if `cas` finds another value.
fn combine(atomic: &Atomic, is_global: bool, old: u64, value: u64, swap: Option<u64>) -> Option<u64> {
    use AtomicOp::{Add, And, Cas, Dec, Exch, Inc, Max, Min, Or, Xor};
    let keep = if atomic.bytes == 8 { u64::MAX } else { (1 << (8 * atomic.bytes)) - 1 };
    let value = value & keep;
    let wide = atomic.bytes == 8;
    let signed = |x: u64| if wide { x as i64 } else { i64::from(x as u32 as i32) };
    Some(match (atomic.op, atomic.ty) {
        (Cas, _) => return (old == value).then_some(swap.unwrap_or(0) & keep),
        (Exch, _) => value,
        (And, _) => old & value,
        (Or, _) => old | value,
        (Xor, _) => old ^ value,
        (Inc, _) => {
            if old >= value {
                0
            } else {
                old + 1
            }
        }
        (Dec, _) => {
            if old == 0 || old > value {
                value
            } else {
                old - 1
            }
        }
        (Add, AtomicType::Unsigned | AtomicType::Signed) => old.wrapping_add(value) & keep,
        (Min, AtomicType::Unsigned) => old.min(value),
        (Max, AtomicType::Unsigned) => old.max(value),
        (Min, AtomicType::Signed) => {
            if signed(old) < signed(value) {
                old
            } else {
                value
            }
        }
        (Max, AtomicType::Signed) => {
            if signed(old) > signed(value) {
                old
            } else {
                value
            }
        }
        (_, AtomicType::F32) => {
            // Subnormal numbers are flushed in global memory only (PTX ISA, 9.7.13.4: atom.add.f32).
            let flushed = |x| if is_global { flush(x) } else { x };
            let sum = flushed(f32::from_bits(old as u32)) + flushed(f32::from_bits(value as u32));
            u64::from(bits(flushed(sum)))
        }
        (_, AtomicType::F64) => (f64::from_bits(old) + f64::from_bits(value)).to_bits(),
        (op, AtomicType::F16) => u64::from(half_of(op, old as u32, value as u32, f16, to_f16)),
        (op, AtomicType::Bf16) => u64::from(half_of(op, old as u32, value as u32, bf16, to_bf16)),
        (op, AtomicType::F16x2) => pair_of(op, old, value, f16, to_f16),
        (op, AtomicType::Bf16x2) => pair_of(op, old, value, bf16, to_bf16),
    })
}

fn half_of(op: AtomicOp, a: u32, b: u32, read: fn(u32) -> f32, write: fn(f32) -> u32) -> u32 {
    let (a, b) = (read(a & 0xffff), read(b & 0xffff));
    write(match op {
        AtomicOp::Min => min(a, b),
        AtomicOp::Max => max(a, b),
        _ => a + b,
    })
}

fn pair_of(op: AtomicOp, a: u64, b: u64, read: fn(u32) -> f32, write: fn(f32) -> u32) -> u64 {
    let low = half_of(op, a as u32, b as u32, read, write);
    let high = half_of(op, (a >> 16) as u32, (b >> 16) as u32, read, write);
    u64::from(low | high << 16)
}
