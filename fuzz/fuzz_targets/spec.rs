//! A specification, resolved with an ordinary `config.json`.

#![no_main]

use mainstem::formats::HubConfig;
use mainstem::model::spec::SpecFile;
use mainstem_fuzz::{folder, is_among_the_first};
use std::sync::LazyLock;

mainstem_fuzz::target!(parse);

const CONFIG: &[u8] = include_bytes!("../../tests/fixtures/gqa/config.json");

static LLAMA: LazyLock<HubConfig> = LazyLock::new(|| {
    HubConfig::from_folder(&folder(&[("config.json", CONFIG)])).expect("the fixture must be valid")
});

fn parse(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(file) = SpecFile::parse("spec.toml", text) else { return };
    if let Ok(spec) = file.resolve(&LLAMA, &is_among_the_first) {
        spec.ignored.covers("model.layers.0.self_attn.rotary_emb.inv_freq.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
    }
}
