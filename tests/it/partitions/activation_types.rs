//! Devices whose activations are not F32: what is handed from stage to stage, and what is allocated.

use super::*;
use mainstem::model::executor::estimate_report;
use mainstem_kernels::reference::ReferenceSizes;
use mainstem_kernels::{
    ActivationType, DeviceError, DeviceSizes, HeldShapes, HostBuf, KvLayout, KvTable, PackedLayout,
    SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits,
    StepTimes, TableUpdate,
};

/// A reference backend with F16 activations outside of its operations: its buffers are twice as long as asked
/// for, and F16 values go in and out during a step.
struct HalfActivations {
    inner: Reference,
    is_in_step: bool,
}

/// The sizes that a device with these activations would have.
struct HalfSizes;

impl DeviceSizes for HalfSizes {
    fn describe(&self) -> String {
        ReferenceSizes.describe()
    }

    fn activation_type(&self) -> ActivationType {
        ActivationType::F16
    }

    fn packed_layout(&self, ty: QuantType, n: usize, k: usize) -> PackedLayout {
        ReferenceSizes.packed_layout(ty, n, k)
    }

    fn kv_bytes(&self, layout: &KvLayout) -> Result<[usize; 2], DeviceError> {
        ReferenceSizes.kv_bytes(layout)
    }

    fn step_bytes(&self, limits: &StepLimits, shapes: &HeldShapes) -> usize {
        ReferenceSizes.step_bytes(limits, shapes)
    }
}

/// Converts little-endian F16 values to F32 values.
fn widen(bytes: &[u8]) -> Vec<u8> {
    let mut values = Vec::new();
    ActivationType::F16.append_f32(bytes, &mut values);
    values
}

impl Backend for HalfActivations {
    type Buf = HostBuf;

    mainstem_kernels::delegate_backend!(
        inner: sizes, threads, allocated_bytes, activation_precision, join_stage, rank_and_count,
        upload_weight, prepare_weight, refill_weight, alloc_kv, prepare, map_rows, row_batches, select_rows,
        copy_pages, embed, embed_positions, matmul_to, matmul_heads, gemms, norm, norm_in_place, rope_angles,
        rope, store_kv, attention, activate, add, scale, softcap, clamp, gate_rows, prepare_moe, moe,
        all_reduce, all_gather, copy_columns, gather_output_rows, append_hidden, sample, page_table,
    );

    fn activation_type(&self) -> ActivationType {
        ActivationType::F16
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostBuf, DeviceError> {
        self.inner.alloc(2 * bytes)
    }

    fn begin_step(&mut self, batch: &StepBatch) {
        self.is_in_step = true;
        self.inner.begin_step(batch);
    }

    fn end_step(&mut self) -> StepTimes {
        self.is_in_step = false;
        self.inner.end_step()
    }

    fn upload(&mut self, to: &mut HostBuf, offset: usize, bytes: &[u8]) {
        match self.is_in_step {
            true => self.inner.upload(to, 2 * offset, &widen(bytes)),
            false => self.inner.upload(to, offset, bytes),
        }
    }

    fn download(&mut self, from: &HostBuf, offset: usize, bytes: &mut [u8]) {
        let mut values = vec![0; 2 * bytes.len()];
        self.inner.download(from, 2 * offset, &mut values);
        let values: Vec<f32> = values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        QuantType::F16.quantize(&values, bytes);
    }
}

fn half() -> HalfActivations {
    HalfActivations { inner: Reference::new(), is_in_step: false }
}

/// Builds the executor of a shard on a new device.
fn executor(source: &ModelSource, shard: &Shard, kv: KvCacheConfig) -> ModelExecutor<HalfActivations> {
    ModelExecutor::new(half(), source, shard, kv, script::limits(&source.spec)).expect("the part loads")
}

/// Two stages: the first hands on F16 rows, and the tokens are those of F32.
#[test]
fn stages_hand_on_rows_in_the_devices_type() {
    for model in ["mistral", "t5"] {
        let copied = family(model, "activation-types");
        let source = open(&copied.0);
        let script = script_of(&source, QuantType::F32);
        let layers = source.spec.layers();
        let shares = [vec![1], vec![1]];
        let partition = partition(&source.spec, &[layers - 1, 1], &shares, ExpertSplit::Column);
        let [mut first, mut last] =
            [0, 1].map(|stage| executor(&source, &partition.shard(stage, 0), script.kv));
        let outputs = script.batches.iter().map(|batch| {
            let (mut handoff, mut output) = (ActivationHandoff::default(), StepOutput::default());
            let to_last = HandoffPorts { output: Some(&mut handoff), ..HandoffPorts::default() };
            first.run(batch, to_last, &mut output).expect("the first stage runs");
            let rows = |stack| batch.rows_of(stack) * source.spec.hidden * 2;
            let expected = [SpanStack::Encoder, SpanStack::Decoder].map(rows);
            assert_eq!([handoff.encoder.len(), handoff.decoder.len()], expected, "{model}");
            let from_first = HandoffPorts { input: Some(&handoff), ..HandoffPorts::default() };
            last.run(batch, from_first, &mut output).expect("the last stage runs");
            output
        });
        check(model, &outputs.collect::<Vec<_>>(), &script.outputs, Near::Within(2e-2));
    }
}

/// Only the angles of RoPE and the encoder's cache do not depend on the type. Logits are returned as F32.
#[test]
fn buffers_and_logits_follow_the_devices_type() {
    let source = open(&fixture("gqa"));
    let (whole, limits) = (Shard::whole(&source.spec), script::limits(&source.spec));
    let kv = KvCacheConfig { ty: QuantType::F32, pages: 3, window_pages: 0 };
    let mut wide = ModelExecutor::new(Reference::new(), &source, &whole, kv, limits).expect("it loads");
    let angles = limits.rows * source.spec.last_stack().ropes[0].dims * size_of::<f32>();
    let foretold = estimate_report(&HalfSizes, &source, &whole, kv, limits).expect("it is known");
    assert_eq!(foretold.activation_bytes - angles, (wide.report().activation_bytes - angles) / 2);
    // The device allocates twice what it is asked for.
    let mut half = executor(&source, &whole, kv);
    assert_eq!(half.report().activation_bytes, 2 * foretold.activation_bytes);

    let tokens: Vec<u32> = (20..29).collect();
    let mut batch = StepBatch { tokens, return_logits: true, ..StepBatch::default() };
    batch.table_updates.push(TableUpdate { slot: 0, table: KvTable::Own, index: 0, page: 1 });
    batch.spans.push(Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: 0,
        start: 0,
        tokens: SpanTokens::Given { at: 0, len: 9 },
        table: SpanTable::Own,
        reserved: 9,
        encoder_len: 0,
        output: SpanOutput::Last,
    });
    batch.sampling.push(SamplingParams::GREEDY);
    let logits = [&mut half as &mut dyn Executor, &mut wide].map(|device| {
        let mut output = StepOutput::default();
        device.run(&batch, HandoffPorts::default(), &mut output).expect("the step runs");
        let values = output.logits.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
        values.collect::<Vec<f32>>()
    });
    assert_eq!(logits[0].len(), source.spec.vocab);
    assert_ne!(logits[0], logits[1], "they were F16");
    for (half, wide) in logits[0].iter().zip(&logits[1]) {
        assert!((half - wide).abs() <= 1e-3 * wide.abs().max(1e-3), "{half} is not {wide}");
    }
}
