//! Evaluation of chunks by a model on its devices.
//!
//! Steps are sent to the group like those of the decode loop: as prompt chunks of one sequence in slot 0,
//! which owns all pages.
//! Invariant: chunks are independent: each begins at position 0, and attention is causal.

use super::chunks::{Chunk, RowOutput};
use crate::actors::EngineSetup;
use crate::actors::device::Step;
use crate::actors::group::{Devices, Epoch, Group, GroupConfig};
use crate::cli::start;
use crate::config::{Config, DeviceKind, KvSize};
use crate::model::ModelSource;
use crate::quantize::Observations;
use crate::text::Tokenizer;
use anyhow::{Result, ensure};
use mainstem_kernels::{
    KvTable, SampleMode, SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens,
    StepBatch, StepLimits, TableUpdate,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum bytes of logits per step, unless a single row is larger.
const LOGIT_BYTES: usize = 64 << 20;

/// A loaded model that evaluates chunks.
pub struct Evaluator {
    group: Group,
    epoch: Epoch,
    step: Box<Step>,
    vocab: usize,
    /// Maximum rows per step.
    pub rows: usize,
    /// Description of the devices.
    pub device: String,
    /// Rows evaluated so far.
    pub rows_read: usize,
    /// Time of all steps so far.
    pub time: Duration,
}

impl Evaluator {
    /// Loads the model for chunks of at most `context` tokens. If there are `observations`, the inputs of its
    /// GEMMs are added to them.
    pub async fn start(
        config: &Config,
        source: &Arc<ModelSource>,
        tokenizer: &Arc<Tokenizer>,
        context: usize,
        observations: Option<&Arc<Observations>>,
    ) -> Result<Evaluator> {
        let vocab = source.spec.vocab;
        let rows = (LOGIT_BYTES / (vocab * size_of::<f32>())).clamp(1, context);
        let config = size_config(config, context, rows);
        let is_fake = |kind| matches!(kind, DeviceKind::Fake { .. });
        let computes = !config.device.devices().any(|device| is_fake(device.kind));
        ensure!(computes, "fake devices compute nothing, so there are no logits");
        let setup = start::engine_setup(&config, source)?;
        start::check_memory(&config.device, source, &setup)?;
        let factories = match observations {
            None => start::factories(&config.device, source, tokenizer, &setup),
            Some(seen) => start::observed_factories(&config.device, source, tokenizer, &setup, seen),
        };
        let (group, built) = Group::start(factories, group_config(&setup)).await?;
        let mut step = Box::new(Step::with_capacity(&setup.limits));
        step.batch.table_updates.extend(page_tables(&setup.limits));
        Ok(Evaluator {
            epoch: group.epoch(),
            group,
            step,
            vocab,
            rows: config.scheduler.token_budget,
            device: start::merge_reports(built.into_iter().flatten().collect()).device,
            rows_read: 0,
            time: Duration::ZERO,
        })
    }

    /// Evaluates rows of a chunk, after all rows before them. Returns the logits of each row if they are
    /// wanted, else nothing. Logits are (vocab,) F32 in little-endian bytes.
    pub async fn evaluate(
        &mut self,
        chunk: &Chunk<'_>,
        rows: Range<usize>,
        wanted: RowOutput,
    ) -> Result<std::slice::ChunksExact<'_, u8>> {
        let mut step = std::mem::take(&mut self.step);
        fill_batch(&mut step.batch, chunk, rows.clone(), wanted);
        let began = Instant::now();
        let ran = self.group.send(step, self.epoch)?.await;
        self.time += began.elapsed();
        self.rows_read += rows.len();
        ran.result?;
        self.step = ran.step;
        self.step.batch.clear();
        let logits = self.step.output.logits.chunks_exact(self.vocab * size_of::<f32>());
        let expected = if wanted == RowOutput::Logits { rows.len() } else { 0 };
        ensure!(logits.len() == expected, "{} rows of logits, not {expected}; this is a bug", logits.len());
        Ok(logits)
    }
}

/// Returns the configuration for one sequence of `context` tokens, in steps of at most `rows` rows.
fn size_config(config: &Config, context: usize, rows: usize) -> Config {
    let mut config = config.clone();
    config.scheduler.slots = 1;
    config.scheduler.token_budget = config.scheduler.token_budget.min(rows);
    config.scheduler.is_budget_auto = false;
    config.kv.max_context = Some(context);
    config.kv.size = KvSize::Tokens(context);
    config
}

fn group_config(setup: &EngineSetup) -> GroupConfig {
    GroupConfig {
        step_timeout: setup.step_timeout,
        ..GroupConfig::new(setup.partition.device_names(), setup.limits, setup.row_bytes)
    }
}

/// Returns the page table entries that give slot 0 all pages but the null page. Those of windowed layers are
/// used in turn.
fn page_tables(limits: &StepLimits) -> impl Iterator<Item = TableUpdate> + use<> {
    let entry = |table, index, page| TableUpdate { slot: 0, table, index, page };
    let own = (0..limits.table_len() as u32).map(move |index| entry(KvTable::Own, index, index + 1));
    let in_turn = limits.window.map_or(1, |window| limits.pages_of_window(window)) as u32;
    let windowed = 0..limits.window_table_len() as u32;
    own.chain(windowed.map(move |index| entry(KvTable::Window, index, index % in_turn + 1)))
}

/// Adds rows of a chunk to a batch, as one span.
fn fill_batch(batch: &mut StepBatch, chunk: &Chunk, rows: Range<usize>, wanted: RowOutput) {
    batch.tokens.extend_from_slice(&chunk.tokens[rows.clone()]);
    batch.return_logits = wanted == RowOutput::Logits;
    batch.spans.push(Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: 0,
        start: rows.start as u32,
        tokens: SpanTokens::Given { at: 0, len: rows.len() as u32 },
        table: SpanTable::Own,
        reserved: chunk.tokens.len() as u32,
        encoder_len: 0,
        output: if batch.return_logits { SpanOutput::All } else { SpanOutput::None },
    });
    if batch.return_logits {
        let scored =
            |token: &u32| SamplingParams { mode: SampleMode::Score(*token), ..SamplingParams::GREEDY };
        batch.sampling.extend(chunk.tokens[rows.start + 1..=rows.end].iter().map(scored));
    }
}
