//! `vocab.txt`.

#![no_main]

use mainstem::text::Tokenizer;
use mainstem_fuzz::{folder, round_trip};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder(&[("vocab.txt", bytes)])) {
        round_trip(tokenizer);
    }
}
