//! Which tests are asked for, whether they fit the model, and how large an engine they need.
//!
//! Invariant: a test that is run is never refused: its slots, rows, positions and pages are there.

use super::report::What;
use super::usage;
use crate::config::{Config, KvSize};
use anyhow::Result;
use clap::Args;
use std::fmt;

const PREFILL: [u32; 3] = [128, 512, 2048];
const DEPTHS: [u32; 3] = [0, 512, 2048];
/// Tokens of prompts that are only there to have something decoded.
const WARM_UP: usize = 8;

/// The tests of a model.
#[derive(Args)]
pub struct Asked {
    /// Lengths of the prompts to read; 128,512,2048 unless given.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = positive())]
    prefill: Option<Vec<u32>>,
    /// Positions in the cache before decoding begins; 0,512,2048 unless given.
    #[arg(long, value_name = "POSITIONS", value_delimiter = ',')]
    depth: Option<Vec<u32>>,
    /// Tokens to decode, in each sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = positive())]
    decode: u32,
    /// Sequences to decode at once.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,2,4,8,16,32",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    sequences: Vec<u32>,
    /// Positions that each of them has in the cache before.
    #[arg(long, value_name = "POSITIONS", default_value_t = 8, value_parser = positive())]
    fused_depth: u32,
}

fn positive() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// A test: sequences that begin together, alike in length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test {
    pub what: What,
    pub sequences: usize,
    /// Tokens of each prompt; at least one.
    pub prompt: usize,
    /// Tokens of each sequence that are measured: the prompt's, or those after the first one of the answer.
    pub tokens: usize,
    /// Tokens to ask for.
    pub max_tokens: usize,
}

impl Test {
    fn prefill(tokens: usize) -> Test {
        Test { what: What::Prefill, sequences: 1, prompt: tokens, tokens, max_tokens: 1 }
    }

    /// The prompt fills the cache, and its step makes the first token; those after it are measured.
    pub fn decode(depth: usize, tokens: usize) -> Test {
        Test {
            what: What::Decode { depth },
            sequences: 1,
            prompt: depth.max(1),
            tokens,
            max_tokens: tokens + 1,
        }
    }

    /// Some begin a few steps before others; so that all are there while the last one is measured, each makes
    /// so many tokens more. `budget`: tokens of a step.
    fn fused((sequences, depth): (usize, usize), tokens: usize, budget: usize) -> Test {
        let begin = 1 + (sequences * depth).div_ceil(budget - sequences);
        let max_tokens = tokens + 1 + if sequences > 1 { begin } else { 0 };
        Test { what: What::Fused { depth }, sequences, prompt: depth, tokens, max_tokens }
    }

    /// What warms up for it: where tokens are decoded, the prompts before them need not be long.
    pub fn warm_up(&self) -> Test {
        match self.what {
            What::Prefill => *self,
            _ => Test { prompt: self.prompt.min(WARM_UP), ..*self },
        }
    }

    /// Positions of one sequence.
    pub fn positions(&self) -> usize {
        self.prompt + self.max_tokens
    }

    /// Pages of all its sequences.
    pub fn pages(&self, page_positions: usize) -> usize {
        self.sequences * self.positions().div_ceil(page_positions)
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Test { what, sequences, tokens, .. } = self;
        match what {
            What::Decode { depth } => write!(f, "decode of {tokens} tokens at {depth}"),
            What::Fused { depth } => write!(f, "decode of {tokens} tokens in each of {sequences} at {depth}"),
            _ => write!(f, "prefill of {tokens}"),
        }
    }
}

impl Asked {
    /// Tokens to decode, in each sequence.
    pub fn decode_tokens(&self) -> usize {
        self.decode as usize
    }

    /// The tests that fit into `context` positions, with slots and token budget set for them; the others are
    /// told to `notes`. Only prompts and default depths may be too long.
    pub fn tests(&self, config: &mut Config, context: usize, notes: &mut Vec<String>) -> Result<Vec<Test>> {
        let scheduler = &mut config.scheduler;
        let most = self.sequences.iter().copied().max().unwrap_or(1) as usize;
        scheduler.slots = scheduler.slots.max(most);
        if scheduler.token_budget <= scheduler.slots {
            scheduler.token_budget = 2 * scheduler.slots;
        }
        let decode = self.decode as usize;
        let depths = self.depth.as_deref().unwrap_or(&DEPTHS);
        let prompts = self.prefill.as_deref().unwrap_or(&PREFILL);
        let depth = self.fused_depth as usize;
        let fused = |&number: &u32| Test::fused((number as usize, depth), decode, scheduler.token_budget);
        let all = prompts.iter().map(|&tokens| Test::prefill(tokens as usize));
        let all = all.chain(depths.iter().map(|&depth| Test::decode(depth as usize, decode)));
        let all = all.chain(self.sequences.iter().map(fused));
        let mut tests = Vec::new();
        for test in all {
            let may_be_left_out = match test.what {
                What::Decode { depth } => self.depth.is_none() && depth > 0,
                what => what == What::Prefill,
            };
            match test.positions() <= context {
                true => tests.push(test),
                false if may_be_left_out => {
                    notes.push(format!("{} left out: {}", test, over(&test, context)))
                }
                false => return Err(usage(format!("{}: {}", test, over(&test, context)))),
            }
        }
        Ok(tests)
    }
}

fn over(test: &Test, context: usize) -> String {
    format!("needs {} positions, and the context has {context}", test.positions())
}

/// Makes the cache as large as the largest test needs, unless its size is configured, and sequences no longer
/// than the longest.
pub fn size_cache(config: &mut Config, tests: &[Test]) -> Result<()> {
    let kv = &mut config.kv;
    kv.max_context = tests.iter().map(Test::positions).max();
    let pages = tests.iter().map(|test| test.pages(kv.page_positions)).max().unwrap_or(1);
    let needed = pages * kv.page_positions;
    match kv.size {
        KvSize::Fitting => kv.size = KvSize::Tokens(needed),
        KvSize::Tokens(tokens) if tokens < needed => {
            return Err(usage(format!("kv.size is {tokens} tokens, and the tests need {needed}")));
        }
        KvSize::Tokens(_) | KvSize::Bytes(_) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    fn asked(depth: Option<&[u32]>, decode: u32, sequences: &[u32]) -> Asked {
        let (depth, sequences) = (depth.map(<[u32]>::to_vec), sequences.to_vec());
        Asked { prefill: None, depth, decode, sequences, fused_depth: 8 }
    }

    fn config() -> Config {
        Config::load(None, Overrides::default()).unwrap()
    }

    #[test]
    fn what_the_defaults_ask_beyond_the_context_is_left_out_and_said() {
        let (mut config, mut notes) = (config(), Vec::new());
        let tests = asked(None, 64, &[1, 2]).tests(&mut config, 1024, &mut notes).unwrap();
        let kinds: Vec<What> = tests.iter().map(|test| test.what).collect();
        let (decode, fused) = (|depth| What::Decode { depth }, What::Fused { depth: 8 });
        assert_eq!(kinds, [What::Prefill, What::Prefill, decode(0), decode(512), fused, fused]);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].starts_with("prefill of 2048 left out") && notes[0].contains("1024"), "{notes:?}");
    }

    /// A prompt that is measured is read as it is, and as many tokens are decoded.
    #[test]
    fn warming_up_reads_no_long_prompts_that_are_not_measured() {
        let prompts = |test: Test| (test.warm_up().prompt, test.warm_up().max_tokens == test.max_tokens);
        assert_eq!(prompts(Test::prefill(512)), (512, true));
        assert_eq!(prompts(Test::decode(2048, 4)), (8, true));
        assert_eq!(prompts(Test::decode(0, 4)), (1, true));
        assert_eq!(prompts(Test::fused((32, 128), 4, 512)), (8, true));
    }

    #[test]
    fn what_is_asked_for_by_name_must_fit() {
        let error = |asked: Asked| asked.tests(&mut config(), 64, &mut Vec::new()).unwrap_err().to_string();
        assert!(error(asked(Some(&[60]), 8, &[1])).contains("decode of 8 tokens at 60: needs 69 positions"));
        assert!(error(asked(Some(&[0]), 60, &[1])).contains("in each of 1 at 8: needs 69"));
        assert!(error(asked(None, 64, &[1])).contains("at 0: needs 66"));
    }

    /// The budget leaves room for a prompt beside as many sequences as there are, and the cache holds them all.
    #[test]
    fn the_engine_is_as_large_as_its_tests() {
        let mut config = config();
        let tests = asked(Some(&[100]), 10, &[4, 600]).tests(&mut config, 4096, &mut Vec::new()).unwrap();
        assert_eq!((config.scheduler.slots, config.scheduler.token_budget), (600, 1200));
        size_cache(&mut config, &tests).unwrap();
        let fused = tests.last().unwrap();
        // Beside the 600 rows of those who decode, 4800 tokens of prompts take 8 steps.
        assert_eq!(fused.max_tokens, 10 + 1 + 1 + 8);
        let pages = tests.iter().map(|test| test.pages(32)).max().unwrap();
        assert_eq!(pages, fused.sequences);
        assert_eq!(config.kv.size, KvSize::Tokens(pages * 32));

        config.kv.size = KvSize::Tokens(1000);
        let error = size_cache(&mut config, &tests).unwrap_err().to_string();
        assert!(error.contains("kv.size is 1000 tokens"), "{error}");
    }
}
