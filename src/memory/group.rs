//! The pages of one numbering: which are free, how many leases hold each of the others, and which tokens they
//! hold.
//!
//! Invariant: a page is free, idle or held, and the null page is none of these. Free pages have no entry in
//! the index, idle ones have one.

use super::prefix::PrefixIndex;
use mainstem_kernels::batch::{NULL_PAGE, Page};
use std::collections::BTreeMap;

/// The state of every page of a group.
#[derive(Debug)]
pub(super) struct PageGroup {
    /// Number of leases that hold each page, by page number. The null page's stays 0.
    holders: Vec<u32>,
    /// Free pages; the last one is leased first.
    free: Vec<Page>,
    /// Idle pages by the time of their release: those that nobody holds, but whose tokens are in the index.
    idle: BTreeMap<u64, Page>,
    /// Time of the release of each idle page.
    released_at: Vec<u64>,
    /// Number of releases so far.
    clock: u64,
    pub(super) index: PrefixIndex,
}

impl PageGroup {
    /// Creates `pages` pages, including the null page; the others are free.
    pub(super) fn new(pages: usize) -> PageGroup {
        assert!(pages > 0, "a cache has a null page");
        assert!(Page::try_from(pages).is_ok(), "page numbers fit their type");
        PageGroup {
            holders: vec![0; pages],
            // In descending order, so that low pages are leased first.
            free: (0..pages as Page).rev().filter(|&page| page != NULL_PAGE).collect(),
            idle: BTreeMap::new(),
            released_at: vec![0; pages],
            clock: 0,
            index: PrefixIndex::default(),
        }
    }

    /// Returns the number of pages except the null page.
    pub(super) fn total(&self) -> usize {
        self.holders.len() - 1
    }

    /// Returns the number of free and idle pages.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Returns the number of held pages; a shared page counts once.
    pub(super) fn held(&self) -> usize {
        self.total() - self.available()
    }

    /// Returns whether a page is idle.
    pub(super) fn is_idle(&self, page: Page) -> bool {
        self.holders[page as usize] == 0 && self.index.contains(page)
    }

    /// Returns whether a page becomes available when one of its holders releases it.
    pub(super) fn has_one_holder(&self, page: Page) -> bool {
        self.holders[page as usize] == 1
    }

    /// Returns whether a held page can be written to again: nobody else holds it, or could find it.
    pub(super) fn is_exclusive(&self, page: Page) -> bool {
        self.has_one_holder(page) && !self.index.contains(page)
    }

    /// Adds a holder to a page that is held or idle.
    pub(super) fn hold(&mut self, page: Page) {
        if self.holders[page as usize] == 0 {
            let idle = self.idle.remove(&self.released_at[page as usize]);
            assert_eq!(idle, Some(page), "a page that is shared is held or idle; anything else is a bug");
        }
        self.holders[page as usize] += 1;
    }

    /// Takes a free page, or else the idle one that was released first. The caller checked that there is one.
    pub(super) fn take(&mut self) -> Page {
        let page = self.free.pop().unwrap_or_else(|| {
            let (_, page) = self.idle.pop_first().expect("a page is available, as seen before");
            self.index.remove(page);
            page
        });
        self.holders[page as usize] = 1;
        page
    }

    /// Removes a holder of a page.
    pub(super) fn release(&mut self, page: Page) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        if self.index.contains(page) {
            self.clock += 1;
            self.released_at[page as usize] = self.clock;
            self.idle.insert(self.clock, page);
        } else {
            self.free.push(page);
        }
    }

    /// Forgets which tokens the pages hold. Held pages stay held.
    pub(super) fn forget_contents(&mut self) {
        self.index.clear();
        self.free.extend(std::mem::take(&mut self.idle).into_values());
    }

    /// Asserts that every page except the null page is either free, once, or idle, or held.
    pub(super) fn check(&self) {
        self.index.check();
        let mut places = vec![0; self.holders.len()];
        self.free.iter().chain(self.idle.values()).for_each(|page| places[*page as usize] += 1);
        assert!(
            places[NULL_PAGE as usize] == 0 && self.holders[NULL_PAGE as usize] == 0,
            "the null page is never free or held"
        );
        for (page, place) in places.iter().enumerate().filter(|(page, _)| *page != NULL_PAGE as usize) {
            let held = usize::from(self.holders[page] > 0);
            assert_eq!(place + held, 1, "page {page} is free, idle or held");
        }
        assert!(self.free.iter().all(|page| !self.index.contains(*page)), "free pages have no entry");
        assert!(self.idle.values().all(|page| self.index.contains(*page)), "idle pages have one");
    }
}
