//! The seam between a model and whatever proposes tokens for it on its device.
//!
//! Invariant: a drafter decides how fast a text is generated, and nothing else about it, because the model
//! verifies every draft.

use mainstem_kernels::{Backend, DeviceError, StepBatch, StepOutput};

/// Makes the drafts of a step, on the device that returns the results.
pub trait Drafter<B: Backend>: Send {
    /// Makes the drafts of `batch` and writes them to `out`, within the step that `batch` has begun and
    /// before the rows of the target, in passes that map rows of their own ([`Backend::map_rows`]). Called in
    /// every step, because the page copies of a step apply to the caches of the drafter as well.
    fn make_drafts(&mut self, b: &mut B, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError>;

    /// Receives the hidden states (rows, hidden) that the target's last layer has computed for the current
    /// rows, before the final norm: called for each row batch of the decoder, in order. A drafter that
    /// continues from them (EAGLE, MTP) copies what its next drafts need; a separate model ignores them.
    fn receive_hidden(&mut self, b: &mut B, batch: &StepBatch, hidden: &B::Buf) {
        let _ = (b, batch, hidden);
    }
}
