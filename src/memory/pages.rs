//! The page pool of the KV cache: which pages are free, how many leases hold each of the others, and which
//! tokens the pages hold.
//!
//! A [`Lease`] is the right to the pages of a sequence. Leases may share pages: a page is released when the
//! last lease that holds it is dropped, on any thread. Hold a lease until the last step that refers to its
//! pages is sent: after the drop, later steps may use them for other sequences. A released page whose tokens
//! are known is idle: another sequence can share it, until it is taken for others, the longest unused first.
//! Invariant: a page is free, idle or held, and the null page is none of these. Positions whose tokens the
//! index knows are not written to again.

use super::group::PageGroup;
use super::prefix::{Match, PageHash, TokenChain};
use super::window::{WindowCache, WindowGroup, WindowMatch, WindowPages};
use mainstem_kernels::batch::Page;
use mainstem_kernels::{KvTable, PageCopy};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All pages of the KV cache except the null page. Clones are handles to the same pool.
#[derive(Clone, Debug)]
pub struct PagePool {
    page_positions: usize,
    states: Arc<Mutex<PageStates>>,
}

/// The state of every page.
#[derive(Debug)]
struct PageStates {
    own: PageGroup,
    /// The pages of windowed layers, if these have pages of their own.
    window: Option<WindowGroup>,
    /// Number of pages that all sequences together may still need.
    growth: usize,
    /// Counts the events after which a sequence may begin that could not before.
    releases: u64,
}

/// The pages that a sequence needs to begin.
#[derive(Clone, Copy, Debug)]
pub struct PageDemand {
    /// Positions of the sequence itself, at the beginning.
    pub positions: usize,
    /// Positions that it may grow to.
    pub max_positions: usize,
    /// Encoder positions, which have pages of their own.
    pub encoder_positions: usize,
    /// Maximum number of leading tokens whose K and V may be taken over from other sequences.
    pub reusable: usize,
    /// Pages that must be left for growing sequences after the lease, unless they need fewer, or no page is
    /// held.
    pub margin: usize,
}

/// The reason for which a sequence cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoLease {
    /// Too few pages can be leased: of those that it needs beside shared ones, so many are missing.
    Short { needed: usize, missing: usize },
    /// A page that it needs is being computed for another sequence, and can be shared afterwards.
    Coming,
}

/// The right to the pages of a sequence, in the order of its positions.
#[derive(Debug)]
pub struct Lease {
    own: Vec<Page>,
    cross: Vec<Page>,
    /// As many entries as pages of its own, if windowed layers have pages.
    window: WindowPages,
    /// Number of pages of its own that the sequence may still need.
    growth: usize,
    /// Number of pages of its own that others held when it began.
    shared: usize,
    /// Number of leading positions whose K and V were in the pages, or will be after the copy.
    computed: usize,
    /// The page that the last of these positions are copied from, held until the copy is sent.
    source: Option<Page>,
    /// The tokens of the sequence, if its pages may be found by others.
    chain: Option<TokenChain>,
    /// Number of leading positions that the index knows as far as it needs to.
    noted: usize,
    /// Number of tokens when the sequence began.
    begun: usize,
    /// Hashes of the pages of these tokens that are announced as being computed, the last page first.
    announced: Vec<PageHash>,
    pool: PagePool,
}

impl PageStates {
    /// Finds the pages that hold the first tokens of a chain, at most `limit`, in all layers. Returns `None`
    /// if the page after these is being computed for another sequence.
    fn find(&self, chain: Option<&mut TokenChain>, limit: usize) -> Option<(Match, Option<WindowMatch>)> {
        let (index, window) = (&self.own.index, self.window.as_ref());
        let Some(chain) = chain else {
            return Some((Match::default(), window.map(|_| WindowMatch::default())));
        };
        if chain.awaited().is_some_and(|hash| index.is_coming(hash)) {
            return None;
        }
        let mut found = index.find(chain, limit);
        let in_window = window.map(|window| window.find(chain, limit, &mut found));
        match found.next_page(chain, limit) {
            Some(next) if index.is_coming(chain.hash_at(next)) => {
                chain.await_page(next);
                None
            }
            _ => Some((found, in_window)),
        }
    }
}

impl PagePool {
    /// Creates a pool for a cache of `pages` pages, including the null page, of `page_positions` token
    /// positions each.
    pub fn new(pages: usize, page_positions: usize) -> PagePool {
        PagePool::with_window(pages, page_positions, None)
    }

    /// Creates a pool whose windowed layers have pages of their own, if a size is given for these.
    pub fn with_window(pages: usize, page_positions: usize, window: Option<WindowCache>) -> PagePool {
        assert!(page_positions > 0, "a page has at least one position");
        let window = window.map(|window| WindowGroup::new(window, page_positions));
        let states = PageStates { own: PageGroup::new(pages), window, growth: 0, releases: 0 };
        PagePool { page_positions, states: Arc::new(Mutex::new(states)) }
    }

    /// Leases the pages of a sequence that begins. With a `chain` of its first tokens, it shares the pages
    /// that hold them already, and the others are announced as being computed; the chain comes back if there
    /// is no lease. Nothing is leased then.
    #[allow(clippy::result_large_err)] // a box would be allocated at each attempt
    pub fn begin(
        &self,
        demand: PageDemand,
        mut chain: Option<TokenChain>,
    ) -> Result<Lease, (NoLease, Option<TokenChain>)> {
        let PageDemand { positions, max_positions, encoder_positions, reusable, margin } = demand;
        let (own, cross) = (self.pages_for(positions), self.pages_for(encoder_positions));
        let states = &mut *self.lock();
        let Some((found, mut in_window)) = states.find(chain.as_mut(), reusable) else {
            return Err((NoLease::Coming, chain));
        };
        let PageStates { own: group, window, growth: all_growth, .. } = states;
        assert!(found.full.len() <= own, "the shared pages are pages of the sequence");
        let growth = self.pages_for(max_positions).saturating_sub(own);
        let margin = if group.held() > 0 { margin.min(*all_growth + growth) } else { 0 };
        let needed = own + cross - found.full.len() + margin;
        let idle = found.full.iter().filter(|page| group.is_idle(**page)).count();
        let available = group.available() - idle;
        let rest = available.checked_sub(needed);
        let window_rest = match (&window, &in_window) {
            (Some(window), Some(found)) => window.rest(found, own),
            _ => Some(usize::MAX),
        };
        let Some((rest, window_rest)) = rest.zip(window_rest) else {
            // Of the windowed layers' pages, a sequence has few.
            let missing = needed.saturating_sub(available).max(1);
            return Err((NoLease::Short { needed: needed - margin + idle, missing }, chain));
        };
        // Without a page to spare, what is in the source is computed again.
        let mut source = found.partial.filter(|(page, _)| rest > 0 || !group.is_idle(*page));
        if let Some(found) = &mut in_window {
            source = source.filter(|_| window_rest > 0);
            found.source = found.source.filter(|_| source.is_some());
        }
        let shared = found.full.len() - idle;
        found.full.iter().for_each(|page| group.hold(*page));
        if let Some((page, _)) = source {
            group.hold(page);
        }
        *all_growth += growth;
        let computed = found.full.len() * self.page_positions + source.map_or(0, |(_, common)| common);
        let taken = found.full.len()..own;
        let mut pages = found.full;
        pages.extend(taken.clone().map(|_| group.take()));
        let cross = (0..cross).map(|_| group.take()).collect();
        let begun = chain.as_ref().map_or(0, TokenChain::len);
        let announced: Vec<PageHash> = match &chain {
            Some(chain) => (taken.start..chain.pages()).rev().map(|page| chain.hash_at(page)).collect(),
            None => Vec::new(),
        };
        announced.iter().for_each(|hash| group.index.announce(*hash));
        let window = window.as_mut().zip(in_window).map(|(window, found)| window.begin(found, own));
        Ok(Lease {
            own: pages,
            cross,
            window: window.unwrap_or_default(),
            growth,
            shared,
            computed,
            source: source.map(|(page, _)| page),
            chain,
            noted: computed,
            begun,
            announced,
            pool: self.clone(),
        })
    }

    /// Returns the number of pages for `positions` token positions.
    pub fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.page_positions)
    }

    /// Returns the number of positions of a page.
    pub fn page_positions(&self) -> usize {
        self.page_positions
    }

    /// Returns the number of pages that can be leased in total: all except the null page.
    pub fn total(&self) -> usize {
        self.lock().own.total()
    }

    /// Returns the number of pages that can be leased now: free and idle ones.
    pub fn available(&self) -> usize {
        self.lock().own.available()
    }

    /// Returns a number that changes with each event after which a sequence may begin for which there were
    /// too few pages.
    pub fn releases(&self) -> u64 {
        self.lock().releases
    }

    /// Returns the number of held pages; a shared page counts once.
    pub fn used(&self) -> usize {
        self.lock().own.held()
    }

    /// Returns the number of held pages of windowed layers; 0 if they have none of their own.
    pub fn used_in_windows(&self) -> usize {
        self.lock().window.as_ref().map_or(0, |window| window.pages.held())
    }

    /// Returns the fraction of pages that are held, of the layers that have fewer left.
    pub fn usage(&self) -> f64 {
        let states = &*self.lock();
        let window = states.window.as_ref().map(|window| &window.pages);
        // A model without a KV cache has no pages.
        let of = |group: &PageGroup| group.held() as f64 / group.total().max(1) as f64;
        std::iter::once(&states.own).chain(window).map(of).fold(0.0, f64::max)
    }

    /// Forgets which tokens the pages hold, because their content is lost. Leases stay valid.
    pub fn forget_contents(&self) {
        let states = &mut *self.lock();
        states.releases += 1;
        states.own.forget_contents();
        if let Some(window) = &mut states.window {
            window.pages.forget_contents();
        }
    }

    /// Asserts that every page except the null page is either free, once, or idle, or held.
    pub fn check(&self) {
        let states = &*self.lock();
        states.own.check();
        if let Some(window) = &states.window {
            window.pages.check();
        }
        assert!(
            states.own.held() > 0 || states.own.index.coming() + states.growth == 0,
            "nobody computes or needs pages without holding some"
        );
    }

    /// Locks the states, ignoring poisoning: no holder of the lock panics halfway through a change.
    fn lock(&self) -> MutexGuard<'_, PageStates> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Returns the number of pages that the sequence does not share: its own and those of encoder positions,
    /// without those that others held when it began.
    pub fn unshared(&self) -> usize {
        (self.own.len() + self.cross.len()).saturating_sub(self.shared)
    }

    /// Returns the pages of the sequence's own positions, in order.
    pub fn own(&self) -> &[Page] {
        &self.own
    }

    /// Returns the pages of its encoder positions, in order.
    pub fn cross(&self) -> &[Page] {
        &self.cross
    }

    /// Returns the pages of its own positions in windowed layers, in order; empty if these have no pages of
    /// their own. It is the null page for positions that no row sees, and pages that were used again appear
    /// more than once.
    pub fn window(&self) -> &[Page] {
        self.window.table()
    }

    /// Returns the number of leading positions that need no computation: their K and V are in the pages, or
    /// will be after [`Lease::copy`].
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Returns the copy that must precede the sequence's first step: of a page that holds some of the tokens
    /// of the sequence's page.
    pub fn copy(&self) -> Option<PageCopy> {
        self.copy_in(KvTable::Own, &self.own, self.source)
    }

    /// Returns the copy that must go along with [`Lease::copy`] in windowed layers.
    pub fn window_copy(&self) -> Option<PageCopy> {
        self.copy_in(KvTable::Window, self.window.table(), self.window.source())
    }

    fn copy_in(&self, table: KvTable, pages: &[Page], source: Option<Page>) -> Option<PageCopy> {
        let to = pages.get(self.computed / self.pool.page_positions).copied();
        source.zip(to).map(|(from, to)| PageCopy { table, from, to })
    }

    /// Leases the pages of the first `positions` positions for a sequence that continues them otherwise. Full
    /// pages are shared; a page that is not full is copied once the new lease has grown.
    pub fn fork(&self, positions: usize) -> Lease {
        let size = self.pool.page_positions;
        let own = self.own[..positions / size].to_vec();
        let source = (!positions.is_multiple_of(size)).then(|| self.own[positions / size]);
        let (growth, shared) = (self.own.len() + self.growth - own.len(), own.len() + self.cross.len());
        let states = &mut *self.pool.lock();
        own.iter().chain(&self.cross).chain(&source).for_each(|page| states.own.hold(*page));
        let window = states.window.as_mut().map(|window| window.fork(&self.window, positions));
        states.growth += growth;
        Lease {
            own,
            cross: self.cross.clone(),
            window: window.unwrap_or_default(),
            growth,
            shared,
            computed: positions,
            source,
            chain: None,
            noted: 0,
            begun: 0,
            announced: Vec::new(),
            pool: self.pool.clone(),
        }
    }

    /// Releases the source of the copy, once the step with the copy is sent.
    pub fn release_source(&mut self) {
        let states = &mut *self.pool.lock();
        states.releases += 1;
        if let Some(page) = self.source.take() {
            states.own.release(page);
        }
        if let Some(window) = &mut states.window {
            window.release_source(&mut self.window);
        }
    }

    /// Leases further pages, so that there are enough for `positions` positions. Returns false, and leases
    /// nothing, if there are too few.
    pub fn grow(&mut self, positions: usize) -> bool {
        let more = self.pool.pages_for(positions).saturating_sub(self.own.len());
        let states = &mut *self.pool.lock();
        if states.own.available() < more {
            return false;
        }
        let pages = self.own.len() + more;
        if states.window.as_mut().is_some_and(|window| !window.grow(&mut self.window, pages)) {
            return false;
        }
        // Windowed layers may have released pages.
        states.releases += u64::from(states.window.is_some());
        self.own.extend((0..more).map(|_| states.own.take()));
        states.growth -= more.min(self.growth);
        self.growth -= more.min(self.growth);
        true
    }

    /// Appends tokens to those that are known of the sequence.
    pub fn append_tokens(&mut self, tokens: impl IntoIterator<Item = u32>) {
        if let Some(chain) = &mut self.chain {
            chain.extend(tokens);
        }
    }

    /// Returns the number of tokens that are known of the sequence; 0 if its pages are not shared.
    pub fn known_tokens(&self) -> usize {
        self.chain.as_ref().map_or(0, TokenChain::len)
    }

    /// Notes that the steps that compute the first `positions` positions are sent, so that later steps can
    /// share the pages.
    pub fn note_computed(&mut self, positions: usize) {
        let Some(chain) = &self.chain else { return };
        let (end, size) = (positions.min(chain.len()), self.pool.page_positions);
        if end <= self.noted {
            return;
        }
        let states = &mut *self.pool.lock();
        for page in self.noted / size..end.div_ceil(size) {
            states.own.index.insert(chain, page, end, self.own[page]);
            if let Some(window) = &mut states.window {
                window.note_computed(&self.window, chain, page, end);
            }
        }
        self.noted = end;
        while let Some(hash) = self.announced.last() {
            let page = self.begun.div_ceil(size) - self.announced.len();
            if end < self.begun.min((page + 1) * size) {
                break;
            }
            states.own.index.retract(*hash);
            states.releases += 1;
            self.announced.pop();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let states = &mut *self.pool.lock();
        states.releases += 1;
        states.growth -= self.growth;
        self.announced.iter().for_each(|hash| states.own.index.retract(*hash));
        // The last page first: without the pages before it, an idle page is of no use.
        let own = self.own.iter().rev().chain(&self.cross).chain(&self.source);
        own.for_each(|page| states.own.release(*page));
        if let Some(window) = &mut states.window {
            window.release(&mut self.window);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dice::Dice;
    use super::*;
    use mainstem_kernels::batch::NULL_PAGE;
    use std::collections::BTreeSet;
    use std::sync::mpsc;

    const POSITIONS: usize = 32;

    /// A lease of pages for so many positions, of a sequence whose tokens nobody shares.
    fn lease(pool: &PagePool, positions: usize) -> Option<Lease> {
        lease_with_encoder(pool, positions, 0)
    }

    fn lease_with_encoder(pool: &PagePool, positions: usize, encoder_positions: usize) -> Option<Lease> {
        pool.begin(
            PageDemand { positions, max_positions: 0, encoder_positions, reusable: 0, margin: 0 },
            None,
        )
        .ok()
    }

    /// Asserts that the pages of all leases are distinct, and that none is the null page.
    fn assert_disjoint(leases: &[Lease]) {
        let pages: Vec<Page> =
            leases.iter().flat_map(|lease| lease.own().iter().chain(lease.cross())).copied().collect();
        assert!(!pages.contains(&NULL_PAGE));
        assert_eq!(pages.iter().collect::<BTreeSet<_>>().len(), pages.len());
    }

    #[test]
    fn positions_are_rounded_up_to_pages() {
        let pool = PagePool::new(5, POSITIONS);
        for (positions, pages) in [(0, 0), (1, 1), (32, 1), (33, 2), (128, 4)] {
            assert_eq!(pool.pages_for(positions), pages);
            let lease = lease(&pool, positions).expect("there are enough");
            assert_eq!((lease.own().len(), pool.used()), (pages, pages));
        }
        assert_eq!((pool.total(), pool.used(), pool.available()), (4, 0, 4));
    }

    #[test]
    fn an_exhausted_pool_refuses_and_keeps_nothing() {
        let pool = PagePool::new(5, POSITIONS);
        let first = lease(&pool, 3 * POSITIONS).expect("there are enough");
        assert!(lease(&pool, 2 * POSITIONS).is_none());
        assert_eq!(pool.available(), 1);
        let mut second = lease(&pool, POSITIONS).expect("one is left");
        assert!(lease(&pool, 1).is_none() && !second.grow(POSITIONS + 1) && second.grow(POSITIONS));
        assert_disjoint(&[first, second]);
        assert!(lease(&pool, 5 * POSITIONS).is_none(), "more than there are");
        let all = lease(&pool, 4 * POSITIONS).expect("all are back");
        assert_eq!(all.own().iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([1, 2, 3, 4]));
        assert!(lease(&PagePool::new(1, POSITIONS), 1).is_none(), "the null page cannot be leased");
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
        let (pool, mut dice, mut held) = (PagePool::new(41, POSITIONS), Dice::new(7), Vec::new());
        let (mut granted, mut refused, mut away) = (0, 0, 0);
        for _ in 0..3000 {
            let positions = dice.below(10 * POSITIONS);
            match dice.below(4) {
                0 if !held.is_empty() => drop(held.swap_remove(dice.below(held.len()))),
                1 if !held.is_empty() => {
                    sender.send(held.swap_remove(dice.below(held.len()))).expect("the other thread listens");
                    away += 1;
                }
                _ => match lease(&pool, positions) {
                    Some(lease) => {
                        assert_eq!(lease.own().len(), pool.pages_for(positions));
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
        assert_eq!((pool.used(), pool.available()), (0, pool.total()));
    }

    #[test]
    fn encoder_pages_are_leased_and_returned_with_the_sequence() {
        let pool = PagePool::new(6, POSITIONS);
        let refused = lease_with_encoder(&pool, 3 * POSITIONS, 2 * POSITIONS + 1);
        assert!(refused.is_none(), "one page too few");
        assert_eq!(pool.used(), 0, "and nothing of it stays leased");
        let both = lease_with_encoder(&pool, 2 * POSITIONS + 1, POSITIONS).expect("there are enough");
        assert_eq!((both.own().len(), both.cross().len(), pool.used()), (3, 1, 4));
        assert_disjoint(std::slice::from_ref(&both));
        let without = lease(&pool, POSITIONS).expect("one is left");
        assert_eq!((without.own().len(), without.cross().len()), (1, 0));
        drop(both);
        pool.check();
        assert_eq!(pool.used(), 1);
        let nothing = lease(&pool, 0).expect("a lease of no pages always succeeds");
        assert!(nothing.own().is_empty());
    }

    /// Begins a sequence with these tokens, all but the last of which it may share.
    fn begin(pool: &PagePool, tokens: &[u32]) -> Result<Lease, NoLease> {
        let mut chain = TokenChain::new(PageHash::root(&[]), pool.page_positions());
        chain.extend(tokens.iter().copied());
        let demand = PageDemand {
            positions: tokens.len(),
            max_positions: 0,
            encoder_positions: 0,
            reusable: tokens.len() - 1,
            margin: 0,
        };
        pool.begin(demand, Some(chain)).map_err(|(why, chain)| {
            assert_eq!(chain.map(|chain| chain.len()), Some(tokens.len()), "the chain comes back");
            why
        })
    }

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).collect()
    }

    #[test]
    fn computed_pages_are_shared_to_the_token() {
        let pool = PagePool::new(10, 4);
        let mut first = begin(&pool, &tokens(10)).expect("there are enough");
        first.note_computed(10);
        for (len, full, copied) in [(10, 2, 1), (9, 2, 0), (8, 1, 3), (20, 2, 2), (4, 0, 3), (1, 0, 0)] {
            let second = begin(&pool, &tokens(len)).expect("there are enough");
            assert_eq!(second.computed(), full * 4 + copied, "{len} tokens");
            assert_eq!(second.own()[..full], first.own()[..full]);
            let copy = second.copy();
            assert_eq!(copy.is_some(), copied > 0);
            if let Some(PageCopy { from, to, .. }) = copy {
                assert_eq!((from, to), (first.own()[full], second.own()[full]));
            }
            assert!(second.own()[full..].iter().all(|page| !first.own().contains(page)));
            pool.check();
        }
        let mut other = tokens(10);
        other[6] = 99;
        let second = begin(&pool, &other).expect("there are enough");
        assert_eq!((second.computed(), second.own()[0]), (6, first.own()[0]));
        other[0] = 99;
        assert_eq!(begin(&pool, &other).expect("there are enough").computed(), 0);
    }

    #[test]
    fn roots_separate_chains() {
        let root = |facts: &[&[u8]]| PageHash::root(facts);
        assert_ne!(root(&[b"ab", b""]), root(&[b"a", b"b"]));
        assert_ne!(root(&[b""]), root(&[]));
        let pool = PagePool::new(9, 4);
        let mut first = begin(&pool, &tokens(8)).expect("there are enough");
        first.note_computed(8);
        let mut chain = TokenChain::new(root(&[b"salt"]), 4);
        chain.extend(tokens(8));
        let demand =
            PageDemand { positions: 8, max_positions: 0, encoder_positions: 0, reusable: 7, margin: 0 };
        assert_eq!(pool.begin(demand, Some(chain)).expect("there are enough").computed(), 0);
    }

    #[test]
    fn a_sequence_waits_for_pages_that_another_one_computes() {
        let pool = PagePool::new(20, 4);
        let mut first = begin(&pool, &tokens(10)).expect("there are enough");
        let again = |len| begin(&pool, &tokens(len)).map(|lease| lease.computed());
        assert_eq!((again(10), again(4), again(3)), (Err(NoLease::Coming), Err(NoLease::Coming), Ok(0)));
        first.note_computed(4);
        assert_eq!((again(8), again(4), again(5)), (Err(NoLease::Coming), Ok(3), Ok(4)));
        first.note_computed(8);
        assert_eq!((again(10), again(9), again(11)), (Err(NoLease::Coming), Ok(8), Ok(8)));
        // Tokens that were generated do not change what was announced.
        first.append_tokens([70, 71, 72]);
        first.note_computed(10);
        assert_eq!(again(10), Ok(9));
        let waiting = begin(&pool, &[5; 6]).expect("there are enough");
        assert_eq!(begin(&pool, &[5; 6]).map(drop), Err(NoLease::Coming));
        drop(waiting);
        assert!(begin(&pool, &[5; 6]).is_ok(), "the one that would compute them is gone");
        drop(first);
        pool.check();
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn the_longest_unused_page_is_taken_first_and_the_end_of_a_sequence_before_its_beginning() {
        let pool = PagePool::new(7, 4);
        let computed = |first: u32| {
            let tokens: Vec<u32> = (first..first + 12).collect();
            let mut lease = begin(&pool, &tokens).expect("there are enough");
            lease.note_computed(12);
            lease
        };
        let (old, new) = (computed(100), computed(200));
        drop(old);
        drop(new);
        assert_eq!((pool.used(), pool.available()), (0, 6));
        let found = |first: u32| {
            let tokens: Vec<u32> = (first..first + 13).collect();
            let mut chain = TokenChain::new(PageHash::root(&[]), 4);
            chain.extend(tokens);
            pool.lock().own.index.find(&chain, 12).full.len()
        };
        let mut grows = lease(&pool, 0).expect("it needs none");
        for (pages, left) in [(1, (2, 3)), (2, (1, 3)), (3, (0, 3)), (4, (0, 2)), (6, (0, 0))] {
            assert!(grows.grow(4 * pages));
            assert_eq!((found(100), found(200)), left, "{pages} pages taken");
            pool.check();
        }
        assert!(!grows.grow(25));
    }

    #[test]
    fn shared_and_copied_pages_are_not_taken_for_the_same_sequence() {
        let pool = PagePool::new(4, 4);
        let mut first = begin(&pool, &tokens(12)).expect("there are enough");
        first.note_computed(12);
        drop(first);
        // All pages are idle. Two are shared; the last one is needed itself, so nothing is copied from it.
        let mut second = begin(&pool, &tokens(11)).expect("there are enough");
        assert_eq!((second.computed(), second.copy(), pool.available()), (8, None, 0));
        second.note_computed(11);
        assert!(matches!(begin(&pool, &tokens(11)), Err(NoLease::Short { .. })));
        drop(second);
        let third = begin(&pool, &[tokens(6), vec![50]].concat()).expect("there are enough");
        assert_eq!(third.computed(), 6);
        assert!(third.copy().is_some() && pool.used() == 3, "the source is held until the copy is sent");
        drop(third);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn the_margin_applies_while_pages_are_held() {
        let pool = PagePool::new(5, 4);
        let demand = |positions, max_positions| PageDemand {
            positions,
            max_positions,
            encoder_positions: 0,
            reusable: 0,
            margin: 2,
        };
        let first = pool.begin(demand(16, 99), None).expect("nobody else needs pages");
        drop(first);
        let mut first = pool.begin(demand(4, 8), None).expect("there are enough");
        assert!(pool.begin(demand(8, 12), None).is_err());
        assert!(pool.begin(demand(8, 8), None).is_ok(), "one page is left, and no more can be needed");
        assert!(pool.begin(demand(4, 99), None).is_ok());
        assert!(first.grow(8) && pool.begin(demand(8, 8), None).is_ok());
        drop(first);
        pool.check();
    }

    #[test]
    fn a_fork_shares_full_pages_and_copies_the_last_one() {
        let pool = PagePool::new(9, 4);
        let mut first = lease_with_encoder(&pool, 10, 3).expect("there are enough");
        let mut second = first.fork(10);
        assert_eq!((second.own(), second.copy(), pool.used()), (&first.own()[..2], None, 4));
        assert!(second.grow(11) && first.grow(13));
        assert_eq!(second.cross(), first.cross());
        assert_eq!(
            second.copy(),
            Some(PageCopy { table: KvTable::Own, from: first.own()[2], to: second.own()[2] })
        );
        let copied = first.own()[2];
        drop(first);
        pool.check();
        assert_eq!(pool.used(), 5, "the source is held until the copy is sent");
        second.release_source();
        assert!(pool.used() == 4 && !second.own().contains(&copied));
        let even = second.fork(8);
        assert_eq!((even.own().len(), even.copy(), pool.used()), (2, None, 4));
        drop(even);
        drop(second);
        assert_eq!(pool.used(), 0);
        pool.check();
    }

    #[test]
    fn lost_contents_are_not_shared_again() {
        let pool = PagePool::new(9, 4);
        let mut held = begin(&pool, &tokens(8)).expect("there are enough");
        held.note_computed(8);
        let mut other = begin(&pool, &[9; 8]).expect("there are enough");
        other.note_computed(8);
        drop(other);
        pool.forget_contents();
        pool.check();
        assert_eq!((pool.used(), pool.available()), (2, 6));
        assert_eq!(begin(&pool, &tokens(8)).expect("there are enough").computed(), 0);
        assert_eq!(begin(&pool, &[9; 8]).expect("there are enough").computed(), 0);
    }

    /// Pages of windowed layers for steps of up to 6 positions that see 6 positions.
    const WINDOW: WindowCache = WindowCache { pages: 15, window: 6, step_pages: 4 };

    fn windowed(pages: usize) -> PagePool {
        PagePool::with_window(pages, 4, Some(WINDOW))
    }

    #[test]
    fn a_sequence_holds_no_more_pages_of_windowed_layers_than_a_step_sees() {
        let pool = windowed(30);
        let mut first = lease(&pool, 26).expect("there are enough");
        assert_eq!((first.own().len(), pool.used_in_windows()), (7, 4));
        let table = first.window();
        assert!(table[..3] == table[4..] && table[..4].iter().collect::<BTreeSet<_>>().len() == 4);
        let before = table.to_vec();
        assert!(first.grow(29) && first.grow(40));
        assert_eq!((pool.used_in_windows(), first.window().len()), (4, 10));
        assert_eq!(
            (first.window()[7], first.window()[8], first.window()[9]),
            (before[3], before[4], before[5])
        );
        let others: Vec<Lease> = std::iter::from_fn(|| lease(&pool, 12)).collect();
        assert_eq!((others.len(), pool.used_in_windows()), (3, 13));
        assert!(lease(&pool, 8).is_none() && lease(&pool, 4).is_some(), "one page is left");
        assert!(first.grow(80), "it needs no further ones");
        assert!(!{ others }[0].grow(20), "nothing is leased if one kind of pages is short");
        drop(first);
        pool.check();
        assert_eq!((pool.used(), pool.used_in_windows()), (0, 0));
    }

    #[test]
    fn what_windowed_layers_have_lost_is_computed_by_one_sequence() {
        let pool = windowed(40);
        let mut first = begin(&pool, &tokens(16)).expect("there are enough");
        first.note_computed(16);
        drop(first);
        // Others take the windowed pages.
        let taken = [7, 8, 9].map(|token| begin(&pool, &[token; 16]).expect("there are enough"));
        drop(taken);
        let second = begin(&pool, &tokens(16)).expect("there are enough");
        assert!(second.computed() < 12, "{}", second.computed());
        assert_eq!(begin(&pool, &tokens(16)).map(drop), Err(NoLease::Coming));
    }

    #[test]
    fn a_prefix_is_shared_where_its_window_is_left() {
        let pool = windowed(40);
        let mut first = begin(&pool, &tokens(34)).expect("there are enough");
        first.note_computed(34);
        // Pages 5 to 8 of the sequence are left.
        for (len, computed) in [(40, 34), (34, 33), (33, 32), (31, 30), (30, 29), (29, 28), (28, 0), (9, 0)] {
            let second = begin(&pool, &tokens(len)).expect("there are enough");
            assert_eq!(second.computed(), computed, "{len} tokens");
            assert_eq!(second.copy().is_some(), second.window_copy().is_some());
            let end = computed / 4;
            let seen = (computed + 1).saturating_sub(6) / 4;
            assert!(second.window()[seen..end] == first.window()[seen..end], "{len} tokens");
        }
        drop(first);
        assert_eq!(begin(&pool, &tokens(33)).expect("there are enough").computed(), 32);
        pool.check();
        assert_eq!((pool.used(), pool.used_in_windows()), (0, 0));
    }

    /// A page as the model of [`random_histories_of_sharing`] sees it.
    type Content = Vec<(u32, u32)>;

    /// Random sequences over few tokens begin, grow, fork, share and end. A model writes what each page
    /// holds, and each sequence must find its own tokens, and the right ones before each, in its pages, and
    /// in those of windowed layers as far as they see.
    #[test]
    fn random_histories_of_sharing() {
        const SIZE: usize = 4;
        let (mut shared, mut short, mut coming, mut forked) = (0, 0, 0, 0);
        for seed in 0..40 {
            let window = (seed % 2 == 1).then_some(WINDOW);
            let (pool, mut dice) = (PagePool::with_window(24, SIZE, window), Dice::new(seed));
            // Of each page: token and hash of all tokens up to it, by position.
            let empty: Vec<Content> = vec![vec![(u32::MAX, 0); SIZE]; 24];
            let (mut cache, mut window_cache) = (empty.clone(), empty);
            fn copy(lease: &mut Lease, cache: &mut [Content], window_cache: &mut [Content]) {
                for (copy, cache) in [(lease.copy(), cache), (lease.window_copy(), window_cache)] {
                    if let Some(PageCopy { from, to, .. }) = copy {
                        cache[to as usize] = cache[from as usize].clone();
                    }
                }
                lease.release_source();
            }
            let mut running: Vec<(Lease, Vec<u32>, usize)> = Vec::new();
            let fold = |tokens: &[u32]| tokens.iter().fold(1u32, |sum, t| sum.wrapping_mul(31) + t + 1);
            for _ in 0..1500 {
                match dice.below(7) {
                    0 | 1 => {
                        let tokens: Vec<u32> =
                            (0..1 + dice.below(18)).map(|_| dice.below(2) as u32).collect();
                        match begin(&pool, &tokens) {
                            Ok(mut lease) => {
                                copy(&mut lease, &mut cache, &mut window_cache);
                                let computed = lease.computed();
                                shared += computed;
                                running.push((lease, tokens, computed));
                            }
                            Err(NoLease::Short { .. }) => short += 1,
                            Err(NoLease::Coming) => coming += 1,
                        }
                    }
                    2 if !running.is_empty() => drop(running.swap_remove(dice.below(running.len()))),
                    3 if !running.is_empty() => {
                        let (lease, tokens, computed) = &running[dice.below(running.len())];
                        if *computed < tokens.len() {
                            continue;
                        }
                        let mut fork = lease.fork(*computed);
                        if fork.grow(computed + 1) {
                            copy(&mut fork, &mut cache, &mut window_cache);
                            forked += 1;
                            running.push((fork, [&**tokens, &[0]].concat(), *computed));
                        }
                    }
                    _ if !running.is_empty() => {
                        let at = dice.below(running.len());
                        let (lease, tokens, computed) = &mut running[at];
                        if *computed == tokens.len() && lease.grow(tokens.len() + 1) {
                            tokens.push(dice.below(2) as u32);
                            lease.append_tokens(tokens.last().copied());
                        }
                        let end = tokens.len().min(*computed + 1 + dice.below(6));
                        for position in *computed..end {
                            let page = lease.own()[position / SIZE] as usize;
                            let content = (tokens[position], fold(&tokens[..=position]));
                            cache[page][position % SIZE] = content;
                            if window.is_some() {
                                let page = lease.window()[position / SIZE] as usize;
                                window_cache[page][position % SIZE] = content;
                            }
                        }
                        *computed = end;
                        if dice.below(3) > 0 {
                            lease.note_computed(end);
                        }
                    }
                    _ => {}
                }
                pool.check();
                for (lease, tokens, computed) in &running {
                    for position in 0..*computed {
                        let page = lease.own()[position / SIZE] as usize;
                        let expected = (tokens[position], fold(&tokens[..=position]));
                        assert_eq!(cache[page][position % SIZE], expected, "seed {seed}");
                        if window.is_some_and(|cache| position + cache.window > *computed) {
                            let page = lease.window()[position / SIZE] as usize;
                            assert_eq!(window_cache[page][position % SIZE], expected, "seed {seed}");
                        }
                    }
                }
            }
            running.clear();
            pool.check();
            assert_eq!((pool.used(), pool.available(), pool.used_in_windows()), (0, 23, 0));
        }
        let counts = [shared, short, coming, forked];
        assert!(counts.iter().zip([8000, 800, 400, 800]).all(|(count, least)| *count > least), "{counts:?}");
    }
}
