//! This repository keeps the rules that `tidy` checks.

use std::path::{Path, PathBuf};
use tidy::{Dependencies, Offence, Tree};

fn root() -> PathBuf {
    // At run time: checkouts that share a target folder also share this executable.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("Cargo runs the tests");
    Path::new(&package).join("../..")
}

fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn tree() -> Tree {
    Tree::read(&root()).expect("the sources can be read")
}

fn assert_none(offences: &[Offence]) {
    let lines: Vec<String> = offences.iter().map(Offence::to_string).collect();
    assert!(lines.is_empty(), "{} offences:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn the_whole_tree_is_read() {
    assert!(tree().products().count() > 400, "{} product files", tree().products().count());
    assert!(tree().sources.iter().any(|source| source.path == "src/actors/decode/mod.rs"));
}

#[test]
fn modules_import_what_the_architecture_allows() {
    let dependencies = Dependencies::parse(&page("docs/architecture.md")).expect("the page has the rules");
    assert_none(&tidy::forbidden_imports(&tree(), &dependencies));
}

#[test]
fn circles_only_get_fewer() {
    let known = tidy::known_cycles(&page("tools/tidy/cycles.txt"));
    let cycles = tidy::cycles(&tree());
    let list = |cycles: &[Vec<String>]| cycles.iter().map(|c| c.join(" ")).collect::<Vec<_>>().join("\n");
    assert!(
        cycles == known,
        "tools/tidy/cycles.txt, which may only get shorter, should be:\n{}",
        list(&cycles)
    );
}

#[test]
fn functions_are_short() {
    assert_none(&tidy::long_functions(&tree()));
}

#[test]
fn files_are_short() {
    assert_none(&tidy::long_files(&tree()));
}

#[test]
fn lines_are_narrow() {
    assert_none(&tidy::wide_lines(&tree()));
}

#[test]
fn modules_are_folders_with_mod_rs() {
    assert_none(&tidy::module_style(&tree()));
}

#[test]
fn tests_live_in_files_called_so() {
    assert_none(&tidy::misplaced_tests(&tree()));
}

#[test]
fn documentation_names_its_item_in_the_terms_of_the_field() {
    assert_none(&tidy::first_words(&tree()));
}

#[test]
fn public_items_are_documented() {
    assert_none(&tidy::undocumented(&tree()));
}

#[test]
fn every_key_and_metric_has_a_row() {
    let keys = page("config/mainstem.toml");
    assert_none(&tidy::undocumented_keys(
        "config/mainstem.toml",
        &tidy::toml_keys(&keys),
        &page("docs/configuration.md"),
    ));
    let table = page("src/telemetry/mod.rs");
    let (table, _) = table.split_once("#[cfg(test)]").unwrap_or((&table, ""));
    let metrics = tidy::strings_with(table, "mainstem_");
    assert!(metrics.len() > 20, "the table of metrics is read");
    assert_none(&tidy::undocumented_keys("src/telemetry/mod.rs", &metrics, &page("docs/metrics.md")));
}
