//! Limits on the length of functions and files and on the width of lines.
//!
//! Invariant: tests may be as long as they like; no line of Rust is wider than [`WIDTH`].

use crate::{Offence, Source, Tree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Most lines of a product function, signature and braces included.
const FUNCTION_LINES: usize = 70;

/// Most lines of a file without its tests.
const FILE_LINES: usize = 500;

/// Most columns of a line.
const WIDTH: usize = 110;

/// Product functions of more than 70 lines.
pub fn long_functions(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for source in tree.products() {
        let mut functions = Functions { source, offences: &mut offences };
        source.product_items().for_each(|item| functions.visit_item(item));
    }
    offences
}

/// Product files of more than 500 lines without their tests.
pub fn long_files(tree: &Tree) -> Vec<Offence> {
    let too_long = |source: &&Source| product_lines(source) > FILE_LINES;
    let offence = |source: &Source| {
        let lines = product_lines(source);
        Offence::new(source, 1, format!("{lines} lines without tests; at most {FILE_LINES}"))
    };
    tree.products().filter(too_long).map(offence).collect()
}

/// Lines of more than 110 columns, tests included.
pub fn wide_lines(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for source in &tree.sources {
        for (at, line) in source.text.lines().enumerate() {
            let columns = line.chars().count();
            if columns > WIDTH {
                offences.push(Offence::new(source, at + 1, format!("{columns} columns; at most {WIDTH}")));
            }
        }
    }
    offences
}

fn product_lines(source: &Source) -> usize {
    let tests: usize = source.test_lines().iter().map(|lines| lines.end() + 1 - lines.start()).sum();
    source.text.lines().count() - tests
}

/// Finds the functions of one file that are too long.
struct Functions<'a> {
    source: &'a Source,
    offences: &'a mut Vec<Offence>,
}

impl Functions<'_> {
    fn check(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let (first, last) = (signature.span().start().line, block.span().end().line);
        let lines = last + 1 - first;
        if lines > FUNCTION_LINES {
            let problem = format!("`{}` has {lines} lines; at most {FUNCTION_LINES}", signature.ident);
            self.offences.push(Offence::new(self.source, first, problem));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.check(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.check(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.check(&function.sig, block);
        }
        visit::visit_trait_item_fn(self, function);
    }
}
