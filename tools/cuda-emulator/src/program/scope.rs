//! Names of a function: registers, variables and labels, which belong to blocks.

use super::op::Special;
use crate::ptx::Type;
use std::collections::HashMap;

/// The meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    /// A register: its type and its plane.
    Register(Type, u32),
    /// A predicate register.
    Predicate(u32),
    /// A variable of the frame's local memory: offset and size.
    Local(u32, u32),
    /// A parameter of the kernel: offset and size.
    KernelParam(u32, u32),
    /// An address in shared memory.
    Shared(u32),
    /// A generic address.
    Global(u64),
}

/// One block.
struct Block {
    parent: usize,
    names: HashMap<String, Name>,
    /// Numbered registers: prefix, type, first plane or predicate, count.
    ranges: Vec<(String, Type, u32, u32)>,
    labels: HashMap<String, u32>,
    targets: HashMap<String, Vec<String>>,
}

/// The blocks of a function.
pub(crate) struct Scope {
    blocks: Vec<Block>,
    pub(crate) current: usize,
    pub(crate) planes: u32,
    pub(crate) predicates: u32,
    pub(crate) specials: Vec<(Special, u32)>,
}

impl Scope {
    /// The outermost block.
    pub(crate) fn new() -> Scope {
        let mut scope =
            Scope { blocks: Vec::new(), current: 0, planes: 0, predicates: 0, specials: Vec::new() };
        scope.open();
        scope
    }

    /// Begins a block.
    pub(crate) fn open(&mut self) {
        self.blocks.push(Block {
            parent: self.current,
            names: HashMap::new(),
            ranges: Vec::new(),
            labels: HashMap::new(),
            targets: HashMap::new(),
        });
        self.current = self.blocks.len() - 1;
    }

    /// Ends a block.
    pub(crate) fn close(&mut self) {
        self.current = self.blocks[self.current].parent;
    }

    /// The blocks around and with `block`, innermost first.
    fn chain(&self, block: usize) -> impl Iterator<Item = &Block> {
        let mut next = Some(block);
        std::iter::from_fn(move || {
            let at = next?;
            next = (at != 0).then(|| self.blocks[at].parent);
            Some(&self.blocks[at])
        })
    }

    /// Declares a name in the current block.
    pub(crate) fn declare(&mut self, name: &str, meaning: Name) {
        self.blocks[self.current].names.insert(name.to_owned(), meaning);
    }

    /// Declares registers in the current block.
    pub(crate) fn registers(&mut self, ty: Type, name: &str, count: Option<u32>) {
        let first = match ty {
            Type::Pred => self.predicates,
            _ => self.planes,
        };
        let each = if ty.bytes() == 8 { 2 } else { 1 };
        let total = count.unwrap_or(1);
        match ty {
            Type::Pred => self.predicates += total,
            _ => self.planes += total * each,
        }
        match count {
            Some(count) => self.blocks[self.current].ranges.push((name.to_owned(), ty, first, count)),
            None if ty == Type::Pred => self.declare(name, Name::Predicate(first)),
            None => self.declare(name, Name::Register(ty, first)),
        }
    }

    /// A new plane of the frame, or two.
    pub(crate) fn scratch(&mut self, planes: u32) -> u32 {
        self.planes += planes;
        self.planes - planes
    }

    /// A new predicate of the frame.
    pub(crate) fn scratch_predicate(&mut self) -> u32 {
        self.predicates += 1;
        self.predicates - 1
    }

    /// The plane of a special register.
    pub(crate) fn special(&mut self, special: Special) -> u32 {
        if let Some((_, plane)) = self.specials.iter().find(|(it, _)| *it == special) {
            return *plane;
        }
        let plane = self.scratch(1);
        self.specials.push((special, plane));
        plane
    }

    /// The meaning of a name.
    pub(crate) fn find(&self, name: &str) -> Option<Name> {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (prefix, number) = name.split_at(name.len() - digits);
        let number = number.parse::<u32>().ok();
        for block in self.chain(self.current) {
            if let Some(meaning) = block.names.get(name) {
                return Some(*meaning);
            }
            let Some(number) = number else { continue };
            let fits = |(range, _, _, count): &&(String, Type, u32, u32)| range == prefix && number < *count;
            if let Some((_, ty, first, _)) = block.ranges.iter().find(fits) {
                return Some(match ty {
                    Type::Pred => Name::Predicate(first + number),
                    _ => Name::Register(*ty, first + number * if ty.bytes() == 8 { 2 } else { 1 }),
                });
            }
        }
        None
    }

    /// Declares a label of the current block.
    pub(crate) fn label(&mut self, name: &str, at: u32) {
        self.blocks[self.current].labels.insert(name.to_owned(), at);
    }

    /// Declares the targets of an indirect branch.
    pub(crate) fn branch_targets(&mut self, name: &str, labels: &[String]) {
        self.blocks[self.current].targets.insert(name.to_owned(), labels.to_vec());
    }

    /// The place of a label, as seen from `block`.
    pub(crate) fn find_label(&self, block: usize, name: &str) -> Option<u32> {
        self.chain(block).find_map(|block| block.labels.get(name).copied())
    }

    /// The labels of an indirect branch, as seen from `block`.
    pub(crate) fn find_targets(&self, block: usize, name: &str) -> Option<Vec<String>> {
        self.chain(block).find_map(|block| block.targets.get(name).cloned())
    }
}
