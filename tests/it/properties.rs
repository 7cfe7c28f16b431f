//! Tests of batch invariance: results are bit-identical alone, batched, in chunks and after moves, for the
//! oracle and for every instruction set of the fast backend.

use crate::common::{fixture, prompt, skipped};
use mainstem::model::Shard;
use mainstem::model::executor::{Executor, KvCacheConfig, ModelExecutor};
use mainstem::model::{ModelRef, ModelSource};
use mainstem_kernels::ActivationPrecision;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{
    Fraction, HandoffPorts, KvTable, QuantType, SamplingParams, SlotMove, Span, SpanModel, SpanOutput,
    SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput, TableUpdate,
};

const SLOTS: u32 = 6;
/// The longest sequence.
const POSITIONS: usize = 128;

/// An executor driven manually by a test.
struct Rig {
    executor: Box<dyn Executor>,
    page_positions: usize,
    step: u64,
    batch: StepBatch,
}

/// Sampling of a sequence's tokens.
#[derive(Clone, Copy)]
enum Pick {
    Greedy,
    /// At random, from a seed.
    Sampled(u64),
}

impl Pick {
    /// Returns the sample row of the token at `position`.
    fn row(self, position: usize) -> SamplingParams {
        let row = SamplingParams { logprob: true, position: position as u32, ..SamplingParams::GREEDY };
        match self {
            Pick::Greedy => row,
            Pick::Sampled(seed) => SamplingParams { temperature: 1.1, top_k: 50, top_p: 0.97, seed, ..row },
        }
    }
}

/// A token and the bits of its log-probability.
type Sampled = (u32, u32);

impl Rig {
    fn new(backend: &str, model: &str, ty: QuantType) -> Option<Rig> {
        let threads = if backend == "portable" { 3 } else { 2 };
        Rig::with(backend, model, ty, 32, threads)
    }

    fn with(backend: &str, model: &str, ty: QuantType, page_positions: usize, threads: usize) -> Option<Rig> {
        let source = ModelSource::open(&ModelRef::Path(fixture(model)), None).unwrap();
        let limits = StepLimits {
            slots: SLOTS as usize,
            rows: 160,
            batch_rows: usize::MAX,
            logit_rows: 4,
            positions: POSITIONS,
            encoder_positions: 0,
            page_positions,
            window: None,
            top_logprobs: 0,
            vocab: source.spec.vocab,
            hidden: 0,
            drafts: 0,
            draft_logits: false,
            counts_tokens: false,
            opening_rows: 0,
            attended_fraction: Fraction::ONE,
        };
        let kv =
            KvCacheConfig { ty, pages: 1 + SLOTS as usize * (POSITIONS / page_positions), window_pages: 0 };
        let cpu = |isa| match CpuBackend::new(CpuConfig {
            threads,
            isa,
            activation_precision: ActivationPrecision::Int8,
        }) {
            Ok(backend) => Some(Box::new(
                ModelExecutor::new(backend, &source, &Shard::whole(&source.spec), kv, limits).unwrap(),
            ) as _),
            Err(absent) => {
                skipped(&format!("{backend}: {absent}"));
                None
            }
        };
        let executor: Option<Box<dyn Executor>> = match backend {
            "reference" => Some(Box::new(
                ModelExecutor::new(Reference::new(), &source, &Shard::whole(&source.spec), kv, limits)
                    .unwrap(),
            )),
            "avx512" => cpu(Isa::Avx512),
            "avx2" => cpu(Isa::Avx2),
            "portable" => cpu(Isa::Portable),
            other => unreachable!("{other}"),
        };
        Some(Rig { executor: executor?, page_positions, step: 0, batch: StepBatch::default() })
    }

    /// Assigns pages to a slot: scattered, and different for each slot.
    fn open(&mut self, slot: u32, pages_of: u32) {
        let pages = (POSITIONS / self.page_positions) as u32;
        for index in 0..pages {
            let page = 1 + (pages_of * pages + index) * 7 % (SLOTS * pages);
            self.batch.table_updates.push(TableUpdate { slot, table: KvTable::Own, index, page });
        }
    }

    /// Adds prompt tokens to the batch; the next token is sampled if `pick` is given.
    fn give(&mut self, slot: u32, start: usize, tokens: &[u32], pick: Option<Pick>) {
        let at = self.batch.tokens.len() as u32;
        self.batch.tokens.extend_from_slice(tokens);
        let given = SpanTokens::Given { at, len: tokens.len() as u32 };
        self.span(slot, start, given, pick.map(|pick| pick.row(start + tokens.len())));
    }

    /// Adds the slot's last token, at position `start`, to the batch.
    fn last(&mut self, slot: u32, start: usize, pick: Pick) {
        self.span(slot, start, SpanTokens::Last, Some(pick.row(start + 1)));
    }

    fn span(&mut self, slot: u32, start: usize, tokens: SpanTokens, sample: Option<SamplingParams>) {
        self.batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot,
            start: start as u32,
            tokens,
            table: SpanTable::Own,
            reserved: POSITIONS as u32,
            encoder_len: 0,
            output: if sample.is_some() { SpanOutput::Last } else { SpanOutput::None },
        });
        self.batch.sampling.extend(sample);
    }

    fn run(&mut self) -> Vec<Sampled> {
        self.step += 1;
        self.batch.step = self.step;
        let mut output = StepOutput::default();
        self.executor.run(&self.batch, HandoffPorts::default(), &mut output).unwrap();
        self.batch.clear();
        output.tokens.iter().map(|row| (row.token, row.logprob.to_bits())).collect()
    }

    /// Runs the whole prompt, then token by token.
    fn alone(&mut self, prompt: &[u32], tokens: usize, pick: Pick) -> Vec<Sampled> {
        self.open(0, 0);
        self.give(0, 0, prompt, Some(pick));
        let mut sampled = self.run();
        for i in 1..tokens {
            self.last(0, prompt.len() + i - 1, pick);
            sampled.extend(self.run());
        }
        sampled
    }
}

const BACKENDS: [&str; 4] = ["reference", "avx512", "avx2", "portable"];
/// Runs the check for models with grouped queries and an odd head dimension, with biases, in half precision,
/// and in block formats.
const MODELS: [&str; 5] = ["gqa", "odd_head_dim", "f16", "gguf/q8_0.gguf", "gguf/q4_0.gguf"];

fn for_all_rigs(check: impl Fn(&mut Rig, &str)) {
    for backend in BACKENDS {
        for model in MODELS {
            let plain = [QuantType::F32, QuantType::F16];
            let grouped = [QuantType::Q8_0, QuantType::G4_B64].into_iter().filter(|_| model == MODELS[1]);
            for ty in plain.into_iter().chain(grouped) {
                let name = format!("{backend}, {model}, cache {ty}");
                let Some(mut rig) = Rig::new(backend, model, ty) else { continue };
                check(&mut rig, &name);
            }
        }
    }
}

#[test]
fn a_prompt_in_chunks_is_the_prompt_whole_at_every_boundary() {
    for_all_rigs(|rig, name| {
        let prompt = prompt(1, 41);
        let whole = rig.alone(&prompt, 3, Pick::Greedy);
        for cut in 1..prompt.len() {
            rig.open(2, 3);
            rig.give(2, 0, &prompt[..cut], None);
            rig.run();
            rig.give(2, cut, &prompt[cut..], Some(Pick::Greedy));
            let mut sampled = rig.run();
            for i in 1..3 {
                rig.last(2, prompt.len() + i - 1, Pick::Greedy);
                sampled.extend(rig.run());
            }
            assert_eq!(sampled, whole, "{name}: cut at {cut}");
        }
        rig.open(1, 1);
        for (i, token) in prompt.iter().enumerate() {
            rig.give(1, i, &[*token], (i + 1 == prompt.len()).then_some(Pick::Greedy));
            let sampled = rig.run();
            assert!(sampled.is_empty() || sampled[0] == whole[0], "{name}: token by token");
        }
    });
}

/// Three sequences, greedy and sampled, join at different steps, one prompt is batched in chunks with
/// decoding rows, and before every step one or two sequences move to other slots.
#[test]
fn batches_and_moves_change_nothing() {
    for_all_rigs(|rig, name| {
        let prompts = [prompt(1, 33), prompt(2, 5), prompt(3, 64)];
        let picks = [Pick::Greedy, Pick::Sampled(11), Pick::Sampled(12)];
        let alone = [0, 1, 2].map(|s| rig.alone(&prompts[s], 8, picks[s]));
        let mut slots = [3u32, 1, 4];
        let mut sampled: [Vec<Sampled>; 3] = Default::default();
        let mut given = [0usize; 3];
        for iteration in 0.. {
            if sampled.iter().all(|d| d.len() == 8) {
                break;
            }
            let mut waiting = Vec::new();
            if iteration > 1 {
                // Over the iterations, every sequence moves to a free slot.
                let free: Vec<u32> = (0..SLOTS).filter(|slot| !slots.contains(slot)).collect();
                for (mover, to) in (iteration..iteration + 1 + iteration % 2).zip(free) {
                    let from = std::mem::replace(&mut slots[mover % 3], to);
                    rig.batch.moves.push(SlotMove { from, to });
                }
            }
            for s in [2, 0, 1] {
                let len = prompts[s].len();
                if iteration < s || sampled[s].len() == 8 {
                    continue;
                }
                if given[s] < len {
                    if given[s] == 0 {
                        rig.open(slots[s], s as u32);
                    }
                    let chunk = (len - given[s]).min(10 + s * 20);
                    let last = given[s] + chunk == len;
                    rig.give(slots[s], given[s], &prompts[s][given[s]..][..chunk], last.then_some(picks[s]));
                    given[s] += chunk;
                    if last {
                        waiting.push(s);
                    }
                } else {
                    rig.last(slots[s], len + sampled[s].len() - 1, picks[s]);
                    waiting.push(s);
                }
            }
            for (s, token) in waiting.into_iter().zip(rig.run()) {
                sampled[s].push(token);
            }
        }
        assert_eq!(sampled, alone, "{name}");
    });
}

/// AVX2 and AVX-512 perform the same additions in the same order.
#[test]
fn instruction_sets_with_fused_multiply_add_agree_to_the_bit() {
    let grouped = [QuantType::Q8_0, QuantType::G4_B64].map(|ty| (MODELS[1], ty));
    for (model, ty) in MODELS.map(|model| (model, QuantType::F16)).into_iter().chain(grouped) {
        let prompt = prompt(5, 50);
        let sampled = ["avx512", "avx2"]
            .map(|isa| Rig::new(isa, model, ty).map(|mut rig| rig.alone(&prompt, 6, Pick::Sampled(5))));
        if let [Some(wide), Some(narrow)] = sampled {
            assert_eq!(wide, narrow, "{model}, cache {ty}");
        }
    }
}

#[test]
fn page_size_and_threads_change_nothing() {
    for backend in BACKENDS {
        for model in MODELS {
            let prompt = prompt(7, 70);
            let sampled = |page_positions, threads| {
                let mut rig = Rig::with(backend, model, QuantType::F16, page_positions, threads)?;
                Some(rig.alone(&prompt, 40, Pick::Sampled(9)))
            };
            let Some(first) = sampled(32, 1) else { continue };
            for (page_positions, threads) in [(64, 1), (POSITIONS, 1), (32, 2), (32, 3), (64, 3)] {
                let what = format!("{backend}, {model}: pages of {page_positions}, {threads} threads");
                assert_eq!(sampled(page_positions, threads).as_ref(), Some(&first), "{what}");
            }
        }
    }
}
