//! The command line: arguments to settings, figures to the terminal and to a file.
//!
//! Invariant: the exit code is 0 when no request failed, 1 when one did, 2 when there was no run.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context;
use clap::Parser;
use load_tests::{
    arrivals::Arrivals,
    measure::Summary,
    report,
    requests::{Length, Load},
    run::{Settings, run},
};

/// Sends a planned load of streaming completions to an OpenAI-compatible server and reports latency and
/// throughput.
///
/// The loop is open: every request is sent when it is due, however the server fares, and latency counts from
/// then. How late the generator itself was is reported beside it. The exit code is 0 when no request failed,
/// 1 when one did, and 2 when there was no run.
#[derive(Parser)]
#[command(name = "load_tests", version)]
struct Cli {
    /// The server, up to but without /v1; plain HTTP only
    #[arg(long, default_value = "http://127.0.0.1:8080", value_parser = parse_url)]
    url: String,

    /// Model to ask for [default: the first the server lists]
    #[arg(long)]
    model: Option<String>,

    /// Requests in all
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,

    /// When they are due, gaps in milliseconds: all, constant:MS, or poisson:MS (the mean gap)
    #[arg(long, default_value = "all", value_name = "PROCESS")]
    arrivals: Arrivals,

    /// Tokens per prompt: N, or LOW-HIGH for a uniform draw
    #[arg(long, default_value = "128", value_name = "LENGTH")]
    prompt_tokens: Length,

    /// Tokens per answer: N, or LOW-HIGH for a uniform draw; end-of-sequence tokens are ignored
    #[arg(long, default_value = "128", value_name = "LENGTH")]
    output_tokens: Length,

    /// Prompt ids are drawn below this; at most the model's vocabulary
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    vocab: u32,

    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0, value_parser = parse_temperature)]
    temperature: f32,

    /// Seed of arrivals, lengths, prompts and sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Share of the clients that leave early, 0 to 1
    #[arg(long, default_value_t = 0.0, value_parser = parse_share, value_name = "SHARE")]
    share_hangup: f64,

    /// Tokens after which those clients leave
    #[arg(long, value_name = "TOKENS", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    hangup_after: u32,

    /// Seconds after which one request has failed
    #[arg(long, default_value = "300", value_parser = parse_seconds, value_name = "SECONDS")]
    request_timeout: Duration,

    /// Seconds for the whole run: then nothing more is sent, and what is in flight has failed
    #[arg(long, default_value = "600", value_parser = parse_seconds, value_name = "SECONDS")]
    time_limit: Duration,

    /// Write the report to this file, with the names of `vllm bench serve`
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Put one entry per request into the file too
    #[arg(long, requires = "json")]
    detailed: bool,
}

impl Cli {
    fn settings(&self) -> Settings {
        Settings {
            url: self.url.clone(),
            model: self.model.clone(),
            load: Load {
                requests: self.requests as usize,
                prompt: self.prompt_tokens,
                output: self.output_tokens,
                vocab: self.vocab,
                temperature: self.temperature,
                seed: self.seed,
                hangup_share: self.share_hangup,
                hangup_after: self.hangup_after,
            },
            arrivals: self.arrivals,
            request_timeout: self.request_timeout,
            time_limit: self.time_limit,
        }
    }
}

fn main() -> ExitCode {
    match drive(&Cli::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Runs the load, reports it, and returns how many requests failed.
fn drive(cli: &Cli) -> anyhow::Result<usize> {
    let settings = cli.settings();
    let record = actix_rt::System::new().block_on(run(&settings))?;
    let summary = Summary::of(&record.samples);
    print!("{}", report::table(&settings, &record, &summary));
    if let Some(path) = &cli.json {
        let json = if cli.detailed { report::detailed_json } else { report::json };
        let text = format!("{:#}\n", json(&settings, &record, &summary));
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(summary.failed())
}

fn parse_url(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("http://").ok_or("expected http://HOST[:PORT]")?;
    if rest.is_empty() || rest.starts_with(['/', ':']) {
        return Err("the host is missing".into());
    }
    Ok(text.to_string())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds")?;
    if !(0.001..=1e6).contains(&seconds) {
        return Err("expected between 0.001 and 1000000 seconds".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn parse_share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or("expected a number from 0 to 1".into())
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|t: &f32| t.is_finite() && *t >= 0.0)
        .ok_or("expected a number that is not negative".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed_and_refuses_nonsense() {
        Cli::command().debug_assert();
        assert!(Cli::try_parse_from(["load_tests"]).is_ok());
        for nonsense in [
            ["--requests", "0"],
            ["--url", "https://127.0.0.1"],
            ["--url", "http://"],
            ["--share-hangup", "1.1"],
            ["--share-hangup", "NaN"],
            ["--temperature", "inf"],
            ["--time-limit", "0"],
            ["--arrivals", "poisson"],
            ["--vocab", "0"],
            ["--detailed", "--seed=1"],
        ] {
            assert!(Cli::try_parse_from(["load_tests"].iter().chain(&nonsense)).is_err(), "{nonsense:?}");
        }
    }
}
