//! The page pool of the KV cache: which pages are free, and how many leases hold each of the others.
//!
//! A [`Lease`] is the right to its pages. Dropping it, on any thread, returns them; the pool takes returned
//! pages back at its next call. Hold a lease until the last step that refers to its pages is sent: after the
//! drop, later steps may use them for other sequences.
//! Invariant: a page is either free or held, and the null page is neither.

use mainstem_kernels::batch::{NULL_PAGE, Page};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All pages of the KV cache except the null page. The pool has one owner; only leases are passed around.
#[derive(Debug)]
pub struct PagePool {
    page_positions: usize,
    /// Number of leases that hold each page, by page number. The null page's stays 0.
    holders: Vec<u32>,
    /// Free pages; the last one is leased first.
    free: Vec<Page>,
    returned: Arc<Mutex<ReturnedPages>>,
}

/// Pages returned by dropped leases.
#[derive(Debug)]
struct ReturnedPages {
    /// Number of resets; the pages of a lease from an earlier epoch are ignored.
    epoch: u64,
    pages: Vec<Page>,
}

/// The right to use some pages, which are returned when it is dropped.
#[derive(Debug)]
pub struct Lease {
    pages: Vec<Page>,
    /// Number of pages for the sequence's own positions; the remaining pages are for its encoder positions.
    own_count: usize,
    epoch: u64,
    returned: Arc<Mutex<ReturnedPages>>,
}

impl PagePool {
    /// Creates a pool for a cache of `pages` pages, including the null page, of `page_positions` token
    /// positions each.
    pub fn new(pages: usize, page_positions: usize) -> PagePool {
        assert!(
            pages > 0 && page_positions > 0,
            "a cache has a null page, and a page has at least one position"
        );
        assert!(Page::try_from(pages).is_ok(), "page numbers fit their type");
        let returns = ReturnedPages { epoch: 0, pages: Vec::with_capacity(pages) };
        let mut pool = PagePool {
            page_positions,
            holders: vec![0; pages],
            free: Vec::with_capacity(pages),
            returned: Arc::new(Mutex::new(returns)),
        };
        pool.reset();
        pool
    }

    /// Leases the pages for `positions` token positions. Returns `None`, and leases nothing, if fewer are
    /// free.
    pub fn reserve(&mut self, positions: usize) -> Option<Lease> {
        self.reserve_with_encoder(positions, 0)
    }

    /// Leases the pages for `positions` token positions, and separate pages for the encoder positions
    /// `source`. Returns `None`, and leases nothing, if fewer are free.
    pub fn reserve_with_encoder(&mut self, positions: usize, source: usize) -> Option<Lease> {
        let epoch = self.collect();
        let (own, cross) = (self.pages_for(positions), self.pages_for(source));
        let rest = self.free.len().checked_sub(own + cross)?;
        let pages: Vec<Page> = self.free.drain(rest..).rev().collect();
        Some(self.lease(pages, own, epoch))
    }

    /// Creates a second lease of the same pages: they become free when both are dropped.
    pub fn share(&mut self, lease: &Lease) -> Lease {
        let epoch = self.collect();
        assert_eq!(lease.epoch, epoch, "a lease from before a reset is not shared");
        self.lease(lease.pages.clone(), lease.own_count, epoch)
    }

    /// Returns the number of pages for `positions` token positions.
    pub fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.page_positions)
    }

    /// Returns the number of pages that can be leased: all except the null page.
    pub fn total(&self) -> usize {
        self.holders.len() - 1
    }

    /// Returns the number of free pages.
    pub fn free(&mut self) -> usize {
        self.collect();
        self.free.len()
    }

    /// Returns the number of leased pages.
    pub fn used(&mut self) -> usize {
        self.total() - self.free()
    }

    /// Frees every page, because the content of the cache is lost. Existing leases become invalid, and
    /// dropping them has no effect.
    pub fn reset(&mut self) {
        let mut returns = lock(&self.returned);
        returns.epoch += 1;
        returns.pages.clear();
        self.holders.fill(0);
        self.free.clear();
        // In descending order, so that low pages are leased first.
        self.free.extend((0..self.holders.len() as Page).rev().filter(|&page| page != NULL_PAGE));
    }

    /// Asserts that every page except the null page is either free, once, or held.
    pub fn check(&mut self) {
        self.collect();
        let mut free = vec![false; self.holders.len()];
        for &page in &self.free {
            assert!(!std::mem::replace(&mut free[page as usize], true), "page {page} is free twice");
        }
        assert!(
            !free[NULL_PAGE as usize] && self.holders[NULL_PAGE as usize] == 0,
            "the null page is never free or held"
        );
        for page in (0..self.holders.len()).filter(|&page| page != NULL_PAGE as usize) {
            assert_eq!(free[page], self.holders[page] == 0, "page {page} is free or held");
        }
    }

    /// Takes back the pages of dropped leases; returns the current epoch.
    fn collect(&mut self) -> u64 {
        let mut returns = lock(&self.returned);
        for page in returns.pages.drain(..) {
            let holders = &mut self.holders[page as usize];
            *holders = holders
                .checked_sub(1)
                .expect("a page was returned more often than it was leased; this is a bug");
            if *holders == 0 {
                self.free.push(page);
            }
        }
        returns.epoch
    }

    /// Creates a lease, and counts it for its pages.
    fn lease(&mut self, pages: Vec<Page>, own: usize, epoch: u64) -> Lease {
        for &page in &pages {
            self.holders[page as usize] += 1;
        }
        Lease { pages, own_count: own, epoch, returned: Arc::clone(&self.returned) }
    }
}

impl Lease {
    /// Returns all pages: those of the sequence's own positions, then those of its encoder positions.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Returns the pages of the sequence's own positions, in order.
    pub fn own_count(&self) -> &[Page] {
        &self.pages[..self.own_count]
    }

    /// Returns the pages of its encoder positions, in order.
    pub fn cross(&self) -> &[Page] {
        &self.pages[self.own_count..]
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut returns = lock(&self.returned);
        if returns.epoch == self.epoch {
            returns.pages.append(&mut self.pages);
        }
    }
}

/// Locks the list, ignoring poisoning: no holder of the lock panics halfway through a change.
fn lock(returns: &Mutex<ReturnedPages>) -> MutexGuard<'_, ReturnedPages> {
    returns.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::dice::Dice;
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::mpsc;

    const POSITIONS: usize = 32;

    /// Asserts that the pages of all leases are distinct, and that none is the null page.
    fn assert_disjoint(leases: &[Lease]) {
        let pages: Vec<Page> = leases.iter().flat_map(|lease| lease.pages().iter().copied()).collect();
        assert!(!pages.contains(&NULL_PAGE));
        assert_eq!(pages.iter().collect::<BTreeSet<_>>().len(), pages.len());
    }

    #[test]
    fn positions_are_rounded_up_to_pages() {
        let mut pool = PagePool::new(5, POSITIONS);
        for (positions, pages) in [(0, 0), (1, 1), (32, 1), (33, 2), (128, 4)] {
            assert_eq!(pool.pages_for(positions), pages);
            let lease = pool.reserve(positions).expect("there are enough");
            assert_eq!((lease.pages().len(), pool.used()), (pages, pages));
        }
        assert_eq!((pool.total(), pool.used(), pool.free()), (4, 0, 4));
    }

    #[test]
    fn an_exhausted_pool_refuses_and_keeps_nothing() {
        let mut pool = PagePool::new(5, POSITIONS);
        let first = pool.reserve(3 * POSITIONS).expect("there are enough");
        assert!(pool.reserve(2 * POSITIONS).is_none());
        assert_eq!(pool.free(), 1);
        let second = pool.reserve(POSITIONS).expect("one is left");
        assert!(pool.reserve(1).is_none());
        assert_disjoint(&[first, second]);
        assert!(pool.reserve(5 * POSITIONS).is_none(), "more than there are");
        let all = pool.reserve(4 * POSITIONS).expect("all are back");
        assert_eq!(all.pages().iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([1, 2, 3, 4]));
        assert!(PagePool::new(1, POSITIONS).reserve(1).is_none(), "the null page cannot be leased");
    }

    #[test]
    fn random_churn_with_drops_on_another_thread() {
        let (sender, receiver) = mpsc::channel::<Lease>();
        let (done, dropped) = mpsc::channel();
        let dropper = std::thread::spawn(move || {
            for lease in receiver {
                drop(lease);
                done.send(()).expect("the test holds the receiver");
            }
        });
        let (mut pool, mut dice, mut held) = (PagePool::new(41, POSITIONS), Dice::new(7), Vec::new());
        let (mut granted, mut refused, mut away) = (0, 0, 0);
        for _ in 0..3000 {
            let positions = dice.below(10 * POSITIONS);
            match dice.below(4) {
                0 if !held.is_empty() => drop(held.swap_remove(dice.below(held.len()))),
                1 if !held.is_empty() => {
                    sender.send(held.swap_remove(dice.below(held.len()))).expect("the other thread listens");
                    away += 1;
                }
                _ => match pool.reserve(positions) {
                    Some(lease) => {
                        assert_eq!(lease.pages().len(), pool.pages_for(positions));
                        held.push(lease);
                        granted += 1;
                    }
                    None => {
                        // Wait for the other thread's drops, so that a refusal is due to the leases held
                        // here.
                        dropped.iter().take(std::mem::take(&mut away)).for_each(drop);
                        refused += 1;
                    }
                },
            }
            assert_disjoint(&held);
            pool.check();
        }
        assert!(granted > 500 && refused > 50, "{granted} granted, {refused} refused");
        held.clear();
        drop(sender);
        dropper.join().expect("dropping a lease does not panic");
        pool.check();
        assert_eq!((pool.used(), pool.free()), (0, pool.total()));
    }

    #[test]
    fn encoder_pages_are_leased_and_returned_with_the_sequence() {
        let mut pool = PagePool::new(6, POSITIONS);
        assert!(pool.reserve_with_encoder(3 * POSITIONS, 2 * POSITIONS + 1).is_none(), "one page too few");
        assert_eq!(pool.used(), 0, "and nothing of it stays leased");
        let lease = pool.reserve_with_encoder(2 * POSITIONS + 1, POSITIONS).expect("there are enough");
        assert_eq!((lease.own_count().len(), lease.cross().len(), pool.used()), (3, 1, 4));
        assert_eq!([lease.own_count(), lease.cross()].concat(), lease.pages());
        assert_disjoint(std::slice::from_ref(&lease));
        let without = pool.reserve(POSITIONS).expect("one is left");
        assert_eq!((without.own_count().len(), without.cross().len()), (1, 0));
        drop(lease);
        pool.check();
        assert_eq!(pool.used(), 1);
        let nothing = pool.reserve(0).expect("a lease of no pages always succeeds");
        assert!(nothing.pages().is_empty());
    }

    #[test]
    fn shared_pages_come_free_with_their_last_lease() {
        let mut pool = PagePool::new(5, POSITIONS);
        let first = pool.reserve_with_encoder(2 * POSITIONS, 1).expect("there are enough");
        let second = pool.share(&first);
        assert_eq!((second.own_count(), second.cross(), pool.used()), (first.own_count(), first.cross(), 3));
        drop(first);
        assert_eq!(pool.used(), 3);
        pool.check();
        drop(second);
        assert_eq!(pool.used(), 0);
        pool.check();
    }

    #[test]
    fn leases_from_before_a_reset_are_harmless() {
        let mut pool = PagePool::new(5, POSITIONS);
        let (old, late) = (pool.reserve(64).expect("enough"), pool.reserve(64).expect("enough"));
        pool.reset();
        assert_eq!(pool.free(), 4);
        let new = pool.reserve(3 * POSITIONS).expect("all are free again");
        // The old lease refers to pages that the new one holds.
        assert!(old.pages().iter().any(|page| new.pages().contains(page)));
        drop(old);
        pool.check();
        assert_eq!(pool.used(), 3);
        drop(new);
        assert_eq!(pool.used(), 0);
        drop(late);
        pool.check();
        assert_eq!(pool.free(), 4);
    }

    #[test]
    fn pages_returned_just_before_a_reset_come_free_once() {
        let mut pool = PagePool::new(4, POSITIONS);
        drop(pool.reserve(64));
        pool.reset();
        pool.check();
        assert_eq!(pool.free(), 3);
    }

    #[test]
    #[should_panic(expected = "not shared")]
    fn an_old_lease_is_not_shared() {
        let mut pool = PagePool::new(4, POSITIONS);
        let old = pool.reserve(1).expect("enough");
        pool.reset();
        pool.share(&old);
    }
}
