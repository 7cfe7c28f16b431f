//! Tests of the configuration of partitions: accepted and refused settings, and their display.

use crate::common::{config, fixture, mainstem};
use crate::families::family;
use mainstem::cli::start;
use mainstem::config::{LaneCount, format_groups};
use mainstem::model::{ModelRef, ModelSource};
use mainstem_kernels::SingleRank;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;
use toml::Value as Toml;

fn run_command(args: &[&str]) -> Output {
    mainstem().args(args).output().expect("the program starts")
}

fn answer(args: &[&str]) -> String {
    let output = run_command(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the answer is text")
}

fn answer_json(args: &[&str]) -> Value {
    serde_json::from_str(&answer(args)).expect("the answer is JSON")
}

/// The fixture has 2 layers, 8 heads and 2 KV heads.
fn inspected(devices: &str) -> Vec<Value> {
    let model = fixture("gqa").display().to_string();
    let answer = answer_json(&["inspect", &model, "--devices", devices, "--json"]);
    answer["partition"].as_array().expect("a list").clone()
}

#[test]
fn every_form_of_groups_reaches_the_engine() {
    let model = fixture("gqa");
    let source = ModelSource::open(&ModelRef::Path(model.clone()), None).expect("the fixture opens");
    let listed = |text: &str| text.parse::<Toml>().expect("it is TOML");
    for (groups, stages) in [
        (Toml::from("0"), vec![vec!["cpu:0"]]),
        (Toml::from("0;1"), vec![vec!["cpu:0"], vec!["cpu:1"]]),
        (Toml::from("0&1"), vec![vec!["cpu:0", "cpu:1"]]),
        (Toml::from("0&1;2&3"), vec![vec!["cpu:0", "cpu:1"], vec!["cpu:2", "cpu:3"]]),
        (listed("[[\"cpu:0\", \"cpu:1\"], [\"cpu:2\"]]"), vec![vec!["cpu:0", "cpu:1"], vec!["cpu:2"]]),
    ] {
        let config = config(&model, &[("device.groups", groups.clone())]);
        let setup = start::engine_setup(&config, &source).expect("it can be divided so");
        let names = |stage: &mainstem::model::partition::Stage| {
            stage.ranks.iter().map(|rank| rank.device.clone()).collect::<Vec<_>>()
        };
        assert_eq!(setup.partition.stages.iter().map(names).collect::<Vec<_>>(), stages, "{groups}");
        assert_eq!(config.scheduler.lanes, LaneCount::PerStage);
        let layers: usize = setup.partition.stages.iter().map(|stage| stage.decoder.len()).sum();
        assert_eq!(layers, source.spec.layers());
    }
}

/// The worker threads of a CPU device are named after its number.
#[cfg(target_os = "linux")]
#[test]
fn a_devices_number_reaches_its_factory() {
    let model = fixture("gqa");
    let config = config(&model, &[("device.groups", "0;41".into())]);
    let (source, tokenizer) = start::open(&ModelRef::Path(model), None).expect("the fixture opens");
    let setup = start::engine_setup(&config, &source).expect("it can be divided so");
    let mut factories = start::factories(&config.device, &source, &tokenizer, &setup);
    let _device = factories[1][0](Box::new(SingleRank)).expect("the part loads");
    let threads = Path::new("/proc/self/task").read_dir().expect("the threads are listed");
    // A thread of another test may have ended meanwhile.
    let names =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    let names: Vec<String> = names.map(|name| name.trim().to_owned()).collect();
    assert!(names.iter().any(|name| name == "cpu41-1"), "{names:?}");
}

#[test]
fn a_file_and_the_environment_say_it_too() {
    let model = fixture("gqa").display().to_string();
    let mut command = mainstem();
    command
        .args(["inspect", &model, "--json"])
        .env("MAINSTEM_DEVICE_GROUPS", "0,1")
        .env("MAINSTEM_DEVICE_LAYERS", "1,1");
    let output = command.output().expect("the program starts");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("the answer is JSON");
    assert_eq!(answer["partition"].as_array().map(Vec::len), Some(2), "{answer}");
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/examples/hybrid.toml");
    let config = mainstem::config::Config::load(Some(&example), Default::default()).expect("it is valid");
    assert_eq!(format_groups(&config.device.groups), "cpu:0&cpu:1;cpu:2&cpu:3");
}

#[test]
fn inspect_shows_layers_heads_and_bytes_of_each_device() {
    let rows = inspected("0&1;2");
    let summary: Vec<_> = rows
        .iter()
        .map(|row| json!([row["device"], row["stage"], row["rank"], row["layers"], row["heads"]]))
        .collect();
    assert_eq!(
        summary,
        [
            json!(["cpu:0", 1, 0, [1, 1], [1, 4]]),
            json!(["cpu:1", 1, 1, [1, 1], [5, 8]]),
            json!(["cpu:2", 2, 0, [2, 2], [1, 8]]),
        ]
    );
    for row in &rows {
        let parts = ["weights", "kv", "activations", "step_buffers"].map(|key| row[key].as_u64().expect(key));
        assert_eq!(row["total"].as_u64(), Some(parts.iter().sum()), "{row}");
    }
    let model = fixture("gqa").display().to_string();
    let text = answer(&["inspect", &model, "--devices", "0&1;2"]);
    assert!(text.contains("partition over 3 devices\n"), "{text}");
    let line = text.lines().find(|line| line.trim_start().starts_with("cpu:1")).expect("a line for it");
    assert!(line.contains("layers [1, 1], heads [5, 8]"), "{line}");
}

#[test]
fn an_encoders_layers_go_first() {
    let model = family("t5", "partition-config");
    let path = model.0.display().to_string();
    let answer = answer_json(&["inspect", &path, "--devices", "0;1", "--json"]);
    let rows = answer["partition"].as_array().expect("a list");
    assert!(rows[0]["encoder_layers"][0] == 1 && rows[1]["layers"].is_array(), "{rows:?}");
}

/// A partition that the model does not allow is an error that names the key; a malformed flag is a usage
/// error.
#[test]
fn refusals_name_the_key_the_reason_and_the_nearest() {
    let model = fixture("gqa").display().to_string();
    for (flags, code, message) in [
        (
            vec!["--devices", "0;1;2"],
            1,
            "device.groups: cpu:0;cpu:1;cpu:2 makes 3 stages, but the model has 2 layers; \
             the nearest possible is cpu:0;cpu:1",
        ),
        (
            vec!["--devices", "0;1", "--layers", "2,1"],
            1,
            "device.layers: [2, 1] adds up to 3 layers, but the model has 2; the nearest possible is [1, 1]",
        ),
        (
            vec!["--devices", "0;0"],
            2,
            "command line: device.groups = \"0;0\": cpu:0 is listed twice; the nearest possible is cpu:0",
        ),
        (
            vec!["--devices", "0&reference:0"],
            2,
            "command line: device.groups = \"0&reference:0\": cpu:0 and reference:0 are in one stage, whose \
             devices must be of one kind; the nearest possible is \
             cpu:0;reference:0",
        ),
        (
            vec!["--devices", "0&1;2", "--shares", "2;1"],
            2,
            "command line: device.shares = \"2;1\": does not fit the devices of device.groups \
             (cpu:0&cpu:1;cpu:2); the nearest possible is [[1, 1], \
             [1]]",
        ),
        (
            vec!["--devices", "0;gpu:1"],
            2,
            "command line: device.groups = \"0;gpu:1\": there is no device 'gpu:1'; did you mean 'cuda:1'?",
        ),
    ] {
        let output = run_command(&[&["inspect", model.as_str()], &flags[..]].concat());
        assert_eq!(String::from_utf8_lossy(&output.stderr), format!("error: {message}\n"));
        assert_eq!(output.status.code(), Some(code), "{message}");
    }
    let output = run_command(&["inspect", &model, "--devices", "0&1&2&3&4&5&6&7&8;9"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("stage 1 of cpu:0&cpu:1&") && error.contains("has 9 ranks, but"), "{error}");
    assert!(error.contains("the nearest possible is cpu:0&cpu:1&cpu:2&cpu:3&cpu:4;cpu:5&"), "{error}");
}

#[test]
fn a_plan_compares_every_way_and_the_configured_one() {
    let plan =
        answer_json(&["plan", "--partition", "--shape", "falcon-40b", "--hardware", "v100x4", "--json"]);
    let rows = plan["partitions"].as_array().expect("a list");
    let names: Vec<_> = rows.iter().filter_map(|row| row["strategy"].as_str()).collect();
    assert_eq!(names, ["layer-wise", "hybrid", "tensor-wise"]);
    let number = |row: usize, key: &str| rows[row][key].as_f64().expect(key);
    let throughput = [0, 1, 2].map(|row| number(row, "throughput_lanes"));
    assert!(throughput[0] > throughput[1] && throughput[1] > throughput[2], "{throughput:?}");
    assert!(number(2, "decode_tokens_per_s") >= number(1, "decode_tokens_per_s"));
    assert!(number(1, "decode_tokens_per_s") > number(0, "decode_tokens_per_s"));
    assert!(rows.iter().all(|row| row["fits"] == true && row["configured"] == false));

    let devices = ["--devices", "0&1;2", "--layers", "3,1", "--hardware", "v100x4"];
    let text = answer(&[&["plan", "--partition"], &devices[..]].concat());
    let configured = text.lines().find(|line| line.starts_with("hybrid (configured)")).expect("its line");
    assert!(configured.contains("0&1;2") && !text.contains("cpu:") && configured.contains("3,1"), "{text}");
    let too_many = answer(&["plan", "--partition", "--devices", "0;1;2;3;4", "--hardware", "v100x4"]);
    assert!(too_many.contains("rejected") && too_many.contains("note: device.groups: "), "{too_many}");
}

/// The device names of a plan are valid values of `--devices`.
#[test]
fn devices_of_two_kinds_are_planned_by_layers_alone() {
    let plan = |devices: &str| {
        answer_json(&["plan", "--partition", "--devices", devices, "--threads", "1", "--json"])
    };
    // The devices' speeds are measured, and other work can disturb a measurement, though not every time.
    let planned = |devices: &str| {
        let mut plans = std::iter::repeat_with(|| plan(devices)).take(6);
        plans.find(|plan| plan["partitions"][0]["layers"] == json!([3, 1]))
    };
    let mixed = planned("0;reference:0").expect("the slow device has the least it can");
    let rows = mixed["partitions"].as_array().expect("a list");
    assert_eq!(rows.len(), 1, "{mixed}");
    assert_eq!((&rows[0]["devices"], &rows[0]["configured"]), (&json!("cpu:0;reference:0"), &json!(true)));
    let speeds = [0, 1].map(|device| mixed["hardware"]["devices"][device]["bandwidth"].as_f64());
    assert!(speeds[0] > speeds[1] && speeds[1] > Some(0.0), "{mixed}");
    planned(rows[0]["devices"].as_str().expect("a text")).expect("the names are valid devices");
}

/// A plan is for four devices by default; settings of a file for one device do not apply to them.
#[test]
fn a_plan_is_for_the_devices_that_are_set() {
    let folder = std::env::temp_dir().join(format!("mainstem-plan-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("one.toml");
    std::fs::write(&file, "[device]\nlayers = [4]\nshares = [[1]]\n").expect("it can be written");
    let of_file = ["plan", "--partition", "--hardware", "v100x4", "--json", "--config"];
    let plan = answer_json(&[&of_file[..], &[file.to_str().expect("a path")]].concat());
    // Layer counts given as flags apply to the four devices, whatever the file sets for one.
    let counts = [file.to_str().expect("a path"), "--shape", "8B", "--layers", "20,4,4,4"];
    let counts = answer_json(&[&of_file[..], &counts].concat());
    std::fs::remove_dir_all(&folder).expect("it was there");
    let names = |plan: &Value| -> Vec<String> {
        let rows = plan["partitions"].as_array().expect("a list").iter();
        rows.map(|row| row["devices"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!(names(&plan), ["0;1;2;3", "0&1;2&3", "0&1&2&3"]);
    let rows = counts["partitions"].as_array().expect("a list");
    assert_eq!((rows.len(), &rows[3]["devices"]), (4, &json!("0;1;2;3")), "{counts}");
    assert_eq!((&rows[3]["layers"], &rows[3]["configured"]), (&json!([20, 4, 4, 4]), &json!(true)));
    let one = answer_json(&["plan", "--partition", "--hardware", "v100x4", "--json", "--devices", "0"]);
    assert_eq!((names(&one), &one["partitions"][0]["configured"]), (vec!["0".to_owned()], &json!(true)));
}

/// A generated token passes only through the decoder; an encoder-only model generates none.
#[test]
fn a_plan_of_an_encoder_decoder_counts_what_a_token_goes_through() {
    let decoded = |name: &str| {
        let model = family(name, "plan");
        let path = model.0.display().to_string();
        run_command(&["plan", "--partition", &path, "--hardware", "v100x4", "--devices", "0", "--json"])
    };
    let output = decoded("t5");
    let plan: Value = serde_json::from_slice(&output.stdout).expect("the answer is JSON");
    let figure = |key: &str| plan["partitions"][0][key][0].clone();
    let (held, ms) = (figure("bytes")[0].as_f64().expect("bytes"), figure("stage_ms").as_f64().expect("ms"));
    assert!(held >= plan["model"]["weight_bytes"].as_f64().expect("bytes"), "{plan}");
    // 5 us per operation, with about 30 operations in each of two decoder layers.
    assert!(ms < 0.35, "{plan}");
    let output = decoded("bert");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("is an encoder-only model, "), "{error}");
}

/// A machine file may define different devices and links; the plan shows each.
#[test]
fn a_plan_shows_every_device_and_both_kinds_of_links() {
    let file = std::env::temp_dir().join(format!("mainstem-plan-{}.toml", std::process::id()));
    let text = "together_gb = 48\n[[device]]\nbandwidth_gb_s = 900\ntflops = 125\nop_us = 5\nmemory_gb = 32\n\
                [[device]]\nbandwidth_gb_s = 100\ntflops = 2\n\
                [within]\nlatency_us = 7\nbandwidth_gb_s = 12\n[between]\nlatency_us = 90\nbandwidth_gb_s = \
                3";
    std::fs::write(&file, text).expect("it can be written");
    let machine = file.to_str().expect("a path").to_owned();
    let args = ["plan", "--partition", "--shape", "7B", "--devices", "0;1;2", "--hardware", &machine];
    let text = answer(&args);
    let plan = answer_json(&[&args[..], &["--json"]].concat());
    std::fs::remove_file(&file).expect("it was there");
    for line in [
        "devices:  1 of 900.0 GB/s and 125.00 Tflop/s, 5.0 us per operation, 32.0 GB",
        "devices:  2 of 100.0 GB/s and 2.00 Tflop/s, 0.0 us per operation",
        "          48.0 GB shared by all",
        "links:    7.0 us and 12.0 GB/s within a stage, 90.0 us and 3.0 GB/s between stages",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} in {text}");
    }
    let hardware = &plan["hardware"];
    assert_eq!(hardware["devices"][2]["device"], "2");
    assert_eq!(
        [0, 1, 2].map(|at| hardware["devices"][at]["bandwidth"].as_f64()),
        [9e11, 1e11, 1e11].map(Some)
    );
    assert_eq!([&hardware["devices"][0]["memory"], &hardware["memory_together"]], [32e9, 48e9]);
    assert!(hardware["devices"][1]["memory"].is_null() && hardware["bandwidth_together"].is_null(), "{plan}");
    assert_eq!([&hardware["within"]["latency_us"], &hardware["between"]["latency_us"]], [7.0, 90.0]);
}

/// Arguments with special characters are quoted for the shell.
#[test]
fn the_examples_of_help_can_be_pasted() {
    for subcommand in ["plan", "inspect", "bench", "run", "serve"] {
        let help = answer(&[subcommand, "--help"]);
        for line in help.lines().filter(|line| line.trim_start().starts_with("mainstem ")) {
            let outside: String = line.split('"').step_by(2).collect();
            assert!(!outside.contains([';', '&']), "{line}");
        }
    }
}

#[test]
fn slower_links_cost_tensors_more_than_layers() {
    let speeds = |latency: &str| {
        let args = [
            "plan",
            "--partition",
            "--shape",
            "7B",
            "--hardware",
            "v100x4",
            "--link-latency",
            latency,
            "--json",
        ];
        let plan = answer_json(&args);
        let rows = plan["partitions"].as_array().expect("a list").clone();
        [0, 2].map(|row| rows[row]["decode_tokens_per_s"].as_f64().expect("a speed"))
    };
    let ([fast_layers, fast_tensors], [slow_layers, slow_tensors]) = (speeds("1us"), speeds("1ms"));
    assert!(fast_tensors > fast_layers && slow_tensors < slow_layers);
    assert!(slow_layers > 0.8 * fast_layers, "{slow_layers} of {fast_layers}");
}

#[test]
fn flags_of_another_purpose_and_wrong_numbers_are_usage_errors() {
    for (args, named) in [
        (vec!["plan", "--shape", "7B", "--requests", "9"], "--requests"),
        (vec!["plan", "--partition", "--shape", "9Q"], "--shape"),
        (vec!["plan", "--partition", "--shape", "7B", "--link-latency", "5"], "--link-latency"),
        (vec!["plan", "--partition", "--shape", "7B", "--link-bandwidth", "fast"], "--link-bandwidth"),
        (vec!["bench", "--partition", "--fake-device"], "--fake-device"),
        (vec!["bench", "--check-model"], "--partition"),
        (vec!["bench", "--batch", "2"], "--partition"),
        (vec!["bench", "--partition", "--prefill", "8"], "--prefill"),
        (vec!["bench", "--partition", "--depth", "8"], "--depth"),
        (vec!["bench", "--partition", "--sequences", "8"], "--sequences"),
        (vec!["bench", "--partition", "--slots", "8"], "--slots"),
        (vec!["bench", "--partition", "--lanes", "2"], "--lanes"),
        (
            vec!["plan", "--partition", "--shape", "layers=4000000000,hidden=8,heads=2,ffn=8,vocab=8"],
            "--shape",
        ),
    ] {
        let output = run_command(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(named), "{args:?}: {error}");
    }
    let output = run_command(&["plan", "--partition", "--shape", "7B", "--hardware", "no/such.toml"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no/such.toml"));
}
