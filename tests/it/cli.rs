//! Tests of the command line: errors name the fault and its source, and a failed start leaves nothing behind.

use crate::common::{self, Copied, PATIENCE, again, alone, fixture, signal, skipped};
use serde_json::json;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Instant;

fn mainstem(args: &[&str]) -> Output {
    mainstem_in(&[], args)
}

/// Runs the program with these environment variables.
fn mainstem_in(variables: &[(&str, &str)], args: &[&str]) -> Output {
    common::mainstem().args(args).envs(variables.iter().copied()).output().expect("the program starts")
}

fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn serve(model: &Path) -> Output {
    mainstem(&["serve", &model.display().to_string(), "--port", "0"])
}

#[test]
fn a_wrong_flag_is_a_usage_error_that_names_it() {
    let output = mainstem(&["serve", "model", "--slotz", "4"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr_text(&output).contains("--slotz"), "{}", stderr_text(&output));
}

/// An error names the source of the setting on one line; only faults of the command line are usage errors.
#[test]
fn a_wrong_setting_is_reported_where_it_was_set() {
    let folder = Copied::of("mha", "settings");
    let file = folder.file("mainstem.toml");
    std::fs::write(&file, "[server]\nport = 1\n\n[kv]\ntyp = \"f32\"\n").expect("it can be written");
    let file = file.display().to_string();
    let in_file = format!("{file}:5: there is no key 'kv.typ'; did you mean 'kv.type'?");
    let variable = "environment variable MAINSTEM_SERVER_PORT: server.port = 70000: must be from 0 to 65535";
    let flag = "command line: server.tls_key = \"key.pem\": requires server.tls_cert";
    assert_refused(&[], &["--config", &file], 1, &in_file);
    assert_refused(&[("MAINSTEM_CONFIG", &file)], &[], 1, &in_file);
    assert_refused(&[("MAINSTEM_SERVER_PORT", "70000")], &[], 1, variable);
    assert_refused(&[("MAINSTEM_SERVER_TLS_KEY", "other.pem")], &["--tls-key", "key.pem"], 2, flag);
}

/// Asserts that `serve` prints exactly this message and exits with this code.
fn assert_refused(variables: &[(&str, &str)], flags: &[&str], code: i32, message: &str) {
    let output = mainstem_in(variables, &[&["serve", "no/such/model"], flags].concat());
    assert_eq!(stderr_text(&output), format!("error: {message}\n"));
    assert_eq!(output.status.code(), Some(code), "{message}");
}

/// A flag overrides an environment variable that would be refused.
#[test]
fn a_flag_goes_before_the_environment() {
    let output =
        mainstem_in(&[("MAINSTEM_SERVER_PORT", "70000")], &["serve", "no/such/model", "--port", "0"]);
    assert!(stderr_text(&output).contains("no/such/model"), "{}", stderr_text(&output));
}

#[test]
fn a_key_is_never_printed() {
    for (variables, flags) in [
        (vec![("MAINSTEM_SERVER_API_KEYS", "se cret")], vec![]),
        (vec![], vec!["--api-key", "se cret"]),
        (vec![("MAINSTEM_LOG_LEVEL", "trace")], vec!["--api-key", "se-cret"]),
    ] {
        let args: Vec<&str> = ["serve", "no/such/model"].into_iter().chain(flags).collect();
        let output = mainstem_in(&variables, &args);
        assert!(!output.status.success());
        assert!(!stderr_text(&output).contains("cret"), "{}", stderr_text(&output));
    }
}

#[test]
fn help_shows_examples_and_completions_know_the_flags() {
    let commands = ["serve", "run", "inspect", "bench", "perplexity", "quantize", "plan", "completions"]
        .map(|name| vec![name, "--help"]);
    for args in commands.iter().chain([&vec!["--help"]]) {
        let help = String::from_utf8_lossy(&mainstem(args).stdout).into_owned();
        assert!(help.contains("Examples:\n  mainstem "), "{args:?}: {help}");
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = mainstem(&["completions", shell]);
        assert!(output.status.success(), "{shell}: {}", stderr_text(&output));
        let script = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(script.contains("chat-template") && script.contains("completions"), "{shell}");
    }
    assert_eq!(mainstem(&["completions", "abacus"]).status.code(), Some(2));
}

/// On a machine without GPUs as on one with them, each part of CUDA is there, or there is a reason why not.
#[test]
fn devices_are_listed_on_every_machine() {
    let output = mainstem(&["devices", "--json"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let devices: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let cuda = &devices["cuda"];
    let missing = cuda["missing"].as_array().expect("a list");
    assert!(devices["cpu"]["available_memory"].as_u64() > Some(0), "{devices:#}");
    assert_eq!(cuda["driver"].is_null() || cuda["nvrtc"].is_null(), !missing.is_empty(), "{devices:#}");

    let text = String::from_utf8(mainstem(&["devices"]).stdout).expect("it is UTF-8");
    assert!(text.starts_with("cpu:0 "), "{text}");
    assert!(missing.iter().all(|reason| text.contains(reason.as_str().expect("a text"))), "{text}");

    let refused = mainstem(&["devices", "--nvrtc", "/nowhere/libnvrtc.so.12"]);
    let text = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(refused.status.success() && text.contains("device.nvrtc: /nowhere/libnvrtc.so.12"), "{text}");
}

#[test]
fn a_model_that_is_not_there_is_named() {
    let output = serve(Path::new("no/such/model"));
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_text(&output).contains("no/such/model"), "{}", stderr_text(&output));
}

#[test]
fn a_truncated_weight_file_is_refused_by_name() {
    let model = Copied::of("mha", "truncated");
    let file = model.file("model.safetensors");
    let bytes = std::fs::read(&file).expect("the copy is there");
    std::fs::write(&file, &bytes[..bytes.len() - 100]).expect("it can be written");
    let output = serve(&model.0);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_text(&output).contains("model.safetensors"), "{}", stderr_text(&output));
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
    // Without this file, the end tokens of config.json apply.
    std::fs::remove_file(model.file("generation_config.json")).expect("the fixture has one");
    for (key, value, named) in damages {
        let mut damaged = config.clone();
        damaged[key] = value.clone();
        std::fs::write(&file, damaged.to_string()).expect("it can be written");
        let output = serve(&model.0);
        assert_eq!(output.status.code(), Some(1), "{key} {value}");
        assert!(stderr_text(&output).contains(&named), "{key} {value}: {}", stderr_text(&output));
    }
}

/// Numbers of a config are not trusted: an absurd one is refused with little memory and time.
#[test]
fn an_absurd_number_of_layers_is_refused_at_little_cost() {
    let model = Copied::of("mha", "many-layers");
    for (layers, named) in [(16_000_000, "layers is 16000000"), (4_000, "4000 layers")] {
        model.configure("num_hidden_layers", json!(layers));
        let limited = "ulimit -v 4000000; ulimit -t 20; exec \"$0\" serve \"$1\" --port 0 --threads 2";
        let output = alone("sh")
            .args(["-c", limited, env!("CARGO_BIN_EXE_mainstem")])
            .arg(&model.0)
            .output()
            .expect("the shell starts");
        assert_eq!(output.status.code(), Some(1), "{}", stderr_text(&output));
        assert!(stderr_text(&output).contains(named), "{}", stderr_text(&output));
    }
}

/// Others may set variables that begin like those of the program.
#[test]
fn a_foreign_variable_is_a_warning() {
    let output = mainstem_in(&[("MAINSTEM_SERVICE_PORT", "tcp://10.0.0.1:80")], &["inspect", "demo"]);
    let stderr_text = stderr_text(&output);
    assert!(output.status.success(), "{stderr_text}");
    let warning = "environment variable MAINSTEM_SERVICE_PORT: there is no such setting; did you mean";
    assert!(stderr_text.contains("WARN") && stderr_text.contains(warning), "{stderr_text}");
}

/// Sizes beyond what the process may have are an error of their settings, not an abort or a panic.
#[test]
fn what_the_process_may_not_have_is_refused_by_its_setting() {
    for (limit, flags, named) in [
        ("ulimit -v 4000000", "--slots 4096 --token-budget 16777216", "scheduler.token_budget"),
        ("ulimit -n 100", "--workers 100", "server.workers = 100: cannot start so many workers"),
    ] {
        let limited = format!("{limit}; exec \"$0\" serve demo --port 0 --threads 2 {flags}");
        let output = alone("sh").args(["-c", &limited, env!("CARGO_BIN_EXE_mainstem")]).output();
        let output = output.expect("the shell starts");
        let stderr_text = stderr_text(&output);
        assert_eq!(output.status.code(), Some(1), "{flags}: {stderr_text}");
        let lines = stderr_text.lines().filter(|line| line.starts_with("error: ")).count();
        assert!(lines == 1 && stderr_text.contains(named), "{flags}: {stderr_text}");
        assert!(!stderr_text.contains("panicked"), "{stderr_text}");
    }
}

#[test]
fn errors_of_files_and_hosts_name_their_setting() {
    let missing = fixture("nothing").display().to_string();
    for (flags, named) in [
        ([missing.as_str(), "--threads", "1"], "model.path: cannot open the model"),
        (["demo", "--spec", &missing], "model.spec: cannot read"),
        (["demo", "--chat-template", &missing], "model.chat_template: cannot read"),
        (["demo", "--host", "192.0.2.1"], "(server.host, server.port)"),
        (["demo", "--kv-size", "1B"], "kv.size"),
    ] {
        let output = mainstem(&[&["serve", "--port", "0"], &flags[..]].concat());
        let stderr_text = stderr_text(&output);
        assert_eq!(output.status.code(), Some(1), "{stderr_text}");
        assert!(stderr_text.contains(named), "{flags:?}: {stderr_text}");
    }
}

/// The environment of the user who runs the tests does not affect them.
#[test]
fn nobodys_environment_is_heard() {
    let variables = [("MAINSTEM_SERVER_PORT", "x"), ("MAINSTEM_CONFIG", "/nowhere"), ("HF_ENDPOINT", "none")];
    again("cli::a_model_that_is_not_there_is_named", &variables);
}

/// Errors of files and port are reported before the model is opened.
#[test]
fn files_and_port_are_tried_before_the_model() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = taken.local_addr().expect("it has an address").port().to_string();
    let long = "k".repeat(300);
    for (flags, code, named) in [
        (["--port", &port, "--workers", "1"], 1, "cannot listen on 127.0.0.1:"),
        (["--tls-cert", "no-cert.pem", "--tls-key", "no-key.pem"], 1, "no-cert.pem"),
        (["--port", "0", "--api-key-file", "no-keys.txt"], 2, "server.api_key_file = \"no-keys.txt\""),
        (["--port", "0", "--api-key", &long], 1, "longer than 256 bytes"),
    ] {
        for model in [fixture("gqa").display().to_string(), "no/such/model".to_owned()] {
            let output = mainstem(&[&["serve", &model, "--threads", "1"], &flags[..]].concat());
            let stderr_text = stderr_text(&output);
            assert_eq!(output.status.code(), Some(code), "{stderr_text}");
            assert!(
                stderr_text.starts_with("error: ")
                    && stderr_text.contains(named)
                    && stderr_text.lines().count() == 1,
                "{stderr_text}"
            );
        }
    }
}

/// The key file is read only by `serve`.
#[test]
fn a_key_file_is_read_by_who_serves_only() {
    let keys = [("MAINSTEM_SERVER_API_KEY_FILE", "/no/such/keys")];
    let model = fixture("gqa").display().to_string();
    for args in [&["inspect", &model][..], &["run", &model, "a", "--raw", "--max-tokens", "2"]] {
        let output = mainstem_in(&keys, args);
        assert!(output.status.success(), "{}", stderr_text(&output));
    }
    let refused = mainstem_in(&keys, &["serve", &model, "--port", "0"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr_text(&refused).contains("MAINSTEM_SERVER_API_KEY_FILE"), "{}", stderr_text(&refused));
}

/// Control characters in names of model files are escaped in the output.
#[test]
fn escape_sequences_of_a_models_files_are_spelled_out() {
    let model = Copied::of("gqa", "\u{1b}[2J\nred");
    let name = model.0.display().to_string();
    let inspected = mainstem(&["inspect", &name]);
    let shown = String::from_utf8_lossy(&inspected.stdout).into_owned();
    assert!(shown.starts_with("model mainstem-") && shown.contains("\\x1b[2J\\x0ared\n"), "{shown:?}");
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
    model.configure("model_type", json!("\u{1b}]0;title\u{7}"));
    for command in ["inspect", "serve"] {
        let refused = mainstem(&[command, &name]);
        assert_eq!(refused.status.code(), Some(1));
        let stderr_text = stderr_text(&refused);
        assert!(
            stderr_text.contains("\\x1b]0;title\\x07") && !stderr_text.contains(['\u{1b}', '\u{7}']),
            "{stderr_text:?}"
        );
    }
}

/// Name of a hub cache directory that stays empty.
const HUB_HOME: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/hub");

/// Returns a hub that accepts requests but never responds, and its URL.
fn silent_hub() -> (TcpListener, String) {
    let hub = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let url = format!("http://{}", hub.local_addr().expect("it has an address"));
    (hub, url)
}

#[test]
fn serve_can_be_stopped_while_it_loads() {
    let (hub, url) = silent_hub();
    let mut command = common::mainstem();
    command.args(["serve", "hf:owner/name", "--port", "0"]).env("HF_ENDPOINT", url).env("HF_HOME", HUB_HOME);
    let child = command.stderr(Stdio::piped()).spawn().expect("the program starts");
    let _request = accept_connection(&hub);
    signal(&child, "TERM");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_text(&output).contains("stopped while the model was loading"), "{}", stderr_text(&output));
}

/// Waits for the first connection to the hub; fails the test if there is none.
fn accept_connection(hub: &TcpListener) -> TcpStream {
    hub.set_nonblocking(true).expect("it can be looked at");
    let began = Instant::now();
    loop {
        match hub.accept() {
            Ok((stream, _)) => return stream,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(began.elapsed() < PATIENCE, "the hub is not asked");
        std::thread::yield_now();
    }
}

/// Starts the program on a pseudo-terminal created by `script`. Returns `None` if `script` is not installed.
fn on_a_terminal(args: &[&str], variables: &[(&str, &str)]) -> Option<Child> {
    // Not every shell `exec`s its last command, and one that does not exits on Ctrl-C with its own code.
    let mut line = format!("exec '{}'", env!("CARGO_BIN_EXE_mainstem"));
    args.iter().for_each(|arg| line += &format!(" '{arg}'"));
    let mut script = alone("script");
    script.args(["-qec", &line, "/dev/null"]).envs(variables.iter().copied());
    script.env("TERM", "xterm").env("SHELL", "/bin/sh");
    let child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    child.inspect_err(|_| skipped("no script to make a terminal")).ok()
}

/// Returns the terminal output once the program has exited.
fn terminal_output(mut child: Child) -> String {
    let mut shown = String::new();
    child.stdout.take().expect("it is piped").read_to_string(&mut shown).expect("it is text");
    assert!(child.wait().expect("it ends").success(), "{shown}");
    shown
}

/// Sends Ctrl-C through the terminal.
fn interrupt(child: &mut Child) {
    child.stdin.as_mut().expect("it is piped").write_all(b"\x03").expect("there is a terminal");
}

#[test]
fn long_work_shows_a_sign_of_life_on_a_terminal() {
    let model = fixture("gqa").display().to_string();
    let Some(inspect) = on_a_terminal(&["inspect", &model], &[]) else { return };
    assert!(terminal_output(inspect).contains("opening the model"));
    let run = ["run", &model, "a", "--raw", "--max-tokens", "2", "--threads", "1"];
    let run = on_a_terminal(&run, &[]).map(terminal_output).expect("there is script");
    assert!(run.contains("loading the weights"), "{run:?}");
    let serve = ["serve", &model, "--port", "0", "--threads", "1"];
    let mut serve = on_a_terminal(&serve, &[]).expect("there is script");
    let mut before = String::new();
    let mut lines = BufReader::new(serve.stdout.take().expect("it is piped"));
    while !before.contains("listening on") {
        assert!(lines.read_line(&mut before).expect("it is text") > 0, "{before}");
    }
    assert!(before.contains("loading the weights"), "{before:?}");
    interrupt(&mut serve);
    serve.stdout = Some(lines.into_inner());
    terminal_output(serve);
}

/// While a hub is queried or a file is downloaded, only the download progress is shown.
#[test]
fn no_spinner_before_the_model_is_here() {
    let (hub, url) = silent_hub();
    let variables = [("HF_ENDPOINT", url.as_str()), ("HF_HOME", HUB_HOME)];
    let Some(mut run) = on_a_terminal(&["run", "hf:owner/name", "Hi"], &variables) else { return };
    let _request = accept_connection(&hub);
    interrupt(&mut run);
    let mut shown = String::new();
    run.stdout.take().expect("it is piped").read_to_string(&mut shown).expect("it is text");
    assert_eq!(run.wait().expect("it ends").code(), Some(130), "{shown}");
    assert!(!shown.contains("loading") && !shown.contains("opening"), "{shown:?}");
}
