//! The Rust files of the workspace, parsed.
//!
//! Invariant: a file's product part is what remains without items compiled for tests alone.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use syn::spanned::Spanned;

/// The root file of each crate of the workspace, and the name that other crates import it by.
const CRATES: [(&str, &str); 8] = [
    ("mainstem", "src/lib.rs"),
    ("mainstem_grammar", "src/grammar/lib.rs"),
    ("mainstem_kernels", "src/kernels/lib.rs"),
    ("mainstem_conformance", "src/kernels/conformance/lib.rs"),
    ("mainstem_sse", "src/sse/lib.rs"),
    ("load_tests", "load_tests/src/lib.rs"),
    ("cuda", "tools/cuda-emulator/src/lib.rs"),
    ("tidy", "tools/tidy/src/lib.rs"),
];

/// Folders that hold tests alone, beside those called `tests`, `testing` or `benches`.
const TEST_CRATES: [&str; 1] = ["src/kernels/conformance"];

/// One Rust file.
pub struct Source {
    /// Path relative to the root of the tree, with `/` between its parts.
    pub path: String,
    /// The whole text.
    pub text: String,
    /// The parsed text.
    pub file: syn::File,
    /// Crate name and module path: `["mainstem", "actors", "decode"]`.
    pub module: Vec<String>,
    /// Whether the file is compiled for tests alone, by its place in the tree.
    pub test: bool,
}

/// All Rust files of a workspace.
pub struct Tree {
    /// The files, ordered by path.
    pub sources: Vec<Source>,
}

impl Tree {
    /// Reads every Rust file below `root` but those of `target`, `fuzz` and hidden folders.
    pub fn read(root: &Path) -> std::io::Result<Tree> {
        let mut paths = Vec::new();
        collect(root, root, &mut paths)?;
        paths.sort();
        let read = |path: &String| Ok(Source::parse(path, fs::read_to_string(root.join(path))?));
        Ok(Tree { sources: paths.iter().map(read).collect::<std::io::Result<_>>()? })
    }

    /// A tree of the given (path, text) pairs, for tests of the checks.
    pub fn from_texts(files: &[(&str, &str)]) -> Tree {
        Tree { sources: files.iter().map(|(path, text)| Source::parse(path, (*text).to_owned())).collect() }
    }

    /// Files that ship in a program or library.
    pub fn products(&self) -> impl Iterator<Item = &Source> {
        self.sources.iter().filter(|source| !source.test)
    }
}

/// Appends the Rust files below `folder` to `paths`, relative to `root`.
fn collect(root: &Path, folder: &Path, paths: &mut Vec<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let relative = path.strip_prefix(root).expect("entries lie below the root").to_string_lossy();
        let relative = relative.replace('\\', "/");
        let hidden = relative.rsplit('/').next().is_some_and(|name| name.starts_with('.'));
        if path.is_dir() && !hidden && relative != "target" && relative != "fuzz" {
            collect(root, &path, paths)?;
        } else if relative.ends_with(".rs") && !hidden {
            paths.push(relative);
        }
    }
    Ok(())
}

impl Source {
    /// Parses `text`. A file that is not Rust cannot be checked, and compiles as little.
    fn parse(path: &str, text: String) -> Source {
        let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
        Source { path: path.to_owned(), text, file, module: module_path(path), test: is_test(path) }
    }

    /// Lines of items that are compiled for tests alone.
    pub fn test_lines(&self) -> Vec<RangeInclusive<usize>> {
        let lines = |span: proc_macro2::Span| span.start().line..=span.end().line;
        self.file.items.iter().filter(|item| is_test_item(item)).map(|item| lines(item.span())).collect()
    }

    /// Items of the product, test items left out.
    pub fn product_items(&self) -> impl Iterator<Item = &syn::Item> {
        self.file.items.iter().filter(|item| !is_test_item(item))
    }

    /// Tokens of the product's items, groups flattened, each with its line.
    pub fn product_tokens(&self) -> Vec<(String, usize)> {
        let mut tokens = Vec::new();
        for item in self.product_items() {
            flatten(item.to_token_stream(), &mut tokens);
        }
        tokens
    }
}

fn flatten(stream: TokenStream, tokens: &mut Vec<(String, usize)>) {
    for tree in stream {
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    proc_macro2::Delimiter::Brace => ("{", "}"),
                    proc_macro2::Delimiter::Bracket => ("[", "]"),
                    _ => ("(", ")"),
                };
                tokens.push((open.to_owned(), group.span_open().start().line));
                flatten(group.stream(), tokens);
                tokens.push((close.to_owned(), group.span_close().start().line));
            }
            other => tokens.push((other.to_string(), other.span().start().line)),
        }
    }
}

/// Whether an item stands under `#[cfg(test)]` or is a test.
fn is_test_item(item: &syn::Item) -> bool {
    attributes(item).iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition == "test" || condition.starts_with("all (test")
        }
        meta => meta.path().is_ident("test"),
    })
}

/// Attributes of an item, of the kinds that this workspace has.
pub fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Crate and modules of a file, by its path. Files outside the crates' sources get their path's parts.
fn module_path(path: &str) -> Vec<String> {
    let inside = |root: &str| path.starts_with(root.rsplit_once('/').map_or("", |(folder, _)| folder));
    let owner = CRATES.iter().filter(|(_, root)| inside(root)).max_by_key(|(_, root)| root.len());
    let (name, folder) = match owner {
        Some((name, root)) => (*name, root.rsplit_once('/').map_or("", |(folder, _)| folder)),
        None => ("", ""),
    };
    let rest = path[folder.len()..].trim_start_matches('/').trim_end_matches(".rs");
    let parts = rest.split('/').filter(|part| !matches!(*part, "mod" | "lib"));
    std::iter::once(name).chain(parts).map(str::to_owned).collect()
}

/// Whether a file's place says that it is compiled for tests alone.
fn is_test(path: &str) -> bool {
    let parts = path.trim_end_matches(".rs").split('/');
    let by_name = parts.into_iter().any(|part| matches!(part, "tests" | "testing" | "benches"));
    by_name || TEST_CRATES.iter().any(|folder| path.starts_with(folder))
}
