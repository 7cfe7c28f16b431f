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
        telemetry::SLOTS_LIVE.set(self.slots.live() as f64);
        telemetry::KV_CACHE_USAGE.set(self.pages.used() as f64 / self.pages.total() as f64);
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
        Kv { slots: SlotMap::new(slots, shuffle), pages, short: VecDeque::new() }
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
