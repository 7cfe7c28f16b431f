//! Soak tests of `mainstem` with the load tester: mixed traffic, hang-ups, bad requests and injected faults.

use crate::common::PATIENCE;
use load_tests::run::Progress;
use load_tests::soak::{self, Kind, SoakOptions, SoakTarget};
use std::time::Duration;

/// Returns the options of the built-in soak test in `rounds` rounds of two seconds. Nothing hangs here, and
/// no step takes as long as the timeout, however slow the machine is: a step that does would be a fault that
/// was not injected.
fn options(rounds: u32) -> SoakOptions {
    SoakOptions {
        time: Some(Duration::from_secs(2) * rounds),
        rounds: Some(rounds),
        server_args: ["--step-timeout", "1h"].map(str::to_owned).into(),
        start_timeout: PATIENCE,
        patience: PATIENCE,
        ..SoakOptions::new(SoakTarget::Program(env!("CARGO_BIN_EXE_mainstem").into()))
    }
}

/// The memory has little time to settle, so it may grow by more than in the test of an hour.
#[test]
fn half_a_minute_of_everything_changes_nothing() {
    let faults = "fail@60,panic@150,fail@0.004,panic@0.004,nan@0.01,slow@0.01:20ms,seed=1";
    let options =
        SoakOptions { inject: Some(faults.to_owned()), rss_noise_bytes: Some(16 << 20), ..options(12) };
    let report = soak::run(&options, &Progress::default(), &mut |_| ()).expect("the servers start");
    println!("{}", report.text());
    assert!(report.passed, "{}", report.text());
    for kind in ["fail", "panic", "nan", "slow"] {
        assert!(report.server.injected.contains_key(kind), "{kind}: {}", report.text());
    }
    // The quarters that are compared have faults between them.
    let rebuilds = |round: usize| report.samples[round].restarts;
    assert!(rebuilds(5) < rebuilds(11), "{}", report.text());
    assert!(report.skipped.iter().all(|kind| *kind == Kind::Embeddings), "{:?}", report.skipped);
}

/// An answer that was recorded of a server with faults need not be the right one.
#[test]
fn faults_of_the_server_that_is_to_have_none_end_the_test() {
    let config = std::env::temp_dir().join(format!("mainstem-{}-faults.toml", std::process::id()));
    for (fault, words) in [("nan@3", "sampling_failed"), ("slow@3:1ms", "is to have no faults had some")] {
        let text = format!("[faults]\nenabled = true\ninject = \"{fault}\"\n");
        std::fs::write(&config, text).expect("a temporary file");
        let own = ["--config".to_owned(), config.display().to_string()];
        let options = SoakOptions { server_args: own.into(), ..options(8) };
        let error = soak::run(&options, &Progress::default(), &mut |_| ()).expect_err(fault);
        assert!(format!("{error:#}").contains(words), "{fault}: {error:#}");
    }
    let _ = std::fs::remove_file(config);
}
