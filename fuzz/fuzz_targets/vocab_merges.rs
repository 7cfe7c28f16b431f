//! `vocab.json` and `merges.txt`, with a zero byte between them.

#![no_main]

use mainstem::text::Tokenizer;
use mainstem_fuzz::{check_byte_tokenizer, folder};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (vocabulary, merges) = (&bytes[..end], bytes.get(end + 1..).unwrap_or_default());
    let files = [("vocab.json", vocabulary), ("merges.txt", merges)];
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder(&files)) {
        check_byte_tokenizer(tokenizer);
    }
}
