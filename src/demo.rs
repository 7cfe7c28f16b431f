//! The models embedded in the program: a small one that tells stories and chats, and a smaller draft model
//! for speculative decoding with it.
//!
//! Invariant: both have the same tokenizer, and every file is embedded once.

use crate::formats::EmbeddedFolder;

macro_rules! asset {
    ($file:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/", $file))
    };
}

static TOKENIZER: &[u8] = asset!("demo/tokenizer.json");
static TOKENIZER_CONFIG: &[u8] = asset!("demo/tokenizer_config.json");

/// The demo model.
pub static DEMO: EmbeddedFolder = EmbeddedFolder {
    name: "mainstem-demo",
    files: &[
        ("config.json", asset!("demo/config.json")),
        ("generation_config.json", asset!("demo/generation_config.json")),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("model.safetensors", asset!("demo/model.safetensors")),
    ],
};

/// The draft model of [`DEMO`], for speculative decoding.
pub static DRAFT: EmbeddedFolder = EmbeddedFolder {
    name: "mainstem-demo-draft",
    files: &[
        ("config.json", asset!("demo-draft/config.json")),
        ("generation_config.json", asset!("demo-draft/generation_config.json")),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("model.safetensors", asset!("demo-draft/model.safetensors")),
    ],
};
