use super::*;
use crate::model::ModelRef;
use crate::model::executor::{Executor, KvCacheConfig, ModelExecutor, page_bytes, shard_page_bytes};
use crate::model::partition::{Partition, Stage, StageRank};
use mainstem_kernels::collective::local;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::random::philox;
use mainstem_kernels::reference::{Reference, sample};
use mainstem_kernels::{
    Abort, ActivationHandoff, ActivationPrecision, Fraction, KvTable, LateInputs, PageCopy, QuantType,
    SlotMove, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, TableUpdate,
};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const SLOTS: usize = 6;
const PAGE: usize = 32;
/// Pages of a sequence.
const PAGES: u32 = 3;
/// The first page that no sequence has.
const SPARE: u32 = 1 + SLOTS as u32 * PAGES;
const KV: KvCacheConfig = KvCacheConfig { ty: QuantType::F16, pages: SPARE as usize + 1, window_pages: 0 };
/// Tokens of a prompt in one step.
const CHUNK: usize = 13;

fn fixture(name: &str) -> ModelRef {
    ModelRef::Path(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
}

/// Opens a model with a draft model.
fn open(target: &ModelRef, draft: &ModelRef) -> ModelSource {
    let [mut source, draft] = [target, draft].map(|name| ModelSource::open(name, None).unwrap());
    source.attach_draft(draft).unwrap();
    source
}

fn limits(source: &ModelSource) -> StepLimits {
    StepLimits {
        slots: SLOTS,
        rows: 64,
        batch_rows: usize::MAX,
        logit_rows: 2,
        positions: PAGE * PAGES as usize,
        encoder_positions: 0,
        page_positions: PAGE,
        window: None,
        top_logprobs: 0,
        vocab: source.spec.vocab,
        hidden: 0,
        drafts: 4,
        draft_logits: true,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::new(0.8).unwrap(),
    }
}

fn cpu() -> CpuBackend {
    let activation_precision = ActivationPrecision::Int8;
    CpuBackend::new(CpuConfig { threads: 1, isa: Isa::Auto, activation_precision }).unwrap()
}

/// A function that runs a step.
type Run<'a> = dyn FnMut(&StepBatch, &Arc<LateInputs>) -> StepOutput + 'a;

/// Returns the executor of the whole model on one device.
fn executor<B: Backend>(backend: B, source: &ModelSource) -> ModelExecutor<B> {
    ModelExecutor::new(backend, source, &Shard::whole(&source.spec), KV, limits(source)).unwrap()
}

/// Returns the function that runs steps on one device.
fn single<'a, B: Backend>(backend: B, source: &ModelSource) -> Box<Run<'a>> {
    let mut executor = executor(backend, source);
    Box::new(move |batch, late| {
        let mut out = StepOutput::default();
        let flow = HandoffPorts { late: Some(late), ..HandoffPorts::default() };
        executor.run(batch, flow, &mut out).unwrap();
        out
    })
}

/// Returns the function that runs steps on `stages` stages of `ranks` ranks, each with one layer per stage.
fn parted<'a>(source: &ModelSource, stages: usize, ranks: usize) -> Box<Run<'a>> {
    let layers = source.spec.layers() / stages;
    let stage = |number: usize| Stage {
        encoder: 0..0,
        decoder: number * layers..(number + 1) * layers,
        ranks: (0..ranks).map(|rank| StageRank { device: format!("cpu:{rank}"), share: 1 }).collect(),
    };
    let partition =
        Partition { stages: (0..stages).map(stage).collect(), experts: Shard::whole(&source.spec).experts };
    let mut executors: Vec<Vec<ModelExecutor<CpuBackend>>> = (0..stages)
        .map(|stage| {
            let places = local::create_ranks(ranks, 300, &Abort::new());
            let build = |(rank, place)| {
                let mut backend = cpu();
                backend.join_stage(Box::new(place));
                ModelExecutor::new(backend, source, &partition.shard(stage, rank), KV, limits(source))
                    .unwrap()
            };
            places.into_iter().enumerate().map(build).collect()
        })
        .collect();
    Box::new(move |batch, _| {
        let (mut carried, mut results) = (None, StepOutput::default());
        for (number, stage) in executors.iter_mut().enumerate() {
            let mut next = ActivationHandoff::default();
            let is_last = number + 1 == stages;
            let outputs: Vec<StepOutput> = thread::scope(|scope| {
                let mut to = Some(&mut next).filter(|_| !is_last);
                let run = |executor: &mut ModelExecutor<CpuBackend>, output, input| {
                    let mut out = StepOutput::default();
                    executor
                        .run(batch, HandoffPorts { input, output, ..HandoffPorts::default() }, &mut out)
                        .unwrap();
                    out
                };
                let input = carried.as_ref();
                let threads: Vec<_> = stage
                    .iter_mut()
                    .map(|executor| (executor, to.take()))
                    .map(|(executor, to)| scope.spawn(move || run(executor, to, input)))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(outputs.iter().skip(1).all(|out| out.tokens.is_empty() && out.drafts.is_empty()));
            results = outputs.into_iter().next().unwrap();
            carried = Some(next);
        }
        results
    })
}

/// Ways to make and verify the drafts of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// No drafts.
    Plain,
    /// The drafts of all sequences and their verification in one step.
    Together,
    /// All drafts in a step, and verification in the next.
    Apart,
    /// Each draft in a step of its own, and verification in the next.
    OneByOne,
}

/// A sequence that is generated speculatively.
struct Sequence {
    slot: u32,
    /// The round in which it begins.
    joins: usize,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Number of tokens with K and V of the target, and of the draft model.
    computed: usize,
    drafted: usize,
    /// Number of drafts in each round.
    count: usize,
    params: SamplingParams,
    /// The drafts of all rounds, and the results of all rows: tokens with the bits of their
    /// log-probabilities.
    drafts: Vec<u32>,
    results: Vec<(u32, u32)>,
}

impl Sequence {
    fn is_prompt(&self) -> bool {
        self.computed < self.prompt_len
    }

    fn chunk(&self) -> &[u32] {
        &self.tokens[self.computed..self.prompt_len.min(self.computed + CHUNK)]
    }

    /// Returns the sampling parameters of the token at a position.
    fn params_at(&self, position: usize) -> SamplingParams {
        SamplingParams { position: position as u32, ..self.params }
    }

    /// Adds the span of the draft model for a round. `made` are drafts of the round that were made before.
    fn add_draft_span(&self, batch: &mut StepBatch, made: &[u32], count: usize) {
        let at = batch.tokens.len() as u32;
        let (start, known) = match made.last() {
            None if self.is_prompt() => (self.drafted, self.chunk()),
            None => (self.drafted, &self.tokens[self.drafted..]),
            Some(_) => (self.tokens.len() + made.len() - 1, &made[made.len() - 1..]),
        };
        batch.tokens.extend_from_slice(known);
        let len = known.len() as u32;
        batch.drafts.push(DraftSpan {
            slot: self.slot,
            start: start as u32,
            tokens: match self.is_prompt() {
                true => SpanTokens::Given { at, len },
                false => SpanTokens::Generated { at, len },
            },
            reserved: 90,
            count: count as u32,
            sampling: self.params_at(self.tokens.len() + made.len()),
        });
    }

    /// Adds the span of the target for a round. Drafts that are not given are those of the step.
    fn add_span(&self, batch: &mut StepBatch, drafts: Option<&[u32]>, count: usize) {
        let at = batch.tokens.len() as u32;
        let (tokens, output, rows) = if self.is_prompt() {
            batch.tokens.extend_from_slice(self.chunk());
            let ends = self.computed + self.chunk().len() == self.prompt_len;
            let output = if ends { SpanOutput::Last } else { SpanOutput::None };
            (SpanTokens::Given { at, len: self.chunk().len() as u32 }, output, usize::from(ends))
        } else {
            batch.tokens.extend_from_slice(&self.tokens[self.computed..]);
            batch.tokens.extend_from_slice(drafts.unwrap_or(&[]));
            let len = 1 + count as u32;
            let tokens = match drafts {
                Some(_) => SpanTokens::Generated { at, len },
                None => SpanTokens::Drafted { at, len },
            };
            (tokens, SpanOutput::All, 1 + count)
        };
        batch.sampling.extend((0..rows).map(|row| self.params_at(self.tokens.len() + row)));
        batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: self.slot,
            start: self.computed as u32,
            tokens,
            table: SpanTable::Own,
            reserved: 90,
            encoder_len: 0,
            output,
        });
    }

    /// Takes the drafts of a round and the results of its rows: keeps the drafts that equal the token that
    /// the target samples in their place, and one more token.
    fn accept(&mut self, drafts: &[u32], results: &[(u32, u32)]) {
        self.drafts.extend_from_slice(drafts);
        self.results.extend_from_slice(results);
        if self.is_prompt() {
            self.computed += self.chunk().len();
            self.drafted = self.computed;
            self.tokens.extend(results.iter().map(|result| result.0));
            return;
        }
        let known = self.tokens.len();
        let accepted = drafts.iter().zip(results).take_while(|(draft, result)| **draft == result.0).count();
        self.tokens.extend(results[..=accepted].iter().map(|result| result.0));
        (self.computed, self.drafted) =
            (known + accepted, known + accepted.min(drafts.len().saturating_sub(1)));
    }
}

/// Returns sequences with 4, 1, 0 and 3 drafts, at two temperatures; the last two begin later.
fn sequences(vocab: usize) -> Vec<Sequence> {
    let sequence =
        |(slot, joins, prompt_len, count, temperature): (u32, usize, usize, usize, f32)| Sequence {
            slot,
            joins,
            tokens: (0..prompt_len)
                .map(|i| ((i * i + 7 * i + 31 * slot as usize) % (vocab - 4)) as u32 + 2)
                .collect(),
            prompt_len,
            computed: 0,
            drafted: 0,
            count,
            params: SamplingParams {
                seed: u64::from(slot),
                temperature,
                logprob: true,
                ..SamplingParams::GREEDY
            },
            drafts: Vec::new(),
            results: Vec::new(),
        };
    [(0, 0, 20, 4, 1.0), (1, 0, 9, 1, 0.0), (2, 1, 30, 0, 1.0), (4, 2, 17, 3, 0.5)].map(sequence).into()
}

/// Sends batches to a device.
struct Driver<'a> {
    run: &'a mut Run<'a>,
    mode: Mode,
    batch: StepBatch,
    steps: u64,
}

impl Driver<'_> {
    fn send(&mut self, late: &Arc<LateInputs>) -> StepOutput {
        self.steps += 1;
        let mut batch = std::mem::take(&mut self.batch);
        batch.step = self.steps;
        (self.run)(&batch, late)
    }

    /// Makes and verifies the drafts of all sequences of a round.
    fn round(&mut self, sequences: &mut [&mut Sequence]) {
        let late = Arc::<LateInputs>::default();
        let counts: Vec<usize> = sequences
            .iter()
            .map(|sequence| if sequence.is_prompt() || self.mode == Mode::Plain { 0 } else { sequence.count })
            .collect();
        let mut drafts: Vec<Vec<u32>> = vec![Vec::new(); counts.len()];
        let mut take = |counts: &[usize], made: &[u32]| {
            let mut made = made.iter().copied();
            drafts
                .iter_mut()
                .zip(counts)
                .for_each(|(drafts, count)| drafts.extend(made.by_ref().take(*count)));
            drafts.clone()
        };
        let mut known = vec![Vec::new(); counts.len()];
        let steps = match self.mode {
            Mode::Plain => 0,
            Mode::Together | Mode::Apart => 1,
            Mode::OneByOne => 4,
        };
        for step in 0..steps {
            let each = if self.mode == Mode::OneByOne { 1 } else { 4 };
            let now: Vec<usize> = counts.iter().map(|count| count.saturating_sub(step).min(each)).collect();
            for ((sequence, made), count) in sequences.iter().zip(&known).zip(&now) {
                if step == 0 || *count > 0 {
                    sequence.add_draft_span(&mut self.batch, made, *count);
                }
            }
            if self.mode != Mode::Together {
                let out = self.send(&late);
                assert!(out.tokens.is_empty());
                known = take(&now, &out.drafts);
            }
        }
        for ((sequence, made), count) in sequences.iter().zip(&known).zip(&counts) {
            let made = Some(&made[..]).filter(|_| self.mode != Mode::Together);
            sequence.add_span(&mut self.batch, made, *count);
        }
        let out = self.send(&late);
        if self.mode == Mode::Together {
            known = take(&counts, &out.drafts);
        }
        let mut rows = out.tokens.iter().map(|row| (row.token, row.logprob.to_bits()));
        for ((sequence, drafts), count) in sequences.iter_mut().zip(&known).zip(&counts) {
            let ends = sequence.computed + CHUNK >= sequence.prompt_len;
            let wanted = if sequence.is_prompt() { usize::from(ends) } else { 1 + count };
            let results: Vec<_> = rows.by_ref().take(wanted).collect();
            sequence.accept(drafts, &results);
        }
        assert!(rows.next().is_none());
    }
}

/// Runs rounds until every sequence has generated 24 tokens. With `moving`, a sequence moves to another slot
/// in one round, and the first page of another is replaced by a copy in the next.
fn generate<'a>(run: &'a mut Run<'a>, vocab: usize, mode: Mode, moving: bool) -> Vec<Sequence> {
    let mut sequences = sequences(vocab);
    let mut driver = Driver { run, mode, batch: StepBatch::default(), steps: 0 };
    for round in 0.. {
        if moving && round == 4 {
            driver.batch.moves.push(SlotMove { from: sequences[3].slot, to: 5 });
            sequences[3].slot = 5;
        }
        if moving && round == 5 {
            driver.batch.page_copies.push(PageCopy { table: KvTable::Own, from: 1, to: SPARE });
            driver.batch.table_updates.push(TableUpdate {
                slot: 0,
                table: KvTable::Own,
                index: 0,
                page: SPARE,
            });
        }
        for slot in sequences.iter().filter(|sequence| sequence.joins == round).map(|sequence| sequence.slot)
        {
            let entry =
                |index| TableUpdate { slot, table: KvTable::Own, index, page: 1 + slot * PAGES + index };
            driver.batch.table_updates.extend((0..PAGES).map(entry));
        }
        let is_live = |it: &&mut Sequence| it.joins <= round && it.tokens.len() < it.prompt_len + 24;
        let mut live: Vec<&mut Sequence> = sequences.iter_mut().filter(is_live).collect();
        if live.is_empty() {
            return sequences;
        }
        driver.round(&mut live);
    }
    unreachable!()
}

/// The drafts and the results of a sequence.
type DraftsAndResults<'a> = (&'a [u32], &'a [(u32, u32)]);

fn drafts_of(sequences: &[Sequence]) -> Vec<DraftsAndResults<'_>> {
    sequences.iter().map(|sequence| (&sequence.drafts[..], &sequence.results[..])).collect()
}

/// Asserts that the texts are equal, as far as both were generated.
fn assert_same_texts(what: &str, some: &[Sequence], others: &[Sequence]) {
    for (number, (some, other)) in some.iter().zip(others).enumerate() {
        let len = some.tokens.len().min(other.tokens.len());
        assert!(len >= some.prompt_len + 24);
        assert_eq!(some.tokens[..len], other.tokens[..len], "{what}, sequence {number}");
    }
}

/// Checks that drafts and results are equal in one step and in separate ones, wherever slots and pages are,
/// and that the text is that without drafts.
fn check_modes<B: Backend>(make: fn() -> B, target: &ModelRef, draft: &ModelRef) {
    let what = format!("{target:?} with {draft:?}");
    let source = open(target, draft);
    let vocab = source.spec.vocab;
    let of = |mode, moving| generate(&mut *single(make(), &source), vocab, mode, moving);
    let (plain, together) = (of(Mode::Plain, false), of(Mode::Together, false));
    assert_same_texts(&what, &plain, &together);
    let longest = sequences(vocab).iter().map(|sequence| sequence.count).collect::<Vec<_>>();
    for (sequence, count) in together.iter().zip(longest) {
        assert_eq!(sequence.drafts.is_empty(), count == 0, "{what}");
        assert!(sequence.drafts.iter().all(|draft| (*draft as usize) < vocab), "{what}");
    }
    for (mode, moving) in [(Mode::Apart, false), (Mode::OneByOne, false), (Mode::Together, true)] {
        let other = of(mode, moving);
        assert_eq!(drafts_of(&together), drafts_of(&other), "{what}, {mode:?}, moving: {moving}");
    }
}

#[test]
fn drafts_of_one_step_equal_those_of_separate_steps() {
    check_modes(cpu, &ModelRef::Demo, &ModelRef::DemoDraft);
}

/// Random models propose nothing that is accepted, except by chance: all drafts are rejected, over and over.
#[test]
fn a_draft_model_may_have_more_or_fewer_tokens() {
    check_modes(cpu, &fixture("gqa"), &fixture("mqa"));
    check_modes(cpu, &fixture("gqa"), &fixture("tied"));
    check_modes(Reference::new, &fixture("gqa"), &fixture("mqa"));
    check_modes(Reference::new, &fixture("mqa"), &fixture("tied"));
}

/// With the same model and the same random numbers, every draft is what the target samples.
#[test]
fn a_model_accepts_all_of_its_own_drafts() {
    for (backend, name) in [(true, ModelRef::Demo), (true, fixture("gqa")), (false, fixture("mha"))] {
        let source = open(&name, &name);
        let mut run = if backend { single(cpu(), &source) } else { single(Reference::new(), &source) };
        let sequences = generate(&mut *run, source.spec.vocab, Mode::Together, true);
        for sequence in &sequences {
            let text = &sequence.tokens[sequence.prompt_len..];
            let rounds = sequence.drafts.chunks(sequence.count.max(1));
            // A round gives a token more than drafts, and the first token comes with the prompt.
            let accepted: Vec<u32> = rounds
                .enumerate()
                .flat_map(|(round, drafts)| {
                    let at = 1 + round * (sequence.count + 1);
                    text[at..at + drafts.len()].to_vec()
                })
                .collect();
            assert_eq!(accepted, sequence.drafts, "{name:?}, {} drafts", sequence.count);
        }
    }
}

/// In a partition, the device that returns results makes the drafts of a step without rows, and the next step
/// verifies them.
#[test]
fn drafts_are_verified_on_several_devices() {
    let source = open(&ModelRef::Demo, &ModelRef::DemoDraft);
    let vocab = source.spec.vocab;
    let whole = generate(&mut *single(cpu(), &source), vocab, Mode::Together, true);
    for (stages, ranks) in [(2, 1), (1, 2), (2, 2)] {
        let of = |mode| generate(&mut *parted(&source, stages, ranks), vocab, mode, true);
        let (plain, apart) = (of(Mode::Plain), of(Mode::Apart));
        assert_same_texts(&format!("{stages} stages of {ranks} ranks"), &plain, &apart);
        if ranks == 1 {
            assert_eq!(drafts_of(&whole), drafts_of(&apart), "{stages} stages");
        }
    }
}

/// A row as the host got it: its number, input token, next token, and the draft sampled from the logits of
/// the draft model.
type Seen = (usize, u32, Option<u32>, Option<u32>);

/// The host gets the rows that verify drafts in order, each with its input token, the draft after it and the
/// logits from which that was sampled; and all drafts before.
#[test]
fn the_host_gets_drafts_and_their_logits() {
    let (fewer, demo) = ((fixture("gqa"), fixture("mqa")), (ModelRef::Demo, ModelRef::DemoDraft));
    for (backend, (target, draft)) in [(true, demo), (true, fewer.clone()), (false, fewer)] {
        let source = open(&target, &draft);
        let mut run = if backend { single(cpu(), &source) } else { single(Reference::new(), &source) };
        let mut sequences = sequences(source.spec.vocab);
        sequences.truncate(2);
        let mut batch = StepBatch { step: 1, draft_logits: true, ..StepBatch::default() };
        let (late, seen) = (Arc::<LateInputs>::default(), Arc::new(Mutex::new(Vec::<Seen>::new())));
        for sequence in &mut sequences {
            let entry = |index| TableUpdate {
                slot: sequence.slot,
                table: KvTable::Own,
                index,
                page: 1 + sequence.slot * PAGES + index,
            };
            batch.table_updates.extend((0..PAGES).map(entry));
            // All tokens but the last are computed as if they were drafts of another model.
            sequence.prompt_len = 0;
            sequence.tokens.truncate(1);
            sequence.params.temperature = 1.0;
            sequence.add_draft_span(&mut batch, &[], sequence.count);
            sequence.add_span(&mut batch, None, sequence.count);
        }
        for (row, params) in batch.sampling.iter_mut().enumerate() {
            params.mode = SampleMode::Host;
            let (seen, params) = (seen.clone(), *params);
            late.draw_with(row, move |given, sender| {
                let sampled = given.draft_logits.map(|logits| sample(logits, &[], None, &params).unwrap());
                seen.lock().unwrap().push((row, given.input_token, given.next_token, sampled));
                sender.send(row as u32);
            });
        }
        let out = run(&batch, &late);
        let rows = &*seen.lock().unwrap();
        assert_eq!(out.drafts.len(), 5);
        let (mut expected, mut drafts) = (Vec::new(), out.drafts.iter().copied());
        for sequence in &sequences {
            let mut input = sequence.tokens[0];
            for draft in drafts.by_ref().take(sequence.count) {
                expected.push((expected.len(), input, Some(draft), Some(draft)));
                input = draft;
            }
            expected.push((expected.len(), input, None, None));
        }
        assert_eq!(rows, &expected, "{target:?}");
        assert!(out.tokens.iter().map(|row| row.token).eq(0..7));
    }
}

/// The device that returns the results counts the draft model, and no other does.
#[test]
fn the_draft_model_is_on_one_device() {
    let source = open(&ModelRef::Demo, &ModelRef::DemoDraft);
    let draft = source.draft.as_ref().unwrap();
    let [target_page, draft_page] =
        [&source.spec, &draft.spec].map(|spec| page_bytes(spec, KV.ty, &limits(&source)).unwrap().own);
    let whole = Shard::whole(&source.spec);
    let pages =
        |shard: &Shard| shard_page_bytes(&source, shard, KV.ty, &limits(&source)).unwrap().unwrap().own;
    assert_eq!(pages(&whole), target_page + draft_page);
    assert_eq!(executor(cpu(), &source).report().kv_bytes, KV.pages * (target_page + draft_page));
    let halves = [0..2, 2..4].map(|decoder| Shard { decoder, ..whole.clone() });
    assert_eq!(halves.map(|half| pages(&half)), [target_page / 2, target_page / 2 + draft_page]);
    let ranks = [0, 1].map(|rank| Shard { rank, shares: vec![1; 2], ..whole.clone() });
    assert_eq!(ranks.map(|rank| pages(&rank)), [target_page / 2 + draft_page, target_page / 2]);
}

/// A draft may begin at a position whose window the target has passed.
#[test]
fn windowed_layers_of_a_draft_model_use_the_own_table() {
    let windowed = fixture("families/qwen2_window");
    let source = open(&windowed, &windowed);
    let limits = StepLimits { window: Some(8), ..limits(&source) };
    let page = shard_page_bytes(&source, &Shard::whole(&source.spec), KV.ty, &limits).unwrap().unwrap();
    // One layer of each model has a window, and only that of the target has pages of windows.
    assert!(page.own == 3 * page.window && page.window > 0, "{page:?}");
    let kv = KvCacheConfig { pages: 7, window_pages: 3, ..KV };
    let executor = ModelExecutor::new(cpu(), &source, &Shard::whole(&source.spec), kv, limits).unwrap();
    assert_eq!(executor.report().kv_bytes, page.of(7, 3));
}

#[test]
#[should_panic = "is beyond the context of the draft model"]
fn drafts_end_at_the_context_of_the_draft_model() {
    let mut source = open(&fixture("gqa"), &fixture("mqa"));
    source.draft.as_mut().unwrap().spec.context = 40;
    let mut batch = StepBatch::default();
    let mut sequence = sequences(64).swap_remove(0);
    (sequence.drafted, sequence.prompt_len) = (37, 0);
    sequence.tokens.resize(38, 5);
    sequence.add_draft_span(&mut batch, &[], 3);
    executor(cpu(), &source).run(&batch, HandoffPorts::default(), &mut StepOutput::default()).unwrap();
    sequence.add_draft_span(&mut batch, &[], 4);
    executor(cpu(), &source).run(&batch, HandoffPorts::default(), &mut StepOutput::default()).unwrap();
}

/// Prints the times of the steps of a round with 4 drafts of one slot, and the tokens that it gives:
/// `cargo test --lib draft_model:: -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement; .ci/long runs it"]
fn time_of_drafts() {
    let source = open(&ModelRef::Demo, &ModelRef::DemoDraft);
    let limits = StepLimits { logit_rows: 32, attended_fraction: Fraction::ONE, ..limits(&source) };
    for mode in [Mode::Plain, Mode::Together, Mode::Apart, Mode::OneByOne] {
        let whole = Shard::whole(&source.spec);
        let mut executor = ModelExecutor::new(cpu(), &source, &whole, KV, limits).unwrap();
        let mut times: Vec<Vec<Duration>> = vec![Vec::new(); 5];
        let mut sequence = sequences(source.spec.vocab).swap_remove(0);
        let (mut rounds, mut tokens) = (0, 0);
        while rounds < 200 {
            let before = sequence.tokens.len();
            let mut step = 0;
            let mut run = |batch: &StepBatch, _: &Arc<LateInputs>| {
                let (began, mut out) = (Instant::now(), StepOutput::default());
                executor.run(batch, HandoffPorts::default(), &mut out).unwrap();
                times[step].push(began.elapsed());
                step += 1;
                out
            };
            let mut driver = Driver { run: &mut run, mode, batch: StepBatch::default(), steps: 0 };
            let entry = |index| TableUpdate { slot: 0, table: KvTable::Own, index, page: 1 + index };
            driver.batch.table_updates.extend((0..PAGES).map(entry));
            driver.round(&mut [&mut sequence]);
            (rounds, tokens) = (rounds + 1, tokens + sequence.tokens.len() - before);
            if sequence.tokens.len() > 80 {
                sequence = Sequence {
                    params: SamplingParams { seed: rounds, ..sequence.params },
                    ..sequences(source.spec.vocab).swap_remove(0)
                };
            }
        }
        let median = |times: &mut Vec<Duration>| {
            times.sort();
            times.get(times.len() / 2).copied()
        };
        let medians: Vec<Duration> = times.iter_mut().filter_map(median).collect();
        let rate = tokens as f64 / rounds as f64;
        println!(
            "{mode:?}: steps of {medians:?}, sum {:?}, {rate} tokens per round",
            medians.iter().sum::<Duration>()
        );
    }
}

/// A sequence of a large model with random weights, of which each token is known.
struct Recorded {
    executor: ModelExecutor<CpuBackend>,
    vocab: u32,
    /// The tokens by position, as far as they were generated without drafts.
    tokens: Vec<u32>,
}

impl Recorded {
    fn new() -> Recorded {
        let mut source = ModelSource::open(&ModelRef::parse("synthetic:1.1B:bf16").unwrap(), None).unwrap();
        source.weight_rules = crate::quantize::WeightRules::parse("q4_0").unwrap();
        let limits = StepLimits { drafts: 0, attended_fraction: Fraction::ONE, ..limits(&source) };
        let threads = thread::available_parallelism().unwrap().get();
        let precision = ActivationPrecision::Int8;
        let cpu = CpuConfig { threads, isa: Isa::Auto, activation_precision: precision };
        let whole = Shard::whole(&source.spec);
        let mut executor =
            ModelExecutor::new(CpuBackend::new(cpu).unwrap(), &source, &whole, KV, limits).unwrap();
        let entry = |index| TableUpdate { slot: 0, table: KvTable::Own, index, page: 1 + index };
        let batch =
            StepBatch { table_updates: (0..PAGES).map(entry).collect(), step: 1, ..StepBatch::default() };
        executor.run(&batch, HandoffPorts::default(), &mut StepOutput::default()).unwrap();
        Recorded { executor, vocab: source.spec.vocab as u32, tokens: vec![5] }
    }

    /// Computes these tokens from a position on. Returns the tokens after each of them, and the time.
    fn step(&mut self, start: usize, tokens: &[u32]) -> (Vec<u32>, Duration) {
        let span = Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: 0,
            start: start as u32,
            tokens: SpanTokens::Generated { at: 0, len: tokens.len() as u32 },
            table: SpanTable::Own,
            reserved: 90,
            encoder_len: 0,
            output: SpanOutput::All,
        };
        let batch = StepBatch {
            step: 2,
            tokens: tokens.to_vec(),
            spans: vec![span],
            sampling: vec![SamplingParams::GREEDY; tokens.len()],
            ..StepBatch::default()
        };
        let (began, mut out) = (Instant::now(), StepOutput::default());
        self.executor.run(&batch, HandoffPorts::default(), &mut out).unwrap();
        (out.tokens.iter().map(|row| row.token).collect(), began.elapsed())
    }

    /// Generates tokens with drafts of which each is the right one with a probability. Returns the time per
    /// token.
    fn generate(&mut self, count: usize, drafts: usize, probability: f64) -> f64 {
        let (mut known, mut time) = (1, Duration::ZERO);
        while known <= count {
            let draft = |at: usize| {
                let is_right =
                    f64::from(philox([at as u32, 1, 0, 0], [0, 0])[0]) < probability * 2f64.powi(32);
                self.tokens.get(at).map_or(1, |token| (token + u32::from(!is_right)) % self.vocab)
            };
            let drafts: Vec<u32> = (known..known + drafts).map(draft).collect();
            let (next, elapsed) = self.step(known - 1, &[&[self.tokens[known - 1]], &drafts[..]].concat());
            time += elapsed;
            let accepted = drafts.iter().zip(&next).take_while(|(draft, next)| draft == next).count();
            for &token in &next[..=accepted] {
                if known == self.tokens.len() {
                    self.tokens.push(token);
                }
                assert_eq!(token, self.tokens[known], "drafts change no token");
                known += 1;
            }
        }
        time.as_secs_f64() / (known - 1) as f64
    }
}

/// Prints how long steps of several rows take on a model of 1.1 billion weights, relative to one row, and how
/// much faster drafts of no cost are that are accepted with some probability:
/// `cargo test --release --lib draft_model::tests::time_of_rows -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement of minutes; .ci/long runs it"]
fn time_of_rows() {
    const TOKENS: usize = 60;
    let mut recorded = Recorded::new();
    recorded.generate(TOKENS + 16, 0, 0.0);
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    for rows in 2..=8 {
        let turn = |recorded: &mut Recorded| {
            let mut time = |rows: usize| {
                let tokens = recorded.tokens[40..40 + rows].to_vec();
                (0..3).map(|_| recorded.step(40, &tokens).1.as_secs_f64()).sum::<f64>()
            };
            let one = time(1);
            time(rows) / one
        };
        let ratios = (0..9).map(|_| turn(&mut recorded)).collect();
        println!("{rows} rows: {:.2} of the time of one", median(ratios));
    }
    for probability in [0.5, 0.7, 0.9] {
        for drafts in [1, 2, 3, 5, 7] {
            let turn = |recorded: &mut Recorded| {
                let without = recorded.generate(TOKENS, 0, 0.0);
                without / recorded.generate(TOKENS, drafts, probability)
            };
            let ratios = (0..5).map(|_| turn(&mut recorded)).collect();
            println!("{probability} accepted, {drafts} drafts: {:.2} times as fast", median(ratios));
        }
    }
}
