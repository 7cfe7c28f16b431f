//! The lines of kernels that the suite executes, and those that it does not.
//!
//! The emulator records executed lines of PTX; PTX that is compiled with line information says where in the
//! sources each instruction is from. Lines that the compiler turned into no instruction of any program do not
//! count. A condition that became part of an instruction (a predicate, a selection) counts as executed
//! with it.
//!
//! Invariant: what is compared is the very code that was executed, which is found by its hash.

use mainstem_kernels::cuda::{Architecture, Code, ProgramCache, all_programs};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A line of a source file.
type SourceLine = (String, u32);

/// Lines of PTX, by the hash of the text that they are in.
type Executed = HashMap<u64, HashSet<u32>>;

/// Architecture of the emulated GPU.
const ARCHITECTURE: Architecture = Architecture { major: 8, minor: 0 };

/// The variable of the emulator that names the file.
pub const VARIABLE: &str = "CUDA_EMULATOR_COVERAGE";

/// Returns a file that the emulator can add executed lines to, without any.
pub fn begin() -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("coverage.txt");
    std::fs::write(&file, "").unwrap();
    file
}

/// Compares the lines in a file that the emulator wrote with all lines of sources that have code, program by
/// program, and prints how many of them were executed. Returns those that were not, with the formats of the
/// programs.
pub fn unexecuted(cache: &ProgramCache, file: &Path) -> Vec<String> {
    let executed = executed_lines(&std::fs::read_to_string(file).unwrap());
    let (mut all, mut count, mut left) = (BTreeSet::new(), 0, BTreeMap::<SourceLine, Vec<String>>::new());
    let programs = all_programs();
    for (program, defines) in &programs {
        let Code::Ptx(text) = cache.code(program, defines, ARCHITECTURE).unwrap() else {
            panic!("the emulator runs PTX");
        };
        let format =
            defines.iter().find_map(|(name, _)| name.strip_prefix("FORMAT_")).unwrap_or("all formats");
        let found = source_lines(&text, executed.get(&cuda::text_hash(&text)));
        assert!(!found.is_empty(), "the PTX of {program:?} has no line information");
        for (line, is_executed) in found {
            count += 1;
            if !is_executed {
                left.entry(line.clone()).or_default().push(format.to_owned());
            }
            all.insert(line);
        }
    }
    let missed: usize = left.values().map(Vec::len).sum();
    let (lines, programs) = (all.len(), programs.len());
    println!(
        "{lines} lines of kernels, {count} in all {programs} programs: {missed} of these are not executed"
    );
    left.into_iter()
        .map(|((file, line), formats)| format!("{file}:{line} ({})", formats.join(", ")))
        .collect()
}

/// Reads what the emulator wrote.
fn executed_lines(text: &str) -> Executed {
    let mut executed = Executed::new();
    for record in text.lines() {
        let (hash, lines) = record.split_once(' ').unwrap();
        let hash = u64::from_str_radix(hash, 16).unwrap();
        executed.entry(hash).or_default().extend(lines.split(' ').map(|line| line.parse::<u32>().unwrap()));
    }
    executed
}

/// Returns the lines of sources that PTX has instructions of, and whether one of them was executed.
fn source_lines(ptx: &str, executed: Option<&HashSet<u32>>) -> BTreeMap<SourceLine, bool> {
    let files: HashMap<&str, &str> = ptx.lines().filter_map(file).collect();
    let (mut here, mut found) = (Vec::new(), BTreeMap::new());
    for (number, line) in (1..).zip(ptx.lines().map(str::trim_start)) {
        if let Some(places) = line.strip_prefix(".loc") {
            here = places.split("inlined_at").filter_map(|place| source_line(place, &files)).collect();
        } else if line.contains(".entry") || line.starts_with(".func") {
            here.clear();
        } else if line.starts_with(|first: char| first == '@' || first.is_ascii_alphabetic()) {
            let is_executed = executed.is_some_and(|lines| lines.contains(&number));
            here.iter().for_each(|place| *found.entry(SourceLine::clone(place)).or_default() |= is_executed);
        }
    }
    found
}

/// Reads a directive `.file`: the number and the name of a source.
fn file(line: &str) -> Option<(&str, &str)> {
    let (number, path) = line.trim_start().strip_prefix(".file")?.trim().split_once(' ')?;
    Some((number, path.trim().trim_matches('"').rsplit('/').next()?))
}

/// Reads a place of a directive `.loc`, which begins with the numbers of the file and the line. Line 0 is of
/// no source.
fn source_line(place: &str, files: &HashMap<&str, &str>) -> Option<SourceLine> {
    let mut words = place.split_whitespace();
    let (file, line) = (words.next()?, words.next()?.parse().ok()?);
    (line > 0).then(|| (files[file].to_owned(), line))
}
