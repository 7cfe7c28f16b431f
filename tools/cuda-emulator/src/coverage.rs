//! Lines of PTX that were executed, in a file that several processes may append to.
//!
//! Invariant: a line is in the file once it was executed, however the process ends.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A file with the lines of modules that were executed. Each of its lines is [`text_hash`] of a module's text
/// in hexadecimal, and numbers of lines of that text.
#[derive(Debug)]
pub(crate) struct Coverage {
    state: Mutex<(File, HashMap<u64, Vec<bool>>)>,
}

impl Coverage {
    /// Appends to a file, which is created if there is none.
    pub(crate) fn open(path: &Path) -> io::Result<Coverage> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Coverage { state: Mutex::new((file, HashMap::new())) })
    }

    /// Adds lines of the module with this hash of its text.
    pub(crate) fn add(&self, hash: u64, lines: impl Iterator<Item = u32>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, known) = &mut *state;
        let known = known.entry(hash).or_default();
        let mut text = format!("{hash:016x}");
        let before = text.len();
        for line in lines {
            let at = line as usize;
            known.resize(known.len().max(at + 1), false);
            if !std::mem::replace(&mut known[at], true) {
                let _ = write!(text, " {line}");
            }
        }
        if text.len() > before {
            text.push('\n');
            // One write, so that those of other processes stay whole.
            if let Err(error) = file.write_all(text.as_bytes()) {
                eprintln!("cuda-emulator: CUDA_EMULATOR_COVERAGE: {error}");
            }
        }
    }
}

/// Returns the hash of a module's text in files of coverage (FNV-1a, 64 bits).
pub fn text_hash(text: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Config;
    use crate::machine::{Machine, Params, Shape};
    use std::sync::Arc;

    const TEXT: &str = ".version 8.8
.target sm_80
.address_size 64
.visible .entry k(.param .u32 n) {
    .reg .pred %p;
    .reg .b32 %r<2>;
    ld.param.u32 %r0, [n];
    setp.eq.u32 %p, %r0, 0;
    @%p bra done;
    add.u32 %r1, %r0, 1;
done:
    ret;
}
";

    #[test]
    fn executed_lines_are_appended_once() {
        let path = std::env::temp_dir().join(format!("emulator-coverage-{}", std::process::id()));
        let coverage = Some(Arc::new(Coverage::open(&path).expect("the folder is writable")));
        let config =
            Config { arch: 80, seed: 0, instructions: 1000, global_races: true, corners: false, coverage };
        let mut machine = Machine::with(0, 1 << 20, config);
        let module = machine.load(TEXT).expect("it is well-formed");
        for n in [0, 0, 1] {
            machine
                .launch(&module, "k", Shape::linear(1, 1), Params::new().u32(n).bytes())
                .expect("it is there");
        }
        let hash = text_hash(TEXT);
        let text = std::fs::read_to_string(&path).expect("it was written");
        assert_eq!(text, format!("{hash:016x} 7 8 9 12\n{hash:016x} 10\n"));
        std::fs::remove_file(&path).expect("it is there");
    }
}
