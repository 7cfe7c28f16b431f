//! Tests of weights saved by PyTorch (tests/oracle/make_pickles.py): the same model as from safetensors.

use crate::common::{Copied, Outcome, complete_all, config, fixture, greedy, mainstem, prompt, sampled};
use mainstem::cli::start;
use mainstem::formats::{Checkpoint, Folder};
use mainstem::request::Token;
use serde_json::{Value, json};
use std::path::Path;

/// The fixture with the same weights as the pickled ones.
const MODEL: &str = "bf16";

const KINDS: [&str; 3] = ["zip", "stream", "sharded"];

/// Returns a copy of the model with the weights of `tests/fixtures/pickle/KIND`.
pub fn pickled(kind: &str, name: &str) -> Copied {
    let model = Copied::of(MODEL, &format!("pickled-{kind}-{name}"));
    std::fs::remove_file(model.file("model.safetensors")).expect("the copy has it");
    for entry in std::fs::read_dir(fixture("pickle").join(kind)).expect("the fixture is there").flatten() {
        std::fs::copy(entry.path(), model.0.join(entry.file_name())).expect("a file is copied");
    }
    model
}

/// Returns each token with the bits of its log-probability, for long and short, greedy and sampled answers.
async fn answers(model: &Path) -> Vec<Vec<(u32, Option<u32>)>> {
    let engine = start::start_engine(&config(model, &[])).await.expect("the model loads");
    let requests = (0..6).map(|i| {
        let mut request = greedy(&prompt(i, 3 + 11 * i), 16);
        if i % 2 == 1 {
            request = sampled(&prompt(i, 3 + 11 * i), 16, i as u64);
        }
        request.logprobs = Some(0);
        request
    });
    let bits = |token: &Token| (token.id, token.logprob.map(f32::to_bits));
    let outcomes = complete_all(&engine, requests).await;
    engine.stop();
    outcomes.iter().map(|Outcome { tokens, .. }| tokens.iter().map(bits).collect()).collect()
}

#[actix::test]
async fn each_container_gives_the_tokens_that_safetensors_give() {
    let expected = answers(&fixture(MODEL)).await;
    assert!(expected.iter().all(|answer| answer.len() == 16 && answer[0].1.is_some()));
    for kind in KINDS {
        assert_eq!(answers(&pickled(kind, "tokens").0).await, expected, "{kind}");
    }
}

/// Returns the bits of a tensor's values, widened to F32.
fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<u32> {
    let tensor = checkpoint.tensor(name).unwrap_or_else(|| panic!("{name}"));
    let ty = tensor.quant_type().expect("it is computable");
    let mut numbers = vec![0.0; tensor.shape.iter().product()];
    ty.dequantize(&tensor.bytes(), &mut numbers);
    numbers.into_iter().map(f32::to_bits).collect()
}

#[test]
fn each_container_has_the_tensors_that_safetensors_have() {
    let expected = Checkpoint::open_folder(&Folder::Disk(fixture(MODEL))).expect("the fixture opens");
    for kind in KINDS {
        let folder = Folder::Disk(fixture("pickle").join(kind));
        let checkpoint = Checkpoint::open_folder(&folder).expect("the fixture opens");
        for tensor in expected.tensors() {
            let ours = checkpoint.tensor(tensor.name).unwrap_or_else(|| panic!("{}", tensor.name));
            assert_eq!(ours.shape, tensor.shape, "{kind}: {}", tensor.name);
            let same = numbers(&checkpoint, tensor.name) == numbers(&expected, tensor.name);
            assert!(same, "{kind}: {}", tensor.name);
        }
    }
}

fn inspected(model: &Path) -> Value {
    let output = mainstem().arg("inspect").arg(model).arg("--json").output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the answer is JSON")
}

/// The inspection equals that of safetensors, except that some vectors are stored wider and there are unused
/// tensors.
#[test]
fn an_inspection_shows_pickled_weights_as_any_others() {
    let expected = inspected(&fixture(MODEL));
    for kind in KINDS {
        let model = pickled(kind, "inspected");
        let answer = inspected(&model.0);
        let rows = |answer: &Value| answer["tensors"].as_array().expect("a list").clone();
        assert_eq!(rows(&answer).len(), rows(&expected).len(), "{kind}");
        for (ours, theirs) in rows(&answer).iter().zip(&rows(&expected)) {
            assert_eq!((&ours["name"], &ours["shape"]), (&theirs["name"], &theirs["shape"]), "{kind}");
            let is_wide = kind != "sharded" && ours["role"] == "attention_norm";
            let (ty, bytes) = if is_wide { ("f32", 2) } else { ("bf16", 1) };
            assert_eq!(ours["type"], json!(ty), "{kind}: {}", ours["name"]);
            let stored = theirs["bytes"].as_u64().expect("a size");
            assert_eq!(ours["bytes"], json!(stored * bytes), "{kind}: {}", ours["name"]);
        }
        assert_eq!(answer["memory"]["weights"], expected["memory"]["weights"], "{kind}");
        let unused: Vec<&Value> = answer["unused"].as_array().expect("a list").iter().collect();
        assert_eq!(unused.len(), if kind == "sharded" { 0 } else { 2 }, "{kind}");
        assert!(unused.iter().all(|tensor| tensor["why"] == "the specification ignores it"), "{kind}");
        let shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
        let files: &[&str] = if kind == "sharded" { &shards } else { &["pytorch_model.bin"] };
        let files: Vec<_> = files.iter().map(|name| model.file(name)).collect();
        assert_eq!(answer["files"], json!(files), "{kind}");
    }
}

/// The error names the call that the file requests, which is not executed.
#[test]
fn a_file_that_wants_something_run_is_refused_by_every_command() {
    let model = pickled("stream", "hostile");
    let trace = model.file("trace");
    let command = format!("touch {}", trace.display());
    let length = (command.len() as u32).to_le_bytes();
    let payload = [b"cposix\nsystem\n(X", &length[..], command.as_bytes(), b"tR."].concat();
    std::fs::write(model.file("pytorch_model.bin"), payload).expect("it can be written");
    for subcommand in [&["inspect"][..], &["serve", "--port", "0"], &["run", "--raw", "a"]] {
        let (name, flags) = subcommand.split_first().expect("a subcommand");
        let output = mainstem().arg(name).arg(&model.0).args(flags).output().expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        let file = model.file("pytorch_model.bin");
        let is_reported =
            error.contains(&file.display().to_string()) && error.contains("references posix.system: only");
        assert!(is_reported, "{error}");
    }
    assert!(!trace.exists());
}
