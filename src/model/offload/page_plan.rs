//! The pages of a step that layers read from the memory of the host or from a file, and those that they write
//! there.
//!
//! Invariant: whatever a row attends to is read, copied, or computed by the step.

use mainstem_kernels::{Backend, KvTable, PageCopy, SpanStack, SpanTable, StepBatch, StepLimits};
use std::ops::Range;

/// The pages that a step reads, copies and writes in each layer.
#[derive(Debug, Default)]
pub struct Plan {
    pub reads: Vec<Range<usize>>,
    /// The pages to read of V, if rows that attend sparsely can fetch V of single positions: those that other
    /// rows attend to, and those that are written, because what is around the new positions is written, too.
    pub value_reads: Vec<Range<usize>>,
    /// Pages of which V is fetched.
    pub fetched: Vec<Range<usize>>,
    /// Pages to copy, from where the source was before the step.
    pub copies: Vec<(usize, usize)>,
    pub writes: Vec<Range<usize>>,
}

impl Plan {
    /// Creates an empty plan that never grows for steps within `limits` on a cache of so many pages.
    pub fn with_capacity(limits: &StepLimits, pages: usize) -> Plan {
        // Runs are not adjacent. A sequence has a page to copy, which others that split from it have, too.
        let runs = pages / 2 + 1;
        Plan {
            reads: Vec::with_capacity(runs),
            value_reads: Vec::with_capacity(runs),
            fetched: Vec::with_capacity(runs),
            copies: Vec::with_capacity(2 * limits.slots),
            writes: Vec::with_capacity(runs),
        }
    }

    /// Returns whether V of a page is fetched.
    pub fn fetches(&self, page: usize) -> bool {
        let next = self.fetched.partition_point(|run| run.end <= page);
        self.fetched.get(next).is_some_and(|run| run.contains(&page))
    }

    /// Returns whether the step has nothing to do with pages.
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.copies.is_empty() && self.writes.is_empty()
    }
}

/// For each page what a step does with it: [`READ`], [`READ_DENSELY`], [`WRITTEN`] and [`FILLED`]; all 0
/// between steps.
pub struct PageMarks {
    marks: Vec<u8>,
    page_positions: usize,
    /// Whether generated tokens attend sparsely.
    is_sparse: bool,
}

/// A row attends to positions of the page that were computed before the step.
const READ: u8 = 1;
/// The page has positions that the step computes, or is the target of a copy.
const WRITTEN: u8 = 2;
/// The step computes or copies all that it needs of the page.
const FILLED: u8 = 4;
/// A row attends to such positions with all of their values.
const READ_DENSELY: u8 = 8;

impl PageMarks {
    /// Creates the marks of a cache of so many pages, for steps within `limits`.
    pub fn new(pages: usize, limits: &StepLimits) -> PageMarks {
        let is_sparse = !limits.attended_fraction.is_one();
        PageMarks { marks: vec![0; pages], page_positions: limits.page_positions, is_sparse }
    }

    /// Marks the pages that a step reads and writes.
    pub fn mark<Buf: Send + Sync + 'static>(&mut self, device: &dyn Backend<Buf = Buf>, batch: &StepBatch) {
        let (size, fetches_values) = (self.page_positions, self.is_sparse && device.fetches_values());
        let mut mark = |slot: u32, table: KvTable, positions: Range<usize>, mark: u8| {
            for page in &device.page_table(slot, table)[positions.start / size..positions.end.div_ceil(size)]
            {
                self.marks[*page as usize] |= mark;
            }
        };
        for span in batch.spans.iter().filter(|span| span.table != SpanTable::Null) {
            let (start, end) = (span.start as usize, span.start as usize + span.len());
            match span.stack {
                SpanStack::Encoder => mark(span.slot, KvTable::Cross, 0..end, WRITTEN | FILLED),
                SpanStack::Decoder => {
                    let is_sparse = fetches_values && span.tokens.is_generated();
                    let read = if is_sparse { READ } else { READ | READ_DENSELY };
                    mark(span.slot, KvTable::Own, 0..start, read);
                    mark(span.slot, KvTable::Own, start..end, WRITTEN);
                    mark(span.slot, KvTable::Cross, 0..span.encoder_len as usize, READ | READ_DENSELY);
                }
            }
        }
        for copy in own_copies(batch) {
            self.marks[copy.to as usize] |= WRITTEN | FILLED;
        }
    }

    /// Turns the marks into a plan, and removes them.
    pub fn take_plan(&mut self, batch: &StepBatch, plan: &mut Plan) {
        plan.reads.clear();
        plan.value_reads.clear();
        plan.fetched.clear();
        plan.writes.clear();
        plan.copies.clear();
        let add = |runs: &mut Vec<Range<usize>>, page: usize| match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        };
        for (page, mark) in self.marks.iter_mut().enumerate() {
            let mark = std::mem::take(mark);
            if mark & (READ | FILLED) == READ {
                let is_whole = mark & (READ_DENSELY | WRITTEN) != 0;
                add(&mut plan.reads, page);
                add(if is_whole { &mut plan.value_reads } else { &mut plan.fetched }, page);
            }
            if mark & WRITTEN != 0 {
                add(&mut plan.writes, page);
            }
        }
        for copy in own_copies(batch) {
            // A page that was copied before in this step is not in the file yet.
            let earlier = plan.copies.iter().rev().find(|(_, to)| *to == copy.from as usize);
            let from = earlier.map_or(copy.from as usize, |(from, _)| *from);
            plan.copies.push((from, copy.to as usize));
        }
    }
}

/// Returns the copies of a step among pages that layers in the file have.
fn own_copies(batch: &StepBatch) -> impl Iterator<Item = &PageCopy> {
    batch.page_copies.iter().filter(|copy| copy.table == KvTable::Own)
}
