//! Benchmark of speculative decoding: the speed with it and without it, in alternating turns of one run, so
//! that both are measured under the same conditions.
//!
//! Invariant: both halves of a turn continue the same prompts with the same seeds. The prompts are ordinary
//! sentences, because how many drafts are accepted depends on the text.

pub(super) mod rows;

use super::measure::decode_sample;
use super::report::{AllocatedMemory, BenchReport, ModelFacts};
use super::suite::SuiteArgs;
use super::usage;
use crate::actors::{IntakeHandle, TokenStream};
use crate::cli::evaluation::check_decoder_only;
use crate::cli::start::{self, factories, fetch_model_async, off_loop};
use crate::config::{Config, KvSize};
use crate::decoding::SamplingPlan;
use crate::decoding::strategies::{AnyVocabulary, CheckedDefaults};
use crate::model::{ModelRef, ModelSource};
use crate::request::{AcceptanceRule, Request, RequestError, Sampling, Speculation, TokenEvent};
use crate::text::Tokenizer;
use anyhow::{Context, Result, ensure};
use clap::Args;
use indicatif::ProgressBar;
use rows::{SpeculationRow, SpeculationTurn};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Default numbers of sequences.
const SEQUENCES: [u32; 3] = [1, 4, 16];

/// Beginnings of texts, in turn for the sequences of a test.
const BEGINNINGS: [&str; 16] = [
    "Once upon a time, there was a little girl named Lily who",
    "One day, a boy named Tom went to the park with his dog.",
    "The old man looked out of the window and saw",
    "In a small house near the forest lived a rabbit.",
    "It was a sunny morning, and the children wanted to",
    "Anna found a shiny key in the garden. She",
    "The cat was very hungry, so it",
    "There was a big storm, and the little boat",
    "Ben and his sister like to play with their toys.",
    "A bird sat on a tree and sang a happy song.",
    "Mom said, \"Please come home before it is dark.\"",
    "The farmer had a red truck that did not start.",
    "Every night, the moon came up over the hill and",
    "Sam was afraid of the dark, but his friend told him",
    "At school, the teacher read a story about a bear.",
    "The queen lost her ring, and everyone in the castle",
];

/// Options of the benchmark of speculative decoding.
#[derive(Args)]
pub struct SpeculationTests {
    /// Sampling temperature of the comparison with speculative decoding; by default 0.
    #[arg(long, value_name = "X", requires = "SpeculationFlags")]
    temperature: Option<f32>,
    /// Whether the benchmark was asked for, by a flag of speculative decoding.
    #[arg(skip)]
    pub is_wanted: bool,
}

/// Compares decoding with and without speculation. If the future is dropped, the report keeps the results so
/// far.
pub async fn measure(
    mut config: Config,
    suite: &SuiteArgs,
    tests: &SpeculationTests,
    repeat: u32,
    report: &mut BenchReport,
    progress: &ProgressBar,
) -> Result<()> {
    let (source, tokenizer) = open_models(&mut config, report).await?;
    let prompts = prompts(&tokenizer)?;
    let (counts, tokens) = (suite.sequences_or(&SEQUENCES), suite.decode_tokens());
    size_engine(&mut config, &source, &prompts, (&counts, tokens))?;
    let setup = start::engine_setup(&config, &source)?;
    let kv_positions = (setup.kv.pages - 1) * setup.limits.page_positions;
    let offered = setup.model.speculation.clone().context("speculation is off; this is a bug")?;
    let drafter = offered.drafter.context("there is no source of drafts; this is a bug")?;
    let speculation = Speculation { drafter, max_drafts: offered.max_drafts, rule: offered.acceptance };
    let temperature = tests.temperature.unwrap_or(0.0);
    let test = TurnTest {
        prompts,
        tokens,
        speculation,
        plan: host_plan(temperature, speculation.rule)?,
        temperature,
    };
    start::check_memory(&config.device, &source, &setup)?;
    let factories = factories(&config.device, &source, &tokenizer, &setup);
    progress.set_message("loading");
    let (engine, built) = super::start_engine(setup, tokenizer, factories).await?;
    report.record_device(&config, &built);
    report.allocated = Some(AllocatedMemory::from_report(&built, kv_positions));
    progress.set_length(counts.len() as u64 * u64::from(repeat + 1));
    for &sequences in &counts {
        progress.set_message(format!("speculative decoding, sequences: {sequences}"));
        report.speculation.push(SpeculationRow {
            method: speculation.drafter.name(),
            draft: offered.draft.as_ref().map(|draft| draft.name.clone()),
            acceptance: speculation.rule.name(),
            max_drafts: speculation.max_drafts,
            temperature,
            sequences: sequences as usize,
            tokens,
            turns: Vec::new(),
        });
        // The first turn is a warm-up.
        for turn in 0..=repeat {
            let measured = test.run_turn(&engine.intake, sequences as usize, turn).await?;
            let row = report.speculation.last_mut().filter(|_| turn > 0);
            row.into_iter().for_each(|row| row.turns.push(measured.clone()));
            progress.inc(1);
        }
    }
    engine.stop();
    Ok(())
}

/// Fetches and opens the configured model with its draft model, and adds its facts to the report. Fails if it
/// is not decoder-only.
async fn open_models(
    config: &mut Config,
    report: &mut BenchReport,
) -> Result<(Arc<ModelSource>, Arc<Tokenizer>)> {
    config.model = fetch_model_async(config.model.clone(), config.hub.clone()).await?;
    let (draft, hub) = (config.speculation.clone(), config.hub.clone());
    config.speculation = off_loop(move || start::fetch_draft(draft, &hub)).await?;
    let model = ModelRef::parse(&config.model.path).map_err(|error| usage(format!("{error:#}")))?;
    *config = start::with_placement(config.clone(), None)?;
    let (source, tokenizer) = start::open_with_draft(&model, config)?;
    check_decoder_only(&source, "the tests support")?;
    report.model = Some(ModelFacts::from_source(&source));
    Ok((source, tokenizer))
}

/// Returns the tokens of the beginnings.
fn prompts(tokenizer: &Tokenizer) -> Result<Vec<Arc<[u32]>>> {
    let encoded = BEGINNINGS.iter().map(|text| tokenizer.encode(text, true).map(Into::into));
    encoded.collect::<Result<_>>().context("cannot tokenize the prompts")
}

/// Sets slots, token budget and KV cache for the largest test. Prompts are never cached, so that no turn
/// finds those of an earlier one.
fn size_engine(
    config: &mut Config,
    source: &ModelSource,
    prompts: &[Arc<[u32]>],
    (counts, tokens): (&[u32], usize),
) -> Result<()> {
    let sequences = counts.iter().copied().max().unwrap_or(1) as usize;
    let (scheduler, kv) = (&mut config.scheduler, &mut config.kv);
    scheduler.slots = scheduler.slots.max(sequences);
    // Drafts take at most half of the rows that decoding leaves.
    let rows = scheduler.slots * (1 + 2 * config.speculation.max_drafts);
    scheduler.token_budget = scheduler.token_budget.max(rows);
    let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(1);
    let positions = longest + tokens + 1;
    let context = kv.max_context.unwrap_or(source.spec.context);
    if positions > context {
        let message =
            format!("decode of {tokens} tokens needs {positions} positions, but the context has {context}");
        return Err(usage(message));
    }
    kv.prefix_cache = false;
    kv.max_context = Some(positions);
    if kv.size == KvSize::Auto {
        kv.size = KvSize::Tokens(sequences * positions.next_multiple_of(kv.page_size));
    }
    Ok(())
}

/// Returns the plan of requests that speculate, if the rule needs the host to draw.
fn host_plan(temperature: f32, rule: AcceptanceRule) -> Result<Option<Arc<SamplingPlan>>> {
    if temperature == 0.0 || rule == AcceptanceRule::Coupled {
        return Ok(None);
    }
    let pairs = [("temperature", json!(temperature))];
    let pairs = pairs.iter().map(|(name, value)| (*name, value));
    let plan = SamplingPlan::parse(&CheckedDefaults::default(), pairs, &AnyVocabulary)?;
    Ok(Some(Arc::new(plan)))
}

/// The work of a turn, which is done with speculation and without it.
struct TurnTest {
    prompts: Vec<Arc<[u32]>>,
    /// Tokens per sequence after the first one, which are measured.
    tokens: usize,
    speculation: Speculation,
    plan: Option<Arc<SamplingPlan>>,
    temperature: f32,
}

/// The output of one sequence, and the numbers of its drafts.
#[derive(Default)]
struct Generated {
    /// The generation time of each token; those of a step are equal.
    times: Vec<Instant>,
    ids: Vec<u32>,
    drafted: usize,
    accepted: usize,
}

impl TurnTest {
    /// Runs both halves of a turn. They take turns in being the first one.
    async fn run_turn(&self, intake: &IntakeHandle, sequences: usize, turn: u32) -> Result<SpeculationTurn> {
        let half = |speculates| self.generate(intake, sequences, turn, speculates);
        let (without, with) = if turn.is_multiple_of(2) {
            let without = half(false).await?;
            (without, half(true).await?)
        } else {
            let with = half(true).await?;
            (half(false).await?, with)
        };
        let ids = |all: &[Generated]| all.iter().map(|it| it.ids.clone()).collect::<Vec<_>>();
        let sample = |all: &[Generated]| {
            let times: Vec<_> = all.iter().map(|it| it.times.clone()).collect();
            decode_sample(&times, self.tokens)
        };
        let must_be_same = self.plan.is_none();
        Ok(SpeculationTurn {
            without: sample(&without),
            with: sample(&with),
            drafted: with.iter().map(|it| it.drafted).sum(),
            accepted: with.iter().map(|it| it.accepted).sum(),
            steps_by_accepted: steps_by_accepted(with.iter().map(|it| &it.times[..])),
            has_same_text: must_be_same.then(|| ids(&without) == ids(&with)),
        })
    }

    /// Generates the texts of one half of a turn.
    async fn generate(
        &self,
        intake: &IntakeHandle,
        sequences: usize,
        turn: u32,
        speculates: bool,
    ) -> Result<Vec<Generated>> {
        let request = |number: usize| {
            let prompt = self.prompts[number % self.prompts.len()].clone();
            let seed = u64::from(turn) << 32 | number as u64;
            Request {
                ignore_eos: true,
                sampling: Sampling { temperature: self.temperature, seed, ..Sampling::GREEDY },
                plan: self.plan.clone().filter(|_| speculates),
                speculation: speculates.then_some(self.speculation),
                ..Request::greedy("bench", prompt, self.tokens as u32 + 1)
            }
        };
        let mut all = Vec::with_capacity(sequences);
        for stream in intake.submit((0..sequences).map(request).collect()).await? {
            let generated = receive(stream).await?;
            ensure!(generated.ids.len() == self.tokens + 1, "a sequence ended early; this is a bug");
            all.push(generated);
        }
        Ok(all)
    }
}

/// Receives a sequence to its end.
async fn receive(mut stream: TokenStream) -> Result<Generated, RequestError> {
    let mut generated = Generated::default();
    loop {
        match stream.next().await {
            Some(TokenEvent::Token(token) | TokenEvent::EndToken(token)) => {
                generated.times.push(stream.produced_at());
                generated.ids.push(token.id);
            }
            Some(TokenEvent::Speculated { drafted, accepted }) => {
                (generated.drafted, generated.accepted) = (drafted, accepted);
            }
            Some(TokenEvent::Finished(_)) => return Ok(generated),
            Some(TokenEvent::Failed(error)) => return Err(error),
            Some(
                TokenEvent::Started { .. }
                | TokenEvent::Prompt(_)
                | TokenEvent::Embedding(_)
                | TokenEvent::MaskFilled(_)
                | TokenEvent::BeamScore(_),
            ) => {}
            None => return Err(RequestError::EngineStopped),
        }
    }
}

/// Counts the steps of sequences by the number of drafts that were accepted in them, from 0. A step gives one
/// token more than that; the step of the prompt, which gives the first token, does not count.
fn steps_by_accepted<'a>(sequences: impl Iterator<Item = &'a [Instant]>) -> Vec<u64> {
    let mut counts = Vec::new();
    for times in sequences {
        for step in times[1..].chunk_by(|a, b| a == b) {
            let accepted = step.len() - 1;
            counts.resize(counts.len().max(accepted + 1), 0);
            counts[accepted] += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn tokens_of_one_time_are_of_one_step() {
        let began = Instant::now();
        let at = |ms: &[u64]| ms.iter().map(|ms| began + Duration::from_millis(*ms)).collect::<Vec<_>>();
        // The first token is of the prompt's step; then come steps with 3, 1 and 2 tokens, and one with 1.
        let sequences = [at(&[1, 2, 2, 2, 3, 4, 4]), at(&[1, 2])];
        assert_eq!(steps_by_accepted(sequences.iter().map(Vec::as_slice)), [2, 1, 1]);
        assert!(steps_by_accepted([at(&[1])].iter().map(Vec::as_slice)).is_empty());
    }

    #[test]
    fn the_beginnings_are_short_texts_of_the_demo() {
        let (source, tokenizer) = start::open(&ModelRef::Demo, None).unwrap();
        for prompt in prompts(&tokenizer).unwrap() {
            assert!((4..40).contains(&prompt.len()), "{prompt:?}");
            assert!(prompt.iter().all(|id| (*id as usize) < source.spec.vocab));
        }
    }
}
