//! Tests of plans of a placement, and of the policy files that they write. Speeds are not tested.

use crate::common::{Copied, fixture, mainstem};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::{fs, str};

/// A folder for the rates of this machine and for files, removed on drop.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let folder = std::env::temp_dir().join(format!("mainstem-plan-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("the folder is made");
        Place(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn run(&self, args: &[&str]) -> Output {
        let command = &mut mainstem();
        let command = command.env("XDG_CACHE_HOME", &self.0).args(args);
        command.output().expect("the program starts")
    }

    /// Returns the JSON that the program prints.
    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
    }

    /// Returns the message of a run that fails with this exit code.
    fn error(&self, args: &[&str], code: i32) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output.stdout));
        text(&output.stderr).to_owned()
    }

    /// Returns the files of rates.
    fn rates(&self) -> Vec<PathBuf> {
        let folder = self.0.join("mainstem/machine").read_dir().into_iter().flatten().flatten();
        folder.map(|file| file.path()).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("it is text")
}

const SMALL: [&str; 8] = ["--requests", "6", "--prompt", "24", "--output", "8", "--disk", "1GB/s"];

/// Writes requests of a batch, and returns the paths of the input and the output.
fn batch_files(place: &Place, name: &str) -> [String; 2] {
    let line = |id: usize| {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0});
        json!({"custom_id": id.to_string(), "method": "POST", "url": "/v1/completions", "body": body})
            .to_string()
    };
    let [input, output] = ["in", "out"].map(|kind| place.file(&format!("{name}-{kind}.jsonl")));
    fs::write(&input, (0..4).map(line).collect::<Vec<_>>().join("\n")).expect("the input is written");
    [input, output]
}

/// A plan is made of rates that are measured once, its policy is what other commands run with, and no other
/// model takes it.
#[test]
fn a_policy_is_planned_written_and_used() {
    let place = Place::new("used");
    let policy = place.file("policy.toml");
    let plan = [&["plan", "demo", "--json", "--threads", "1", "--write", &policy][..], &SMALL].concat();
    let planned = place.json(&plan);
    let best = &planned["policy"];
    assert!(best["memory"].as_f64() <= planned["tiers"][0]["bytes"].as_f64(), "{planned}");
    assert!(best["job_tokens_per_second"].as_f64() > Some(0.0), "{planned}");
    assert_eq!((&best["resident"], &best["settings"]["tiers.host"]), (&json!(true), &json!("all")));
    let slots = best["slots"].as_u64().expect("it has slots");
    // A sequence of the whole context has a place, unless none is so long.
    assert_eq!(best["settings"]["kv.size"], format!("{} tokens", (slots * 32).max(1024)));
    assert_eq!(planned["longest_request"], 1024);
    let short = place.json(&[&plan[..], &["--max-context", "64"]].concat());
    let slots_of_short = short["policy"]["slots"].as_u64().expect("it has slots");
    assert_eq!(short["policy"]["settings"]["kv.size"], format!("{} tokens", (slots_of_short * 32).max(64)));
    assert!(!planned["next_best"].as_array().expect("it is a list").is_empty(), "{planned}");

    // The machine is measured once.
    let [rates] = &place.rates()[..] else { panic!("{:?}", place.rates()) };
    let measured = fs::read(rates).expect("there are rates");
    assert_eq!(place.json(&plan)["policy"], *best);
    assert_eq!(fs::read(rates).expect("there are rates"), measured);

    let [input, output] = batch_files(&place, "used");
    let batch = ["batch", "demo", &input, &output, "--threads", "1", "--policy-file", &policy, "--json"];
    let summary = place.json(&batch);
    assert_eq!(summary["ok"], 4);
    let ratio = summary["predicted"]["measured_by_predicted"].as_f64();
    assert!(ratio.is_some_and(|ratio| ratio > 0.0 && ratio.is_finite()), "{summary}");
    let inspected = place.json(&["inspect", "demo", "--json", "--policy-file", &policy]);
    assert_eq!(inspected["memory"]["slots"], slots);

    let other = fixture("gqa").display().to_string();
    for command in [&["inspect"][..], &["bench", "--decode", "1"]] {
        let error = place.error(&[command, &[&other, "--policy-file", &policy]].concat(), 1);
        assert!(error.contains("the policy is for the model mainstem-demo with"), "{error}");
    }
    let error = place.error(&["inspect", "demo", "--policy-file", &input], 1);
    assert!(error.contains("in.jsonl"), "{error}");
}

/// Weights that do not fit into memory are read from disk, and a model that does not fit even so is refused.
#[test]
fn a_small_memory_needs_the_disk() {
    let place = Place::new("memory");
    let copied = Copied::of("gqa", "plan-memory");
    let model = copied.0.to_str().expect("the path is text");
    let plan = |memory: &str| {
        let args = ["plan", model, "--json", "--threads", "1", "--memory", memory];
        [&args[..], &SMALL].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let of = |memory: String| plan(&memory);
    let run = |args: &[String]| place.json(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let ample = run(&of("4GiB".to_owned()));
    assert_eq!(ample["policy"]["resident"], true);
    // Down to what is too little, a smaller memory takes longer, and no plan takes more than is usable.
    let (mut before, mut streamed) = (0.0, 0);
    for kib in [2048, 1024, 768, 640, 512, 448, 384, 320, 256, 192, 128] {
        let args = of(format!("{kib}KiB"));
        let output = place.run(&args.iter().map(String::as_str).collect::<Vec<_>>());
        if output.status.code() != Some(0) {
            let error = text(&output.stderr);
            assert!(error.contains("no policy fits into") && error.contains("needs at least"), "{error}");
            break;
        }
        let planned: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
        let best = &planned["policy"];
        assert!(best["memory"].as_f64() <= planned["tiers"][0]["bytes"].as_f64(), "{kib}: {planned}");
        let seconds = best["job_seconds"].as_f64().expect("it has a time");
        assert!(seconds >= before, "{kib} KiB: {seconds}, {before}");
        before = seconds;
        streamed += usize::from(best["resident"] == false);
    }
    assert!(streamed > 0 || before == 0.0, "nothing was read from disk");
    let error = place
        .error(&["plan", model, "--memory", "1KiB", "--disk", "1GB/s", "--prompt", "8", "--output", "8"], 1);
    assert!(error.contains("no policy fits into 0 MiB of memory: the model needs at least"), "{error}");
}

/// With little memory and a fast disk, more sequences run at once if caches are on disk.
#[test]
fn caches_are_on_disk_if_this_pays() {
    let place = Place::new("caches");
    let disk = place.file("stores");
    let [input, output] = batch_files(&place, "caches");
    let policy = place.file("policy.toml");
    let plan = ["plan", "demo", "--json", "--threads", "1", "--memory", "14MiB", "--disk", "1000GB/s"];
    let jobs = ["--requests", "256", "--prompt", "120", "--output", "120", "--max-context", "256"];
    let planned = place.json(&[&plan[..], &jobs, &["--write", &policy]].concat());
    let best = &planned["policy"];
    assert_eq!(best["resident"], false, "{planned}");
    assert!(best["cache_bytes"][1].as_f64() > Some(0.0), "{planned}");
    assert!(best["settings"]["tiers.kv"].is_u64() && best["settings"]["tiers.device"].is_null(), "{planned}");
    assert!(best["memory"].as_f64() <= planned["tiers"][0]["bytes"].as_f64(), "{planned}");
    let run = ["demo", "--threads", "1", "--disk-path", &disk, "--max-context", "256"];
    let inspected = place.json(&[&["inspect", "--json", "--policy-file", &policy][..], &run].concat());
    assert_eq!(inspected["memory"]["kv_on_disk"].as_f64(), best["cache_bytes"][1].as_f64(), "{planned}");
    let batch = ["batch", "demo", &input, &output, "--json", "--policy-file", &policy, "--disk-path", &disk];
    let summary = place.json(&[&batch[..], &["--threads", "1", "--max-context", "256"]].concat());
    assert_eq!((&summary["ok"], &summary["failed"]), (&json!(4), &json!(0)), "{summary}");
}

/// A policy for devices with memory of their own keeps within it, is used, and changes no answer; a memory
/// that is too small is refused with the least that works.
#[test]
fn devices_with_memory_of_their_own_are_planned() {
    let place = Place::new("devices");
    let disk = place.file("stores");
    let [input, output] = batch_files(&place, "devices");
    let answers = |args: &[&str]| {
        let batch = ["batch", "demo", &input, &output, "--threads", "1", "--disk-path", &disk, "--json"];
        let summary = place.json(&[&batch[..], args].concat());
        assert_eq!((&summary["ok"], &summary["failed"]), (&json!(4), &json!(0)), "{summary}");
        let lines = fs::read_to_string(&output).expect("there are answers");
        fs::remove_file(&output).expect("the answers are removed");
        let text = |line: &str| {
            let line: Value = serde_json::from_str(line).expect("it is JSON");
            format!("{} {}", line["custom_id"], line["response"]["body"]["choices"])
        };
        let mut answers: Vec<String> = lines.lines().map(text).collect();
        answers.sort();
        (summary, answers)
    };
    let (_, expected) = answers(&[]);
    let policy = place.file("policy.toml");
    let (mut below, mut before) = (0, 0.0);
    for (devices, memory) in
        [("0", "64MiB"), ("0", "10MiB"), ("0", "9MiB"), ("0", "8MiB"), ("0;1", "64MiB"), ("0;1", "8MiB")]
    {
        let device = ["--devices", devices, "--device-memory", memory, "--device-link", "200MB/s"];
        let plan = ["plan", "demo", "--json", "--threads", "1", "--memory", "400MiB", "--write", &policy];
        let planned = place.json(&[&plan[..], &SMALL, &device, &["--max-context", "128"]].concat());
        let (best, tiers) = (&planned["policy"], &planned["tiers"]);
        let names: Vec<&Value> =
            tiers.as_array().expect("it is a list").iter().map(|it| &it["name"]).collect();
        assert_eq!(names, ["device", "host", "disk"], "{planned}");
        assert!(best["memory"].as_f64() <= tiers[0]["bytes"].as_f64(), "{planned}");
        assert!(best["host_memory"].as_f64() <= tiers[1]["bytes"].as_f64(), "{planned}");
        let seconds = best["job_seconds"].as_f64().expect("it has a time");
        before = if memory == "64MiB" { 0.0 } else { before };
        assert!(seconds >= before, "{devices}, {memory}: {seconds}, {before}");
        before = seconds;
        below += usize::from(best["resident"] == false);
        let run = [&device[..], &["--policy-file", &policy, "--max-context", "128"]].concat();
        let (summary, actual) = answers(&run);
        assert_eq!(actual, expected, "{devices}, {memory}: {planned}");
        assert!(summary["predicted"]["seconds"].as_f64() > Some(0.0), "{summary}");
    }
    assert!(below > 2, "{below} plans use the memory of the host");
    let device = ["--device-memory", "64KiB", "--memory", "400MiB", "--disk", "1GB/s", "--threads", "1"];
    let error = place.error(&[&["plan", "demo"][..], &device].concat(), 1);
    assert!(
        error.contains("device.memory: no policy fits into 0.1 MiB: the model needs at least"),
        "{error}"
    );
    let device = ["--device-memory", "300MiB", "--memory", "200MiB", "--disk", "1GB/s", "--threads", "1"];
    let error = place.error(&[&["plan", "demo"][..], &device].concat(), 1);
    assert!(error.contains("device.memory: 200 MiB of memory are too little"), "{error}");
}

/// Regression: the KV cache had room for requests of the mean size only, and a longer one was refused.
#[test]
fn a_batch_can_be_planned_at_its_start() {
    let place = Place::new("auto");
    let [input, output] = batch_files(&place, "auto");
    let body = json!({"prompt": "Once upon a time ".repeat(60), "max_tokens": 5, "temperature": 0});
    let long = json!({"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": body});
    let requests = fs::read_to_string(&input).expect("there are requests");
    fs::write(&input, format!("{requests}\n{long}\n")).expect("the input is written");
    let disk = place.file("stores");
    let args =
        ["batch", "demo", &input, &output, "--placement", "auto", "--threads", "1", "--disk-path", &disk];
    let summary = place.json(&[&args[..], &["--slots", "1", "--json"]].concat());
    assert_eq!((&summary["ok"], &summary["failed"]), (&json!(5), &json!(0)), "{summary}");
    assert!(summary["predicted"]["seconds"].as_f64() > Some(0.0), "{summary}");
    assert_eq!(place.rates().len(), 1);
    assert!(Path::new(&output).exists());
}

#[test]
fn flags_of_another_kind_of_plan_are_refused() {
    let place = Place::new("flags");
    for (args, part) in [
        (&["plan", "--partition", "--memory", "1GiB"][..], "--partition"),
        (&["plan", "--shape", "7B", "--memory", "1GiB"], "--shape"),
        (&["plan", "demo", "--memory", "much"], "--memory: must begin with a number"),
        (&["plan", "demo", "--disk", "0/s"], "--disk"),
        (&["plan", "demo", "--objective", "both"], "--objective"),
    ] {
        let error = place.error(args, 2);
        assert!(error.contains(part), "{args:?}: {error}");
    }
    let error = place.error(&["plan", "demo", "--devices", "0&1"], 1);
    assert!(error.contains("device.groups: a placement cannot be planned for ranks that share"), "{error}");
    let error = place.error(&["plan", "demo", "--prompt", "100000"], 1);
    assert!(error.contains("--prompt and --output are"), "{error}");
}
