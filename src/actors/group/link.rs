//! The connection from a stage to the next one, used by the rank that hands steps over.
//!
//! It transports batches and the bytes of residual streams, so the other end may be in another process or
//! host. Invariant: steps arrive at every rank of the next stage, in the order in which they were sent. A
//! link within a process allocates its buffers at creation.

pub use super::mailbox::Link;

use super::mailbox::{Command, Mailbox, StepMessage};
use mainstem_kernels::{ActivationHandoff, StepBatch, StepLimits};
use std::sync::Arc;

/// Creates a link to the ranks of the next stage. [`local`] is the implementation within a process.
pub type LinkFactory = Arc<dyn Fn(Vec<StepSender>, Capacity) -> Box<dyn Link> + Send + Sync>;

/// Sends steps to one rank of the next stage.
#[derive(Clone)]
pub struct StepSender {
    mailbox: Arc<Mailbox>,
    build: u64,
}

/// The maximum size of activation hand-offs.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub limits: StepLimits,
    /// Bytes of a row of the residual stream.
    pub row_bytes: usize,
    /// Maximum number of steps on the group's devices at once.
    pub max_steps: usize,
}

impl StepSender {
    pub(super) fn new(mailbox: Arc<Mailbox>, build: u64) -> StepSender {
        StepSender { mailbox, build }
    }

    /// Sends a step and the activations of the previous stage.
    pub fn send(&self, batch: Arc<StepBatch>, handoff: Arc<ActivationHandoff>) {
        self.mailbox.send(Command::Run(StepMessage { build: self.build, batch, handoff: Some(handoff) }));
    }
}

impl Capacity {
    /// Allocates empty hand-off buffers of this capacity.
    pub fn new_handoff(&self) -> ActivationHandoff {
        ActivationHandoff::with_capacity(&self.limits, self.row_bytes)
    }

    /// Returns the number of buffers of a link within a process: one per step in flight, and one for the step
    /// completed last, which a rank of the next stage may still read. It cannot read an earlier one, because
    /// the ranks of a stage synchronize in every step.
    fn buffer_count(&self) -> usize {
        self.max_steps + 1
    }

    /// Returns the bytes of a link within a process.
    pub fn bytes(&self) -> usize {
        ActivationHandoff::capacity_bytes(&self.limits, self.row_bytes).saturating_mul(self.buffer_count())
    }
}

/// Creates a link within a process: the ranks of the next stage read the buffers that this one wrote, without
/// copies.
pub fn local(senders: Vec<StepSender>, capacity: Capacity) -> Box<dyn Link> {
    let buffers = (0..capacity.buffer_count()).map(|_| Arc::new(capacity.new_handoff())).collect();
    Box::new(LocalLink { senders, buffers, current: 0 })
}

/// A link within a process.
struct LocalLink {
    senders: Vec<StepSender>,
    /// Reused when nobody reads them any more.
    buffers: Vec<Arc<ActivationHandoff>>,
    /// Index of the buffer being written.
    current: usize,
}

impl Link for LocalLink {
    fn buffer(&mut self) -> &mut ActivationHandoff {
        let free = self.buffers.iter_mut().position(|buffer| Arc::get_mut(buffer).is_some());
        self.current = free.expect("there are more buffers than steps in flight; anything else is a bug");
        Arc::get_mut(&mut self.buffers[self.current]).expect("the buffer is free, as seen above")
    }

    fn send(&mut self, batch: &Arc<StepBatch>) {
        for sender in &self.senders {
            sender.send(batch.clone(), self.buffers[self.current].clone());
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
        let senders = boxes.iter().map(|mailbox| StepSender::new(mailbox.clone(), 7)).collect();
        (local(senders, Capacity { limits, row_bytes: 8, max_steps: 2 }), boxes, limits)
    }

    fn receive(mailbox: &Mailbox) -> (u64, u64, Arc<ActivationHandoff>) {
        match mailbox.receive() {
            Some(Command::Run(StepMessage { build, batch, handoff: Some(handoff) })) => {
                (build, batch.step, handoff)
            }
            _ => panic!("expected a step"),
        }
    }

    /// A model without an encoder or without a decoder hands nothing over for it.
    #[test]
    fn a_link_allocates_the_announced_bytes() {
        for (positions, encoder_positions, stacks) in [(9, 0, 1), (0, 9, 1), (9, 9, 2)] {
            let (_, _, limits) = link();
            let limits = StepLimits { positions, encoder_positions, ..limits };
            let capacity = Capacity { limits, row_bytes: 6, max_steps: 3 };
            let ActivationHandoff { encoder, decoder } = capacity.new_handoff();
            let made = (encoder.capacity() + decoder.capacity()) * capacity.buffer_count();
            assert_eq!((capacity.bytes(), made), (4 * stacks * 4 * 6, capacity.bytes()));
        }
    }

    #[test]
    fn all_ranks_read_the_same_buffer_and_it_is_reused_after_that() {
        let (mut link, [first, second], _) = link();
        let mut send = |step: u64| {
            let buffer = link.buffer();
            buffer.decoder.clear();
            buffer.decoder.push(step as u8);
            link.send(&Arc::new(StepBatch { step, ..StepBatch::default() }));
        };
        send(1);
        send(2);
        let ((build, step, one), (_, _, other)) = (receive(&first), receive(&second));
        assert_eq!((build, step, &one.decoder[..]), (7, 1, &[1][..]));
        assert!(Arc::ptr_eq(&one, &other), "the buffer is shared, not copied");
        let used = Arc::as_ptr(&one);
        drop(one);
        // The second rank has not read the first step yet.
        send(3);
        assert_eq!(other.decoder, [1]);
        drop(other);
        send(4);
        let last: Vec<_> = (2..=4).map(|_| receive(&second)).collect();
        assert_eq!(last.iter().map(|(_, step, _)| *step).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(last.iter().map(|(_, _, handoff)| handoff.decoder[0]).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(Arc::as_ptr(&last[2].2), used, "buffers are allocated at creation only");
    }
}
