//! A whole model as a drafter: it generates drafts token by token, in a pass for each draft of all slots.
//!
//! Invariant: it lies whole on one device, and its caches have the pages of the target's own tables, with the
//! same numbers. A step allocates nothing.

#[cfg(test)]
mod tests;

use super::activations::Activations;
use super::drafter::Drafter;
use super::load;
use super::load_target::LoadTarget;
use super::offload::TransferPath;
use super::schedule::{self, DecoderCaches, StepIo};
use super::shard::Shard;
use super::source::ModelSource;
use super::weights::Model;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{
    Backend, DeviceError, DraftSpan, HandoffPorts, Penalties, SampleMode, SamplingParams, StepBatch,
    StepLimits, StepOutput,
};

/// A draft model with its KV cache, on the device of its target.
pub struct DraftModel<Buf> {
    model: Model<Buf>,
    kv: DecoderCaches<Buf>,
    act: Activations<Buf>,
    /// The limits of the steps, with the positions that both models have.
    limits: StepLimits,
    /// The rows of a pass, and the drafts that it made.
    pass: StepBatch,
    made: StepOutput,
}

/// Returns the limits of the steps for the draft model.
pub fn draft_limits(source: &ModelSource, limits: &StepLimits) -> StepLimits {
    StepLimits {
        positions: limits.positions.min(source.spec.context),
        encoder_positions: 0,
        // All layers use the own table: drafts may begin at a position whose window the target has passed.
        window: None,
        // A pass samples one row of each slot at most.
        logit_rows: limits.logit_rows.min(limits.slots),
        opening_rows: 0,
        ..*limits
    }
}

/// Loads the weights of a draft model into `target`.
pub fn load_draft<T: LoadTarget>(
    target: &mut T,
    source: &ModelSource,
    limits: &StepLimits,
) -> Result<Model<T::Buf>> {
    ensure!(limits.drafts > 0, "a draft model without drafts; this is a bug");
    let shard = Shard::whole(&source.spec);
    let (path, spec) = (TransferPath::default(), source.spec.clone());
    let loaded = load::load(target, (source, &path), &shard, spec, &draft_limits(source, limits));
    loaded.map(|(model, _)| model).context("loading the draft model")
}

impl<Buf> DraftModel<Buf> {
    /// Creates a drafter from a loaded model, its caches and its activation buffers.
    pub fn new(
        model: Model<Buf>,
        kv: DecoderCaches<Buf>,
        act: Activations<Buf>,
        limits: StepLimits,
    ) -> DraftModel<Buf> {
        let made = StepOutput { tokens: Vec::with_capacity(limits.slots), ..StepOutput::default() };
        DraftModel { model, kv, act, limits, pass: StepBatch::with_capacity(&limits), made }
    }

    /// Prepares the batch of pass number `number`: all known tokens in the first one, and the last draft of
    /// the slots that want another in each further one.
    fn prepare_pass(&mut self, batch: &StepBatch, number: u32) {
        self.pass.clear();
        self.pass.draft_logits = batch.draft_logits;
        if number == 0 {
            self.pass.tokens.extend_from_slice(&batch.tokens);
        }
        for span in batch.drafts.iter().filter(|span| number == 0 || number < span.count) {
            self.pass.spans.push(span.pass_span(number));
            if number < span.count {
                self.pass.sampling.push(draft_params(span, number));
            }
        }
    }

    /// Asserts that the spans are within the limits.
    fn check(&self, batch: &StepBatch) {
        for span in &batch.drafts {
            let computed = span.tokens.len() + (span.count as usize).saturating_sub(1);
            let end = span.start as usize + computed;
            assert!(end <= self.limits.positions, "{span:?} is beyond the context of the draft model");
            assert!(span.count as usize <= self.limits.drafts, "{span:?} makes too many drafts");
        }
    }
}

/// Returns the sampling parameters of draft number `number` of a span.
fn draft_params(span: &DraftSpan, number: u32) -> SamplingParams {
    SamplingParams {
        mode: SampleMode::Sample,
        position: span.sampling.position + number,
        penalties: Penalties::NONE,
        masked: false,
        logprob: false,
        top_logprobs: 0,
        ..span.sampling
    }
}

/// Writes the drafts of one pass to their places among those of the batch.
fn place_drafts(batch: &StepBatch, pass: u32, made: &StepOutput, drafts: &mut [u32]) {
    let (mut made, mut at) = (made.tokens.iter(), 0);
    for span in &batch.drafts {
        if pass < span.count {
            let made = made.next().expect("a pass samples a row for each draft; this is a bug");
            drafts[at + pass as usize] = made.token;
        }
        at += span.count as usize;
    }
}

impl<B: Backend> Drafter<B> for DraftModel<B::Buf> {
    fn make_drafts(&mut self, b: &mut B, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError> {
        schedule::copy_pages(b, batch, &mut self.kv);
        if batch.drafts.is_empty() {
            return Ok(());
        }
        self.check(batch);
        out.drafts.resize(batch.draft_count(), 0);
        let passes = batch.drafts.iter().map(|span| span.count).max().unwrap_or(0).max(1);
        for number in 0..passes {
            self.prepare_pass(batch, number);
            self.made.clear();
            b.map_rows(&self.pass);
            let traffic = StepIo {
                batch: &self.pass,
                biases: &batch.logit_biases,
                handoff: HandoffPorts::default(),
                out: &mut self.made,
                trace: None,
            };
            schedule::run_decoder(b, &mut self.model, &mut self.kv, &mut self.act, traffic)?;
            place_drafts(batch, number, &self.made, &mut out.drafts);
        }
        Ok(())
    }
}
