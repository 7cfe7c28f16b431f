//! Tests of `mainstem quantize`: the written model equals the one loaded with the same rules, and it is
//! written completely or not at all.

use crate::common::{Copied, Outcome, complete_all, config, fixture, greedy, mainstem, prompt, sampled};
use crate::families::{decoders, family, others};
use mainstem::cli::start;
use mainstem::export::{ExportTarget, FormatTotals, OutputFormat, write_model};
use mainstem::formats::save::Existing;
use mainstem::model::{ModelRef, ModelSource, tensor_slices, tensors};
use mainstem::quantize::WeightRules;
use mainstem::request::Request;
use mainstem_kernels::QuantType;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// An output directory, removed on drop.
pub struct Room(pub PathBuf);

impl Room {
    /// Creates the directory. `name` must be unique among the tests.
    pub fn new(name: &str) -> Room {
        let folder = std::env::temp_dir().join(format!("mainstem-quantize-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        Room(folder)
    }

    pub fn place(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the sorted file names in the directory.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("the folder is there").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn opened(path: &Path, rules: &str) -> ModelSource {
    let mut source = ModelSource::open(&ModelRef::Path(path.to_owned()), None).expect("the model opens");
    source.weight_rules = WeightRules::parse(rules).expect("the rules are well formed");
    source
}

pub fn target(path: PathBuf, format: OutputFormat) -> ExportTarget {
    ExportTarget { path, format, existing: Existing::Refuse, spec: None, threads: 2 }
}

/// Returns the name, number format and bytes of every loaded tensor of the model.
pub fn loaded(source: &ModelSource) -> Vec<(String, QuantType, Vec<u8>)> {
    let load = |piece| {
        let taken = tensor_slices::read_slice(&source.checkpoint, piece).expect("it can be taken");
        let taken = taken
            .requantize(source.load_type(piece), piece.rounding(&source.rounding), 1)
            .expect("it can be coded");
        (piece.name.clone(), taken.ty, taken.bytes.into_owned())
    };
    tensors::required_slices(&source.spec).into_iter().map(load).collect()
}

/// Detects wrong layouts, missing transpositions and misplaced parts.
#[test]
fn models_of_every_family_load_to_the_same_bytes_as_by_rules() {
    let (mut turned, mut coded) = (0, 0);
    // The experts of one are stored in another orientation once they are not MXFP4; docs/models.md says so.
    // Those of CTranslate2 are not written.
    let is_written = |name: &&str| *name != "gpt_oss_mxfp4" && !name.starts_with("ctranslate2");
    let names = decoders().iter().copied().chain(others()).filter(is_written);
    for (name, rules) in names.zip(["*=q4,f16", "*=q8_0"].into_iter().cycle()) {
        let (model, room) = (family(name, "quantize"), Room::new("family"));
        let source = opened(&model.0, rules);
        let parts = write_model(&source, &target(room.place("out"), OutputFormat::Safetensors));
        let parts: Vec<FormatTotals> = parts.unwrap_or_else(|error| panic!("{name}: {error:#}"));
        let written = opened(&room.place("out"), "");
        assert!(loaded(&source) == loaded(&written), "{name} by {rules}");
        assert_eq!((room.names(), &written.eos), (vec!["out".to_owned()], &source.eos), "{name}");
        let held: usize = written.checkpoint.tensors().map(|tensor| tensor.bytes_len()).sum();
        assert_eq!(held, parts.iter().map(|part| part.bytes_after).sum::<usize>(), "{name}");
        coded += parts.iter().filter(|part| part.ty.is_blocked()).map(|part| part.tensors).sum::<usize>();
        turned += written.checkpoint.tensors().filter(|tensor| tensor.is_transposed()).count();
    }
    // Otherwise these kinds would not be tested.
    assert!(turned > 5 && coded > 500, "{turned} turned, {coded} coded");
}

async fn answers(model: &Path, rules: &str) -> Vec<Outcome> {
    let engine =
        start::start_engine(&config(model, &[("model.weights", rules.into())])).await.expect("it loads");
    let requests = (0..4).map(|i| {
        let (prompt, seed) = (prompt(i, 3 + 9 * i), i as u64);
        let request = if i % 2 == 0 { greedy(&prompt, 12) } else { sampled(&prompt, 12, seed) };
        Request { prompt_logprobs: Some(2), logprobs: Some(2), ..request }
    });
    let outcomes = complete_all(&engine, requests).await;
    engine.stop();
    outcomes
}

fn run(arguments: &[&str]) -> Output {
    mainstem().arg("quantize").args(arguments).output().expect("it starts")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the path is text")
}

#[actix::test]
async fn the_demo_answers_with_the_same_bits_as_by_rules() {
    let (room, rules) = (Room::new("demo"), "*.down_proj.*=q6,*.v_proj.*=q4_K,q4");
    let out = room.place("small");
    let output = run(&["demo", text(&out), "--weights", rules]);
    let (printed, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{error}");
    for what in ["q6_b64t1", "q4_b32t1a", "q8_0", "bf16", "bits per number", text(&out)] {
        assert!(printed.contains(what), "{printed}");
    }
    let (by_rules, written) = (answers(Path::new(""), rules).await, answers(&out, "").await);
    for (number, (by_rules, written)) in by_rules.iter().zip(&written).enumerate() {
        assert!(!by_rules.tokens.is_empty());
        assert_eq!(
            (&by_rules.tokens, &by_rules.prompt),
            (&written.tokens, &written.prompt),
            "request {number}"
        );
    }
    // A quantized model can be quantized again.
    let again = run(&[text(&out), text(&room.place("smaller")), "--weights", "*.down_proj.*=q4"]);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    let (source, smaller) = (opened(&out, "*.down_proj.*=q4"), opened(&room.place("smaller"), ""));
    assert!(loaded(&source) == loaded(&smaller));
}

#[test]
fn the_settings_go_with_it_and_the_weights_do_not() {
    let (model, room) = (Copied::of("f16", "quantize-settings"), Room::new("settings"));
    for (name, content) in [
        ("chat_template.jinja", "{{ x }}"),
        ("LICENSE", "free"),
        ("pytorch_model.bin", "no"),
        (".secret", "no"),
    ] {
        std::fs::write(model.file(name), content).expect("it can be written");
    }
    let out = room.place("out");
    write_model(&opened(&model.0, "*=q8_0"), &target(out.clone(), OutputFormat::Safetensors))
        .expect("it is written");
    let own = Room(out.clone());
    let expected = [
        "LICENSE",
        "answers.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(own.names(), expected);
    for name in expected.iter().filter(|name| **name != "model.safetensors") {
        assert!(std::fs::read(out.join(name)).ok() == std::fs::read(model.file(name)).ok(), "{name}");
    }
}

/// A given specification becomes part of the written directory.
#[test]
fn a_specification_that_was_given_goes_with_it() {
    let (model, room) = (family("gpt2", "quantize-spec"), Room::new("spec"));
    let (_, shipped) =
        mainstem::specs::ALL.iter().find(|(file, _)| file.ends_with("gpt2.toml")).expect("it ships");
    let spec = room.place("own.toml");
    std::fs::write(&spec, format!("{shipped}\n# own")).expect("it can be written");
    let source = ModelSource::open(&ModelRef::Path(model.0.clone()), Some(&spec)).expect("it opens");
    let target =
        ExportTarget { spec: Some(spec.clone()), ..target(room.place("out"), OutputFormat::Safetensors) };
    write_model(&source, &target).expect("it is written");
    assert_eq!(std::fs::read(room.place("out/spec.toml")).ok(), std::fs::read(&spec).ok());
}

#[test]
fn what_cannot_be_written_is_refused_and_nothing_is_left() {
    let (room, model) = (Room::new("refused"), fixture("f16"));
    let (there, notes) = (room.place("there"), room.place("notes"));
    for (folder, file) in [(&there, "letter.odt"), (&there, "model.safetensors"), (&notes, "notes.md")] {
        std::fs::create_dir_all(folder).expect("a folder");
        std::fs::write(folder.join(file), "dear").expect("a file");
    }
    let file = room.place("notes/notes.md");
    let llama2c = fixture("llama2c/v0.bin");
    let gguf = room.place("out.gguf");
    for (arguments, code, reason) in [
        (vec![text(&model), text(&there), "--weights", "*=q8"], 1, "already exists; --force"),
        (vec![text(&model), text(&there), "--weights", "*=q8", "--force"], 1, "letter.odt"),
        (vec![text(&model), text(&notes), "--weights", "*=q8", "--force"], 1, "is not a written model"),
        (
            vec!["demo", text(&file), "--weights", "*=q8", "--force", "--format", "safetensors"],
            1,
            "is a file, but the output is a folder",
        ),
        (vec!["demo", text(&gguf), "--weights", "*=q4"], 1, "which GGUF cannot store"),
        (vec![text(&model), text(&gguf), "--weights", "*=q8", "--format", "safetensors"], 2, "--format"),
        (vec![text(&model), "out", "--weights", "q9"], 2, "'q9'"),
        (vec![text(&model), "out", "--weights", "no_such=q8"], 1, "'no_such'"),
        (
            vec![text(&llama2c), "out", "--weights", "q8"],
            1,
            "only a model folder or a GGUF file can be converted",
        ),
        (vec![text(&model), text(&model), "--weights", "*=q8", "--force"], 1, "the model that is read"),
        (
            vec![text(&model), text(model.parent().expect("it has one")), "--weights", "*=q8", "--force"],
            1,
            "the model that is read",
        ),
        (vec![text(&model), "no/such/folder", "--weights", "*=q8"], 1, "no/such"),
    ] {
        let output = Command::new(mainstem().get_program())
            .arg("quantize")
            .args(&arguments)
            .current_dir(&room.0)
            .output();
        let output = output.expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(reason), "{arguments:?}: {error}");
        assert_eq!(room.names(), ["notes", "there"], "{arguments:?}");
    }
    assert!(model.join("model.safetensors").exists() && file.exists() && there.join("letter.odt").exists());
}

#[test]
fn a_written_model_is_replaced_on_request() {
    let room = Room::new("replaced");
    let out = room.place("out");
    for (rules, ty) in [("*=q8", QuantType::Q8_0), ("*=q4", QuantType::Q4_B32T1A)] {
        let output = run(&[text(&fixture("f16")), text(&out), "--weights", rules, "--force"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(opened(&out, "").checkpoint.tensors().any(|tensor| tensor.quant_type().ok() == Some(ty)));
        assert_eq!(room.names(), ["out"]);
    }
}

/// A fused tensor is refused if the rules assign different formats to its parts.
#[test]
fn a_tensor_whose_parts_differ_is_refused_with_a_rule_that_helps() {
    let (model, room) = (family("phi3", "quantize-parts"), Room::new("parts"));
    let mut source = opened(&model.0, "k=q8_0,qkv=q4");
    source.spec.decoder.as_mut().expect("it has one").layers[0].attention.k.weight.role = "k";
    let target = target(room.place("out"), OutputFormat::Safetensors);
    let error = format!("{:#}", write_model(&source, &target).expect_err("two formats"));
    assert!(
        error.contains("qkv_proj.weight") && error.contains("q8_0") && error.contains("q4_b32t1a"),
        "{error}"
    );
    let rule = error.split('\'').nth(3).expect("it names a rule").to_owned();
    source.weight_rules = WeightRules::parse(&format!("{rule},k=q8_0")).expect("the rule is well formed");
    write_model(&source, &target).expect("the rule helps");
}

#[test]
fn what_is_stopped_leaves_nothing() {
    let (model, room) = (family("mistral", "quantize-stopped"), Room::new("stopped"));
    let source = opened(&model.0, "*=q8");
    source.progress.stop();
    let error = write_model(&source, &target(room.place("out"), OutputFormat::Safetensors))
        .expect_err("it is stopped");
    assert!(format!("{error:#}").contains("stopped"), "{error:#}");
    assert!(room.names().is_empty(), "{:?}", room.names());
}

/// A file size limit simulates a full disk.
#[test]
fn a_full_disk_is_reported_and_leaves_nothing() {
    let room = Room::new("full");
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" quantize demo out --weights '*.down_proj.*=q4'";
    let output =
        Command::new("sh").args(["-c", script]).arg(mainstem().get_program()).current_dir(&room.0).output();
    let output = output.expect("there is a shell");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot write out/model.safetensors") && error.contains("os error"), "{error}");
    assert!(room.names().is_empty(), "{:?}", room.names());
}
