//! `mainstem batch`: answers the requests of a file in OpenAI's batch format with a model in this process,
//! and appends each answer to a file, from which an interrupted job is resumed.
//!
//! Invariant: the input is checked whole before the model is loaded, and after the end of this process,
//! however it came, the same command answers the remaining requests, each once.

pub mod progress;

use super::flags::{ConfigFlags, SpeculationFlags};
use super::run::exchange::unless_stopped;
use super::run::terminal::Interrupts;
use super::start::{EnginePredictor, JobSizes};
use super::{INTERRUPTED, print, start, start_log, to_json};
use crate::config::{Config, Overrides, SchedulerConfig};
use crate::planner::placement::Workload;
use crate::request::Client;
use crate::server::batches::exclusion::Exclusion;
use crate::server::batches::input::{Input, InputRules, RequestSize};
use crate::server::batches::job::{Answers, Job, JobEnd, Retries};
use crate::server::batches::output::{BatchAnswer, Record};
use crate::server::{LocalApi, ServeParts};
use crate::telemetry;
use actix_web::rt::System;
use anyhow::{Result, bail};
use clap::{Args, ValueHint};
use progress::Progress;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::SignalKind;

const MODEL_HELP: &str = "Folder, file or hf:owner/name[@revision]; \"demo\" is built in";

/// A device that failed is rebuilt meanwhile. Its requests wait in the queue, so they fail only if it fails
/// again.
const RETRIES: Retries = Retries { attempts: 6, pause: Duration::from_millis(500), is_shared: false };

const RESUMED: &str = "the same command resumes the job";

/// Answer the requests of a file.
///
/// INPUT has a request per line, in the format of OpenAI's batch API. Each answer is appended to OUTPUT as a
/// line, in the order in which they are ready. Requests that OUTPUT answers already are skipped, so the same
/// command resumes a job that was interrupted, however it ended. docs/batch.md describes both files.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem batch demo requests.jsonl answers.jsonl
  mainstem batch path/to/model requests.jsonl answers.jsonl --slots 64 --kv-size 8GiB
  mainstem batch hf:owner/name requests.jsonl answers.jsonl --served-model-name gpt-4o-mini

Exit codes: 0 every request is answered, 1 failed or not all are, 2 bad usage, 130 stopped by Ctrl-C
or SIGTERM.")]
pub struct BatchArgs {
    #[arg(help = MODEL_HELP, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model_path: String,
    #[command(flatten)]
    options: BatchOptions,
    /// Model name in the API, if requests name a model.
    #[arg(long = "served-model-name", value_name = "NAME")]
    model_served_name: Option<String>,
    #[command(flatten)]
    speculation: SpeculationFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

/// The files of a job, and its report.
#[derive(Args)]
struct BatchOptions {
    /// File with a request per line.
    #[arg(value_hint = ValueHint::FilePath)]
    input: PathBuf,
    /// File to which the answers are appended.
    #[arg(value_hint = ValueHint::FilePath)]
    output: PathBuf,
    /// Print the summary as JSON.
    #[arg(long)]
    json: bool,
}

impl BatchArgs {
    /// Returns the options of the job, the configuration file, if given, and the flags that override it.
    fn layers(self) -> (BatchOptions, Option<PathBuf>, Overrides) {
        let mut flags = Overrides::default();
        flags.set_default("log.level", "warn");
        // Nobody waits for a single answer or for the tokens of a stream.
        flags.set_default("server.request_timeout", "0s");
        flags.set_default("scheduler.itl_target", "0s");
        flags.set("model.path", Some(self.model_path));
        flags.set("model.served_name", self.model_served_name);
        self.speculation.add_to(&mut flags);
        let file = self.config.add_to(&mut flags);
        (self.options, file, flags)
    }
}

/// Runs a job and prints its summary. The exit code is 130 if Ctrl-C stopped it. Fails if a request is not
/// answered.
pub fn run(args: BatchArgs) -> Result<ExitCode> {
    let (options, file, flags) = args.layers();
    let config = Config::from_process(file.as_deref(), flags)?;
    start_log(&config)?;
    let body_limit = config.server.body_limit_bytes;
    let rules = InputRules { body_limit, requests_max: usize::MAX, urls: &LocalApi::PATHS };
    let input = Input::open(&options.input, &rules)?;
    let record = Record::open(&options.output, &options.input, &input)?;
    System::new().block_on(execute(&options, config, &input, record))
}

async fn execute(
    options: &BatchOptions,
    config: Config,
    input: &Input,
    mut record: Record,
) -> Result<ExitCode> {
    let mut interrupts = Interrupts::listen_to(&[SignalKind::interrupt(), SignalKind::terminate()])?;
    let open = (0..input.count()).filter(|index| !record.is_answered(*index)).map(|index| input.size(index));
    let mut progress = Progress::new(input.count(), record.before, open);
    let (mut interrupted, mut failure) = (false, None);
    if progress.done() < input.count() {
        let open = || (0..input.count()).filter(|index| !record.is_answered(*index));
        let sizes = job_sizes(open().map(|index| (input.size(index), input.bytes(index))));
        telemetry::write_line(&format!("loading {}", config.model.path));
        match unless_stopped(interrupts.next(), start_api(&config, sizes)).await {
            Some(started) => {
                let StartedApi { api, scheduler, predictor } = started?;
                progress.start(predictor);
                let (width, retries) = (scheduler.requests_at_once(), RETRIES);
                let sequences = scheduler.slots + scheduler.max_waiting;
                let mut answers = FileAnswers { input, record: &mut record, progress: &mut progress };
                let (answers, exclusion) = (&mut answers, &Exclusion::default());
                let mut job = Job { api: &api, input, answers, width, sequences, retries, exclusion };
                match job.run(interrupts.next()).await {
                    Ok(end) => interrupted = end == JobEnd::Interrupted,
                    Err(error) => failure = Some(error),
                }
            }
            None => interrupted = true,
        }
        let synced = record.check_place().and_then(|()| record.syncing()).and_then(|sync| sync());
        failure = failure.or(synced.err());
    }
    let code = report(options, progress, interrupted, failure.is_some())?;
    failure.map_or(Ok(code), |error| Err(error.context(format!("the job stopped; {RESUMED}"))))
}

/// The answers of a job, which are recorded in its output file. A request that fails for a reason that is not
/// its own is not, so the next run sends it again.
struct FileAnswers<'a> {
    input: &'a Input,
    record: &'a mut Record,
    progress: &'a mut Progress,
}

impl Answers for FileAnswers<'_> {
    fn is_answered(&self, index: usize) -> bool {
        self.record.is_answered(index)
    }

    fn add(&mut self, index: usize, answer: &BatchAnswer, refusal: Option<String>) -> Result<()> {
        self.record.append(answer)?;
        self.progress.answered(self.input.size(index), answer, refusal);
        Ok(())
    }

    fn add_failure(&mut self, _: usize, answer: &BatchAnswer, reason: String) -> Result<()> {
        self.progress.unanswered(&answer.custom_id, reason);
        Ok(())
    }

    fn sync(&mut self) -> Result<Box<dyn FnOnce() -> Result<()> + Send>> {
        telemetry::write_line(&self.progress.line());
        self.record.check_place()?;
        Ok(Box::new(self.record.syncing()?))
    }
}

/// Prints the summary of a job and returns its exit code. Fails if a request could not be answered, unless
/// the job `has_failed` for another reason.
fn report(
    options: &BatchOptions,
    progress: Progress,
    interrupted: bool,
    has_failed: bool,
) -> Result<ExitCode> {
    let (done, first) = (progress.done(), progress.first_unanswered().map(str::to_owned));
    let summary = progress.summary(interrupted);
    print("summary", &if options.json { to_json(&summary) } else { summary.text() })?;
    if interrupted {
        telemetry::write_line(&format!("interrupted after {done} answers; {RESUMED}"));
        return Ok(ExitCode::from(INTERRUPTED));
    }
    match (summary.unanswered, first) {
        _ if has_failed => Ok(ExitCode::FAILURE),
        (0, _) => Ok(ExitCode::SUCCESS),
        (count, Some(first)) => bail!("{count} requests are not answered; {RESUMED}; the first one: {first}"),
        (count, None) => bail!("{count} requests are not answered; {RESUMED}"),
    }
}

/// The API of an engine that is started.
struct StartedApi {
    api: LocalApi,
    /// The settings with which it was started.
    scheduler: SchedulerConfig,
    /// Predicts the speed, if the engine has a policy.
    predictor: Option<EnginePredictor>,
}

/// Starts the engine and returns its API for batch jobs. If the placement is to be planned, it is for
/// requests of these sizes.
async fn start_api(config: &Config, sizes: JobSizes) -> Result<StartedApi> {
    let config = start::with_placement(start::fetch_models(config).await?, Some(sizes))?;
    let prepared = start::prepare(&config).await?;
    let predictor = EnginePredictor::new(&config, &prepared.source, &prepared.setup)?;
    let engine = prepared.start().await?;
    let api = LocalApi::new(ServeParts::from(&engine), config.server).with_client(Client::local_batch());
    Ok(StartedApi { api, scheduler: config.scheduler, predictor })
}

/// Most tokens that a chat template is expected to add to a conversation.
const TEMPLATE_TOKENS: usize = 1024;

/// Returns the sizes of requests, of which the bytes of their lines are known, too. No text has more tokens
/// than its line has bytes, beside what a chat template adds, and an answer without a maximum may be of any
/// length.
fn job_sizes(sizes: impl Iterator<Item = (RequestSize, usize)>) -> JobSizes {
    let (mut requests, mut prompts, mut answers, mut longest) = (0, 0u64, 0u64, [0; 2]);
    for (size, bytes) in sizes {
        requests += 1;
        prompts = prompts.saturating_add(size.prompt_tokens());
        answers = answers.saturating_add(size.answer_tokens());
        let answer = size.answer.and_then(|tokens| usize::try_from(tokens).ok()).unwrap_or(usize::MAX);
        longest = [longest[0].max(bytes.saturating_add(TEMPLATE_TOKENS)), longest[1].max(answer)];
    }
    let mean = |sum: u64| usize::try_from(sum.div_ceil(requests.max(1) as u64)).unwrap_or(usize::MAX).max(1);
    JobSizes { workload: Workload { requests, prompt: mean(prompts), output: mean(answers) }, longest }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: BatchArgs,
    }

    fn config_of(flags: &str) -> Config {
        let words = ["batch", "some/model", "in", "out"].into_iter().chain(flags.split_whitespace());
        let (options, file, flags) = Alone::try_parse_from(words).unwrap().args.layers();
        assert_eq!((options.input, options.output), ("in".into(), "out".into()));
        Config::load(file.as_deref(), flags).unwrap()
    }

    #[test]
    fn flags_are_well_formed_and_name_keys() {
        Alone::command().debug_assert();
        let config =
            config_of("--served-model-name x --threads 3 --speculation prompt_lookup --itl-target 9ms");
        assert_eq!((config.model.path.as_str(), config.model.served_name.as_str()), ("some/model", "x"));
        assert_eq!((config.device.threads, config.server.request_timeout), (3, None));
        assert_eq!(config.scheduler.itl_target, Some(Duration::from_millis(9)));
        assert_eq!(config_of("").scheduler.itl_target, None);
    }

    /// Regression: a request that was longer than the mean one had no place in the planned KV cache.
    #[test]
    fn a_job_is_planned_for_its_mean_and_its_longest_request() {
        let size = |text, answer| (RequestSize { text, answer }, text as usize + 50);
        let workload = Workload { requests: 3, prompt: 100, output: 8 };
        let sizes = [size(400, Some(10)), size(800, Some(12)), size(0, Some(0))];
        assert_eq!(job_sizes(sizes.into_iter()), JobSizes { workload, longest: [850 + TEMPLATE_TOKENS, 12] });
        let sizes = [size(400, Some(10)), size(800, None), size(0, Some(0))];
        let workload = Workload { output: 89, ..workload };
        assert_eq!(
            job_sizes(sizes.into_iter()),
            JobSizes { workload, longest: [850 + TEMPLATE_TOKENS, usize::MAX] }
        );
        let workload = Workload { requests: 0, prompt: 1, output: 1 };
        assert_eq!(job_sizes(std::iter::empty()), JobSizes { workload, longest: [0; 2] });
    }

    /// More would be refused as too many for the queue.
    #[test]
    fn no_more_requests_are_in_flight_than_the_queue_takes() {
        for (flags, requests) in [
            ("--slots 32 --max-waiting 256", 64),
            ("--slots 1 --max-waiting 256", 5),
            ("--slots 8 --max-waiting 2", 10),
            ("--slots 8 --max-waiting 0", 8),
        ] {
            assert_eq!(config_of(flags).scheduler.requests_at_once(), requests, "{flags}");
        }
    }
}
