//! Instructions that kernels use, one at a time: their results on the GPU must be those in `probes.txt`,
//! which the emulator gave. They run on the emulator, or with `MAINSTEM_GPU` set on the machine's GPU, where
//! a difference means that the emulator's author misread the manual, or that a kernel may not rely on these
//! bits. Without NVRTC they are skipped, which is printed; with `NVRTC_FOLDER`, the folder that has it, they
//! are required. `UPDATE_PROBES` set writes the file anew.
//!
//! A program without a harness, so that what is skipped is seen.

use cuda::Emulator;
use mainstem_kernels::cuda::{Arguments, Context, Driver, Grid, Nvrtc, Program, ProgramCache};
use mainstem_kernels::random::philox;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const PROBES: Program = Program { name: "probes", source: include_str!("probes.cu") };

/// The only probe whose numbers may differ in their last bits, by this much relative to the number.
const APPROXIMATE: (&str, f32) = ("approximate_functions", 1e-6);

const LANES: usize = 32;
const RESULTS: usize = 4;

fn main() {
    let folder = std::env::var_os("NVRTC_FOLDER").map(PathBuf::from);
    let is_real = std::env::var_os("MAINSTEM_GPU").is_some();
    let emulator = (!is_real).then(Emulator::load);
    let driver = Driver::open().unwrap();
    let programs = match Nvrtc::open(folder.as_deref()) {
        Ok(nvrtc) => ProgramCache::new(nvrtc, None, driver.version()),
        Err(error) if folder.is_none() => {
            println!("skipped: probes of instructions ({error})");
            return;
        }
        Err(error) => panic!("NVRTC_FOLDER: {error}"),
    };
    let mut context = Context::new(&driver, 0, programs).unwrap();
    let names = PROBES.source.split("\nPROBE(").skip(1).filter_map(|rest| rest.split(')').next());
    let mut found = String::new();
    for (number, name) in names.enumerate() {
        let words = run(&mut context, name, number as u32).map(|word| format!("{word:08x}"));
        let _ = writeln!(found, "{name}: {}", words.collect::<Vec<_>>().join(" "));
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/probes.txt");
    if std::env::var_os("UPDATE_PROBES").is_some() {
        std::fs::write(&file, &found).unwrap();
    }
    let known = std::fs::read_to_string(&file).unwrap_or_else(|_| include_str!("probes.txt").to_owned());
    assert_eq!(found.lines().count(), known.lines().count(), "probes.txt lists the probes");
    let differ: Vec<String> =
        found.lines().zip(known.lines()).filter_map(|(found, known)| difference(found, known)).collect();
    assert!(differ.is_empty(), "instructions that differ:\n{}", differ.join("\n"));
    println!("{} probes", known.lines().count());
    drop((context, emulator));
}

/// Returns the results of a probe, lane by lane.
fn run(context: &mut Context, name: &str, number: u32) -> impl Iterator<Item = u32> {
    let words = (0..64).flat_map(|i| philox([i, number, 0, 0], [11, 7]));
    let mut bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let mut input = context.alloc(bytes.len()).unwrap();
    context.upload(&mut input, 0, &bytes).unwrap();
    bytes.truncate(LANES * RESULTS * 4);
    let output = context.alloc(bytes.len()).unwrap();
    let kernel = context.kernel(&PROBES, &[], name, 0).unwrap();
    let grid = Grid { blocks: [1; 3], threads: LANES as u32, shared: 0 };
    let arguments = Arguments::default().buf(&input, input.len()).buf(&output, bytes.len());
    // Sound: these are the arguments of the kernel, and it writes four words for each lane.
    unsafe { context.launch(kernel, grid, arguments) }.unwrap();
    context.download(&output, 0, &mut bytes).unwrap();
    let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    words.into_iter()
}

/// Returns the first difference between two lines of results, if there is one that matters.
fn difference(found: &str, known: &str) -> Option<String> {
    let (name, _) = known.split_once(':')?;
    let number = |word: &str| u32::from_str_radix(word, 16).map_or(f32::NAN, f32::from_bits);
    let is_near = |found: &str, known: &str| {
        name == APPROXIMATE.0 && (number(found) - number(known)).abs() <= APPROXIMATE.1 * number(known).abs()
    };
    let words = found.split(' ').zip(known.split(' ')).enumerate();
    let mut different = words.filter(|(_, (found, known))| found != known && !is_near(found, known));
    different.next().map(|(at, (found, known))| {
        let (lane, result) = ((at.max(1) - 1) / RESULTS, (at.max(1) - 1) % RESULTS);
        format!("{name}: lane {lane}, result {result}: {found}, not {known}")
    })
}
