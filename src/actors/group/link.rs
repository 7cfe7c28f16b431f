//! The connection from a stage to the next one, used by the rank that hands steps over.
//!
//! It transports batches and the bytes of residual streams, so the other end may be in another process or
//! host. Invariant: steps arrive at every rank of the next stage, in the order in which they were sent. A
//! link within a process allocates its buffers at creation.

use super::mailbox::{Mailbox, Order, Parcel};
use mainstem_kernels::{Carried, StepBatch, StepLimits};
use std::sync::Arc;

/// The sending end of a link.
pub trait Link: Send {
    /// Returns the buffer for the next hand-off. It has capacity for any step, and may contain the bytes of
    /// an earlier one.
    fn room(&mut self) -> &mut Carried;

    /// Sends the step, with the content of the buffer.
    fn hand_on(&mut self, batch: &Arc<StepBatch>);
}

/// Creates a link to the ranks of the next stage. [`local`] is the implementation within a process.
pub type Linking = Arc<dyn Fn(Vec<Post>, Room) -> Box<dyn Link> + Send + Sync>;

/// Sends steps to one rank of the next stage.
#[derive(Clone)]
pub struct Post {
    mailbox: Arc<Mailbox>,
    build: u64,
}

/// The maximum size of activation hand-offs.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub limits: StepLimits,
    /// Width of the residual stream.
    pub width: usize,
    /// Maximum number of steps on the group's devices at once.
    pub steps: usize,
}

impl Post {
    pub(super) fn new(mailbox: Arc<Mailbox>, build: u64) -> Post {
        Post { mailbox, build }
    }

    /// Sends a step and the activations of the previous stage.
    pub fn deliver(&self, batch: Arc<StepBatch>, handoff: Arc<Carried>) {
        self.mailbox.put(Order::Run(Parcel { build: self.build, batch, carried: Some(handoff) }));
    }
}

impl Room {
    /// Allocates empty hand-off buffers of this capacity.
    pub fn carried(&self) -> Carried {
        Carried::with_capacity(&self.limits, self.width)
    }

    /// Returns the number of buffers of a link within a process: one per step in flight, and one for the step
    /// completed last, which a rank of the next stage may still read. It cannot read an earlier one, because
    /// the ranks of a stage synchronize in every step.
    fn buffers(&self) -> usize {
        self.steps + 1
    }

    /// Returns the bytes of a link within a process.
    pub fn bytes(&self) -> usize {
        Carried::bytes(&self.limits, self.width).saturating_mul(self.buffers())
    }
}

/// Creates a link within a process: the ranks of the next stage read the buffers that this one wrote, without
/// copies.
pub fn local(senders: Vec<Post>, capacity: Room) -> Box<dyn Link> {
    let buffers = (0..capacity.buffers()).map(|_| Arc::new(capacity.carried())).collect();
    Box::new(Local { posts: senders, buffers, at: 0 })
}

/// A link within a process.
struct Local {
    posts: Vec<Post>,
    /// Reused when nobody reads them any more.
    buffers: Vec<Arc<Carried>>,
    /// Index of the buffer being written.
    at: usize,
}

impl Link for Local {
    fn room(&mut self) -> &mut Carried {
        let free = self.buffers.iter_mut().position(|buffer| Arc::get_mut(buffer).is_some());
        self.at = free.expect("there are more buffers than steps in flight; anything else is a bug");
        Arc::get_mut(&mut self.buffers[self.at]).expect("the buffer is free, as seen above")
    }

    fn hand_on(&mut self, batch: &Arc<StepBatch>) {
        for sender in &self.posts {
            sender.deliver(batch.clone(), self.buffers[self.at].clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::testing::LIMITS;

    fn link() -> (Box<dyn Link>, [Arc<Mailbox>; 2], StepLimits) {
        let boxes = [(); 2].map(|()| Arc::new(Mailbox::new(2)));
        let limits = LIMITS;
        let senders = boxes.iter().map(|mailbox| Post::new(mailbox.clone(), 7)).collect();
        (local(senders, Room { limits, width: 2, steps: 2 }), boxes, limits)
    }

    fn taken(mailbox: &Mailbox) -> (u64, u64, Arc<Carried>) {
        match mailbox.take() {
            Some(Order::Run(Parcel { build, batch, carried: Some(handoff) })) => (build, batch.step, handoff),
            _ => panic!("expected a step"),
        }
    }

    /// A model without an encoder or without a decoder hands nothing over for it.
    #[test]
    fn a_link_takes_what_was_foretold() {
        for (positions, source_positions, stacks) in [(9, 0, 1), (0, 9, 1), (9, 9, 2)] {
            let (_, _, limits) = link();
            let limits = StepLimits { positions, source_positions, ..limits };
            let capacity = Room { limits, width: 2, steps: 3 };
            let Carried { encoder, decoder } = capacity.carried();
            let made = (encoder.capacity() + decoder.capacity()) * capacity.buffers();
            assert_eq!((capacity.bytes(), made), (4 * stacks * 4 * 2 * 4, capacity.bytes()));
        }
    }

    #[test]
    fn every_member_reads_the_same_bytes_and_a_buffer_is_written_when_all_have_read_it() {
        let (mut link, [first, second], _) = link();
        let mut send = |step: u64| {
            let buffer = link.room();
            buffer.decoder.clear();
            buffer.decoder.push(step as u8);
            link.hand_on(&Arc::new(StepBatch { step, ..StepBatch::default() }));
        };
        send(1);
        send(2);
        let ((build, step, one), (_, _, other)) = (taken(&first), taken(&second));
        assert_eq!((build, step, &one.decoder[..]), (7, 1, &[1][..]));
        assert!(Arc::ptr_eq(&one, &other), "the buffer is shared, not copied");
        let used = Arc::as_ptr(&one);
        drop(one);
        // The second rank has not read the first step yet.
        send(3);
        assert_eq!(other.decoder, [1]);
        drop(other);
        send(4);
        let last: Vec<_> = (2..=4).map(|_| taken(&second)).collect();
        assert_eq!(last.iter().map(|(_, step, _)| *step).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(last.iter().map(|(_, _, handoff)| handoff.decoder[0]).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(Arc::as_ptr(&last[2].2), used, "buffers are allocated at creation only");
    }
}
