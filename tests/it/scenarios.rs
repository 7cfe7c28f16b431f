//! Tests of the load tester's scenarios with `mainstem` as the server.

use crate::common::PATIENCE;
use load_tests::report::RunReport;
use load_tests::report::html::Section;
use load_tests::run::Progress;
use load_tests::scenario::{self, ScenarioOptions};
use std::path::Path;

fn options() -> ScenarioOptions {
    let program = env!("CARGO_BIN_EXE_mainstem").into();
    ScenarioOptions { start_timeout: PATIENCE, time_limit: PATIENCE, ..ScenarioOptions::new(program) }
}

/// Runs the smallest built-in scenario. Returns its progress lines and report sections.
fn tiny(options: &ScenarioOptions) -> anyhow::Result<(Vec<String>, Vec<Section>)> {
    let mut lines = Vec::new();
    let files = [Path::new("tiny")];
    let mut tell = |line: &str| lines.push(line.to_owned());
    let sections = scenario::run(&files, options, &Progress::default(), &mut tell)?;
    Ok((lines, sections))
}

fn steps(run: &RunReport) -> u64 {
    run.server.as_ref().and_then(|server| server.steps).expect("the server counts its steps")
}

/// Every policy completes the same requests; stepping each request alone takes one step per token, a fused
/// loop far fewer.
#[test]
fn every_policy_answers_the_same_requests() {
    let (lines, sections) = tiny(&options()).expect("the scenario runs");
    assert!(lines.iter().any(|line| line.contains("12 runs take about")), "{lines:?}");
    let [
        Section::Table { rows: head, .. },
        Section::Table { rows, .. },
        Section::Plot { .. },
        Section::Runs { runs, .. },
    ] = &sections[..]
    else {
        panic!("{sections:?}")
    };
    assert!(head.iter().any(|row| row[0] == "model" && row[1].contains("demo")), "{head:?}");
    assert!(!head.iter().any(|row| row[0] == "problem"), "{head:?}");
    assert!(rows.iter().flatten().all(|cell| cell != "-"), "{rows:?}");
    let labels: Vec<&str> = runs.iter().map(|run| run.label.as_str()).collect();
    assert_eq!(labels, ["fused", "no shuffle", "window", "concurrent"]);
    for run in runs {
        assert_eq!((run.counts.completed, run.counts.short), (8, 0), "{}", run.label);
        assert_eq!(run.output_tokens, runs[0].output_tokens, "{}", run.label);
    }
    let (fused, alone) = (steps(&runs[0]), steps(&runs[3]));
    assert!(alone >= runs[0].output_tokens && fused < alone, "{fused} steps, and {alone} alone");
}

#[test]
fn options_go_before_the_file() {
    let mut options = options();
    options.variants = vec!["fused".into()];
    options.token_scale = Some(0.5);
    options.repeats = 2;
    options.slots = Some(3);
    options.server_args = vec!["--served-model-name".into(), "renamed".into()];
    let (lines, sections) = tiny(&options).expect("the scenario runs");
    assert!(lines.iter().any(|line| line.contains("6 runs take about")), "{lines:?}");
    let [Section::Table { rows: head, .. }, .., Section::Runs { runs, .. }] = &sections[..] else {
        panic!("{sections:?}")
    };
    assert!(head.contains(&vec!["model".into(), "renamed".into()]), "{head:?}");
    assert!(head.iter().any(|row| row[1].contains("--slots 3")), "{head:?}");
    assert_eq!(runs.len(), 1);
    // Responses have 4 to 12 tokens instead of 8 to 24.
    assert!((32..=96).contains(&runs[0].output_tokens), "{}", runs[0].output_tokens);
}

#[test]
fn a_server_that_does_not_start_is_reported_with_its_output() {
    let mut options = options();
    options.model = Some("no/such/model".into());
    let error = format!("{:#}", tiny(&options).unwrap_err());
    for part in ["tiny: ", "the server ended with exit status: 1", "no/such/model"] {
        assert!(error.contains(part), "{error}");
    }
    options.variants = vec!["fastest".into()];
    let error = format!("{:#}", tiny(&options).unwrap_err());
    assert!(error.contains("unknown variant 'fastest'; the variants are fused, no shuffle"), "{error}");
}
