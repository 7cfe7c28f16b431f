//! The kernels of the CUDA backend, compiled for every architecture: none spills, and each takes at most the
//! registers that `kernels.txt` says. Without NVRTC the check is skipped, which is printed; with
//! `NVRTC_FOLDER`, the folder that has it, it is required. The table is of one version of NVRTC, and is not
//! compared with the code of others. `UPDATE_KERNELS` set writes it anew. With
//! `PTX_ONLY` set, kernels are compiled to PTX and the table is not checked: for other versions of NVRTC.
//!
//! A program without a harness, so that what is skipped is seen.

use mainstem_kernels::cuda::{Architecture, Nvrtc, Program, all_programs};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The architectures, as pairs of numbers.
const ARCHITECTURES: [(u32, u32); 5] = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)];

/// Most programs that shipped models may need on one GPU.
const MOST_PROGRAMS: usize = 150;

/// Registers of a kernel, by its name with that of the program, for each architecture.
type Registers = BTreeMap<String, [u32; ARCHITECTURES.len()]>;

fn main() {
    let folder = std::env::var_os("NVRTC_FOLDER").map(PathBuf::from);
    let nvrtc = match Nvrtc::open(folder.as_deref()) {
        Ok(nvrtc) => nvrtc,
        Err(error) if folder.is_none() => {
            println!("skipped: the registers of kernels ({error})");
            return;
        }
        Err(error) => panic!("NVRTC_FOLDER: {error}"),
    };
    let count = all_programs().len();
    assert!(count <= MOST_PROGRAMS, "{count} programs");
    if std::env::var_os("PTX_ONLY").is_some() {
        for_each_program(|program, defines, _| {
            for (major, minor) in [(8, 0), (9, 0)] {
                nvrtc.compile(program.source, defines, Architecture { major, minor }, false).unwrap();
            }
        });
        return println!("NVRTC {} compiles all {count} programs to PTX", nvrtc.version());
    }
    let found = registers(&nvrtc);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels.txt");
    if std::env::var_os("UPDATE_KERNELS").is_some() {
        std::fs::write(&file, heading(&nvrtc) + &table(&found)).unwrap();
    }
    let known = std::fs::read_to_string(&file).unwrap();
    if known.lines().next() != Some(&heading(&nvrtc)) {
        assert!(folder.is_none(), "kernels.txt is of another version of NVRTC than {}", nvrtc.version());
        return println!("skipped: the table of registers is of another version than {}", nvrtc.version());
    }
    let known: Registers = known.lines().filter(|line| !line.starts_with('#')).map(row).collect();
    let names = |registers: &Registers| registers.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&known), "kernels.txt lists the kernels; UPDATE_KERNELS writes it anew");
    for (name, found) in &found {
        let most = &known[name];
        let is_within = found.iter().zip(most).all(|(found, most)| found <= most);
        assert!(is_within, "{name} takes {found:?} registers, and kernels.txt says {most:?}");
    }
    println!("{} kernels of {count} programs for {} architectures", found.len(), ARCHITECTURES.len());
}

/// Calls `work` with each program, its macros, and a text that names both, on all cores.
fn for_each_program(work: impl Fn(&Program, &[(String, String)], &str) + Sync) {
    let (programs, next) = (all_programs(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |cores| cores.get()) {
            scope.spawn(|| {
                while let Some((program, defines)) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let format = defines.iter().find_map(|(name, _)| name.strip_prefix("FORMAT_"));
                    let name = [program.name, format.unwrap_or("")].join(" ").trim_end().to_lowercase();
                    work(program, defines, &name);
                }
            });
        }
    });
}

/// Returns the registers of all kernels. Panics if one spills.
fn registers(nvrtc: &Nvrtc) -> Registers {
    let found = Mutex::new(Registers::new());
    for_each_program(|program, defines, name| {
        for (at, (major, minor)) in ARCHITECTURES.into_iter().enumerate() {
            let architecture = Architecture { major, minor };
            let kernels = nvrtc.resources(program.source, defines, architecture).unwrap();
            assert!(!kernels.is_empty(), "{name}: the log lists no kernels");
            for kernel in kernels {
                let name = format!("{name} {}", kernel.entry);
                assert_eq!(kernel.local_bytes, 0, "{name} on {architecture}: bytes of local memory");
                found.lock().unwrap().entry(name).or_default()[at] = kernel.registers;
            }
        }
    });
    found.into_inner().unwrap()
}

/// Returns the first line of the table, which has the version that it is of.
fn heading(nvrtc: &Nvrtc) -> String {
    format!("# Registers of a thread of each kernel, compiled by NVRTC {}", nvrtc.version())
}

fn table(registers: &Registers) -> String {
    let mut text = "\n# on".to_owned();
    for (major, minor) in ARCHITECTURES {
        let _ = write!(text, " sm_{major}{minor}");
    }
    text.push('\n');
    for (name, registers) in registers {
        let numbers: Vec<String> = registers.iter().map(u32::to_string).collect();
        let _ = writeln!(text, "{name}: {}", numbers.join(" "));
    }
    text
}

/// Reads a row of the table.
fn row(line: &str) -> (String, [u32; ARCHITECTURES.len()]) {
    let (name, numbers) = line.split_once(": ").unwrap_or_else(|| panic!("kernels.txt: {line}"));
    let numbers: Vec<u32> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
    (name.to_owned(), numbers.try_into().unwrap_or_else(|_| panic!("kernels.txt: {line}")))
}
