//! A llama2.c checkpoint of any version, and the same bytes as a `tokenizer.bin`.

#![no_main]

use mainstem::formats::Checkpoint;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::text::Tokenizer;
use mainstem_fuzz::{file, read_all, round_trip};

mainstem_fuzz::target!(parse);

/// Vocabulary size of the fixtures.
const VOCABULARY: usize = 512;

fn parse(bytes: &[u8]) {
    let path = file("model.bin", bytes);
    if let Ok(tokenizer) = Tokenizer::from_llama2c(&path, VOCABULARY) {
        round_trip(tokenizer);
    }
    if let Ok((checkpoint, _)) = Checkpoint::open_llama2c(&path) {
        read_all(&checkpoint);
        let _ = ModelSource::open(&ModelRef::Path(path), None);
    }
}
