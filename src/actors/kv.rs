//! The KV-buffer manager: who holds which slot and which pages.
//!
//! Owns the slot map (with the sliding-window shuffle) and the page pool. Never touches a device: its plan
//! rides on the next step.
//! Invariant: slots are given, moved and taken back only in a [`Turn`], between two steps.

use super::sequence::Key;
use super::stream::EventSender;
use crate::memory::{Lease, PagePool, SlotMap};
use crate::telemetry;
use actix::{Actor, Context, Handler, Message, MessageResult, ResponseFuture};
use mainstem_kernels::batch::{Page, Slot};
use mainstem_kernels::{PageCopy, SlotMove, TableUpdate};
use metrics::Gauge;
use std::collections::VecDeque;
use std::ops::Range;
use tokio::sync::oneshot;

/// Asks for pages. Answered when there are enough, in the order of asking; `None` when the client left.
#[derive(Message)]
#[rtype(result = "Option<Lease>")]
pub struct Reserve {
    pub positions: usize,
    pub client: EventSender,
}

/// Leases were dropped elsewhere: see whether somebody waits for their pages.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Returned;

/// What changed since the last turn.
#[derive(Message, Default)]
#[rtype(result = "Plan")]
pub struct Turn {
    /// Sequences that left.
    pub finished: Vec<Key>,
    /// Sequences that need a slot, with the pages they hold.
    pub joins: Vec<(Key, Vec<Page>)>,
}

/// Where everything is in the next step, and what must be done to get it there.
#[derive(Debug, Default)]
pub struct Plan {
    /// Holders of slots, by slot. With the shuffle on they fill `window`.
    pub slots: Vec<(Slot, Key)>,
    /// From the lowest slot held to the highest.
    pub window: Range<Slot>,
    pub moves: Vec<SlotMove>,
    pub copies: Vec<PageCopy>,
    pub tables: Vec<TableUpdate>,
}

/// The device lost everything: no slot is held any more.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Reset;

/// Asks for (slots held, pages used): what tests and checks look at.
#[derive(Message)]
#[rtype(result = "(usize, usize)")]
pub struct Held;

/// The actor.
pub struct Kv {
    slots: SlotMap<Key>,
    pages: PagePool,
    /// Who waits for pages, in the order of asking.
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

    fn handle(&mut self, turn: Turn, _: &mut Self::Context) -> Self::Result {
        let plan = self.turn(turn);
        self.serve_short();
        self.slots_live.set(self.slots.live() as f64);
        self.pages_used.set(self.pages.used() as f64 / self.pages.total() as f64);
        MessageResult(plan)
    }
}

impl Handler<Reset> for Kv {
    type Result = ();

    fn handle(&mut self, _: Reset, _: &mut Self::Context) {
        for slot in self.slots.window() {
            if self.slots.get(slot).is_some() {
                self.slots.leave(slot);
            }
        }
        self.serve_short();
    }
}

impl Handler<Held> for Kv {
    type Result = MessageResult<Held>;

    fn handle(&mut self, _: Held, _: &mut Self::Context) -> Self::Result {
        self.slots.check();
        self.pages.check();
        MessageResult((self.slots.live(), self.pages.used()))
    }
}

impl Kv {
    /// A manager of `slots` slots and of `pages`, all of them free.
    pub fn new(slots: usize, shuffle: bool, pages: PagePool) -> Kv {
        Kv {
            slots: SlotMap::new(slots, shuffle),
            pages,
            short: VecDeque::new(),
            slots_live: telemetry::SLOTS_LIVE.gauge(),
            pages_used: telemetry::KV_CACHE_USAGE.gauge(),
        }
    }

    /// The finished leave, the new ones join (in a hole, if there is one), and what holes remain are closed
    /// by the shuffle.
    fn turn(&mut self, turn: Turn) -> Plan {
        let mut plan = Plan::default();
        for key in turn.finished {
            let slot = self.slots.slot_of(key).expect("a finished sequence holds a slot, else this is a bug");
            self.slots.leave(slot);
        }
        for (key, _) in &turn.joins {
            self.slots.join(*key).expect("a permit promises a slot, else this is a bug");
        }
        self.slots.compact(&mut plan.moves);
        for (key, pages) in turn.joins {
            let slot = self.slots.slot_of(key).expect("it joined above, else this is a bug");
            let entries = (0..).zip(pages).map(|(index, page)| TableUpdate { slot, index, page });
            plan.tables.extend(entries);
        }
        plan.slots.extend(self.slots.iter());
        plan.window = self.slots.window();
        plan
    }

    /// Gives pages to those who wait for them, in order, as far as they go. Who hung up waits no longer,
    /// wherever in the line.
    fn serve_short(&mut self) {
        self.short.retain(|(wish, _)| !wish.client.is_closed());
        while let Some((wish, _)) = self.short.front() {
            let Some(lease) = self.pages.reserve(wish.positions) else { return };
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
        Kv::new(slots, shuffle, PagePool::new(pages + 1, PAGE))
    }

    /// Asks for `pages` pages, now; the answer can be awaited later. With the client who asks.
    fn reserve(kv: &Addr<Kv>, pages: usize) -> (impl Future<Output = Option<Lease>> + use<>, TokenStream) {
        let (client, stream) = channel();
        let reply = kv.send(Reserve { positions: pages * PAGE, client });
        (async { within(reply).await.expect("kv answers") }, stream)
    }

    async fn lease(kv: &Addr<Kv>, pages: usize) -> Lease {
        let (reply, _client) = reserve(kv, pages);
        reply.await.expect("there are enough pages")
    }

    async fn held(kv: &Addr<Kv>) -> (usize, usize) {
        within(kv.send(Held)).await.expect("kv answers")
    }

    fn keys(keys: impl IntoIterator<Item = u64>) -> Vec<Key> {
        keys.into_iter().map(Key).collect()
    }

    fn turn(finished: impl IntoIterator<Item = u64>, joins: impl IntoIterator<Item = u64>) -> Turn {
        // Each sequence's pages tell whose they are.
        let pages = |key: u64| vec![key as Page * 2, key as Page * 2 + 1];
        Turn {
            finished: keys(finished),
            joins: joins.into_iter().map(|key| (Key(key), pages(key))).collect(),
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Word {
        Turn,
        Returned,
        Reserve,
        Reset,
    }

    const WORDS: [Word; 4] = [Word::Turn, Word::Returned, Word::Reserve, Word::Reset];

    /// Anything that kv can hear. A wish's client comes back: dropping it would be a word too.
    async fn say(kv: &Addr<Kv>, word: Word) -> Option<TokenStream> {
        match word {
            Word::Turn => _ = within(kv.send(Turn::default())).await,
            Word::Returned => kv.do_send(Returned),
            Word::Reset => kv.do_send(Reset),
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
        assert_eq!(held(&kv).await, (0, 2), "the small wish fits, and stands behind the big one");
        drop(first);
        kv.do_send(Returned);
        let leases =
            [big.await, small.await].map(|lease| lease.expect("there are enough pages").pages().len());
        assert_eq!(leases, [3, 1]);
    }

    #[actix::test]
    async fn whatever_kv_hears_serves_those_who_wait_for_pages() {
        for word in WORDS {
            let kv = kv(1, 2, true).start();
            let all = lease(&kv, 2).await;
            let (waiting, _client) = reserve(&kv, 1);
            assert_eq!(held(&kv).await, (0, 2), "{word:?}");
            drop(all);
            let _asking = say(&kv, word).await;
            assert!(waiting.await.is_some(), "{word:?}");
        }
    }

    #[actix::test]
    async fn whatever_kv_hears_sends_those_away_who_hung_up_wherever_they_stand() {
        for word in WORDS {
            let kv = kv(1, 2, true).start();
            let all = lease(&kv, 2).await;
            let (head, _client) = reserve(&kv, 2);
            let (behind, leaving) = reserve(&kv, 1);
            assert_eq!(held(&kv).await, (0, 2), "{word:?}");
            drop(leaving);
            let _asking = say(&kv, word).await;
            assert!(behind.await.is_none(), "{word:?}");
            drop(all);
            kv.do_send(Returned);
            assert!(head.await.is_some(), "{word:?}: the head of the line stays where it is");
        }
    }

    #[actix::test]
    async fn a_reset_frees_every_slot_and_no_page() {
        let kv = kv(3, 6, true).start();
        let lease = lease(&kv, 2).await;
        within(kv.send(turn([], [1, 2, 3]))).await.expect("kv answers");
        assert_eq!(held(&kv).await, (3, 2));
        kv.do_send(Reset);
        assert_eq!(held(&kv).await, (0, 2), "pages are their leases'");
        let plan = within(kv.send(turn([], [4, 5, 6]))).await.expect("kv answers");
        assert_eq!((plan.slots.len(), plan.window), (3, 0..3));
        drop(lease);
        assert_eq!(held(&kv).await, (3, 0));
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
        assert_eq!(slots, [1, 1, 3, 3]);
    }

    /// A device's page tables, as its steps' moves and updates leave them.
    type Tables = Vec<[Page; 2]>;

    /// What must be true of every plan: the slots are contiguous under the shuffle, and whoever holds one
    /// finds its own pages there once moves and then updates are applied.
    fn check(plan: &Plan, live: &[u64], tables: &mut Tables, shuffle: bool) {
        for m in &plan.moves {
            tables[m.to as usize] = tables[m.from as usize];
        }
        for entry in &plan.tables {
            tables[entry.slot as usize][entry.index as usize] = entry.page;
        }
        let held: BTreeMap<u64, Slot> = plan.slots.iter().map(|(slot, key)| (key.0, *slot)).collect();
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), live);
        for (key, slot) in &held {
            assert_eq!(tables[*slot as usize], [*key as Page * 2, *key as Page * 2 + 1], "sequence {key}");
        }
        let slots: Vec<Slot> = plan.slots.iter().map(|(slot, _)| *slot).collect();
        let (first, last) = (slots.first(), slots.last());
        assert_eq!(plan.window, first.map_or(0..0, |first| *first..last.expect("there is one") + 1));
        if shuffle {
            assert_eq!(slots, plan.window.clone().collect::<Vec<_>>());
        } else {
            assert!(plan.moves.is_empty());
        }
    }

    /// Random turns of every kind, down to nobody and up to all slots.
    #[test]
    fn every_plan_keeps_the_pages_with_their_sequences() {
        for (slots, shuffle) in [(1, true), (6, true), (6, false), (13, true), (13, false)] {
            let mut kv = kv(slots, 1, shuffle);
            let (mut tables, mut live, mut next_key) = (vec![[0; 2]; slots], Vec::<u64>::new(), 1);
            let mut moves = 0;
            for round in 0..400u32 {
                let dice = philox([round, 0, 0, 0], [slots as u32, 0]);
                let (gone, left) =
                    live.iter().partition::<Vec<u64>, _>(|key| (dice[0] >> (*key % 31)).is_multiple_of(3));
                let joins = dice[1] as u64 % (slots - left.len() + 1) as u64;
                let joined = next_key..next_key + joins;
                next_key += joins;
                let plan = kv.turn(turn(gone, joined.clone()));
                live = left.into_iter().chain(joined).collect();
                moves += plan.moves.len();
                check(&plan, &live, &mut tables, shuffle);
            }
            assert_eq!(moves > 0, shuffle && slots > 1, "{slots} slots");
        }
    }
}
