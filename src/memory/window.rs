//! The pages of layers that see only a window of a sequence.
//!
//! A sequence holds no more of them than one step computes or sees. The page of positions that no later row
//! sees takes the positions that are as many pages further, if nobody else can use it; otherwise it is
//! released, and another one is leased.
//! Invariant: the pages of all positions that a later row sees are held, and hold nothing else.

use super::group::PageGroup;
use super::prefix::{Match, TokenChain};
use mainstem_kernels::batch::{NULL_PAGE, Page};

/// Sizes of the cache of windowed layers.
#[derive(Clone, Copy, Debug)]
pub struct WindowCache {
    /// Number of pages, including the null page.
    pub pages: usize,
    /// Number of positions that a row sees at most, its own included.
    pub window: usize,
    /// Maximum number of pages that hold the positions which one step computes or sees; more than those of
    /// a window.
    pub step_pages: usize,
}

/// The pages of windowed layers, in the numbering of these.
#[derive(Debug)]
pub(super) struct WindowGroup {
    pub(super) pages: PageGroup,
    cache: WindowCache,
    page_positions: usize,
}

/// The pages of a lease, by page of the sequence.
#[derive(Debug, Default)]
pub(super) struct WindowPages {
    /// The null page where none was leased or it was released. A page that is used again is in the table
    /// more than once.
    table: Vec<Page>,
    /// Number of leading entries that were released.
    passed: usize,
    /// The page that the first positions of the page after the computed ones are copied from.
    source: Option<Page>,
}

/// The pages that hold the window before the end of a prefix.
#[derive(Default)]
pub(super) struct WindowMatch {
    /// Page of the sequence that the first one holds.
    first: usize,
    full: Vec<Page>,
    pub(super) source: Option<Page>,
}

impl WindowGroup {
    pub(super) fn new(cache: WindowCache, page_positions: usize) -> WindowGroup {
        WindowGroup { pages: PageGroup::new(cache.pages), cache, page_positions }
    }

    /// Returns the first page that the row at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.cache.window) / self.page_positions
    }

    /// Finds the pages of a chain's prefix that later rows see. Shortens what was `found` of the other layers
    /// to the longest prefix that all layers have, and that is at most `limit` tokens long.
    pub(super) fn find(&self, chain: &TokenChain, limit: usize, found: &mut Match) -> WindowMatch {
        let holder = |page| self.pages.index.holder(chain, page, limit);
        let is_full = |(_, tokens): &(Page, usize)| *tokens == self.page_positions;
        let known = found.full.len();
        let full: Vec<Option<Page>> =
            (0..known).map(|page| holder(page).filter(is_full).map(|(page, _)| page)).collect();
        let first = |end: usize| self.first_seen(end * self.page_positions).min(end);
        let mut ends = (0..=known).rev();
        let end = ends.find(|&end| full[first(end)..end].iter().all(Option::is_some)).unwrap_or(0);
        let partial = found.partial.filter(|_| end == known).zip(holder(end));
        found.full.truncate(end);
        found.partial = partial.map(|((page, common), (_, tokens))| (page, common.min(tokens)));
        WindowMatch {
            first: first(end),
            full: full[first(end)..end].iter().flatten().copied().collect(),
            source: partial.map(|(_, (page, _))| page),
        }
    }

    /// Returns how many pages are left after a lease of `pages` pages that begins with a match; `None` if
    /// there are too few. The source of a copy needs one more if it is idle.
    pub(super) fn rest(&self, found: &WindowMatch, pages: usize) -> Option<usize> {
        let idle = found.full.iter().filter(|page| self.pages.is_idle(**page)).count();
        let fresh = (pages - found.first - found.full.len()).min(self.cache.step_pages);
        (self.pages.available() - idle).checked_sub(fresh)
    }

    /// Leases pages for the first `pages` pages of a sequence that begins with a match.
    pub(super) fn begin(&mut self, found: WindowMatch, pages: usize) -> WindowPages {
        let WindowMatch { first, full, source } = found;
        full.iter().chain(&source).for_each(|page| self.pages.hold(*page));
        let mut table = vec![NULL_PAGE; first];
        table.extend(full);
        for fresh in 0..pages - table.len() {
            let page = match fresh.checked_sub(self.cache.step_pages) {
                Some(_) => table[table.len() - self.cache.step_pages],
                None => self.pages.take(),
            };
            table.push(page);
        }
        WindowPages { table, passed: first, source }
    }

    /// Leases the pages that hold the first `positions` positions of `of`, for rows after these.
    pub(super) fn fork(&mut self, of: &WindowPages, positions: usize) -> WindowPages {
        let (passed, end) = (self.first_seen(positions), positions / self.page_positions);
        let passed = passed.min(end);
        let mut table = vec![NULL_PAGE; passed];
        table.extend_from_slice(&of.table[passed..end]);
        let source = (!positions.is_multiple_of(self.page_positions)).then(|| of.table[end]);
        for (at, page) in (passed..).zip(table[passed..].iter().chain(&source)) {
            assert!(self.is_held(of, at), "a page that rows see is held; anything else is a bug");
            self.pages.hold(*page);
        }
        WindowPages { table, passed, source }
    }

    /// Leases pages for the first `pages` pages of the sequence, whose next step computes positions of the
    /// last of these. Returns false, and changes nothing, if there are too few.
    pub(super) fn grow(&mut self, of: &mut WindowPages, pages: usize) -> bool {
        let (held, step_pages) = (of.table.len(), self.cache.step_pages);
        if pages <= held {
            return true;
        }
        let passed = pages.saturating_sub(step_pages).clamp(of.passed, held);
        let is_reused = |at: usize| at + step_pages >= held && self.pages.is_exclusive(of.table[at]);
        let released = (of.passed..passed).filter(|at| self.is_held(of, *at) && !is_reused(*at));
        let released: Vec<usize> = released.collect();
        let gained = released.iter().filter(|at| self.pages.has_one_holder(of.table[**at])).count();
        let is_taken = |at: &usize| match at.checked_sub(step_pages) {
            Some(before) => before < of.passed || before < held && released.contains(&before),
            None => true,
        };
        if self.pages.available() + gained < (held..pages).filter(is_taken).count() {
            return false;
        }
        for at in released {
            self.pages.release(std::mem::replace(&mut of.table[at], NULL_PAGE));
        }
        of.passed = passed;
        for at in held..pages {
            let before = at.checked_sub(step_pages).map(|before| of.table[before]);
            let page = before.filter(|page| *page != NULL_PAGE).unwrap_or_else(|| self.pages.take());
            of.table.push(page);
        }
        true
    }

    /// Notes that a page of the sequence holds the tokens of the chain at positions below `end`, unless later
    /// positions will take it.
    pub(super) fn note_computed(&mut self, of: &WindowPages, chain: &TokenChain, page: usize, end: usize) {
        if self.is_held(of, page) {
            self.pages.index.insert(chain, page, end, of.table[page]);
        }
    }

    /// Releases the source of the copy.
    pub(super) fn release_source(&mut self, of: &mut WindowPages) {
        if let Some(page) = of.source.take() {
            self.pages.release(page);
        }
    }

    /// Releases all pages.
    pub(super) fn release(&mut self, of: &mut WindowPages) {
        self.release_source(of);
        for at in (of.passed..of.table.len()).rev() {
            if self.is_held(of, at) {
                self.pages.release(of.table[at]);
            }
        }
        *of = WindowPages::default();
    }

    /// Returns whether an entry is the last one of a page that the lease holds.
    fn is_held(&self, of: &WindowPages, at: usize) -> bool {
        let page = of.table[at];
        page != NULL_PAGE && of.table.get(at + self.cache.step_pages) != Some(&page)
    }
}

impl WindowPages {
    /// Returns the entries of the page table.
    pub(super) fn table(&self) -> &[Page] {
        &self.table
    }

    /// Returns the page to copy from.
    pub(super) fn source(&self) -> Option<Page> {
        self.source
    }
}
