//! Tests of models of hub directories that `mainstem quantize` writes as GGUF: the answers of transformers,
//! and the same texts and tokens as from the directory.

use super::writer::Written;
use crate::common::{Copied, complete_all, config, fixture, greedy, mainstem, prompt, within};
use crate::families::family;
use crate::oracle::check_at;
use crate::quantize::{Room, opened, target};
use mainstem::cli::start;
use mainstem::export::{OutputFormat, write_model};
use mainstem::formats::{Checkpoint, Folder};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use mainstem::text::Tokenizer;
use mainstem::text::tokenizer::gguf::{GgufVocabulary, read};
use serde_json::{Value, json};
use std::path::Path;

/// Models with their recorded answers, whose tokenizer GGUF has.
const MODELS: [&str; 12] = [
    "mha",
    "gqa",
    "mqa",
    "tied",
    "biased",
    "odd_head_dim",
    "rope_linear",
    "rope_llama3",
    "rope_parameters",
    "sharded",
    "f16",
    "bf16",
];

/// Families with recorded answers, whose tokenizer only the key `tokenizer.huggingface.json` can hold.
const FAMILIES: [&str; 4] = ["qwen2", "qwen3", "gemma", "yarn"];

/// Writes a model in the formats it has.
fn written(model: &Path, room: &Room) -> std::path::PathBuf {
    let file = room.place("model.gguf");
    let done = write_model(&opened(model, ""), &target(file.clone(), OutputFormat::Gguf));
    done.unwrap_or_else(|error| panic!("{}: {error:#}", model.display()));
    file
}

#[actix::test]
async fn written_files_give_the_recorded_answers() {
    for name in MODELS {
        let room = Room::new(&format!("gguf-{name}"));
        check_at(&written(&fixture(name), &room), &format!("{name}/answers.json"), "cpu").await;
    }
    for name in FAMILIES {
        let (model, room) = (family(name, "to-gguf"), Room::new(&format!("gguf-{name}")));
        check_at(&written(&model.0, &room), &format!("families/{name}/answers.json"), "cpu").await;
    }
}

/// GGUF has no key for the scale of these models' attention, so only a model with the usual one can be
/// written.
#[actix::test]
async fn a_model_that_gguf_cannot_express_is_refused_and_others_of_its_family_are_not() {
    for name in ["gemma2", "gemma3"] {
        let (model, room) = (family(name, "to-gguf-scale"), Room::new(&format!("gguf-scale-{name}")));
        let place = target(room.place("model.gguf"), OutputFormat::Gguf);
        let error =
            format!("{:#}", write_model(&opened(&model.0, ""), &place).expect_err("its scale is another"));
        assert!(
            error.contains("factor of attention scores") && error.contains("GGUF cannot express"),
            "{error}"
        );
        assert!(room.names().is_empty());
        model.configure("query_pre_attn_scalar", json!(12));
        let (folder, file) = (tokens(&model.0).await, tokens(&written(&model.0, &room)).await);
        assert_eq!(folder, file, "{name}");
    }
    for (name, reason) in [("dynamic_ntk", "dynamic rotary scaling"), ("falcon_7b", "the type 'falcon'")] {
        let (model, room) = (family(name, "to-gguf-no"), Room::new(&format!("gguf-no-{name}")));
        let place = target(room.place("model.gguf"), OutputFormat::Gguf);
        let error = format!("{:#}", write_model(&opened(&model.0, ""), &place).expect_err("it is refused"));
        assert!(error.contains(reason) && error.contains(model.0.to_str().expect("text")), "{error}");
    }
}

/// Returns greedy tokens of some prompts.
async fn tokens(model: &Path) -> Vec<Vec<u32>> {
    let engine = start::start_engine(&config(model, &[])).await.expect("it loads");
    let prompts = (0..4).map(|at| prompt(at, 3 + 9 * at).iter().map(|id| id % 96).collect::<Vec<_>>());
    let requests = prompts.map(|prompt| greedy(&prompt, 12));
    let outcomes = complete_all(&engine, requests).await;
    engine.stop();
    outcomes.iter().map(|outcome| outcome.ids()).collect()
}

/// Returns the answers of the API to a text and to a chat.
async fn answers(model: &str) -> Vec<Value> {
    let settings = config(Path::new(model), &[]);
    let engine = start::start_engine(&settings).await.expect("it loads");
    let api = LocalApi::new(ServeParts::from(&engine), settings.server.clone());
    let mut answers = Vec::new();
    for (path, mut body) in [
        ("/v1/completions", json!({"prompt": "Once upon a time,\n\n the  fox's 123 berries"})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "Hello! What is your name?"}]}),
        ),
    ] {
        body["temperature"] = 0.into();
        body["max_tokens"] = 24.into();
        let Ok(ResponseBody::Json(bytes)) = within(api.post(path, &body)).await else {
            panic!("{path}: no answer")
        };
        let answer: Value = serde_json::from_slice(&bytes).expect("it is JSON");
        answers.push(json!([answer["choices"], answer["usage"]["prompt_tokens"]]));
    }
    engine.stop();
    answers
}

/// A file alone, without the folder's tokenizer and template beside it, answers texts and chats as the folder
/// does with the same number formats.
#[actix::test]
async fn a_written_file_alone_is_served_with_the_answers_of_its_folder() {
    let room = Room::new("gguf-served");
    let [folder, file] = ["folder", "demo.gguf"].map(|name| room.place(name).display().to_string());
    for out in [&folder, &file] {
        let done =
            mainstem().args(["quantize", "demo", out, "--weights", "*=q8_0"]).output().expect("it starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    let answers = [answers(&folder).await, answers(&file).await];
    assert!(answers[0][1].to_string().contains("I am Brook"), "{}", answers[0][1]);
    assert_eq!(answers[0], answers[1]);
}

/// Programs that read only the keys of ggml encode texts alike, with the tokens around them.
#[test]
fn the_vocabulary_for_other_programs_encodes_alike() {
    let room = Room::new("gguf-vocabulary");
    let model = Copied::of("gqa", "to-gguf-vocabulary");
    let file = written(&model.0, &room);
    let (_, gguf) = Checkpoint::open_gguf(&file).expect("it opens");
    let mut vocabulary = GgufVocabulary::from_file(&gguf).expect("it is read").expect("it has one");
    assert!(vocabulary.huggingface_json.take().is_some());
    assert_eq!((vocabulary.model.as_str(), vocabulary.pre.as_deref()), ("gpt2", Some("gpt-2")));
    let (own, folder) =
        (read(&vocabulary).expect("it is whole"), Tokenizer::from_folder(&Folder::disk(&model.0)));
    let folder = folder.expect("the folder's is read");
    for text in ["", "the cat's 123 rains,\n\n  Grüße 🌊", "<s>a</s>"] {
        for around in [true, false] {
            let [ours, theirs] = [&own, &folder].map(|one| one.encode(text, around).expect("it is encoded"));
            assert_eq!(ours, theirs, "{text:?}");
        }
    }
    let keys = Written::read(&std::fs::read(&file).expect("it is there")).entries;
    assert!(keys.iter().any(|(key, ..)| key == "llama.rope.dimension_count"));
}
