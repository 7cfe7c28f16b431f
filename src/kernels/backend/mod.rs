//! The interface to a compute device: buffers, and the operations that a transformer layer consists of.
//!
//! Activations are row-major and without padding: `(rows, width)`, in the backend's [`ActivationType`].
//! Weights are `(n, k)`, row-major, in any [`QuantType`]. Every operation works on the rows of the current
//! step.
//!
//! Invariant: the arithmetic of an output element depends only on the weight type, the shape and the
//! position. It depends neither on how many rows share the step (batch invariance), nor on how a prompt is
//! divided into spans, nor on slots, pages or the number of threads.

mod error;

mod delegate;

mod activation_type;

mod operands;

mod experts;

mod attention;

mod limits;

mod gemms;

mod sampling;

mod sizes;

mod values;

pub use activation_type::ActivationType;
pub use attention::{
    AttentionShape, DistanceBuckets, DistanceScores, KvLayer, KvLayout, KvTable, Mask, RelativeBias,
};
pub use error::DeviceError;
pub use experts::{ExpertSource, Experts};
pub use gemms::run_gemms_separately;
pub use gemms::{Epilogue, Gemm, InputOperand, OutputColumns, weights_of};
pub use limits::{Fraction, StepLimits};
pub use operands::{
    Activation, DynamicNtk, Expert, ExpertBiases, ExpertGroups, GroupScore, MatrixId, MoeShape, Norm,
    NormKind, Rope, RopeStyle, Scoring, Weight, Xielu,
};
pub use sampling::SamplingInputs;
pub use sizes::{DeviceSizes, HeldShapes, PackedLayout};
pub use values::ValueSource;

use crate::batch::{Page, PageCopy, SpanStack, StepBatch, StepOutput, StepTimes};
use crate::collective::Collective;
use crate::quant::{ActivationPrecision, QuantType};
use std::ops::Range;

/// A compute device: memory, the operations of a transformer, and the state of the slots.
///
/// One thread drives a device, which may have worker threads of its own. The life of a device:
/// [`Backend::join_stage`] if it is not alone in its stage, then [`Backend::upload_weight`],
/// [`Backend::alloc_kv`] and [`Backend::prepare_moe`] in any order, then [`Backend::prepare`], and then
/// steps. A step starts with [`Backend::begin_step`], which sets the current rows; all further operations of
/// the step work on them; and it ends with [`Backend::end_step`]. Nothing is allocated during a step.
///
/// Shapes are written after the name of a buffer: x (rows, width). Elements of activations, which include
/// logits, are of [`Backend::activation_type`]. All other elements are F32 unless stated otherwise: norms,
/// biases, and the tables and angles of RoPE. A buffer may be longer than its shape; elements beyond the
/// shape are neither read nor written.
///
/// Operations return no errors: sizes and indices are validated when a model is loaded and when a step is
/// built. An implementation asserts them, so a violation is a bug and panics. Only [`Backend::moe`] may fail,
/// since experts may be read within it.
pub trait Backend: Send + 'static {
    /// A buffer in the memory of this device, with a length in bytes. A new buffer is zeroed.
    type Buf: Send + Sync + 'static;

    /// Returns the sizes of everything that this device allocates.
    fn sizes(&self) -> &dyn DeviceSizes;

    /// Returns the name, instruction set and number of threads, for the startup report.
    fn describe(&self) -> String {
        self.sizes().describe()
    }

    /// Returns the number of host threads that compute for this device. They are idle while a model is
    /// loaded, so loading may use as many.
    fn threads(&self) -> usize {
        1
    }

    /// Returns the bytes of device memory that the live buffers of this backend occupy: those of callers and
    /// its own scratch.
    fn allocated_bytes(&self) -> usize;

    /// Returns the precision of the activations in GEMMs with quantized weights.
    fn activation_precision(&self) -> ActivationPrecision;

    /// Returns the element type of activation buffers, which is also that of the rows that a pipeline stage
    /// hands to the next.
    fn activation_type(&self) -> ActivationType {
        self.sizes().activation_type()
    }

    /// Joins a stage as one of its tensor-parallel ranks; before, the device is the only rank. A device whose
    /// buffers lie in host memory runs its collective operations through `stage`. A device with its own
    /// memory uses `stage` only to set up a direct connection to the other ranks (for example NCCL).
    fn join_stage(&mut self, stage: Box<dyn Collective>);

    /// Returns the rank of the device in its stage, and the number of ranks.
    fn rank_and_count(&self) -> (usize, usize);

    /// Allocates `bytes` zeroed bytes. Fails with [`DeviceError::OutOfMemory`].
    fn alloc(&mut self, bytes: usize) -> Result<Self::Buf, DeviceError>;

    /// Copies `bytes` from the host to `to`, at byte `offset`.
    fn upload(&mut self, to: &mut Self::Buf, offset: usize, bytes: &[u8]);

    /// Copies `bytes.len()` bytes of `from`, starting at byte `offset`, to the host.
    fn download(&mut self, from: &Self::Buf, offset: usize, bytes: &mut [u8]);

    /// Uploads a matrix (n, k). `bytes` holds its blocks of format `ty`, little-endian, row-major. The device
    /// packs them: the weight's buffer then holds the bytes of [`DeviceSizes::packed_layout`], which
    /// [`Backend::download`] returns. The weight has no id. Fails when memory is exhausted or the format is
    /// not supported.
    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Result<Weight<Self::Buf>, DeviceError>;

    /// Prepares for products with matrices of `k` columns in format `ty`, without uploading one. Fails when
    /// memory is exhausted or the format is not supported.
    fn prepare_weight(&mut self, ty: QuantType, k: usize) -> Result<(), DeviceError>;

    /// Returns the bytes of a buffer if they are in host memory, where other threads may write them too.
    fn host_bytes(buf: &mut Self::Buf) -> Option<&mut [u8]>
    where
        Self: Sized,
    {
        let _ = buf;
        None
    }

    /// Overwrites a weight with `packed` bytes in the layout `layout`, as downloaded from the buffer of a
    /// weight of this type and shape. Allocates nothing. Fails with [`DeviceError::Unsupported`], and leaves
    /// the weight as it was, if its layout is another or takes another number of bytes.
    fn refill_weight(
        &mut self,
        w: &mut Weight<Self::Buf>,
        layout: &PackedLayout,
        packed: &[u8],
    ) -> Result<(), DeviceError> {
        w.packed_layout(self.sizes()).check(layout, packed)?;
        self.upload(&mut w.buf, 0, packed);
        Ok(())
    }

    /// Allocates the KV cache of one layer, zeroed. Fails when memory is exhausted or
    /// [`KvLayout::check_type`] fails.
    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<Self::Buf>, DeviceError>;

    /// Allocates the KV cache of one layer as [`Backend::alloc_kv`] does, but in the memory of the host. What
    /// works on this cache ([`Backend::store_kv`], [`Backend::attention`] and [`Backend::copy_pages`]) is
    /// computed there, so that rows of activations cross the link between both memories, and pages do not.
    /// Fails with [`DeviceError::Unsupported`] on a device that cannot do that.
    fn alloc_host_kv(&mut self, layout: KvLayout) -> Result<KvLayer<Self::Buf>, DeviceError> {
        let _ = layout;
        Err(DeviceError::Unsupported("this device cannot compute attention in host memory".into()))
    }

    /// Allocates the slot state and all scratch memory for steps within `limits`. No later operation
    /// allocates. Fails when memory is exhausted.
    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError>;

    /// Begins a step: applies the slot moves, changes of counts and page table updates of `batch` and maps
    /// its rows. The first row batch of the decoder becomes the current rows. If drafts of the step are
    /// among the rows ([`crate::batch::SpanTokens::Drafted`]), there are none until [`Backend::map_rows`]
    /// maps them.
    ///
    /// Panics if the previous step has not been ended.
    fn begin_step(&mut self, batch: &StepBatch);

    /// Maps the rows of another batch within a step, in place of those before: for each pass of a draft
    /// model, whose spans are of [`crate::batch::SpanModel::Draft`], and then for the batch of the step. The
    /// first row batch of the decoder becomes the current rows. Moves, page table updates and page copies of
    /// the batch are not applied.
    fn map_rows(&mut self, batch: &StepBatch);

    /// Ends the step: afterwards all its results are on the host. Returns how long it took on the device. A
    /// backend that only queues work during a step launches and awaits it here.
    fn end_step(&mut self) -> StepTimes;

    /// Returns the number of row batches into which the rows of a stack are divided, in order, so that none
    /// has more than [`StepLimits::rows_at_once`]. Spans of the decoder are divided as well, except openings
    /// ([`crate::Span::is_opening`]), which are in row batches without others.
    fn row_batches(&self, stack: SpanStack) -> usize;

    /// Makes row batch number `batch` of a stack the current rows, and returns their range among the rows of
    /// the stack; the first batch of a stack without rows is empty. Rows, positions and output rows of the
    /// other operations refer to the current rows; output rows are numbered from 0 in each row batch.
    fn select_rows(&mut self, stack: SpanStack, batch: usize) -> Range<usize>;

    /// Makes all rows of a stack the current rows, which must be one row batch, and returns their number.
    fn select_stack(&mut self, stack: SpanStack) -> usize {
        assert!(self.row_batches(stack) <= 1, "the rows of the {stack:?} are several batches");
        self.select_rows(stack, 0).len()
    }

    /// Does those of `copies` that are for `table`: copies whole pages, K and V, in the cache of one layer.
    fn copy_pages(&mut self, table: KvTable, copies: &[PageCopy], cache: &mut KvLayer<Self::Buf>);

    /// Looks up embeddings: x (rows, width) = the rows of `table` (tokens, width) for the tokens of the
    /// current rows. Row 0 of `table` belongs to token `first`; a token outside the table gives zeros.
    fn embed(&mut self, table: &Weight<Self::Buf>, first: usize, x: &mut Self::Buf);

    /// Adds position embeddings: x (rows, width) += row `position + offset + type * type_rows` of `table`
    /// (positions, width), which has `type_rows` rows for each type of tokens; 0 if all have the same.
    fn embed_positions(
        &mut self,
        table: &Weight<Self::Buf>,
        offset: usize,
        type_rows: usize,
        x: &mut Self::Buf,
    );

    /// Multiplies by a weight: y (rows, n) = x (rows, k) · wᵀ, plus bias (n) if given. If the format of the
    /// weight uses int8 activations on this device, x is first quantized as [`crate::quant::Int8Block`]
    /// defines.
    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<Self::Buf>,
        bias: Option<&Self::Buf>,
        x: &Self::Buf,
        y: &mut Self::Buf,
    ) {
        self.matmul_to(rows, (w, OutputColumns { first: 0, of: w.n }), bias, x, y);
    }

    /// Multiplies x (rows, k) by a weight (n, k) as [`Backend::matmul`] does, but into n of the columns of y
    /// (rows, `of`), and writes no others. The bias has a value for each column of y.
    fn matmul_to(
        &mut self,
        rows: usize,
        w: (&Weight<Self::Buf>, OutputColumns),
        bias: Option<&Self::Buf>,
        x: &Self::Buf,
        y: &mut Self::Buf,
    );

    /// Multiplies each head by a matrix of its own: n of the columns of each head of y (rows, heads, `of`) =
    /// x (rows, heads, k) · wᵀ, where w (heads * n, k) has the matrices of all heads, one after another. Each
    /// head has the result of [`Backend::matmul`]. Other columns are not written.
    fn matmul_heads(
        &mut self,
        rows: usize,
        heads: usize,
        w: (&Weight<Self::Buf>, OutputColumns),
        x: &Self::Buf,
        y: &mut Self::Buf,
    );

    /// Runs several GEMMs with the same input, each with the result of [`Backend::matmul`]. The input may be
    /// the result of [`Backend::norm`] or [`Backend::activate`]. A device may fuse these operations and
    /// quantize the input once for all GEMMs.
    fn gemms(&mut self, rows: usize, input: InputOperand<Self::Buf>, gemms: &mut [Gemm<Self::Buf>]) {
        run_gemms_separately(self, rows, input, gemms);
    }

    /// Normalizes rows: y = norm(x), both (rows, width).
    fn norm(&mut self, rows: usize, norm: &Norm<Self::Buf>, x: &Self::Buf, y: &mut Self::Buf);

    /// Normalizes rows in place: x (rows, width) = norm(x).
    fn norm_in_place(&mut self, rows: usize, norm: &Norm<Self::Buf>, x: &mut Self::Buf);

    /// Computes the rotations of RoPE: angles (rows, dims / 2, 2) = cosine and sine of each pair, by the
    /// position of the row and the reserved length of its sequence. They are valid for every layer of the
    /// step.
    fn rope_angles(&mut self, rope: &Rope<Self::Buf>, angles: &mut Self::Buf);

    /// Applies RoPE in place: rotates the first `rope.dims` dimensions of each head of x (rows, heads,
    /// head_dim) by `angles`.
    fn rope(
        &mut self,
        rope: &Rope<Self::Buf>,
        angles: &Self::Buf,
        heads: usize,
        head_dim: usize,
        x: &mut Self::Buf,
    );

    /// Writes k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) to the cache, at the positions of the
    /// rows in `table`. Nothing is read from v if the cache has V in K ([`KvLayout::v_in_k`]).
    fn store_kv(&mut self, table: KvTable, k: &Self::Buf, v: &Self::Buf, cache: &mut KvLayer<Self::Buf>);

    /// Computes attention: out (rows, heads, v_dim) = softmax(q · kᵀ · scale) · v, for q (rows, heads,
    /// k_dim). Each row attends to the cached positions that the mask allows; the mask must be valid for the
    /// table ([`Mask::is_valid_for`]). A row without visible positions gives zeros. A row on the null page
    /// attends only to itself, and to nothing through the cross table. A sink ([`AttentionShape::sinks`])
    /// takes a part of the weights of a head, except on the null page. Distance scores
    /// ([`AttentionShape::distances`]) are added to q · kᵀ.
    ///
    /// With a [`StepLimits::attended_fraction`] below 1, a generated token
    /// ([`crate::batch::SpanTokens::is_generated`]) uses top-k sparse attention through its own table: each
    /// head sums the values of that fraction of the earlier visible positions, those with the largest scores,
    /// and of the token's own position. Ties go to the lower position, and NaN is the smallest score. The
    /// softmax weights are still those over all visible positions, and the sink.
    fn attention(
        &mut self,
        shape: &AttentionShape<Self::Buf>,
        q: &Self::Buf,
        cache: &KvLayer<Self::Buf>,
        out: &mut Self::Buf,
    );

    /// Returns whether [`Backend::attention_fetching_values`] is implemented.
    fn fetches_values(&self) -> bool {
        false
    }

    /// Computes attention as [`Backend::attention`] does, with the same results, over a cache of which some
    /// pages of V are not present. Rows that use top-k sparse attention read from `values` what they need of
    /// these, once it is known; other rows do not see them.
    fn attention_fetching_values(
        &mut self,
        shape: &AttentionShape<Self::Buf>,
        q: &Self::Buf,
        (cache, values): (&KvLayer<Self::Buf>, &dyn ValueSource),
        out: &mut Self::Buf,
    ) {
        let _ = (shape, q, cache, values, out);
        unreachable!("it is called only if the device fetches values; this is a bug")
    }

    /// Applies an activation function: gate = act(gate) * up, all (rows, width); without `up`, gate =
    /// act(gate). [`Activation::ClampedSwiglu`] also changes `up`.
    fn activate(
        &mut self,
        rows: usize,
        width: usize,
        act: Activation,
        gate: &mut Self::Buf,
        up: Option<&Self::Buf>,
    );

    /// Adds scaled rows: x += factor * y, both (rows, width).
    fn add(&mut self, rows: usize, width: usize, factor: f32, x: &mut Self::Buf, y: &Self::Buf);

    /// Multiplies by a factor: x (rows, width) *= factor.
    fn scale(&mut self, rows: usize, width: usize, factor: f32, x: &mut Self::Buf);

    /// Applies a softcap: x (rows, width) = cap * tanh(x / cap).
    fn softcap(&mut self, rows: usize, width: usize, cap: f32, x: &mut Self::Buf);

    /// Limits numbers: x (rows, width) = the number in the range from -bound to bound that is nearest to x.
    fn clamp(&mut self, rows: usize, width: usize, bound: f32, x: &mut Self::Buf);

    /// Gates rows: x (rows, width) *= sigmoid(gate), with one gate logit per row: gate (rows).
    fn gate_rows(&mut self, rows: usize, width: usize, gate: &Self::Buf, x: &mut Self::Buf);

    /// Allocates the scratch memory of [`Backend::moe`] for inputs of width `hidden`. It may be called
    /// again with the same shape. Fails when memory is exhausted.
    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError>;

    /// Computes a mixture of experts: y (rows, hidden) = the sum of the selected experts' results for x
    /// (rows, hidden), each multiplied by its score ([`MoeShape::weighs_input`]), added in the order of
    /// experts. The `top_k` largest `router` logits (rows, experts) select the experts; ties go to the lower
    /// index, and NaN counts as negative infinity. With a correction ([`Experts::correction`]), or if groups
    /// are chosen by sums ([`GroupScore::TopTwo`]), the largest scores in F32, plus the correction, select
    /// instead. With [`MoeShape::groups`], only experts of the groups with the largest scores, by the same
    /// numbers, are selected; ties of groups go to the lower one. `experts` are those of this device, from
    /// `shape.first_expert` on; selected experts of other devices contribute nothing. The experts that rows
    /// select are known before the first one computes, and only these are used ([`Experts::for_each`]). Fails
    /// if one of them cannot be read.
    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &Self::Buf,
        experts: Experts<Self::Buf>,
        x: &Self::Buf,
        y: &mut Self::Buf,
    ) -> Result<(), DeviceError>;

    /// All-reduce: x (rows, width) = the sum of x over all ranks of the stage, added in rank order. With one
    /// rank, x is unchanged. Unwinds with [`crate::Aborted`] if the stage is aborted.
    fn all_reduce(&mut self, rows: usize, width: usize, x: &mut Self::Buf);

    /// All-gather of columns: all (rows, sum of `widths`) = the `own` (rows, widths\[rank\]) of every rank,
    /// side by side in rank order. Unwinds with [`crate::Aborted`] if the stage is aborted.
    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &Self::Buf, all: &mut Self::Buf);

    /// Copies columns: `to` of y (rows * copies, `to.of`), as many from `to.first` on, = the given columns of
    /// x (rows, width), of each row in as many successive rows. Other columns are not written. `rows` are the
    /// rows of x, and the copies of each.
    fn copy_columns(
        &mut self,
        rows: (usize, usize),
        x: (usize, Range<usize>, &Self::Buf),
        to: (OutputColumns, &mut Self::Buf),
    );

    /// Gathers output rows: y (outputs.len(), width) = the rows of x (rows, width) that are the output rows
    /// number `outputs` of the current rows.
    fn gather_output_rows(&mut self, outputs: Range<usize>, width: usize, x: &Self::Buf, y: &mut Self::Buf);

    /// Appends rows of x (rows, width), after the final norm, to the hidden states of `out`. The rows are
    /// those of a span with [`crate::batch::SpanOutput::Hidden`].
    fn append_hidden(&mut self, rows: Range<usize>, width: usize, x: &Self::Buf, out: &mut StepOutput);

    /// Samples or scores the output rows number `outputs` of the current rows from their logits
    /// (outputs.len(), vocab), at most [`StepLimits::logit_rows`] rows. Appends the results to `out` in
    /// order, and stores each sampled token as the last token of its slot; of several rows of a slot, the
    /// last one counts. A token that a row of the draft model samples becomes the next draft of its slot
    /// instead, and its logits are kept if the batch says so ([`StepBatch::draft_logits`]).
    ///
    /// The result is defined by [`crate::reference::sample_counted`]: add biases, apply penalties and the
    /// mask; divide by the temperature; apply top-k, top-p and min-p to the candidates in descending order,
    /// ties by id; take the candidate with the largest sum of scaled logit and noise
    /// ([`crate::reference::draw`]), which is a function of seed, position and token id. Biases and
    /// penalties that leave no candidate are ignored, a mask never is. The sampled token of a row with
    /// penalties is counted in its slot.
    ///
    /// The logits of all rows of the call that the host draws are handed over before anything is waited for,
    /// and a fast backend samples the rows without late inputs before it waits. A row whose late input does
    /// not come, or whose mask allows no token, fails ([`crate::batch::RowFailure`]). Unwinds with
    /// [`crate::Aborted`] if the step is aborted.
    fn sample(
        &mut self,
        outputs: Range<usize>,
        logits: &Self::Buf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    );

    /// Returns one of the page tables of a slot, with the changes of the current step.
    fn page_table(&self, slot: u32, table: KvTable) -> &[Page];
}
