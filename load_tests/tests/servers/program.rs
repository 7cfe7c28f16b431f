//! Tests of the program: output files and exit codes.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::support::*;

/// A temporary directory, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_load_tests"));
    command.args(args).stdin(Stdio::null());
    command
}

fn run(address: SocketAddr, args: &[&str]) -> Output {
    let url = format!("http://{address}");
    let common = ["run", "--url", &url, "--requests", "5", "--output-tokens", "4", "--metrics-url", "none"];
    program(&common).args(args).output().unwrap()
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn a_run_is_written_in_every_form_and_read_again() {
    let address = serve_bytes(|request| match request.line().starts_with("get") {
        true => page("200 OK", "", r#"{"data":[{"id":"tiny"}]}"#),
        false => good_response(&request),
    });
    let folder = Folder::new("forms");
    let names =
        ["json", "csv", "tokens.csv", "progress.csv", "html", "both.html"].map(|name| folder.file(name));
    let [json, csv, tokens, progress, html, both] = names.each_ref().map(String::as_str);
    let files =
        ["--json", json, "--csv", csv, "--csv-tokens", tokens, "--csv-progress", progress, "--html", html];
    let output =
        run(address, &[&files[..], &["--detailed", "--label", "ours", "--goodput", "ttft:60000"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", output_text(&output));
    assert!(output_text(&output).contains("5 completed, 0 failed"), "{}", output_text(&output));
    let report: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!((&report["model_id"], &report["completed"]), (&"tiny".into(), &5.into()));
    assert_eq!(report["total_output_tokens"], 20);
    assert_eq!(report["ttfts"].as_array().unwrap().len(), 5);
    assert!(report["request_goodput"].as_f64().unwrap() > 0.0);
    let lines = |file| fs::read_to_string(file).unwrap().lines().count();
    assert_eq!((lines(csv), lines(tokens)), (1 + 5, 1 + 20));
    assert_eq!(
        fs::read_to_string(progress).unwrap().lines().last().unwrap().split(',').next_back(),
        Some("1.0")
    );
    assert!(fs::read_to_string(html).unwrap().contains("ours"));
    let merged = program(&["report", json, json, "--html", both]).output().unwrap();
    assert_eq!(merged.status.code(), Some(0), "{}", output_text(&merged));
    assert!(fs::read_to_string(both).unwrap().contains("Side by side"));
}

#[test]
fn failed_requests_are_reported_by_the_code_and_in_words() {
    let address = serve_bytes(|_| page("500 X", "", "oops"));
    let output = run(address, &["--model", "m"]);
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    assert!(
        output_text(&output).contains("status 500") && output_text(&output).contains("oops"),
        "{}",
        output_text(&output)
    );
}

#[test]
fn what_cannot_be_run_has_a_code_of_its_own() {
    let folder = Folder::new("refused");
    let nowhere = folder.file("no/folder.json");
    for (args, named) in [
        (&["--json", &nowhere][..], "no/folder.json"),
        (&[], "/v1/models"),
        (&["--prompts", "no-such-file"], "no-such-file"),
        (&["--endpoint", "chat"], "ids"),
        (&["--arrivals", "poisson"], "--arrivals"),
        (&["--no-such-flag"], "--no-such-flag"),
    ] {
        let output = run(closed_port(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", output_text(&output));
        assert!(output_text(&output).contains(named), "{args:?}: {}", output_text(&output));
    }
    let garbage = folder.file("garbage.json");
    fs::write(&garbage, "[1]").unwrap();
    let output = program(&["report", &garbage, "--html", &folder.file("x.html")]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(output_text(&output).contains("garbage.json"), "{}", output_text(&output));
}

#[test]
fn a_sweep_names_its_knee() {
    let address = serve_bytes(|request| good_response(&request));
    let folder = Folder::new("sweep");
    let (url, json, html) = (format!("http://{address}"), folder.file("json"), folder.file("html"));
    let load =
        ["--model", "m", "--output-tokens", "2", "--metrics-url", "none", "--users", "1,2", "--step", "10"];
    let output =
        program(&["sweep", "--url", &url, "--json", &json, "--html", &html]).args(load).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", output_text(&output));
    let steps: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert!(steps.as_array().unwrap().iter().all(|step| step["completed"] == 10), "{steps}");
    assert!(output_text(&output).contains("1 user"), "{}", output_text(&output));
}
