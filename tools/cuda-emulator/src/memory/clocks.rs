//! The order of accesses within a launch.
//!
//! The life of a warp is cut into epochs by everything that orders memory: barriers of the warp or the CTA,
//! fences and releases. An access is recorded with its epoch and lane. Another access comes after it if its
//! thread has learned, by a barrier or by a release and an acquire, of an epoch as late.
//!
//! A strong write publishes what a fence has released: what the warp that made the fence did and had learned
//! until then, and what it learned by barriers of fences that others made. A fence or a strong write within
//! the CTA (`.cta`) publishes to its CTA only. Fences are those of a whole warp, whichever lanes make them.

use std::collections::HashMap;

/// The warp that an epoch belongs to.
#[derive(Clone, Copy, Debug)]
struct Owner {
    cta: u32,
    warp: u32,
    /// Number of the epoch in its warp's life.
    tick: u32,
}

/// Knowledge of what warps did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Knowledge {
    /// For each warp of the CTA, the first tick that is not known; empty if nothing is.
    own: Vec<u32>,
    /// For each other CTA that was heard of, the same of its warps.
    others: HashMap<u32, Vec<u32>>,
}

impl Knowledge {
    fn join(&mut self, other: &Knowledge) {
        join(&mut self.own, &other.own);
        for (cta, ticks) in &other.others {
            join(self.others.entry(*cta).or_default(), ticks);
        }
    }

    /// Adds published knowledge, which is by CTA, to that of CTA `cta`.
    fn learn(&mut self, all: &HashMap<u32, Vec<u32>>, cta: u32) {
        for (of, ticks) in all {
            join(if *of == cta { &mut self.own } else { self.others.entry(*of).or_default() }, ticks);
        }
    }

    fn publish(&self, to: &mut HashMap<u32, Vec<u32>>, cta: u32) {
        join(to.entry(cta).or_default(), &self.own);
        for (of, ticks) in &self.others {
            join(to.entry(*of).or_default(), ticks);
        }
    }
}

fn join(all: &mut Vec<u32>, more: &[u32]) {
    if all.len() < more.len() {
        all.resize(more.len(), 0);
    }
    all.iter_mut().zip(more).for_each(|(all, it)| *all = (*all).max(*it));
}

/// Knowledge of a warp or a barrier, and the part of it that fences have released: to the CTA, and to all.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    all: Knowledge,
    released: [Knowledge; 2],
}

impl Known {
    fn join(&mut self, other: &Known) {
        self.all.join(&other.all);
        for (mine, it) in self.released.iter_mut().zip(&other.released) {
            mine.join(it);
        }
    }
}

/// The reach of fences and strong accesses, as an index of what is released.
fn reach(wide: bool) -> usize {
    usize::from(wide)
}

/// All epochs of a launch. Numbers grow over launches, so that older ones are known by their number.
#[derive(Debug)]
pub(crate) struct Epochs {
    base: u32,
    owners: Vec<Owner>,
    /// Knowledge that strong writes published, by address: for each CTA, the first ticks of its warps that
    /// are not known.
    published: HashMap<u64, HashMap<u32, Vec<u32>>>,
    /// Knowledge that strong writes published within a CTA, by the CTA and the address.
    within: HashMap<(u32, u64), HashMap<u32, Vec<u32>>>,
}

impl Epochs {
    /// The epochs of a launch that follows one that ended with `base`.
    pub(crate) fn new(base: u32) -> Epochs {
        Epochs { base, owners: Vec::new(), published: HashMap::new(), within: HashMap::new() }
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
    known: Known,
    /// Knowledge that strong reads found published, to the CTA and to all, and no fence has acquired yet.
    pending: [Knowledge; 2],
}

/// The knowledge of the warps of a CTA.
#[derive(Clone, Debug)]
pub(crate) struct CtaClock {
    cta: u32,
    first: u32,
    warps: Vec<WarpClock>,
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
            known: Known {
                all: Knowledge { own: vec![0; warps], others: HashMap::new() },
                ..Known::default()
            },
            pending: Default::default(),
        };
        CtaClock { cta, first, warps: (0..warps).map(clock).collect() }
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
        // Most are of CTAs that this one knows nothing of.
        if epoch < self.first && me.known.all.others.is_empty() {
            return false;
        }
        let owner = epochs.owners[(epoch - epochs.base) as usize];
        if owner.cta != self.cta {
            let ticks = me.known.all.others.get(&owner.cta);
            return ticks.and_then(|it| it.get(owner.warp as usize)).is_some_and(|it| *it > owner.tick);
        }
        if owner.warp as usize != warp {
            return me.known.all.own[owner.warp as usize] > owner.tick;
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

    /// Whether an epoch is of the same CTA.
    pub(crate) fn same_cta(&self, epochs: &Epochs, epoch: u32) -> bool {
        let owner = epoch.checked_sub(epochs.base).map(|at| epochs.owners[at as usize]);
        owner.is_some_and(|owner| owner.cta == self.cta)
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
    pub(crate) fn arrive(&mut self, warp: usize, barrier: &mut Known, epochs: &mut Epochs) {
        let clock = &self.warps[warp];
        barrier.join(&clock.known);
        barrier.all.own[warp] = clock.tick + 1;
        self.advance(warp, epochs);
    }

    /// Takes what a barrier knows. All lanes of the warp wait at it.
    pub(crate) fn leave(&mut self, warp: usize, barrier: &Known) {
        let clock = &mut self.warps[warp];
        clock.known.join(barrier);
        clock.lanes = clock.tick;
        clock.pairs = None;
    }

    /// A fence: what comes before it can be published by a strong write, and what was read strongly is
    /// acquired. The warp begins a new epoch.
    pub(crate) fn fence(&mut self, warp: usize, wide: bool, epochs: &mut Epochs) {
        let clock = &mut self.warps[warp];
        for pending in &mut clock.pending[..=reach(wide)] {
            clock.known.all.join(&std::mem::take(pending));
        }
        self.release(warp, wide, epochs);
    }

    fn release(&mut self, warp: usize, wide: bool, epochs: &mut Epochs) {
        let clock = &mut self.warps[warp];
        let mut all = clock.known.all.clone();
        all.own[warp] = clock.tick + 1;
        // What is released to all is released to the CTA.
        for released in &mut clock.known.released[..=reach(wide)] {
            released.join(&all);
        }
        self.advance(warp, epochs);
    }

    /// A strong write, which publishes what fences have released; one with release order is a fence as well.
    pub(crate) fn strong_write(
        &mut self,
        warp: usize,
        address: u64,
        release: bool,
        wide: bool,
        epochs: &mut Epochs,
    ) {
        if release {
            self.release(warp, wide, epochs);
        }
        let [within, all] = &self.warps[warp].known.released;
        if !within.own.is_empty() {
            within.publish(epochs.within.entry((self.cta, address)).or_default(), self.cta);
        }
        if wide && !all.own.is_empty() {
            all.publish(epochs.published.entry(address).or_default(), self.cta);
        }
    }

    /// A strong read, which acquires at once, or at the next fence.
    pub(crate) fn strong_read(
        &mut self,
        warp: usize,
        address: u64,
        acquire: bool,
        wide: bool,
        epochs: &Epochs,
    ) {
        let pending = &mut self.warps[warp].pending;
        if let Some(within) = epochs.within.get(&(self.cta, address)) {
            pending[0].learn(within, self.cta);
        }
        if wide && let Some(published) = epochs.published.get(&address) {
            pending[1].learn(published, self.cta);
        }
        if acquire {
            let clock = &mut self.warps[warp];
            for pending in &mut clock.pending[..=reach(wide)] {
                clock.known.all.join(&std::mem::take(pending));
            }
        }
    }
}
