//! The way from a stage to the next, for the one member of it that hands a step on.
//!
//! What goes over it is a batch and the bytes of residual streams: a process or a host that is not this one can be at the
//! other end. Invariant: steps arrive at every member of the next stage, in the order in which they were handed on. What a
//! link within a process needs for that is made with it.

use super::mailbox::{Mailbox, Order, Parcel};
use mainstem_kernels::{Carried, StepBatch, StepLimits};
use std::sync::Arc;

/// The sending end.
pub trait Link: Send {
    /// Where the stage lays what it hands on next. It has room for any step, and may have an old one's bytes.
    fn room(&mut self) -> &mut Carried;

    /// Hands the step on, with what lies in the room.
    fn hand_on(&mut self, batch: &Arc<StepBatch>);
}

/// Makes links: from what goes to each member of the next stage. [`local`] is the one within a process.
pub type Linking = Arc<dyn Fn(Vec<Post>, Room) -> Box<dyn Link> + Send + Sync>;

/// Where a member of the next stage gets its steps.
#[derive(Clone)]
pub struct Post {
    mailbox: Arc<Mailbox>,
    build: u64,
}

/// How large what is carried can be.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub limits: StepLimits,
    /// Width of the residual stream.
    pub width: usize,
    /// Steps on the group's devices at once, at most.
    pub steps: usize,
}

impl Post {
    pub(super) fn new(mailbox: Arc<Mailbox>, build: u64) -> Post {
        Post { mailbox, build }
    }

    /// Leaves a step there.
    pub fn deliver(&self, batch: Arc<StepBatch>, carried: Arc<Carried>) {
        self.mailbox.put(Order::Run(Parcel { build: self.build, batch, carried: Some(carried) }));
    }
}

impl Room {
    /// Empty buffers of that size.
    pub fn carried(&self) -> Carried {
        Carried::with_capacity(&self.limits, self.width)
    }

    /// Buffers of a link within a process: one for each step, and one for that which was answered last, which a member of
    /// the next stage may still have. It can have none before that, for the members of a stage meet in every step.
    fn buffers(&self) -> usize {
        self.steps + 1
    }

    /// Bytes that a link within a process takes.
    pub fn bytes(&self) -> usize {
        Carried::bytes(&self.limits, self.width).saturating_mul(self.buffers())
    }
}

/// The link within a process: the members of the next stage read what this one wrote, where it wrote it.
pub fn local(posts: Vec<Post>, room: Room) -> Box<dyn Link> {
    let buffers = (0..room.buffers()).map(|_| Arc::new(room.carried())).collect();
    Box::new(Local { posts, buffers, at: 0 })
}

struct Local {
    posts: Vec<Post>,
    /// Used again when nobody reads them any more.
    buffers: Vec<Arc<Carried>>,
    /// The one that is written.
    at: usize,
}

impl Link for Local {
    fn room(&mut self) -> &mut Carried {
        let free = self.buffers.iter_mut().position(|buffer| Arc::get_mut(buffer).is_some());
        self.at = free.expect("there are more than steps on the devices, else this is a bug");
        Arc::get_mut(&mut self.buffers[self.at]).expect("nobody else has it, else this is a bug")
    }

    fn hand_on(&mut self, batch: &Arc<StepBatch>) {
        for post in &self.posts {
            post.deliver(batch.clone(), self.buffers[self.at].clone());
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
        let posts = boxes.iter().map(|mailbox| Post::new(mailbox.clone(), 7)).collect();
        (local(posts, Room { limits, width: 2, steps: 2 }), boxes, limits)
    }

    fn taken(mailbox: &Mailbox) -> (u64, u64, Arc<Carried>) {
        match mailbox.take() {
            Some(Order::Run(Parcel { build, batch, carried: Some(carried) })) => (build, batch.step, carried),
            _ => panic!("a step was handed on"),
        }
    }

    /// A stack that is not there hands nothing on.
    #[test]
    fn a_link_takes_what_was_foretold() {
        for (positions, source_positions, stacks) in [(9, 0, 1), (0, 9, 1), (9, 9, 2)] {
            let (_, _, limits) = link();
            let limits = StepLimits { positions, source_positions, ..limits };
            let room = Room { limits, width: 2, steps: 3 };
            let Carried { encoder, decoder } = room.carried();
            let made = (encoder.capacity() + decoder.capacity()) * room.buffers();
            assert_eq!((room.bytes(), made), (4 * stacks * 4 * 2 * 4, room.bytes()));
        }
    }

    #[test]
    fn every_member_reads_the_same_bytes_and_a_buffer_is_written_when_all_have_read_it() {
        let (mut link, [first, second], _) = link();
        let mut send = |step: u64| {
            let room = link.room();
            room.decoder.clear();
            room.decoder.push(step as u8);
            link.hand_on(&Arc::new(StepBatch { step, ..StepBatch::default() }));
        };
        send(1);
        send(2);
        let ((build, step, one), (_, _, other)) = (taken(&first), taken(&second));
        assert_eq!((build, step, &one.decoder[..]), (7, 1, &[1][..]));
        assert!(Arc::ptr_eq(&one, &other), "it is moved, not copied");
        let used = Arc::as_ptr(&one);
        drop(one);
        // The second member has not read the first step's yet.
        send(3);
        assert_eq!(other.decoder, [1]);
        drop(other);
        send(4);
        let last: Vec<_> = (2..=4).map(|_| taken(&second)).collect();
        assert_eq!(last.iter().map(|(_, step, _)| *step).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(last.iter().map(|(_, _, carried)| carried.decoder[0]).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(Arc::as_ptr(&last[2].2), used, "no buffer is made but at start");
    }
}
