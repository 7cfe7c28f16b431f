//! The KV cache manager: assigns slots and pages to sequences.
//!
//! Owns the slot map of each lane (with the sliding-window shuffle) and the page pool, which all lanes share.
//! It never touches a device: its [`SlotPlan`] is sent with the lane's next step.
//! Invariant: slots are assigned, moved and freed only in an [`IterationUpdate`] of their lane. Slots and
//! pages that a step in flight refers to are reused by later steps only, which every device runs after that
//! step.

use super::sequence::SequenceKey;
use super::stream::EventSender;
use crate::memory::{ComputedPrefix, Lease, PageList, PagePool, SlotMap, split_slots};
use crate::telemetry;
use actix::{Actor, Context, Handler, Message, MessageResult, ResponseFuture};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{KvTable, PageCopy, SlotMove, TableUpdate};
use metrics::Gauge;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Reserves the pages of a sequence. The reply comes when enough pages are free, in the order of requests; it
/// is `None` if the client disconnects first.
#[derive(Message)]
#[rtype(result = "Option<Lease>")]
pub struct Reserve {
    /// Positions of the sequence itself.
    pub positions: usize,
    /// Encoder positions that cross-attention reads.
    pub encoder_positions: usize,
    /// Leading positions that need no computation; `None` today, because nothing keeps K and V.
    pub prefix: Option<ComputedPrefix>,
    pub client: EventSender,
}

/// Notifies the manager that leases were dropped elsewhere, so that waiting reservations are retried.
#[derive(Message)]
#[rtype(result = "()")]
pub struct PagesReturned;

/// The changes of a lane's sequences since its last iteration. The reply is the slot plan of its next step.
#[derive(Message, Default)]
#[rtype(result = "SlotPlan")]
pub struct IterationUpdate {
    pub lane: usize,
    /// Sequences that ended, to be removed from their slots.
    pub finished: Vec<EndedSequence>,
    /// New sequences that need slots.
    pub joins: Vec<JoiningSequence>,
}

/// A new sequence that needs a slot, with its pages.
#[derive(Debug)]
pub struct JoiningSequence {
    pub key: SequenceKey,
    pub pages: PageList,
}

/// A sequence that ended, to be removed from its slot.
#[derive(Debug)]
pub struct EndedSequence {
    pub key: SequenceKey,
    /// Its tokens and pages, if it ended regularly and its K and V depend on its tokens alone, not on an
    /// encoder input.
    pub computed: Option<ComputedSequence>,
}

/// The tokens of a sequence that ended, and the pages with their K and V. Another sequence that begins with
/// the same tokens can share the pages ([`Reserve::prefix`]) until a device fault loses their content. The
/// last of them may be written by a step in flight, which every device runs before the sharing sequence's.
#[derive(Debug)]
pub struct ComputedSequence {
    pub prompt: Arc<[u32]>,
    /// All generated tokens except the last one, which is not the input of a step.
    pub generated: Vec<u32>,
    pub lease: Lease,
}

impl ComputedSequence {
    /// Returns the tokens whose K and V are in the pages.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.prompt.iter().chain(&self.generated).copied()
    }
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
}

/// Frees all slots of a lane, because the lane restarts without sequences.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ResetLane {
    pub lane: usize,
}

/// Queries (occupied slots, used pages); for tests and diagnostics.
#[derive(Message)]
#[rtype(result = "(usize, usize)")]
pub struct GetUsage;

/// The KV manager actor.
pub struct KvManager {
    /// The slot map of each lane.
    lanes: Vec<SlotMap<SequenceKey>>,
    pages: PagePool,
    /// Reservations that wait for pages, in the order of requests.
    waiting: VecDeque<(Reserve, oneshot::Sender<Option<Lease>>)>,
    slots_live: Gauge,
    pages_used: Gauge,
}

impl Actor for KvManager {
    type Context = Context<KvManager>;
}

impl Handler<Reserve> for KvManager {
    type Result = ResponseFuture<Option<Lease>>;

    fn handle(&mut self, msg: Reserve, _: &mut Self::Context) -> Self::Result {
        let (tx, rx) = oneshot::channel();
        self.waiting.push_back((msg, tx));
        self.grant_waiting();
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<PagesReturned> for KvManager {
    type Result = ();

    fn handle(&mut self, _: PagesReturned, _: &mut Self::Context) {
        self.grant_waiting();
    }
}

impl Handler<IterationUpdate> for KvManager {
    type Result = MessageResult<IterationUpdate>;

    fn handle(&mut self, update: IterationUpdate, _: &mut Self::Context) -> Self::Result {
        let plan = self.update_slots(update);
        self.grant_waiting();
        self.slots_live.set(self.occupied_slots() as f64);
        // A model without a KV cache has no pages.
        self.pages_used.set(self.pages.used() as f64 / self.pages.total().max(1) as f64);
        MessageResult(plan)
    }
}

impl Handler<ResetLane> for KvManager {
    type Result = ();

    fn handle(&mut self, ResetLane { lane }: ResetLane, _: &mut Self::Context) {
        let slots = &mut self.lanes[lane];
        for slot in slots.window() {
            if slots.get(slot).is_some() {
                slots.leave(slot);
            }
        }
        self.grant_waiting();
    }
}

impl Handler<GetUsage> for KvManager {
    type Result = MessageResult<GetUsage>;

    fn handle(&mut self, _: GetUsage, _: &mut Self::Context) -> Self::Result {
        self.lanes.iter().for_each(SlotMap::check);
        self.pages.check();
        MessageResult((self.occupied_slots(), self.pages.used()))
    }
}

impl KvManager {
    /// Creates a manager of `slots` slots, split among `lanes` lanes, and of the pages of `pages`, all free.
    pub fn new(slots: usize, lanes: usize, shuffle: bool, pages: PagePool) -> KvManager {
        KvManager {
            lanes: split_slots(slots, lanes).map(|slots| SlotMap::new(slots, shuffle)).collect(),
            pages,
            waiting: VecDeque::new(),
            slots_live: telemetry::SLOTS_LIVE.gauge(),
            pages_used: telemetry::KV_CACHE_USAGE.gauge(),
        }
    }

    /// Returns the number of occupied slots in all lanes.
    fn occupied_slots(&self) -> usize {
        self.lanes.iter().map(SlotMap::occupied_slots).sum()
    }

    /// Frees the slots of finished sequences, assigns slots to new ones (holes first), and lets the shuffle
    /// close the remaining holes.
    fn update_slots(&mut self, update: IterationUpdate) -> SlotPlan {
        let (mut plan, slots) = (SlotPlan::default(), &mut self.lanes[update.lane]);
        // Nothing keeps the K and V of finished sequences yet: dropping them here releases their pages.
        for EndedSequence { key, .. } in update.finished {
            let slot = slots.slot_of(key).expect("a finished sequence holds a slot; anything else is a bug");
            slots.leave(slot);
        }
        for JoiningSequence { key, .. } in &update.joins {
            slots.join(*key).expect("prefill starts no sequence in a full lane; anything else is a bug");
        }
        slots.compact(&mut plan.moves);
        for JoiningSequence { key, pages } in update.joins {
            let slot = slots.slot_of(key).expect("the sequence was assigned a slot above");
            for (table, pages) in [(KvTable::Own, pages.own()), (KvTable::Cross, pages.cross())] {
                let entry = |(index, &page)| TableUpdate { slot, table, index, page };
                plan.tables.extend((0..).zip(pages).map(entry));
            }
        }
        plan.slots.extend(slots.iter());
        plan.window = slots.window();
        plan
    }

    /// Grants pages to waiting reservations in order, until one does not fit. Reservations of disconnected
    /// clients are dropped, wherever they are in the queue.
    fn grant_waiting(&mut self) {
        self.waiting.retain(|(request, _)| !request.client.is_closed());
        while let Some((request, _)) = self.waiting.front() {
            let Reserve { positions, encoder_positions, prefix, .. } = request;
            let lease = self.pages.reserve_with_encoder(*positions, *encoder_positions, prefix.as_ref());
            let Some(lease) = lease else { return };
            if let Some((_, reply)) = self.waiting.pop_front() {
                let _ = reply.send(Some(lease));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream::{TokenStream, event_channel};
    use super::super::testing::with_timeout;
    use super::*;
    use actix::Addr;
    use mainstem_kernels::batch::Page;
    use mainstem_kernels::random::philox;
    use std::collections::BTreeMap;

    const PAGE: usize = 32;

    fn kv(slots: usize, pages: usize, shuffle: bool) -> KvManager {
        KvManager::new(slots, 1, shuffle, PagePool::new(pages + 1, PAGE))
    }

    /// Requests `pages` pages; returns the future reply and the requesting client.
    fn reserve(
        kv: &Addr<KvManager>,
        pages: usize,
    ) -> (impl Future<Output = Option<Lease>> + use<>, TokenStream) {
        let (client, stream) = event_channel();
        let reply = kv.send(Reserve { positions: pages * PAGE, encoder_positions: 0, prefix: None, client });
        (async { with_timeout(reply).await.expect("kv replies") }, stream)
    }

    async fn lease(kv: &Addr<KvManager>, pages: usize) -> Lease {
        let (reply, _client) = reserve(kv, pages);
        reply.await.expect("there are enough pages")
    }

    async fn usage(kv: &Addr<KvManager>) -> (usize, usize) {
        with_timeout(kv.send(GetUsage)).await.expect("kv replies")
    }

    fn update(
        finished: impl IntoIterator<Item = u64>,
        joins: impl IntoIterator<Item = u64>,
    ) -> IterationUpdate {
        let end = |key| EndedSequence { key: SequenceKey(key), computed: None };
        let join = |key| JoiningSequence { key: SequenceKey(key), pages: PageList::new(&pages(key), 2) };
        let (finished, joins) = (finished.into_iter().map(end), joins.into_iter().map(join));
        IterationUpdate { lane: 0, finished: finished.collect(), joins: joins.collect() }
    }

    /// Page numbers that identify their sequence: two of its own, one of its encoder input.
    fn pages(key: u64) -> [Page; 3] {
        [0, 1, 2].map(|index| key as Page * 3 + index)
    }

    #[derive(Clone, Copy, Debug)]
    enum AnyMessage {
        Update,
        PagesReturned,
        Reserve,
        Reset,
    }

    const ALL_MESSAGES: [AnyMessage; 4] =
        [AnyMessage::Update, AnyMessage::PagesReturned, AnyMessage::Reserve, AnyMessage::Reset];

    /// Sends any message that the manager accepts. A reservation's client is returned, because dropping it
    /// would have an effect of its own.
    async fn send_any(kv: &Addr<KvManager>, message: AnyMessage) -> Option<TokenStream> {
        match message {
            AnyMessage::Update => _ = with_timeout(kv.send(IterationUpdate::default())).await,
            AnyMessage::PagesReturned => kv.do_send(PagesReturned),
            AnyMessage::Reset => kv.do_send(ResetLane { lane: 0 }),
            AnyMessage::Reserve => {
                let (reply, client) = reserve(kv, 1);
                actix::spawn(reply);
                return Some(client);
            }
        }
        None
    }

    #[actix::test]
    async fn reservations_are_granted_in_order_even_if_a_later_one_would_fit() {
        let kv = kv(4, 4, true).start();
        let first = lease(&kv, 2).await;
        let (big, _big) = reserve(&kv, 3);
        let (small, _small) = reserve(&kv, 1);
        assert_eq!(usage(&kv).await, (0, 2), "the small request would fit, but waits behind the big one");
        drop(first);
        kv.do_send(PagesReturned);
        let leases =
            [big.await, small.await].map(|lease| lease.expect("there are enough pages").pages().len());
        assert_eq!(leases, [3, 1]);
    }

    #[actix::test]
    async fn every_message_grants_waiting_reservations() {
        for message in ALL_MESSAGES {
            let kv = kv(1, 2, true).start();
            let all = lease(&kv, 2).await;
            let (waiting, _client) = reserve(&kv, 1);
            assert_eq!(usage(&kv).await, (0, 2), "{message:?}");
            drop(all);
            let _asking = send_any(&kv, message).await;
            assert!(waiting.await.is_some(), "{message:?}");
        }
    }

    #[actix::test]
    async fn every_message_drops_reservations_of_disconnected_clients() {
        for message in ALL_MESSAGES {
            let kv = kv(1, 2, true).start();
            let all = lease(&kv, 2).await;
            let (head, _client) = reserve(&kv, 2);
            let (behind, leaving) = reserve(&kv, 1);
            assert_eq!(usage(&kv).await, (0, 2), "{message:?}");
            drop(leaving);
            let _asking = send_any(&kv, message).await;
            assert!(behind.await.is_none(), "{message:?}");
            drop(all);
            kv.do_send(PagesReturned);
            assert!(head.await.is_some(), "{message:?}: the first request keeps waiting");
        }
    }

    #[actix::test]
    async fn a_sequence_waits_for_its_encoder_pages_too() {
        let kv = kv(1, 3, true).start();
        let first = lease(&kv, 1).await;
        let (client, _stream) = event_channel();
        let request = Reserve { positions: PAGE + 1, encoder_positions: PAGE, prefix: None, client };
        let waiting = kv.send(request);
        assert_eq!(usage(&kv).await, (0, 1), "its own two pages are free, the encoder's page is not");
        drop(first);
        kv.do_send(PagesReturned);
        let lease = with_timeout(waiting).await.expect("kv replies").expect("its client is connected");
        assert_eq!((lease.own().len(), lease.cross().len()), (2, 1));
    }

    #[actix::test]
    async fn a_model_without_a_kv_cache_needs_no_pages() {
        let recorder = telemetry::recorder(None);
        let kv = metrics::with_local_recorder(&recorder, || kv(2, 0, true)).start();
        let lease = lease(&kv, 0).await;
        let nothing = JoiningSequence { key: SequenceKey(1), pages: lease.list().clone() };
        let iteration = IterationUpdate { joins: vec![nothing], ..IterationUpdate::default() };
        let plan = with_timeout(kv.send(iteration)).await.expect("kv replies");
        assert_eq!((plan.slots, plan.tables), (vec![(0, SequenceKey(1))], vec![]));
        let rendered = recorder.handle().render();
        let usage = rendered.lines().find(|line| line.starts_with(telemetry::KV_CACHE_USAGE.name));
        assert!(usage.is_some_and(|line| line.ends_with(" 0")), "{rendered}");
    }

    #[actix::test]
    async fn a_reset_frees_every_slot_and_no_page() {
        let kv = kv(3, 6, true).start();
        let lease = lease(&kv, 2).await;
        with_timeout(kv.send(update([], [1, 2, 3]))).await.expect("kv replies");
        assert_eq!(usage(&kv).await, (3, 2));
        kv.do_send(ResetLane { lane: 0 });
        assert_eq!(usage(&kv).await, (0, 2), "pages stay with their leases");
        let plan = with_timeout(kv.send(update([], [4, 5, 6]))).await.expect("kv replies");
        assert_eq!((plan.slots.len(), plan.window), (3, 0..3));
        drop(lease);
        assert_eq!(usage(&kv).await, (3, 0));
    }

    #[actix::test]
    async fn a_reset_affects_its_lane_only() {
        let kv = KvManager::new(5, 2, true, PagePool::new(2, PAGE)).start();
        let of_lane = |lane, iteration: IterationUpdate| kv.send(IterationUpdate { lane, ..iteration });
        with_timeout(of_lane(0, update([], [1, 2, 3]))).await.expect("kv replies");
        let plan = with_timeout(of_lane(1, update([], [4, 5]))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(3, SequenceKey(4)), (4, SequenceKey(5))], 3..5));
        kv.do_send(ResetLane { lane: 0 });
        assert_eq!(usage(&kv).await.0, 2);
        let plan = with_timeout(of_lane(1, update([4], []))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(4, SequenceKey(5))], 4..5));
        let plan = with_timeout(of_lane(0, update([], [6]))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(0, SequenceKey(6))], 0..1));
    }

    #[test]
    fn new_sequences_fill_holes_so_that_no_sequence_moves() {
        let mut kv = kv(5, 1, true);
        kv.update_slots(update([], [1, 2, 3, 4, 5]));
        let plan = kv.update_slots(update([2, 4], [6, 7]));
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
                KvTable::Scratch => panic!("kv updates no scratch table"),
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
    #[test]
    fn every_plan_keeps_the_pages_with_their_sequences() {
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
            let mut kv = KvManager::new(slots, lanes, shuffle, PagePool::new(2, PAGE));
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
                let plan = kv.update_slots(IterationUpdate { lane, ..update(finished, joined.clone()) });
                live.extend(joined.map(|key| (key, 0)));
                let keys: Vec<u64> = live.keys().copied().collect();
                check_plan(&plan, own, &keys, &mut tables, shuffle);
                live.extend(plan.slots.iter().map(|(slot, key)| (key.0, *slot)));
                moves += plan.moves.len();
                // Updates of one lane must not affect the pages of any other.
                for (key, slot) in all.iter().flat_map(|lane| &lane.running) {
                    assert_eq!(tables[*slot as usize], pages(*key), "sequence {key}, round {round}");
                }
            }
            assert_eq!(moves > 0, shuffle && slots > 2 * lanes, "{slots} slots in {lanes} lanes");
        }
    }
}
