//! `config.json`, with every specification that ships, for a file that has any tensor of the first layers and for one
//! that has none.

#![no_main]

use mainstem::formats::HubConfig;
use mainstem::model::spec::SpecFile;
use mainstem::specs;
use mainstem_fuzz::{folder, is_among_the_first};
use std::sync::LazyLock;

mainstem_fuzz::target!(parse);

static SHIPPED: LazyLock<Vec<SpecFile>> = LazyLock::new(|| {
    let read = |(file, text): &(&str, &str)| SpecFile::parse(file, text).expect("a shipped specification");
    specs::ALL.iter().map(read).collect()
});

fn parse(bytes: &[u8]) {
    let Ok(config) = HubConfig::from_folder(&folder(&[("config.json", bytes)])) else { return };
    for spec in SHIPPED.iter() {
        let _ = spec.resolve(&config, &is_among_the_first);
        let _ = spec.resolve(&config, &|_| false);
    }
}
