//! Tests that the tables of families in docs/models.md name the fixtures that prove each family.
//!
//! Invariant: a fixture that the page names is one whose answers are checked.

use crate::families::{decoders, family, others};
use crate::oracle;
use mainstem::model::spec::SpecFile;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::specs;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Rows of the tables: the fixtures of each specification.
fn rows() -> BTreeMap<String, BTreeSet<String>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let (_, section) = page.split_once("\n## Built-in specifications\n").expect("it has the section");
    let (section, _) = section.split_once("\n## ").expect("others follow");
    let mut rows = BTreeMap::new();
    for row in section.lines().filter(|line| line.starts_with("| ") && !line.contains("| specification |")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let names = |cell: &str| -> BTreeSet<String> {
            cell.split(',').map(|name| name.trim().trim_matches('`').to_owned()).collect()
        };
        let [_, name, fixtures] = cells[..] else { panic!("it has three cells: {row}") };
        let fixtures = rows.insert(names(name).into_iter().collect(), names(fixtures));
        assert!(fixtures.is_none(), "another row has the specification: {row}");
    }
    rows
}

/// Every built-in specification has a row with all fixtures of its families, and no others.
#[test]
fn every_specification_has_a_row_with_the_fixtures_that_prove_it() {
    let mut rows = rows();
    let mut proofs: BTreeMap<Vec<String>, BTreeSet<String>> = BTreeMap::new();
    for name in decoders().iter().copied().chain(others()) {
        let model = family(name, "table");
        let source = ModelSource::open(&ModelRef::Path(model.0.clone()), None).expect("the model opens");
        proofs.entry(source.spec.provenance.model_types.clone()).or_default().insert(name.to_owned());
    }
    for name in oracle::fixtures() {
        let types = if name == "llama2c" { specs::LLAMA2C } else { "llama" };
        let types = SpecFile::for_model_type(types).expect("it is built in");
        proofs.entry(types.model_types().to_vec()).or_default().insert(name.to_owned());
    }
    for (file, _) in specs::ALL {
        let name = specs::name_of(file);
        let fixtures = rows.remove(name).unwrap_or_else(|| panic!("docs/models.md has no row of {name}"));
        let spec = SpecFile::named(name).expect("it is built in");
        let proofs = proofs.get(spec.model_types());
        assert_eq!(Some(&fixtures), proofs, "left: the row of {name} in docs/models.md; right: its fixtures");
    }
    assert!(rows.is_empty(), "rows of no specification: {rows:?}");
}
