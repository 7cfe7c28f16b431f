//! Checks of the source tree that the compiler and clippy do not make: which module imports which, how
//! long files and functions are, where tests live, and how documentation is worded. `tests/tree.rs` runs
//! them on this repository; `docs/architecture.md` explains the rules.
//!
//! Invariant: a check reads files and nothing else, and reports every offence with its file and line.

mod cycles;
mod dependencies;
mod docs;
mod keys;
mod modules;
mod sizes;
mod source;

pub use cycles::{cycles, known_cycles};
pub use dependencies::{Dependencies, forbidden_imports};
pub use docs::{first_words, undocumented};
pub use keys::{strings_with, toml_keys, undocumented_keys};
pub use modules::{misplaced_tests, module_style};
pub use sizes::{long_files, long_functions, wide_lines};
pub use source::{Source, Tree};

/// One violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Offence {
    /// Path of the file, relative to the root of the tree.
    pub path: String,
    /// Line, counted from 1.
    pub line: usize,
    /// The problem, and what would be right.
    pub problem: String,
}

impl Offence {
    /// An offence in `source` at `line`.
    pub fn new(source: &Source, line: usize, problem: impl Into<String>) -> Offence {
        Offence { path: source.path.clone(), line, problem: problem.into() }
    }
}

impl std::fmt::Display for Offence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.problem)
    }
}
