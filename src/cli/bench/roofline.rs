//! Roofline model: the machine's peak bandwidth and arithmetic speed, measured between samples, and the
//! minimum step time that follows.
//!
//! A step must read every weight once and multiply every row by the weights. The longer of the two times is
//! the minimum step time; its ratio to the measured time is the fraction of the roofline. Attention is not
//! counted.
//! Invariant: a fraction refers to the roofline measured right before its sample, with the device's threads
//! and instruction set.

use super::sample::TestKind;
use crate::actors::engine::available_memory;
use crate::config::{DeviceConfig, DeviceKind};
use crate::model::ModelSource;
use crate::model::load;
use crate::model::spec::{PositionEmbeddingSpec, StackSpec};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Roofline, RooflineMeter};
use mainstem_kernels::quant::OperandFormat;
use mainstem_kernels::{ActivationPrecision, Backend, DeviceError};
use serde::Serialize;

/// Bytes of memory to read: several times the largest cache.
const BYTES: usize = 512 << 20;

/// Measures the roofline with a CPU backend configured like the benchmarked device.
pub struct RooflineBench {
    cpu: CpuBackend,
    meter: RooflineMeter,
}

impl RooflineBench {
    /// Creates a meter for a model on a single CPU device; `None` for other devices, or if memory is short.
    pub fn new(config: &DeviceConfig) -> Result<Option<RooflineBench>, DeviceError> {
        let is_alone = config.groups.len() == 1 && config.groups[0].len() == 1;
        let is_cpu = is_alone && config.groups[0][0].kind == DeviceKind::Cpu;
        if !is_cpu || available_memory() < 4 * BYTES {
            return Ok(None);
        }
        let (threads, isa, inputs) = (config.threads, config.isa, config.activation_precision);
        let cpu = CpuBackend::new(CpuConfig { threads, isa, activation_precision: inputs })?;
        Ok(Some(RooflineBench { cpu, meter: RooflineMeter::new(BYTES)? }))
    }

    /// Measures the roofline once.
    pub fn measure(&mut self) -> Roofline {
        self.meter.measure(&mut self.cpu)
    }

    /// Activation precision of the backend.
    pub fn activation_precision(&self) -> ActivationPrecision {
        self.cpu.activation_precision()
    }
}

/// Minimum work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Bytes of weights to read.
    pub read: f64,
    /// Operations of GEMMs with F32 inputs.
    pub f32: f64,
    /// Operations of GEMMs with int8 inputs.
    pub int8: f64,
    /// Operations of GEMMs with BF16 inputs.
    pub bf16: f64,
}

/// The bottleneck of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bottleneck {
    Reading,
    Arithmetic,
}

impl StepWork {
    /// Computes the work of a step of `rows` rows, of which `wanted` need logits; `None` for a mixture of
    /// experts, where it depends on the routing of each row.
    pub fn for_rows(
        source: &ModelSource,
        inputs: ActivationPrecision,
        rows: usize,
        wanted: usize,
    ) -> Option<StepWork> {
        let stack = source.spec.last_stack();
        if stack.layers.iter().any(|layer| layer.mlp.experts() > 0) {
            return None;
        }
        let head = stack.head.as_ref().map(|head| (&head.table.name, head.tied));
        let learned = |stack: &StackSpec| match &stack.position_embedding {
            Some(PositionEmbeddingSpec::Learned { table, .. }) => Some(table.name.clone()),
            _ => None,
        };
        let looked_up: Vec<String> = stack
            .embedding
            .iter()
            .map(|embedding| embedding.table.name.clone())
            .chain(learned(stack))
            .collect();
        let mut work = StepWork::default();
        for tensor in load::records(source, &source.spec) {
            let is_head = head.is_some_and(|(name, _)| *name == tensor.name);
            if !is_head && looked_up.contains(&tensor.name) {
                continue;
            }
            work.read += tensor.bytes as f64;
            let [n, k] = tensor.shape[..] else { continue };
            let operations = 2.0 * (n * k) as f64 * if is_head { wanted } else { rows } as f64;
            match tensor.ty.operand_format(inputs) {
                OperandFormat::F32 => work.f32 += operations,
                OperandFormat::Int8 => work.int8 += operations,
                OperandFormat::Bf16 => work.bf16 += operations,
                // Three products of BF16 each.
                OperandFormat::Bf16Pair => work.bf16 += 3.0 * operations,
            }
        }
        Some(work)
    }

    /// Computes the work of a step of a test; `None` for tests without a model.
    pub fn for_test(
        source: &ModelSource,
        inputs: ActivationPrecision,
        what: TestKind,
        sequences: usize,
        tokens: usize,
    ) -> Option<StepWork> {
        match what {
            TestKind::Prefill => StepWork::for_rows(source, inputs, sequences * tokens, sequences),
            TestKind::Decode { .. }
            | TestKind::Fused { .. }
            | TestKind::Constrained { .. }
            | TestKind::HostDrawn { .. } => StepWork::for_rows(source, inputs, sequences, sequences),
            TestKind::Loop | TestKind::WatchedLoop | TestKind::Events | TestKind::Http => None,
        }
    }

    /// Returns the minimum time of the work in seconds, and its bottleneck.
    pub fn min_seconds(&self, roofline: &Roofline) -> (f64, Bottleneck) {
        let reading = self.read / roofline.read;
        let arithmetic = self.f32 / roofline.f32 + self.int8 / roofline.int8 + self.bf16 / roofline.bf16;
        if reading >= arithmetic {
            (reading, Bottleneck::Reading)
        } else {
            (arithmetic, Bottleneck::Arithmetic)
        }
    }
}

impl Bottleneck {
    /// The bottleneck's name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Bottleneck::Reading => "reading",
            Bottleneck::Arithmetic => "arithmetic",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::start::open;
    use crate::model::ModelRef;

    const EVEN: Roofline = Roofline { read: 1e9, f32: 1e9, int8: 1e9, bf16: 1e9 };

    #[test]
    fn the_longer_of_reading_and_arithmetic_is_the_minimum_time() {
        let work = StepWork { read: 2e9, f32: 1e9, int8: 0.5e9, bf16: 0.25e9 };
        assert_eq!(work.min_seconds(&EVEN), (2.0, Bottleneck::Reading));
        assert_eq!(work.min_seconds(&Roofline { f32: 0.25e9, ..EVEN }), (4.75, Bottleneck::Arithmetic));
    }

    #[test]
    fn rows_multiply_the_arithmetic_and_not_what_is_read() {
        let (source, _) = open(&ModelRef::Demo, None).unwrap();
        let of = |rows, wanted| StepWork::for_rows(&source, ActivationPrecision::F32, rows, wanted).unwrap();
        let (one, eight, prompt) = (of(1, 1), of(8, 8), of(8, 1));
        assert_eq!((eight.read, eight.f32), (one.read, 8.0 * one.f32));
        assert!(prompt.f32 < eight.f32 && prompt.f32 > one.f32, "one row of eight goes through the head");
        assert_eq!((one.int8, one.bf16), (0.0, 0.0));
    }
}
