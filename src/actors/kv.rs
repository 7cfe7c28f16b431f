//! The KV cache manager: assigns slots and pages to sequences.
//!
//! Owns the slot map of each lane (with the sliding-window shuffle) and the page pool, which all lanes share.
//! It never touches a device: its [`SlotPlan`] is sent with the lane's next step.
//! Invariant: slots are assigned, moved and freed only in an [`IterationUpdate`] of their lane. Slots and
//! pages that a step in flight refers to are reused by later steps only, which every device runs after that
//! step.

use super::sequence::Key;
use super::stream::EventSender;
use crate::memory::{Lease, PagePool, SlotMap, divided};
use crate::telemetry;
use actix::{Actor, Context, Handler, Message, MessageResult, ResponseFuture};
use mainstem_kernels::batch::{Page, Slot};
use mainstem_kernels::{KvTable, PageCopy, SlotMove, TableUpdate};
use metrics::Gauge;
use std::collections::VecDeque;
use std::ops::Range;
use tokio::sync::oneshot;

/// Reserves the pages of a sequence. The reply comes when enough pages are free, in the order of requests; it
/// is `None` if the client disconnects first.
#[derive(Message)]
#[rtype(result = "Option<Lease>")]
pub struct Reserve {
    /// Positions of the sequence itself.
    pub positions: usize,
    /// Encoder positions that cross-attention reads.
    pub source: usize,
    pub client: EventSender,
}

/// Notifies the manager that leases were dropped elsewhere, so that waiting reservations are retried.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Returned;

/// The changes of a lane's sequences since its last iteration. The reply is the slot plan of its next step.
#[derive(Message, Default)]
#[rtype(result = "Plan")]
pub struct Turn {
    pub lane: usize,
    /// Sequences that ended, to be removed from their slots.
    pub finished: Vec<Key>,
    /// New sequences that need slots.
    pub joins: Vec<Join>,
}

/// A new sequence that needs a slot, with its pages.
#[derive(Debug)]
pub struct Join {
    pub key: Key,
    /// Pages of the sequence's own positions.
    pub own: Vec<Page>,
    /// Pages of its encoder positions.
    pub cross: Vec<Page>,
}

/// The slot assignment of a lane for its next step, and the changes that the devices must apply to get there.
#[derive(Debug, Default)]
pub struct Plan {
    /// Occupied slots and their sequences, by slot. With the shuffle on, they fill `window`.
    pub slots: Vec<(Slot, Key)>,
    /// The range from the lowest to the highest occupied slot.
    pub window: Range<Slot>,
    pub moves: Vec<SlotMove>,
    pub copies: Vec<PageCopy>,
    pub tables: Vec<TableUpdate>,
}

/// Frees all slots of a lane, because the lane restarts without sequences.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Reset {
    pub lane: usize,
}

/// Queries (occupied slots, used pages); for tests and diagnostics.
#[derive(Message)]
#[rtype(result = "(usize, usize)")]
pub struct Held;

/// The KV manager actor.
pub struct Kv {
    /// The slot map of each lane.
    lanes: Vec<SlotMap<Key>>,
    pages: PagePool,
    /// Reservations that wait for pages, in the order of requests.
    short: VecDeque<(Reserve, oneshot::Sender<Option<Lease>>)>,
    slots_live: Gauge,
    pages_used: Gauge,
}

impl Actor for Kv {
    type Context = Context<Kv>;
}

impl Handler<Reserve> for Kv {
    type Result = ResponseFuture<Option<Lease>>;

    fn handle(&mut self, msg: Reserve, _: &mut Self::Context) -> Self::Result {
        let (tx, rx) = oneshot::channel();
        self.short.push_back((msg, tx));
        self.serve_short();
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<Returned> for Kv {
    type Result = ();

    fn handle(&mut self, _: Returned, _: &mut Self::Context) {
        self.serve_short();
    }
}

impl Handler<Turn> for Kv {
    type Result = MessageResult<Turn>;

    fn handle(&mut self, update: Turn, _: &mut Self::Context) -> Self::Result {
        let plan = self.turn(update);
        self.serve_short();
        self.slots_live.set(self.live() as f64);
        // A model without a KV cache has no pages.
        self.pages_used.set(self.pages.used() as f64 / self.pages.total().max(1) as f64);
        MessageResult(plan)
    }
}

impl Handler<Reset> for Kv {
    type Result = ();

    fn handle(&mut self, Reset { lane }: Reset, _: &mut Self::Context) {
        let slots = &mut self.lanes[lane];
        for slot in slots.window() {
            if slots.get(slot).is_some() {
                slots.leave(slot);
            }
        }
        self.serve_short();
    }
}

impl Handler<Held> for Kv {
    type Result = MessageResult<Held>;

    fn handle(&mut self, _: Held, _: &mut Self::Context) -> Self::Result {
        self.lanes.iter().for_each(SlotMap::check);
        self.pages.check();
        MessageResult((self.live(), self.pages.used()))
    }
}

impl Kv {
    /// Creates a manager of `slots` slots, split among `lanes` lanes, and of the pages of `pages`, all free.
    pub fn new(slots: usize, lanes: usize, shuffle: bool, pages: PagePool) -> Kv {
        Kv {
            lanes: divided(slots, lanes).map(|slots| SlotMap::new(slots, shuffle)).collect(),
            pages,
            short: VecDeque::new(),
            slots_live: telemetry::SLOTS_LIVE.gauge(),
            pages_used: telemetry::KV_CACHE_USAGE.gauge(),
        }
    }

    /// Returns the number of occupied slots in all lanes.
    fn live(&self) -> usize {
        self.lanes.iter().map(SlotMap::live).sum()
    }

    /// Frees the slots of finished sequences, assigns slots to new ones (holes first), and lets the shuffle
    /// close the remaining holes.
    fn turn(&mut self, update: Turn) -> Plan {
        let (mut plan, slots) = (Plan::default(), &mut self.lanes[update.lane]);
        for key in update.finished {
            let slot = slots.slot_of(key).expect("a finished sequence holds a slot; anything else is a bug");
            slots.leave(slot);
        }
        for Join { key, .. } in &update.joins {
            slots.join(*key).expect("prefill starts no sequence in a full lane; anything else is a bug");
        }
        slots.compact(&mut plan.moves);
        for Join { key, own, cross } in update.joins {
            let slot = slots.slot_of(key).expect("the sequence was assigned a slot above");
            for (table, pages) in [(KvTable::Own, own), (KvTable::Cross, cross)] {
                let entry = |(index, page)| TableUpdate { slot, table, index, page };
                plan.tables.extend((0..).zip(pages).map(entry));
            }
        }
        plan.slots.extend(slots.iter());
        plan.window = slots.window();
        plan
    }

    /// Grants pages to waiting reservations in order, until one does not fit. Reservations of disconnected
    /// clients are dropped, wherever they are in the queue.
    fn serve_short(&mut self) {
        self.short.retain(|(request, _)| !request.client.is_closed());
        while let Some((request, _)) = self.short.front() {
            let Some(lease) = self.pages.reserve_with_source(request.positions, request.source) else {
                return;
            };
            if let Some((_, reply)) = self.short.pop_front() {
                let _ = reply.send(Some(lease));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream::{TokenStream, channel};
    use super::super::testing::within;
    use super::*;
    use actix::Addr;
    use mainstem_kernels::random::philox;
    use std::collections::BTreeMap;

    const PAGE: usize = 32;

    fn kv(slots: usize, pages: usize, shuffle: bool) -> Kv {
        Kv::new(slots, 1, shuffle, PagePool::new(pages + 1, PAGE))
    }

    /// Requests `pages` pages; returns the future reply and the requesting client.
    fn reserve(kv: &Addr<Kv>, pages: usize) -> (impl Future<Output = Option<Lease>> + use<>, TokenStream) {
        let (client, stream) = channel();
        let reply = kv.send(Reserve { positions: pages * PAGE, source: 0, client });
        (async { within(reply).await.expect("kv replies") }, stream)
    }

    async fn lease(kv: &Addr<Kv>, pages: usize) -> Lease {
        let (reply, _client) = reserve(kv, pages);
        reply.await.expect("there are enough pages")
    }

    async fn held(kv: &Addr<Kv>) -> (usize, usize) {
        within(kv.send(Held)).await.expect("kv replies")
    }

    fn keys(keys: impl IntoIterator<Item = u64>) -> Vec<Key> {
        keys.into_iter().map(Key).collect()
    }

    fn turn(finished: impl IntoIterator<Item = u64>, joins: impl IntoIterator<Item = u64>) -> Turn {
        let join = |key| {
            let [own @ .., cross] = pages(key);
            Join { key: Key(key), own: own.to_vec(), cross: vec![cross] }
        };
        Turn { lane: 0, finished: keys(finished), joins: joins.into_iter().map(join).collect() }
    }

    /// Page numbers that identify their sequence: two of its own, one of its encoder input.
    fn pages(key: u64) -> [Page; 3] {
        [0, 1, 2].map(|index| key as Page * 3 + index)
    }

    #[derive(Clone, Copy, Debug)]
    enum Word {
        Turn,
        Returned,
        Reserve,
        Reset,
    }

    const WORDS: [Word; 4] = [Word::Turn, Word::Returned, Word::Reserve, Word::Reset];

    /// Sends any message that the manager accepts. A reservation's client is returned, because dropping it
    /// would have an effect of its own.
    async fn say(kv: &Addr<Kv>, message: Word) -> Option<TokenStream> {
        match message {
            Word::Turn => _ = within(kv.send(Turn::default())).await,
            Word::Returned => kv.do_send(Returned),
            Word::Reset => kv.do_send(Reset { lane: 0 }),
            Word::Reserve => {
                let (reply, client) = reserve(kv, 1);
                actix::spawn(reply);
                return Some(client);
            }
        }
        None
    }

    #[actix::test]
    async fn who_asked_first_is_served_first_even_where_a_later_wish_would_fit() {
        let kv = kv(4, 4, true).start();
        let first = lease(&kv, 2).await;
        let (big, _big) = reserve(&kv, 3);
        let (small, _small) = reserve(&kv, 1);
        assert_eq!(held(&kv).await, (0, 2), "the small request would fit, but waits behind the big one");
        drop(first);
        kv.do_send(Returned);
        let leases =
            [big.await, small.await].map(|lease| lease.expect("there are enough pages").pages().len());
        assert_eq!(leases, [3, 1]);
    }

    #[actix::test]
    async fn whatever_kv_hears_serves_those_who_wait_for_pages() {
        for message in WORDS {
            let kv = kv(1, 2, true).start();
            let all = lease(&kv, 2).await;
            let (waiting, _client) = reserve(&kv, 1);
            assert_eq!(held(&kv).await, (0, 2), "{message:?}");
            drop(all);
            let _asking = say(&kv, message).await;
            assert!(waiting.await.is_some(), "{message:?}");
        }
    }

    #[actix::test]
    async fn whatever_kv_hears_sends_those_away_who_hung_up_wherever_they_stand() {
        for message in WORDS {
            let kv = kv(1, 2, true).start();
            let all = lease(&kv, 2).await;
            let (head, _client) = reserve(&kv, 2);
            let (behind, leaving) = reserve(&kv, 1);
            assert_eq!(held(&kv).await, (0, 2), "{message:?}");
            drop(leaving);
            let _asking = say(&kv, message).await;
            assert!(behind.await.is_none(), "{message:?}");
            drop(all);
            kv.do_send(Returned);
            assert!(head.await.is_some(), "{message:?}: the first request keeps waiting");
        }
    }

    #[actix::test]
    async fn a_sequence_waits_for_the_pages_of_its_source_too() {
        let kv = kv(1, 3, true).start();
        let first = lease(&kv, 1).await;
        let (client, _stream) = channel();
        let request = Reserve { positions: PAGE + 1, source: PAGE, client };
        let waiting = kv.send(request);
        assert_eq!(held(&kv).await, (0, 1), "its own two pages are free, the encoder's page is not");
        drop(first);
        kv.do_send(Returned);
        let lease = within(waiting).await.expect("kv replies").expect("its client is connected");
        assert_eq!((lease.own().len(), lease.cross().len()), (2, 1));
    }

    #[actix::test]
    async fn a_model_that_keeps_nothing_takes_sequences_in_without_pages() {
        let recorder = telemetry::recorder(None);
        let kv = metrics::with_local_recorder(&recorder, || kv(2, 0, true)).start();
        let lease = lease(&kv, 0).await;
        let nothing = Join { key: Key(1), own: lease.own().to_vec(), cross: lease.cross().to_vec() };
        let turn = Turn { joins: vec![nothing], ..Turn::default() };
        let plan = within(kv.send(turn)).await.expect("kv replies");
        assert_eq!((plan.slots, plan.tables), (vec![(0, Key(1))], vec![]));
        let rendered = recorder.handle().render();
        let usage = rendered.lines().find(|line| line.starts_with(telemetry::KV_CACHE_USAGE.name));
        assert!(usage.is_some_and(|line| line.ends_with(" 0")), "{rendered}");
    }

    #[actix::test]
    async fn a_reset_frees_every_slot_and_no_page() {
        let kv = kv(3, 6, true).start();
        let lease = lease(&kv, 2).await;
        within(kv.send(turn([], [1, 2, 3]))).await.expect("kv replies");
        assert_eq!(held(&kv).await, (3, 2));
        kv.do_send(Reset { lane: 0 });
        assert_eq!(held(&kv).await, (0, 2), "pages stay with their leases");
        let plan = within(kv.send(turn([], [4, 5, 6]))).await.expect("kv replies");
        assert_eq!((plan.slots.len(), plan.window), (3, 0..3));
        drop(lease);
        assert_eq!(held(&kv).await, (3, 0));
    }

    #[actix::test]
    async fn a_reset_concerns_its_lane_alone() {
        let kv = Kv::new(5, 2, true, PagePool::new(2, PAGE)).start();
        let of_lane = |lane, turn: Turn| kv.send(Turn { lane, ..turn });
        within(of_lane(0, turn([], [1, 2, 3]))).await.expect("kv replies");
        let plan = within(of_lane(1, turn([], [4, 5]))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(3, Key(4)), (4, Key(5))], 3..5));
        kv.do_send(Reset { lane: 0 });
        assert_eq!(held(&kv).await.0, 2);
        let plan = within(of_lane(1, turn([4], []))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(4, Key(5))], 4..5));
        let plan = within(of_lane(0, turn([], [6]))).await.expect("kv replies");
        assert_eq!((plan.slots, plan.window), (vec![(0, Key(6))], 0..1));
    }

    #[test]
    fn those_who_join_fill_the_holes_so_that_nobody_has_to_move() {
        let mut kv = kv(5, 1, true);
        kv.turn(turn([], [1, 2, 3, 4, 5]));
        let plan = kv.turn(turn([2, 4], [6, 7]));
        assert_eq!((plan.moves.len(), plan.window), (0, 0..5));
        let holders = [(0, 1), (1, 6), (2, 3), (3, 7), (4, 5)].map(|(slot, key)| (slot, Key(key)));
        assert_eq!(plan.slots, holders);
        let slots: Vec<Slot> = plan.tables.iter().map(|entry| entry.slot).collect();
        assert_eq!(slots, [1, 1, 1, 3, 3, 3]);
    }

    /// A device's page tables as the moves and updates of its steps leave them: per slot, two entries of its
    /// own table and one of the cross table.
    type Tables = Vec<[Page; 3]>;

    /// Asserts what holds for every plan: the slots are the lane's and contiguous under the shuffle, and each
    /// sequence finds its pages in its slot's tables once moves and then updates are applied.
    fn check(plan: &Plan, own: &Range<Slot>, live: &[u64], tables: &mut Tables, shuffle: bool) {
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
    struct Population {
        own: Range<Slot>,
        /// Each sequence's slot, as the last plan gave it.
        live: BTreeMap<u64, Slot>,
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
            let mut kv = Kv::new(slots, lanes, shuffle, PagePool::new(2, PAGE));
            let (mut tables, mut next_key, mut moves) = (vec![[0; 3]; slots], 1, 0);
            let of = |own| Population { own, live: BTreeMap::new() };
            let mut all: Vec<Population> = divided(slots, lanes).map(of).collect();
            for round in 0..400 * lanes as u32 {
                let dice = philox([round, 0, 0, 0], [slots as u32, lanes as u32]);
                let lane = dice[2] as usize % lanes;
                let Population { own, live } = &mut all[lane];
                let leaves = |key: &&u64| (dice[0] >> (**key % 31)).is_multiple_of(3);
                let gone: Vec<u64> = live.keys().filter(leaves).copied().collect();
                live.retain(|key, _| !gone.contains(key));
                let joins = u64::from(dice[1]) % (own.len() - live.len() + 1) as u64;
                let joined = next_key..next_key + joins;
                next_key += joins;
                let plan = kv.turn(Turn { lane, ..turn(gone, joined.clone()) });
                live.extend(joined.map(|key| (key, 0)));
                let keys: Vec<u64> = live.keys().copied().collect();
                check(&plan, own, &keys, &mut tables, shuffle);
                live.extend(plan.slots.iter().map(|(slot, key)| (key.0, *slot)));
                moves += plan.moves.len();
                // Updates of one lane must not affect the pages of any other.
                for (key, slot) in all.iter().flat_map(|lane| &lane.live) {
                    assert_eq!(tables[*slot as usize], pages(*key), "sequence {key}, round {round}");
                }
            }
            assert_eq!(moves > 0, shuffle && slots > 2 * lanes, "{slots} slots in {lanes} lanes");
        }
    }
}
