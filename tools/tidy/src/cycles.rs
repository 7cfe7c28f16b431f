//! Files that import one another in a circle.
//!
//! An import counts towards the file that defines the name: a re-export is followed to where it comes
//! from. What a module imports from its own submodules does not count, since these are parts of it. Two
//! files that know each other can only be read together, so the list of circles in `cycles.txt` may
//! shrink and not grow.

use crate::{Source, Tree};
use std::collections::{BTreeMap, BTreeSet};
use syn::UseTree;
use syn::visit::{self, Visit};

/// Groups of two and more product files each of which reaches every other by imports; ordered, with
/// ordered paths.
pub fn cycles(tree: &Tree) -> Vec<Vec<String>> {
    let modules = Modules::new(tree);
    let sources: Vec<&Source> = tree.products().filter(|source| !source.module[0].is_empty()).collect();
    let edges: BTreeMap<&str, BTreeSet<&str>> =
        sources.iter().map(|source| (source.path.as_str(), modules.imports(source))).collect();
    let mut components = Components::new(&edges).run();
    components.retain(|component| component.len() > 1);
    components.iter_mut().for_each(|component| component.sort());
    components.sort();
    components
}

/// The circles of a list: files of one line belong to one circle; `#` begins a comment.
pub fn known_cycles(list: &str) -> Vec<Vec<String>> {
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

/// Product files by their module path.
struct Modules<'a> {
    files: BTreeMap<Vec<String>, &'a Source>,
    /// For each module, its re-exports: name to path.
    exports: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
}

impl<'a> Modules<'a> {
    fn new(tree: &'a Tree) -> Modules<'a> {
        let files: BTreeMap<_, _> = tree
            .products()
            .map(|source| (source.module.clone(), source))
            .filter(|(m, _)| !m[0].is_empty())
            .collect();
        let mut modules = Modules { files, exports: BTreeMap::new() };
        for source in tree.products() {
            let mut names = BTreeMap::new();
            for item in source.product_items() {
                if let syn::Item::Use(item) = item
                    && !matches!(item.vis, syn::Visibility::Inherited)
                {
                    for path in paths(&item.tree) {
                        if let Some(name) = path.last() {
                            names.insert(name.clone(), path.clone());
                        }
                    }
                }
            }
            modules.exports.insert(source.module.clone(), names);
        }
        modules
    }

    /// Paths of the files that `source` imports from.
    fn imports(&self, source: &Source) -> BTreeSet<&'a str> {
        let mut named = Paths::default();
        source.product_items().for_each(|item| named.visit_item(item));
        let found = named.0.iter().filter_map(|path| self.resolve(&source.module, path, 8));
        found.filter(|file| !file.module.starts_with(&source.module)).map(|file| file.path.as_str()).collect()
    }

    /// The file that defines what `path`, as written in `module`, leads to.
    fn resolve(&self, module: &[String], path: &[String], hops: usize) -> Option<&'a Source> {
        let mut at: Vec<String> = module.to_vec();
        let mut rest = path.iter();
        match path.first()?.as_str() {
            "crate" => {
                at.truncate(1);
                rest.next();
            }
            "self" => _ = rest.next(),
            "super" => {
                while rest.as_slice().first().is_some_and(|part| part == "super") {
                    at.pop();
                    rest.next();
                }
            }
            first if self.files.contains_key(&vec![first.to_owned()]) => {
                at = vec![first.to_owned()];
                rest.next();
            }
            first => {
                let child = [module, &[first.to_owned()]].concat();
                if !self.files.contains_key(&child) {
                    return None;
                }
            }
        }
        while let Some(name) = rest.as_slice().first() {
            let child = [&at[..], std::slice::from_ref(name)].concat();
            if self.files.contains_key(&child) {
                at = child;
                rest.next();
                continue;
            }
            if hops > 0
                && let Some(export) = self.exports.get(&at).and_then(|names| names.get(name))
                && let Some(file) = self.resolve(&at, export, hops - 1)
            {
                return Some(file);
            }
            break;
        }
        self.files.get(&at).copied()
    }
}

/// All paths of a use tree, without renames; a glob gives its module.
fn paths(tree: &UseTree) -> Vec<Vec<String>> {
    match tree {
        UseTree::Path(path) => {
            let below = paths(&path.tree);
            let joined = below.into_iter().map(|rest| [&[path.ident.to_string()][..], &rest].concat());
            joined.collect()
        }
        UseTree::Name(name) if name.ident == "self" => vec![Vec::new()],
        UseTree::Name(name) => vec![vec![name.ident.to_string()]],
        UseTree::Rename(rename) => vec![vec![rename.ident.to_string()]],
        UseTree::Glob(_) => vec![Vec::new()],
        UseTree::Group(group) => group.items.iter().flat_map(paths).collect(),
    }
}

/// Paths that a file's items name: those of its imports, and those of two and more parts elsewhere.
#[derive(Default)]
struct Paths(Vec<Vec<String>>);

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.0.extend(paths(&item.tree));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }
}

/// Tarjan's algorithm for strongly connected components ("Depth-first search and linear graph
/// algorithms", 1972).
struct Components<'a> {
    edges: &'a BTreeMap<&'a str, BTreeSet<&'a str>>,
    index: BTreeMap<&'a str, usize>,
    low: BTreeMap<&'a str, usize>,
    stack: Vec<&'a str>,
    found: Vec<Vec<String>>,
}

impl<'a> Components<'a> {
    fn new(edges: &'a BTreeMap<&'a str, BTreeSet<&'a str>>) -> Components<'a> {
        let (index, low) = (BTreeMap::new(), BTreeMap::new());
        Components { edges, index, low, stack: Vec::new(), found: Vec::new() }
    }

    fn run(mut self) -> Vec<Vec<String>> {
        for file in self.edges.keys() {
            if !self.index.contains_key(file) {
                self.visit(file);
            }
        }
        self.found
    }

    fn visit(&mut self, file: &'a str) {
        let number = self.index.len();
        self.index.insert(file, number);
        self.low.insert(file, number);
        self.stack.push(file);
        for next in self.edges.get(file).into_iter().flatten().copied() {
            if !self.index.contains_key(next) {
                self.visit(next);
                self.low.insert(file, self.low[file].min(self.low[next]));
            } else if self.stack.contains(&next) {
                self.low.insert(file, self.low[file].min(self.index[next]));
            }
        }
        if self.low[file] == number {
            let from = self.stack.iter().position(|other| *other == file).expect("it was pushed above");
            self.found.push(self.stack.drain(from..).map(str::to_owned).collect());
        }
    }
}
