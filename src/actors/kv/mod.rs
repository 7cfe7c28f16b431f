//! The KV cache manager: assigns slots to sequences, and pages as they grow.
//!
//! Owns the slot map of each lane (with the sliding-window shuffle), and the leases of running sequences; the
//! page pool is shared with prefill, which leases the pages of prompts. It never touches a device: its
//! [`SlotPlan`] is sent with the lane's next step. When pages run out, a sequence of the last class in all
//! lanes is preempted, the youngest one of the client with the most pages: it gives up slot and pages, and is
//! computed again later. Sequences that prefill preempts for others give theirs up with the update in which
//! the others join. A lane gives up its sequences between two of its iterations only; a lane that can do
//! nothing without pages waits for the reply to its update, which is such a time, so lanes never wait for
//! each other in a circle.
//! Invariant: slots are assigned, moved and freed only in an [`IterationUpdate`] of their lane. Slots and
//! pages that a step in flight refers to are reused by later steps only, which every device runs after that
//! step.

mod growth;

use super::account::Account;
use super::group::Epoch;
use super::queue::Reason;
use super::sequence::SequenceKey;
use crate::memory::{Lease, PagePool, SlotMap, split_slots};
use crate::request::Class;
use crate::telemetry;
use actix::{Actor, Context, Handler, Message, MessageResult, Recipient, ResponseFuture};
use mainstem_kernels::batch::{NULL_PAGE, Page, Slot};
use mainstem_kernels::{KvTable, PageCopy, SlotMove, TableUpdate};
use metrics::{Counter, Gauge};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Notifies prefill that pages were released or computed, so that waiting prompts may start.
#[derive(Message)]
#[rtype(result = "()")]
pub struct PagesChanged;

/// The changes of a lane's sequences since its last iteration, and the pages that its next step needs. The
/// reply is the slot plan of that step. It comes later if no sequence of the lane can be computed without
/// pages that another lane must give up first.
#[derive(Message, Default)]
#[rtype(result = "SlotPlan")]
pub struct IterationUpdate {
    pub lane: usize,
    /// The epoch of the lane. Nothing is shared of what was computed in an earlier one.
    pub epoch: Epoch,
    /// Sequences that ended, to be removed from their slots.
    pub finished: Vec<EndedSequence>,
    /// Sequences that give up slot and pages for those that join.
    pub give_up: Vec<SequenceKey>,
    /// New sequences that need slots.
    pub joins: Vec<JoiningSequence>,
    /// Beam searches that continue with other beams.
    pub beams: Vec<BeamUpdate>,
    /// Sequences that have no pages for the positions of the next step.
    pub grown: Vec<GrowingSequence>,
    /// Positions whose steps were sent.
    pub computed: Vec<ComputedPositions>,
    /// Number of sequences with work in the next step. The beams of a search count as one.
    pub with_work: usize,
}

/// A new sequence that needs a slot, with its pages.
#[derive(Debug)]
pub struct JoiningSequence {
    pub key: SequenceKey,
    pub class: Class,
    /// The account of its client.
    pub account: Arc<Account>,
    pub lease: Lease,
}

/// The beams of a search that continue. Each takes over the pages of its parent, as the indirection of Flover
/// (section V-D) does without moving K and V: full pages are shared, and a page that several beams continue
/// to fill is copied.
#[derive(Debug)]
pub struct BeamUpdate {
    /// Key of the sequence that the search began as.
    pub search: SequenceKey,
    /// Each beam, and the one before that it continues. Beams that none continues end.
    pub beams: Vec<(SequenceKey, SequenceKey)>,
    /// Number of computed positions of every parent.
    pub positions: usize,
}

/// A running sequence whose next step needs, or would like, further pages.
#[derive(Clone, Copy, Debug)]
pub struct GrowingSequence {
    pub key: SequenceKey,
    /// Number of positions that it needs pages for, in total.
    pub positions: usize,
    /// Number of positions with those of its drafts, for which nobody is preempted.
    pub with_drafts: usize,
}

/// The leading positions of a sequence whose steps were sent, and the tokens that were generated since the
/// last report.
#[derive(Debug)]
pub struct ComputedPositions {
    pub key: SequenceKey,
    pub positions: usize,
    pub generated: Vec<u32>,
}

/// A sequence that ended, to be removed from its slot.
#[derive(Debug)]
pub struct EndedSequence {
    pub key: SequenceKey,
    /// The tokens in its pages.
    pub computed: ComputedPositions,
}

/// The slot assignment of a lane for its next step, and the changes that the devices must apply to get there.
#[derive(Debug, Default)]
pub struct SlotPlan {
    /// Occupied slots and their sequences, by slot. With the shuffle on, they fill `window`.
    pub slots: Vec<(Slot, SequenceKey)>,
    /// The range from the lowest to the highest occupied slot.
    pub window: Range<Slot>,
    pub moves: Vec<SlotMove>,
    pub copies: Vec<PageCopy>,
    pub tables: Vec<TableUpdate>,
    /// Sequences that gave up slot and pages.
    pub preempted: Vec<SequenceKey>,
    /// Sequences that keep theirs, but have no pages for the next step.
    pub stalled: Vec<SequenceKey>,
    /// Sequences that have no pages for all of their drafts.
    pub short_of_drafts: Vec<SequenceKey>,
}

/// Frees all slots of a lane, because the lane restarts without sequences.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ResetLane {
    pub lane: usize,
    /// The epoch that the lane restarts in.
    pub epoch: Epoch,
}

/// Queries (occupied slots, used pages); for tests and diagnostics.
#[derive(Message)]
#[rtype(result = "(usize, usize)")]
pub struct GetUsage;

/// The KV manager actor.
pub struct KvManager {
    lanes: Vec<Lane>,
    pool: PagePool,
    /// Sequences in slots.
    held: BTreeMap<SequenceKey, HeldSequence>,
    /// Sequences that their lanes will give up at their next update, if their pages are still needed then.
    giving_up: BTreeSet<SequenceKey>,
    /// The number [`PagePool::releases`] that prefill has heard of, or will by [`Lane::gave_up`].
    noticed: u64,
    /// The latest epoch that a lane reported.
    epoch: Epoch,
    /// Marks generated tokens, if K and V of a generated token differ from those of a prompt's.
    generated_mark: u32,
    changed: Recipient<PagesChanged>,
    slots_live: Gauge,
    pages_used: Gauge,
    preemptions: Counter,
}

/// A lane's slots, and its update.
struct Lane {
    slots: SlotMap<SequenceKey>,
    /// The update that the lane waits for the reply of.
    open: Option<OpenUpdate>,
    /// Sequences whose pages are copied from others in the step of the last plan.
    copied: Vec<SequenceKey>,
    /// The needs of sequences that the last plan has stalled.
    stalled: Vec<GrowingSequence>,
    /// Whether the last plan took sequences from the lane. Prefill hears of their pages with the lane's next
    /// update, when these sequences are back in its queue, before younger ones.
    gave_up: bool,
}

/// An update whose plan is not complete.
struct OpenUpdate {
    plan: SlotPlan,
    /// Sequences whose page tables are written anew, with the pages that the tables of their slots hold;
    /// `None` for a new slot.
    rewritten: Vec<(SequenceKey, Option<TablePages>)>,
    /// Sequences that still need pages, with the positions that these are for.
    needs: Vec<GrowingSequence>,
    /// The needs for which sequences got pages.
    got: Vec<GrowingSequence>,
    with_work: usize,
    reply: oneshot::Sender<SlotPlan>,
}

/// The pages in the own and in the window table of a slot.
type TablePages = [Vec<Page>; 2];

/// A sequence in a slot.
struct HeldSequence {
    lane: usize,
    class: Class,
    account: Arc<Account>,
    lease: Lease,
    /// Number of its own pages that are listed in the table of its slot.
    listed: usize,
    /// The beam search that it belongs to, by the key of the sequence that this began as.
    search: Option<SequenceKey>,
}

impl Actor for KvManager {
    type Context = Context<KvManager>;
}

impl Handler<IterationUpdate> for KvManager {
    type Result = ResponseFuture<SlotPlan>;

    fn handle(&mut self, update: IterationUpdate, _: &mut Self::Context) -> Self::Result {
        let reply = self.update(update);
        Box::pin(async { reply.await.unwrap_or_default() })
    }
}

impl Handler<ResetLane> for KvManager {
    type Result = ();

    fn handle(&mut self, ResetLane { lane, epoch }: ResetLane, _: &mut Self::Context) {
        self.enter_epoch(epoch);
        let Lane { slots, open, copied, stalled, gave_up } = &mut self.lanes[lane];
        (*open, *gave_up) = (None, false);
        copied.clear();
        stalled.clear();
        for slot in slots.window() {
            if slots.get(slot).is_some() {
                let key = slots.leave(slot);
                self.held.remove(&key);
                self.giving_up.remove(&key);
            }
        }
        self.settle();
        self.changed.do_send(PagesChanged);
    }
}

impl Handler<GetUsage> for KvManager {
    type Result = MessageResult<GetUsage>;

    fn handle(&mut self, _: GetUsage, _: &mut Self::Context) -> Self::Result {
        self.lanes.iter().for_each(|lane| lane.slots.check());
        self.pool.check();
        MessageResult((self.held.len(), self.pool.used() + self.pool.used_in_windows()))
    }
}

impl KvManager {
    /// Creates a manager of `slots` slots, split among `lanes` lanes, and of the pages of `pool`.
    /// `generated_mark` is added to generated tokens, so that others do not find their pages; 0 if K and V do
    /// not depend on where a token comes from.
    pub fn new(
        (slots, lanes, shuffle): (usize, usize, bool),
        pool: PagePool,
        generated_mark: u32,
        changed: Recipient<PagesChanged>,
    ) -> KvManager {
        let lane = |slots| Lane {
            slots: SlotMap::new(slots, shuffle),
            open: None,
            copied: Vec::new(),
            stalled: Vec::new(),
            gave_up: false,
        };
        KvManager {
            lanes: split_slots(slots, lanes).map(lane).collect(),
            pool,
            held: BTreeMap::new(),
            giving_up: BTreeSet::new(),
            noticed: 0,
            epoch: Epoch::default(),
            generated_mark,
            changed,
            slots_live: telemetry::SLOTS_LIVE.gauge(),
            pages_used: telemetry::KV_CACHE_USAGE.gauge(),
            preemptions: telemetry::PREEMPTIONS.counter_with([Reason::Pages.name()]),
        }
    }

    /// Applies a lane's changes, and finds pages for its sequences and those of lanes that wait.
    fn update(&mut self, update: IterationUpdate) -> oneshot::Receiver<SlotPlan> {
        let IterationUpdate { lane, epoch, finished, give_up, joins, beams, grown, computed, with_work } =
            update;
        self.enter_epoch(epoch);
        // The step with the copies of the last plan is sent.
        for key in std::mem::take(&mut self.lanes[lane].copied) {
            if let Some(held) = self.held.get_mut(&key) {
                held.lease.release_source();
            }
        }
        let has_computed = !computed.is_empty();
        computed.into_iter().for_each(|computed| self.note_computed(epoch, computed));
        let mut rewritten: Vec<_> = joins.iter().map(|join| (join.key, None)).collect();
        // Before what ended: that may be beams which continued others before.
        beams.into_iter().for_each(|beams| self.continue_beams(lane, beams, &mut rewritten));
        for EndedSequence { key, computed } in finished {
            self.note_computed(epoch, computed);
            drop(self.remove(key));
        }
        let (reply, plan) = oneshot::channel();
        self.lanes[lane].open = Some(OpenUpdate {
            plan: SlotPlan::default(),
            rewritten,
            needs: grown,
            got: Vec::new(),
            with_work,
            reply,
        });
        self.lanes[lane].stalled.clear();
        let gave_up = std::mem::take(&mut self.lanes[lane].gave_up);
        give_up.into_iter().for_each(|key| self.take_slot(key));
        for JoiningSequence { key, class, account, lease } in joins {
            self.join(key, HeldSequence { lane, class, account, lease, listed: 0, search: None });
        }
        let has_released = self.pool.releases() != self.noticed;
        self.settle();
        self.noticed = self.pool.releases();
        if has_computed || has_released || gave_up {
            self.changed.do_send(PagesChanged);
        }
        self.slots_live.set(self.held.len() as f64);
        self.pages_used.set(self.pool.usage());
        plan
    }

    /// Begins a new epoch if this one is later: the contents of all pages are lost.
    fn enter_epoch(&mut self, epoch: Epoch) {
        if epoch > self.epoch {
            self.epoch = epoch;
            self.pool.forget_contents();
        }
    }

    /// Notes what is in a sequence's pages, unless a fault has lost it.
    fn note_computed(&mut self, epoch: Epoch, computed: ComputedPositions) {
        let ComputedPositions { key, positions, generated } = computed;
        if let Some(HeldSequence { lease, .. }) = self.held.get_mut(&key)
            && epoch == self.epoch
        {
            lease.append_tokens(generated.into_iter().map(|token| token | self.generated_mark));
            lease.note_computed(positions);
        }
    }

    /// Gives a sequence a slot.
    fn join(&mut self, key: SequenceKey, held: HeldSequence) {
        let slot = self.lanes[held.lane].slots.join(key);
        slot.expect("prefill starts no sequence in a full lane; anything else is a bug");
        self.held.insert(key, held);
    }

    /// Removes a sequence from its slot, and returns its lease.
    fn remove(&mut self, key: SequenceKey) -> Lease {
        let held = self.held.remove(&key);
        let held = held.expect("a finished sequence holds a slot; anything else is a bug");
        let slots = &mut self.lanes[held.lane].slots;
        let slot = slots.slot_of(key).expect("a held sequence has a slot; anything else is a bug");
        slots.leave(slot);
        self.giving_up.remove(&key);
        held.lease
    }

    /// Gives the beams of a search that continue the pages of their parents.
    fn continue_beams(
        &mut self,
        lane: usize,
        update: BeamUpdate,
        rewritten: &mut Vec<(SequenceKey, Option<TablePages>)>,
    ) {
        let BeamUpdate { search, beams, positions } = update;
        let Some(parent) = beams.first().and_then(|(_, parent)| self.held.get(parent)) else { return };
        let (class, account) = (parent.class, parent.account.clone());
        let is_member =
            |key: &SequenceKey, held: &HeldSequence| *key == search || held.search == Some(search);
        let before = self.held.iter().filter(|(key, held)| is_member(key, held));
        let before: Vec<SequenceKey> = before.map(|(key, _)| *key).collect();
        // A beam that continues itself keeps its lease; of another parent's, the first one takes it.
        let keeps = |parent: SequenceKey| {
            let of_parent = || beams.iter().filter(|(_, other)| *other == parent).map(|(key, _)| *key);
            of_parent().find(|key| *key == parent).or_else(|| of_parent().next())
        };
        let lease_of =
            |key| &self.held.get(&key).expect("a beam's parent is held; anything else is a bug").lease;
        let forks = beams.iter().filter(|(key, parent)| keeps(*parent) != Some(*key));
        let forks = forks.map(|(key, parent)| (*key, lease_of(*parent).fork(positions)));
        let mut leases: Vec<(SequenceKey, Lease)> = forks.collect();
        for &key in &before {
            // A beam's slot stays its own, whatever pages it has.
            let stays = beams.iter().any(|(beam, _)| *beam == key);
            let (pages, lease) = match stays {
                true => {
                    let held = self.held.remove(&key).expect("it is held, as seen above");
                    let pages = [held.lease.own().to_vec(), held.lease.window().to_vec()];
                    (Some(pages), held.lease)
                }
                false => (None, self.remove(key)),
            };
            rewritten.extend(pages.map(|pages| (key, Some(pages))));
            leases.extend(keeps(key).map(|beam| (beam, lease)));
        }
        for (key, lease) in leases {
            let account = account.clone();
            let held = HeldSequence { lane, class, account, lease, listed: 0, search: Some(search) };
            match before.contains(&key) {
                true => _ = self.held.insert(key, held),
                false => {
                    self.join(key, held);
                    rewritten.push((key, None));
                }
            }
        }
    }

    /// Completes a lane's plan and sends it: lets the shuffle close the holes, and lists what changes in page
    /// tables.
    fn reply(&mut self, lane: usize, open: OpenUpdate) {
        let OpenUpdate { mut plan, rewritten, needs, got, reply, .. } = open;
        // What is left after all needs is for drafts.
        for need in &got {
            let lease = self.held.get_mut(&need.key).map(|held| &mut held.lease);
            let is_short = lease.is_some_and(|lease| !lease.grow(need.with_drafts));
            plan.short_of_drafts.extend(is_short.then_some(need.key));
        }
        let Lane { slots, copied, stalled, .. } = &mut self.lanes[lane];
        slots.compact(&mut plan.moves);
        plan.stalled.extend(needs.iter().map(|need| need.key));
        *stalled = needs;
        let is_rewritten = |key| rewritten.iter().any(|(other, _)| *other == key);
        let got = got.iter().map(|need| need.key);
        let grown = got.clone().filter(|key| !is_rewritten(*key));
        let changes = rewritten.iter().map(|(key, pages)| (*key, pages.as_ref(), true));
        let nothing = TablePages::default();
        for (key, before, anew) in changes.chain(grown.map(|key| (key, Some(&nothing), false))) {
            let Some(HeldSequence { lease, listed, .. }) = self.held.get_mut(&key) else { continue };
            let first = if anew { 0 } else { *listed };
            *listed = lease.own().len();
            let slot = slots.slot_of(key).expect("a held sequence has a slot; anything else is a bug");
            let entries = |table, now: &[Page], before: Option<&[Page]>| {
                let entries = (0..).zip(now).skip(first);
                let changed = entries.filter(|(index, page)| {
                    **page != NULL_PAGE
                        && before.and_then(|before| before.get(*index as usize)) != Some(*page)
                });
                changed.map(|(index, &page)| TableUpdate { slot, table, index, page }).collect::<Vec<_>>()
            };
            plan.tables.extend(entries(KvTable::Own, lease.own(), before.map(|[own, _]| &**own)));
            plan.tables.extend(entries(KvTable::Window, lease.window(), before.map(|[_, window]| &**window)));
            if before.is_none() {
                plan.tables.extend(entries(KvTable::Cross, lease.cross(), None));
            }
        }
        // Copies wait for the page that they fill.
        let may_copy = rewritten.iter().map(|(key, _)| *key).chain(got);
        for key in may_copy {
            if let Some(lease) = self.held.get(&key).map(|held| &held.lease)
                && let Some(copy) = lease.copy()
                && !copied.contains(&key)
            {
                plan.copies.push(copy);
                plan.copies.extend(lease.window_copy());
                copied.push(key);
            }
        }
        plan.slots.extend(slots.iter());
        plan.window = slots.window();
        // The lane may be gone.
        let _ = reply.send(plan);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{next_message, recorder, with_timeout};
    use super::*;
    use crate::memory::{PageDemand, PageHash, TokenChain, WindowCache};
    use crate::request::client::{ClientId, ClientSettings};
    use actix::Addr;
    use mainstem_kernels::random::philox;
    use tokio::sync::mpsc::UnboundedReceiver;

    const PAGE: usize = 32;

    fn manager(slots: usize, lanes: usize, shuffle: bool, pool: &PagePool) -> KvManager {
        let (changed, _) = recorder();
        KvManager::new((slots, lanes, shuffle), pool.clone(), 0, changed)
    }

    /// A manager with `pages` pages, and the notices that it sends.
    fn rig(
        slots: usize,
        lanes: usize,
        pages: usize,
    ) -> (KvManager, PagePool, UnboundedReceiver<PagesChanged>) {
        let pool = PagePool::new(pages + 1, PAGE);
        let (changed, notices) = recorder();
        (KvManager::new((slots, lanes, true), pool.clone(), 0, changed), pool, notices)
    }

    /// The account of a client that has all sequences.
    fn account() -> Arc<Account> {
        Arc::new(Account::new(ClientId::Local, Arc::default()))
    }

    fn lease(pool: &PagePool, pages: usize) -> Lease {
        let demand = PageDemand {
            positions: pages * PAGE,
            max_positions: 0,
            encoder_positions: 0,
            reusable: 0,
            margin: 0,
        };
        pool.begin(demand, None).expect("there are enough pages")
    }

    async fn usage(kv: &Addr<KvManager>) -> (usize, usize) {
        with_timeout(kv.send(GetUsage)).await.expect("kv replies")
    }

    fn computed(key: u64) -> ComputedPositions {
        ComputedPositions { key: SequenceKey(key), positions: 0, generated: Vec::new() }
    }

    /// An update of lane 0 with these sequences, each with so many pages of a pool that has more than enough.
    fn update(
        finished: impl IntoIterator<Item = u64>,
        joins: impl IntoIterator<Item = (u64, Lease)>,
    ) -> IterationUpdate {
        let end = |key| EndedSequence { key: SequenceKey(key), computed: computed(key) };
        let class = Class::Interactive;
        let join = |(key, lease)| JoiningSequence { key: SequenceKey(key), class, account: account(), lease };
        let (finished, joins) = (finished.into_iter().map(end), joins.into_iter().map(join));
        IterationUpdate { finished: finished.collect(), joins: joins.collect(), ..IterationUpdate::default() }
    }

    /// An update in which sequences need pages for so many positions.
    fn growing(lane: usize, grown: &[(u64, usize)]) -> IterationUpdate {
        let grown = grown.iter().map(|&(key, positions)| GrowingSequence {
            key: SequenceKey(key),
            positions,
            with_drafts: positions,
        });
        IterationUpdate { lane, grown: grown.collect(), with_work: 1, ..IterationUpdate::default() }
    }

    impl KvManager {
        /// Returns the plan of an update whose reply comes at once.
        fn plan(&mut self, update: IterationUpdate) -> SlotPlan {
            self.update(update).try_recv().expect("the plan is complete")
        }

        /// Returns the plan of an update with `joins`, each with two pages of its own, and one for its
        /// encoder input.
        fn plan_with(
            &mut self,
            lane: usize,
            finished: impl IntoIterator<Item = u64>,
            joins: impl IntoIterator<Item = u64>,
        ) -> SlotPlan {
            let demand = PageDemand {
                positions: 2 * PAGE,
                max_positions: 0,
                encoder_positions: 1,
                reusable: 0,
                margin: 0,
            };
            let pool = self.pool.clone();
            let lease = move |_| pool.begin(demand, None).expect("there are enough pages");
            let joins = joins.into_iter().map(move |key| (key, lease(key)));
            self.plan(IterationUpdate { lane, ..update(finished, joins) })
        }
    }

    fn keys(keys: &[SequenceKey]) -> Vec<u64> {
        keys.iter().map(|key| key.0).collect()
    }

    #[actix::test]
    async fn a_sequence_gets_pages_as_it_grows() {
        let (mut kv, pool, _) = rig(2, 1, 4);
        let plan = kv.plan(update([], [(1, lease(&pool, 2))]));
        assert_eq!(plan.tables.iter().map(|entry| entry.index).collect::<Vec<_>>(), [0, 1]);
        let plan = kv.plan(growing(0, &[(1, 3 * PAGE - 4)]));
        let [entry] = plan.tables[..] else { panic!("{plan:?}") };
        assert_eq!((entry.slot, entry.table, entry.index), (0, KvTable::Own, 2));
        assert!(plan.stalled.is_empty() && plan.preempted.is_empty());
        assert_eq!(pool.used(), 3);
    }

    #[actix::test]
    async fn drafts_get_free_pages_only() {
        let (mut kv, pool, _) = rig(2, 1, 3);
        kv.plan(update([], [(1, lease(&pool, 1)), (2, lease(&pool, 1))]));
        let grow = |key, positions| GrowingSequence {
            key: SequenceKey(key),
            positions,
            with_drafts: positions + PAGE,
        };
        let grown = vec![grow(1, PAGE), grow(2, PAGE)];
        let plan = kv.plan(IterationUpdate { grown, with_work: 2, ..IterationUpdate::default() });
        assert_eq!((keys(&plan.short_of_drafts), plan.tables.len()), (vec![2], 1));
        assert!(plan.stalled.is_empty() && plan.preempted.is_empty());
        // A sequence that has no page for its next token takes one from another, but none for drafts.
        let grown = vec![grow(1, 2 * PAGE + 1)];
        let plan = kv.plan(IterationUpdate { grown, with_work: 2, ..IterationUpdate::default() });
        assert_eq!((keys(&plan.preempted), keys(&plan.short_of_drafts)), (vec![2], vec![1]));
    }

    #[actix::test]
    async fn windowed_layers_have_a_table_of_their_own() {
        let window = WindowCache { pages: 20, window: 40, step_pages: 3 };
        let pool = PagePool::with_window(30, PAGE, Some(window));
        let mut kv = manager(3, 1, true, &pool);
        let of = |plan: &SlotPlan, slot, table| {
            let entries = plan.tables.iter().filter(|entry| (entry.slot, entry.table) == (slot, table));
            entries.map(|entry| (entry.index, entry.page)).collect::<Vec<_>>()
        };
        let plan = kv.plan(update([], [(1, lease(&pool, 2))]));
        assert_eq!(of(&plan, 0, KvTable::Window), [(0, 1), (1, 2)]);
        let plan = kv.plan(growing(0, &[(1, 4 * PAGE)]));
        assert_eq!(of(&plan, 0, KvTable::Own), [(2, 3), (3, 4)]);
        assert_eq!(
            of(&plan, 0, KvTable::Window),
            [(2, 3), (3, 1)],
            "the first page holds the last positions"
        );
        // A second beam sees positions from 61 on.
        let beams = [(1, 1), (2, 1)].map(|(beam, parent)| (SequenceKey(beam), SequenceKey(parent)));
        let beams = BeamUpdate { search: SequenceKey(1), beams: beams.to_vec(), positions: 100 };
        let plan = kv.plan(IterationUpdate { beams: vec![beams], ..growing(0, &[(2, 101)]) });
        assert_eq!(of(&plan, 0, KvTable::Window), []);
        assert_eq!(of(&plan, 1, KvTable::Own), [(0, 1), (1, 2), (2, 3), (3, 5)]);
        assert_eq!(of(&plan, 1, KvTable::Window), [(1, 2), (2, 3), (3, 4)]);
        let copies = [(KvTable::Own, 4, 5), (KvTable::Window, 1, 4)];
        assert_eq!(plan.copies, copies.map(|(table, from, to)| PageCopy { table, from, to }));
        kv.plan(update([1, 2], []));
        assert_eq!((pool.used(), pool.used_in_windows()), (0, 0));
    }

    /// The youngest sequences give up their pages, even if one of them is the one that needs more.
    #[actix::test]
    async fn the_youngest_sequences_are_preempted() {
        let (mut kv, pool, mut notices) = rig(4, 1, 6);
        let of = |key, pages| (key, lease(&pool, pages));
        kv.plan(update([], [of(5, 2), of(3, 1), of(4, 1), of(9, 1)]));
        let plan = kv.plan(growing(0, &[(3, 4 * PAGE)]));
        // One page is free; sequence 9 has another, and sequence 5 two.
        assert_eq!((keys(&plan.preempted), keys(&plan.stalled)), (vec![9, 5], vec![]));
        assert_eq!(plan.slots.iter().map(|(_, key)| key.0).collect::<BTreeSet<_>>(), BTreeSet::from([3, 4]));
        assert_eq!((pool.used(), notices.try_recv().is_err()), (5, true), "the preempted ones go first");
        let plan = kv.plan(growing(0, &[(3, 5 * PAGE), (4, 2 * PAGE)]));
        next_message(&mut notices).await;
        assert_eq!(keys(&plan.preempted), [4], "the older one has what there is");
        assert_eq!((plan.slots.len(), plan.window.len(), pool.used()), (1, 1, 5));
        let plan = kv.plan(growing(0, &[(3, 7 * PAGE)]));
        assert_eq!((keys(&plan.preempted), pool.used()), (vec![3], 0));
    }

    /// A sequence of a later class gives up its pages before younger ones of an earlier class.
    #[actix::test]
    async fn the_last_class_is_preempted_first() {
        let (mut kv, pool, _) = rig(4, 1, 3);
        let mut first = update([], [1, 2, 3].map(|key| (key, lease(&pool, 1))));
        first.joins[0].class = Class::Batch;
        kv.plan(first);
        let plan = kv.plan(growing(0, &[(3, 2 * PAGE)]));
        assert_eq!((keys(&plan.preempted), keys(&plan.stalled)), (vec![1], vec![]));
        let plan = kv.plan(growing(0, &[(2, 2 * PAGE)]));
        assert_eq!(keys(&plan.preempted), [3]);
    }

    /// Sequences of the client with the most pages for its weight go first, but never the first of all.
    #[actix::test]
    async fn a_client_with_few_pages_keeps_them() {
        let of_client = |number, weight| {
            let account = Account::new(ClientId::Key(number), Arc::default());
            let settings = ClientSettings { weight, ..ClientSettings::default() };
            account.configure(&settings, std::time::Instant::now());
            Arc::new(account)
        };
        for (weight, expected) in [(1, [3, 2]), (8, [4, 3])] {
            let (mut kv, pool, _) = rig(5, 1, 8);
            let sizes = [(1, 2), (2, 2), (3, 2), (4, 1)];
            let mut first = update([], sizes.map(|(key, pages)| (key, lease(&pool, pages))));
            let accounts = [of_client(1, weight), of_client(2, 1)];
            for join in &mut first.joins {
                join.account = accounts[usize::from(join.key.0 == 4)].clone();
            }
            kv.plan(first);
            let mut preempted = Vec::new();
            for pages in [4, 6] {
                preempted.extend(keys(&kv.plan(growing(0, &[(1, pages * PAGE)])).preempted));
            }
            assert_eq!(preempted, expected, "weight {weight}");
        }
    }

    /// The oldest sequence of a class goes on while younger ones of the class can make way, even if it is the
    /// only one of the client with the most pages.
    #[actix::test]
    async fn the_oldest_of_a_class_is_spared() {
        let (mut kv, pool, _) = rig(5, 1, 9);
        let sizes = [(1, 5), (2, 1), (3, 1), (4, 1)];
        let mut first = update([], sizes.map(|(key, pages)| (key, lease(&pool, pages))));
        for join in &mut first.joins {
            join.class = if join.key.0 < 4 { Class::Batch } else { Class::Interactive };
            if join.key.0 == 1 {
                join.account = Arc::new(Account::new(ClientId::Key(9), Arc::default()));
            }
        }
        kv.plan(first);
        let mut preempted = Vec::new();
        for pages in [3, 4, 5] {
            preempted.extend(keys(&kv.plan(growing(0, &[(4, pages * PAGE)])).preempted));
        }
        assert_eq!(preempted, [3, 2, 1]);
    }

    #[actix::test]
    async fn a_sequence_that_makes_way_leaves_its_slot_to_one_that_joins() {
        let (mut kv, pool, _) = rig(2, 1, 9);
        kv.plan(update([], [1, 2].map(|key| (key, lease(&pool, 2)))));
        let joins = update([], [(3, lease(&pool, 1))]);
        let plan = kv.plan(IterationUpdate { give_up: vec![SequenceKey(1)], ..joins });
        assert_eq!((keys(&plan.preempted), pool.used()), (vec![1], 3));
        assert_eq!(plan.slots, [(0, SequenceKey(3)), (1, SequenceKey(2))]);
    }

    /// The youngest sequence runs in another lane, which gives it up at its next update only. The lane that
    /// needs the page waits if it can do nothing else.
    #[actix::test]
    async fn a_lane_gives_up_its_sequence_between_its_iterations() {
        let (mut kv, pool, _) = rig(4, 2, 3);
        kv.plan(update([], [(1, lease(&pool, 1)), (2, lease(&pool, 1))]));
        kv.plan(IterationUpdate { lane: 1, ..update([], [(3, lease(&pool, 1))]) });
        let with_work = |with_work, update| IterationUpdate { with_work, ..update };
        let plan = kv.plan(with_work(2, growing(0, &[(1, 2 * PAGE)])));
        assert_eq!((keys(&plan.stalled), keys(&plan.preempted)), (vec![1], vec![]), "the other one goes on");
        let mut waiting = kv.update(with_work(1, growing(0, &[(1, 2 * PAGE)])));
        assert!(waiting.try_recv().is_err(), "nothing can be done without the page");
        let plan = kv.plan(growing(1, &[]));
        assert_eq!(keys(&plan.preempted), [3]);
        let plan = waiting.try_recv().expect("the page is there");
        assert_eq!((plan.tables.len(), plan.stalled.len()), (1, 0));
        assert_eq!(kv.giving_up.len(), 0);
    }

    /// A sequence that was asked for its pages keeps them if a younger one comes before it gives them up.
    #[actix::test]
    async fn the_sequence_that_gives_up_is_the_youngest_by_then() {
        let (mut kv, pool, _) = rig(4, 2, 4);
        kv.plan(update([], [(1, lease(&pool, 1)), (2, lease(&pool, 1))]));
        kv.plan(IterationUpdate { lane: 1, ..update([], [(3, lease(&pool, 1))]) });
        let mut waiting = kv.update(growing(0, &[(1, 3 * PAGE)]));
        assert_eq!(kv.giving_up, BTreeSet::from([SequenceKey(3)]));
        let plan = kv.plan(IterationUpdate { lane: 1, ..update([], [(4, lease(&pool, 1))]) });
        assert_eq!(keys(&plan.preempted), [4, 3], "both are needed");
        waiting.try_recv().expect("the pages are there");
        let plan = kv.plan(growing(0, &[]));
        assert_eq!(plan.slots.len(), 2);
    }

    /// Sequences that were asked for their pages keep them if others come back before.
    #[actix::test]
    async fn pages_that_come_back_spare_the_sequence_that_was_asked() {
        for is_open in [false, true] {
            let (mut kv, pool, _) = rig(4, 2, 4);
            let first = [(1, lease(&pool, 1)), (2, lease(&pool, 1))];
            kv.plan(update([], first));
            let others = [(3, lease(&pool, 1)), (4, lease(&pool, 1))];
            kv.plan(IterationUpdate { lane: 1, ..update([], others) });
            let with_work = if is_open { 1 } else { 2 };
            let mut waiting = kv.update(IterationUpdate { with_work, ..growing(0, &[(1, 2 * PAGE)]) });
            assert_eq!((waiting.try_recv().is_err(), kv.giving_up.len()), (is_open, 1));
            let plan = kv.plan(IterationUpdate { lane: 1, ..update([3], []) });
            assert_eq!((keys(&plan.preempted), kv.giving_up.len()), (vec![], 0));
            let plan = match is_open {
                true => waiting.try_recv().expect("the page is there"),
                false => kv.plan(growing(0, &[(1, 2 * PAGE)])),
            };
            let [entry] = plan.tables[..] else { panic!("{plan:?}") };
            assert_eq!((entry.slot, entry.index, plan.stalled.len()), (0, 1, 0));
        }
    }

    /// The beams of a search are computed together, so a search goes on only if all of them have their pages.
    #[actix::test]
    async fn a_lane_waits_if_its_search_lacks_a_page() {
        for with_work in [1, 2] {
            let (mut kv, pool, _) = rig(8, 2, 7);
            kv.plan(update([], [(1, lease(&pool, 1)), (4, lease(&pool, 1))]));
            kv.plan(IterationUpdate { lane: 1, ..update([], [(9, lease(&pool, 1))]) });
            let beams = [1, 2, 3].map(|beam| (SequenceKey(beam), SequenceKey(1)));
            let beams = BeamUpdate { search: SequenceKey(1), beams: beams.to_vec(), positions: PAGE };
            let grown = growing(0, &[(1, PAGE + 1), (2, PAGE + 1), (3, PAGE + 1)]);
            let mut plan = kv.update(IterationUpdate { beams: vec![beams], with_work, ..grown });
            assert!(kv.giving_up.is_empty() && plan.try_recv().is_ok(), "there are three pages");
            // One page is left for two of them.
            let grown = [(1, 2 * PAGE), (2, 2 * PAGE + 1), (3, 2 * PAGE + 1)];
            let mut plan = kv.update(IterationUpdate { with_work, ..growing(0, &grown) });
            assert_eq!(kv.giving_up, BTreeSet::from([SequenceKey(9)]));
            // The fourth sequence goes on without them, if it has work.
            assert_eq!(plan.try_recv().is_ok(), with_work == 2);
            kv.plan(IterationUpdate { lane: 1, ..growing(1, &[]) });
            assert_eq!(plan.try_recv().is_ok(), with_work == 1);
        }
    }

    /// Every lane waits for pages, so the youngest sequence of all is given up at once, whatever its lane.
    #[actix::test]
    async fn lanes_do_not_wait_for_each_other() {
        for first in [0, 1] {
            let (mut kv, pool, _) = rig(2, 2, 2);
            kv.plan(update([], [(1, lease(&pool, 1))]));
            kv.plan(IterationUpdate { lane: 1, ..update([], [(2, lease(&pool, 1))]) });
            let needs = |lane: usize| growing(lane, &[(lane as u64 + 1, 2 * PAGE)]);
            let mut early = kv.update(needs(first));
            // The lane of sequence 2 gives it up itself; the other one has to wait for that.
            assert_eq!(early.try_recv().is_ok(), first == 1);
            let plans = [early, kv.update(needs(1 - first))];
            let mut plans: Vec<SlotPlan> =
                plans.into_iter().filter_map(|mut plan| plan.try_recv().ok()).collect();
            plans.retain(|plan| !plan.slots.is_empty());
            let [plan] = &plans[..] else { panic!("{plans:?}") };
            assert_eq!((plan.slots[0].1.0, plan.tables.len(), pool.used()), (1, 1, 2));
        }
    }

    #[actix::test]
    async fn computed_pages_are_found_and_contents_of_an_earlier_epoch_are_not() {
        let begin = |pool: &PagePool| {
            let mut chain = TokenChain::new(PageHash::root(&[]), PAGE);
            chain.extend(0..2 * PAGE as u32);
            let demand = PageDemand {
                positions: 2 * PAGE,
                max_positions: 0,
                encoder_positions: 0,
                reusable: 2 * PAGE - 1,
                margin: 0,
            };
            pool.begin(demand, Some(chain)).map_err(|(why, _)| why)
        };
        let (mut kv, pool, mut notices) = rig(3, 1, 9);
        let first = begin(&pool).expect("there are enough");
        kv.plan(update([], [(1, first)]));
        let positions = |epoch, positions| {
            let computed = vec![ComputedPositions { key: SequenceKey(1), positions, generated: vec![] }];
            IterationUpdate { computed, epoch: Epoch(epoch), ..IterationUpdate::default() }
        };
        kv.plan(positions(0, 2 * PAGE));
        next_message(&mut notices).await;
        let second = begin(&pool).expect("there are enough");
        assert_eq!((second.computed(), pool.used()), (2 * PAGE - 1, 3));
        let plan = kv.plan(update([], [(2, second)]));
        assert_eq!(plan.copies.len(), 1);
        let copied = plan.copies[0].to;
        assert!(plan.tables.iter().any(|entry| (entry.index, entry.page) == (1, copied)));
        kv.enter_epoch(Epoch(1));
        kv.plan(positions(0, 2 * PAGE));
        assert_eq!(begin(&pool).expect("there are enough").computed(), 0, "the fault has lost it");
        assert_eq!(pool.used(), 3);
    }

    /// The source of a copy stays until the step with the copy is sent, even if nobody else holds it.
    #[actix::test]
    async fn the_source_of_a_copy_is_held_until_the_next_update() {
        let (mut kv, pool, _) = rig(2, 1, 2);
        let begin = || {
            let mut chain = TokenChain::new(PageHash::root(&[]), PAGE);
            chain.extend(0..9);
            let demand =
                PageDemand { positions: 9, max_positions: 0, encoder_positions: 0, reusable: 8, margin: 0 };
            pool.begin(demand, Some(chain)).expect("there are enough")
        };
        let mut first = begin();
        first.note_computed(9);
        drop(first);
        kv.plan(update([], [(1, begin())]));
        assert_eq!(pool.used(), 2);
        kv.plan(update([], []));
        assert_eq!(pool.used(), 1);
        kv.plan(update([1], []));
        assert_eq!(pool.used(), 0);
    }

    #[actix::test]
    async fn a_model_without_a_kv_cache_needs_no_pages() {
        let recorder = telemetry::recorder(None);
        let pool = PagePool::new(1, PAGE);
        let kv = metrics::with_local_recorder(&recorder, || manager(2, 1, true, &pool)).start();
        let iteration = update([], [(1, lease(&pool, 0))]);
        let plan = with_timeout(kv.send(iteration)).await.expect("kv replies");
        assert_eq!((plan.slots, plan.tables), (vec![(0, SequenceKey(1))], vec![]));
        let rendered = recorder.handle().render();
        let usage = rendered.lines().find(|line| line.starts_with(telemetry::KV_CACHE_USAGE.name));
        assert!(usage.is_some_and(|line| line.ends_with(" 0")), "{rendered}");
    }

    #[actix::test]
    async fn a_reset_affects_its_lane_only() {
        let pool = PagePool::new(20, PAGE);
        let (changed, mut notices) = recorder();
        let kv = KvManager::new((5, 2, true), pool.clone(), 0, changed).start();
        let reset = |lane| ResetLane { lane, epoch: Epoch::default() };
        let of_lane = |lane, iteration: IterationUpdate| kv.send(IterationUpdate { lane, ..iteration });
        let two = |keys: [u64; 2]| keys.map(|key| (key, lease(&pool, 2)));
        with_timeout(of_lane(0, update([], two([1, 2])))).await.expect("kv replies");
        let plan = with_timeout(of_lane(1, update([], two([4, 5])))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(3, SequenceKey(4)), (4, SequenceKey(5))], 3..5));
        assert_eq!(usage(&kv).await, (4, 8));
        kv.do_send(reset(0));
        assert_eq!(usage(&kv).await, (2, 4));
        next_message(&mut notices).await;
        let plan = with_timeout(of_lane(1, update([4], []))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(4, SequenceKey(5))], 4..5));
        let plan = with_timeout(of_lane(0, update([], [(6, lease(&pool, 1))]))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(0, SequenceKey(6))], 0..1));
    }

    #[actix::test]
    async fn new_sequences_fill_holes_so_that_no_sequence_moves() {
        let mut kv = manager(5, 1, true, &PagePool::new(99, PAGE));
        kv.plan_with(0, [], [1, 2, 3, 4, 5]);
        let plan = kv.plan_with(0, [2, 4], [6, 7]);
        assert_eq!((plan.moves.len(), plan.window), (0, 0..5));
        let holders = [(0, 1), (1, 6), (2, 3), (3, 7), (4, 5)].map(|(slot, key)| (slot, SequenceKey(key)));
        assert_eq!(plan.slots, holders);
        let slots: Vec<Slot> = plan.tables.iter().map(|entry| entry.slot).collect();
        assert_eq!(slots, [1, 1, 1, 3, 3, 3]);
    }

    /// A device's page tables as the moves and updates of its steps leave them: per slot, two entries of its
    /// own table and one of the cross table.
    type Tables = Vec<[Page; 3]>;

    /// Asserts what holds for every plan: the slots are the lane's and contiguous under the shuffle, and each
    /// sequence finds its pages in its slot's tables once moves and then updates are applied.
    fn check_plan(plan: &SlotPlan, own: &Range<Slot>, live: &[u64], tables: &mut Tables, shuffle: bool) {
        for m in &plan.moves {
            assert!(own.contains(&m.from) && own.contains(&m.to), "{m:?} leaves {own:?}");
            tables[m.to as usize] = tables[m.from as usize];
        }
        for entry in &plan.tables {
            let of_table = match entry.table {
                KvTable::Own => 0..2,
                KvTable::Cross => 2..3,
                KvTable::Window | KvTable::Scratch => panic!("kv updates no such table here"),
            };
            tables[entry.slot as usize][of_table][entry.index as usize] = entry.page;
        }
        let held: BTreeMap<u64, Slot> = plan.slots.iter().map(|(slot, key)| (key.0, *slot)).collect();
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), live);
        let slots: Vec<Slot> = plan.slots.iter().map(|(slot, _)| *slot).collect();
        assert!(slots.iter().all(|slot| own.contains(slot)), "{slots:?} are not all of {own:?}");
        let (first, last) = (slots.first(), slots.last());
        let window = first.map_or(own.start..own.start, |first| *first..last.expect("there is one") + 1);
        assert_eq!(plan.window, window);
        if shuffle {
            assert_eq!(slots, plan.window.clone().collect::<Vec<_>>());
        } else {
            assert!(plan.moves.is_empty());
        }
    }

    /// A lane's slots and its running sequences.
    struct LaneState {
        own: Range<Slot>,
        /// Each sequence's slot, as the last plan gave it.
        running: BTreeMap<u64, Slot>,
    }

    /// Random updates of every kind and lane, from empty to full lanes.
    #[actix::test]
    async fn every_plan_keeps_the_pages_with_their_sequences() {
        for (slots, lanes, shuffle) in [
            (1, 1, true),
            (6, 1, true),
            (6, 1, false),
            (13, 1, true),
            (13, 2, true),
            (13, 2, false),
            (10, 3, true),
            (12, 4, false),
            (12, 4, true),
            (3, 4, true),
        ] {
            let mut kv = manager(slots, lanes, shuffle, &PagePool::new(99, PAGE));
            let (mut tables, mut next_key, mut moves) = (vec![[0; 3]; slots], 1, 0);
            let of = |own| LaneState { own, running: BTreeMap::new() };
            let mut all: Vec<LaneState> = split_slots(slots, lanes).map(of).collect();
            for round in 0..400 * lanes as u32 {
                let dice = philox([round, 0, 0, 0], [slots as u32, lanes as u32]);
                let lane = dice[2] as usize % lanes;
                let LaneState { own, running: live } = &mut all[lane];
                let leaves = |key: &&u64| (dice[0] >> (**key % 31)).is_multiple_of(3);
                let finished: Vec<u64> = live.keys().filter(leaves).copied().collect();
                live.retain(|key, _| !finished.contains(key));
                let joins = u64::from(dice[1]) % (own.len() - live.len() + 1) as u64;
                let joined = next_key..next_key + joins;
                next_key += joins;
                let plan = kv.plan_with(lane, finished, joined.clone());
                live.extend(joined.map(|key| (key, 0)));
                let keys: Vec<u64> = live.keys().copied().collect();
                check_plan(&plan, own, &keys, &mut tables, shuffle);
                live.extend(plan.slots.iter().map(|(slot, key)| (key.0, *slot)));
                moves += plan.moves.len();
                // Updates of one lane must not affect the pages of any other.
                for (key, slot) in all.iter().flat_map(|lane| &lane.running) {
                    let lease = &kv.held[&SequenceKey(*key)].lease;
                    let pages = [lease.own(), lease.cross()].concat();
                    assert_eq!(tables[*slot as usize][..], pages, "sequence {key}, round {round}");
                }
            }
            assert_eq!(moves > 0, shuffle && slots > 2 * lanes, "{slots} slots in {lanes} lanes");
        }
    }
}
