//! A tiktoken file of ranks, with one of the two tokenizer classes that use it.

#![no_main]

use mainstem::text::Tokenizer;
use mainstem_fuzz::{check_byte_tokenizer, folder};

mainstem_fuzz::target!(parse);

const CLASSES: [&str; 2] = ["LlamaTokenizer", "QWenTokenizer"];

fn parse(bytes: &[u8]) {
    let class = CLASSES[bytes.len() % CLASSES.len()];
    let settings = format!(r#"{{"tokenizer_class": "{class}"}}"#);
    let files = [("tiktoken.model", bytes), ("tokenizer_config.json", settings.as_bytes())];
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder(&files)) {
        check_byte_tokenizer(tokenizer);
    }
}
