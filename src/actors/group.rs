//! A group: the devices that hold one model together, and step, fail and restart together.
//!
//! Invariant: one step is in flight in each lane, and it goes to every member with the same number.

use super::device::{Ran, Run, Step};
use actix::Recipient;
use mainstem_kernels::DeviceError;
use std::sync::atomic::{AtomicU64, Ordering};

/// The devices of a model: stages by layers, members by rank.
pub struct Group {
    stages: Vec<Vec<Recipient<Run>>>,
    /// Number of the step sent last. It goes on for as long as the group lives, whoever sends.
    step: AtomicU64,
}

/// A group whose members do not answer any more.
const GONE: &str = "the device's thread is gone";

impl Group {
    /// A group of one device that holds the whole model.
    pub fn single(device: Recipient<Run>) -> Group {
        Group { stages: vec![vec![device]], step: AtomicU64::new(0) }
    }

    /// Steps that can be in flight at once.
    pub fn lanes(&self) -> usize {
        self.stages.len()
    }

    /// Numbers a step and sends it off. It is on its way when this returns; what it gives is awaited.
    pub fn send(&self, mut step: Box<Step>) -> impl Future<Output = Ran> + use<> {
        let [stage] = &self.stages[..] else { unreachable!("a group has one stage; more is a bug") };
        let [device] = &stage[..] else { unreachable!("a stage has one member; more is a bug") };
        step.batch.step = self.step.fetch_add(1, Ordering::Relaxed) + 1;
        let answer = device.send(Run(step));
        async move {
            match answer.await {
                Ok(ran) => ran,
                Err(_) => Ran { step: Box::default(), result: Err(DeviceError::Fault(GONE.to_owned())) },
            }
        }
    }
}
