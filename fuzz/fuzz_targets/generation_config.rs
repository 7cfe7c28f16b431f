//! The small configuration files of a folder, all with the same content.

#![no_main]

use mainstem::formats::{ChatConfig, GenerationConfig, HubConfig, SentenceConfig};
use mainstem_fuzz::folder;

mainstem_fuzz::target!(parse);

const FILES: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "modules.json",
    "1_Pooling/config.json",
];

fn parse(bytes: &[u8]) {
    let folder = folder(&FILES.map(|file| (file, bytes)));
    let _ = SentenceConfig::from_folder(&folder);
    let _ = ChatConfig::from_folder(&folder);
    if let Ok(config) = HubConfig::from_folder(&folder) {
        let _ = GenerationConfig::from_folder(&folder, &config);
    }
}
