//! The models that are part of the program, so that it runs without any other: a small one that tells stories
//! and chats, and a smaller one that drafts for it.
//!
//! Invariant: both have one tokenizer, and every file is in the program once.

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

/// Its draft: guesses what [`DEMO`] will say.
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
