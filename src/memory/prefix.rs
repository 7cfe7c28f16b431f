//! The prefix index: pages of the KV cache by the tokens whose K and V they hold.
//!
//! A page is found by its tokens and a hash of everything before them ([`PageHash`]), so pages form chains
//! that begin at a root. The root stands for what K and V depend on besides tokens.
//! Invariant: an entry describes tokens at the beginning of its page, whose K and V stay as they are for as
//! long as the page is held or idle. A page has at most one entry.

use mainstem_kernels::batch::Page;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The hash of all tokens of a sequence up to the end of a page, or of what precedes the first page (SHA-256,
/// so that no client can make its tokens look like another's).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash([u8; 32]);

impl PageHash {
    /// Returns the root of the chains whose K and V depend on `facts`, in this order, besides their tokens.
    pub fn root(facts: &[&[u8]]) -> PageHash {
        let mut hash = Sha256::new();
        for fact in facts {
            hash.update((fact.len() as u64).to_le_bytes());
            hash.update(fact);
        }
        PageHash(hash.finalize().into())
    }

    /// Returns the hash at the end of a page with these tokens.
    fn next(&self, tokens: &[u32]) -> PageHash {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for tokens in tokens.chunks(32) {
            let mut bytes = [0; 128];
            let places = bytes.chunks_exact_mut(4).zip(tokens);
            places.for_each(|(place, token)| place.copy_from_slice(&token.to_le_bytes()));
            hash.update(&bytes[..4 * tokens.len()]);
        }
        PageHash(hash.finalize().into())
    }
}

/// The tokens of a sequence, hashed page by page.
#[derive(Clone, Debug)]
pub struct TokenChain {
    page_positions: usize,
    root: PageHash,
    tokens: Vec<u32>,
    /// Hash at the end of each full page.
    hashes: Vec<PageHash>,
    /// A page that was being computed for another sequence.
    awaited: Option<usize>,
}

impl TokenChain {
    /// Creates a chain without tokens, for pages of `page_positions` positions.
    pub fn new(root: PageHash, page_positions: usize) -> TokenChain {
        TokenChain { page_positions, root, tokens: Vec::new(), hashes: Vec::new(), awaited: None }
    }

    /// Appends tokens.
    pub fn extend(&mut self, tokens: impl IntoIterator<Item = u32>) {
        self.tokens.extend(tokens);
        for page in self.hashes.len()..self.tokens.len() / self.page_positions {
            self.hashes.push(self.hash_at(page));
        }
    }

    /// Returns the number of tokens.
    #[allow(clippy::len_without_is_empty)] // Nobody asks.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of pages that the tokens begin.
    pub(super) fn pages(&self) -> usize {
        self.tokens.len().div_ceil(self.page_positions)
    }

    /// Waits for a page, so that its coming can be asked for without looking for the pages before it again.
    pub(super) fn await_page(&mut self, page: usize) {
        self.awaited = Some(page);
    }

    /// Returns the hash at the end of the page that is waited for.
    pub(super) fn awaited(&self) -> Option<PageHash> {
        self.awaited.map(|page| self.hash_at(page))
    }

    /// Returns the hash before a page.
    pub(super) fn parent(&self, page: usize) -> PageHash {
        page.checked_sub(1).map_or(self.root, |before| self.hashes[before])
    }

    /// Returns the hash at the end of a page, or at the end of the tokens in a page that is not full.
    pub(super) fn hash_at(&self, page: usize) -> PageHash {
        match self.hashes.get(page) {
            Some(hash) => *hash,
            None => self.parent(page).next(self.tokens_of(page, usize::MAX)),
        }
    }

    /// Returns the tokens of a page that are at positions below `end`.
    pub(super) fn tokens_of(&self, page: usize, end: usize) -> &[u32] {
        let start = page * self.page_positions;
        let end = end.min(self.tokens.len()).min(start + self.page_positions);
        self.tokens.get(start..end).unwrap_or_default()
    }
}

/// The key of an entry: the hash of what precedes the page, and tokens from its first position on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EntryKey {
    parent: PageHash,
    tokens: Box<[u32]>,
}

/// The pages that hold the beginning of a chain.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Match {
    /// Pages whose positions all hold tokens of the chain.
    pub(super) full: Vec<Page>,
    /// A page whose first positions hold further ones, and their number.
    pub(super) partial: Option<(Page, usize)>,
}

impl Match {
    /// Returns the page after the full ones, unless these and the partial one hold all tokens of the chain
    /// that are wanted, at most `limit`.
    pub(super) fn next_page(&self, chain: &TokenChain, limit: usize) -> Option<usize> {
        let page = self.full.len();
        let found = page * chain.page_positions + self.partial.map_or(0, |(_, common)| common);
        (found < limit.min(chain.len())).then_some(page)
    }
}

/// The entries of all pages, and the pages that are being computed.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    entries: BTreeMap<Arc<EntryKey>, Page>,
    keys: HashMap<Page, Arc<EntryKey>>,
    /// Hashes at the ends of pages that sequences have begun to compute, with their number.
    coming: HashMap<PageHash, usize>,
}

impl PrefixIndex {
    /// Returns the pages that hold the first tokens of a chain, at most `limit`.
    pub(super) fn find(&self, chain: &TokenChain, limit: usize) -> Match {
        let mut found = Match::default();
        loop {
            let page = found.full.len();
            let wanted = chain.tokens_of(page, limit);
            let longest = self.longest(chain.parent(page), wanted);
            match longest {
                Some((held, common)) if common == chain.page_positions => found.full.push(held),
                _ => {
                    found.partial = longest;
                    return found;
                }
            }
        }
    }

    /// Returns the page after `parent` that begins with most of `tokens`, and how many; `None` if there is
    /// none that begins with the first one.
    fn longest(&self, parent: PageHash, tokens: &[u32]) -> Option<(Page, usize)> {
        let probe = EntryKey { parent, tokens: tokens.into() };
        // Keys are sorted, so no other has more in common with the probe than one of its neighbours.
        let neighbours = [
            self.entries.range::<EntryKey, _>(..=&probe).next_back(),
            self.entries.range::<EntryKey, _>(&probe..).next(),
        ];
        let of_parent = neighbours.into_iter().flatten().filter(|(key, _)| key.parent == parent);
        let common = of_parent.map(|(key, page)| {
            (*page, key.tokens.iter().zip(tokens).take_while(|(own, wanted)| own == wanted).count())
        });
        common.filter(|(_, common)| *common > 0).max_by_key(|(_, common)| *common)
    }

    /// Returns the page that holds most of the first tokens of a page of the chain, at positions below
    /// `limit`, and how many.
    pub(super) fn holder(&self, chain: &TokenChain, page: usize, limit: usize) -> Option<(Page, usize)> {
        self.longest(chain.parent(page), chain.tokens_of(page, limit))
    }

    /// Notes that `held` holds the tokens of a page of the chain, at positions below `end`. Does nothing if
    /// another page holds them.
    pub(super) fn insert(&mut self, chain: &TokenChain, page: usize, end: usize, held: Page) {
        let (parent, tokens) = (chain.parent(page), chain.tokens_of(page, end));
        if tokens.is_empty() || self.longest(parent, tokens).is_some_and(|(_, n)| n == tokens.len()) {
            return;
        }
        self.remove(held);
        let key = Arc::new(EntryKey { parent, tokens: tokens.into() });
        self.entries.insert(key.clone(), held);
        self.keys.insert(held, key);
    }

    /// Forgets what a page holds.
    pub(super) fn remove(&mut self, page: Page) {
        if let Some(key) = self.keys.remove(&page) {
            self.entries.remove(&key);
        }
    }

    /// Forgets what all pages hold.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.keys.clear();
    }

    /// Returns whether a page has an entry.
    pub(super) fn contains(&self, page: Page) -> bool {
        self.keys.contains_key(&page)
    }

    /// Announces that a page is being computed, whose tokens end with this hash.
    pub(super) fn announce(&mut self, hash: PageHash) {
        *self.coming.entry(hash).or_default() += 1;
    }

    /// Returns whether a page is being computed whose tokens end with this hash.
    pub(super) fn is_coming(&self, hash: PageHash) -> bool {
        self.coming.contains_key(&hash)
    }

    /// Reverts one [`PrefixIndex::announce`].
    pub(super) fn retract(&mut self, hash: PageHash) {
        if let Some(count) = self.coming.get_mut(&hash) {
            *count -= 1;
            if *count == 0 {
                self.coming.remove(&hash);
            }
        }
    }

    /// Asserts that entries and keys agree.
    pub(super) fn check(&self) {
        assert_eq!(self.entries.len(), self.keys.len());
        for (key, page) in &self.entries {
            assert_eq!(self.keys.get(page), Some(key), "a page has one entry");
        }
    }

    /// Returns the number of pages that are being computed.
    pub(super) fn coming(&self) -> usize {
        self.coming.len()
    }
}
