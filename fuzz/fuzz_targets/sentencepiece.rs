//! `tokenizer.model`, of one of the classes that lie in such files.

#![no_main]

use mainstem::text::Tokenizer;
use mainstem_fuzz::{folder, speak_in_bytes};

mainstem_fuzz::target!(parse);

const CLASSES: [&str; 4] = ["LlamaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer", "NllbTokenizer"];

fn parse(bytes: &[u8]) {
    let class = CLASSES[bytes.len() % CLASSES.len()];
    let settings = format!(r#"{{"tokenizer_class": "{class}"}}"#);
    let files = [("tokenizer.model", bytes), ("tokenizer_config.json", settings.as_bytes())];
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder(&files)) {
        speak_in_bytes(tokenizer);
    }
}
