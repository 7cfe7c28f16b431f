//! Soak tests of `mainstem` with the load tester: mixed traffic, hang-ups, bad requests and injected faults.

use crate::common::PATIENCE;
use load_tests::run::Progress;
use load_tests::soak::{self, SoakOptions, SoakReport, SoakTarget};
use std::time::Duration;

/// Runs the built-in soak test in `rounds` rounds of two seconds.
fn run(rounds: u32, inject: Option<&str>, server_args: &[&str], rss_noise_bytes: Option<u64>) -> SoakReport {
    let target = SoakTarget::Program(env!("CARGO_BIN_EXE_mainstem").into());
    let options = SoakOptions {
        time: Some(Duration::from_secs(2) * rounds),
        rounds: Some(rounds),
        inject: inject.map(str::to_owned),
        server_args: server_args.iter().map(|arg| (*arg).to_owned()).collect(),
        start_timeout: PATIENCE,
        patience: PATIENCE,
        rss_noise_bytes,
        ..SoakOptions::new(target)
    };
    soak::run(&options, &Progress::default(), &mut |_| ()).expect("the servers start")
}

/// Nothing hangs here, and no step takes as long as the timeout, however slow the machine is: a step that
/// does would be a fault that was not injected. The memory has no time to settle.
#[test]
fn half_a_minute_of_everything_changes_nothing() {
    let faults = "fail@60,panic@150,nan@0.01,slow@0.01:20ms,seed=1";
    let report = run(12, Some(faults), &["--step-timeout", "1h"], Some(64 << 20));
    assert!(report.passed, "{}", report.text());
    for kind in ["fail", "panic", "nan", "slow"] {
        assert!(report.server.injected.contains_key(kind), "{kind}: {}", report.text());
    }
}

#[test]
#[ignore = "takes ten minutes"]
fn ten_minutes_of_everything_change_nothing() {
    let report = run(300, None, &[], None);
    assert!(report.passed, "{}", report.text());
}
