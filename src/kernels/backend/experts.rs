//! The experts of a mixture that a device holds: all in its memory, or brought there as rows choose them.
//!
//! Invariant: an operation gets the experts that were chosen in ascending order, wherever they come from, so
//! sums over experts have one order.

use super::{DeviceError, Expert};
use crate::collective::local::Abort;

/// The experts of a layer that a device holds.
pub struct Experts<'a, Buf> {
    /// By number, from [`super::MoeShape::first_expert`] on. With a source, their buffers are empty.
    pub held: &'a [Expert<Buf>],
    /// Brings experts into the device's memory; `None` if all are there.
    pub source: Option<&'a dyn ExpertSource<Buf>>,
    /// Correction of the scores of all experts of the layer, F32 (experts), finite. It is added where experts
    /// are chosen, but not to the factors of their results.
    pub correction: Option<&'a Buf>,
}

/// Brings the experts of a layer into a device's memory.
pub trait ExpertSource<Buf>: Send + Sync {
    /// Calls `compute` with each of the experts `chosen`, given by their index in `held`, ascending, once it
    /// is in the device's memory, where it stays for the call. The next ones may be read meanwhile. Allocates
    /// nothing. Fails if an expert cannot be read; the following ones are then not computed.
    fn for_each(
        &self,
        held: &[Expert<Buf>],
        chosen: &[u32],
        compute: &mut dyn FnMut(usize, &Expert<Buf>),
    ) -> Result<(), DeviceError>;

    /// Lets `abort` end a wait in [`ExpertSource::for_each`], which then fails. Does nothing for a source
    /// that never waits.
    fn stop_on_abort(&self, _abort: &Abort) {}
}

impl<'a, Buf> Experts<'a, Buf> {
    /// Returns experts that are all in the device's memory.
    pub fn in_memory(held: &'a [Expert<Buf>]) -> Experts<'a, Buf> {
        Experts { held, source: None, correction: None }
    }

    /// Calls `compute` with each of the experts `chosen`, given by their index, ascending. Fails if one
    /// cannot be read.
    pub fn for_each(
        &self,
        chosen: &[u32],
        compute: &mut dyn FnMut(usize, &Expert<Buf>),
    ) -> Result<(), DeviceError> {
        if let Some(source) = self.source {
            return source.for_each(self.held, chosen, compute);
        }
        chosen.iter().for_each(|index| compute(*index as usize, &self.held[*index as usize]));
        Ok(())
    }
}
