//! Documentation comments: public items have one, and its first sentence names the item.

use crate::{Offence, Source, Tree};
use syn::visit::{self, Visit};

/// Beginnings of a documentation comment that say nothing on hover.
const STARTS: [&str; 24] = [
    "The same",
    "What ",
    "Those ",
    "Of a ",
    "Of an ",
    "Of the ",
    "Who ",
    "Whose ",
    "Whoever ",
    "It ",
    "That ",
    "This is ",
    "Where ",
    "How ",
    "Why ",
    "Is told",
    "Is asked",
    "Tells ",
    "With that",
    "By that",
    "Does what",
    "They ",
    "Such ",
    "Likewise",
];

/// Words of the project's old private vocabulary, in comments of any kind.
const RIDDLES: [&str; 19] = [
    "foretell",
    "lone encoder",
    "sink page",
    "waiting room",
    "attended share",
    "main stem",
    "comes home",
    "come home",
    "whoever lives",
    "who lives here",
    "who polls",
    "drawn token",
    "likeliest",
    "is told so",
    "lets go of",
    "at hand,",
    "in company",
    "distance bias",
    "keeper",
];

/// Documentation that begins with a riddle, and comments that use a word of the old vocabulary.
pub fn first_words(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for source in &tree.sources {
        // The lists above.
        if source.path == "tools/tidy/src/docs.rs" || source.path.starts_with("tools/tidy/tests") {
            continue;
        }
        let mut before = "";
        for (at, line) in source.text.lines().enumerate() {
            let line = line.trim_start();
            let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            if let (Some(text), false) = (doc, before.starts_with("///") || before.starts_with("//!")) {
                let text = text.trim_start();
                if let Some(start) = STARTS.iter().find(|start| text.starts_with(**start)) {
                    let problem =
                        format!("documentation begins with {:?}: name the item first", start.trim());
                    offences.push(Offence::new(source, at + 1, problem));
                }
            }
            if line.starts_with("//") {
                let text = line.to_lowercase();
                if let Some(word) = RIDDLES.iter().find(|word| text.contains(**word)) {
                    offences.push(Offence::new(
                        source,
                        at + 1,
                        format!("{word:?} is not a term of the field"),
                    ));
                }
            }
            before = line;
        }
    }
    offences
}

/// Public items of products that have no documentation comment. Fields and variants may speak for themselves.
pub fn undocumented(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for source in tree.products() {
        let mut items = Items { source, offences: &mut offences };
        source.product_items().for_each(|item| items.visit_item(item));
    }
    offences
}

struct Items<'a> {
    source: &'a Source,
    offences: &'a mut Vec<Offence>,
}

impl Items<'_> {
    fn check(
        &mut self,
        visibility: Option<&syn::Visibility>,
        attributes: &[syn::Attribute],
        name: &syn::Ident,
    ) {
        let public = visibility.is_none_or(|it| matches!(it, syn::Visibility::Public(_)));
        let documented = attributes.iter().any(|attribute| attribute.path().is_ident("doc"));
        if public && !documented {
            let problem = format!("`{name}` is public and has no documentation");
            self.offences.push(Offence::new(self.source, name.span().start().line, problem));
        }
    }
}

impl<'ast> Visit<'ast> for Items<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        match item {
            syn::Item::Const(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
            syn::Item::Enum(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
            syn::Item::Fn(it) => self.check(Some(&it.vis), &it.attrs, &it.sig.ident),
            syn::Item::Static(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
            syn::Item::Struct(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
            syn::Item::Type(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
            syn::Item::Trait(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_fn(&mut self, _: &'ast syn::ItemFn) {
        // Items within a function are nobody's interface.
    }

    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        if block.trait_.is_some() {
            return;
        }
        for item in &block.items {
            match item {
                syn::ImplItem::Fn(it) => self.check(Some(&it.vis), &it.attrs, &it.sig.ident),
                syn::ImplItem::Const(it) => self.check(Some(&it.vis), &it.attrs, &it.ident),
                _ => {}
            }
        }
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        if !matches!(item.vis, syn::Visibility::Public(_)) {
            return;
        }
        for item in &item.items {
            if let syn::TraitItem::Fn(it) = item {
                self.check(None, &it.attrs, &it.sig.ident);
            }
        }
    }
}
