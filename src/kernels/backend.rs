//! The one door to a device: buffers, and the operations a transformer layer is made of.
//!
//! Activations are F32, row-major, without padding: `(rows, width)`. Weights are `(out, in)`, row-major,
//! in any [`QuantType`]. Every operation works on the rows of the step begun last.
//!
//! Invariant: the arithmetic of an output element depends on weight type, shape and position only, never
//! on how many rows share the step, on how a prompt is cut into spans, on slots, pages or thread count.

use crate::batch::{Page, PageCopy, StepBatch, StepOutput};
use crate::quant::QuantType;
use std::ops::Range;

/// What a device can say instead of a result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("out of memory: {bytes} bytes cannot be allocated ({reason})")]
    OutOfMemory { bytes: usize, reason: String },
    #[error("{0}")]
    Unsupported(String),
    #[error("device fault: {0}")]
    Fault(String),
}

/// A matrix in a device's memory, `(out, in)`.
pub struct Weight<Buf> {
    pub buf: Buf,
    pub ty: QuantType,
    /// Output features; rows of the matrix.
    pub out: usize,
    /// Input features; columns of the matrix.
    pub inp: usize,
}

/// Normalisation of each row: `x / rms(x) * weight`. The weight is F32, `(width)`.
pub struct Norm<Buf> {
    pub weight: Buf,
    pub width: usize,
    /// Added to the mean of squares before the root.
    pub eps: f32,
}

/// Rotary positions. `cos_sin` is F32, `(positions, dims / 2, 2)`: cosine and sine for each position and pair.
pub struct Rope<Buf> {
    pub cos_sin: Buf,
    /// Positions the table covers.
    pub positions: usize,
    /// Leading dimensions of each head that are rotated; even.
    pub dims: usize,
    pub style: RopeStyle,
}

/// Which dimensions form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(i, i + dims / 2)`, as Hugging Face checkpoints store it.
    Halves,
    /// `(2i, 2i + 1)`, as Meta's and llama2.c's do.
    Interleaved,
}

/// The non-linearity of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// The KV cache of one layer, every page of it.
pub struct KvLayer<Buf> {
    pub k: Buf,
    pub v: Buf,
    pub layout: KvLayout,
}

/// The size of a layer's KV cache. How a page is laid out inside is the backend's own business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub ty: QuantType,
    /// Pages in the pool, the sink (page 0) included.
    pub pages: usize,
    /// Token positions of one page; a multiple of [`KvLayout::BLOCK`].
    pub page_positions: usize,
    pub kv_heads: usize,
    /// Width of one head of K.
    pub k_dim: usize,
    /// Width of one head of V.
    pub v_dim: usize,
}

impl KvLayout {
    /// Positions whose scores are reduced together in attention. Pages hold whole blocks, so that the
    /// order of summation does not depend on the page size.
    pub const BLOCK: usize = 32;
    /// Elements that a head's V may be padded to a multiple of.
    pub const PADDING: usize = 16;

    /// Bytes of one page, as much as any backend takes; `None` when they overflow.
    pub fn page_bytes(&self) -> Option<usize> {
        let head = self.k_dim.checked_add(self.v_dim.checked_next_multiple_of(KvLayout::PADDING)?)?;
        self.ty.bytes(head.checked_mul(self.kv_heads)?.checked_mul(self.page_positions)?)
    }
}

/// One attention operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of the cache's KV heads, which consecutive query heads share.
    pub heads: usize,
    /// Multiplies the product of query and key.
    pub scale: f32,
}

/// The fixed bounds of every step: all buffers are made for these, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Sequences that can be live at once.
    pub slots: usize,
    /// Rows of one step.
    pub rows: usize,
    /// Rows whose logits exist at once; a step with more wanted rows is headed in blocks of this many.
    pub logit_rows: usize,
    /// Tokens of one sequence, prompt and answer.
    pub positions: usize,
    pub page_positions: usize,
    /// Most likely tokens reported for one row.
    pub top_logprobs: usize,
    /// Biases of one sequence's logits.
    pub biases: usize,
    pub vocab: usize,
}

impl StepLimits {
    /// Entries of a slot's page table.
    pub fn table_len(&self) -> usize {
        self.positions.div_ceil(self.page_positions)
    }

    /// Biases of a step: each slot draws one token in it.
    pub fn bias_room(&self) -> usize {
        self.slots * self.biases
    }
}

/// A device. One thread drives it; it may have workers of its own.
///
/// Sizes and indices are checked where they are made (loading, planning the step); an implementation
/// asserts them, and a violation is a bug, caught at the device's door.
pub trait Backend: Send + 'static {
    /// Memory of this device, in bytes. Fresh buffers are zero.
    type Buf: Send + Sync + 'static;

    /// Name, instruction set and threads, for the start report.
    fn describe(&self) -> String;

    /// `bytes` zeroed bytes.
    fn alloc(&mut self, bytes: usize) -> Result<Self::Buf, DeviceError>;

    /// Host to device: `bytes` to `to[offset..]`.
    fn upload(&mut self, to: &mut Self::Buf, offset: usize, bytes: &[u8]);

    /// Device to host: `from[offset..][..bytes.len()]` to `bytes`.
    fn download(&mut self, from: &Self::Buf, offset: usize, bytes: &mut [u8]);

    /// Takes a matrix `(out, inp)` given as `ty` codes, little-endian, row-major. May repack it.
    fn upload_weight(
        &mut self,
        ty: QuantType,
        out: usize,
        inp: usize,
        bytes: &[u8],
    ) -> Result<Weight<Self::Buf>, DeviceError>;

    /// Allocates one layer's cache.
    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<Self::Buf>, DeviceError>;

    /// Allocates the slot state and all that steps within `limits` need; nothing is allocated afterwards.
    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError>;

    /// Applies the batch's moves and table updates and makes its rows the current ones.
    fn begin(&mut self, batch: &StepBatch);

    /// Copies pages of one layer.
    fn copy_pages(&mut self, copies: &[PageCopy], cache: &mut KvLayer<Self::Buf>);

    /// x (rows, width) = the rows of `table` (vocabulary, width) that the step's tokens name.
    fn embed(&mut self, table: &Weight<Self::Buf>, x: &mut Self::Buf);

    /// y (rows, out) = x (rows, in) · wᵀ, + bias (out, F32) if given.
    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<Self::Buf>,
        bias: Option<&Self::Buf>,
        x: &Self::Buf,
        y: &mut Self::Buf,
    );

    /// y = norm(x), both (rows, width).
    fn norm(&mut self, rows: usize, norm: &Norm<Self::Buf>, x: &Self::Buf, y: &mut Self::Buf);

    /// Rotates each head of x (rows, heads, head_dim) in place, by its row's position.
    fn rope(&mut self, rope: &Rope<Self::Buf>, heads: usize, head_dim: usize, x: &mut Self::Buf);

    /// Writes k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) to the rows' positions of the cache.
    fn store_kv(&mut self, k: &Self::Buf, v: &Self::Buf, cache: &mut KvLayer<Self::Buf>);

    /// out (rows, heads, v_dim) = softmax(q · kᵀ · scale) · v, for q (rows, heads, k_dim), each row over the
    /// positions 0..=its own, through its slot's page table. A sink row attends to itself alone.
    fn attention(
        &mut self,
        shape: &AttentionShape,
        q: &Self::Buf,
        cache: &KvLayer<Self::Buf>,
        out: &mut Self::Buf,
    );

    /// gate = act(gate) * up, all (rows, width); without `up`, gate = act(gate).
    fn activate(
        &mut self,
        rows: usize,
        width: usize,
        act: Activation,
        gate: &mut Self::Buf,
        up: Option<&Self::Buf>,
    );

    /// x += y, both (rows, width).
    fn add(&mut self, rows: usize, width: usize, x: &mut Self::Buf, y: &Self::Buf);

    /// x (rows, width) = its sum over the members of the stage, in rank order. One member: x as it is.
    fn reduce(&mut self, rows: usize, width: usize, x: &mut Self::Buf);

    /// y (wanted.len(), width) = the wanted rows `wanted` of the step, taken from x (rows, width).
    fn gather(&mut self, wanted: Range<usize>, width: usize, x: &Self::Buf, y: &mut Self::Buf);

    /// Draws or scores the wanted rows `wanted` from logits (wanted.len(), vocab), appends their results to
    /// `out` in order, and remembers drawn tokens as their slots' last.
    ///
    /// Defined by [`crate::reference::draw`]: biases added; logits ordered descending, ties by id;
    /// temperature, then top-k, top-p and min-p; the draw is [`crate::random::uniform`] of (seed, position).
    fn sample(&mut self, wanted: Range<usize>, logits: &Self::Buf, out: &mut StepOutput);

    /// Copies rows of one slot's page table to the host: what checks and tests look at.
    fn table(&self, slot: u32) -> &[Page];
}
