//! Tests of engines whose layers' weights are read from disk: answers are those of weights in memory, and
//! what happens to the store ends requests with an error at worst.

use crate::common::{
    Copied, Outcome, all_home, complete, complete_all, config, fixture, greedy, mainstem, prompt,
};
use crate::families::family;
use crate::http::Server;
use crate::quantize::Room;
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::request::{FinishReason, RequestError};
use serde_json::{Value as Json, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use toml::Value;

/// Starts an engine with a part of the layers' weights in memory, and the stores in a folder of the model's
/// copy.
async fn engine(model: &Copied, host: &str, settings: &[(&'static str, Value)]) -> Engine {
    let stores = model.file("stores").display().to_string();
    let tiers = [("tiers.host", host.into()), ("tiers.disk_path", stores.into())];
    start::start_engine(&config(&model.0, &[settings, &tiers].concat())).await.expect("the engine starts")
}

/// Returns the data files of the stores of a model's copy.
fn data_files(model: &Copied) -> Vec<PathBuf> {
    let stores = model.file("stores").read_dir().into_iter().flatten().flatten();
    stores.map(|store| store.path().join("weights.bin")).filter(|file| file.exists()).collect()
}

async fn answers(engine: &Engine) -> Vec<Vec<u32>> {
    let words = |i| prompt(i, 10 + 7 * i).into_iter().map(|id| 8 + id % 88).collect::<Vec<u32>>();
    let outcomes = complete_all(engine, (0..6).map(|i| greedy(&words(i), 8))).await;
    for outcome in &outcomes {
        assert_eq!(outcome.end, Some(Ok(FinishReason::Length)));
    }
    outcomes.iter().map(Outcome::ids).collect()
}

#[actix::test]
async fn answers_equal_those_of_weights_in_memory() {
    let dense = Copied::of("gqa", "offload-answers");
    let mixture = family("mixtral", "offload-answers");
    let latent = family("deepseek_v2", "offload-answers");
    for (model, devices, experts) in [
        (&dense, "cpu:0", "column"),
        (&dense, "cpu:0;cpu:1", "column"),
        (&dense, "cpu:0&cpu:1", "column"),
        (&mixture, "cpu:0", "column"),
        (&mixture, "cpu:0&cpu:1", "column"),
        (&mixture, "cpu:0&cpu:1", "expert"),
        (&latent, "cpu:0", "column"),
    ] {
        let settings = [
            ("device.groups", devices.into()),
            ("device.experts", experts.into()),
            ("device.threads", 1.into()),
            ("scheduler.token_budget", 12.into()),
        ];
        let resident = engine(model, "all", &settings).await;
        let expected = answers(&resident).await;
        resident.stop();
        for (host, kv, rows) in [("0", "0%", 5), ("20%", "40%", 3), ("100%", "all", 512)] {
            let added = [("scheduler.batch_rows", rows.into()), ("tiers.kv", kv.into())];
            let offloaded = engine(model, host, &[&settings[..], &added].concat()).await;
            // The second time, leading pages of the prompts are found.
            for _ in 0..2 {
                let found = answers(&offloaded).await;
                assert_eq!(found, expected, "{devices}, {experts}, {host}, {kv}, {rows} rows at once");
            }
            let report = offloaded.report();
            let stores = report.lines().filter(|line| line.starts_with("store ")).count();
            assert_eq!(stores, devices.matches(":").count(), "{report}");
            let has_pool = model.0 != dense.0 && host != "100%";
            assert_eq!(report.contains("\nexperts "), has_pool, "{report}");
            all_home(&offloaded, 4).await;
            offloaded.stop();
        }
    }
}

/// No store is written for a model that fits.
#[actix::test]
async fn a_model_that_fits_stays_in_memory() {
    let model = Copied::of("gqa", "offload-auto");
    let engine = engine(&model, "auto", &[]).await;
    assert!(!engine.report().contains("\noffload "), "{}", engine.report());
    answers(&engine).await;
    engine.stop();
    assert_eq!(data_files(&model), [] as [PathBuf; 0]);
}

/// A store that is damaged while the engine runs ends the requests in flight, and is written anew.
#[actix::test]
async fn a_store_that_cannot_be_read_fails_requests_and_is_written_anew() {
    let model = Copied::of("gqa", "offload-fault");
    let engine = engine(&model, "20%", &[]).await;
    let expected = answers(&engine).await;
    for _ in 0..2 {
        let [data] = &data_files(&model)[..] else { panic!("one device has one store") };
        let file = std::fs::File::options().write(true).open(data).expect("it can be written");
        file.set_len(4096).expect("it can be cut");
        let outcomes = complete_all(&engine, (0..6).map(|i| greedy(&prompt(i, 10), 12))).await;
        let failed = outcomes.iter().filter(|outcome| {
            let end = outcome.end.as_ref();
            matches!(end, Some(Err(RequestError::DeviceFailed(why))) if why.contains("cannot read"))
        });
        assert!((1..=4).contains(&failed.count()), "{outcomes:?}");
        assert_eq!(answers(&engine).await, expected);
    }
    all_home(&engine, 4).await;
    engine.stop();
}

/// A KV cache whose file is cut while the engine runs ends the requests in flight; others find another file.
#[cfg(target_os = "linux")]
#[actix::test]
async fn a_cache_that_cannot_be_read_fails_requests() {
    let model = Copied::of("gqa", "offload-cache-fault");
    let engine = engine(&model, "all", &[("tiers.kv", "0%".into())]).await;
    assert!(engine.report().contains("\nkv on disk "), "{}", engine.report());
    let expected = answers(&engine).await;
    let again = || (0..4).map(|i| greedy(&prompt(i, 60), 12));
    complete_all(&engine, again()).await;
    let folder = model.file("stores");
    let is_named = |why: &String| why.contains("cannot read the KV cache");
    // What is written after the cut makes the file longer again.
    let mut has_failed = false;
    for _ in 0..20 {
        for descriptor in Path::new("/proc/self/fd").read_dir().expect("there are files").flatten() {
            if std::fs::read_link(descriptor.path()).is_ok_and(|file| file.starts_with(&folder)) {
                let file = std::fs::File::options().write(true).open(descriptor.path()).expect("it is open");
                file.set_len(0).expect("it can be cut");
            }
        }
        // Their leading pages are known.
        let ends = complete_all(&engine, again()).await.into_iter().filter_map(|outcome| outcome.end);
        let failed = ends.filter(|end| matches!(end, Err(RequestError::DeviceFailed(why)) if is_named(why)));
        has_failed |= failed.count() > 0;
        if has_failed {
            break;
        }
    }
    assert!(has_failed);
    assert_eq!(answers(&engine).await, expected);
    all_home(&engine, 4).await;
    engine.stop();
}

/// The memory for caches follows from a size of the whole cache.
#[test]
fn a_size_of_caches_in_memory_needs_a_number_of_tokens() {
    let memory = |flags: &[&str]| inspect(&fixture("gqa"), flags)["memory"].clone();
    let bytes = |memory: &Json, key: &str| memory[key].as_u64().unwrap_or_else(|| panic!("{memory}: {key}"));
    let all = memory(&["--kv-size", "4096 tokens"]);
    let flags = ["--kv-size", "4096 tokens", "--disk-path", "/nowhere/stores", "--kv-memory"];
    for (value, is_on_disk) in [("0", true), ("1KiB", true), ("1GiB", false), ("auto", false), ("0%", true)] {
        let found = memory(&[&flags[..], &[value]].concat());
        let on_disk = bytes(&found, "kv_on_disk");
        assert_eq!(on_disk > 0, is_on_disk, "{value}: {found}");
        assert!(bytes(&found, "kv") + on_disk >= bytes(&all, "kv"), "{value}: {found}");
    }
    let output = mainstem().arg("inspect").arg(fixture("gqa")).args(["--kv-memory", "1GiB"]).output();
    let error = String::from_utf8(output.expect("it starts").stderr).expect("it is text");
    assert!(error.contains("tiers.kv: a size needs kv.size as a number of tokens"), "{error}");
}

/// Bytes that have changed are noticed when they are first read.
#[actix::test]
async fn a_store_that_has_changed_is_written_anew() {
    let model = Copied::of("gqa", "offload-changed");
    let first = engine(&model, "0", &[]).await;
    let expected = answers(&first).await;
    first.stop();
    let [data] = &data_files(&model)[..] else { panic!("one device has one store") };
    let mut bytes = std::fs::read(data).expect("it is there");
    bytes[9] ^= 1;
    std::fs::write(data, bytes).expect("it can be written");
    let engine = engine(&model, "0", &[]).await;
    let outcome = complete(&engine, greedy(&prompt(1, 10), 4)).await;
    let is_noticed = |why: &String| why.contains("has changed; the next start writes it anew");
    assert!(
        matches!(&outcome.end, Some(Err(RequestError::DeviceFailed(why))) if is_noticed(why)),
        "{outcome:?}"
    );
    assert_eq!(answers(&engine).await, expected);
    engine.stop();
}

#[actix::test]
async fn a_folder_that_cannot_be_written_is_named() {
    let model = Copied::of("gqa", "offload-folder");
    std::fs::write(model.file("stores"), "a file").expect("it can be written");
    let stores = model.file("stores").display().to_string();
    let settings = [("tiers.host", "0".into()), ("tiers.disk_path", stores.clone().into())];
    let error = start::start_engine(&config(&model.0, &settings)).await.err().expect("it fails");
    let error = format!("{error:#}");
    assert!(error.contains("tiers.disk_path") && error.contains(&stores), "{error}");
}

fn inspect(model: &Path, flags: &[&str]) -> Json {
    let output = mainstem().arg("inspect").arg(model).arg("--json").args(flags).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

#[test]
fn inspect_says_where_weights_lie() {
    let bytes = |memory: &Json, key: &str| memory[key].as_u64().unwrap_or_else(|| panic!("{memory}: {key}"));
    let all = inspect(&fixture("gqa"), &[])["memory"].clone();
    assert_eq!(all["offload"], Json::Null);
    let flags = ["--host-memory", "30%", "--disk-path", "/nowhere/stores"];
    let memory = inspect(&fixture("gqa"), &flags)["memory"].clone();
    let [resident, streamed, buffers] =
        ["resident", "streamed", "buffers"].map(|key| bytes(&memory["offload"], key));
    assert!(resident > 0 && resident * 10 <= (resident + streamed) * 3, "{memory}");
    assert_eq!(bytes(&memory, "weights") + streamed, bytes(&all, "weights") + buffers, "{memory}");
    let store = memory["offload"]["stores"][0].as_str().expect("a path");
    assert!(store.starts_with("/nowhere/stores/gqa-"), "{store}");
    let sized = inspect(&fixture("gqa"), &["--host-memory", &(resident + 1).to_string()]);
    let kept = bytes(&sized["memory"]["offload"], "resident");
    assert!(kept <= resident + 1 && kept > 0, "{sized}");
    assert_eq!(memory["offload"]["experts"], Json::Null, "{memory}");
}

/// The experts of a mixture have a pool instead of a part that stays.
#[test]
fn inspect_says_how_large_the_pool_of_experts_is() {
    let bytes = |memory: &Json, key: &str| memory[key].as_u64().unwrap_or_else(|| panic!("{memory}: {key}"));
    let model = fixture("families/mixtral");
    let all = inspect(&model, &[])["memory"].clone();
    let memory =
        inspect(&model, &["--host-memory", "90%", "--disk-path", "/nowhere/stores"])["memory"].clone();
    let offload = &memory["offload"];
    let [streamed, buffers] = ["streamed", "buffers"].map(|key| bytes(offload, key));
    let keys = ["experts", "bytes", "pool_experts", "pool"];
    let [experts, expert_bytes, pool_experts, pool] = keys.map(|key| bytes(&offload["experts"], key));
    assert!(experts == 10 && (5..10).contains(&pool_experts) && pool > 0, "{memory}");
    let weights = bytes(&memory, "weights") + streamed + expert_bytes;
    assert_eq!(weights, bytes(&all, "weights") + buffers + pool, "{memory}");
    let output =
        mainstem().arg("inspect").arg(&model).args(["--host-memory", "0"]).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("for 5 of 10 experts"), "{text}");
}

/// Matrices are divided by rows, but a tensor is listed once, and an override is for all of it.
#[test]
fn inspect_lists_each_tensor_once_and_overrides_match_all_of_it() {
    let model = Path::new("synthetic:110M");
    let flags = ["--tensors", "--disk-path", "/nowhere", "--kv-size", "1024 tokens"];
    let with = |more: &[&str]| inspect(model, &[&flags[..], more].concat());
    let (all, part) = (with(&[]), with(&["--host-memory", "30%"]));
    assert_eq!(all["tensors"], part["tensors"]);
    let listed = all["tensors"].as_array().expect("a list");
    let bytes = |of: &Json, key: &str| of[key].as_u64().unwrap_or_else(|| panic!("{of}: {key}"));
    let is_matrix = |tensor: &&Json| {
        tensor["layer"].is_u64() && tensor["shape"].as_array().is_some_and(|shape| shape.len() == 2)
    };
    let matrices: Vec<&Json> = listed.iter().filter(is_matrix).collect();
    let sum = |tensors: &[&Json]| tensors.iter().map(|tensor| bytes(tensor, "bytes")).sum::<u64>();
    let names: HashSet<&str> = listed.iter().filter_map(|tensor| tensor["name"].as_str()).collect();
    assert!(names.len() == listed.len() && matrices.len() > 50, "{} tensors", listed.len());
    let largest = matrices.iter().map(|tensor| bytes(tensor, "bytes")).max().expect("there are some");
    assert!(largest > 2 << 20, "a matrix of {largest} bytes is divided");
    // The layout on the device may be larger.
    let on_disk = |more: &[&str]| bytes(&with(more)["memory"]["offload"], "streamed");
    let layers = on_disk(&["--host-memory", "0"]);
    let padded = |bytes: u64| bytes as f64 * layers as f64 / sum(&matrices) as f64;
    for (pattern, count) in [(r"layers\.3\.mlp\.down_proj", 1), (r"q_proj", 12), (r"layers\.1\.", 7)] {
        let expression = regex::Regex::new(pattern).expect("it is one");
        let matches = |tensor: &&&Json| expression.is_match(tensor["name"].as_str().expect("a name"));
        let chosen: Vec<&Json> = matrices.iter().filter(matches).copied().collect();
        assert_eq!(chosen.len(), count, "{pattern}");
        let found = on_disk(&["--override-tensor", &format!("{pattern}=disk")]);
        let wanted = padded(sum(&chosen));
        assert!((found as f64 - wanted).abs() < 0.01 * wanted, "{pattern}: {found} instead of {wanted}");
    }
}

/// The report at start counts tensors, not ranges of their rows.
#[actix::test]
async fn the_report_at_start_counts_each_tensor_once() {
    let (room, model) = (Room::new("offload-report"), Path::new("synthetic:110M"));
    let count = |engine: &Engine| {
        let report = engine.report();
        let line = report.lines().find(|line| line.starts_with("weights ")).expect("there is one");
        line.split_once(" in ").map(|(_, count)| count.to_owned())
    };
    let mut reports = Vec::new();
    for host in ["all", "30%"] {
        let stores = room.0.display().to_string();
        let tiers = [("tiers.host", host.into()), ("tiers.disk_path", stores.into())];
        let engine = start::start_engine(&config(model, &tiers)).await.expect("the engine starts");
        reports.push((count(&engine), engine.report()));
        engine.stop();
    }
    assert!(reports[0].0.is_some() && reports[0].0 == reports[1].0, "{reports:?}");
    assert!(reports[1].1.contains("\noffload "), "{reports:?}");
}

/// Requests in flight are answered with an error, later ones as before.
#[test]
fn a_server_whose_store_cannot_be_read_answers_later_requests() {
    let model = Copied::of("gqa", "offload-server");
    let stores = model.file("stores").display().to_string();
    let flags = ["--host-memory", "0", "--disk-path", &stores, "--slots", "2"];
    let server = Server::with_model(&model.0, &flags);
    let ask = |ignored: usize| {
        let prompt = [5, 17, 23, 40 + ignored % 2];
        server.post(json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true}))
    };
    let [expected, other] = [0, 1].map(|number| {
        let (status, answer) = ask(number);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].clone()
    });
    for _ in 0..2 {
        let [data] = &data_files(&model)[..] else { panic!("one device has one store") };
        let file = std::fs::File::options().write(true).open(data).expect("it can be written");
        file.set_len(4096).expect("it can be cut");
        let (status, failed) = ask(0);
        assert_eq!((status, failed["error"]["code"].as_str()), (500, Some("device_failed")), "{failed}");
        let message = failed["error"]["message"].as_str().expect("it has one");
        assert!(message.contains("cannot read") && message.contains("weights.bin"), "{failed}");
        for (number, text) in [(0, &expected), (1, &other)] {
            let (status, answer) = ask(number);
            assert_eq!((status, &answer["choices"][0]["text"]), (200, text), "{answer}");
        }
    }
}

/// Inspects a model that cannot be started, and returns the error.
fn inspect_error(model: &Path, flags: &[&str]) -> String {
    let output = mainstem().arg("inspect").arg(model).args(flags).output().expect("it starts");
    assert!(!output.status.success(), "{flags:?}");
    String::from_utf8(output.stderr).expect("it is text")
}

/// Rows cross the link instead of pages, or, of V, positions that tokens attend to. Others may be in a file.
#[actix::test]
async fn attention_in_host_memory_gives_the_same_answers() {
    let model = &Copied::of("gqa", "attend-on-host");
    for (devices, attended) in [("cpu:0", 1.0), ("cpu:0&cpu:1", 1.0), ("cpu:0", 0.2)] {
        let settings = [
            ("device.groups", devices.into()),
            ("scheduler.token_budget", 40.into()),
            ("kv.sparse_attention", attended.into()),
        ];
        let resident = engine(model, "all", &settings).await;
        let expected = answers(&resident).await;
        resident.stop();
        for (attend_on, host_kv) in [("host", "all"), ("host", "60%"), ("device", "all")] {
            let tiers = [
                ("device.memory", "64MiB".into()),
                ("device.link", "8GB/s".into()),
                ("kv.size", "1024 tokens".into()),
                ("tiers.kv", "0%".into()),
                ("tiers.host_kv", host_kv.into()),
                ("tiers.attend_on", attend_on.into()),
            ];
            let placed = engine(model, "all", &[&settings[..], &tiers].concat()).await;
            for _ in 0..2 {
                let found = answers(&placed).await;
                assert_eq!(found, expected, "{devices}, {attended}, {attend_on}, {host_kv}");
            }
            let report = placed.report();
            let on_host = report.lines().find(|line| line.starts_with("kv on host ")).expect("some");
            let is_there = on_host.ends_with("MiB of layers, whose attention is computed there");
            assert_eq!(is_there, attend_on == "host", "{report}");
            all_home(&placed, 4).await;
            placed.stop();
        }
    }
}

/// The sum that the error names is enough, and a byte less is not.
#[actix::test]
async fn a_device_memory_that_is_too_small_names_the_least_that_works() {
    let model = Copied::of("gqa", "device-memory");
    let resident = engine(&model, "all", &[]).await;
    let expected = answers(&resident).await;
    resident.stop();
    let with = |memory: u64, devices: &'static str, weights: &'static str| {
        let stores = model.file("stores").display().to_string();
        config(
            &model.0,
            &[
                ("device.memory", memory.to_string().into()),
                ("device.groups", devices.into()),
                ("kv.size", "512 tokens".into()),
                ("tiers.device", weights.into()),
                ("tiers.disk_path", stores.into()),
            ],
        )
    };
    for devices in ["cpu:0", "cpu:0;cpu:1"] {
        let least_of = |error: String| {
            let named = error.split_once("device.memory must be at least ").and_then(|(_, text)| {
                let (number, _) = text.split_once(" bytes: ")?;
                number.parse::<u64>().ok()
            });
            named.unwrap_or_else(|| panic!("{error}"))
        };
        let (mut least, mut tries) = (1000, 0);
        let engine = loop {
            match start::start_engine(&with(least, devices, "0%")).await {
                Ok(engine) => break engine,
                Err(error) => least = least_of(format!("{error:#}")),
            }
            tries += 1;
            assert!(tries <= devices.split(';').count(), "each device has its own least");
        };
        let failed =
            start::start_engine(&with(least - 1, devices, "0%")).await.err().expect("it is too small");
        assert_eq!(least_of(format!("{failed:#}")), least);
        assert!(
            engine.report().contains(" copied from the host and 0.0 MiB read from disk"),
            "{}",
            engine.report()
        );
        assert_eq!(answers(&engine).await, expected);
        all_home(&engine, 4).await;
        engine.stop();
        let all = start::start_engine(&with(1 << 30, devices, "auto")).await.expect("all of it fits");
        assert!(!all.report().contains("\noffload "), "{}", all.report());
        all.stop();
    }
}

#[test]
fn inspect_says_what_is_on_the_device_on_the_host_and_on_disk() {
    let bytes = |memory: &Json, key: &str| memory[key].as_u64().unwrap_or_else(|| panic!("{memory}: {key}"));
    let memory = |model: &Path, flags: &[&str]| {
        let flags = [&["--disk-path", "/nowhere", "--kv-size", "4096 tokens"], flags].concat();
        inspect(model, &flags)["memory"].clone()
    };
    let parts = |memory: &Json| ["resident", "host", "streamed"].map(|key| bytes(&memory["offload"], key));
    let (dense, own) = (fixture("gqa"), "--device-memory=1GiB");
    let percents = memory(&dense, &[own, "--percent", "30,40,0,50,100,0"]);
    let [device, host, disk] = parts(&percents);
    let all = device + host + disk;
    assert!(device * 10 <= all * 3 && host * 10 <= all * 4 && device * host * disk > 0, "{percents}");
    assert!(bytes(&percents, "kv_on_host") > 0 && bytes(&percents, "kv_on_disk") > 0, "{percents}");
    let [pages, rows] = ["device", "host"].map(|place| {
        let memory = memory(&dense, &[own, "--percent", "100,0,0,100,100,0", "--attend-on", place]);
        ["kv", "kv_on_host"].map(|key| bytes(&memory, key))
    });
    assert!(pages[0] > 0 && rows == [0, pages[1]], "{pages:?} {rows:?}");
    let error = inspect_error(&dense, &["--attend-on", "host"]);
    assert!(error.contains("tiers.attend_on") && error.contains("requires device.memory"), "{error}");
    let flexgen = memory(&dense, &[own, "--percent", "0,50,100,0,100,0", "--tier-rule", "midpoint"]);
    let [device, host, disk] = parts(&flexgen);
    assert!(device == 0 && host > 0 && disk > 0 && bytes(&flexgen, "kv_on_host") == 0, "{flexgen}");
    let on_disk = memory(&dense, &["--override-tensor", r"layers\.0\.mlp\.down=disk"]);
    let [device, host, disk] = parts(&on_disk);
    assert!(device > disk && host == 0 && disk > 0, "{on_disk}");
    let error = inspect_error(&dense, &["--override-tensor", "nothing=disk"]);
    assert!(error.contains("tiers.overrides: 'nothing' matches no matrix of the layers"), "{error}");
    let mixture = family("mixtral", "offload-tiers");
    let [device, host, disk] = parts(&memory(&mixture.0, &[own, "--cpu-moe"]));
    assert!(device > 0 && host > device && disk == 0, "{device} {host} {disk}");
    let error = inspect_error(&dense, &[own, "--cpu-moe"]);
    assert!(error.contains("tiers.cpu_moe: ") && error.contains(" has no experts"), "{error}");
}
