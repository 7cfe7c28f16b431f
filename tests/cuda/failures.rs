//! Checks of GPUs that fail, have too little memory, or are not there.
//!
//! Invariant: a failure is an error with its reason, and what can go on does.

use crate::common::{complete, complete_all, config, fixture};
use crate::numbers::{answers, assert_same, on, requests, start_on, with_actors};
use mainstem::cli::start;
use mainstem::request::RequestError;
use std::path::Path;
use toml::Value;

/// Requests that may be needed until one of them meets the injected failure.
const PATIENCE: usize = 60;

/// Checks that a request fails once, with these words, and that all others are answered as before.
async fn fail_once(devices: &str, more: &[(&'static str, Value)], words: &str) {
    let (model, requests) = (fixture("gqa"), requests(2, false));
    let engine = start_on(&model, &on(devices, more)).await;
    let first = complete(&engine, requests[1].clone()).await;
    assert!(matches!(first.end, Some(Ok(_))), "{:?}", first.end);
    let mut failures = 0;
    for _ in 0..PATIENCE {
        let got = complete(&engine, requests[1].clone()).await;
        match &got.end {
            Some(Err(RequestError::DeviceFailed(why))) => {
                assert!(why.contains(words), "{why}");
                failures += 1;
            }
            _ => assert_eq!((&got.end, got.ids()), (&first.end, first.ids())),
        }
        if failures > 0 {
            break;
        }
    }
    assert_eq!(failures, 1, "the injected failure came in no step");
    let again = complete_all(&engine, requests.iter().cloned()).await;
    assert_eq!((&again[1].end, again[1].ids()), (&first.end, first.ids()));
    engine.stop();
}

/// The step ends with the error, and the GPU is built anew.
pub fn a_failed_launch() {
    with_actors(fail_once("cuda:0", &[], "unspecified launch failure"));
}

/// The failure of a rank is that of its group: the other GPU is in a collective meanwhile.
pub fn a_failed_rank() {
    with_actors(fail_once("cuda:0&cuda:1", &[], "illegal"));
}

/// A kernel that does not end: its thread is abandoned, and another one builds the GPU beside it.
pub fn a_hang() {
    with_actors(fail_once("cuda:0", &[("device.step_timeout", "5s".into())], "no step"));
}

/// Returns the error with which an engine does not start.
async fn refusal(model: &Path, settings: &[(&'static str, Value)]) -> String {
    match start::start_engine(&config(model, settings)).await {
        Ok(_) => panic!("the engine starts"),
        Err(error) => format!("{error:#}"),
    }
}

/// An allocation that fails while the model is loaded.
pub fn no_memory() {
    with_actors(async {
        let error = refusal(&fixture("gqa"), &on("cuda:0", &[])).await;
        assert!(error.contains("cuda:0") && error.contains("out of memory"), "{error}");
    });
}

/// The KV cache takes nine tenths of what weights, steps and the driver leave on the GPU with the least
/// memory, and that of the host does not count.
pub fn memory() {
    with_actors(async {
        let sizes = [
            ("scheduler.slots", 4096.into()),
            ("scheduler.token_budget", 4100.into()),
            ("kv.size", "auto".into()),
        ];
        let pages = async |devices: &str| {
            let config = config(&fixture("gqa"), &on(devices, &sizes));
            let prepared = start::prepare(&config).await.expect("the model fits");
            let reports = start::forecast(&prepared.device, &prepared.source, &prepared.setup);
            let reports = reports.expect("sizes are known").concat();
            let taken: Vec<usize> = reports.iter().map(|report| report.total_bytes()).collect();
            (prepared.setup.kv.pages, taken)
        };
        let (own, taken) = pages("cuda:0").await;
        // The driver's own memory is not ours: code, and the rest of the 2 MiB that each large buffer takes.
        assert!((20 << 20..40 << 20).contains(&taken[0]), "{taken:?}");
        let (both, taken) = pages("cuda:0;cuda:1").await;
        assert!(both > own && taken.iter().all(|bytes| (20 << 20..40 << 20).contains(bytes)), "{taken:?}");
        // The second stage has the logits, so it limits the pages of two GPUs.
        let (hybrid, taken) = pages("cuda:0;cpu").await;
        assert!(hybrid > both && (20 << 20..40 << 20).contains(&taken[0]), "{hybrid} of {both}, {taken:?}");
        // It can be allocated, and is used.
        let settings = on("cuda:0", &[("kv.size", "auto".into())]);
        let requests = requests(3, false);
        let first = answers(&fixture("gqa"), &settings, &requests).await;
        assert_same("again", &answers(&fixture("gqa"), &settings, &requests).await, &first);
    });
}

/// A model that is too large for a GPU is refused before it is loaded.
pub fn small_memory() {
    with_actors(async {
        let sizes = [("scheduler.slots", 1024.into()), ("scheduler.token_budget", 4096.into())];
        let error = refusal(&fixture("gqa"), &on("cuda:0", &sizes)).await;
        assert!(error.contains("on cuda:0") && error.contains("available there"), "{error}");
    });
}

/// Settings that cannot be used are errors with their names.
pub fn what_is_missing() {
    with_actors(async {
        let gqa = fixture("gqa");
        for (devices, key, value, words) in [
            ("cuda:2", "kv.type", "f32", &["device.groups: cuda:2", "the driver finds 2"][..]),
            ("cuda:0", "device.nvrtc", "/nowhere", &["cuda:0", "device.nvrtc: /nowhere"]),
            ("cuda:0", "tiers.host", "0", &["device.groups: cuda:0", "tiers.host"]),
            ("cuda:0;cuda:1", "tiers.placement", "auto", &["device.groups", "GPUs"]),
        ] {
            let error = refusal(&gqa, &on(devices, &[(key, value.into())])).await;
            assert!(words.iter().all(|word| error.contains(word)), "{devices}, {key}: {error}");
        }
    });
}
