//! Arithmetic does not depend on company: alone = among others = in chunks = after moves, bit for bit, for
//! the oracle and for every instruction set of the fast backend.

use crate::common::{fixture, prompt};
use mainstem::model::ModelSource;
use mainstem::model::executor::{Executor, KvPlan, ModelExecutor};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{
    QuantType, SampleRow, SlotMove, Span, SpanModel, SpanTable, SpanTokens, StepBatch, StepLimits,
    StepOutput, TableUpdate, Want,
};

const PAGE: usize = 32;
const SLOTS: u32 = 6;

/// A device driven by hand.
struct Rig {
    executor: Box<dyn Executor>,
    step: u64,
    batch: StepBatch,
}

/// A token and the bits of its log-probability.
type Drawn = (u32, u32);

impl Rig {
    fn new(backend: &str, model: &str, ty: QuantType) -> Option<Rig> {
        let source = ModelSource::open(&fixture(model), None).unwrap();
        let limits = StepLimits {
            slots: SLOTS as usize,
            rows: 160,
            logit_rows: 4,
            positions: 128,
            page_positions: PAGE,
            top_logprobs: 0,
            vocab: source.spec.vocab,
        };
        let kv = KvPlan { ty, pages: 1 + SLOTS as usize * 4 };
        let cpu = |isa, threads| match CpuBackend::new(CpuConfig { threads, isa }) {
            Ok(backend) => Some(Box::new(ModelExecutor::new(backend, &source, kv, limits).unwrap()) as _),
            Err(absent) => {
                eprintln!("skipped: {backend}: {absent}");
                None
            }
        };
        let executor: Option<Box<dyn Executor>> = match backend {
            "reference" => Some(Box::new(ModelExecutor::new(Reference::new(), &source, kv, limits).unwrap())),
            "avx512" => cpu(Isa::Avx512, 2),
            "avx2" => cpu(Isa::Avx2, 2),
            "portable" => cpu(Isa::Portable, 3),
            other => unreachable!("{other}"),
        };
        Some(Rig { executor: executor?, step: 0, batch: StepBatch::default() })
    }

    /// Gives a slot its pages: scattered, and different for each slot.
    fn open(&mut self, slot: u32, pages_of: u32) {
        for index in 0..4 {
            let page = 1 + (pages_of * 4 + index) * 7 % (SLOTS * 4);
            self.batch.tables.push(TableUpdate { slot, index, page });
        }
    }

    fn give(&mut self, slot: u32, start: usize, tokens: &[u32], draw: bool) {
        let at = self.batch.tokens.len() as u32;
        self.batch.tokens.extend_from_slice(tokens);
        let given = SpanTokens::Given { at, len: tokens.len() as u32 };
        self.span(slot, start, given, if draw { Want::Last } else { Want::None });
    }

    fn last(&mut self, slot: u32, start: usize) {
        self.span(slot, start, SpanTokens::Last, Want::Last);
    }

    fn span(&mut self, slot: u32, start: usize, tokens: SpanTokens, want: Want) {
        let start = start as u32;
        self.batch.spans.push(Span {
            model: SpanModel::Target,
            slot,
            start,
            tokens,
            table: SpanTable::Own,
            want,
        });
        if want == Want::Last {
            self.batch.samples.push(SampleRow { logprob: true, ..SampleRow::GREEDY });
        }
    }

    fn run(&mut self) -> Vec<Drawn> {
        self.step += 1;
        self.batch.step = self.step;
        let mut output = StepOutput::default();
        self.executor.run(&self.batch, &mut output).unwrap();
        self.batch.clear();
        output.rows.iter().map(|row| (row.token, row.logprob.to_bits())).collect()
    }

    /// The prompt whole, then token by token.
    fn alone(&mut self, prompt: &[u32], tokens: usize) -> Vec<Drawn> {
        self.open(0, 0);
        self.give(0, 0, prompt, true);
        let mut drawn = self.run();
        for i in 1..tokens {
            self.last(0, prompt.len() + i - 1);
            drawn.extend(self.run());
        }
        drawn
    }
}

const BACKENDS: [&str; 4] = ["reference", "avx512", "avx2", "portable"];
/// Grouped queries over an odd head; a biased one; and one stored in half precision.
const MODELS: [&str; 3] = ["gqa", "odd_head_dim", "f16"];

fn for_all_rigs(check: impl Fn(&mut Rig, &str)) {
    for backend in BACKENDS {
        for model in MODELS {
            for ty in [QuantType::F32, QuantType::F16] {
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
        let whole = rig.alone(&prompt, 3);
        for cut in 1..prompt.len() {
            rig.open(2, 3);
            rig.give(2, 0, &prompt[..cut], false);
            rig.run();
            rig.give(2, cut, &prompt[cut..], true);
            let mut drawn = rig.run();
            for i in 1..3 {
                rig.last(2, prompt.len() + i - 1);
                drawn.extend(rig.run());
            }
            assert_eq!(drawn, whole, "{name}: cut at {cut}");
        }
        rig.open(1, 1);
        for (i, token) in prompt.iter().enumerate() {
            rig.give(1, i, &[*token], i + 1 == prompt.len());
            let drawn = rig.run();
            assert!(drawn.is_empty() || drawn[0] == whole[0], "{name}: token by token");
        }
    });
}

/// Three sequences join at different steps, one prompt in chunks beside decoding rows, and before every step
/// some slots change places.
#[test]
fn company_and_moves_change_nothing() {
    for_all_rigs(|rig, name| {
        let prompts = [prompt(1, 33), prompt(2, 5), prompt(3, 64)];
        let alone = prompts.each_ref().map(|prompt| rig.alone(prompt, 8));
        let mut slots = [3u32, 1, 4];
        let mut drawn: [Vec<Drawn>; 3] = Default::default();
        let mut given = [0usize; 3];
        for turn in 0.. {
            if drawn.iter().all(|d| d.len() == 8) {
                break;
            }
            let mut waiting = Vec::new();
            if turn > 1 {
                // Everybody moves to a free slot, one at a time over the turns.
                let free = (0..SLOTS).find(|slot| !slots.contains(slot)).unwrap();
                let mover = turn % 3;
                rig.batch.moves.push(SlotMove { from: slots[mover], to: free });
                slots[mover] = free;
            }
            for s in [2, 0, 1] {
                let len = prompts[s].len();
                if turn < s || drawn[s].len() == 8 {
                    continue;
                }
                if given[s] < len {
                    if given[s] == 0 {
                        rig.open(slots[s], s as u32);
                    }
                    let chunk = (len - given[s]).min(10 + s * 20);
                    let last = given[s] + chunk == len;
                    rig.give(slots[s], given[s], &prompts[s][given[s]..][..chunk], last);
                    given[s] += chunk;
                    if last {
                        waiting.push(s);
                    }
                } else {
                    rig.last(slots[s], len + drawn[s].len() - 1);
                    waiting.push(s);
                }
            }
            for (s, token) in waiting.into_iter().zip(rig.run()) {
                drawn[s].push(token);
            }
        }
        assert_eq!(drawn, alone, "{name}");
    });
}

/// AVX2 and AVX-512 do the same additions in the same order.
#[test]
fn instruction_sets_with_fused_multiply_add_agree_to_the_bit() {
    for model in MODELS {
        let prompt = prompt(5, 50);
        let drawn = ["avx512", "avx2"]
            .map(|isa| Rig::new(isa, model, QuantType::F16).map(|mut rig| rig.alone(&prompt, 6)));
        if let [Some(wide), Some(narrow)] = drawn {
            assert_eq!(wide, narrow, "{model}");
        }
    }
}
