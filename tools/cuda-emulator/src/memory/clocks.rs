//! The order of accesses within a launch.
//!
//! The life of a warp is cut into epochs by everything that orders memory: barriers of the warp or the CTA,
//! and releases. An access is recorded with its epoch and lane. Another access comes after it if its thread
//! has learned, by a barrier or by a release and an acquire, of an epoch as late.

use std::collections::HashMap;

/// The warp that an epoch belongs to.
#[derive(Clone, Copy, Debug)]
struct Owner {
    cta: u32,
    warp: u32,
    /// Number of the epoch in its warp's life.
    tick: u32,
}

/// All epochs of a launch. Numbers grow over launches, so that older ones are known by their number.
#[derive(Debug)]
pub(crate) struct Epochs {
    base: u32,
    owners: Vec<Owner>,
    /// Knowledge that releases published, by address: for each CTA, the first epoch that was not yet made.
    published: HashMap<u64, HashMap<u32, u32>>,
    /// Published knowledge within a CTA: for each warp, the first tick that is not known.
    published_warps: HashMap<u64, (u32, Vec<u32>)>,
}

impl Epochs {
    /// The epochs of a launch that follows one that ended with `base`.
    pub(crate) fn new(base: u32) -> Epochs {
        Epochs { base, owners: Vec::new(), published: HashMap::new(), published_warps: HashMap::new() }
    }

    /// The number that follows the last epoch's.
    pub(crate) fn end(&self) -> u32 {
        self.base + self.owners.len() as u32
    }

    /// The first number of the launch.
    pub(crate) fn base(&self) -> u32 {
        self.base
    }

    fn begin(&mut self, cta: u32, warp: u32, tick: u32) -> u32 {
        self.owners.push(Owner { cta, warp, tick });
        self.end() - 1
    }
}

/// The knowledge of one warp.
#[derive(Clone, Debug)]
struct WarpClock {
    epoch: u32,
    tick: u32,
    /// All lanes know of all epochs of this warp before this one.
    lanes: u32,
    /// For each lane, and each other, the first tick that is not known; kept once a barrier named only some
    /// lanes.
    pairs: Option<Box<[[u32; 32]; 32]>>,
    /// For each warp of the CTA, the first tick that is not known.
    warps: Vec<u32>,
    /// Whether a fence stands between all accesses and now.
    fenced: bool,
    /// Addresses that strong reads have read and no fence has acquired yet.
    pending: Vec<u64>,
}

/// The knowledge of the warps of a CTA.
#[derive(Clone, Debug)]
pub(crate) struct CtaClock {
    cta: u32,
    first: u32,
    warps: Vec<WarpClock>,
    /// For each other CTA that was heard of, the first epoch that is not known.
    ctas: HashMap<u32, u32>,
}

impl CtaClock {
    /// The beginning of a CTA of so many warps.
    pub(crate) fn new(cta: u32, warps: usize, epochs: &mut Epochs) -> CtaClock {
        let first = epochs.end();
        let clock = |warp| WarpClock {
            epoch: epochs.begin(cta, warp as u32, 0),
            tick: 0,
            lanes: 0,
            pairs: None,
            warps: vec![0; warps],
            fenced: false,
            pending: Vec::new(),
        };
        CtaClock { cta, first, warps: (0..warps).map(clock).collect(), ctas: HashMap::new() }
    }

    /// The first epoch of the CTA.
    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    /// The epoch of a warp.
    pub(crate) fn epoch(&self, warp: usize) -> u32 {
        self.warps[warp].epoch
    }

    fn advance(&mut self, warp: usize, epochs: &mut Epochs) {
        let clock = &mut self.warps[warp];
        clock.tick += 1;
        clock.epoch = epochs.begin(self.cta, warp as u32, clock.tick);
    }

    /// Whether accesses of `lanes` in `epoch` come before what `lane` of `warp` does now.
    pub(crate) fn ordered(&self, epochs: &Epochs, warp: usize, lane: u32, epoch: u32, lanes: u32) -> bool {
        if epoch < epochs.base {
            return true;
        }
        let me = &self.warps[warp];
        let others = lanes & !(1 << lane);
        if epoch == me.epoch {
            return others == 0;
        }
        let owner = epochs.owners[(epoch - epochs.base) as usize];
        if owner.cta != self.cta {
            return self.ctas.get(&owner.cta).is_some_and(|known| *known > epoch);
        }
        if owner.warp as usize != warp {
            return me.warps[owner.warp as usize] > owner.tick;
        }
        let Some(pairs) = &me.pairs else { return others == 0 || me.lanes > owner.tick };
        let knows = |other: u32| me.lanes > owner.tick || pairs[lane as usize][other as usize] > owner.tick;
        (0..32).all(|other| others >> other & 1 == 0 || knows(other))
    }

    /// Whether an epoch is of the same warp.
    pub(crate) fn same_warp(&self, epochs: &Epochs, warp: usize, epoch: u32) -> bool {
        let Some(owner) = epoch.checked_sub(epochs.base).map(|at| epochs.owners[at as usize]) else {
            return false;
        };
        owner.cta == self.cta && owner.warp as usize == warp
    }

    /// A barrier of the lanes in `mask`; `live` are all that the warp has.
    pub(crate) fn warp_barrier(&mut self, warp: usize, mask: u32, live: u32, epochs: &mut Epochs) {
        let clock = &mut self.warps[warp];
        let next = clock.tick + 1;
        if mask & live == live {
            clock.lanes = next;
            clock.pairs = None;
        } else {
            let pairs = clock.pairs.get_or_insert_with(|| Box::new([[0; 32]; 32]));
            let mut joined = [0; 32];
            for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
                for (all, known) in joined.iter_mut().zip(pairs[lane]) {
                    *all = known.max(*all);
                }
            }
            for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
                joined[lane] = next;
            }
            for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
                pairs[lane] = joined;
            }
        }
        self.advance(warp, epochs);
    }

    /// Adds what a warp knows, and did, to what a barrier knows. The warp begins a new epoch.
    pub(crate) fn arrive(&mut self, warp: usize, barrier: &mut Vec<u32>, epochs: &mut Epochs) {
        let clock = &self.warps[warp];
        barrier.resize(self.warps.len(), 0);
        for (all, known) in barrier.iter_mut().zip(&clock.warps) {
            *all = (*all).max(*known);
        }
        barrier[warp] = clock.tick + 1;
        self.advance(warp, epochs);
    }

    /// Takes what a barrier knows. All lanes of the warp wait at it.
    pub(crate) fn leave(&mut self, warp: usize, barrier: &[u32]) {
        let clock = &mut self.warps[warp];
        for (known, all) in clock.warps.iter_mut().zip(barrier) {
            *known = (*known).max(*all);
        }
        clock.lanes = clock.tick;
        clock.pairs = None;
    }

    /// A fence: what comes before it can be published by a strong write, and what was read strongly is
    /// acquired.
    pub(crate) fn fence(&mut self, warp: usize, epochs: &mut Epochs) {
        self.warps[warp].fenced = true;
        for address in std::mem::take(&mut self.warps[warp].pending) {
            self.acquire(warp, address, epochs);
        }
    }

    /// A strong write, which publishes if a fence precedes it or it is a release.
    pub(crate) fn strong_write(&mut self, warp: usize, address: u64, release: bool, epochs: &mut Epochs) {
        if !(release || self.warps[warp].fenced) {
            return;
        }
        let end = epochs.end();
        let entry = epochs.published.entry(address).or_default();
        for (cta, known) in &self.ctas {
            let it = entry.entry(*cta).or_default();
            *it = (*it).max(*known);
        }
        entry.insert(self.cta, end);
        let mut known = self.warps[warp].warps.clone();
        known[warp] = self.warps[warp].tick + 1;
        let within = epochs.published_warps.entry(address).or_insert_with(|| (self.cta, known.clone()));
        if within.0 == self.cta {
            within.1.iter_mut().zip(&known).for_each(|(all, it)| *all = (*all).max(*it));
        } else {
            *within = (self.cta, known);
        }
        self.advance(warp, epochs);
    }

    /// A strong read, which acquires at once, or at the next fence.
    pub(crate) fn strong_read(&mut self, warp: usize, address: u64, acquire: bool, epochs: &mut Epochs) {
        if acquire {
            self.acquire(warp, address, epochs);
        } else if epochs.published.contains_key(&address) {
            self.warps[warp].pending.push(address);
        }
    }

    fn acquire(&mut self, warp: usize, address: u64, epochs: &mut Epochs) {
        for (cta, known) in epochs.published.get(&address).into_iter().flatten() {
            let it = self.ctas.entry(*cta).or_default();
            *it = (*it).max(*known);
        }
        if let Some((cta, known)) = epochs.published_warps.get(&address)
            && *cta == self.cta
        {
            let clock = &mut self.warps[warp];
            clock.warps.iter_mut().zip(known).for_each(|(mine, it)| *mine = (*mine).max(*it));
        }
    }
}
