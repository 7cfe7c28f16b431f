//! A scenario: a file that describes an experiment, run against a server started for each of its variants.
//!
//! One request alone is measured first, on a server without any variant's settings: the paper's times between
//! requests, and the windows that gather them, are to ours as its time of one request is to ours. Then each variant
//! has a server of its own, for all of its rows.
//!
//! Invariant: one server runs at a time, and none when `run` has returned.

mod check;
mod file;
mod shipped;

mod scale;

mod args;
mod server;

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

/// How scenarios are run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `mainstem` program.
    pub server: PathBuf,
    /// A server that runs already, driven in the place of the only variant that is left.
    pub url: Option<String>,
    /// The model in the place of the files' own.
    pub model: Option<String>,
    /// Answers are this many times as long as the files say, in the place of their own scale.
    pub token_scale: Option<f64>,
    /// Slots of the server, in the place of what the files' arguments say.
    pub slots: Option<u32>,
    /// Further arguments of `mainstem serve`; they go before the files' own, but not before those of a variant.
    pub server_args: Vec<String>,
    /// Variants to run, by name; none runs all.
    pub variants: Vec<String>,
    /// Runs of each variant at each row; 0 counts as 1.
    pub repeats: usize,
    /// How long a server may take to load its model.
    pub start_timeout: Duration,
    /// A request that takes longer has failed, and no run takes longer.
    pub time_limit: Duration,
    /// Threads that send and read.
    pub workers: usize,
}

impl Options {
    /// All as the files have it, with this program.
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

/// Runs the scenarios of `files`, one after the other, and returns the parts of their report; `tell` gets a line for
/// whatever begins. Of a run that is stopped, what was measured until then. A path without a folder may be the name
/// of a [`SHIPPED`] scenario. Fails when a file is wrong, a server does not start or ends by itself, or it cannot be
/// asked.
pub fn run(
    files: &[&Path],
    options: &Options,
    progress: &Progress,
    tell: &mut dyn FnMut(&str),
) -> Result<Vec<Section>> {
    // A mistake in the last file is told before the first is run.
    let scenarios = files.iter().map(|file| chosen(file, options)).collect::<Result<Vec<_>>>()?;
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

/// The scenario of a file with what the options change.
fn chosen(file: &Path, options: &Options) -> Result<Scenario> {
    let name = || file.display().to_string();
    let mut scenario = Scenario::read(file)?;
    let is_known = |name: &str| scenario.variants.iter().any(|variant| variant.name() == name);
    if let Some(unknown) = options.variants.iter().find(|name| !is_known(name)) {
        let known: Vec<_> = scenario.variants.iter().map(|variant| variant.name()).collect();
        bail!("{}: there is no variant '{unknown}'; there are {}", name(), known.join(", "));
    }
    let is_scale = |scale: f64| scale.is_finite() && scale > 0.0;
    ensure!(options.token_scale.is_none_or(is_scale), "the token scale must be more than 0");
    if options.url.is_some() {
        scenario.server.url.clone_from(&options.url);
        scenario.server.metrics_url = None;
    }
    let count = scenario.variants.iter().filter(|variant| is_wanted(options, variant)).count();
    ensure!(
        scenario.server.url.is_none() || count == 1,
        "{}: a server that runs already is one variant: name it, of {count}",
        name()
    );
    Ok(scenario)
}

fn is_wanted(options: &Options, variant: &Variant) -> bool {
    options.variants.is_empty() || options.variants.iter().any(|name| name == variant.name())
}

fn is_stopped(progress: &Progress) -> bool {
    progress.stop.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_tiny(change: impl Fn(&mut Options)) -> Result<Scenario, String> {
        let mut options = Options::new("/bin/false".into());
        change(&mut options);
        chosen(Path::new("tiny"), &options).map_err(|error| error.to_string())
    }

    #[test]
    fn a_server_that_runs_is_one_variant() {
        let url = || Some("http://127.0.0.1:1".to_owned());
        let error = of_tiny(|options| options.url = url()).unwrap_err();
        assert_eq!(error, "tiny: a server that runs already is one variant: name it, of 4");
        let scenario = of_tiny(|options| {
            options.url = url();
            options.variants = vec!["window".into()];
        });
        assert_eq!(scenario.unwrap().server.url, url());
        assert!(of_tiny(|options| options.token_scale = Some(f64::NAN)).unwrap_err().contains("token scale"));
        let error = of_tiny(|options| options.variants = vec!["windows".into()]).unwrap_err();
        assert_eq!(
            error,
            "tiny: there is no variant 'windows'; there are fused, no shuffle, window, concurrent"
        );
    }

    /// Nothing is started for a file that is wrong, wherever it stands; and what is no server is told.
    #[test]
    fn mistakes_are_told_before_anything_runs() {
        let options = Options::new("/bin/false".into());
        let of = |files: &[&str]| {
            let files: Vec<&Path> = files.iter().map(Path::new).collect();
            let mut told = 0;
            let outcome = run(&files, &options, &Progress::default(), &mut |_| told += 1);
            (format!("{:#}", outcome.unwrap_err()), told)
        };
        let (error, told) = of(&["tiny", "no/such.toml"]);
        assert!(error.starts_with("no/such.toml: ") && told == 0, "{error}");
        let (error, _) = of(&["tiny"]);
        assert_eq!(error, "tiny: /bin/false --version ended with exit status: 1");
    }

    #[test]
    fn a_run_that_is_stopped_has_what_there_is() {
        let progress = Progress::default();
        progress.stop.store(true, Ordering::Relaxed);
        let options = Options::new("/bin/echo".into());
        let sections = run(&[Path::new("tiny")], &options, &progress, &mut |_| ());
        assert!(sections.is_ok_and(|sections| sections.is_empty()));
    }
}
