//! Texts of operators: configuration files, key files, descriptions of hardware, weight rules, names of
//! models and shapes, numbers with units. The first byte chooses the kind.

#![no_main]

use mainstem::config::{Config, Overrides, parse_bytes, parse_duration};
use mainstem::hub::HubReference;
use mainstem::model::ModelRef;
use mainstem::model::synthetic::SyntheticShape;
use mainstem::planner::Hardware;
use mainstem::quantize::{MatrixNames, WeightRules};
use mainstem_fuzz::file;
use mainstem_kernels::QuantType;

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(rest) else { return };
    match kind % 8 {
        0..=2 => {
            let path = file("mainstem.toml", rest);
            match Config::load(Some(&path), Overrides::default()) {
                Ok(config) => _ = config.server.load_api_keys(),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        3 => {
            let mut flags = Overrides::default();
            flags.set("server.api_key_file", Some(file("keys", rest).display().to_string()));
            if let Ok(config) = Config::load(None, flags) {
                _ = config.server.load_api_keys();
            }
        }
        4 => _ = Hardware::read(&file("hardware.toml", rest)),
        5 => check_rules(text),
        6 => {
            _ = ModelRef::parse(text);
            if let Ok(reference) = HubReference::parse(text) {
                let again = HubReference::parse(&reference.to_string()).expect("a reference is one again");
                assert_eq!(again.to_string(), reference.to_string());
            }
        }
        _ => {
            _ = SyntheticShape::parse(text);
            _ = (parse_bytes(text), parse_duration(text));
        }
    }
}

/// Parses weight rules, and applies them to a matrix.
fn check_rules(text: &str) {
    let Ok(rules) = WeightRules::parse(text) else { return };
    let matrix = MatrixNames {
        role: "down",
        name: "model.layers.7.mlp.down_proj.weight",
        pattern: "model.layers.{i}.mlp.down_proj.weight",
    };
    let ty = rules.load_type(&matrix, QuantType::F32, &[1024, 1000]);
    assert!(ty.bytes(1000).is_some(), "the rows of {ty} are whole blocks");
    rules.unused_pattern(&[matrix]);
}
