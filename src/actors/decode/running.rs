//! A running sequence, and the spans that it adds to a step.
//!
//! Invariant: the positions of a span follow from the steps that were sent, whether their results are back or
//! not.

use super::DecodeConfig;
use crate::actors::kv::{ComputedPositions, EndedSequence, GrowingSequence};
use crate::actors::live::LiveSequence;
use crate::actors::loop_metrics::{LoopMetrics, SequenceTimes};
use crate::actors::prefill::PromptChunk;
use crate::actors::queue::Preemptible;
use crate::actors::sequence::{Progress, Sequence, SequenceKey};
use crate::actors::speculator::Speculator;
use crate::decoding::{HostPool, HostSequence, RowMean};
use crate::memory::Lease;
use crate::request::{self, Request, Task, Token};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens};
use std::sync::Arc;

/// A sequence that holds a slot.
pub(super) struct RunningSequence {
    pub(super) key: SequenceKey,
    pub(super) slot: Slot,
    pub(super) sequence: Box<Sequence>,
    /// Whether it is a beam of a search, which has the tokens before its last one.
    pub(super) is_beam: bool,
    /// The prefill chunk for the next step.
    pub(super) chunk: Option<PromptChunk>,
    /// Whether the last chunk of its prompt has been scheduled.
    pub(super) prompt_scheduled: bool,
    /// Number of tokens that the next step continues from: those received, and with run-ahead the one that
    /// the step in flight samples.
    pub(super) scheduled: u32,
    /// Number of generated tokens whose results are back; 0 during prefill.
    pub(super) received: u32,
    /// These tokens, without the one that ends the sequence.
    pub(super) generated: Vec<u32>,
    /// Number of these tokens that are computed like a prompt, because the sequence was preempted.
    pub(super) resumed: u32,
    /// Whether it was preempted before.
    was_preempted: bool,
    /// Number of leading positions that were in its pages when it began.
    found_positions: usize,
    /// Number of leading positions whose steps were sent, and of those that the KV manager knows of.
    pub(super) sent_positions: usize,
    reported_positions: usize,
    /// Number of generated tokens that the KV manager knows.
    reported_tokens: usize,
    /// Number of pages that the sequence has.
    pub(super) pages: usize,
    /// Number of pages of its encoder positions.
    cross_pages: usize,
    /// Number of its pages that others held when it began.
    shared_pages: usize,
    /// Whether it skips this iteration, because it has no page for the next position.
    pub(super) is_stalled: bool,
    /// Number of its rows in flight that have results.
    pub(super) awaited: usize,
    /// Whether its end has been sent; it leaves when the next iteration is scheduled.
    pub(super) finished: bool,
    pub(super) times: SequenceTimes,
    /// Log-probabilities of prompt tokens, until the first token is generated.
    pub(super) prompt_logprobs: Vec<Token>,
    /// The mean of the hidden states that are back, of a text that is embedded by it.
    pub(super) mean: RowMean,
    /// Number of tokens that a grammar forced after the last sampled one.
    pub(super) forced: u32,
    /// The host's part in choosing its tokens, if it has one.
    pub(super) host: Option<HostSequence>,
    /// The speculation on its tokens, if it has one.
    pub(super) speculator: Option<Speculator>,
}

/// The pages of a sequence when it begins.
pub(super) struct LeasedPages {
    pages: usize,
    cross_pages: usize,
    shared_pages: usize,
    /// Number of leading positions that need no computation.
    computed: usize,
}

impl LeasedPages {
    /// Returns what a lease has.
    pub(super) fn of(lease: &Lease) -> LeasedPages {
        let (pages, cross_pages) = (lease.own().len(), lease.cross().len());
        let shared_pages = pages + cross_pages - lease.unshared();
        LeasedPages { pages, cross_pages, shared_pages, computed: lease.computed() }
    }
}

impl RunningSequence {
    /// Creates the state of a sequence whose first chunk was just scheduled, and which has leased pages. It
    /// has no slot yet. `jump_limit` is the maximum number
    /// of tokens that a grammar may force at once, `prior` the rate at which drafts were accepted so far.
    pub(super) fn new(
        mut sequence: Box<Sequence>,
        leased: LeasedPages,
        meters: &LoopMetrics,
        pool: &Arc<HostPool>,
        config: &DecodeConfig,
        (jump_limit, prior): (usize, f64),
    ) -> RunningSequence {
        let was_preempted = sequence.progress.is_some();
        let progress = sequence.progress.take().unwrap_or_else(|| {
            let Request { plan, constraint, prompt, max_tokens, logprobs, speculation, .. } =
                &sequence.request;
            let is_penalized = !sequence.request.sampling.penalties.is_none();
            // Forced tokens have no rows, and so neither log-probabilities nor counts on the device.
            let limit = if logprobs.is_none() && !is_penalized { jump_limit } else { 0 };
            let (plan, constraint) = (plan.as_ref(), constraint.as_ref());
            Progress {
                generated: Vec::new(),
                host: HostSequence::begin(pool, plan, constraint, prompt, *max_tokens, limit),
                times: meters.record_scheduled(sequence.request.class, sequence.arrived),
                speculator: speculation
                    .filter(|_| sequence.request.beams.is_none() && !is_penalized)
                    .map(|it| Speculator::new(it, plan.map(|plan| &**plan), prompt, prior))
                    .map(|it| if config.limits.draft_logits { it } else { it.without_draft_logits() }),
            }
        });
        let Progress { generated, host, times, mut speculator } = progress;
        if let Some(speculator) = &mut speculator {
            speculator.begin(leased.computed, config.draft_context);
        }
        let resumed = generated.len() as u32;
        RunningSequence {
            key: sequence.key,
            slot: Slot::MAX,
            chunk: None,
            prompt_scheduled: false,
            scheduled: resumed,
            received: resumed,
            generated,
            resumed,
            was_preempted,
            found_positions: leased.computed,
            sent_positions: 0,
            reported_positions: 0,
            reported_tokens: resumed as usize,
            pages: leased.pages,
            cross_pages: leased.cross_pages,
            shared_pages: leased.shared_pages,
            is_stalled: false,
            awaited: 0,
            finished: false,
            times,
            prompt_logprobs: Vec::new(),
            mean: RowMean::default(),
            forced: 0,
            host,
            is_beam: false,
            speculator,
            sequence,
        }
    }

    /// Gives the sequence a slot, which may be the one that it has.
    pub(super) fn move_to(&mut self, slot: Slot) {
        if self.slot != slot {
            self.slot = slot;
            self.sequence.events.set_slot(slot);
        }
    }

    /// Returns the progress that watchers see.
    pub(super) fn live(&self) -> LiveSequence {
        let request = &self.sequence.request;
        let prompt = request.prompt.len();
        LiveSequence {
            slot: self.slot,
            number: self.key.0,
            prompt,
            computed: self.sent_positions.max(self.found_positions).min(prompt),
            generated: self.received,
            limit: request.max_tokens,
        }
    }

    /// Returns the state of a beam like this one, or of the first beam of the search that it begins.
    pub(super) fn as_beam(&self, key: SequenceKey) -> RunningSequence {
        let Sequence { group, ref request, ref events, ref account, arrived, ref charged, .. } =
            *self.sequence;
        let sequence = Sequence {
            key,
            group,
            request: request.clone(),
            events: events.clone(),
            followers: Vec::new(),
            account: account.clone(),
            permits: Vec::new(),
            lease: None,
            arrived,
            progress: None,
            charged: charged.clone(),
        };
        RunningSequence {
            key,
            slot: self.slot,
            sequence: Box::new(sequence),
            is_beam: true,
            chunk: None,
            prompt_scheduled: true,
            scheduled: self.received,
            received: self.received,
            generated: Vec::new(),
            resumed: 0,
            was_preempted: self.was_preempted,
            found_positions: self.sequence.request.prompt.len(),
            // The search's first sequence has reported what is in the pages of the prompt.
            sent_positions: 0,
            reported_positions: 0,
            reported_tokens: 0,
            pages: self.pages,
            cross_pages: self.cross_pages,
            shared_pages: self.shared_pages,
            is_stalled: false,
            awaited: self.awaited,
            finished: false,
            times: self.times,
            prompt_logprobs: Vec::new(),
            mean: RowMean::default(),
            forced: 0,
            host: None,
            speculator: None,
        }
    }

    /// Continues a beam with a token. It shares `pages` full pages, and may need another one.
    pub(super) fn continue_beam(&mut self, token: u32, pages: usize) {
        self.received += 1;
        self.scheduled = self.received;
        self.generated.clear();
        self.generated.push(token);
        self.pages = pages;
    }

    /// Gives up the slot and the pages, when no later step has rows of the sequence.
    pub(super) fn release(&mut self) -> EndedSequence {
        EndedSequence { key: self.key, computed: self.report() }
    }

    /// Returns the sequence as it waits to be computed again, after it was preempted.
    pub(super) fn suspend(self) -> Box<Sequence> {
        let RunningSequence { mut sequence, generated, host, times, speculator, .. } = self;
        sequence.progress = Some(Progress { generated, host, times, speculator });
        sequence
    }

    /// Whether others may take its slot and pages. Beams make way together.
    pub(super) fn may_make_way(&self) -> bool {
        let Request { task, beams, .. } = &self.sequence.request;
        // A search that is about to begin makes way when it has begun.
        let is_beginning = beams.is_some() && self.is_decoding();
        *task == Task::Generate && !self.is_beam && !is_beginning && !self.ends_with_scheduled()
    }

    /// Returns the sequence as others see it that may take its slots. It has `slots` of them.
    pub(super) fn preemptible(&self, slots: usize) -> Preemptible {
        Preemptible {
            key: self.key,
            class: self.sequence.request.class,
            client: self.sequence.account.id,
            slots,
            // Of a beam's pages, all but the last ones are the others', too.
            pages: (self.pages + self.cross_pages + slots - 1).saturating_sub(self.shared_pages),
            was_preempted: self.was_preempted,
            // A search begins anew.
            progress: if self.is_beam { 0 } else { (self.received - self.resumed) as usize },
        }
    }

    /// Returns the pages that the next step needs, if the sequence has too few.
    pub(super) fn growth(&self, page_positions: usize) -> Option<GrowingSequence> {
        let positions = self.next_position() as usize;
        let with_drafts = positions + self.depth();
        let needed = with_drafts.div_ceil(page_positions);
        (needed > self.pages).then_some(GrowingSequence { key: self.key, positions, with_drafts })
    }

    /// Returns a report of the positions whose steps were sent and whose tokens are known, if they fill a
    /// page or complete the prompt.
    pub(super) fn report_filled(&mut self, page_positions: usize) -> Option<ComputedPositions> {
        let (known, before, prompt) = (self.known_positions(), self.reported_positions, self.prompt_len());
        let is_new = known / page_positions > before / page_positions || (before < prompt && prompt <= known);
        is_new.then(|| self.report())
    }

    /// Reports the positions whose steps were sent and whose tokens are known.
    pub(super) fn report(&mut self) -> ComputedPositions {
        self.reported_positions = self.known_positions();
        // The tokens of these positions; the prompt's are known.
        let end = self.reported_positions.saturating_sub(self.sequence.request.prompt.len());
        let generated = self.generated.get(self.reported_tokens..end).unwrap_or_default().to_vec();
        self.reported_tokens = self.reported_tokens.max(end);
        ComputedPositions { key: self.key, positions: self.reported_positions, generated }
    }

    fn known_positions(&self) -> usize {
        if self.is_beam {
            return 0;
        }
        let drafted = self.speculator.as_ref().map_or(usize::MAX, Speculator::shared_positions);
        self.sent_positions.min(self.sequence.request.prompt.len() + self.generated.len()).min(drafted)
    }

    /// Returns the number of tokens that are computed like a prompt.
    fn prompt_len(&self) -> usize {
        self.sequence.request.prompt.len() + self.resumed as usize
    }

    /// Whether the sequence ends with the steps that were sent, whatever their results are.
    pub(super) fn ends_with_scheduled(&self) -> bool {
        let request = &self.sequence.request;
        match request.task {
            Task::Generate => self.scheduled >= request.max_tokens.max(1),
            Task::Embed(_) | Task::EmbedTokens | Task::FillMask { .. } => self.prompt_scheduled,
        }
    }

    /// Whether the prompt is complete and tokens are generated.
    pub(super) fn is_decoding(&self) -> bool {
        self.scheduled > self.resumed
    }

    /// Returns the number of generated tokens before the next one.
    pub(super) fn generated_count(&self) -> u32 {
        self.scheduled
    }

    /// Counts a generated token whose result is back; `continues` is whether it is the input of a later step.
    pub(super) fn receive(&mut self, token: u32, continues: bool) {
        self.received += 1;
        self.scheduled = self.scheduled.max(self.received);
        self.sequence.account.charge_generated(1);
        if let Some(speculator) = &mut self.speculator {
            speculator.learn(token);
        }
        if continues {
            self.generated.push(token);
        }
    }

    /// Returns the tokens that the next decode step computes: the last sampled one and those forced after it.
    pub(super) fn next_input(&self) -> &[u32] {
        &self.generated[self.generated.len().saturating_sub(1 + self.forced as usize)..]
    }

    /// Returns the last token that was received; 0 if there is none.
    pub(super) fn last_token(&self) -> u32 {
        self.generated.last().copied().unwrap_or_default()
    }

    /// Returns the position of the next token.
    pub(super) fn next_position(&self) -> u32 {
        self.sequence.request.prompt.len() as u32 + self.generated_count()
    }

    /// Returns the number of positions whose tokens are known.
    pub(super) fn next_known_position(&self) -> usize {
        self.sequence.request.prompt.len() + self.received as usize
    }

    /// Returns the decoder span of `tokens` from position `start` on.
    pub(super) fn span(&self, start: u32, tokens: SpanTokens, want: SpanOutput) -> Span {
        Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: self.slot,
            start,
            tokens,
            table: SpanTable::Own,
            reserved: self.sequence.positions() as u32,
            encoder_len: self.encoder_len(),
            output: want,
        }
    }

    /// Returns the encoder span of the whole encoder input.
    pub(super) fn encoder_span(&self, tokens: SpanTokens, want: SpanOutput) -> Span {
        Span {
            stack: SpanStack::Encoder,
            table: SpanTable::Scratch,
            reserved: self.encoder_len(),
            ..self.span(0, tokens, want)
        }
    }

    fn encoder_len(&self) -> u32 {
        self.sequence.request.encoder_input.len() as u32
    }

    /// Returns the row that samples the next token, without logit biases.
    pub(super) fn sample_row(&self) -> SamplingParams {
        let request = &self.sequence.request;
        request::sample_row(&request.sampling, self.next_position(), request.logprobs)
    }
}
