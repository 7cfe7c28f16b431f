//! Checks of complete vocabularies, which are too large for the repository, against recorded answers. Missing
//! files are reported and counted as skipped; a test harness would hide that, so this binary has none.
//!
//! `VOCABULARIES` is a directory with a subdirectory for each model: `gpt2`, `qwen2`, `roberta-base`,
//! `t5-small`,
//! `bert-base-cased`, `bert-base-uncased` and `mistral` with the tokenizers' files, and `ggml-vocab` with
//! llama.cpp's test vocabularies, its texts (`.inp`) and their ids (`.out`). With `VOCABULARIES_REQUIRED=1` a
//! missing file is a failure.
//!
//! Invariant: every check prints one line, skipped ones on standard error, and the last line counts them.

mod gguf;

use mainstem::formats::Folder;
use mainstem::text::Tokenizer;
use serde_json::Value;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Files of a model's folder, by where they come from in `VOCABULARIES`; or settings, as they are.
type Files<'a> = &'a [(&'a str, Source<'a>)];

#[derive(Clone, Copy)]
enum Source<'a> {
    File(&'a str),
    Settings(&'a str),
}
use Source::{File, Settings};

/// llama.cpp's texts with their ids, and the tokenizer under test.
const PAIRS: [(&str, &str, Files); 6] = [
    ("bert-bge", "GGUF bert", &[]),
    ("gpt-2", "GGUF gpt2", &[]),
    ("bert-bge", "vocab.txt", &[("vocab.txt", File("bert-base-uncased/vocab.txt"))]),
    (
        "gpt-2",
        "vocab.json",
        &[("vocab.json", File("gpt2/vocab.json")), ("merges.txt", File("gpt2/merges.txt"))],
    ),
    (
        "qwen2",
        "vocab.json, Qwen2",
        &[
            ("vocab.json", File("qwen2/vocab.json")),
            ("merges.txt", File("qwen2/merges.txt")),
            ("tokenizer_config.json", File("qwen2/tokenizer_config.json")),
        ],
    ),
    (
        "roberta-bpe",
        "vocab.json, RoBERTa",
        &[
            ("vocab.json", File("roberta-base/vocab.json")),
            ("merges.txt", File("roberta-base/merges.txt")),
            ("config.json", Settings(r#"{"model_type": "roberta"}"#)),
        ],
    ),
];

/// Two ways to have the same tokenizer.
const TWINS: [(&str, Files, Files); 2] = [
    (
        "Qwen2",
        &[
            ("vocab.json", File("qwen2/vocab.json")),
            ("merges.txt", File("qwen2/merges.txt")),
            ("tokenizer_config.json", File("qwen2/tokenizer_config.json")),
        ],
        &[("tokenizer.json", File("qwen2/tokenizer.json"))],
    ),
    (
        "RoBERTa",
        &[
            ("vocab.json", File("roberta-base/vocab.json")),
            ("merges.txt", File("roberta-base/merges.txt")),
            ("config.json", Settings(r#"{"model_type": "roberta"}"#)),
        ],
        &[("tokenizer.json", File("roberta-base/tokenizer.json"))],
    ),
];

fn main() -> ExitCode {
    // Like a test harness, `cargo test NAME` selects checks by name.
    let filters: Vec<_> = env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if !filters.is_empty() && !filters.iter().any(|filter| "vocabularies".contains(filter.as_str())) {
        println!("vocabularies: not run, for none of {filters:?} is in its name");
        return ExitCode::SUCCESS;
    }
    let mut report = Report::default();
    let whole = env::var_os("VOCABULARIES").map(PathBuf::from);
    for (name, what, files) in PAIRS {
        report.check(&format!("{what} gives the ids of {name}"), &whole, |whole| pair(whole, name, files));
    }
    for (name, one, other) in TWINS {
        report.check(&format!("{name} is the same either way"), &whole, |whole| twins(whole, one, other));
    }
    report
        .check("T5 is the same from a GGUF file", &whole, |whole| unigram(whole, "t5-small/tokenizer.json"));
    let recorded: Value = fixture("whole.json");
    for (name, answers) in recorded.as_object().expect("recorded answers by name") {
        report.check(&format!("{name} gives the recorded ids"), &whole, |whole| answered(whole, answers));
    }
    report.end()
}

/// The reason why a check did not pass.
enum Outcome {
    Missing(String),
    Wrong(String),
}

#[derive(Default)]
struct Report {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Report {
    fn check(&mut self, name: &str, whole: &Option<PathBuf>, check: impl Fn(&Path) -> Result<(), Outcome>) {
        let missing = || Outcome::Missing("VOCABULARIES names no folder".to_owned());
        let result = whole.as_deref().ok_or_else(missing).and_then(check);
        let is_required = env::var_os("VOCABULARIES_REQUIRED").is_some_and(|value| value == "1");
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("ok {name}");
            }
            Err(Outcome::Missing(why)) if !is_required => {
                self.skipped += 1;
                eprintln!("skipped: {name}: {why}");
            }
            Err(Outcome::Missing(why) | Outcome::Wrong(why)) => {
                self.failed += 1;
                println!("FAILED {name}: {why}");
            }
        }
    }

    fn end(self) -> ExitCode {
        let Report { passed, failed, skipped } = self;
        let failures = if failed > 0 { format!(", {failed} FAILED") } else { String::new() };
        println!("vocabularies: {passed} passed, {skipped} skipped{failures}");
        if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

/// llama.cpp's texts and ids, by a folder with these files, or without any by the GGUF file itself.
fn pair(whole: &Path, name: &str, files: Files) -> Result<(), Outcome> {
    let path = |ending: &str| format!("ggml-vocab/ggml-vocab-{name}.gguf{ending}");
    let text = |ending| String::from_utf8(read(whole, &path(ending))?).map_err(wrong);
    let (texts, ids) = (text(".inp")?, text(".out")?);
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let tokenizer = match files {
        [] => {
            let file = gguf::read(&read(whole, &path(""))?).map_err(Outcome::Wrong)?;
            Tokenizer::from_gguf(Path::new(&path("")), &file).map_err(wrong)?
        }
        files => folder(whole, files)?,
    };
    let ids: Vec<Vec<u32>> =
        ids.lines().map(|line| line.split_whitespace().flat_map(str::parse).collect()).collect();
    for (text, expected) in texts.iter().zip(&ids) {
        same(&tokenizer, text, expected)?;
    }
    let counted = (texts.len() - usize::from(texts.last() == Some(&"")), ids.len());
    if counted.0 == counted.1 {
        Ok(())
    } else {
        Err(Outcome::Wrong(format!("{counted:?} texts and answers")))
    }
}

/// Two ways to have the same tokenizer.
fn twins(whole: &Path, one: Files, other: Files) -> Result<(), Outcome> {
    agree(&folder(whole, one)?, &folder(whole, other)?, <[u32]>::eq)
}

/// A `tokenizer.json` with a unigram model, read by the library; and its vocabulary, by us.
fn unigram(whole: &Path, json: &str) -> Result<(), Outcome> {
    let library = folder(whole, &[("tokenizer.json", File(json))])?;
    let ours = gguf::of_unigram(&read(whole, json)?).map_err(Outcome::Wrong)?;
    let ours = Tokenizer::from_gguf(Path::new("vocabulary.gguf"), &ours).map_err(wrong)?;
    // The library adds scores up in double precision, and so finds another order of the same pieces better.
    let sorted = |ids: &[u32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    agree(&ours, &library, |one, other| sorted(one) == sorted(other))
}

/// Checks that two tokenizers agree on all texts and on mixtures of them.
fn agree(one: &Tokenizer, other: &Tokenizer, same: impl Fn(&[u32], &[u32]) -> bool) -> Result<(), Outcome> {
    let texts: Vec<String> = serde_json::from_value(fixture("texts.json")).map_err(wrong)?;
    let joined = texts.windows(3).map(<[String]>::concat);
    for text in texts.iter().cloned().chain(joined) {
        let expected = other.encode(&text, true).map_err(wrong)?;
        let found = one.encode(&text, true).map_err(wrong)?;
        if !same(&found, &expected) {
            return Err(Outcome::Wrong(format!("{text:?} gives {found:?}, and {expected:?}")));
        }
    }
    Ok(())
}

/// Checks the recorded answers for a directory of these files.
fn answered(whole: &Path, answers: &Value) -> Result<(), Outcome> {
    let settings = answers["settings"].to_string();
    let (name, source) = (&answers["name"], &answers["source"]);
    let named = |value: &'_ Value| value.as_str().map(str::to_owned).ok_or_else(|| wrong("it has no name"));
    let (name, source) = (named(name)?, named(source)?);
    let files = [(name.as_str(), File(&source)), ("tokenizer_config.json", Settings(&settings))];
    let tokenizer = folder(whole, &files)?;
    let texts: Vec<String> = serde_json::from_value(fixture("texts.json")).map_err(wrong)?;
    let ids: Vec<Vec<u32>> = serde_json::from_value(answers["ids"].clone()).map_err(wrong)?;
    texts.iter().zip(&ids).try_for_each(|(text, expected)| same(&tokenizer, text, expected))
}

fn same(tokenizer: &Tokenizer, text: &str, expected: &[u32]) -> Result<(), Outcome> {
    let found = tokenizer.encode(text, false).map_err(wrong)?;
    let different = || Outcome::Wrong(format!("{text:?} gives {found:?}, and should give {expected:?}"));
    if found != expected {
        return Err(different());
    }
    for most in [0, found.len() / 4, found.len() / 2, found.len()] {
        let bound = tokenizer.fewest_above(text, most);
        if bound.is_some_and(|bound| bound > found.len()) {
            let count = found.len();
            return Err(Outcome::Wrong(format!("{text:?} has {count} tokens, not at least {bound:?}")));
        }
    }
    Ok(())
}

/// Returns the tokenizer of a directory with these files.
fn folder(whole: &Path, files: Files) -> Result<Tokenizer, Outcome> {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("vocabularies-{}", std::process::id()));
    let made = fs::create_dir_all(&place).map_err(wrong).and_then(|()| {
        for (name, source) in files {
            let content = match source {
                File(path) => read(whole, path)?,
                Settings(text) => text.as_bytes().to_vec(),
            };
            fs::write(place.join(name), content).map_err(wrong)?;
        }
        Tokenizer::from_folder(&Folder::disk(&place)).map_err(|error| Outcome::Wrong(format!("{error:#}")))
    });
    fs::remove_dir_all(&place).map_err(wrong)?;
    made
}

fn read(whole: &Path, name: &str) -> Result<Vec<u8>, Outcome> {
    fs::read(whole.join(name)).map_err(|error| Outcome::Missing(format!("{name}: {error}")))
}

fn fixture(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name);
    let content = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&content).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn wrong(error: impl ToString) -> Outcome {
    Outcome::Wrong(error.to_string())
}
