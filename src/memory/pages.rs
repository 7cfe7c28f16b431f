//! The page pool of the KV cache: which pages are free, and how many leases hold each of the others.
//!
//! A [`Lease`] is the right to its pages. Leases may share pages: a page is free again when the last lease
//! that holds it is dropped, on any thread. Hold a lease until the last step that refers to its pages is
//! sent: after the drop, later steps may use them for other sequences.
//! Invariant: a page is either free or held, and the null page is neither.

use mainstem_kernels::batch::{NULL_PAGE, Page};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All pages of the KV cache except the null page. The pool has one owner; only leases are passed around.
#[derive(Debug)]
pub struct PagePool {
    page_positions: usize,
    pages: Arc<Mutex<PageStates>>,
}

/// The state of every page.
#[derive(Debug)]
struct PageStates {
    /// Number of resets; dropping a lease from an earlier epoch has no effect.
    epoch: u64,
    /// Number of leases that hold each page, by page number. The null page's stays 0.
    holders: Vec<u32>,
    /// Free pages; the last one is leased first.
    free: Vec<Page>,
}

/// The pages of a sequence: those of its own positions, then those of its encoder positions, each in order.
/// A clone shares the list, but is no right to the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageList {
    pages: Arc<[Page]>,
    /// Number of pages for the sequence's own positions.
    own: usize,
}

/// The right to use some pages.
#[derive(Debug)]
pub struct Lease {
    list: PageList,
    /// Number of leading positions whose K and V are in the pages already.
    computed: usize,
    epoch: u64,
    pool: Arc<Mutex<PageStates>>,
}

/// Leading positions whose K and V are in the pages of another sequence, which begins with the same tokens.
#[derive(Clone, Debug)]
pub struct ComputedPrefix {
    pub lease: Arc<Lease>,
    /// Number of positions; they fill pages.
    pub positions: usize,
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
        let states = PageStates { epoch: 0, holders: vec![0; pages], free: Vec::with_capacity(pages) };
        let mut pool = PagePool { page_positions, pages: Arc::new(Mutex::new(states)) };
        pool.reset();
        pool
    }

    /// Leases the pages for `positions` token positions. Returns `None`, and leases nothing, if fewer are
    /// free.
    pub fn reserve(&mut self, positions: usize) -> Option<Lease> {
        self.reserve_with_encoder(positions, 0, None)
    }

    /// Leases the pages for `positions` token positions, and separate pages for the encoder positions
    /// `source`. The pages of `prefix` become the first ones of the sequence and are shared; only the others
    /// are taken from the free pages. Returns `None`, and leases nothing, if fewer are free.
    pub fn reserve_with_encoder(
        &mut self,
        positions: usize,
        source: usize,
        prefix: Option<&ComputedPrefix>,
    ) -> Option<Lease> {
        let (own, cross) = (self.pages_for(positions), self.pages_for(source));
        let computed = prefix.map_or(0, |prefix| prefix.positions);
        assert!(
            computed.is_multiple_of(self.page_positions) && computed <= positions,
            "the shared positions fill pages of the sequence"
        );
        let states = &mut *lock(&self.pages);
        let shared = prefix.map_or(&[][..], |prefix| {
            assert_eq!(prefix.lease.epoch, states.epoch, "a lease from before a reset is not shared");
            &prefix.lease.own()[..computed / self.page_positions]
        });
        let rest = states.free.len().checked_sub(own + cross - shared.len())?;
        let pages: Arc<[Page]> = shared.iter().copied().chain(states.free.drain(rest..).rev()).collect();
        for &page in &pages[..] {
            states.holders[page as usize] += 1;
        }
        let list = PageList { pages, own };
        Some(Lease { list, computed, epoch: states.epoch, pool: Arc::clone(&self.pages) })
    }

    /// Returns the number of pages for `positions` token positions.
    pub fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.page_positions)
    }

    /// Returns the number of pages that can be leased: all except the null page.
    pub fn total(&self) -> usize {
        lock(&self.pages).holders.len() - 1
    }

    /// Returns the number of free pages.
    pub fn free(&self) -> usize {
        lock(&self.pages).free.len()
    }

    /// Returns the number of leased pages; a shared page counts once.
    pub fn used(&self) -> usize {
        self.total() - self.free()
    }

    /// Frees every page, because the content of the cache is lost. Existing leases become invalid, and
    /// dropping them has no effect.
    pub fn reset(&mut self) {
        let PageStates { epoch, holders, free } = &mut *lock(&self.pages);
        *epoch += 1;
        holders.fill(0);
        free.clear();
        // In descending order, so that low pages are leased first.
        free.extend((0..holders.len() as Page).rev().filter(|&page| page != NULL_PAGE));
    }

    /// Asserts that every page except the null page is either free, once, or held.
    pub fn check(&self) {
        let PageStates { holders, free: free_pages, .. } = &*lock(&self.pages);
        let mut free = vec![false; holders.len()];
        for &page in free_pages {
            assert!(!std::mem::replace(&mut free[page as usize], true), "page {page} is free twice");
        }
        assert!(
            !free[NULL_PAGE as usize] && holders[NULL_PAGE as usize] == 0,
            "the null page is never free or held"
        );
        for page in (0..holders.len()).filter(|&page| page != NULL_PAGE as usize) {
            assert_eq!(free[page], holders[page] == 0, "page {page} is free or held");
        }
    }
}

impl PageList {
    /// Creates a list whose first `own` pages are those of the sequence's own positions.
    pub fn new(pages: &[Page], own: usize) -> PageList {
        assert!(own <= pages.len(), "the sequence's own pages are in the list");
        PageList { pages: pages.into(), own }
    }

    /// Returns all pages.
    pub fn all(&self) -> &[Page] {
        &self.pages
    }

    /// Returns the pages of the sequence's own positions.
    pub fn own(&self) -> &[Page] {
        &self.pages[..self.own]
    }

    /// Returns the pages of its encoder positions.
    pub fn cross(&self) -> &[Page] {
        &self.pages[self.own..]
    }
}

impl Lease {
    /// Returns the list of all pages.
    pub fn list(&self) -> &PageList {
        &self.list
    }

    /// Returns all pages: those of the sequence's own positions, then those of its encoder positions.
    pub fn pages(&self) -> &[Page] {
        self.list.all()
    }

    /// Returns the pages of the sequence's own positions, in order.
    pub fn own(&self) -> &[Page] {
        self.list.own()
    }

    /// Returns the pages of its encoder positions, in order.
    pub fn cross(&self) -> &[Page] {
        self.list.cross()
    }

    /// Returns the number of leading positions whose K and V were in the pages when they were leased.
    pub fn computed(&self) -> usize {
        self.computed
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let PageStates { epoch, holders, free } = &mut *lock(&self.pool);
        if *epoch != self.epoch {
            return;
        }
        for &page in self.list.all() {
            let count = &mut holders[page as usize];
            *count -= 1;
            if *count == 0 {
                free.push(page);
            }
        }
    }
}

/// Locks the states, ignoring poisoning: no holder of the lock panics halfway through a change.
fn lock(pages: &Mutex<PageStates>) -> MutexGuard<'_, PageStates> {
    pages.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert!(
            pool.reserve_with_encoder(3 * POSITIONS, 2 * POSITIONS + 1, None).is_none(),
            "one page too few"
        );
        assert_eq!(pool.used(), 0, "and nothing of it stays leased");
        let lease = pool.reserve_with_encoder(2 * POSITIONS + 1, POSITIONS, None).expect("there are enough");
        assert_eq!((lease.own().len(), lease.cross().len(), pool.used()), (3, 1, 4));
        assert_eq!([lease.own(), lease.cross()].concat(), lease.pages());
        assert_disjoint(std::slice::from_ref(&lease));
        let without = pool.reserve(POSITIONS).expect("one is left");
        assert_eq!((without.own().len(), without.cross().len()), (1, 0));
        drop(lease);
        pool.check();
        assert_eq!(pool.used(), 1);
        let nothing = pool.reserve(0).expect("a lease of no pages always succeeds");
        assert!(nothing.pages().is_empty());
    }

    /// A lease of `positions` positions whose first `pages` pages are those of another one.
    fn share(pool: &mut PagePool, other: &Arc<Lease>, pages: usize, positions: usize) -> Option<Lease> {
        let prefix = ComputedPrefix { lease: other.clone(), positions: pages * POSITIONS };
        pool.reserve_with_encoder(positions, 0, Some(&prefix))
    }

    #[test]
    fn a_shared_page_comes_free_with_its_last_lease_and_the_others_with_their_own() {
        let mut pool = PagePool::new(7, POSITIONS);
        let first = Arc::new(pool.reserve_with_encoder(3 * POSITIONS, 1, None).expect("there are enough"));
        let second = share(&mut pool, &first, 2, 3 * POSITIONS).expect("one page is needed, two are free");
        assert_eq!((first.computed(), second.computed(), pool.used()), (0, 2 * POSITIONS, 5));
        assert_eq!((&second.own()[..2], second.cross().len()), (&first.own()[..2], 0));
        assert!(!first.pages().contains(&second.own()[2]));
        assert!(share(&mut pool, &first, 2, 5 * POSITIONS).is_none(), "two more pages are not free");
        assert_eq!(pool.used(), 5, "and nothing of it stays leased");
        drop(first);
        pool.check();
        assert_eq!(pool.used(), 3, "the pages of the first lease alone are free");
        drop(second);
        pool.check();
        assert_eq!(pool.used(), 0);
    }

    /// Random leases, with and without shared pages, and drops, against a list of the leases.
    #[test]
    fn random_sharing_loses_no_page_and_leases_no_held_page() {
        let (mut pool, mut dice) = (PagePool::new(41, POSITIONS), Dice::new(11));
        let (mut held, mut shared, mut refused): (Vec<Arc<Lease>>, _, _) = (Vec::new(), 0, 0);
        for _ in 0..5000 {
            let positions = dice.below(8 * POSITIONS);
            match dice.below(5) {
                0 | 1 if !held.is_empty() => drop(held.swap_remove(dice.below(held.len()))),
                2 | 3 if !held.is_empty() => {
                    let other = held[dice.below(held.len())].clone();
                    let pages = dice.below(other.own().len().min(positions / POSITIONS) + 1);
                    match share(&mut pool, &other, pages, positions) {
                        Some(lease) => {
                            assert_eq!(lease.own()[..pages], other.own()[..pages]);
                            let fresh = &lease.own()[pages..];
                            let taken = |page| held.iter().any(|lease| lease.pages().contains(page));
                            assert!(!fresh.iter().any(taken), "a held page was leased");
                            held.push(Arc::new(lease));
                            shared += usize::from(pages > 0);
                        }
                        None => refused += 1,
                    }
                }
                _ => held.extend(pool.reserve(positions).map(Arc::new)),
            }
            let pages: BTreeSet<Page> = held.iter().flat_map(|lease| lease.pages()).copied().collect();
            assert_eq!(pool.used(), pages.len(), "a page is used as long as a lease holds it");
            pool.check();
        }
        assert!(shared > 300 && refused > 50, "{shared} shared, {refused} refused");
        held.clear();
        pool.check();
        assert_eq!((pool.used(), pool.free()), (0, pool.total()));
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
        let old = Arc::new(pool.reserve(POSITIONS).expect("enough"));
        pool.reset();
        share(&mut pool, &old, 1, POSITIONS);
    }
}
