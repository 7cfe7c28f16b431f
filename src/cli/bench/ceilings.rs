//! Roofline model: the machine's peak bandwidth and arithmetic speed, measured between samples, and the
//! minimum step time that follows.
//!
//! A step must read every weight once and multiply every row by the weights. The longer of the two times is
//! the minimum step time; its ratio to the measured time is the fraction of the roofline. Attention is not
//! counted.
//! Invariant: a fraction refers to the roofline measured right before its sample, with the device's threads
//! and instruction set.

use super::report::What;
use crate::actors::engine::available_memory;
use crate::config::{DeviceConfig, DeviceKind};
use crate::model::ModelSource;
use crate::model::load;
use crate::model::spec::{AddedSpec, StackSpec};
use mainstem_kernels::cpu::{Ceilings, CpuBackend, CpuConfig, Meter};
use mainstem_kernels::quant::Operand;
use mainstem_kernels::{Backend, DeviceError, Inputs};
use serde::Serialize;

/// Bytes of memory to read: several times the largest cache.
const BYTES: usize = 512 << 20;

/// Measures the roofline with a CPU backend configured like the benchmarked device.
pub struct Measured {
    cpu: CpuBackend,
    meter: Meter,
}

impl Measured {
    /// Creates a meter for a model on a single CPU device; `None` for other devices, or if memory is short.
    pub fn new(config: &DeviceConfig) -> Result<Option<Measured>, DeviceError> {
        let is_alone = config.groups.len() == 1 && config.groups[0].len() == 1;
        let is_cpu = is_alone && config.groups[0][0].kind == DeviceKind::Cpu;
        if !is_cpu || available_memory() < 4 * BYTES {
            return Ok(None);
        }
        let (threads, isa, inputs) = (config.threads, config.isa, config.inputs);
        let cpu = CpuBackend::new(CpuConfig { threads, isa, inputs })?;
        Ok(Some(Measured { cpu, meter: Meter::new(BYTES)? }))
    }

    /// Measures the roofline once.
    pub fn now(&mut self) -> Ceilings {
        self.meter.measure(&mut self.cpu)
    }

    /// Activation precision of the backend.
    pub fn inputs(&self) -> Inputs {
        self.cpu.inputs()
    }
}

/// Minimum work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes of weights to read.
    pub read: f64,
    /// Operations of GEMMs with F32 inputs.
    pub f32: f64,
    /// Operations of GEMMs with int8 inputs.
    pub codes: f64,
    /// Operations of GEMMs with BF16 inputs.
    pub bf16: f64,
}

/// The bottleneck of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    Reading,
    Arithmetic,
}

impl Work {
    /// Computes the work of a step of `rows` rows, of which `wanted` need logits; `None` for a mixture of
    /// experts, where it depends on the routing of each row.
    pub fn of(source: &ModelSource, inputs: Inputs, rows: usize, wanted: usize) -> Option<Work> {
        let stack = source.spec.last_stack();
        if stack.layers.iter().any(|layer| layer.mlp.experts() > 0) {
            return None;
        }
        let head = stack.head.as_ref().map(|head| (&head.table.name, head.tied));
        let learned = |stack: &StackSpec| match &stack.added {
            Some(AddedSpec::Learned { table, .. }) => Some(table.name.clone()),
            _ => None,
        };
        let looked_up: Vec<String> = stack
            .embedding
            .iter()
            .map(|embedding| embedding.table.name.clone())
            .chain(learned(stack))
            .collect();
        let mut work = Work::default();
        for tensor in load::records(source, &source.spec) {
            let is_head = head.is_some_and(|(name, _)| *name == tensor.name);
            if !is_head && looked_up.contains(&tensor.name) {
                continue;
            }
            work.read += tensor.bytes as f64;
            let [n, k] = tensor.shape[..] else { continue };
            let operations = 2.0 * (n * k) as f64 * if is_head { wanted } else { rows } as f64;
            *match tensor.ty.operand(inputs) {
                Operand::F32 => &mut work.f32,
                Operand::Codes => &mut work.codes,
                Operand::Bf16 => &mut work.bf16,
            } += operations;
        }
        Some(work)
    }

    /// Computes the work of a step of a test; `None` for tests without a model.
    pub fn of_test(
        source: &ModelSource,
        inputs: Inputs,
        what: What,
        sequences: usize,
        tokens: usize,
    ) -> Option<Work> {
        match what {
            What::Prefill => Work::of(source, inputs, sequences * tokens, sequences),
            What::Decode { .. } | What::Fused { .. } => Work::of(source, inputs, sequences, sequences),
            What::Loop | What::Events | What::Http => None,
        }
    }

    /// Returns the minimum time of the work in seconds, and its bottleneck.
    pub fn least(&self, ceilings: &Ceilings) -> (f64, Limit) {
        let reading = self.read / ceilings.read;
        let arithmetic = self.f32 / ceilings.f32 + self.codes / ceilings.codes + self.bf16 / ceilings.bf16;
        if reading >= arithmetic { (reading, Limit::Reading) } else { (arithmetic, Limit::Arithmetic) }
    }
}

impl Limit {
    /// The bottleneck's name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Reading => "reading",
            Limit::Arithmetic => "arithmetic",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::start::open;
    use crate::model::ModelRef;

    const EVEN: Ceilings = Ceilings { read: 1e9, f32: 1e9, codes: 1e9, bf16: 1e9 };

    #[test]
    fn the_longer_of_reading_and_arithmetic_is_the_minimum_time() {
        let work = Work { read: 2e9, f32: 1e9, codes: 0.5e9, bf16: 0.25e9 };
        assert_eq!(work.least(&EVEN), (2.0, Limit::Reading));
        assert_eq!(work.least(&Ceilings { f32: 0.25e9, ..EVEN }), (4.75, Limit::Arithmetic));
    }

    #[test]
    fn rows_multiply_the_arithmetic_and_not_what_is_read() {
        let (source, _) = open(&ModelRef::Demo, None).unwrap();
        let of = |rows, wanted| Work::of(&source, Inputs::Plain, rows, wanted).unwrap();
        let (one, eight, prompt) = (of(1, 1), of(8, 8), of(8, 1));
        assert_eq!((eight.read, eight.f32), (one.read, 8.0 * one.f32));
        assert!(prompt.f32 < eight.f32 && prompt.f32 > one.f32, "one row of eight goes through the head");
        assert_eq!((one.codes, one.bf16), (0.0, 0.0));
    }
}
