//! `model.bin` of CTranslate2, beside the files of a fixture.

#![no_main]

use mainstem::formats::Checkpoint;
use mainstem_fuzz::{folder, read_all};

mainstem_fuzz::target!(parse);

const CONFIG: &[u8] = include_bytes!("../../tests/fixtures/families/ctranslate2_marian/config.json");
const TOKENS: &[u8] =
    include_bytes!("../../tests/fixtures/families/ctranslate2_marian/shared_vocabulary.json");

fn parse(bytes: &[u8]) {
    let files = [("model.bin", bytes), ("config.json", CONFIG), ("shared_vocabulary.json", TOKENS)];
    if let Ok((checkpoint, _)) = Checkpoint::open_ctranslate2(&folder(&files)) {
        read_all(&checkpoint);
    }
}
