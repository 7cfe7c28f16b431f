//! Runs one scenario and builds its report.
//!
//! Invariant: every variant receives the same requests at the same times.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{
    ScenarioOptions, args,
    file::{Scenario, ServerSpec, Variant},
    head::ReportHead,
    is_stopped, is_wanted,
    results::ScenarioResults,
    scale::{RowLoad, ScenarioScale},
    sections,
    server::{self, ServerProcess},
};
use crate::{
    measure::{self, GoodputLimits},
    plan::{
        arrivals::Arrivals,
        lengths::LengthDistribution,
        prompts::PromptSource,
        requests::{Endpoint, LoadSpec},
    },
    report::{RunReport, html::Section},
    run::{self, Connections, Progress, RunSettings, Target},
};

/// Number of single requests whose median latency is measured.
const SOLO_REQUESTS: usize = 3;

/// A scenario being run.
pub struct Session<'a> {
    pub scenario: &'a Scenario,
    pub options: &'a ScenarioOptions,
    pub progress: &'a Progress,
    /// Receives progress lines.
    pub tell: &'a mut dyn FnMut(&str),
}

/// The server that requests are sent to.
enum TestServer {
    /// A server started by the session.
    Started(ServerProcess),
    /// A server that was already running.
    Running { url: String, metrics_url: Option<String> },
}

impl Session<'_> {
    /// Runs all variants and returns the report sections.
    pub fn run(mut self) -> Result<Vec<Section>> {
        (self.tell)(&self.scenario.title);
        let server = match &self.scenario.server.url {
            Some(url) => url.clone(),
            None => server::version(&self.options.server)?,
        };
        let (solo, model) = self.solo().context("measuring a single request")?;
        let tokens = self.token_scale();
        let scale = ScenarioScale::from_solo(self.scenario.paper.as_ref(), tokens, solo);
        self.announce(&scale);
        let mut results = ScenarioResults::new(solo, tokens);
        for (number, variant) in self.scenario.variants.iter().enumerate() {
            if is_wanted(self.options, variant) && !is_stopped(self.progress) {
                let measured = self.variant(number, variant, &scale, &mut results);
                match measured {
                    // Results measured until the stop are reported.
                    Err(_) if is_stopped(self.progress) => break,
                    measured => measured.with_context(|| format!("variant {}", variant.name()))?,
                }
            }
        }
        let head = ReportHead { server, model, scale, repeats: self.options.repeats(), notes: self.notes() };
        Ok(sections::sections(self.scenario, &head, &results))
    }

    /// Measures the latency of a single request without load. Returns it with the model name.
    fn solo(&mut self) -> Result<(Duration, String)> {
        (self.tell)("measuring a single request");
        let mut service = self.service(&[])?;
        let shape = RowLoad {
            requests: SOLO_REQUESTS,
            output: LengthDistribution::Fixed(self.scenario.solo_tokens(self.token_scale())),
            arrivals: Arrivals::Users { count: 1, think: Duration::ZERO },
        };
        let settings = self.settings(&service, "alone", shape, 0);
        let run = self.execute(&mut service, &RunSettings { warmups: 1, ..settings })?;
        ensure!(run.counts.failed == 0, "{} of {SOLO_REQUESTS} requests failed", run.counts.failed);
        let e2el = run.latencies.e2el.context("no request completed")?;
        Ok((Duration::from_secs_f64(e2el.stats.median / 1e3), run.models.join(", ")))
    }

    /// Reports the number of runs and their estimated duration.
    fn announce(&mut self, scale: &ScenarioScale) {
        let rows = 0..self.scenario.rows();
        let wanted = self.scenario.variants.iter().filter(|variant| is_wanted(self.options, variant));
        let runs = wanted.flat_map(|variant| rows.clone().map(move |row| (variant, row)));
        let times: Vec<f64> =
            runs.map(|(variant, row)| self.scenario.estimate(variant, row, scale)).collect();
        let repeats = self.options.repeats();
        let seconds = times.iter().sum::<f64>() * repeats as f64;
        (self.tell)(&format!(
            "a single request takes {:.1} ms, so times are scaled by {:.4}; {} runs take about {}",
            scale.solo.as_secs_f64() * 1e3,
            scale.time,
            times.len() * repeats,
            format_duration(seconds)
        ));
    }

    /// Executes all runs of one variant.
    fn variant(
        &mut self,
        number: usize,
        variant: &Variant,
        scale: &ScenarioScale,
        results: &mut ScenarioResults,
    ) -> Result<()> {
        let mut service = self.service(&args::variant_args(variant, scale))?;
        let mut warmups = 1;
        for row in 0..self.scenario.rows() {
            for repeat in 0..self.options.repeats() {
                let at = self.scenario.value(row).map_or(String::new(), |value| format!(" at {value}"));
                let of = self.options.repeats();
                (self.tell)(&format!("{}{at}, run {} of {of}", variant.name(), repeat + 1));
                let shape = self.scenario.shape(row, scale);
                let settings = self.settings(&service, variant.name(), shape, repeat as u64);
                let run = self.execute(&mut service, &RunSettings { warmups, ..settings });
                if is_stopped(self.progress) {
                    return Ok(());
                }
                results.add(number, row, run?);
                warmups = 0;
            }
        }
        Ok(())
    }

    /// Starts a server with the arguments of the scenario, the options and the variant, or returns the
    /// running one.
    fn service(&self, variant: &[String]) -> Result<TestServer> {
        let ServerSpec { url, metrics_url, model, args } = self.server_parts();
        if let Some(url) = url {
            return Ok(TestServer::Running { url, metrics_url });
        }
        let args = args::serve_args(
            model.as_deref(),
            &[&args, &self.options.server_args, variant],
            self.options.slots,
        );
        let server =
            ServerProcess::start(&self.options.server, &args, self.options.start_timeout, self.progress)?;
        Ok(TestServer::Started(server))
    }

    fn server_parts(&self) -> ServerSpec {
        let mut server = self.scenario.server.clone();
        server.model = self.options.model.clone().or(server.model);
        server
    }

    fn execute(&self, service: &mut TestServer, settings: &RunSettings) -> Result<RunReport> {
        let record = run::run(settings, self.progress);
        if let (TestServer::Started(server), false) = (service, is_stopped(self.progress)) {
            server.check()?;
        }
        Ok(measure::report(settings, &record?, &GoodputLimits::new()))
    }

    fn settings(&self, service: &TestServer, label: &str, shape: RowLoad, repeat: u64) -> RunSettings {
        let (url, metrics_url) = match service {
            TestServer::Started(server) => (server.url.clone(), Some(format!("{}/metrics", server.url))),
            TestServer::Running { url, metrics_url } => (url.clone(), metrics_url.clone()),
        };
        let target = Target {
            url,
            // A started server has one model; of a running one, the first is used.
            models: Vec::new(),
            keys: Vec::new(),
            endpoint: Endpoint::Completions,
            extra_body: Default::default(),
            ca: None,
            metrics_url,
        };
        RunSettings {
            label: Some(label.to_owned()),
            target,
            load: self.load(&shape, repeat),
            arrivals: shape.arrivals,
            max_concurrency: None,
            retries: 0,
            connections: Connections::Reused,
            workers: self.options.workers.max(1),
            warmups: 0,
            request_timeout: self.options.time_limit,
            time_limit: self.options.time_limit,
        }
    }

    /// Returns the load of a run. Each repeat has its own random prompts, gaps and lengths; all variants have
    /// the same.
    fn load(&self, shape: &RowLoad, repeat: u64) -> LoadSpec {
        let part = &self.scenario.load;
        LoadSpec {
            requests: shape.requests,
            prompts: PromptSource::Ids { vocab: part.vocab.get() },
            prompt: LengthDistribution::Fixed(part.prompt_tokens.get()),
            output: Some(shape.output),
            trace: None,
            shared_prefix: 0,
            prefix_groups: 1,
            temperature: 0.0,
            seed: part.seed.wrapping_add(repeat),
            ignore_eos: true,
            hangup_share: 0.0,
            hangup_after: 1,
            slow_share: 0.0,
            slow_rate: 1,
            models: 1,
            keys: 0,
        }
    }

    fn token_scale(&self) -> f64 {
        self.options.token_scale.unwrap_or(*self.scenario.token_scale.get_ref())
    }

    fn notes(&self) -> Vec<String> {
        let ServerSpec { url, args, .. } = self.server_parts();
        let mut notes = Vec::new();
        if url.is_some() {
            notes.push("the server was already running; its settings are unknown".into());
        } else {
            let args = args::serve_args(None, &[&args, &self.options.server_args], self.options.slots);
            notes.push(format!("arguments of all servers: {}", args::redacted(&args)));
        }
        if !self.options.variants.is_empty() {
            notes.push(format!("selected variants: {}", self.options.variants.join(", ")));
        }
        if is_stopped(self.progress) {
            notes.push("interrupted: missing results were not run".into());
        }
        notes
    }
}

/// Formats an approximate duration.
fn format_duration(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
