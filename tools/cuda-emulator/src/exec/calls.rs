//! Calls of device functions, `printf` and `assert`.

use super::access::{Touch, lanes};
use super::launch::Engine;
use super::run::thread;
use super::warp::{Frame, Place, Warp};
use crate::findings::Kind;
use crate::program::{self, Call, Callee, FUNCTION_WINDOW, Order};

/// Most calls within each other.
const DEPTH: usize = 512;

impl Engine<'_> {
    /// `call`.
    pub(super) fn call(&mut self, warp: &mut Warp, call: &Call, mask: u32, line: u32) {
        match call.callee {
            Callee::Function(index) => self.enter_function(warp, call, index, mask, line),
            Callee::Indirect(source) => {
                let addresses = warp.wide(&self.program.pool, source);
                let first = addresses[mask.trailing_zeros() as usize & 31];
                let same = lanes(mask).filter(|lane| addresses[*lane as usize] == first);
                let same = same.fold(0, |all, lane| all | 1 << lane);
                if same != mask {
                    // Lanes that call other functions do so on their own.
                    let mut other = warp.now.clone();
                    other.mask = mask & !same;
                    other.pc -= 1;
                    warp.now.mask &= !other.mask;
                    warp.others.push(other);
                }
                let index = first.wrapping_sub(FUNCTION_WINDOW);
                if index >= self.program.functions.len() as u64 {
                    self.note(
                        Kind::Trap,
                        line,
                        thread(warp, mask),
                        first,
                        "a call of an address that is no function's",
                    );
                    self.fatal = true;
                    return;
                }
                self.enter_function(warp, call, index as u32, same, line);
            }
            Callee::Printf => self.printf(warp, call, mask, line),
            Callee::AssertFail => {
                let what = self.assertion(warp, call, mask, line);
                self.note(Kind::Assert, line, thread(warp, mask), 0, what);
                self.fatal = true;
            }
        }
    }

    fn enter_function(&mut self, warp: &mut Warp, call: &Call, index: u32, mask: u32, line: u32) {
        let program = self.program;
        let caller = &program.functions[warp.now.place.function as usize];
        let callee = &program.functions[index as usize];
        if warp.now.stack.len() >= DEPTH {
            self.note(Kind::OutOfBounds, line, thread(warp, mask), 0, "the stack is full");
            self.fatal = true;
            return;
        }
        warp.isolate(mask);
        let from = warp.now.place;
        warp.now.stack.push(Frame { pc: warp.now.pc, place: from });
        warp.now.place = Place {
            function: index,
            planes: from.planes + caller.planes,
            predicates: from.predicates + caller.predicates,
            local: from.local + caller.local,
        };
        warp.now.pc = callee.start;
        self.enter(warp, callee);
        for ((from_at, bytes), (to_at, _)) in call.args.iter().zip(&callee.params) {
            copy_local(warp, from.local + from_at, warp.now.place.local + to_at, *bytes, mask);
        }
        warp.choose(None);
    }

    /// `ret`: from a kernel, the end of the lanes.
    pub(super) fn ret(&mut self, warp: &mut Warp, mask: u32) {
        warp.isolate(mask);
        let Some(frame) = warp.now.stack.pop() else {
            warp.copies.retain(|copy| mask >> copy.lane & 1 == 0);
            warp.drop_lanes(mask);
            self.retry_lane_barriers(warp);
            return;
        };
        let program = self.program;
        let callee = warp.now.place;
        let returns = &program.functions[callee.function as usize].returns;
        warp.now.pc = frame.pc;
        warp.now.place = frame.place;
        if let program::Op::Call(call) = &program.code[frame.pc as usize - 1].op {
            for ((to_at, bytes), (from_at, _)) in call.returns.iter().zip(returns) {
                copy_local(warp, callee.local + from_at, frame.place.local + to_at, *bytes, mask);
            }
        }
        warp.choose(None);
    }

    /// A word of a call's argument.
    fn argument(&mut self, warp: &Warp, call: &Call, at: usize, lane: u32, line: u32, bytes: u32) -> u64 {
        let Some((offset, _)) = call.args.get(at) else { return 0 };
        let address = u64::from(warp.now.place.local + offset);
        let place = program::Place::Local;
        self.read(warp, Touch { place, address, bytes, lane, line, order: Order::default() })
    }

    /// The value at a generic address, for the host's part of a call.
    fn peek(&mut self, warp: &Warp, address: u64, bytes: u32, lane: u32, line: u32) -> u64 {
        let place = program::Place::Generic;
        self.read(warp, Touch { place, address, bytes, lane, line, order: Order::default() })
    }

    fn text(&mut self, warp: &Warp, address: u64, lane: u32, line: u32) -> String {
        let mut bytes = Vec::new();
        while bytes.len() < 4096 && !self.fatal {
            match self.peek(warp, address + bytes.len() as u64, 1, lane, line) as u8 {
                0 => break,
                byte => bytes.push(byte),
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn assertion(&mut self, warp: &Warp, call: &Call, mask: u32, line: u32) -> String {
        let lane = mask.trailing_zeros();
        let (message, file) =
            (self.argument(warp, call, 0, lane, line, 8), self.argument(warp, call, 1, lane, line, 8));
        let source = self.argument(warp, call, 2, lane, line, 4);
        let (message, file) = (self.text(warp, message, lane, line), self.text(warp, file, lane, line));
        format!("{file}:{source}: assertion '{message}' failed")
    }

    fn printf(&mut self, warp: &mut Warp, call: &Call, mask: u32, line: u32) {
        for lane in lanes(mask) {
            let format = self.argument(warp, call, 0, lane, line, 8);
            let list = self.argument(warp, call, 1, lane, line, 8);
            let format = self.text(warp, format, lane, line);
            let printed = self.formatted(warp, &format, list, lane, line);
            self.printed.push_str(&printed);
            if self.fatal {
                return;
            }
        }
        if let Some((offset, _)) = call.returns.first() {
            let word = ((warp.now.place.local + offset) / 4) as usize;
            for lane in lanes(mask) {
                warp.local[word][lane as usize] = 0;
                warp.local_written[word][lane as usize] = 0xf;
            }
        }
    }

    /// The text of one `printf`: flags and widths are left out.
    fn formatted(&mut self, warp: &Warp, format: &str, list: u64, lane: u32, line: u32) -> String {
        let (mut out, mut at) = (String::new(), list);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut wide = false;
            for c in chars.by_ref() {
                let size = if wide || matches!(c, 'f' | 'g' | 'e' | 's' | 'p') { 8 } else { 4 };
                match c {
                    'l' | 'z' => wide = true,
                    '%' => out.push('%'),
                    _ if !c.is_ascii_alphabetic() || c == 'h' => continue,
                    _ => {
                        at = at.next_multiple_of(u64::from(size));
                        let value = self.peek(warp, at, size, lane, line);
                        at += u64::from(size);
                        out.push_str(&match c {
                            'd' | 'i' if wide => (value as i64).to_string(),
                            'd' | 'i' => (value as i32).to_string(),
                            'x' | 'X' => format!("{value:x}"),
                            'f' | 'g' | 'e' => format!("{:.6}", f64::from_bits(value)),
                            's' => self.text(warp, value, lane, line),
                            'c' => char::from(value as u8).to_string(),
                            'p' => format!("{value:#x}"),
                            _ => value.to_string(),
                        });
                    }
                }
                if c != 'l' && c != 'z' {
                    break;
                }
            }
        }
        out
    }
}

/// Copies words of local memory, with what is known of them.
fn copy_local(warp: &mut Warp, from: u32, to: u32, bytes: u32, mask: u32) {
    for word in 0..bytes.div_ceil(4) as usize {
        let (from, to) = (from as usize / 4 + word, to as usize / 4 + word);
        for lane in lanes(mask) {
            let lane = lane as usize;
            warp.local[to][lane] = warp.local[from][lane];
            warp.local_written[to][lane] = warp.local_written[from][lane];
        }
    }
}
