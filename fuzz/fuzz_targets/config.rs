//! `config.json`, resolved with the matching specification and with one other shipped one, for weights that
//! have every tensor of the first layers and for weights that have none.

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
    for spec in [matching(&config), chosen_by(bytes)] {
        let _ = spec.resolve(&config, &is_among_the_first);
        let _ = spec.resolve(&config, &|_| false);
    }
}

/// Returns the specification that contains the file's model type, or the first one if none does.
fn matching(config: &HubConfig) -> &'static SpecFile {
    let kind = format!("{:?}", config.str("model_type").unwrap_or_default());
    let place = specs::ALL.iter().position(|(_, text)| text.contains(&kind));
    &SHIPPED[place.unwrap_or_default()]
}

/// Returns a specification chosen by a hash of the bytes.
fn chosen_by(bytes: &[u8]) -> &'static SpecFile {
    let sum = bytes.iter().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)));
    &SHIPPED[sum % SHIPPED.len()]
}
