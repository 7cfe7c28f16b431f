//! The decode loop: one turn makes one token for every live sequence, in one fused pass.
//!
//! Owns the live sequences, from their first chunk to their end, and is the only one to issue device work.
//! Never waits for a client, never sees text, never decides who gets a slot.
//! Invariant: a sequence is dropped only between two steps, so no step in flight names its slot or pages.

use super::device::Step;
use super::group::Group;
use super::kv::{Plan, Reset, Turn};
use super::meters::{Meters, Moments, StepSize};
use super::prefill::{Chunk, ForgetBegun, NextChunk};
use super::sequence::{Key, Sequence};
use super::status::Status;
use super::stream::EventSender;
use crate::config::Policy;
use crate::decoding;
use crate::request::{FinishReason, RequestError, Token, TokenEvent};
use actix::{Actor, AsyncContext, Context, Recipient, WrapFuture};
use futures_util::FutureExt;
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{
    DeviceError, SampleMode, SampleRow, SampledRow, Span, SpanModel, SpanTable, SpanTokens, StepBatch,
    StepLimits, StepOutput, Want,
};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;
use tracing::error;

/// What the loop works with.
#[derive(Clone)]
pub struct Neighbours {
    pub prefill_next: Recipient<NextChunk>,
    pub prefill_forget: Recipient<ForgetBegun>,
    pub kv_turn: Recipient<Turn>,
    pub kv_reset: Recipient<Reset>,
    pub group: Arc<Group>,
    pub status: Arc<Status>,
}

/// What the loop is told.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    pub policy: Policy,
    pub limits: StepLimits,
    /// Tokens of one step, decoded ones and prompts' together.
    pub token_budget: usize,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
}

/// The actor. It only keeps the loop alive; the loop pulls everything it needs.
pub struct Decode {
    neighbours: Neighbours,
    config: DecodeConfig,
}

impl Actor for Decode {
    type Context = Context<Decode>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let (neighbours, config) = (self.neighbours.clone(), self.config.clone());
        ctx.spawn(keep_turning(neighbours, config).into_actor(self));
    }
}

impl Decode {
    pub fn new(neighbours: Neighbours, config: DecodeConfig) -> Decode {
        Decode { neighbours, config }
    }
}

/// Runs the loop, and runs it again if a bug of ours ends it: the sequences it had are lost (their closed
/// channels tell their clients), the service is not. Without its neighbours it cannot go on.
async fn keep_turning(neighbours: Neighbours, config: DecodeConfig) {
    loop {
        let main_stem = MainStem::new(neighbours.clone(), config.clone());
        match AssertUnwindSafe(main_stem.turn_forever()).catch_unwind().await {
            Ok(()) => {
                if !neighbours.status.is_stopping() {
                    error!(
                        "an actor beside the decode loop is gone; this is a bug, and nothing is served any more"
                    );
                    neighbours.status.fail();
                }
                return;
            }
            Err(_) => error!("the decode loop panicked; this is a bug. It starts again, empty"),
        }
        neighbours.prefill_forget.do_send(ForgetBegun);
        neighbours.kv_reset.do_send(Reset);
    }
}

/// The loop's state.
struct MainStem {
    neighbours: Neighbours,
    config: DecodeConfig,
    /// In the order of their slots; who joins this turn, at the end until the plan has told.
    live: Vec<Live>,
    /// What kv has to hear at the next turn.
    turn: Turn,
    /// Events made by the last step, sent while the next one runs.
    outbox: Vec<(EventSender, TokenEvent)>,
    /// When they were made.
    made_at: Instant,
    /// Who waits for the wanted rows of the step being built or run, row by row.
    wanted: Vec<Wanted>,
    /// The step that is not travelling.
    spare: Option<Box<Step>>,
    meters: Meters,
}

/// A sequence that holds a slot.
struct Live {
    key: Key,
    slot: Slot,
    sequence: Box<Sequence>,
    /// The part of its prompt that the next step computes.
    piece: Option<Piece>,
    /// Tokens drawn; none while its prompt is on its way.
    generated: u32,
    /// Its end is told; it leaves when the turn is through.
    over: bool,
    moments: Moments,
    /// Log-probabilities of prompt tokens, until the prompt is through.
    prompt: Vec<Token>,
}

/// What a wanted row's result is for. Sequences are named by their place among the live.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wanted {
    /// The next token of a sequence.
    Next(usize),
    /// The log-probability of a prompt token.
    PromptToken(usize),
    /// Nobody: a hole of the window.
    Nobody,
}

/// A run of a prompt's tokens.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: usize,
    len: usize,
    last: bool,
}

/// One span of a step; sequences as in [`Wanted`].
#[derive(Clone, Copy, Debug)]
enum Work {
    Next(usize),
    Chunk(usize, Piece),
    Hole(Slot),
}

impl MainStem {
    fn new(neighbours: Neighbours, config: DecodeConfig) -> MainStem {
        MainStem {
            neighbours,
            live: Vec::with_capacity(config.limits.slots),
            turn: Turn::default(),
            outbox: Vec::new(),
            made_at: Instant::now(),
            wanted: Vec::with_capacity(config.limits.rows),
            spare: Some(Box::new(Step::with_capacity(&config.limits))),
            meters: Meters::new(),
            config,
        }
    }

    /// Each pass: who left, what is new, where everything is, one step, what came of it. Ends when a
    /// neighbour is gone, which is when the engine stops.
    async fn turn_forever(mut self) {
        loop {
            self.drop_gone();
            let Some(chunks) = self.next_chunks().await else { return };
            self.take_in(chunks);
            let Some(plan) = self.next_plan().await else { return };
            if let Err(fault) = self.run(plan).await {
                self.fail_all(&fault);
            }
        }
    }

    /// Drops the sequences that are over, and those whose clients hung up: slots, pages and permits go home.
    fn drop_gone(&mut self) {
        self.live.retain(|live| {
            let stays = !live.over && !live.sequence.events.is_closed();
            if !stays {
                self.turn.finished.push(live.key);
            }
            stays
        });
    }

    /// Asks prefill for prompt chunks. With nothing live this waits until there is work. It is asked
    /// between two steps and not during one, so that who arrives during a step joins the very next.
    async fn next_chunks(&mut self) -> Option<Vec<Chunk>> {
        if self.live.is_empty() {
            self.flush();
            // Slots must be free, and pages seen to be, before anything is waited for.
            let plan = self.next_plan().await?;
            assert!(
                plan.moves.is_empty() && plan.tables.is_empty(),
                "without sequences nothing changes place"
            );
        }
        let decoding = self.live.iter().filter(|live| live.generated > 0).count();
        let (budget, live) = (self.config.token_budget - decoding, self.live.len());
        let chunks = self.neighbours.prefill_next.send(NextChunk { budget, live }).await.ok();
        self.neighbours.status.beat();
        if live == 0 {
            self.meters.woke();
        }
        chunks
    }

    /// A sequence comes with its first chunk, and needs a slot. Chunks of those who left meanwhile are void.
    fn take_in(&mut self, chunks: Vec<Chunk>) {
        for Chunk { key, sequence, start, len, last } in chunks {
            if let Some(sequence) = sequence {
                let lease = sequence.lease.as_ref().expect("prefill obtained its pages, else this is a bug");
                self.turn.joins.push((key, lease.pages().to_vec()));
                self.live.push(Live::new(key, sequence, &self.meters));
            }
            // Who has just come is the last.
            if let Some(live) = self.live.iter_mut().rfind(|live| live.key == key) {
                live.piece = Some(Piece { start, len, last });
            }
        }
    }

    /// Tells kv who left and who joins; hears where everybody is.
    async fn next_plan(&mut self) -> Option<Plan> {
        self.neighbours.kv_turn.send(std::mem::take(&mut self.turn)).await.ok()
    }

    /// Runs the turn's step (under [`Policy::Concurrent`] one for each sequence) and settles its results.
    async fn run(&mut self, plan: Plan) -> Result<(), DeviceError> {
        self.place(&plan.slots);
        let work = self.work(&plan);
        let per_step = match self.config.policy {
            Policy::Concurrent => 1,
            Policy::Fused | Policy::Window { .. } => work.len().max(1),
        };
        let mut plan = Some(plan);
        for spans in work.chunks(per_step) {
            let mut step =
                self.spare.take().unwrap_or_else(|| Box::new(Step::with_capacity(&self.config.limits)));
            self.fill(&mut step.batch, plan.take(), spans);
            let size = size(&step.batch);
            let running = self.neighbours.group.send(step);
            let sent = self.meters.sent();
            self.flush();
            self.meters.delivered();
            let ran = running.await;
            ran.result?;
            self.made_at = self.meters.ran(sent, ran.step.output.times, size);
            self.settle(&ran.step.output);
            self.meters.settled();
            self.spare = Some(ran.step);
        }
        Ok(())
    }

    /// Brings the live into the order of their slots, given by slot.
    fn place(&mut self, slots: &[(Slot, Key)]) {
        assert_eq!(slots.len(), self.live.len(), "whoever lives holds a slot, and nobody else");
        for (at, &(slot, key)) in slots.iter().enumerate() {
            let found = self.live[at..].iter().position(|live| live.key == key);
            let found = found.expect("whoever holds a slot lives, else this is a bug");
            // From one turn to the next most of them stand as they stood.
            self.live[at..=at + found].rotate_right(1);
            self.live[at].slot = slot;
        }
    }

    /// The spans of this turn: every slot of the window by number, then the chunks.
    fn work(&mut self, plan: &Plan) -> Vec<Work> {
        let mut work = Vec::with_capacity(plan.window.len() + self.live.len());
        let mut next = plan.window.start;
        for (at, live) in self.live.iter().enumerate() {
            // With the shuffle off, holes are computed and their results dropped: the papers' baseline.
            work.extend((next..live.slot).map(Work::Hole));
            next = live.slot + 1;
            if live.generated > 0 {
                work.push(Work::Next(at));
            }
        }
        for (at, live) in self.live.iter_mut().enumerate() {
            work.extend(live.piece.take().map(|piece| Work::Chunk(at, piece)));
        }
        let real = work.iter().any(|span| !matches!(span, Work::Hole(_)));
        if !real {
            work.clear();
            // The plan's changes must reach the device even when there is nothing to compute.
            if !(plan.moves.is_empty() && plan.tables.is_empty() && plan.copies.is_empty()) {
                work.push(Work::Hole(plan.window.start));
            }
        }
        work
    }

    fn fill(&mut self, batch: &mut StepBatch, plan: Option<Plan>, spans: &[Work]) {
        batch.clear();
        self.wanted.clear();
        if let Some(plan) = plan {
            self.meters.moved(plan.moves.len());
            batch.moves.extend(plan.moves);
            batch.copies.extend(plan.copies);
            batch.tables.extend(plan.tables);
        }
        for span in spans {
            match *span {
                Work::Next(at) => self.add_next(batch, at),
                Work::Chunk(at, piece) => self.add_chunk(batch, at, piece),
                Work::Hole(slot) => self.add_hole(batch, slot),
            }
        }
        assert_eq!(self.wanted.len(), batch.samples.len(), "each wanted row has somebody who waits for it");
    }

    fn add_next(&mut self, batch: &mut StepBatch, at: usize) {
        let live = &self.live[at];
        let start = live.next_position() - 1;
        batch.spans.push(span(live.slot, start, SpanTokens::Last, SpanTable::Own, Want::Last));
        self.add_draw(batch, at);
    }

    fn add_chunk(&mut self, batch: &mut StepBatch, at: usize, piece: Piece) {
        let Piece { start, len, last } = piece;
        let live = &self.live[at];
        let request = &live.sequence.request;
        let tokens = SpanTokens::Given { at: batch.tokens.len() as u32, len: len as u32 };
        batch.tokens.extend_from_slice(&request.prompt[start..start + len]);
        let want = match (request.prompt_logprobs, last) {
            (true, _) => Want::All,
            (false, true) => Want::Last,
            (false, false) => Want::None,
        };
        batch.spans.push(span(live.slot, start as u32, tokens, SpanTable::Own, want));
        if request.prompt_logprobs {
            // A row's logits tell of the token after it.
            for token in request.prompt[start + 1..].iter().take(len) {
                batch.samples.push(SampleRow {
                    mode: SampleMode::Score(*token),
                    logprob: true,
                    ..live.row()
                });
                self.wanted.push(Wanted::PromptToken(at));
            }
        }
        if last {
            self.add_draw(batch, at);
        }
    }

    /// Adds the row that draws a sequence's next token, with its biases.
    fn add_draw(&mut self, batch: &mut StepBatch, at: usize) {
        let live = &self.live[at];
        let bias_at = batch.biases.len();
        batch.biases.extend(decoding::biases(&live.sequence.request, &self.config.eos, live.generated));
        let bias_len = (batch.biases.len() - bias_at) as u32;
        batch.samples.push(SampleRow { bias_at: bias_at as u32, bias_len, ..live.row() });
        self.wanted.push(Wanted::Next(at));
    }

    fn add_hole(&mut self, batch: &mut StepBatch, slot: Slot) {
        batch.spans.push(span(slot, 0, SpanTokens::Last, SpanTable::Sink, Want::Last));
        batch.samples.push(SampleRow::GREEDY);
        self.wanted.push(Wanted::Nobody);
    }

    /// Hands each result to who waits for it.
    fn settle(&mut self, output: &StepOutput) {
        assert_eq!(output.rows.len(), self.wanted.len(), "a result for each wanted row");
        let wanted = std::mem::take(&mut self.wanted);
        for (row, wanted) in output.rows.iter().zip(&wanted) {
            match *wanted {
                Wanted::Nobody => {}
                Wanted::PromptToken(at) => self.live[at].prompt.push(reported(output, row)),
                Wanted::Next(at) => self.next_token(at, reported(output, row)),
            }
        }
        self.wanted = wanted;
    }

    fn next_token(&mut self, at: usize, token: Token) {
        let live = &mut self.live[at];
        let request = &live.sequence.request;
        let events = &live.sequence.events;
        live.generated += 1;
        if live.generated == 1 {
            self.meters.first_token(&mut live.moments, request.prompt.len(), self.made_at);
            if request.prompt_logprobs {
                let first = Token { id: request.prompt[0], logprob: None, top: Vec::new() };
                let tokens = std::iter::once(first).chain(live.prompt.drain(..)).collect();
                self.outbox.push((events.clone(), TokenEvent::Prompt(tokens)));
            }
        }
        let end = decoding::finish(token.id, request, &self.config.eos, live.generated);
        let event = match end {
            Some(FinishReason::Stop | FinishReason::StopToken(_)) => TokenEvent::Last(token),
            Some(FinishReason::Length) | None => TokenEvent::Token(token),
        };
        if request.max_tokens > 0 {
            self.meters.token();
            self.outbox.push((events.clone(), event));
        }
        if let Some(reason) = end {
            self.outbox.push((events.clone(), TokenEvent::Finished(reason)));
            self.meters.over(live.moments, live.generated, self.made_at);
            live.over = true;
        }
    }

    /// Sends what the last step made.
    fn flush(&mut self) {
        for (events, event) in self.outbox.drain(..) {
            events.send_made(event, self.made_at);
        }
    }

    /// The device lost its memory: whoever was in it is told, and everybody starts afresh.
    fn fail_all(&mut self, fault: &DeviceError) {
        self.flush();
        // Who is over has been told so.
        for live in self.live.drain(..).filter(|live| !live.over) {
            let failure = RequestError::DeviceFailed(fault.to_string());
            live.sequence.events.send(TokenEvent::Failed(failure));
        }
        self.turn = Turn::default();
        self.wanted.clear();
        self.neighbours.prefill_forget.do_send(ForgetBegun);
        self.neighbours.kv_reset.do_send(Reset);
    }
}

impl Live {
    /// A sequence whose first chunk came just now, still without a slot.
    fn new(key: Key, sequence: Box<Sequence>, meters: &Meters) -> Live {
        Live {
            key,
            slot: Slot::MAX,
            piece: None,
            generated: 0,
            over: false,
            moments: meters.scheduled(sequence.arrived),
            prompt: Vec::new(),
            sequence,
        }
    }

    /// The position of its next token.
    fn next_position(&self) -> u32 {
        self.sequence.request.prompt.len() as u32 + self.generated
    }

    /// How its next token is drawn, but for biases.
    fn row(&self) -> SampleRow {
        let request = &self.sequence.request;
        decoding::compile(&request.sampling, self.next_position(), request.logprobs)
    }
}

/// Rows, holes and sequences of a step.
fn size(batch: &StepBatch) -> StepSize {
    let holes = batch.spans.iter().filter(|span| span.table == SpanTable::Sink).count();
    StepSize { rows: batch.rows(), holes, slots: batch.spans.len() - holes }
}

fn span(slot: Slot, start: u32, tokens: SpanTokens, table: SpanTable, want: Want) -> Span {
    Span { model: SpanModel::Target, slot, start, tokens, table, want }
}

/// A row's result with what was asked for beside it.
fn reported(output: &StepOutput, row: &SampledRow) -> Token {
    let logprob = (!row.logprob.is_nan()).then_some(row.logprob);
    Token { id: row.token, logprob, top: output.top_of(row).to_vec() }
}
