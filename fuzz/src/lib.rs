//! Helpers shared by the fuzz targets: in-memory folders, a file for formats that are memory-mapped, and
//! checks of opened checkpoints and tokenizers.
//!
//! Invariant: a panic that the program itself catches, as it does for the tokenizers library, does not end a
//! run; any other panic does.

pub mod constraint;
pub mod engine;

use mainstem::formats::{Checkpoint, Dtype, Folder};
use mainstem::text::{Detokenizer, Tokenizer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Message and backtrace of the last panic, printed if the program does not catch it.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Defines a fuzz target that passes the input bytes to the given function.
#[macro_export]
macro_rules! target {
    ($parse:path) => {
        libfuzzer_sys::fuzz_target!(init: $crate::keep_panics(), |bytes: &[u8]| {
            $crate::run(|| $parse(bytes))
        });
    };
}

/// Replaces libFuzzer's panic hook, which would end the run before a panic can be caught, with one that
/// records the panic.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let mut last = LAST_PANIC.lock().unwrap_or_else(|broken| broken.into_inner());
        *last = format!("{panic}\n{}", std::backtrace::Backtrace::capture());
    }));
}

/// Runs `work`. Reports a panic that `work` does not catch as a finding, by aborting the process.
pub fn run(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        eprintln!("{}", LAST_PANIC.lock().unwrap_or_else(|broken| broken.into_inner()));
        std::process::abort();
    }
}

/// Returns an in-memory folder with these files, given as (name, content).
pub fn folder(files: &[(&str, &[u8])]) -> Folder {
    Folder::memory("fuzz", files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())))
}

/// Writes the bytes to this process's file called `name`, replacing its content, and returns the path. Uses
/// an in-memory file system if there is one.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let folder = parent.join(format!("mainstem-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("creating a temporary folder must succeed");
    let path = folder.join(name);
    std::fs::write(&path, bytes).expect("writing a temporary file must succeed");
    path
}

/// Reads every tensor of a supported type and checks that it has the size it declares.
pub fn read_all(checkpoint: &Checkpoint) {
    checkpoint.total_bytes();
    for tensor in checkpoint.tensors() {
        if matches!(tensor.dtype, Dtype::Known(_)) {
            assert_eq!(tensor.bytes().len(), tensor.bytes_len(), "{}", tensor.name);
        }
    }
}

/// A text after encoding and decoding.
pub struct RoundTrip {
    /// Decoded from all ids at once.
    pub whole: String,
    /// Decoded incrementally, id by id.
    pub in_pieces: String,
}

/// Encodes and decodes a text, and checks that every id is below the vocabulary size. Returns `None` if the
/// tokenizer cannot encode or decode the text.
pub fn round_trip(tokenizer: Tokenizer) -> Option<RoundTrip> {
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
    Some(RoundTrip { whole: whole.ok()?, in_pieces })
}

/// Round-trips a text through a tokenizer whose tokens are byte sequences, and checks that incremental
/// decoding gives the same text as decoding at once.
pub fn check_byte_tokenizer(tokenizer: Tokenizer) {
    if let Some(RoundTrip { whole, in_pieces }) = round_trip(tokenizer) {
        assert_eq!(whole, in_pieces);
    }
}

/// Whether a tensor belongs to the first layers and experts; simulates a file that has all tensors of these.
pub fn is_among_the_first(name: &str) -> bool {
    const FIRST: usize = 8;
    name.split('.').filter_map(|part| part.parse().ok()).all(|number: usize| number < FIRST)
}
