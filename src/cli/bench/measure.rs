//! Measurement of a model in the engine. Samples are timed where tokens are generated.
//!
//! Invariant: fused decode is timed only while every sequence of the test is decoding.

use super::host_part::HostPart;
use super::report::{AllocatedMemory, BenchReport, BenchRow, ModelFacts, OffloadBreakdown};
use super::roofline::{self, StepWork};
use super::sample::{Sample, TestKind};
use super::suite::{BenchTest, SuiteArgs, size_cache};
use super::usage;
use crate::actors::{EngineSetup, IntakeHandle, TokenStream};
use crate::cli::evaluation::check_decoder_only;
use crate::cli::start::{self, factories, fetch_model_async};
use crate::cli::vocabulary;
use crate::config::{Config, DeviceKind};
use crate::model::load;
use crate::model::{ModelRef, ModelSource};
use crate::request::{Request, RequestError, TokenEvent};
use crate::text::Tokenizer;
use anyhow::{Result, ensure};
use indicatif::ProgressBar;
use mainstem_kernels::random::philox;
use std::sync::Arc;
use std::time::Instant;

/// Fetches and opens the configured model, and adds its facts to the report. Fails if it is not decoder-only.
pub async fn open_model(
    config: &mut Config,
    report: &mut BenchReport,
) -> Result<(Arc<ModelSource>, Arc<Tokenizer>)> {
    config.model = fetch_model_async(config.model.clone(), config.hub.clone()).await?;
    let model = ModelRef::parse(&config.model.path).map_err(|error| usage(format!("{error:#}")))?;
    *config = start::with_placement(config.clone(), None)?;
    let (source, tokenizer) = start::open_configured(&model, config)?;
    check_decoder_only(&source, "the tests support")?;
    report.model = Some(ModelFacts::from_source(&source));
    Ok((source, tokenizer))
}

/// Runs the selected tests, and records the last step if `is_traced`. If the future is dropped, the report
/// keeps the results so far.
pub async fn measure(
    mut config: Config,
    args: &SuiteArgs,
    (repeat, is_traced): (u32, bool),
    report: &mut BenchReport,
    progress: &ProgressBar,
) -> Result<()> {
    let (source, tokenizer) = open_model(&mut config, report).await?;
    if is_traced {
        source.transfers.start_trace();
    }
    let context = config.kv.max_context.unwrap_or(source.spec.context);
    let tests = args.select_tests(&mut config, context, &mut report.notes)?;
    size_cache(&mut config, &tests)?;

    let setup = start::engine_setup(&config, &source)?;
    // The report shows the token budget in use.
    config.scheduler = setup.scheduler.clone();
    check_pages(&setup, &tests)?;
    let kv_positions = (setup.kv.pages - 1) * setup.limits.page_positions;
    let weight_bytes = match config.device.groups[0][0].kind {
        DeviceKind::Cpu | DeviceKind::Reference | DeviceKind::Cuda => Some(bytes_per_step(&source)),
        DeviceKind::Fake { .. } => None,
    };
    let mut machine = roofline::RooflineBench::new(&config.device)?;
    if machine.is_none() && config.device.groups[0][0].kind == DeviceKind::Cpu {
        let note = "no roofline: it requires a single CPU device and 2 GiB of free memory";
        report.notes.push(note.to_owned());
    }
    let mut prompts = Prompts::new(&source, &tokenizer);
    let host_part = HostPart::new(&tests, &source, &tokenizer)?;
    start::check_memory(&config.device, &source, &setup)?;
    let factories = factories(&config.device, &source, &tokenizer, &setup);
    progress.set_message("loading");
    let (engine, built) = super::start_engine(setup, tokenizer, factories).await?;
    report.record_device(&config, &built);
    report.allocated = Some(AllocatedMemory::from_report(&built, kv_positions));

    progress.set_length(tests.len() as u64 * u64::from(repeat + 1));
    for test in tests {
        let BenchTest { kind: what, sequences, tokens, .. } = test;
        let weight_bytes = weight_bytes.filter(|_| what != TestKind::Prefill);
        let work = machine.as_ref().map(roofline::RooflineBench::activation_precision);
        let work = work.and_then(|inputs| StepWork::for_test(&source, inputs, what, sequences, tokens));
        let (samples, offload) = (Vec::new(), None);
        report.rows.push(BenchRow { kind: what, sequences, tokens, weight_bytes, work, samples, offload });
        let (mut moved, mut began) = (source.transfers.totals(), Instant::now());
        progress.set_message(test.to_string());
        // The first run warms up.
        for number in 0..=repeat {
            let roofline = machine.as_mut().filter(|_| work.is_some()).map(roofline::RooflineBench::measure);
            let run = if number == 0 { test.warm_up() } else { test };
            let sample =
                Sample { roofline, ..run_test(&engine.intake, &run, &mut prompts, &host_part).await? };
            let row = report.rows.last_mut().expect("it was pushed above; anything else is a bug");
            row.samples.extend((number > 0).then_some(sample));
            let since = source.transfers.totals().since(&moved);
            row.offload = OffloadBreakdown::new(&since, began.elapsed().as_secs_f64());
            if number == 0 {
                (moved, began) = (source.transfers.totals(), Instant::now());
            }
            progress.inc(1);
        }
        report.timeline = source.transfers.trace().and_then(|trace| trace.last_step());
    }
    engine.stop();
    Ok(())
}

/// Fails if the cache has too few pages for a test, since its sequences would then wait for each other. This
/// can happen if the cache size is given in bytes.
fn check_pages(setup: &EngineSetup, tests: &[BenchTest]) -> Result<()> {
    let needed = tests.iter().map(|test| test.pages(setup.limits.page_positions)).max().unwrap_or(0);
    let pages = setup.kv.pages - 1;
    match pages >= needed {
        true => Ok(()),
        false => Err(usage(format!("kv.size gives {pages} pages, but the tests need {needed}"))),
    }
}

/// Returns the bytes of weights that every step reads: all weights except an embedding that is not also the
/// head.
fn bytes_per_step(source: &ModelSource) -> usize {
    let stack = source.spec.last_stack();
    let is_read = stack.head.as_ref().is_some_and(|head| head.tied);
    let looked_up = stack.embedding.as_ref().filter(|_| !is_read).map(|embedding| &embedding.table.name);
    let tensors = load::records(source, &source.spec);
    tensors.iter().filter(|tensor| Some(&tensor.name) != looked_up).map(|tensor| tensor.bytes).sum()
}

/// Generator of different prompts of ordinary tokens; the sequence of prompts is the same in each run.
pub struct Prompts {
    ordinary: Vec<u32>,
    count: u32,
}

impl Prompts {
    /// Creates a generator of prompts for a model.
    pub fn new(source: &ModelSource, tokenizer: &Tokenizer) -> Prompts {
        Prompts { ordinary: vocabulary::ordinary_tokens(source, tokenizer), count: 0 }
    }

    fn next(&mut self, tokens: usize) -> Arc<[u32]> {
        self.count += 1;
        let number = |place: u32| philox([place, self.count, 0, 0], [0; 2])[0];
        (0..tokens as u32).map(|place| self.ordinary[number(place) as usize % self.ordinary.len()]).collect()
    }
}

/// Runs a test once and returns its sample.
pub async fn run_test(
    intake: &IntakeHandle,
    test: &BenchTest,
    prompts: &mut Prompts,
    host_part: &HostPart,
) -> Result<Sample> {
    let request = |number| {
        let (plan, constraint) = host_part.of_sequence(test.kind, number);
        let greedy = Request::greedy("bench", prompts.next(test.prompt), test.max_tokens as u32);
        Request { ignore_eos: true, plan, constraint, ..greedy }
    };
    let requests = (0..test.sequences).map(request).collect();
    let began = Instant::now();
    // Tokens carry their generation time, so sequences can be received one after the other.
    let mut times = Vec::with_capacity(test.sequences);
    for stream in intake.submit(requests).await? {
        times.push(token_times(stream).await?);
    }
    ensure!(
        times.iter().all(|times| times.len() == test.max_tokens),
        "a sequence ended early; this is a bug"
    );
    Ok(match test.kind {
        TestKind::Prefill => {
            let seconds = (times[0][0] - began).as_secs_f64();
            Sample { tokens: test.tokens as u64, steps: 1, seconds, roofline: None }
        }
        _ => {
            let sample = decode_sample(&times, test.tokens);
            if sample.steps == 0 {
                return Err(usage(format!(
                    "{test}: a sequence ended before the last one began; decode more tokens (--decode)"
                )));
            }
            sample
        }
    })
}

/// Receives a sequence's tokens and returns the generation time of each.
async fn token_times(mut stream: TokenStream) -> Result<Vec<Instant>, RequestError> {
    let mut times = Vec::new();
    loop {
        match stream.next().await {
            Some(TokenEvent::Token(_) | TokenEvent::EndToken(_)) => times.push(stream.produced_at()),
            Some(
                TokenEvent::Started { .. }
                | TokenEvent::Prompt(_)
                | TokenEvent::BeamScore(_)
                | TokenEvent::Speculated { .. },
            ) => {}
            Some(TokenEvent::Embedding(_) | TokenEvent::MaskFilled(_)) => {}
            Some(TokenEvent::Finished(_)) => return Ok(times),
            Some(TokenEvent::Failed(error)) => return Err(error),
            None => return Err(RequestError::EngineStopped),
        }
    }
}

/// Computes the sample of a decode test: the tokens that all sequences generated from the first token of the
/// sequence that began last to its `tokens`-th after that, or to the first end of a sequence. Tokens of a
/// step have the same time.
pub fn decode_sample(times: &[Vec<Instant>], tokens: usize) -> Sample {
    let last =
        times.iter().max_by_key(|times| times[0]).expect("a test has a sequence; anything else is a bug");
    // Where a grammar forces tokens, a step has several, and sequences end at different times.
    let ends = times.iter().filter_map(|times| times.last());
    let (began, ended) = (last[0], ends.fold(last[tokens], |ended, end| ended.min(*end)));
    let mut generated: Vec<Instant> =
        times.iter().flatten().copied().filter(|time| *time > began && *time <= ended).collect();
    let tokens = generated.len() as u64;
    generated.sort_unstable();
    generated.dedup();
    Sample { tokens, steps: generated.len() as u64, seconds: (ended - began).as_secs_f64(), roofline: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::start::open;
    use std::time::Duration;

    /// Returns tokens at these milliseconds.
    fn at(began: Instant, ms: &[u64]) -> Vec<Instant> {
        ms.iter().map(|ms| began + Duration::from_millis(*ms)).collect()
    }

    #[test]
    fn only_steps_of_all_sequences_count() {
        let began = Instant::now();
        let times = [at(began, &[10, 20, 30, 40, 50, 60]), at(began, &[20, 30, 40, 50, 60, 70])];
        let sample = decode_sample(&times, 3);
        assert_eq!((sample.tokens, sample.steps), (6, 3));
        assert!((sample.seconds - 0.03).abs() < 1e-9, "{}", sample.seconds);
    }

    #[test]
    fn prompts_are_ordinary_and_the_same_in_each_run() {
        let (source, tokenizer) = open(&ModelRef::Demo, None).unwrap();
        let mut prompts = Prompts::new(&source, &tokenizer);
        let (first, second) = (prompts.next(500), prompts.next(500));
        assert_ne!(first, second);
        assert_eq!(first, Prompts::new(&source, &tokenizer).next(500));
        assert!(first.iter().all(|id| !tokenizer.is_special(*id) && !source.eos.contains(id)));
    }

    #[test]
    fn an_embedding_that_is_only_looked_up_is_not_read() {
        let source = |name| open(&ModelRef::Path(name), None).unwrap().0;
        let fixture =
            |name| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let (tied, own) = (source(fixture("tied")), source(fixture("mha")));
        assert_eq!(bytes_per_step(&tied), tied.checkpoint.total_bytes());
        let embedding = &own.spec.last_stack().embedding.as_ref().unwrap().table.name;
        let embedding = own.checkpoint.tensor(embedding).unwrap().bytes_len();
        assert_eq!(bytes_per_step(&own), own.checkpoint.total_bytes() - embedding);
    }
}
