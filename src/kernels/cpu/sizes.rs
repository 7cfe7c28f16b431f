//! The sizes of what a CPU device allocates: they follow from its threads, instruction set and activation
//! precision.
//!
//! Invariant: the device itself allocates by these sizes.

use super::attention;
use super::bf16::{self, Bf16Isa};
use super::bf16_pairs;
use super::config::{CpuConfig, Isa};
use super::gemms::ScratchWidths;
use super::moe::{self, MoeScratchSizes};
use super::packed;
use super::sample::SampleScratch;
use super::scratch::{CpuScratch, ScratchSizes};
use super::scratch_memory::ByteCount;
use super::simd::Level;
use crate::backend::{
    ActivationType, DeviceError, DeviceSizes, HeldShapes, KvLayout, MoeShape, PackedLayout, StepLimits,
};
use crate::quant::{ActivationPrecision, OperandFormat, QuantType};

/// The sizes of a CPU device. Creating them starts no threads.
#[derive(Clone, Copy)]
pub struct CpuSizes {
    pub(super) threads: usize,
    pub(super) level: Level,
    pub(super) bf16_isa: Option<Bf16Isa>,
    pub(super) precision: ActivationPrecision,
}

impl CpuSizes {
    /// Type of the activations of CPU devices.
    pub const ACTIVATION_TYPE: ActivationType = ActivationType::F32;

    /// Returns the sizes of a device with this configuration.
    ///
    /// Fails when the configuration has no threads or the CPU lacks the requested instruction set.
    pub fn new(config: CpuConfig) -> Result<CpuSizes, DeviceError> {
        if config.threads == 0 {
            return Err(DeviceError::Unsupported("a CPU device needs at least one thread".into()));
        }
        let bf16_isa = Bf16Isa::new(config.isa);
        if config.isa == Isa::Amx && bf16_isa.is_none() {
            return Err(DeviceError::Unsupported(
                "this CPU or its operating system does not support amx".into(),
            ));
        }
        let precision = match bf16_isa {
            Some(isa) if isa.amx().is_some() => config.activation_precision.with_bf16_pairs(),
            Some(_) => config.activation_precision.with_bf16(),
            None => config.activation_precision,
        };
        Ok(CpuSizes { threads: config.threads, level: Level::new(config.isa)?, bf16_isa, precision })
    }

    /// Returns the instruction set in use; never `Auto`.
    pub fn isa(&self) -> Isa {
        match self.bf16_isa {
            #[cfg(target_arch = "x86_64")]
            Some(Bf16Isa::Amx(_)) => Isa::Amx,
            #[cfg(target_arch = "x86_64")]
            Some(Bf16Isa::Avx512(_)) => Isa::Avx512,
            _ => self.level.isa(),
        }
    }

    /// Returns the number of threads, and what decides about the operands of GEMMs.
    pub(super) fn threads_and_operands(&self) -> (usize, (ActivationPrecision, Option<Bf16Isa>)) {
        (self.threads, (self.precision, self.bf16_isa))
    }

    /// Returns the dimensions of the scratch for a weight of `ty` with `k` columns.
    pub(super) fn weight_scratch(&self, ty: QuantType, k: usize) -> ScratchSizes {
        let widths = ScratchWidths::for_weight(self.precision, ty, k);
        ScratchSizes { widths, ..ScratchSizes::default() }
    }

    /// Returns the dimensions of the scratch for a KV cache.
    pub(super) fn kv_scratch(&self, layout: &KvLayout) -> ScratchSizes {
        ScratchSizes {
            attention_per_thread: attention::scratch_len(layout),
            partial_len: attention::partial_len(layout),
            ..ScratchSizes::default()
        }
    }

    /// Returns the dimensions of the scratch for a mixture of experts with inputs of width `hidden`.
    pub(super) fn moe_scratch(&self, shape: &MoeShape, hidden: usize) -> ScratchSizes {
        let MoeShape { experts, top_k, width, .. } = *shape;
        let moe = MoeScratchSizes { experts, top_k, hidden, width, choices: moe::choice_width(shape) };
        ScratchSizes { moe, ..ScratchSizes::default() }
    }

    /// Returns the dimensions of the scratch for steps within `limits`.
    pub(super) fn step_scratch(&self, limits: &StepLimits) -> ScratchSizes {
        ScratchSizes {
            rows: limits.rows_at_once().max(limits.logit_rows),
            sparse_per_thread: attention::sparse_scratch_len(limits),
            partial_count: attention::partial_capacity(limits, self.threads),
            ..ScratchSizes::default()
        }
    }
}

impl DeviceSizes for CpuSizes {
    fn columns_of_heads(&self, _: usize, k: usize) -> usize {
        k // A thread computes one head after another, in its share of the scratch.
    }

    fn describe(&self) -> String {
        let threads = self.threads;
        format!("cpu ({}, {threads} {})", self.isa().name(), if threads == 1 { "thread" } else { "threads" })
    }

    fn activation_type(&self) -> ActivationType {
        CpuSizes::ACTIVATION_TYPE
    }

    /// The operand type decides about the arrangement, and the instruction set only about the operand type.
    fn packed_layout(&self, ty: QuantType, n: usize, k: usize) -> PackedLayout {
        let (arrangement, version, bytes) = match ty.operand_format(self.precision) {
            OperandFormat::F32 => return PackedLayout::rows(ty, n, k),
            OperandFormat::Int8 => (
                packed::ARRANGEMENT,
                packed::VERSION,
                packed::packed_bytes(ty, n, k).expect("the format is packed; this is a bug"),
            ),
            OperandFormat::Bf16 => (bf16::ARRANGEMENT, bf16::VERSION, bf16::packed_bytes(n, k)),
            OperandFormat::Bf16Pair => {
                (bf16_pairs::ARRANGEMENT, bf16_pairs::VERSION, bf16::packed_bytes(n, k))
            }
        };
        PackedLayout { arrangement, version, ty, n, k, bytes }
    }

    fn kv_bytes(&self, layout: &KvLayout) -> Result<[usize; 2], DeviceError> {
        attention::kv_bytes(layout)
    }

    fn step_bytes(&self, limits: &StepLimits, shapes: &HeldShapes) -> usize {
        let HeldShapes { weights, caches, mixtures } = shapes;
        let weights = weights.iter().map(|(ty, k)| self.weight_scratch(*ty, *k));
        let caches = caches.iter().map(|layout| self.kv_scratch(layout));
        let mixtures = mixtures.iter().map(|(shape, hidden)| self.moe_scratch(shape, *hidden));
        let sizes = weights.chain(caches).chain(mixtures).fold(self.step_scratch(limits), ScratchSizes::max);
        let count = ByteCount::default();
        let counted = CpuScratch::default().grow(self.threads_and_operands(), sizes, &count);
        counted.expect("counting allocates nothing; this is a bug");
        drop(SampleScratch::new(limits, (self.threads, self.level), &count));
        count.bytes()
    }
}
