//! Commands to a device's thread, and the mailbox in which they wait.
//!
//! Invariant: commands are received in the order in which they were sent; waiting uses no CPU.

use mainstem_kernels::{Abort, ActivationHandoff, Collective, StepBatch};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A command to a device.
pub(in crate::actors) enum Command {
    /// Drop the executor, and report it.
    Clear,
    /// Build an executor that uses this collective, and report the result.
    Build(Assignment, Box<dyn Collective>),
    /// Run this device's part of a step.
    Run(StepMessage),
}

/// A step on its way to a device. All ranks of a stage share one batch.
pub(in crate::actors) struct StepMessage {
    /// The sender's build: steps of an earlier build are ignored.
    pub build: u64,
    pub batch: Arc<StepBatch>,
    /// Activations from the previous stage; `None` for the first stage.
    pub handoff: Option<Arc<ActivationHandoff>>,
}

/// A device's assignment in the group, from one build to the next.
pub(in crate::actors) struct Assignment {
    /// Number of this build.
    pub build: u64,
    /// Aborted when the build is given up: results of its steps are not needed then.
    pub abort: Abort,
    pub role: Role,
}

/// The task of a rank after computing its part of a step.
pub(in crate::actors) enum Role {
    /// Nothing: the other ranks of its stage compute the same result.
    Nothing,
    /// Hand the activations over to the next stage.
    HandOver(Box<dyn Link>),
    /// Return the step's results.
    ReturnResults,
}

/// The sending end of the connection from a stage to the next one.
pub trait Link: Send {
    /// Returns the buffer for the next hand-off. It has capacity for any step, and may contain the bytes of
    /// an earlier one.
    fn buffer(&mut self) -> &mut ActivationHandoff;

    /// Sends the step, with the content of the buffer.
    fn send(&mut self, batch: &Arc<StepBatch>);
}

/// The command queue of a device.
pub(in crate::actors) struct Mailbox {
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

struct Inbox {
    commands: VecDeque<Command>,
    open: bool,
}

/// Number of commands besides steps that may wait.
const CONTROL_COMMANDS: usize = 4;

impl Mailbox {
    /// Creates a mailbox for a group with at most `steps` steps in flight. It does not grow.
    pub fn new(steps: usize) -> Mailbox {
        let inbox = Inbox { commands: VecDeque::with_capacity(steps + CONTROL_COMMANDS), open: true };
        Mailbox { inbox: Mutex::new(inbox), changed: Condvar::new() }
    }

    /// Sends a command; a closed mailbox drops it.
    pub fn send(&self, command: Command) {
        let mut inbox = self.lock();
        if inbox.open {
            inbox.commands.push_back(command);
            drop(inbox);
            self.changed.notify_one();
        }
    }

    /// Waits for the next command; `None` once the mailbox is closed.
    pub fn receive(&self) -> Option<Command> {
        let mut inbox = self.lock();
        loop {
            match inbox.commands.pop_front() {
                Some(command) => return Some(command),
                None if !inbox.open => return None,
                None => inbox = self.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Closes the mailbox, and drops the waiting commands.
    pub fn close(&self) {
        let mut inbox = self.lock();
        inbox.open = false;
        let dropped = std::mem::take(&mut inbox.commands);
        drop(inbox);
        self.changed.notify_one();
        drop(dropped);
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
