//! The rows of a step and the page tables of the slots, in the memory of a GPU.
//!
//! Invariant: a step copies its rows and what changed in the page tables, and nothing else.

use super::launch::{Device, THREADS, blocks_for};
use super::program::KernelName;
use crate::backend::{DeviceError, KvTable, StepLimits};
use crate::batch::{RowSpan, SlotMove, SpanStack, SpanTable, StepBatch, StepRow, StepState, TableUpdate};
use crate::cuda::{Arguments, CudaBuf};
use std::ops::Range;

/// Bytes of a row: `Row` of `common.cu`.
pub(super) const ROW_BYTES: usize = 32;

/// Bits of a row's flags: `ROW_IS_NULL`, `ROW_IS_GENERATED` and `ROW_TAKES_LAST`.
const IS_NULL: u32 = 1;
const IS_GENERATED: u32 = 2;
const TAKES_LAST: u32 = 4;
/// First bit of the type of a row's token, `ROW_TYPE_SHIFT`.
const TYPE_SHIFT: u32 = 8;

/// Changes of page tables that are copied at a time.
const CHANGES: usize = 4096;

/// Returns the bytes of the buffers: rows, numbers of wanted rows, changes of page tables, the last token of
/// each slot, and the page tables (own, window, cross).
pub(super) fn bytes(limits: &StepLimits) -> [usize; 7] {
    let table = |len: usize| limits.slots * len * size_of::<u32>();
    [
        limits.rows * ROW_BYTES,
        limits.rows * size_of::<u32>(),
        CHANGES * 2 * size_of::<u32>(),
        limits.slots * size_of::<u32>(),
        table(limits.table_len()),
        table(limits.window_table_len()),
        table(limits.cross_table_len()),
    ]
}

/// The tables that have page tables in the GPU's memory, in their order there.
const TABLES: [KvTable; 3] = [KvTable::Own, KvTable::Window, KvTable::Cross];

/// The state of the slots on the host, and its copies in the memory of a GPU.
pub(super) struct Steps {
    pub state: StepState,
    rows: CudaBuf,
    wanted: CudaBuf,
    tables: [CudaBuf; 3],
    changes: CudaBuf,
    /// The last token sampled in each slot.
    last_tokens: CudaBuf,
    /// Bytes that are copied next.
    staged: Vec<u8>,
    /// Rows of the encoder, which precede those of the decoder.
    encoder_rows: usize,
    /// The current rows among all of the step, and the first wanted one of them among all wanted rows.
    selected: Range<usize>,
    first_wanted: usize,
}

impl Steps {
    /// Allocates the state for steps within `limits`.
    pub fn new(device: &Device, limits: &StepLimits) -> Result<Steps, DeviceError> {
        let sizes = bytes(limits);
        let [rows, wanted, changes, last_tokens, own, window, cross] =
            sizes.map(|bytes| device.context.alloc(bytes));
        Ok(Steps {
            state: StepState::new(limits),
            rows: rows?,
            wanted: wanted?,
            tables: [own?, window?, cross?],
            changes: changes?,
            last_tokens: last_tokens?,
            staged: Vec::with_capacity(sizes[..3].iter().copied().max().unwrap_or(0)),
            encoder_rows: 0,
            selected: 0..0,
            first_wanted: 0,
        })
    }

    /// Begins a step.
    pub fn begin(&mut self, device: &mut Device, batch: &StepBatch) -> Result<(), DeviceError> {
        self.state.begin(batch);
        self.move_tables(device, &batch.moves)?;
        for (number, table) in TABLES.into_iter().enumerate() {
            self.update_table(device, number, batch.table_updates.iter().filter(|it| it.table == table))?;
        }
        self.copy_rows(device)
    }

    /// Maps the rows of another batch within a step.
    pub fn map(&mut self, device: &mut Device, batch: &StepBatch) -> Result<(), DeviceError> {
        self.state.map(batch);
        self.copy_rows(device)
    }

    /// Makes a row batch the current rows, and returns their range among those of the stack.
    pub fn select(&mut self, stack: SpanStack, batch: usize) -> Range<usize> {
        let rows = self.state.select(stack, batch);
        let first = match stack {
            SpanStack::Encoder => 0,
            SpanStack::Decoder => self.encoder_rows,
        };
        self.selected = first + rows.start..first + rows.end;
        self.first_wanted = self.state.first_sample();
        rows
    }

    /// Returns the number of the current rows.
    pub fn row_count(&self) -> usize {
        self.selected.len()
    }

    /// Returns arguments with the current rows after them.
    pub fn rows(&self, arguments: Arguments) -> Arguments {
        let Range { start, end } = self.selected;
        arguments.buf_at(&self.rows, start * ROW_BYTES, (end - start) * ROW_BYTES)
    }

    /// Returns arguments with the last tokens of all slots after them.
    pub fn last_tokens(&self, arguments: Arguments) -> Arguments {
        arguments.buf(&self.last_tokens, self.last_tokens.len())
    }

    /// Returns arguments with the numbers of some of the wanted rows, among the current rows, after them.
    pub fn wanted(&self, arguments: Arguments, outputs: &Range<usize>) -> Arguments {
        let (first, word) = (self.first_wanted + outputs.start, size_of::<u32>());
        arguments.buf_at(&self.wanted, first * word, outputs.len() * word)
    }

    /// Returns arguments with the page tables (slots, length) of all slots and that length after them; none
    /// and 0 for the scratch cache.
    pub fn table(&self, arguments: Arguments, table: KvTable) -> Arguments {
        let limits = &self.state.limits;
        let (number, len) = match table {
            KvTable::Own => (0, limits.table_len()),
            KvTable::Window => (1, limits.window_table_len()),
            KvTable::Cross => (2, limits.cross_table_len()),
            KvTable::Scratch => return arguments.optional(None, 0).int(0),
        };
        arguments.buf(&self.tables[number], self.tables[number].len()).int(len)
    }

    /// Moves page tables and last tokens with their slots.
    fn move_tables(&mut self, device: &mut Device, moves: &[SlotMove]) -> Result<(), DeviceError> {
        if moves.is_empty() {
            return Ok(());
        }
        for part in moves.chunks(CHANGES) {
            self.stage(part.iter().flat_map(|moved| [moved.from, moved.to]));
            device.context.upload(&mut self.changes, 0, &self.staged)?;
            let tables = self.tables.iter().zip(TABLES.map(|table| self.table_len(table)));
            for (buf, len) in tables.chain([(&self.last_tokens, 1)]) {
                let arguments = Arguments::default().int(part.len());
                let arguments = arguments.buf(&self.changes, self.staged.len()).int(len);
                let arguments = arguments.buf(buf, buf.len());
                let blocks = if len == 0 { 0 } else { 1 };
                device.launch(KernelName::rows("move_tables"), ([blocks, 1, 1], 256), arguments)?;
            }
        }
        Ok(())
    }

    /// Writes entries of page table number `number`.
    fn update_table<'a>(
        &mut self,
        device: &mut Device,
        number: usize,
        updates: impl Iterator<Item = &'a TableUpdate>,
    ) -> Result<(), DeviceError> {
        let len = self.table_len(TABLES[number]) as u32;
        let mut updates = updates.map(|it| [it.slot * len + it.index, it.page]).peekable();
        while updates.peek().is_some() {
            self.stage(updates.by_ref().take(CHANGES).flatten());
            let count = self.staged.len() / 8;
            device.context.upload(&mut self.changes, 0, &self.staged)?;
            let arguments = Arguments::default().int(count).buf(&self.changes, self.staged.len());
            let arguments = arguments.buf(&self.tables[number], self.tables[number].len());
            device.launch(KernelName::rows("write_entries"), ([1; 3], 1), arguments)?;
        }
        Ok(())
    }

    fn table_len(&self, table: KvTable) -> usize {
        match table {
            KvTable::Own => self.state.limits.table_len(),
            KvTable::Window => self.state.limits.window_table_len(),
            KvTable::Cross => self.state.limits.cross_table_len(),
            KvTable::Scratch => 0,
        }
    }

    /// Copies all rows and the numbers of wanted rows to the GPU, and selects the first batch of the decoder.
    fn copy_rows(&mut self, device: &mut Device) -> Result<(), DeviceError> {
        let (mut rows, mut wanted) = (0, 0);
        for stack in [SpanStack::Encoder, SpanStack::Decoder] {
            if stack == SpanStack::Decoder {
                self.encoder_rows = rows;
            }
            for batch in 0..self.state.row_batches(stack) {
                self.state.select(stack, batch);
                self.staged.clear();
                for row in self.state.rows() {
                    append_row(&mut self.staged, &self.state, row, self.state.span_of(row));
                }
                device.context.upload(&mut self.rows, rows * ROW_BYTES, &self.staged)?;
                rows += self.state.rows().len();
                self.staged.clear();
                let numbers = self.state.wanted().iter().flat_map(|row| row.to_le_bytes());
                self.staged.extend(numbers);
                device.context.upload(&mut self.wanted, wanted * size_of::<u32>(), &self.staged)?;
                wanted += self.state.wanted().len();
            }
        }
        let arguments = self.last_tokens(Arguments::default().long(rows));
        let arguments = arguments.buf(&self.rows, rows * ROW_BYTES);
        device.launch(KernelName::rows("take_last_tokens"), (blocks_for(rows), THREADS), arguments)?;
        self.select(SpanStack::Decoder, 0);
        Ok(())
    }

    /// Replaces the staged bytes.
    fn stage(&mut self, words: impl Iterator<Item = u32>) {
        self.staged.clear();
        self.staged.extend(words.flat_map(u32::to_le_bytes));
    }
}

/// Appends a row in the layout of `Row`.
fn append_row(to: &mut Vec<u8>, state: &StepState, row: &StepRow, span: &RowSpan) {
    let (page, within) = state.locate(span, KvTable::Scratch, 0);
    let mut flags = u32::from(row.token_type) << TYPE_SHIFT;
    if span.table == SpanTable::Null {
        flags |= IS_NULL;
    }
    if span.is_generated {
        flags |= IS_GENERATED;
    }
    if span.takes_last {
        flags |= TAKES_LAST;
    }
    let fields = [
        // The GPU has the last tokens of slots.
        if span.takes_last { 0 } else { row.token },
        row.position as u32,
        span.slot as u32,
        flags,
        span.reserved as u32,
        span.len as u32,
        page * state.limits.page_positions as u32 + within as u32,
        span.encoder_len as u32,
    ];
    to.extend(fields.into_iter().flat_map(u32::to_le_bytes));
}
