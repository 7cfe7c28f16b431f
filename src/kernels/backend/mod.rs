//! The one door to a device: buffers, and the operations a transformer layer is made of.
//!
//! Activations are F32, row-major, without padding: `(rows, width)`. Weights are `(out, in)`, row-major,
//! in any [`QuantType`]. Every operation works on the rows of the step begun last.
//!
//! Invariant: the arithmetic of an output element depends on weight type, shape and position only, never
//! on how many rows share the step, on how a prompt is cut into spans, on slots, pages or thread count.

mod blocks;

mod attention;

mod limits;

mod products;

pub use attention::{AttentionShape, DistanceBias, KvLayer, KvLayout, KvTable, Mask};
pub use blocks::{
    Activation, Expert, MoeShape, Norm, NormKind, Rope, RopeStretch, RopeStyle, Scoring, Weight,
};
pub use limits::{Share, StepLimits};
pub(crate) use products::one_by_one;
pub use products::{Factor, Product, To};

use crate::batch::{Page, PageCopy, SpanStack, StepBatch, StepOutput};
use crate::collective::Collective;
use crate::quant::{Inputs, QuantType};
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

/// A device. One thread drives it; it may have workers of its own.
///
/// Sizes and indices are checked where they are made (loading, planning the step); an implementation
/// asserts them, and a violation is a bug, caught at the device's door.
pub trait Backend: Send + 'static {
    /// Memory of this device, in bytes. Fresh buffers are zero.
    type Buf: Send + Sync + 'static;

    /// Name, instruction set and threads, for the start report.
    fn describe(&self) -> String;

    /// Threads of the host that are its own, and rest while it is loaded.
    fn threads(&self) -> usize {
        1
    }

    /// What products with coded weights take the other operand as.
    fn inputs(&self) -> Inputs;

    /// Takes the device's place among those of its stage. Until then it is alone in one. Where buffers are the host's, sums
    /// go through `stage`; a device with other memory makes its own way to the others here, and speaks to them over `stage`
    /// until it has one.
    fn join(&mut self, stage: Box<dyn Collective>);

    /// The device's rank in its stage, and how many members that has.
    fn place(&self) -> (usize, usize);

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

    /// Bytes that such a matrix takes.
    fn weight_bytes(&self, ty: QuantType, out: usize, inp: usize) -> usize;

    /// Allocates one layer's cache. Refuses what [`KvLayout::check_type`] does.
    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<Self::Buf>, DeviceError>;

    /// Allocates the slot state and all that steps within `limits` need; nothing is allocated afterwards.
    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError>;

    /// Applies the batch's moves and table updates and maps its rows. Those of the decoder are the current ones.
    fn begin(&mut self, batch: &StepBatch);

    /// Makes the rows of one stack's spans the current ones; gives their number. Every operation that speaks of rows,
    /// of positions or of wanted rows means the current ones; wanted rows are numbered from the stack's first on.
    fn select(&mut self, stack: SpanStack) -> usize;

    /// Copies pages of one layer.
    fn copy_pages(&mut self, copies: &[PageCopy], cache: &mut KvLayer<Self::Buf>);

    /// x (rows, width) = the rows of `table` (tokens, width) that the step's tokens name. Its first one is token `first`'s;
    /// tokens that have none in it give zeros.
    fn embed(&mut self, table: &Weight<Self::Buf>, first: usize, x: &mut Self::Buf);

    /// x (rows, width) += the rows of `table` (positions, width) that the rows' positions, plus `offset`, name.
    fn embed_positions(&mut self, table: &Weight<Self::Buf>, offset: usize, x: &mut Self::Buf);

    /// y (rows, out) = x (rows, in) · wᵀ, + bias (out, F32) if given. Where the weight's type takes codes, x is what
    /// [`crate::quant::InputBlock`] makes of it.
    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<Self::Buf>,
        bias: Option<&Self::Buf>,
        x: &Self::Buf,
        y: &mut Self::Buf,
    );

    /// Products of the same rows with several weights, each as [`Backend::matmul`] gives it, of what [`Backend::norm`] or
    /// [`Backend::activate`] makes of the rows where that is asked for. A device may leave out the passes over memory between
    /// these, and take the rows to codes once for all.
    fn products(&mut self, rows: usize, factor: Factor<Self::Buf>, products: &mut [Product<Self::Buf>]) {
        one_by_one(self, rows, factor, products);
    }

    /// y = norm(x), both (rows, width).
    fn norm(&mut self, rows: usize, norm: &Norm<Self::Buf>, x: &Self::Buf, y: &mut Self::Buf);

    /// x = norm(x), (rows, width).
    fn norm_in_place(&mut self, rows: usize, norm: &Norm<Self::Buf>, x: &mut Self::Buf);

    /// angles (rows, dims / 2, 2) = cosine and sine of each row's pairs, by its position and its sequence's reserved
    /// length. Good for every layer of the step.
    fn angles(&mut self, rope: &Rope<Self::Buf>, angles: &mut Self::Buf);

    /// Rotates the first `rope.dims` of each head of x (rows, heads, head_dim) in place by `angles`.
    fn rope(
        &mut self,
        rope: &Rope<Self::Buf>,
        angles: &Self::Buf,
        heads: usize,
        head_dim: usize,
        x: &mut Self::Buf,
    );

    /// Writes k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) to the rows' positions of the cache.
    fn store_kv(&mut self, table: KvTable, k: &Self::Buf, v: &Self::Buf, cache: &mut KvLayer<Self::Buf>);

    /// out (rows, heads, v_dim) = softmax(q · kᵀ · scale) · v, for q (rows, heads, k_dim), each row over the
    /// positions that the mask lets it see, which must suit the table. A row that sees nothing gives zeros. A sink row
    /// sees itself alone, and nothing through the cross table.
    ///
    /// With [`StepLimits::attended`] less than all, a drawn token ([`crate::batch::SpanTokens::is_drawn`]) through its own table
    /// takes the values of some: of the positions that it sees before its own, those of so large a share with the largest
    /// scores, ties by position, the lower first, and a NaN the smallest; and its own. Each head by itself, with the weights
    /// that they have among all.
    fn attention(
        &mut self,
        shape: &AttentionShape<Self::Buf>,
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

    /// x += factor * y, both (rows, width).
    fn add(&mut self, rows: usize, width: usize, factor: f32, x: &mut Self::Buf, y: &Self::Buf);

    /// x *= factor, (rows, width).
    fn scale(&mut self, rows: usize, width: usize, factor: f32, x: &mut Self::Buf);

    /// x = cap * tanh(x / cap), (rows, width).
    fn softcap(&mut self, rows: usize, width: usize, cap: f32, x: &mut Self::Buf);

    /// x (rows, width) *= sigmoid(gate), for gate (rows).
    fn gate_rows(&mut self, rows: usize, width: usize, gate: &Self::Buf, x: &mut Self::Buf);

    /// Makes what [`Backend::moe`] needs beside its buffers, once for each shape, before the first step.
    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError>;

    /// y (rows, hidden) = for each row the sum of its chosen experts' results, each times its score: of the
    /// `router` logits (rows, experts) the `top_k` largest are chosen, ties by index; a NaN counts as negative
    /// infinity. The sum is in the order of experts. `experts` are those from `shape.first` on; others that are chosen
    /// give nothing.
    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &Self::Buf,
        experts: &[Expert<Self::Buf>],
        x: &Self::Buf,
        y: &mut Self::Buf,
    );

    /// x (rows, width) = its sum over the members of the stage, in rank order. One member: x as it is. Unwinds with
    /// [`crate::Aborted`] when the stage is given up.
    fn reduce(&mut self, rows: usize, width: usize, x: &mut Self::Buf);

    /// all (rows, sum of `widths`) = what the members of the stage have, side by side by rank: of this one `own` (rows,
    /// widths\[rank\]). Unwinds with [`crate::Aborted`] when the stage is given up.
    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &Self::Buf, all: &mut Self::Buf);

    /// y (rows, columns.len()) = those columns of x (rows, width).
    fn columns(&mut self, rows: usize, width: usize, columns: Range<usize>, x: &Self::Buf, y: &mut Self::Buf);

    /// y (wanted.len(), width) = the wanted rows `wanted` of the step, taken from x (rows, width).
    fn gather(&mut self, wanted: Range<usize>, width: usize, x: &Self::Buf, y: &mut Self::Buf);

    /// Appends rows of x (rows, width) to the hidden states of `out`: those of a span that wants them, normed.
    fn hidden(&mut self, rows: Range<usize>, width: usize, x: &Self::Buf, out: &mut StepOutput);

    /// Draws or scores the wanted rows `wanted` from logits (wanted.len(), vocab), appends their results to
    /// `out` in order, and remembers drawn tokens as their slots' last.
    ///
    /// Defined by [`crate::reference::draw`]: biases added; logits ordered descending, ties by id;
    /// temperature, then top-k, top-p and min-p; the draw is [`crate::random::uniform`] of (seed, position).
    fn sample(&mut self, wanted: Range<usize>, logits: &Self::Buf, out: &mut StepOutput);

    /// One of a slot's page tables, on the host: what checks and tests look at.
    fn table(&self, slot: u32, table: KvTable) -> &[Page];
}
