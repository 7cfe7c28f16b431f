//! What a device's thread is told, and where it waits for it.
//!
//! Invariant: orders are taken in the order in which they were put; who waits uses no CPU.

use super::link::Link;
use mainstem_kernels::{Abort, Carried, Collective, StepBatch};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What a device is to do.
pub(in crate::actors) enum Order {
    /// Drop the executor, and say so.
    Clear,
    /// Build one that exchanges sums by this collective, and say so.
    Build(Seat, Box<dyn Collective>),
    /// Do its part of a step.
    Run(Parcel),
}

/// A step on its way to a device. All members of a stage read the same.
pub(in crate::actors) struct Parcel {
    /// That of whoever sent it: what comes from before a fault is no order any more.
    pub build: u64,
    pub batch: Arc<StepBatch>,
    /// What the stage before gave.
    pub carried: Option<Arc<Carried>>,
}

/// A device's place in the group, from one build to the next.
pub(in crate::actors) struct Seat {
    /// How often the group has been built.
    pub build: u64,
    /// The group was given up: nothing that comes of a step is wanted.
    pub abort: Abort,
    pub duty: Duty,
}

/// What becomes of a member's part of a step.
pub(in crate::actors) enum Duty {
    /// It is what the others of its stage have too.
    Nothing,
    /// The next stage gets it.
    HandOn(Box<dyn Link>),
    /// It is the step's result.
    Answer,
}

/// A device's orders.
pub(in crate::actors) struct Mailbox {
    inbox: Mutex<Inbox>,
    come: Condvar,
}

struct Inbox {
    orders: VecDeque<Order>,
    open: bool,
}

/// Orders beside steps that may wait.
const BESIDE: usize = 4;

impl Mailbox {
    /// For a device of a group that has so many steps on its devices at most. It does not grow.
    pub fn new(steps: usize) -> Mailbox {
        let inbox = Inbox { orders: VecDeque::with_capacity(steps + BESIDE), open: true };
        Mailbox { inbox: Mutex::new(inbox), come: Condvar::new() }
    }

    /// Leaves an order; once closed, throws it away.
    pub fn put(&self, order: Order) {
        let mut inbox = self.lock();
        if inbox.open {
            inbox.orders.push_back(order);
            drop(inbox);
            self.come.notify_one();
        }
    }

    /// The next order, as soon as there is one; `None` once closed.
    pub fn take(&self) -> Option<Order> {
        let mut inbox = self.lock();
        loop {
            match inbox.orders.pop_front() {
                Some(order) => return Some(order),
                None if !inbox.open => return None,
                None => inbox = self.come.wait(inbox).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Takes no more orders, and forgets those that wait.
    pub fn close(&self) {
        let mut inbox = self.lock();
        inbox.open = false;
        let forgotten = std::mem::take(&mut inbox.orders);
        drop(inbox);
        self.come.notify_one();
        drop(forgotten);
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
