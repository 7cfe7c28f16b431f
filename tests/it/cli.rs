//! The command line: what is wrong is named, and nothing half-started stays behind.

use crate::common::Copied;
use serde_json::json;
use std::path::Path;
use std::process::{Command, Output};

fn mainstem(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mainstem")).args(args).output().expect("the program starts")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn serve(model: &Path) -> Output {
    mainstem(&["serve", &model.display().to_string(), "--port", "0"])
}

#[test]
fn a_wrong_flag_is_a_usage_error_that_names_it() {
    let output = mainstem(&["serve", "model", "--slotz", "4"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("--slotz"), "{}", said(&output));
}

#[test]
fn a_model_that_is_not_there_is_named() {
    let output = serve(Path::new("no/such/model"));
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("no/such/model"), "{}", said(&output));
}

#[test]
fn a_truncated_weight_file_is_refused_by_name() {
    let model = Copied::of("mha", "truncated");
    let file = model.file("model.safetensors");
    let bytes = std::fs::read(&file).expect("the copy is there");
    std::fs::write(&file, &bytes[..bytes.len() - 100]).expect("it can be written");
    let output = serve(&model.0);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("model.safetensors"), "{}", said(&output));
}

#[test]
fn a_config_that_does_not_match_the_tensors_names_one() {
    let model = Copied::of("mha", "mismatch");
    let file = model.file("config.json");
    let text = std::fs::read(&file).expect("the copy is there");
    let config: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
    let layers = config["num_hidden_layers"].as_u64().expect("it has layers");
    let damages = [
        ("intermediate_size", json!(51), "gate_proj".to_owned()),
        ("num_hidden_layers", json!(layers - 1), format!("model.layers.{}.", layers - 1)),
        ("num_hidden_layers", json!(layers + 1), format!("model.layers.{layers}.")),
        ("model_type", json!("unheard_of"), "unheard_of".to_owned()),
        ("hidden_act", json!("mish"), "mish".to_owned()),
        ("hidden_size", json!("wide"), "hidden_size".to_owned()),
        ("num_attention_heads", json!(0), "heads".to_owned()),
        ("eos_token_id", json!(100_000), "100000".to_owned()),
    ];
    // What config.json says of the end counts where this file does not.
    std::fs::remove_file(model.file("generation_config.json")).expect("the fixture has one");
    for (key, value, named) in damages {
        let mut damaged = config.clone();
        damaged[key] = value.clone();
        std::fs::write(&file, damaged.to_string()).expect("it can be written");
        let output = serve(&model.0);
        assert_eq!(output.status.code(), Some(1), "{key} {value}");
        assert!(said(&output).contains(&named), "{key} {value}: {}", said(&output));
    }
}

/// The numbers of a config are not believed: with little memory and time, the refusal still comes.
#[test]
fn an_absurd_number_of_layers_is_refused_at_little_cost() {
    let model = Copied::of("mha", "many-layers");
    model.configure("num_hidden_layers", json!(16_000_000));
    let limited = "ulimit -v 4000000; ulimit -t 20; exec \"$0\" serve \"$1\" --port 0 --threads 2";
    let output = Command::new("sh")
        .args(["-c", limited, env!("CARGO_BIN_EXE_mainstem")])
        .arg(&model.0)
        .output()
        .expect("the shell starts");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("16000000 layers"), "{}", said(&output));
}
