//! Checks with third-party programs: the official packages of OpenAI and of other servers in scripted
//! sessions, other libraries that speak OpenAI's API, requests that schemathesis makes of the OpenAPI
//! document, the web page in headless Chromium, and promtool on `/metrics` and on the monitoring files.
//! Checks whose program is not installed are reported and counted; a test harness would hide that, so this
//! binary has none.
//!
//! `CLIENTS_PYTHON` is a Python interpreter with the packages of `clients/requirements.txt`; the default is
//! that of `target/clients-venv`. `FRAMEWORKS_PYTHON` is one with those of `clients/frameworks.txt`, of which
//! some need an older package openai; the default is that of `target/frameworks-venv`. `CLIENTS_NODE` is a
//! folder in which `npm ci` has installed the packages of `clients/package-lock.json`; the default is
//! `target/clients-node`. With `UPDATE_CLIENTS=1`, the table of `docs/clients.md` is rewritten. With
//! `SCREENSHOTS=FOLDER`, pictures of the page are written there, of which `docs/inflight.png` is one. With
//! `CLIENTS_REQUIRED=1` a missing package is a failure, with `PROMTOOL_REQUIRED=1` a missing promtool. (The
//! variables do not have the program's prefix, because it refuses unknown variables with it.)
//!
//! Invariant: every check prints one line, and the last line counts them.

#[path = "../it/program.rs"]
mod program;

use serde_json::json;
use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Timeout of a server start or a tool.
const PATIENCE: Duration = Duration::from_secs(120);
/// Timeout of the whole session.
const SESSION: Duration = Duration::from_secs(540);

/// The variable that makes a missing package a failure.
const CLIENTS_REQUIRED: &str = "CLIENTS_REQUIRED";

const KEY: &str = "the-key-of-this-test";

fn main() -> ExitCode {
    // Like a test harness, `cargo test NAME` selects checks by name.
    let filters: Vec<_> = env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if !filters.is_empty() && !filters.iter().any(|filter| "clients".contains(filter.as_str())) {
        println!("clients: not run, for none of {filters:?} is in its name");
        return ExitCode::SUCCESS;
    }
    let mut report = Report::default();
    let result = checks(&mut report);
    if result.is_err() {
        report.result("the servers", result);
    }
    report.end()
}

fn checks(report: &mut Report) -> Result<(), String> {
    let plain = Server::start(&[])?;
    session(&plain, report)?;
    frameworks(&plain, report)?;
    openapi(report)?;
    other_servers(&plain, report)?;
    dialects(&plain, report)?;
    browser(&plain, report)?;
    dashboard(report);
    promtool(&plain.page_of_metrics()?, report);
    clients_table(report);
    Ok(())
}

/// The results of the checks.
#[derive(Default)]
struct Report {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Rows of the clients that passed.
    clients: String,
    /// Whether there may be clients that are not installed.
    lacks_clients: bool,
}

impl Report {
    /// Prints a line, and counts it if it is the result of a check.
    fn note(&mut self, line: &str) {
        println!("{line}");
        match line.split(' ').next() {
            Some("ok") => self.passed += 1,
            Some("FAILED") => self.failed += 1,
            Some("skipped" | "skipped:") => self.skipped += 1,
            Some("client") => self.clients.extend(table_row(line)),
            _ => {}
        }
    }

    fn result(&mut self, name: &str, result: Result<(), String>) {
        match result {
            Ok(()) => self.note(&format!("ok {name}")),
            Err(why) => self.note(&format!("FAILED {name}: {why}")),
        }
    }

    /// Reports a skipped check, which is a failure if the variable requires it.
    fn missing(&mut self, name: &str, why: &str, required_by: &str) {
        self.lacks_clients |= required_by == CLIENTS_REQUIRED;
        match env::var_os(required_by).is_some_and(|value| value == "1") {
            true => self.note(&format!("FAILED {name}: {why}, and {required_by} is 1")),
            false => self.note(&format!("skipped: {name}: {why}")),
        }
    }

    fn end(self) -> ExitCode {
        let Report { passed, failed, skipped, .. } = self;
        let failures = if failed > 0 { format!(", {failed} FAILED") } else { String::new() };
        println!("clients: {passed} passed, {skipped} skipped{failures}");
        if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

/// Returns the Python interpreter with the packages.
fn python() -> PathBuf {
    env::var_os("CLIENTS_PYTHON").map_or_else(|| in_checkout("target/clients-venv/bin/python"), PathBuf::from)
}

/// Runs the session of `clients/openai_session.py`, which prints result lines in the same format.
fn session(plain: &Server, report: &mut Report) -> Result<(), String> {
    const NAME: &str = "the openai session comes to its end";
    if !has_package("openai") {
        let why = format!("{} has no package openai", python().display());
        report.missing("the openai session", &why, CLIENTS_REQUIRED);
        return Ok(());
    }
    let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join("data");
    let keyed =
        Server::start(&["--slots", "4", "--api-key", KEY, "--data-dir", &data.display().to_string()])?;
    let encoder = Server::start(&[&family("bert")?])?;
    let translator = Server::start(&[&family("m2m100")?])?;
    // The slow backend, so that an answer is under way for as long as somebody else asks.
    let slow = Server::start(&["--device", "reference", "--slots", "1", "--max-waiting", "0"])?;
    let mut script = program::alone(python());
    script.arg(in_checkout("tests/clients/openai_session.py")).arg(&plain.url);
    script.args(["--keyed", &keyed.url, "--key", KEY, "--slow", &slow.url]);
    script.args(["--encoder", &encoder.url, "--translator", &translator.url]);
    follow_script(&mut script, NAME, report);
    Ok(())
}

/// Runs the session of `clients/other_servers_session.py`: the clients of other servers.
fn other_servers(plain: &Server, report: &mut Report) -> Result<(), String> {
    const NAME: &str = "the session with clients of other servers comes to its end";
    let packages = ["cohere", "ollama", "text_generation", "huggingface_hub"];
    if let Some(missing) = packages.into_iter().find(|name| !has_package(name)) {
        let why = format!("{} has no package {missing}", python().display());
        report.missing(NAME, &why, "CLIENTS_REQUIRED");
        return Ok(());
    }
    let keyed = Server::start(&["--api-key", KEY, "--alias", "llama3,gpt-4o", "--accept-any-model"])?;
    let encoder = Server::start(&[&family("bert")?])?;
    let folder = in_checkout("tests/fixtures/classifiers/bert_reranker");
    let reranker = Server::start(&[&folder.display().to_string()])?;
    let mut script = program::alone(python());
    script.arg(in_checkout("tests/clients/other_servers_session.py")).arg(&plain.url);
    script.args(["--keyed", &keyed.url, "--key", KEY]);
    script.args(["--encoder", &encoder.url, "--reranker", &reranker.url]);
    follow_script(&mut script, NAME, report);
    Ok(())
}

/// Runs the session of `clients/dialects_session.py` with the APIs of Anthropic and of OpenAI's responses.
fn dialects(plain: &Server, report: &mut Report) -> Result<(), String> {
    if let Some(package) = ["anthropic", "openai"].into_iter().find(|package| !has_package(package)) {
        let why = format!("{} has no package {package}", python().display());
        report.missing("the session of other APIs", &why, "CLIENTS_REQUIRED");
        return Ok(());
    }
    let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join("responses");
    let keyed =
        Server::start(&["--slots", "4", "--api-key", KEY, "--data-dir", &data.display().to_string()])?;
    let mut script = program::alone(python());
    script.arg(in_checkout("tests/clients/dialects_session.py")).arg(&plain.url);
    script.args(["--keyed", &keyed.url, "--key", KEY]);
    follow_script(&mut script, "the session of other APIs comes to its end", report);
    Ok(())
}

/// Runs the session of `clients/browser_session.py` on the web page.
fn browser(plain: &Server, report: &mut Report) -> Result<(), String> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let folders: Vec<_> = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect();
    let programs = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    let Some(chromium) = programs.into_iter().find(|program| program.is_file()) else {
        let why = format!("none of {} is on the PATH", names.join(", "));
        report.missing("the web page", &why, CLIENTS_REQUIRED);
        return Ok(());
    };
    if !has_package("playwright") {
        let why = format!("{} has no package playwright", python().display());
        report.missing("the web page", &why, CLIENTS_REQUIRED);
        return Ok(());
    }
    // The slow backend, so that answers are under way for as long as somebody looks.
    let slow = Server::start(&["--device", "reference", "--slots", "40", "--allowed-host", "mainstem.test"])?;
    let keyed = Server::start(&["--slots", "4", "--api-key", KEY])?;
    let mut script = program::alone(python());
    script.arg(in_checkout("tests/clients/browser_session.py")).args(["--plain", &plain.url]);
    script.args(["--slow", &slow.url, "--keyed", &keyed.url, "--key", KEY, "--chromium"]).arg(chromium);
    if let Some(folder) = env::var_os("SCREENSHOTS") {
        script.arg("--screenshot").arg(folder);
    }
    follow_script(&mut script, "the session in the browser comes to its end", report);
    Ok(())
}

/// Returns the Python interpreter with the packages that need an older package openai.
fn frameworks_python() -> PathBuf {
    let usual = || in_checkout("target/frameworks-venv/bin/python");
    env::var_os("FRAMEWORKS_PYTHON").map_or_else(usual, PathBuf::from)
}

/// Runs the session of `clients/frameworks_session.py`.
fn frameworks(plain: &Server, report: &mut Report) -> Result<(), String> {
    if !has_package_in(&frameworks_python(), "langchain_openai") {
        let why = format!("{} has no package langchain_openai", frameworks_python().display());
        report.missing("the sessions of other clients", &why, CLIENTS_REQUIRED);
        return Ok(());
    }
    let node = env::var_os("CLIENTS_NODE").map_or_else(|| in_checkout("target/clients-node"), PathBuf::from);
    let has_node = Command::new("node").arg("--version").stdout(Stdio::null()).status().is_ok();
    let mut script = program::alone(frameworks_python());
    script.arg(in_checkout("tests/clients/frameworks_session.py")).arg(&plain.url);
    match (has_node, node.join("node_modules/openai").is_dir()) {
        (true, true) => _ = script.arg("--node-modules").arg(&node),
        (true, false) => {
            let why = format!("{} has no package openai", node.display());
            report.missing("the packages of npm", &why, CLIENTS_REQUIRED);
        }
        // The session reports it as skipped.
        (false, _) => report.lacks_clients = true,
    }
    follow_script(&mut script, "the session of other clients comes to its end", report);
    Ok(())
}

/// Compares the table of clients with what passed, if all clients are installed.
fn clients_table(report: &mut Report) {
    const NAME: &str = "the table of docs/clients.md is what passed";
    if report.failed == 0 && !report.lacks_clients {
        let result = check_table(&report.clients);
        report.result(NAME, result);
    }
}

/// Returns the row of a line "client NAME VERSION: what was tried", which sessions print of clients that
/// passed.
fn table_row(line: &str) -> Option<String> {
    let (client, tried) = line.strip_prefix("client ")?.split_once(": ")?;
    let (name, version) = client.rsplit_once(' ')?;
    Some(format!("| {name} | {version} | {tried} |\n"))
}

/// Compares the rows of clients with those of `docs/clients.md`, or replaces these.
fn check_table(rows: &str) -> Result<(), String> {
    const HEAD: &str = "| client | version | tried |\n|---|---|---|\n";
    let path = in_checkout("docs/clients.md");
    let page = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
    let (before, rest) = page.split_once(HEAD).ok_or("the page has no table")?;
    let end =
        rest.split_inclusive('\n').take_while(|line| line.starts_with('|')).map(str::len).sum::<usize>();
    if &rest[..end] == rows {
        return Ok(());
    }
    if env::var_os("UPDATE_CLIENTS").is_some_and(|value| value == "1") {
        let page = [before, HEAD, rows, &rest[end..]].concat();
        return std::fs::write(&path, page).map_err(|error| error.to_string());
    }
    Err(format!("it differs; UPDATE_CLIENTS=1 rewrites it. Now: {}", rows.replace('\n', " ")))
}

/// Runs the session of `clients/openapi_session.py`.
fn openapi(report: &mut Report) -> Result<(), String> {
    if !has_package_in(&frameworks_python(), "schemathesis") {
        let why = format!("{} has no package schemathesis", frameworks_python().display());
        report.missing("the OpenAPI document", &why, CLIENTS_REQUIRED);
        return Ok(());
    }
    let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join("fuzzed");
    let fuzzed = Server::start(&["--data-dir", &data.display().to_string()])?;
    let mut script = program::alone(frameworks_python());
    script.arg(in_checkout("tests/clients/openapi_session.py")).arg(&fuzzed.url);
    follow_script(&mut script, "the session of the OpenAPI document comes to its end", report);
    Ok(())
}

/// Returns whether the Python interpreter has a package.
fn has_package(name: &str) -> bool {
    has_package_in(&python(), name)
}

fn has_package_in(python: &Path, name: &str) -> bool {
    let find = format!("import importlib.util, sys; sys.exit(importlib.util.find_spec('{name}') is None)");
    let found = Command::new(python).args(["-c", &find]).stderr(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

/// Runs a script that prints result lines. Its end is a check itself, called `name`.
fn follow_script(script: &mut Command, name: &str, report: &mut Report) {
    let before = (report.passed, report.failed);
    let status = Running::start(script).and_then(|running| running.follow(SESSION, |line| report.note(line)));
    match status {
        // The failed check has already been reported.
        Ok(_) if report.failed > before.1 => {}
        Ok(_) if report.passed == before.0 => report.result(name, Err("it checks nothing".to_owned())),
        status => report.result(name, status.and_then(success)),
    }
}

/// Returns a directory of a family's fixture with the shared tokenizer.
fn family(name: &str) -> Result<String, String> {
    let families = in_checkout("tests/fixtures/families");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients").join(name);
    let copy = |from: PathBuf| {
        let to = folder.join(from.file_name().expect("it is a file"));
        std::fs::copy(&from, to).map_err(|error| format!("cannot copy {}: {error}", from.display()))
    };
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    for file in ["config.json", "model.safetensors"] {
        copy(families.join(name).join(file))?;
    }
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        copy(families.join(file))?;
    }
    Ok(folder.display().to_string())
}

/// Checks that the dashboard equals the output of its generator.
fn dashboard(report: &mut Report) {
    const NAME: &str = "the dashboard is what dashboard.py makes";
    let folder = in_checkout("config/monitoring/grafana");
    let Ok(generator) = Running::start(Command::new(python()).arg("dashboard.py").current_dir(&folder))
    else {
        return report.missing(NAME, &format!("there is no {}", python().display()), CLIENTS_REQUIRED);
    };
    let mut made = String::new();
    let status = generator.follow(PATIENCE, |line| made.extend([line, "\n"]));
    let kept = std::fs::read_to_string(folder.join("mainstem.json")).map_err(|error| error.to_string());
    let same = |kept: String| if kept == made { Ok(()) } else { Err("mainstem.json differs".to_owned()) };
    report.result(NAME, status.and_then(success).and_then(|()| kept.and_then(same)));
}

/// Checks a page of metrics and the files in `config/monitoring` with promtool.
fn promtool(page: &str, report: &mut Report) {
    let checks: [(&str, &[&str], &str); 4] = [
        ("promtool check metrics", &["check", "metrics"], page),
        ("promtool check config", &["check", "config", "prometheus.yml"], ""),
        ("promtool check rules", &["check", "rules", "alerts.yml"], ""),
        ("promtool test rules", &["test", "rules", "alerts_test.yml"], ""),
    ];
    for (name, args, input) in checks {
        let mut tool = Command::new("promtool");
        tool.args(args).current_dir(in_checkout("config/monitoring")).stdin(Stdio::piped());
        let Ok(running) = Running::start(&mut tool) else {
            report.missing(name, "promtool is not on the PATH", "PROMTOOL_REQUIRED");
            continue;
        };
        let mut printed = Vec::new();
        let status = running.fed(input).follow(PATIENCE, |line| printed.push(line.to_owned()));
        let result = status.and_then(success).map_err(|why| format!("{why}: {}", printed.join("; ")));
        report.result(name, result);
    }
}

fn in_checkout(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn success(status: ExitStatus) -> Result<(), String> {
    if status.success() { Ok(()) } else { Err(format!("it ended with {status}")) }
}

/// The program, serving the model that is built in, or one that the flags name.
struct Server {
    url: String,
    _process: Running,
}

impl Server {
    fn start(flags: &[&str]) -> Result<Server, String> {
        let mut program = program::mainstem();
        program.args(["serve", "--port", "0", "--threads", "2"]).args(flags).stderr(Stdio::piped());
        let mut process = Running::start(&mut program)?;
        let log = lines(process.0.stderr.take().expect("it is piped"));
        let deadline = Instant::now() + PATIENCE;
        let mut printed = Vec::new();
        loop {
            let Ok(line) = log.recv_timeout(deadline.saturating_duration_since(Instant::now())) else {
                return Err(format!("no server listens with {flags:?}: {}", printed.join("; ")));
            };
            if let Some((_, address)) = line.split_once("listening on ") {
                let url = address.split_whitespace().next().expect("an address follows").to_owned();
                // The thread of `log` reads on, so that the server never waits for its log to be read.
                return Ok(Server { url, _process: process });
            }
            printed.push(line);
        }
    }

    /// `/metrics` once a few requests are through.
    fn page_of_metrics(&self) -> Result<String, String> {
        let text = |answer: Result<ureq::Response, ureq::Error>| {
            let answer = answer.map_err(|error| error.to_string())?;
            answer.into_string().map_err(|error| error.to_string())
        };
        for prompt in ["Once", "Once upon a time"] {
            let body = json!({"prompt": prompt, "max_tokens": 3});
            text(ureq::post(&format!("{}/v1/completions", self.url)).timeout(PATIENCE).send_json(body))?;
        }
        text(ureq::get(&format!("{}/metrics", self.url)).timeout(PATIENCE).call())
    }
}

/// A child process, killed on drop.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Result<Running, String> {
        let child = command.stdout(Stdio::piped()).spawn();
        child.map(Running).map_err(|error| format!("it does not start: {error}"))
    }

    /// Writes all input to the process.
    fn fed(mut self, input: &str) -> Running {
        let mut stdin = self.0.stdin.take().expect("it is piped");
        // A process that exits before reading reports the reason by its status.
        let _ = stdin.write_all(input.as_bytes());
        self
    }

    /// Reads the output of the process to the end.
    fn follow(mut self, limit: Duration, mut line: impl FnMut(&str)) -> Result<ExitStatus, String> {
        let printed = lines(self.0.stdout.take().expect("it is piped"));
        let deadline = Instant::now() + limit;
        loop {
            match printed.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(next) => line(&next),
                Err(RecvTimeoutError::Timeout) => return Err(format!("it takes longer than {limit:?}")),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.0.wait().map_err(|error| format!("it cannot be waited for: {error}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The lines of a stream as they come, read by a thread of its own to the end.
fn lines(stream: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            // Keeps reading without a receiver, so that the writer never blocks on a full pipe.
            let _ = sender.send(line);
        }
    });
    lines
}
