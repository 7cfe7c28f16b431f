//! The masks of the rows of a call, a line for each: in the memory of a GPU, and a copy on the host.
//!
//! In most steps, a row has the sequence that it had in the step before, so that little of its mask changes.
//! Invariant: both are equal once [`Masks::copy`] has copied what changed. Nothing is allocated during a
//! step.

use crate::backend::{DeviceError, StepLimits};
use crate::cuda::{Context, CudaBuf};
use std::ops::Range;

/// Bytes that are copied although they are unchanged, rather than to begin another copy.
const GAP: usize = 4096;

/// Bytes of a word of a mask.
const WORD: usize = size_of::<u32>();

/// The masks on the host.
pub(super) struct Masks {
    /// The mask of the next row.
    next: Vec<u32>,
    /// A copy of the lines on the GPU.
    lines: Vec<u8>,
    /// The bytes that are to be copied.
    changed: Range<usize>,
}

/// Returns the bytes of the lines.
pub(super) fn bytes(limits: &StepLimits) -> usize {
    limits.logit_rows * limits.mask_words() * WORD
}

impl Masks {
    /// Allocates lines of zeros for steps within `limits`.
    pub fn new(limits: &StepLimits) -> Masks {
        Masks { next: vec![0; limits.mask_words()], lines: vec![0; bytes(limits)], changed: 0..0 }
    }

    /// Returns the mask of the next row, of `words` words, to be written before [`Masks::keep`].
    pub fn next(&mut self, words: usize) -> &mut [u32] {
        &mut self.next[..words]
    }

    /// Makes the first `words` words of the next mask those of line `i`, which is later than those of the
    /// call before it. Copies to `gpu` what changed in earlier lines, if that is far away.
    pub fn keep(
        &mut self,
        (context, gpu): (&mut Context, &mut CudaBuf),
        i: usize,
        words: usize,
    ) -> Result<(), DeviceError> {
        let start = i * self.next.len() * WORD;
        let line = &mut self.lines[start..].as_chunks_mut().0[..words];
        let mask = &self.next[..words];
        let differs = |(word, old): (&u32, &[u8; WORD])| word.to_le_bytes() != *old;
        let Some(first) = mask.iter().zip(&*line).position(differs) else { return Ok(()) };
        let last = mask.iter().zip(&*line).rposition(differs).unwrap_or(first);
        line[first..=last].iter_mut().zip(&mask[first..]).for_each(|(old, word)| *old = word.to_le_bytes());
        let own = start + WORD * first..start + WORD * (last + 1);
        if self.changed.is_empty() {
            self.changed = own;
        } else if own.start <= self.changed.end + GAP {
            // What is left of a call that was aborted may lie behind.
            self.changed = own.start.min(self.changed.start)..own.end.max(self.changed.end);
        } else {
            self.copy(context, gpu)?;
            self.changed = own;
        }
        Ok(())
    }

    /// Copies what changed to the GPU.
    pub fn copy(&mut self, context: &mut Context, gpu: &mut CudaBuf) -> Result<(), DeviceError> {
        let changed = std::mem::take(&mut self.changed);
        context.upload(gpu, changed.start, &self.lines[changed])
    }
}
