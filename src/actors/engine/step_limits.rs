//! The limits of the engine's steps, by configuration and model.
//!
//! Invariant: they are known before any allocation.

use super::{TOP_LOGPROBS, memory};
use crate::actors::limits::BEAM_CANDIDATES;
use crate::actors::prompting_defaults;
use crate::config::{Config, SchedulerConfig};
use crate::model::ModelSource;
use crate::model::spec::Kind;
use anyhow::{Result, ensure};
use mainstem_kernels::{KvLayout, StepLimits};

/// Rows of a step that are computed at once if weights are read for each step: as many as compute at nearly
/// the full rate, with small buffers.
const STREAMED_BATCH_ROWS: usize = 512;

/// Token budget if weights are read for each step: enough rows for each read to take less time than computing
/// on a large machine.
const STREAMED_TOKEN_BUDGET: usize = 2048;

/// Returns the configured scheduler, with the token budget of a model whose weights are read for each step if
/// none was configured.
pub(super) fn scheduler_for(config: &Config, source: &ModelSource) -> SchedulerConfig {
    let scheduler = config.scheduler.clone();
    let most = if source.offload.is_some() && scheduler.is_budget_auto { STREAMED_TOKEN_BUDGET } else { 0 };
    SchedulerConfig { token_budget: scheduler.token_budget.max(most), ..scheduler }
}

/// Returns the rows of the longest opening ([`mainstem_kernels::Span::is_opening`]), given the values of the
/// keys that limit it. Fails if it is shorter than any.
fn opening_rows(limits: [(&str, usize); 3]) -> Result<usize> {
    let (least, [first, ..]) = (KvLayout::BLOCK_POSITIONS, limits);
    let (key, rows) = limits.into_iter().fold(first, |a, b| if b.1 < a.1 { b } else { a });
    ensure!(
        rows >= least,
        "attention.mla is \"fast\", but {key} is {rows}: the first chunk of a prompt that it is for has at \
         least {least} tokens"
    );
    Ok(rows)
}

/// Returns the limits of a step, before the KV cache limits the positions. Fails if the configuration asks
/// for openings and lets none be long enough.
pub(super) fn step_limits(
    config: &Config,
    source: &ModelSource,
    context: usize,
    devices: usize,
) -> Result<StepLimits> {
    let spec = &source.spec;
    let SchedulerConfig { slots, token_budget, .. } = scheduler_for(config, source);
    let encoder_positions = spec.encoder_context().min(config.kv.max_context.unwrap_or(usize::MAX));
    let batch_rows = match (config.scheduler.batch_rows, &source.offload) {
        (Some(rows), _) => rows,
        (None, Some(_)) => STREAMED_BATCH_ROWS,
        (None, None) => usize::MAX,
    };
    // Prompt tokens of one step, or one longer encoder input, beside a window that may be full of decoding
    // slots and holes.
    let rows = token_budget.max(encoder_positions) + slots;
    // An opening is not divided, so there may be one beside as many tokens.
    let opening_rows = match spec.opens_with_heads() {
        true => opening_rows([
            ("scheduler.token_budget", token_budget),
            ("scheduler.batch_rows", batch_rows),
            (if config.kv.max_context.is_some() { "kv.max_context" } else { "the model's context" }, context),
        ])?,
        false => 0,
    };
    let returns_hidden = spec.kind == Kind::Encoder
        || spec.classifier.is_some()
        || prompting_defaults::embeds(source, &config.model);
    let limits = StepLimits {
        slots,
        rows: rows + opening_rows,
        batch_rows: if opening_rows > 0 { batch_rows.min(rows) } else { batch_rows },
        logit_rows: if spec.has_head() { slots.max(32) } else { 1 },
        positions: if spec.decoder.is_some() { context } else { 0 },
        encoder_positions,
        page_positions: config.kv.page_size,
        window: None,
        top_logprobs: BEAM_CANDIDATES.max(TOP_LOGPROBS),
        vocab: spec.vocab,
        hidden: if returns_hidden { spec.hidden } else { 0 },
        drafts: source.draft.as_ref().map_or(0, |_| config.speculation.max_drafts),
        // Every request may choose the rule that needs them. With several devices, drafts are made in a
        // step before, which does not keep them.
        draft_logits: source.draft.is_some() && devices == 1,
        counts_tokens: spec.decoder.is_some() && spec.has_head(),
        opening_rows,
        attended_fraction: config.kv.sparse_attention,
    };
    Ok(StepLimits { window: memory::windowed_layers(spec, &limits), ..limits })
}
