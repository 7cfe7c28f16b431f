//! `tokenizer.model`, with one of the tokenizer classes that use this file.

#![no_main]

use mainstem::text::Tokenizer;
use mainstem_fuzz::{check_byte_tokenizer, folder};

mainstem_fuzz::target!(parse);

const CLASSES: [&str; 4] = ["LlamaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer", "NllbTokenizer"];

fn parse(bytes: &[u8]) {
    let class = CLASSES[bytes.len() % CLASSES.len()];
    let settings = format!(r#"{{"tokenizer_class": "{class}"}}"#);
    let files = [("tokenizer.model", bytes), ("tokenizer_config.json", settings.as_bytes())];
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder(&files)) {
        check_byte_tokenizer(tokenizer);
    }
}
