//! Selection of the tests, and the sizes of the engine that they need.
//!
//! Invariant: the engine has slots, rows, positions and pages for every selected test, so that none is
//! rejected.

use super::sample::TestKind;
use super::usage;
use crate::config::{Config, KvSize};
use anyhow::Result;
use clap::Args;
use std::fmt;

const PREFILL: [u32; 3] = [128, 512, 2048];
const DEPTHS: [u32; 3] = [0, 512, 2048];
const SEQUENCES: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Maximum prompt tokens of warm-up runs whose prompt is not measured.
const WARM_UP: usize = 8;

/// Options that select the tests of a model.
#[derive(Args)]
pub struct SuiteArgs {
    /// Prompt lengths for prefill tests; by default 128,512,2048.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = positive())]
    prefill: Option<Vec<u32>>,
    /// Cached tokens at the start of decode tests; by default 0,512,2048.
    #[arg(long, value_name = "POSITIONS", value_delimiter = ',')]
    depth: Option<Vec<u32>>,
    /// Tokens to decode per sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = positive())]
    decode: u32,
    /// Numbers of sequences; by default 1,2,4,8,16,32 for fused decode, 1,4,16 for speculative decoding.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    sequences: Option<Vec<u32>>,
    /// Cached tokens per sequence at the start of fused decode tests.
    #[arg(long, value_name = "POSITIONS", default_value_t = 8, value_parser = positive())]
    fused_depth: u32,
    /// Repeat the fused decode tests with output that follows a JSON schema.
    #[arg(long)]
    constrained: bool,
    /// Repeat the fused decode tests with this many sequences, or all, whose tokens the host draws.
    #[arg(long, value_name = "SEQUENCES", value_parser = positive())]
    host_drawn: Option<u32>,
}

fn positive() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// A test: sequences of equal length that are submitted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchTest {
    pub kind: TestKind,
    pub sequences: usize,
    /// Prompt tokens per sequence; at least one.
    pub prompt: usize,
    /// Measured tokens per sequence: those of the prompt, or the generated ones after the first.
    pub tokens: usize,
    /// Tokens to generate per sequence.
    pub max_tokens: usize,
}

impl BenchTest {
    fn prefill(tokens: usize) -> BenchTest {
        BenchTest { kind: TestKind::Prefill, sequences: 1, prompt: tokens, tokens, max_tokens: 1 }
    }

    /// Creates a decode test of one sequence. The prompt of `depth` tokens fills the cache, and its step
    /// generates the first token; the `tokens` after it are measured.
    pub fn decode(depth: usize, tokens: usize) -> BenchTest {
        BenchTest {
            kind: TestKind::Decode { depth },
            sequences: 1,
            prompt: depth.max(1),
            tokens,
            max_tokens: tokens + 1,
        }
    }

    /// Creates a fused decode test. Some sequences begin a few steps before others; each generates as many
    /// more tokens, so that all are running while the last one is measured. `budget` is the tokens per step.
    fn fused((sequences, depth): (usize, usize), tokens: usize, budget: usize) -> BenchTest {
        let begin = 1 + (sequences * depth).div_ceil(budget - sequences);
        let max_tokens = tokens + 1 + if sequences > 1 { begin } else { 0 };
        BenchTest { kind: TestKind::Fused { depth }, sequences, prompt: depth, tokens, max_tokens }
    }

    /// Returns the warm-up run of this test, with a short prompt unless the prompt is measured.
    pub fn warm_up(&self) -> BenchTest {
        match self.kind {
            TestKind::Prefill => *self,
            _ => BenchTest { prompt: self.prompt.min(WARM_UP), ..*self },
        }
    }

    /// Positions per sequence.
    pub fn positions(&self) -> usize {
        self.prompt + self.max_tokens
    }

    /// KV pages of all sequences.
    pub fn pages(&self, page_positions: usize) -> usize {
        self.sequences * self.positions().div_ceil(page_positions)
    }
}

impl fmt::Display for BenchTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BenchTest { kind: what, sequences, tokens, .. } = self;
        match what {
            TestKind::Decode { depth } => write!(f, "decode of {tokens} tokens at depth {depth}"),
            TestKind::Fused { depth }
            | TestKind::Constrained { depth }
            | TestKind::HostDrawn { depth, .. } => {
                write!(f, "{} of {tokens} tokens at depth {depth}, sequences: {sequences}", what.name())
            }
            _ => write!(f, "prefill of {tokens} tokens"),
        }
    }
}

impl SuiteArgs {
    /// Tokens to decode per sequence.
    pub fn decode_tokens(&self) -> usize {
        self.decode as usize
    }

    /// Returns the numbers of sequences, or `default` if none are given.
    pub fn sequences_or(&self, default: &[u32]) -> Vec<u32> {
        self.sequences.clone().unwrap_or_else(|| default.to_vec())
    }

    /// Returns the tests that fit `context` positions, and sets slots and token budget for them. Prefill
    /// tests and default depths that do not fit are reported in `notes`; any other test that does not fit is
    /// an error.
    pub fn select_tests(
        &self,
        config: &mut Config,
        context: usize,
        notes: &mut Vec<String>,
    ) -> Result<Vec<BenchTest>> {
        let scheduler = &mut config.scheduler;
        let counts = self.sequences_or(&SEQUENCES);
        let slots = counts.iter().copied().max().unwrap_or(1) as usize;
        scheduler.slots = scheduler.slots.max(slots);
        if scheduler.token_budget <= scheduler.slots {
            scheduler.token_budget = 2 * scheduler.slots;
        }
        let decode = self.decode as usize;
        let depths = self.depth.as_deref().unwrap_or(&DEPTHS);
        let prompts = self.prefill.as_deref().unwrap_or(&PREFILL);
        let depth = self.fused_depth as usize;
        let fused =
            |&number: &u32| BenchTest::fused((number as usize, depth), decode, scheduler.token_budget);
        let all = prompts.iter().map(|&tokens| BenchTest::prefill(tokens as usize));
        let all = all.chain(depths.iter().map(|&depth| BenchTest::decode(depth as usize, decode)));
        let all = all.chain(counts.iter().map(fused).flat_map(|test| self.variants(test)));
        let mut tests = Vec::new();
        for test in all {
            let may_be_left_out = match test.kind {
                TestKind::Decode { depth } => self.depth.is_none() && depth > 0,
                what => what == TestKind::Prefill,
            };
            match test.positions() <= context {
                true => tests.push(test),
                false if may_be_left_out => {
                    notes.push(format!("{} skipped: {}", test, context_message(&test, context)))
                }
                false => return Err(usage(format!("{}: {}", test, context_message(&test, context)))),
            }
        }
        Ok(tests)
    }
}

impl SuiteArgs {
    /// Returns a fused decode test, and those that repeat it with the host's part in sampling.
    fn variants(&self, test: BenchTest) -> impl Iterator<Item = BenchTest> {
        let depth = test.prompt;
        let constrained = self.constrained.then_some(TestKind::Constrained { depth });
        let rows = self.host_drawn.map(|rows| test.sequences.min(rows as usize));
        let host_drawn = rows.map(|rows| TestKind::HostDrawn { depth, rows });
        let kinds = [Some(test.kind), constrained, host_drawn].into_iter().flatten();
        kinds.map(move |kind| BenchTest { kind, ..test })
    }
}

fn context_message(test: &BenchTest, context: usize) -> String {
    format!("needs {} positions, but the context has {context}", test.positions())
}

/// Sets the KV cache size to that of the largest test, unless it is configured, and the maximum sequence
/// length to that of the longest. Fails if the configured number of tokens is too small.
pub fn size_cache(config: &mut Config, tests: &[BenchTest]) -> Result<()> {
    let kv = &mut config.kv;
    kv.max_context = tests.iter().map(BenchTest::positions).max();
    let pages = tests.iter().map(|test| test.pages(kv.page_size)).max().unwrap_or(1);
    let needed = pages * kv.page_size;
    match kv.size {
        KvSize::Auto => kv.size = KvSize::Tokens(needed),
        KvSize::Tokens(tokens) if tokens < needed => {
            return Err(usage(format!("kv.size is {tokens} tokens, but the tests need {needed}")));
        }
        KvSize::Tokens(_) | KvSize::Bytes(_) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    fn args(depth: Option<&[u32]>, decode: u32, sequences: &[u32]) -> SuiteArgs {
        let (depth, sequences) = (depth.map(<[u32]>::to_vec), Some(sequences.to_vec()));
        let (constrained, host_drawn) = (false, None);
        SuiteArgs { prefill: None, depth, decode, sequences, fused_depth: 8, constrained, host_drawn }
    }

    fn config() -> Config {
        Config::load(None, Overrides::default()).unwrap()
    }

    #[test]
    fn default_tests_beyond_the_context_are_skipped_and_noted() {
        let (mut config, mut notes) = (config(), Vec::new());
        let tests = args(None, 64, &[1, 2]).select_tests(&mut config, 1024, &mut notes).unwrap();
        let kinds: Vec<TestKind> = tests.iter().map(|test| test.kind).collect();
        let (decode, fused) = (|depth| TestKind::Decode { depth }, TestKind::Fused { depth: 8 });
        assert_eq!(kinds, [TestKind::Prefill, TestKind::Prefill, decode(0), decode(512), fused, fused]);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(
            notes[0].starts_with("prefill of 2048 tokens skipped") && notes[0].contains("1024"),
            "{notes:?}"
        );
    }

    /// Warm-up keeps measured prompts and the number of decoded tokens, and shortens other prompts.
    #[test]
    fn warming_up_shortens_prompts_that_are_not_measured() {
        let prompts = |test: BenchTest| (test.warm_up().prompt, test.warm_up().max_tokens == test.max_tokens);
        assert_eq!(prompts(BenchTest::prefill(512)), (512, true));
        assert_eq!(prompts(BenchTest::decode(2048, 4)), (8, true));
        assert_eq!(prompts(BenchTest::decode(0, 4)), (1, true));
        assert_eq!(prompts(BenchTest::fused((32, 128), 4, 512)), (8, true));
    }

    #[test]
    fn explicitly_requested_tests_must_fit() {
        let error =
            |args: SuiteArgs| args.select_tests(&mut config(), 64, &mut Vec::new()).unwrap_err().to_string();
        assert!(
            error(args(Some(&[60]), 8, &[1])).contains("decode of 8 tokens at depth 60: needs 69 positions")
        );
        assert!(error(args(Some(&[0]), 60, &[1])).contains("at depth 8, sequences: 1: needs 69"));
        assert!(error(args(None, 64, &[1])).contains("at depth 0: needs 66"));
    }

    /// The token budget leaves room for prompts beside all decoding sequences, and the cache holds them all.
    #[test]
    fn the_engine_is_as_large_as_its_tests() {
        let mut config = config();
        let tests =
            args(Some(&[100]), 10, &[4, 600]).select_tests(&mut config, 4096, &mut Vec::new()).unwrap();
        assert_eq!((config.scheduler.slots, config.scheduler.token_budget), (600, 1200));
        size_cache(&mut config, &tests).unwrap();
        let fused = tests.last().unwrap();
        // Beside 600 decode rows, the 4800 prompt tokens take 8 steps.
        assert_eq!(fused.max_tokens, 10 + 1 + 1 + 8);
        let pages = tests.iter().map(|test| test.pages(32)).max().unwrap();
        assert_eq!(pages, fused.sequences);
        assert_eq!(config.kv.size, KvSize::Tokens(pages * 32));

        config.kv.size = KvSize::Tokens(1000);
        let error = size_cache(&mut config, &tests).unwrap_err().to_string();
        assert!(error.contains("kv.size is 1000 tokens"), "{error}");
    }
}
