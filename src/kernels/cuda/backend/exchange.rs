//! Exchanges between the ranks of a stage, through the memory of the host.
//!
//! Numbers pass in parts of a fixed size, so no step allocates.
//! Invariant: all ranks divide an exchange into the same parts, because they follow from its shape only.

use super::launch::{check_len, f32_bytes};
use crate::backend::DeviceError;
use crate::collective::Collective;
use crate::cuda::{Context, CudaBuf};
use crate::host::{HostBuf, HostMemory};
use crate::stage::StageCollective;

/// Most numbers of a part, unless a single row has more.
const PART: usize = 1 << 18;

/// The ranks of a stage, and memory of the host for a part of this rank and for one of all ranks.
#[derive(Default)]
pub(super) struct Exchange {
    ranks: StageCollective,
    parts: Option<[HostBuf; 2]>,
}

impl Exchange {
    /// Wraps the collective that connects this rank to the others, and allocates memory for exchanges.
    pub fn new(ranks: Box<dyn Collective>) -> Result<Exchange, DeviceError> {
        let mut exchange = Exchange { ranks: StageCollective::new(ranks), parts: None };
        exchange.reserve(PART)?;
        Ok(exchange)
    }

    /// Allocates memory for parts of `n` numbers, unless there is as much. A gathered row is one part.
    pub fn reserve(&mut self, n: usize) -> Result<(), DeviceError> {
        let memory = HostMemory::default();
        if self.parts.as_ref().is_none_or(|[part, _]| part.len() < f32_bytes(n)) {
            self.parts = Some([memory.zeroed(f32_bytes(n))?, memory.zeroed(f32_bytes(n))?]);
        }
        Ok(())
    }

    /// Returns the rank of the device, and the number of ranks.
    pub fn rank_and_count(&self) -> (usize, usize) {
        self.ranks.rank_and_count()
    }

    /// Replaces the first `n` numbers of `x` by their sums over all ranks.
    pub fn all_reduce(
        &mut self,
        context: &mut Context,
        n: usize,
        x: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        check_len(x, n);
        if self.rank_and_count().1 == 1 {
            return Ok(());
        }
        self.reserve(PART)?;
        let Some([part, _]) = &mut self.parts else { return Ok(()) };
        for first in (0..n).step_by(PART) {
            let (at, len) = (f32_bytes(first), PART.min(n - first));
            context.download(x, at, &mut part.bytes_mut()[..f32_bytes(len)])?;
            self.ranks.all_reduce(&mut part.f32_mut()[..len]);
            context.upload(x, at, &part.bytes()[..f32_bytes(len)])?;
        }
        Ok(())
    }

    /// Writes the columns of all ranks, of these widths, to `all` (rows, sum of the widths).
    pub fn all_gather(
        &mut self,
        context: &mut Context,
        (rows, widths): (usize, &[usize]),
        own: &CudaBuf,
        all: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let (width, sum) = (widths[self.rank_and_count().0], widths.iter().sum::<usize>());
        check_len(own, rows * width);
        check_len(all, rows * sum);
        let at_once = (PART / sum.max(1)).max(1);
        self.reserve(PART.max(sum))?;
        let Some([part, gathered]) = &mut self.parts else { return Ok(()) };
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let (from, to) = (f32_bytes(first * width), f32_bytes(first * sum));
            context.download(own, from, &mut part.bytes_mut()[..f32_bytes(count * width)])?;
            self.ranks.all_gather(count, widths, part.f32(), gathered.f32_mut());
            context.upload(all, to, &gathered.bytes()[..f32_bytes(count * sum)])?;
        }
        Ok(())
    }
}
