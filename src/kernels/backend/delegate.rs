//! Delegation of methods of [`crate::Backend`], for backends that wrap another one.
//!
//! Invariant: every method of the trait has a rule, with the signature of the trait.

/// Implements the listed methods of [`Backend`](crate::Backend) by those of the field with the given name,
/// which is a backend with the same type of buffers: `delegate_backend!(inner: describe, alloc, norm);`
/// within the `impl` block.
#[macro_export]
macro_rules! delegate_backend {
    ($inner:ident: $($method:ident),* $(,)?) => {
        $($crate::delegate_backend!(@$method $inner);)*
    };
    (@ref $inner:ident $name:ident($this:ident $(, $arg:ident: $ty:ty)*) $(-> $out:ty)?) => {
        fn $name(&$this $(, $arg: $ty)*) $(-> $out)? {
            $this.$inner.$name($($arg),*)
        }
    };
    (@mut $inner:ident $name:ident($this:ident $(, $arg:ident: $ty:ty)*) $(-> $out:ty)?) => {
        fn $name(&mut $this $(, $arg: $ty)*) $(-> $out)? {
            $this.$inner.$name($($arg),*)
        }
    };
    (@sizes $inner:ident) => { $crate::delegate_backend!(@ref $inner
        sizes(self) -> &dyn $crate::DeviceSizes); };
    (@describe $inner:ident) => { $crate::delegate_backend!(@ref $inner describe(self) -> String); };
    (@threads $inner:ident) => { $crate::delegate_backend!(@ref $inner threads(self) -> usize); };
    (@allocated_bytes $inner:ident) => { $crate::delegate_backend!(@ref $inner
        allocated_bytes(self) -> usize); };
    (@activation_precision $inner:ident) => { $crate::delegate_backend!(@ref $inner
        activation_precision(self) -> $crate::ActivationPrecision); };
    (@activation_type $inner:ident) => { $crate::delegate_backend!(@ref $inner
        activation_type(self) -> $crate::ActivationType); };
    (@join_stage $inner:ident) => { $crate::delegate_backend!(@mut $inner
        join_stage(self, stage: Box<dyn $crate::Collective>)); };
    (@rank_and_count $inner:ident) => { $crate::delegate_backend!(@ref $inner
        rank_and_count(self) -> (usize, usize)); };
    (@alloc $inner:ident) => { $crate::delegate_backend!(@mut $inner
        alloc(self, bytes: usize) -> Result<Self::Buf, $crate::DeviceError>); };
    (@upload $inner:ident) => { $crate::delegate_backend!(@mut $inner
        upload(self, to: &mut Self::Buf, offset: usize, bytes: &[u8])); };
    (@download $inner:ident) => { $crate::delegate_backend!(@mut $inner
        download(self, from: &Self::Buf, offset: usize, bytes: &mut [u8])); };
    (@upload_weight $inner:ident) => { $crate::delegate_backend!(@mut $inner
        upload_weight(self, ty: $crate::QuantType, n: usize, k: usize,
            bytes: &[u8]) -> Result<$crate::Weight<Self::Buf>, $crate::DeviceError>); };
    (@prepare_weight $inner:ident) => { $crate::delegate_backend!(@mut $inner
        prepare_weight(self, ty: $crate::QuantType, k: usize) -> Result<(), $crate::DeviceError>); };
    (@refill_weight $inner:ident) => { $crate::delegate_backend!(@mut $inner
        refill_weight(self, w: &mut $crate::Weight<Self::Buf>, layout: &$crate::PackedLayout,
            packed: &[u8]) -> Result<(), $crate::DeviceError>); };
    (@alloc_kv $inner:ident) => { $crate::delegate_backend!(@mut $inner
        alloc_kv(self,
            layout: $crate::KvLayout) -> Result<$crate::KvLayer<Self::Buf>, $crate::DeviceError>); };
    (@alloc_host_kv $inner:ident) => { $crate::delegate_backend!(@mut $inner
        alloc_host_kv(self,
            layout: $crate::KvLayout) -> Result<$crate::KvLayer<Self::Buf>, $crate::DeviceError>); };
    (@prepare $inner:ident) => { $crate::delegate_backend!(@mut $inner
        prepare(self, limits: &$crate::StepLimits) -> Result<(), $crate::DeviceError>); };
    (@begin_step $inner:ident) => { $crate::delegate_backend!(@mut $inner
        begin_step(self, batch: &$crate::StepBatch)); };
    (@map_rows $inner:ident) => { $crate::delegate_backend!(@mut $inner
        map_rows(self, batch: &$crate::StepBatch)); };
    (@end_step $inner:ident) => { $crate::delegate_backend!(@mut $inner
        end_step(self) -> $crate::StepTimes); };
    (@row_batches $inner:ident) => { $crate::delegate_backend!(@ref $inner
        row_batches(self, stack: $crate::SpanStack) -> usize); };
    (@select_rows $inner:ident) => { $crate::delegate_backend!(@mut $inner
        select_rows(self, stack: $crate::SpanStack, batch: usize) -> std::ops::Range<usize>); };
    (@select_stack $inner:ident) => { $crate::delegate_backend!(@mut $inner
        select_stack(self, stack: $crate::SpanStack) -> usize); };
    (@copy_pages $inner:ident) => { $crate::delegate_backend!(@mut $inner
        copy_pages(self, table: $crate::KvTable, copies: &[$crate::PageCopy],
                cache: &mut $crate::KvLayer<Self::Buf>)); };
    (@embed $inner:ident) => { $crate::delegate_backend!(@mut $inner
        embed(self, table: &$crate::Weight<Self::Buf>, first: usize, x: &mut Self::Buf)); };
    (@embed_positions $inner:ident) => { $crate::delegate_backend!(@mut $inner
        embed_positions(self, table: &$crate::Weight<Self::Buf>, offset: usize, type_rows: usize,
            x: &mut Self::Buf)); };
    (@matmul_to $inner:ident) => { $crate::delegate_backend!(@mut $inner
        matmul_to(self, rows: usize, w: (&$crate::Weight<Self::Buf>, $crate::OutputColumns),
            bias: Option<&Self::Buf>, x: &Self::Buf, y: &mut Self::Buf)); };
    (@matmul_heads $inner:ident) => { $crate::delegate_backend!(@mut $inner
        matmul_heads(self, rows: usize, heads: usize, w: (&$crate::Weight<Self::Buf>, $crate::OutputColumns),
            x: &Self::Buf, y: &mut Self::Buf)); };
    (@gemms $inner:ident) => { $crate::delegate_backend!(@mut $inner
        gemms(self, rows: usize, input: $crate::InputOperand<Self::Buf>,
            gemms: &mut [$crate::Gemm<Self::Buf>])); };
    (@norm $inner:ident) => { $crate::delegate_backend!(@mut $inner
        norm(self, rows: usize, norm: &$crate::Norm<Self::Buf>, x: &Self::Buf, y: &mut Self::Buf)); };
    (@norm_in_place $inner:ident) => { $crate::delegate_backend!(@mut $inner
        norm_in_place(self, rows: usize, norm: &$crate::Norm<Self::Buf>, x: &mut Self::Buf)); };
    (@rope_angles $inner:ident) => { $crate::delegate_backend!(@mut $inner
        rope_angles(self, rope: &$crate::Rope<Self::Buf>, angles: &mut Self::Buf)); };
    (@rope $inner:ident) => { $crate::delegate_backend!(@mut $inner
        rope(self, rope: &$crate::Rope<Self::Buf>, angles: &Self::Buf, heads: usize, head_dim: usize,
            x: &mut Self::Buf)); };
    (@store_kv $inner:ident) => { $crate::delegate_backend!(@mut $inner
        store_kv(self, table: $crate::KvTable, k: &Self::Buf, v: &Self::Buf,
            cache: &mut $crate::KvLayer<Self::Buf>)); };
    (@attention $inner:ident) => { $crate::delegate_backend!(@mut $inner
        attention(self, shape: &$crate::AttentionShape<Self::Buf>, q: &Self::Buf,
            cache: &$crate::KvLayer<Self::Buf>, out: &mut Self::Buf)); };
    (@fetches_values $inner:ident) => { $crate::delegate_backend!(@ref $inner
        fetches_values(self) -> bool); };
    (@attention_fetching_values $inner:ident) => { $crate::delegate_backend!(@mut $inner
        attention_fetching_values(self, shape: &$crate::AttentionShape<Self::Buf>, q: &Self::Buf,
            cache: (&$crate::KvLayer<Self::Buf>, &dyn $crate::ValueSource), out: &mut Self::Buf)); };
    (@activate $inner:ident) => { $crate::delegate_backend!(@mut $inner
        activate(self, rows: usize, width: usize, act: $crate::Activation, gate: &mut Self::Buf,
            up: Option<&Self::Buf>)); };
    (@add $inner:ident) => { $crate::delegate_backend!(@mut $inner
        add(self, rows: usize, width: usize, factor: f32, x: &mut Self::Buf, y: &Self::Buf)); };
    (@scale $inner:ident) => { $crate::delegate_backend!(@mut $inner
        scale(self, rows: usize, width: usize, factor: f32, x: &mut Self::Buf)); };
    (@softcap $inner:ident) => { $crate::delegate_backend!(@mut $inner
        softcap(self, rows: usize, width: usize, cap: f32, x: &mut Self::Buf)); };
    (@clamp $inner:ident) => { $crate::delegate_backend!(@mut $inner
        clamp(self, rows: usize, width: usize, bound: f32, x: &mut Self::Buf)); };
    (@gate_rows $inner:ident) => { $crate::delegate_backend!(@mut $inner
        gate_rows(self, rows: usize, width: usize, gate: &Self::Buf, x: &mut Self::Buf)); };
    (@prepare_moe $inner:ident) => { $crate::delegate_backend!(@mut $inner
        prepare_moe(self, shape: &$crate::MoeShape, hidden: usize) -> Result<(), $crate::DeviceError>); };
    (@moe $inner:ident) => { $crate::delegate_backend!(@mut $inner
        moe(self, rows: usize, shape: &$crate::MoeShape, router: &Self::Buf,
            experts: $crate::Experts<Self::Buf>, x: &Self::Buf,
            y: &mut Self::Buf) -> Result<(), $crate::DeviceError>); };
    (@all_reduce $inner:ident) => { $crate::delegate_backend!(@mut $inner
        all_reduce(self, rows: usize, width: usize, x: &mut Self::Buf)); };
    (@all_gather $inner:ident) => { $crate::delegate_backend!(@mut $inner
        all_gather(self, rows: usize, widths: &[usize], own: &Self::Buf, all: &mut Self::Buf)); };
    (@copy_columns $inner:ident) => { $crate::delegate_backend!(@mut $inner
        copy_columns(self, rows: (usize, usize), x: (usize, std::ops::Range<usize>, &Self::Buf),
            to: ($crate::OutputColumns, &mut Self::Buf))); };
    (@gather_output_rows $inner:ident) => { $crate::delegate_backend!(@mut $inner
        gather_output_rows(self, outputs: std::ops::Range<usize>, width: usize, x: &Self::Buf,
            y: &mut Self::Buf)); };
    (@append_hidden $inner:ident) => { $crate::delegate_backend!(@mut $inner
        append_hidden(self, rows: std::ops::Range<usize>, width: usize, x: &Self::Buf,
            out: &mut $crate::StepOutput)); };
    (@sample $inner:ident) => { $crate::delegate_backend!(@mut $inner
        sample(self, outputs: std::ops::Range<usize>, logits: &Self::Buf,
            inputs: $crate::SamplingInputs<'_>, out: &mut $crate::StepOutput)); };
    (@page_table $inner:ident) => { $crate::delegate_backend!(@ref $inner
        page_table(self, slot: u32, table: $crate::KvTable) -> &[$crate::batch::Page]); };
}
