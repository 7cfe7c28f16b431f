//! A formula of a specification.

#![no_main]

use mainstem::model::spec::formula;

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(value) = formula::evaluate(text, &mut |name| Ok(name.len() as f64)) {
        assert!(value.is_finite(), "{text} is {value}");
    }
}
