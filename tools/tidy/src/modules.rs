//! Places of modules and tests.

use crate::source::attributes;
use crate::{Offence, Source, Tree};

/// Files `name.rs` beside a folder `name/`: a module with children is `name/mod.rs`.
pub fn module_style(tree: &Tree) -> Vec<Offence> {
    let has_folder = |source: &&Source| {
        let folder = format!("{}/", source.path.trim_end_matches(".rs"));
        tree.sources.iter().any(|other| other.path.starts_with(&folder))
    };
    let offence = |source: &Source| {
        let folder = source.path.trim_end_matches(".rs");
        Offence::new(source, 1, format!("a module with children is {folder}/mod.rs"))
    };
    tree.sources.iter().filter(has_folder).map(offence).collect()
}

/// Modules compiled for tests alone whose files are not called `tests` or `testing`.
pub fn misplaced_tests(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for source in tree.products() {
        for item in &source.file.items {
            let syn::Item::Mod(module) = item else { continue };
            let condition = |attribute: &syn::Attribute| match &attribute.meta {
                syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
                _ => false,
            };
            let name = module.ident.to_string();
            let for_tests = attributes(item).iter().any(condition);
            if for_tests && module.content.is_none() && !matches!(name.as_str(), "tests" | "testing") {
                let problem = format!("`mod {name}` is for tests alone: put it into `tests` or `testing`");
                offences.push(Offence::new(source, module.ident.span().start().line, problem));
            }
        }
    }
    offences
}
