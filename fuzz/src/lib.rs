//! What the targets share: folders without files, one file for the formats that are mapped, and what becomes of
//! a thing that was opened.
//!
//! Invariant: a panic that the program itself catches, those of the tokenizers library, ends no run; any other does.

use mainstem::formats::{Checkpoint, Dtype, Folder};
use mainstem::text::{Detokenizer, Tokenizer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// What the last panic said, to be told if nobody catches it.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// A target of this name's function over bytes.
#[macro_export]
macro_rules! target {
    ($parse:path) => {
        libfuzzer_sys::fuzz_target!(init: $crate::keep_panics(), |bytes: &[u8]| {
            $crate::run(|| $parse(bytes))
        });
    };
}

/// Puts away the hook of libFuzzer, which ends the run before anything can be caught.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let mut last = LAST_PANIC.lock().unwrap_or_else(|broken| broken.into_inner());
        *last = format!("{panic}\n{}", std::backtrace::Backtrace::capture());
    }));
}

/// Does the work; a panic that comes out of it is a find.
pub fn run(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        eprintln!("{}", LAST_PANIC.lock().unwrap_or_else(|broken| broken.into_inner()));
        std::process::abort();
    }
}

/// A folder of these files.
pub fn folder(files: &[(&str, &[u8])]) -> Folder {
    Folder::memory("fuzz", files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())))
}

/// Writes the bytes over this process's one file and returns its path. It lies in memory where the system has
/// a place for that.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let place = parent.join(format!("mainstem-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a folder for files can be made");
    let path = place.join(name);
    std::fs::write(&path, bytes).expect("a file can be written");
    path
}

/// Reads all that can be computed with; every tensor has as many bytes as it says.
pub fn read_all(checkpoint: &Checkpoint) {
    checkpoint.total_bytes();
    for tensor in checkpoint.tensors() {
        if matches!(tensor.dtype, Dtype::Known(_)) {
            assert_eq!(tensor.bytes().len(), tensor.bytes_len(), "{}", tensor.name);
        }
    }
}

/// What a vocabulary makes of a text, there and back.
pub struct Spoken {
    /// Decoded at once.
    pub whole: String,
    /// Decoded as the ids come.
    pub in_pieces: String,
}

/// Takes a vocabulary at its word: every id it gives is below its size. `None` if it cannot say the text.
pub fn speak(tokenizer: Tokenizer) -> Option<Spoken> {
    let text = "Hello  there, 日本 \u{1f600}\t<s>123 the\u{301}\u{feff} <tool>[MASK] 's\r\n";
    let _ = tokenizer.token_id("<s>");
    let ids = tokenizer.encode(text, true).and(tokenizer.encode(text, false)).ok()?;
    for id in &ids {
        assert!((*id as usize) < tokenizer.vocab_size(), "id {id} of {}", tokenizer.vocab_size());
    }
    let whole = tokenizer.decode(&ids, false);
    let mut detokenizer = Detokenizer::new(Arc::new(tokenizer), false);
    let mut in_pieces: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
    in_pieces.push_str(&detokenizer.finish());
    Some(Spoken { whole: whole.ok()?, in_pieces })
}

/// The same of a vocabulary whose tokens are bytes side by side: text that comes in pieces is the text.
pub fn speak_in_bytes(tokenizer: Tokenizer) {
    if let Some(Spoken { whole, in_pieces }) = speak(tokenizer) {
        assert_eq!(whole, in_pieces);
    }
}

/// Tensors of a file that has them all, of its first layers and experts.
pub fn is_among_the_first(name: &str) -> bool {
    const FIRST: usize = 8;
    name.split('.').filter_map(|part| part.parse().ok()).all(|number: usize| number < FIRST)
}
