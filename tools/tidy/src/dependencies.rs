//! Which module may import which.
//!
//! The rules are the block below "## Dependencies" in `docs/architecture.md`, one line for each module or
//! group of modules: `actors, server -> request, config`. A module that no line begins with imports
//! nothing of this workspace.

use crate::{Offence, Source, Tree};
use std::collections::{BTreeMap, BTreeSet};

/// Allowed imports: for each module, the modules it may import. `*` allows all.
#[derive(Debug, Default)]
pub struct Dependencies(BTreeMap<String, BTreeSet<String>>);

impl Dependencies {
    /// Reads the first fenced block below the heading "## Dependencies" of `page`.
    ///
    /// # Errors
    /// Names what is missing: the heading, the block, or the arrow of a line.
    pub fn parse(page: &str) -> Result<Dependencies, String> {
        let (_, below) = page.split_once("\n## Dependencies\n").ok_or("no heading \"## Dependencies\"")?;
        let (_, block) = below.split_once("\n```\n").ok_or("no block below \"## Dependencies\"")?;
        let (block, _) = block.split_once("\n```").ok_or("the block below \"## Dependencies\" has no end")?;
        let mut dependencies = Dependencies::default();
        for line in block.lines().filter(|line| !line.trim().is_empty()) {
            let (from, to) = line.split_once("->").ok_or_else(|| format!("no arrow in {line:?}"))?;
            let names = |list: &str| list.split(',').map(|it| it.trim().to_owned()).collect::<BTreeSet<_>>();
            for name in names(from) {
                dependencies.0.entry(name).or_default().extend(names(to));
            }
        }
        Ok(dependencies)
    }

    fn allows(&self, from: &str, to: &str) -> bool {
        from == to || self.0.get(from).is_some_and(|allowed| allowed.contains(to) || allowed.contains("*"))
    }
}

/// Imports between top-level modules of the main crate, or of other crates of the workspace, that
/// `dependencies` does not allow.
pub fn forbidden_imports(tree: &Tree, dependencies: &Dependencies) -> Vec<Offence> {
    let mut offences = Vec::new();
    for source in tree.products() {
        let Some(from) = module_of(&source.module) else { continue };
        for (to, line) in imports(source) {
            if !dependencies.allows(&from, &to) {
                let problem = format!("`{from}` imports `{to}`, which docs/architecture.md does not allow");
                offences.push(Offence::new(source, line, problem));
            }
        }
    }
    offences
}

/// The module of the main crate, or the other crate, that a file belongs to.
fn module_of(module: &[String]) -> Option<String> {
    match module.first()?.as_str() {
        "mainstem" => Some(module.get(1).map_or("lib", String::as_str).to_owned()),
        "mainstem_grammar" => Some("grammar".to_owned()),
        "mainstem_kernels" => Some("kernels".to_owned()),
        "mainstem_conformance" => Some("conformance".to_owned()),
        "mainstem_sse" => Some("sse".to_owned()),
        "" => None,
        other => Some(other.to_owned()),
    }
}

/// Modules that a file's product part names, with the line of each mention.
fn imports(source: &Source) -> Vec<(String, usize)> {
    let tokens = source.product_tokens();
    let text = |at: usize| tokens.get(at).map_or("", |(text, _)| text.as_str());
    let in_main = source.module[0] == "mainstem";
    let mut found = Vec::new();
    for (at, (token, line)) in tokens.iter().enumerate() {
        let is_path = text(at + 1) == ":" && text(at + 2) == ":";
        match token.as_str() {
            "mainstem_grammar" if is_path => found.push(("grammar".to_owned(), *line)),
            "mainstem_kernels" if is_path => found.push(("kernels".to_owned(), *line)),
            "mainstem_conformance" if is_path => found.push(("conformance".to_owned(), *line)),
            "mainstem_sse" if is_path => found.push(("sse".to_owned(), *line)),
            "load_tests" if is_path => found.push(("load_tests".to_owned(), *line)),
            "mainstem" if is_path => found.extend(named(&tokens, at + 3)),
            "crate" if is_path && in_main => found.extend(named(&tokens, at + 3)),
            _ => {}
        }
    }
    // A module of the main crate, not an item of its root.
    found.retain(|(name, _)| name.chars().next().is_some_and(|first| first.is_ascii_lowercase()));
    found
}

/// The names at `at`: one, or those of a group in braces.
fn named(tokens: &[(String, usize)], at: usize) -> Vec<(String, usize)> {
    let Some((first, line)) = tokens.get(at) else { return Vec::new() };
    if first != "{" {
        return vec![(first.clone(), *line)];
    }
    let (mut depth, mut names, mut begins) = (0, Vec::new(), false);
    for (token, line) in &tokens[at..] {
        match token.as_str() {
            "{" => {
                depth += 1;
                begins = depth == 1;
            }
            "}" => {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            "," => begins = depth == 1,
            _ => {
                if begins {
                    names.push((token.clone(), *line));
                }
                begins = false;
            }
        }
    }
    names
}
