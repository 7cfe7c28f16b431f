//! Scenarios: experiments defined in files, run against a server started for each variant.
//!
//! First, single requests are measured on a server without variant settings. The ratio of their latency to
//! the paper's scales the paper's gaps between requests and batching windows. Then each variant is run on its
//! own server, for all rows.
//!
//! Invariant: at most one server runs at a time, and none after `run` has returned.

mod check;
mod file;
mod shipped;

mod scale;

pub(crate) mod args;
pub(crate) mod server;

mod results;

mod session;

mod head;
mod sections;

use std::{
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use anyhow::{Result, bail, ensure};

use crate::{report::html::Section, run::Progress};

use file::{Scenario, Variant};
use session::Session;

pub use shipped::SHIPPED;

/// Options for running scenarios.
#[derive(Clone, Debug)]
pub struct ScenarioOptions {
    /// The `mainstem` executable.
    pub server: PathBuf,
    /// URL of a running server to use for the single selected variant.
    pub url: Option<String>,
    /// Model that overrides the files' own.
    pub model: Option<String>,
    /// Factor of the response lengths that overrides the files' own.
    pub token_scale: Option<f64>,
    /// Number of slots of the server, overriding the files' arguments.
    pub slots: Option<u32>,
    /// Additional arguments of `mainstem serve`; they override those of the files, but not those of a
    /// variant.
    pub server_args: Vec<String>,
    /// Names of the variants to run; empty runs all.
    pub variants: Vec<String>,
    /// Number of runs per variant and row; 0 counts as 1.
    pub repeats: usize,
    /// Timeout for a server to load its model.
    pub start_timeout: Duration,
    /// Timeout of a request, and time limit of a run.
    pub time_limit: Duration,
    /// Number of client threads.
    pub workers: usize,
}

impl ScenarioOptions {
    /// Creates options without overrides, with this `mainstem` executable.
    pub fn new(server: PathBuf) -> Self {
        Self {
            server,
            url: None,
            model: None,
            token_scale: None,
            slots: None,
            server_args: Vec::new(),
            variants: Vec::new(),
            repeats: 1,
            start_timeout: Duration::from_secs(600),
            time_limit: Duration::from_secs(3600),
            workers: 2,
        }
    }

    fn repeats(&self) -> usize {
        self.repeats.max(1)
    }
}

/// Runs the scenarios of `files` one after the other and returns the sections of their report. `tell`
/// receives progress lines. If the run is stopped, the sections cover the results until then. A path without
/// a directory may be the name of a [`SHIPPED`] scenario. Fails if a file is invalid, a server does not start
/// or exits, or it cannot be reached.
pub fn run(
    files: &[&Path],
    options: &ScenarioOptions,
    progress: &Progress,
    tell: &mut dyn FnMut(&str),
) -> Result<Vec<Section>> {
    // All files are validated before the first is run.
    let scenarios = files.iter().map(|file| load_scenario(file, options)).collect::<Result<Vec<_>>>()?;
    let mut sections = Vec::new();
    for (file, scenario) in files.iter().zip(&scenarios) {
        let session = Session { scenario, options, progress, tell };
        match session.run() {
            Ok(parts) => sections.extend(parts),
            Err(_) if is_stopped(progress) => break,
            Err(error) => return Err(error.context(file.display().to_string())),
        }
    }
    Ok(sections)
}

/// Reads the scenario of a file and applies the options.
fn load_scenario(file: &Path, options: &ScenarioOptions) -> Result<Scenario> {
    let name = || file.display().to_string();
    let mut scenario = Scenario::read(file)?;
    let is_known = |name: &str| scenario.variants.iter().any(|variant| variant.name() == name);
    if let Some(unknown) = options.variants.iter().find(|name| !is_known(name)) {
        let known: Vec<_> = scenario.variants.iter().map(|variant| variant.name()).collect();
        bail!("{}: unknown variant '{unknown}'; the variants are {}", name(), known.join(", "));
    }
    let is_scale = |scale: f64| scale.is_finite() && scale > 0.0;
    ensure!(options.token_scale.is_none_or(is_scale), "the token scale must be above 0");
    if options.url.is_some() {
        scenario.server.url.clone_from(&options.url);
        scenario.server.metrics_url = None;
    }
    let count = scenario.variants.iter().filter(|variant| is_wanted(options, variant)).count();
    ensure!(
        scenario.server.url.is_none() || count == 1,
        "{}: a running server requires exactly one variant, but {count} are selected; select one with \
         --variants",
        name()
    );
    Ok(scenario)
}

fn is_wanted(options: &ScenarioOptions, variant: &Variant) -> bool {
    options.variants.is_empty() || options.variants.iter().any(|name| name == variant.name())
}

fn is_stopped(progress: &Progress) -> bool {
    progress.stop.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load_tiny(change: impl Fn(&mut ScenarioOptions)) -> Result<Scenario, String> {
        let mut options = ScenarioOptions::new("/bin/false".into());
        change(&mut options);
        load_scenario(Path::new("tiny"), &options).map_err(|error| error.to_string())
    }

    #[test]
    fn a_server_that_runs_is_one_variant() {
        let url = || Some("http://127.0.0.1:1".to_owned());
        let error = load_tiny(|options| options.url = url()).unwrap_err();
        assert_eq!(
            error,
            "tiny: a running server requires exactly one variant, but 4 are selected; select one with \
             --variants"
        );
        let scenario = load_tiny(|options| {
            options.url = url();
            options.variants = vec!["window".into()];
        });
        assert_eq!(scenario.unwrap().server.url, url());
        assert!(
            load_tiny(|options| options.token_scale = Some(f64::NAN)).unwrap_err().contains("token scale")
        );
        let error = load_tiny(|options| options.variants = vec!["windows".into()]).unwrap_err();
        assert_eq!(
            error,
            "tiny: unknown variant 'windows'; the variants are fused, no shuffle, window, concurrent"
        );
    }

    /// No server is started if any file is invalid, and a program that is not a server is reported.
    #[test]
    fn mistakes_are_reported_before_anything_runs() {
        let options = ScenarioOptions::new("/bin/false".into());
        let of = |files: &[&str]| {
            let files: Vec<&Path> = files.iter().map(Path::new).collect();
            let mut lines = 0;
            let outcome = run(&files, &options, &Progress::default(), &mut |_| lines += 1);
            (format!("{:#}", outcome.unwrap_err()), lines)
        };
        let (error, lines) = of(&["tiny", "no/such.toml"]);
        assert!(error.starts_with("no/such.toml: ") && lines == 0, "{error}");
        let (error, _) = of(&["tiny"]);
        assert_eq!(error, "tiny: /bin/false --version ended with exit status: 1");
    }

    #[test]
    fn a_run_that_is_stopped_has_what_there_is() {
        let progress = Progress::default();
        progress.stop.store(true, Ordering::Relaxed);
        let options = ScenarioOptions::new("/bin/echo".into());
        let sections = run(&[Path::new("tiny")], &options, &progress, &mut |_| ());
        assert!(sections.is_ok_and(|sections| sections.is_empty()));
    }
}
