//! Command-line flags shared by every command that sends a load: the server, the requests, and their timing.
//!
//! Invariant: flags that parse describe a valid run; only files and the server can still cause errors.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum, ValueHint};
use load_tests::{
    measure::{self, GoodputLimits},
    plan::{
        arrivals::Arrivals,
        dataset,
        lengths::LengthDistribution,
        prompts::PromptSource,
        requests::{Endpoint, LoadSpec, OUTPUT_LEN_FALLBACK},
        trace,
    },
    run::{Connections, RunSettings, Secret, Target},
};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

/// Flags that select the server and the endpoint.
#[derive(Args)]
#[command(next_help_heading = "Server")]
pub struct TargetFlags {
    /// Base URL of the server, without /v1; http or https
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,

    /// Model to request; if given several times, requests are spread over them [default: the first the server
    /// lists]
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<String>,

    /// File with one API key per line; requests are spread over the keys
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    api_key_file: Option<PathBuf>,

    /// Endpoint to send requests to
    #[arg(long, value_enum, default_value_t = EndpointName::Completions)]
    endpoint: EndpointName,

    /// JSON object whose fields override those of every request body; null removes a field
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    extra_body: Option<Map<String, Value>>,

    /// PEM file of CA certificates to trust in addition to the system's
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ca: Option<PathBuf>,

    /// URL of the server's Prometheus metrics, read before and after the run; "none" disables it [default:
    /// URL/metrics]
    #[arg(long, value_name = "URL")]
    metrics_url: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum EndpointName {
    Completions,
    Chat,
}

impl TargetFlags {
    fn target(&self) -> anyhow::Result<Target> {
        Ok(Target {
            url: self.url.clone(),
            models: self.models.clone(),
            keys: self.keys()?,
            endpoint: match self.endpoint {
                EndpointName::Completions => Endpoint::Completions,
                EndpointName::Chat => Endpoint::Chat,
            },
            extra_body: self.extra_body.clone().unwrap_or_default(),
            ca: self.ca.clone(),
            metrics_url: match self.metrics_url.as_deref() {
                None => Some(format!("{}/metrics", self.url.trim_end_matches('/'))),
                Some("none") => None,
                Some(url) => Some(url.to_owned()),
            },
        })
    }

    fn keys(&self) -> anyhow::Result<Vec<Secret>> {
        let Some(file) = &self.api_key_file else { return Ok(Vec::new()) };
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys: Vec<Secret> = lines.map(|line| Secret(line.to_owned())).collect();
        ensure!(!keys.is_empty(), "{} contains no API key", file.display());
        Ok(keys)
    }
}

/// Flags that define the requests: prompts, lengths, sampling, and client behavior.
#[derive(Args)]
#[command(next_help_heading = "Requests")]
pub struct LoadFlags {
    /// Number of requests
    #[arg(long, alias = "num-prompts", default_value_t = 100, value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,

    /// Prompt source: ids (random token ids), words (random English words), or a file: ShareGPT
    /// conversations, JSON lines with one prompt each, or plain text with one prompt per paragraph
    #[arg(long, alias = "dataset-path", default_value = "ids", value_name = "ids|words|FILE")]
    prompts: String,

    /// A tokenizer.json used to count the tokens of a prompt file; without it, four characters count as one
    /// token
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tokenizer: Option<PathBuf>,

    /// Exclusive upper bound of random prompt token ids; at most the model's vocabulary size
    #[arg(
        long,
        default_value_t = 256,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    vocab: u32,

    /// Prompt length in tokens (or words): N, LOW-HIGH (uniform), or lognormal:MEDIAN:SIGMA[:MAX]
    #[arg(long, alias = "random-input-len", default_value = "128", value_name = "LENGTH")]
    prompt_tokens: LengthDistribution,

    /// Output length in tokens, same syntax [default: 128, or the lengths given by the prompt file or trace]
    #[arg(long, alias = "random-output-len", value_name = "LENGTH")]
    output_tokens: Option<LengthDistribution>,

    /// Length of the prefix, in tokens (or words), shared by the prompts of a group
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    shared_prefix: u32,

    /// Number of groups of prompts with a shared prefix
    #[arg(
        long,
        default_value_t = 1,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    prefix_groups: u32,

    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0, value_parser = parse_temperature)]
    temperature: f32,

    /// Seed of all random choices: arrivals, lengths, prompts, hang-ups, sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Let responses end at the end-of-sequence token instead of requesting the full length with ignore_eos
    #[arg(long)]
    allow_eos: bool,

    /// Fraction of clients that disconnect early, 0 to 1
    #[arg(long, default_value_t = 0.0, value_parser = parse_share, value_name = "SHARE")]
    share_hangup: f64,

    /// Number of tokens after which those clients disconnect
    #[arg(long, value_name = "TOKENS", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    hangup_after: u32,

    /// Fraction of clients that read slowly, 0 to 1
    #[arg(long, default_value_t = 0.0, value_parser = parse_share, value_name = "SHARE")]
    share_slow: f64,

    /// Read rate of those clients in bytes per second
    #[arg(long, value_name = "BYTES", default_value_t = 2000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    slow_rate: u32,
}

/// Flags that define when and how requests are sent.
#[derive(Args)]
#[command(next_help_heading = "Sending")]
pub struct PaceFlags {
    /// Arrival process. With R a rate (20/s) or a mean gap (50ms): all, constant:R, poisson:R, gamma:R:SHAPE,
    /// ramp:RATE-RATE:TIME, ramp-exponential:RATE-RATE:TIME; users:N[:THINK] is a closed loop
    #[arg(long, default_value = "all", value_name = "PROCESS")]
    arrivals: Arrivals,

    /// Requests per second with gamma-distributed gaps: the same as --arrivals gamma:RATE/s:BURSTINESS
    #[arg(
        long,
        value_name = "RATE",
        value_parser = parse_positive,
        conflicts_with_all = ["arrivals", "trace"]
    )]
    request_rate: Option<f64>,

    /// Shape of the gamma distribution of gaps: 1 is Poisson, smaller values are burstier
    #[arg(
        long,
        value_name = "SHAPE",
        value_parser = parse_positive,
        requires = "request_rate",
        default_value_t = 1.0
    )]
    burstiness: f64,

    /// Replay the arrivals and lengths of a trace: CSV (Azure and BurstGPT columns are supported) or JSON
    /// lines
    #[arg(long, value_name = "FILE", conflicts_with = "arrivals", value_hint = ValueHint::FilePath)]
    trace: Option<PathBuf>,

    /// Speed-up factor of the trace replay
    #[arg(
        long,
        value_name = "FACTOR",
        value_parser = parse_positive,
        requires = "trace",
        default_value_t = 1.0
    )]
    trace_speed: f64,

    /// Maximum number of requests in flight; further requests wait, and the wait counts as latency
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    max_concurrency: Option<u32>,

    /// Maximum retries of a request that cannot connect or is rejected with status 429 or 503
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    retries: u32,

    /// Whether each request opens a new connection or connections are reused
    #[arg(long, value_enum, default_value_t = ConnectionsName::Reused)]
    connections: ConnectionsName,

    /// Number of client threads
    #[arg(
        long,
        default_value_t = 1,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    workers: u32,

    /// Warm-up requests sent before the run and not measured
    #[arg(long, alias = "num-warmups", default_value_t = 0, value_name = "COUNT")]
    warmups: u32,

    /// Timeout of a request in seconds
    #[arg(long, default_value = "300", value_parser = parse_seconds, value_name = "SECONDS")]
    request_timeout: Duration,

    /// Time limit of the run in seconds: no request is sent after it, and requests in flight fail
    #[arg(long, default_value = "600", value_parser = parse_seconds, value_name = "SECONDS")]
    time_limit: Duration,
}

#[derive(Clone, Copy, ValueEnum)]
enum ConnectionsName {
    New,
    Reused,
}

/// Flags that define the goodput limits.
#[derive(Args)]
#[command(next_help_heading = "Measures")]
pub struct LimitFlags {
    /// Goodput limits in milliseconds: ttft:MS, tpot:MS, e2el:MS; may be given several times
    #[arg(long, value_name = "MEASURE:MS", value_parser = measure::parse_limit, num_args = 1..)]
    goodput: Vec<(String, f64)>,
}

impl LimitFlags {
    /// Returns the limits that the flags set.
    pub fn limits(&self) -> GoodputLimits {
        self.goodput.iter().cloned().collect()
    }
}

/// All flags that define a run.
#[derive(Args)]
pub struct SettingsFlags {
    #[command(flatten)]
    target: TargetFlags,
    #[command(flatten)]
    load: LoadFlags,
    #[command(flatten)]
    pace: PaceFlags,
}

impl SettingsFlags {
    /// Builds the run settings, reading all files. `label` names the run in reports.
    pub fn settings(&self, label: Option<String>) -> anyhow::Result<RunSettings> {
        let target = self.target.target()?;
        let (arrivals, trace) = self.pace.arrivals()?;
        let mut load = self.load.load(&target)?;
        if let Some(trace) = trace {
            load.requests = trace.len();
            load.trace = Some(trace);
        }
        if load.output.is_none() && load.trace.is_none() && !matches!(load.prompts, PromptSource::Texts(_)) {
            load.output = Some(LengthDistribution::Fixed(OUTPUT_LEN_FALLBACK));
        }
        load.check(target.endpoint)?;
        Ok(RunSettings {
            label,
            target,
            load,
            arrivals,
            max_concurrency: self.pace.max_concurrency.map(|count| count as usize),
            retries: self.pace.retries,
            connections: match self.pace.connections {
                ConnectionsName::New => Connections::New,
                ConnectionsName::Reused => Connections::Reused,
            },
            workers: self.pace.workers as usize,
            warmups: self.pace.warmups as usize,
            request_timeout: self.pace.request_timeout,
            time_limit: self.pace.time_limit,
        })
    }
}

/// The requests of a trace.
type Entries = Arc<[trace::TraceEntry]>;

impl PaceFlags {
    /// Returns the arrival process, and the trace that defines it if there is one.
    fn arrivals(&self) -> anyhow::Result<(Arrivals, Option<Entries>)> {
        if let Some(file) = &self.trace {
            let entries = trace::read(file, self.trace_speed)?;
            let times = entries.iter().map(|entry| entry.due).collect();
            return Ok((Arrivals::Trace(times), Some(entries.into())));
        }
        let Some(rate) = self.request_rate else { return Ok((self.arrivals.clone(), None)) };
        let process = format!("gamma:{rate}/s:{}", self.burstiness);
        match process.parse() {
            Ok(arrivals) => Ok((arrivals, None)),
            Err(message) => bail!("--request-rate, --burstiness: {message}"),
        }
    }
}

impl LoadFlags {
    fn load(&self, target: &Target) -> anyhow::Result<LoadSpec> {
        let prompts = self.prompts()?;
        Ok(LoadSpec {
            requests: self.requests as usize,
            prompts,
            prompt: self.prompt_tokens,
            // No default here: it must not override the lengths given by a file or a trace.
            output: self.output_tokens,
            trace: None,
            shared_prefix: self.shared_prefix,
            prefix_groups: self.prefix_groups,
            temperature: self.temperature,
            seed: self.seed,
            ignore_eos: !self.allow_eos,
            hangup_share: self.share_hangup,
            hangup_after: self.hangup_after,
            slow_share: self.share_slow,
            slow_rate: self.slow_rate,
            models: target.models.len().max(1),
            keys: target.keys.len(),
        })
    }

    fn prompts(&self) -> anyhow::Result<PromptSource> {
        match self.prompts.as_str() {
            "ids" => Ok(PromptSource::Ids { vocab: self.vocab }),
            "words" => Ok(PromptSource::Words),
            file => {
                let tokenizer = self.tokenizer.as_ref().map(|file| {
                    // Errors of the tokenizers crate do not implement `std::error::Error`.
                    Tokenizer::from_file(file).map_err(|e| anyhow::anyhow!("reading {}: {e}", file.display()))
                });
                let texts = dataset::read(file.as_ref(), tokenizer.transpose()?.as_ref())?;
                Ok(PromptSource::Texts(texts.into()))
            }
        }
    }
}

fn parse_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

/// Parses a duration in seconds.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds")?;
    // The longest time that a `Delivery` can store.
    if !(0.001..=200_000.0).contains(&seconds) {
        return Err("expected between 0.001 and 200000 seconds".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn parse_share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or("expected a number from 0 to 1".into())
}

/// Parses a finite number above 0.
pub fn parse_positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or("expected a number above 0".into())
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|t: &f32| t.is_finite() && *t >= 0.0)
        .ok_or("expected a number that is not negative".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        flags: SettingsFlags,
    }

    fn settings(args: &[&str]) -> anyhow::Result<RunSettings> {
        Alone::try_parse_from(std::iter::once(&"load_tests").chain(args))?.flags.settings(None)
    }

    #[test]
    fn nonsense_is_refused() {
        for nonsense in [
            ["--requests", "0"],
            ["--share-hangup", "1.1"],
            ["--share-slow", "NaN"],
            ["--temperature", "inf"],
            ["--time-limit", "0"],
            ["--arrivals", "poisson"],
            ["--vocab", "0"],
            ["--extra-body", "[1]"],
            ["--burstiness", "0.5"],
            ["--trace-speed", "2"],
            ["--prompts", "/nowhere/texts.json"],
            ["--trace", "/nowhere/trace.csv"],
            ["--api-key-file", "/nowhere/keys"],
            // A chat message cannot carry token ids.
            ["--endpoint", "chat"],
        ] {
            assert!(settings(&nonsense).is_err(), "{nonsense:?}");
        }
    }

    #[test]
    fn the_flags_of_vllms_benchmark_mean_the_same_here() {
        let ours =
            settings(&["--requests", "7", "--prompt-tokens", "5", "--arrivals", "gamma:4/s:0.5"]).unwrap();
        let theirs = "--num-prompts 7 --random-input-len 5 --request-rate 4 --burstiness 0.5";
        let theirs = settings(&theirs.split(' ').collect::<Vec<_>>()).unwrap();
        assert_eq!(theirs.load, ours.load);
        assert_eq!(theirs.arrivals, ours.arrivals);
    }

    #[test]
    fn answers_have_their_default_length_unless_a_file_says_another() {
        let output = |args: &[&str]| settings(args).unwrap().load.output;
        assert_eq!(output(&[]), Some(LengthDistribution::Fixed(128)));
        assert_eq!(output(&["--output-tokens", "7"]), Some(LengthDistribution::Fixed(7)));
        let file = std::env::temp_dir().join(format!("load_tests-trace-{}.csv", std::process::id()));
        fs::write(&file, "timestamp,prompt_tokens,output_tokens\n0,5,6\n").unwrap();
        assert_eq!(output(&["--trace", file.to_str().unwrap()]), None);
        fs::remove_file(&file).unwrap();
    }

    #[test]
    fn metrics_are_beside_the_api_unless_set() {
        let url = |args: &[&str]| settings(args).unwrap().target.metrics_url;
        assert_eq!(url(&["--url", "http://h:1/"]).as_deref(), Some("http://h:1/metrics"));
        assert_eq!(url(&["--metrics-url", "http://m/x"]).as_deref(), Some("http://m/x"));
        assert_eq!(url(&["--metrics-url", "none"]), None);
    }

    #[test]
    fn keys_are_read_from_their_file_and_never_shown() {
        let file = std::env::temp_dir().join(format!("load_tests-keys-{}", std::process::id()));
        fs::write(&file, "# ours\nsk-first\n\n  sk-second  \n").unwrap();
        let settings = settings(&["--api-key-file", file.to_str().unwrap()]).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(settings.target.keys, [Secret("sk-first".into()), Secret("sk-second".into())]);
        assert_eq!(settings.load.keys, 2);
        assert!(!format!("{settings:?}").contains("sk-"), "{settings:?}");
    }
}
