//! Scripts of steps for a model, with the outputs of a single device, to be replayed on several devices.
//!
//! Every token is fixed in its step, so that a script can be played without waiting for outputs.

use mainstem::model::executor::{Executor, KvCacheConfig};
use mainstem::model::{ModelSource, ModelSpec};
use mainstem_kernels::{
    Fraction, HandoffPorts, KvTable, PageCopy, QuantType, SampleMode, SamplingParams, SlotMove, Span,
    SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput, TableUpdate,
};

const SLOTS: u32 = 5;
const POSITIONS: usize = 64;
const PAGE: usize = 32;
/// Pages of a slot; its encoder input has one more.
const PAGES: u32 = (POSITIONS / PAGE) as u32;

/// First of the pages that no slot owns, to which pages are copied.
const SPARE: u32 = 1 + SLOTS * (PAGES + 1);

/// The steps, and the output of each.
pub struct Script {
    /// The cache configuration of the script.
    pub kv: KvCacheConfig,
    pub batches: Vec<StepBatch>,
    pub outputs: Vec<StepOutput>,
}

/// Returns token ids of a vocabulary of 96, the smallest of all fixtures.
fn words(number: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| 8 + ((number * 31 + i * 7 + i * i) % 88) as u32).collect()
}

pub fn limits(spec: &ModelSpec) -> StepLimits {
    StepLimits {
        slots: SLOTS as usize,
        rows: 80,
        batch_rows: usize::MAX,
        logit_rows: 4,
        positions: spec.decoder.as_ref().map_or(0, |stack| POSITIONS.min(stack.context)),
        encoder_positions: spec.encoder.as_ref().map_or(0, |_| PAGE),
        page_positions: PAGE,
        window: None,
        top_logprobs: 3,
        vocab: spec.vocab,
        hidden: if spec.decoder.is_some() { 0 } else { spec.hidden },
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: if spec.opens_with_heads() { 48 } else { 0 },
        attended_fraction: Fraction::ONE,
    }
}

impl Script {
    /// Creates a script by running the whole model on a device with this cache.
    pub fn of(
        source: &ModelSource,
        ty: QuantType,
        make: impl Fn(KvCacheConfig) -> Box<dyn Executor>,
    ) -> Script {
        let kv = KvCacheConfig { ty, pages: (SPARE + 2) as usize, window_pages: 0 };
        let mut script = Script { kv, batches: Vec::new(), outputs: Vec::new() };
        let device = &mut *make(kv);
        match source.spec.decoder.is_some() {
            true => script.tell(source, device),
            false => script.read(source, device),
        }
        let answers = script.outputs.iter().map(|output| output.tokens.len() + output.hidden.len());
        assert!(answers.sum::<usize>() > 30 && script.batches.len() >= 3, "it asks for something");
        script
    }

    fn ask(&mut self, mut batch: StepBatch, device: &mut dyn Executor) -> &StepOutput {
        batch.step = self.batches.len() as u64 + 1;
        let mut output = StepOutput::default();
        device.run(&batch, HandoffPorts::default(), &mut output).expect("one device runs the step");
        self.batches.push(batch);
        self.outputs.push(output);
        self.outputs.last().expect("it was just put there")
    }

    /// Adds sequences that join and leave at different steps, whole and chunked prompts, moves, page copies,
    /// and a hole.
    fn tell(&mut self, source: &ModelSource, device: &mut dyn Executor) {
        let mut tales = tales(&source.spec);
        for iteration in 0.. {
            let mut batch = StepBatch::default();
            for (_, number, to) in MOVES.iter().filter(|(at, ..)| *at == iteration) {
                batch.moves.push(SlotMove { from: tales[*number].slot, to: *to });
                tales[*number].slot = *to;
            }
            if iteration == 5 {
                tales[0].copy(&mut batch);
            }
            let mut sampled = Vec::new();
            let live = |tale: &Tale| iteration >= tale.joins && tale.sampled.len() < tale.tokens;
            for tale in tales.iter().filter(|tale| live(tale) && tale.given == 0) {
                tale.open(&mut batch);
            }
            for (number, tale) in tales.iter_mut().enumerate().filter(|(_, tale)| live(tale)) {
                if tale.go_on(&mut batch) {
                    sampled.push((number, batch.sampling.len() - 1));
                }
            }
            if batch.spans.is_empty() {
                return;
            }
            if iteration == 3 {
                hole(&mut batch);
            }
            let output = self.ask(batch, device);
            for (number, row) in sampled {
                tales[number].sampled.push(output.tokens[row].token);
            }
        }
    }

    /// Adds encoder texts, alone and batched, for hidden states and for masks.
    fn read(&mut self, source: &ModelSource, device: &mut dyn Executor) {
        let has_head = source.spec.has_head();
        for texts in [&[9][..], &[1, 20, 5], &[32, 7]] {
            let mut batch = StepBatch::default();
            for (slot, len) in texts.iter().enumerate() {
                encoder_span(&mut batch, slot as u32, &words(slot + len, *len));
                let span = batch.spans.last_mut().expect("it was just put there");
                span.output = match slot % 2 == 1 && has_head {
                    true => SpanOutput::Selected { at: batch.selected_rows.len() as u32, len: 2 },
                    false => SpanOutput::Hidden,
                };
                if span.output != SpanOutput::Hidden {
                    batch.selected_rows.extend([1, *len as u32 - 1]);
                    batch.sampling.extend([sample(0), sample(1)]);
                }
            }
            self.ask(batch, device);
        }
    }
}

fn sample(position: usize) -> SamplingParams {
    SamplingParams { logprob: true, top_logprobs: 3, position: position as u32, ..SamplingParams::GREEDY }
}

fn encoder_span(batch: &mut StepBatch, slot: u32, tokens: &[u32]) {
    let (at, len) = (batch.tokens.len() as u32, tokens.len() as u32);
    batch.tokens.extend_from_slice(tokens);
    batch.spans.push(Span {
        model: SpanModel::Target,
        stack: SpanStack::Encoder,
        slot,
        start: 0,
        tokens: SpanTokens::Given { at, len },
        table: SpanTable::Scratch,
        reserved: len,
        encoder_len: len,
        output: SpanOutput::None,
    });
}

/// Returns a row that is computed but whose result is discarded.
fn hole(batch: &mut StepBatch) {
    let at = batch.tokens.len() as u32;
    batch.tokens.push(0);
    batch.spans.push(Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: 3,
        start: 0,
        tokens: SpanTokens::Given { at, len: 1 },
        table: SpanTable::Null,
        reserved: 0,
        encoder_len: 0,
        output: SpanOutput::Last,
    });
    batch.sampling.push(SamplingParams::GREEDY);
}

/// A sequence of the script.
struct Tale {
    slot: u32,
    prompt: Vec<u32>,
    encoder_input: Vec<u32>,
    /// Prompt tokens per step.
    chunk: usize,
    /// The iteration at which the sequence joins.
    joins: usize,
    /// Number of tokens to sample.
    tokens: usize,
    given: usize,
    sampled: Vec<u32>,
}

/// Moves as (sequence, slot, iteration): of a decoding sequence, of one with an incomplete prompt, and of two
/// at once.
const MOVES: [(usize, usize, u32); 4] = [(4, 0, 4), (5, 3, 0), (6, 1, 3), (6, 0, 2)];

/// The third sequence leaves early, and the fourth takes its slot and pages. If there are openings, it begins
/// with one.
fn tales(spec: &ModelSpec) -> Vec<Tale> {
    let has_encoder = spec.encoder.is_some();
    let tale = |(slot, len, chunk, joins, tokens): (u32, usize, usize, usize, usize)| Tale {
        slot,
        prompt: words(len, len),
        encoder_input: if has_encoder { words(50 + len, 3 + len) } else { Vec::new() },
        chunk,
        joins,
        tokens,
        given: 0,
        sampled: Vec::new(),
    };
    let last = if spec.opens_with_heads() { (2, 40, 36, 4, 3) } else { (2, 9, 5, 4, 3) };
    [(0, 13, 32, 0, 8), (1, 17, 6, 0, 6), (2, 3, 32, 1, 2), last].map(tale).into()
}

impl Tale {
    /// Returns the pages of the sequence, and those of its encoder input, if any.
    fn open(&self, batch: &mut StepBatch) {
        let first = 1 + self.slot * (PAGES + 1);
        let entry = |table, index, page| TableUpdate { slot: self.slot, table, index, page };
        let own = (0..PAGES).map(|index| entry(KvTable::Own, index, first + PAGES - 1 - index));
        batch.table_updates.extend(own);
        if !self.encoder_input.is_empty() {
            batch.table_updates.push(entry(KvTable::Cross, 0, first + PAGES));
            encoder_span(batch, self.slot, &self.encoder_input);
        }
    }

    /// Replaces the first page of the sequence and of its encoder input by copies. The sequence started in
    /// slot 0, which is still free.
    fn copy(&self, batch: &mut StepBatch) {
        let mut copied = |table, page, to| {
            batch.page_copies.push(PageCopy { table: KvTable::Own, from: page, to });
            batch.table_updates.push(TableUpdate { slot: self.slot, table, index: 0, page: to });
        };
        copied(KvTable::Own, PAGES, SPARE);
        if !self.encoder_input.is_empty() {
            copied(KvTable::Cross, PAGES + 1, SPARE + 1);
        }
    }

    /// Adds the next chunk or the last token to the batch. Returns whether a token is sampled.
    fn go_on(&mut self, batch: &mut StepBatch) -> bool {
        let (start, begins) = (self.given + self.sampled.len().saturating_sub(1), self.given == 0);
        let tokens = match self.sampled.last() {
            Some(last) => vec![*last],
            None => self.prompt[self.given..].iter().take(self.chunk).copied().collect(),
        };
        if self.sampled.is_empty() {
            self.given += tokens.len();
        }
        let samples = self.given == self.prompt.len();
        // A prompt in one chunk also returns the log-probabilities of its tokens.
        let is_whole = begins && samples;
        let want = match (samples, is_whole) {
            (false, _) => SpanOutput::None,
            (true, true) => SpanOutput::All,
            (true, false) => SpanOutput::Last,
        };
        let end = start + tokens.len();
        if is_whole {
            let scored = self.prompt[1..].iter().enumerate();
            let score =
                |(at, token): (usize, &u32)| SamplingParams { mode: SampleMode::Score(*token), ..sample(at) };
            batch.sampling.extend(scored.map(score));
        }
        batch.sampling.extend(samples.then(|| sample(end)));
        let (at, len) = (batch.tokens.len() as u32, tokens.len() as u32);
        batch.tokens.extend(tokens);
        batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: self.slot,
            start: start as u32,
            tokens: match self.sampled.is_empty() {
                true => SpanTokens::Given { at, len },
                false => SpanTokens::Generated { at, len: 1 },
            },
            table: SpanTable::Own,
            reserved: (self.prompt.len() + self.tokens) as u32,
            encoder_len: self.encoder_input.len() as u32,
            output: want,
        });
        samples
    }
}
