//! The decode loop: one turn makes one token for every live sequence, in one fused pass.
//!
//! Owns the live sequences, from their first chunk to their end, and is the only one to issue device work.
//! Never waits for a client, never sees text, never decides who gets a slot.
//! Invariant: a sequence is dropped only between two steps, so no step in flight names its slot or pages.

use super::device::Step;
use super::group::Group;
use super::kv::{Plan, Reset, Turn};
use super::prefill::{Chunk, ForgetBegun, NextChunk};
use super::sequence::{Key, Sequence};
use super::status::Status;
use super::stream::EventSender;
use crate::config::Policy;
use crate::request::{FinishReason, RequestError, Token, TokenEvent};
use crate::{decoding, telemetry};
use actix::{Actor, AsyncContext, Context, Recipient, WrapFuture};
use futures_util::FutureExt;
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{
    DeviceError, SampleMode, SampleRow, SampledRow, Span, SpanModel, SpanTable, SpanTokens, StepBatch,
    StepLimits, StepOutput, Want,
};
use std::collections::BTreeMap;
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
    live: BTreeMap<Key, Live>,
    /// What kv has to hear at the next turn.
    turn: Turn,
    /// Events made by the last step, sent while the next one runs.
    outbox: Vec<(EventSender, TokenEvent)>,
    /// Who waits for the wanted rows of the step being built or run, row by row.
    wanted: Vec<Wanted>,
    /// The step that is not travelling.
    spare: Option<Box<Step>>,
}

/// A sequence that holds a slot.
struct Live {
    sequence: Box<Sequence>,
    /// Tokens drawn; none while its prompt is on its way.
    generated: u32,
    /// Log-probabilities of prompt tokens, until the prompt is through.
    prompt: Vec<Token>,
}

/// What a wanted row's result is for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wanted {
    /// The next token of a sequence.
    Next(Key),
    /// The log-probability of a prompt token.
    PromptToken(Key),
    /// Nobody: a hole of the window.
    Nobody,
}

/// A prompt chunk whose sequence lives.
#[derive(Clone, Copy, Debug)]
struct Piece {
    key: Key,
    start: usize,
    len: usize,
    last: bool,
}

/// One span of a step.
#[derive(Clone, Copy, Debug)]
enum Work {
    Next(Slot, Key),
    Chunk(Slot, Piece),
    Hole(Slot),
}

impl MainStem {
    fn new(neighbours: Neighbours, config: DecodeConfig) -> MainStem {
        MainStem {
            neighbours,
            live: BTreeMap::new(),
            turn: Turn::default(),
            outbox: Vec::new(),
            wanted: Vec::with_capacity(config.limits.rows),
            spare: Some(Box::new(Step::with_capacity(&config.limits))),
            config,
        }
    }

    /// Each pass: who left, what is new, where everything is, one step, what came of it. Ends when a
    /// neighbour is gone, which is when the engine stops.
    async fn turn_forever(mut self) {
        loop {
            self.drop_gone();
            let Some(chunks) = self.next_chunks().await else { return };
            let pieces = self.take_in(chunks);
            let Some(plan) = self.next_plan().await else { return };
            if let Err(fault) = self.run(plan, &pieces).await {
                self.fail_all(&fault);
            }
        }
    }

    /// Drops the sequences whose clients hung up.
    fn drop_gone(&mut self) {
        let closed = |live: &&Live| live.sequence.events.is_closed();
        let gone: Vec<Key> = self.live.values().filter(closed).map(|live| live.sequence.key).collect();
        for key in gone {
            self.leave(key);
        }
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
        let decoding = self.live.values().filter(|live| live.generated > 0).count();
        let budget = self.config.token_budget - decoding;
        let chunks =
            self.neighbours.prefill_next.send(NextChunk { budget, live: self.live.len() }).await.ok();
        self.neighbours.status.beat();
        chunks
    }

    /// A sequence comes with its first chunk, and needs a slot. Chunks of those who left meanwhile are void.
    fn take_in(&mut self, chunks: Vec<Chunk>) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(chunks.len());
        for Chunk { key, sequence, start, len, last } in chunks {
            if let Some(sequence) = sequence {
                let lease = sequence.lease.as_ref().expect("prefill obtained its pages, else this is a bug");
                self.turn.joins.push((key, lease.pages().to_vec()));
                telemetry::QUEUE_TIME.record(sequence.arrived.elapsed().as_secs_f64());
                self.live.insert(key, Live { sequence, generated: 0, prompt: Vec::new() });
            }
            if self.live.contains_key(&key) {
                pieces.push(Piece { key, start, len, last });
            }
        }
        pieces
    }

    /// Tells kv who left and who joins; hears where everybody is.
    async fn next_plan(&mut self) -> Option<Plan> {
        self.neighbours.kv_turn.send(std::mem::take(&mut self.turn)).await.ok()
    }

    /// Runs the turn's step (under [`Policy::Concurrent`] one for each sequence) and settles its results.
    async fn run(&mut self, plan: Plan, pieces: &[Piece]) -> Result<(), DeviceError> {
        let work = self.work(&plan, pieces);
        let per_step = match self.config.policy {
            Policy::Concurrent => 1,
            Policy::Fused | Policy::Window { .. } => work.len().max(1),
        };
        let mut plan = Some(plan);
        for spans in work.chunks(per_step) {
            let began = Instant::now();
            let mut step =
                self.spare.take().unwrap_or_else(|| Box::new(Step::with_capacity(&self.config.limits)));
            self.fill(&mut step.batch, plan.take(), spans);
            let rows = step.batch.rows();
            let running = self.neighbours.group.send(step);
            self.flush();
            let ran = running.await;
            ran.result?;
            self.record(rows, began);
            self.settle(&ran.step.output);
            self.spare = Some(ran.step);
        }
        Ok(())
    }

    /// The spans of this turn: every slot of the window by number, then the chunks.
    fn work(&self, plan: &Plan, pieces: &[Piece]) -> Vec<Work> {
        let mut work = Vec::with_capacity(plan.slots.len() + pieces.len());
        let mut next = plan.window.start;
        for &(slot, key) in &plan.slots {
            // With the shuffle off, holes are computed and their results dropped: the papers' baseline.
            work.extend((next..slot).map(Work::Hole));
            next = slot + 1;
            if self.live.get(&key).is_some_and(|live| live.generated > 0) {
                work.push(Work::Next(slot, key));
            }
        }
        for piece in pieces {
            let holder = plan.slots.iter().find(|(_, key)| *key == piece.key);
            let (slot, _) = *holder.expect("whoever has a chunk has a slot, else this is a bug");
            work.push(Work::Chunk(slot, *piece));
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
            telemetry::SLOT_MOVES.add(plan.moves.len() as u64);
            batch.moves.extend(plan.moves);
            batch.copies.extend(plan.copies);
            batch.tables.extend(plan.tables);
        }
        for span in spans {
            match *span {
                Work::Next(slot, key) => self.add_next(batch, slot, key),
                Work::Chunk(slot, piece) => self.add_chunk(batch, slot, piece),
                Work::Hole(slot) => self.add_hole(batch, slot),
            }
        }
        assert_eq!(self.wanted.len(), batch.samples.len(), "each wanted row has somebody who waits for it");
    }

    fn add_next(&mut self, batch: &mut StepBatch, slot: Slot, key: Key) {
        let live = &self.live[&key];
        let row = live.draw();
        let start = row.position - 1;
        batch.spans.push(span(slot, start, SpanTokens::Last, SpanTable::Own, Want::Last));
        batch.samples.push(row);
        self.wanted.push(Wanted::Next(key));
    }

    fn add_chunk(&mut self, batch: &mut StepBatch, slot: Slot, piece: Piece) {
        let Piece { key, start, len, last } = piece;
        let live = &self.live[&key];
        let request = &live.sequence.request;
        let tokens = SpanTokens::Given { at: batch.tokens.len() as u32, len: len as u32 };
        batch.tokens.extend_from_slice(&request.prompt[start..start + len]);
        let want = match (request.prompt_logprobs, last) {
            (true, _) => Want::All,
            (false, true) => Want::Last,
            (false, false) => Want::None,
        };
        batch.spans.push(span(slot, start as u32, tokens, SpanTable::Own, want));
        if request.prompt_logprobs {
            // A row's logits tell of the token after it.
            for token in request.prompt[start + 1..].iter().take(len) {
                batch.samples.push(SampleRow {
                    mode: SampleMode::Score(*token),
                    logprob: true,
                    ..live.draw()
                });
                self.wanted.push(Wanted::PromptToken(key));
            }
        }
        if last {
            batch.samples.push(live.draw());
            self.wanted.push(Wanted::Next(key));
        }
    }

    fn add_hole(&mut self, batch: &mut StepBatch, slot: Slot) {
        batch.spans.push(span(slot, 0, SpanTokens::Last, SpanTable::Sink, Want::Last));
        batch.samples.push(SampleRow::GREEDY);
        self.wanted.push(Wanted::Nobody);
    }

    fn record(&self, rows: usize, began: Instant) {
        let holes = self.wanted.iter().filter(|wanted| **wanted == Wanted::Nobody).count();
        telemetry::STEP_SECONDS.record(began.elapsed().as_secs_f64());
        telemetry::STEP_ROWS.record(rows as f64);
        telemetry::ITERATION_TOKENS.record((rows - holes) as f64);
    }

    /// Hands each result to who waits for it.
    fn settle(&mut self, output: &StepOutput) {
        assert_eq!(output.rows.len(), self.wanted.len(), "a result for each wanted row");
        let wanted = std::mem::take(&mut self.wanted);
        for (row, wanted) in output.rows.iter().zip(&wanted) {
            match *wanted {
                Wanted::Nobody => {}
                Wanted::PromptToken(key) => self.prompt_token(key, reported(output, row)),
                Wanted::Next(key) => self.next_token(key, reported(output, row)),
            }
        }
        self.wanted = wanted;
    }

    fn prompt_token(&mut self, key: Key, token: Token) {
        let live = self.live.get_mut(&key).expect("nobody leaves during a step, else this is a bug");
        live.prompt.push(token);
    }

    fn next_token(&mut self, key: Key, token: Token) {
        let live = self.live.get_mut(&key).expect("nobody leaves during a step, else this is a bug");
        let request = &live.sequence.request;
        let events = &live.sequence.events;
        if live.generated == 0 && request.prompt_logprobs {
            let first = Token { id: request.prompt[0], logprob: None, top: Vec::new() };
            let tokens = std::iter::once(first).chain(live.prompt.drain(..)).collect();
            self.outbox.push((events.clone(), TokenEvent::Prompt(tokens)));
        }
        live.generated += 1;
        let end = match request.max_tokens {
            0 => Some(FinishReason::Length),
            max => decoding::finish(token.id, &self.config.eos, request.ignore_eos, live.generated, max),
        };
        if end != Some(FinishReason::Stop) && request.max_tokens > 0 {
            self.outbox.push((events.clone(), TokenEvent::Token(token)));
        }
        if let Some(reason) = end {
            self.outbox.push((events.clone(), TokenEvent::Finished(reason)));
            self.leave(key);
        }
    }

    /// A sequence's end: slot, pages and permit go home.
    fn leave(&mut self, key: Key) {
        if self.live.remove(&key).is_some() {
            self.turn.finished.push(key);
        }
    }

    /// Sends what the last step made.
    fn flush(&mut self) {
        for (events, event) in self.outbox.drain(..) {
            events.send(event);
        }
    }

    /// The device lost its memory: whoever was in it is told, and everybody starts afresh.
    fn fail_all(&mut self, fault: &DeviceError) {
        self.flush();
        for live in std::mem::take(&mut self.live).into_values() {
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
    /// How its next token is drawn.
    fn draw(&self) -> SampleRow {
        let request = &self.sequence.request;
        let position = request.prompt.len() as u32 + self.generated;
        decoding::compile(&request.sampling, position, request.logprobs)
    }
}

fn span(slot: Slot, start: u32, tokens: SpanTokens, table: SpanTable, want: Want) -> Span {
    Span { model: SpanModel::Target, slot, start, tokens, table, want }
}

/// A row's result with what was asked for beside it.
fn reported(output: &StepOutput, row: &SampledRow) -> Token {
    let logprob = (!row.logprob.is_nan()).then_some(row.logprob);
    Token { id: row.token, logprob, top: output.top_of(row).to_vec() }
}
