//! Tests of vocabularies in GGUF files: their keys, and round trips of texts.

use super::writer::{F32, I32, Tensor, U8, Written};
use super::{Placed, writer};
use crate::common::{complete, config, fixture, greedy, mainstem};
use mainstem::cli::start;
use mainstem::formats::Checkpoint;
use mainstem::request::Request;
use mainstem::text::GgufVocabulary;
use mainstem_kernels::random::philox;
use serde_json::{Value, json};

/// Vocabularies in GGUF keys, with llama.cpp's token ids for some texts.
fn cases() -> (Vec<String>, Vec<Value>) {
    let read = |name: &str| -> Value {
        let content = std::fs::read(fixture("tokenizers").join(name)).expect("the fixture is there");
        serde_json::from_slice(&content).expect("it is JSON")
    };
    let (all, texts) = (read("gguf.json"), read("texts.json"));
    let cases = all["cases"].as_array().expect("a list").clone().into_iter().map(|mut case| {
        let mut keys = all["vocabularies"][case["vocabulary"].as_str().expect("a name")].clone();
        let own = case["keys"].as_object().expect("keys").clone();
        keys.as_object_mut().expect("keys").extend(own);
        case["all"] = keys;
        case
    });
    (serde_json::from_value(texts).expect("texts"), cases.collect())
}

/// Writes the vocabulary's keys.
fn set_vocabulary(file: &mut Written, keys: &Value) {
    for (name, value) in keys.as_object().expect("keys") {
        let key = format!("tokenizer.ggml.{name}");
        match value {
            Value::Bool(flag) => file.set_bool(&key, *flag),
            Value::String(text) => file.set_string(&key, text),
            Value::Number(number) => file.set_u32(&key, number.as_u64().expect("an id") as u32),
            Value::Array(list) => set_list(file, &key, list),
            other => panic!("{key}: {other}"),
        }
    }
}

fn set_list(file: &mut Written, key: &str, list: &[Value]) {
    let numbers = || list.iter().map(|number| number.as_f64().expect("a number"));
    match key.rsplit('.').next() {
        Some("scores") => {
            let scores: Vec<_> = numbers().map(|score| (score as f32).to_le_bytes().to_vec()).collect();
            file.set_list(key, F32, &scores);
        }
        Some("token_type") => {
            let kinds: Vec<_> = numbers().map(|kind| (kind as i32).to_le_bytes().to_vec()).collect();
            file.set_list(key, I32, &kinds);
        }
        Some("precompiled_charsmap") => {
            file.set_list(key, U8, &numbers().map(|byte| vec![byte as u8]).collect::<Vec<_>>());
        }
        _ => file.set_strings(key, list.iter().map(|text| text.as_str().expect("a text"))),
    }
}

/// Returns a small Llama model with random weights and this vocabulary.
fn model(keys: &Value) -> Written {
    const HIDDEN: usize = 16;
    let vocab = keys["tokens"].as_array().expect("tokens").len();
    let mut file = Written::new("llama");
    for (key, value) in [
        ("embedding_length", HIDDEN),
        ("block_count", 1),
        ("feed_forward_length", 2 * HIDDEN),
        ("context_length", 256),
        ("attention.head_count", 2),
    ] {
        file.set_u32(&format!("llama.{key}"), value as u32);
    }
    file.set_f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    set_vocabulary(&mut file, keys);
    let number = |at: usize| (philox([at as u32, 1, 2, 3], [4, 5])[0] >> 8) as f32 / 2f32.powi(24) - 0.5;
    for (name, shape) in [
        ("token_embd", vec![vocab, HIDDEN]),
        ("output_norm", vec![HIDDEN]),
        ("blk.0.attn_norm", vec![HIDDEN]),
        ("blk.0.attn_q", vec![HIDDEN, HIDDEN]),
        ("blk.0.attn_k", vec![HIDDEN, HIDDEN]),
        ("blk.0.attn_v", vec![HIDDEN, HIDDEN]),
        ("blk.0.attn_output", vec![HIDDEN, HIDDEN]),
        ("blk.0.ffn_norm", vec![HIDDEN]),
        ("blk.0.ffn_gate", vec![2 * HIDDEN, HIDDEN]),
        ("blk.0.ffn_up", vec![2 * HIDDEN, HIDDEN]),
        ("blk.0.ffn_down", vec![HIDDEN, 2 * HIDDEN]),
    ] {
        let bytes =
            (0..shape.iter().product()).flat_map(|at| number(at + 7 * name.len()).to_le_bytes()).collect();
        file.tensors.push(Tensor::new(&format!("{name}.weight"), &shape, 0, bytes));
    }
    file
}

/// The directory contains a tokenizer of another model, which must be ignored.
fn placed(name: &str, file: &Written) -> Placed {
    Placed::of(&format!("vocabulary-{name}"), &file.bytes(3, 32, |at| at), "families")
}

#[actix::test]
async fn text_is_served_by_the_files_own_vocabulary() {
    let (texts, cases) = cases();
    let mut served = 0;
    for case in
        cases.iter().filter(|case| ["llama", "gpt-2"].contains(&case["name"].as_str().unwrap_or_default()))
    {
        let name = case["name"].as_str().expect("a name");
        let placed = placed(name, &model(&case["all"]));
        let engine = start::start_engine(&config(&placed.file(), &[])).await.expect("it starts");
        let prompt = "The quick brown fox jumps over the lazy dog.";
        let at = texts.iter().position(|text| text == prompt).expect("it is among the texts");
        let ids: Vec<u32> = serde_json::from_value(json!([case["before"], case["ids"][at], case["after"]]))
            .map(|parts: [Vec<u32>; 3]| parts.concat())
            .expect("ids");
        assert_eq!(engine.tokenizer.encode(prompt, true).expect("it is text"), ids, "{name}");
        let request = Request { ignore_eos: false, ..greedy(&ids, 8) };
        let answer = complete(&engine, request).await.ids();
        let text = |ids: &[u32]| engine.tokenizer.decode(ids, true).expect("ids are text");
        let whole = text(&[ids.clone(), answer].concat());
        let expected = whole.strip_prefix(&text(&ids)).expect("an answer goes on");
        engine.stop();

        let flags = [
            "--raw",
            "--json",
            "--temperature",
            "0",
            "--max-tokens",
            "8",
            "--kv-type",
            "f32",
            "--threads",
            "2",
        ];
        let output = mainstem().arg("run").arg(placed.file()).arg(prompt).args(flags).output();
        let output = output.expect("the program starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let object: Value = serde_json::from_slice(&output.stdout).expect("it is one object");
        assert_eq!(object["usage"]["prompt_tokens"], ids.len(), "{name}");
        assert_eq!(object["choices"][0]["text"], expected, "{name}");
        assert!(!expected.is_empty(), "{name}");
        served += 1;
    }
    assert_eq!(served, 2);
}

/// The token ids of llama.cpp, for texts in which all implementations agree.
#[test]
fn texts_of_every_kind_of_vocabulary_have_its_ids() {
    let (texts, cases) = cases();
    for case in &cases {
        let name = case["name"].as_str().expect("a name");
        let placed = placed(&format!("ids-{}", name.replace(' ', "-")), &model(&case["all"]));
        let source =
            mainstem::model::ModelSource::open(&mainstem::model::ModelRef::Path(placed.file()), None);
        let tokenizer = start::open_tokenizer(&source.expect("it opens")).expect("it has a vocabulary");
        let plain = |text: &str| text.is_ascii() && !text.contains(['<', '\u{b}']);
        for (text, ids) in
            texts.iter().zip(case["ids"].as_array().expect("a list")).filter(|(text, _)| plain(text))
        {
            let ids: Vec<u32> = serde_json::from_value(ids.clone()).expect("ids");
            assert_eq!(tokenizer.encode(text, false).expect("it is text"), ids, "{name}: {text:?}");
        }
    }
}

#[test]
fn every_key_of_a_vocabulary_is_read_under_its_name() {
    let mut file = writer("q4_0.gguf");
    let keys = json!({
        "model": "t5", "pre": "p", "tokens": ["a", "é"], "scores": [-1.5, 0.0], "token_type": [1, 3],
        "merges": ["a b"], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 3,
        "seperator_token_id": 4,
        "cls_token_id": 5, "add_bos_token": true, "add_eos_token": false, "add_space_prefix": true,
        "remove_extra_whitespaces": false, "precompiled_charsmap": [0, 255], "normalizer.lowercase": true,
        "normalizer.strip_accents": false,
    });
    set_vocabulary(&mut file, &keys);
    let strings = |list: &[&str]| list.iter().map(|text| text.to_string()).collect();
    file.set_string("general.name", "n");
    let expected = GgufVocabulary {
        architecture: Some("llama".to_owned()),
        name: Some("n".to_owned()),
        model: "t5".to_owned(),
        pre: Some("p".to_owned()),
        tokens: strings(&["a", "é"]),
        scores: vec![-1.5, 0.0],
        token_type: vec![1, 3],
        merges: strings(&["a b"]),
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        unknown_token_id: Some(3),
        separator_token_id: Some(4),
        cls_token_id: Some(5),
        add_bos_token: Some(true),
        add_eos_token: Some(false),
        add_space_prefix: Some(true),
        remove_extra_whitespaces: Some(false),
        precompiled_charsmap: vec![0, 255],
        lowercase: Some(true),
        strip_accents: Some(false),
        huggingface_json: None,
    };
    let read = |file: &Written, name: &str| {
        let placed = placed(name, file);
        let (_, gguf) = Checkpoint::open_gguf(&placed.file()).expect("it opens");
        GgufVocabulary::from_file(&gguf).map(|read| format!("{read:?}"))
    };
    assert_eq!(read(&file, "keys").expect("it is sound"), format!("{:?}", Some(expected)));
    // Bytes are signed in some files.
    file.set_list("tokenizer.ggml.precompiled_charsmap", 1, &[vec![0], vec![255]]);
    assert!(read(&file, "signed").expect("it is sound").contains("precompiled_charsmap: [0, 255]"));
    file.set("tokenizer.ggml.unknown_token_id", I32, (-1i32).to_le_bytes().to_vec());
    assert!(read(&file, "no-unknown").expect("it is sound").contains("unknown_token_id: None"));
    file.set_string("tokenizer.ggml.model", "no_vocab");
    assert_eq!(read(&file, "none").expect("it is sound"), "None");
}

/// End tokens come from keys, from tokens' names, and without keys from the kind of vocabulary.
#[test]
fn a_text_ends_with_the_tokens_that_llama_cpp_ends_it_with() {
    let (_, cases) = cases();
    let ends = |case: &str, edit: fn(&mut Written)| {
        let case = cases.iter().find(|it| it["name"] == case).expect("it is there");
        let mut file = model(&case["all"]);
        edit(&mut file);
        let placed = placed("ends", &file);
        let model = mainstem::model::ModelRef::Path(placed.file());
        start::open(&model, None).expect("it opens").0.eos.clone()
    };
    assert_eq!(ends("llama", |_| ()), [2, 4], "</s> and <|im_end|>");
    assert_eq!(ends("llama", |file| file.set_u32("tokenizer.ggml.eot_token_id", 4)), [2, 4]);
    assert_eq!(ends("roberta", |_| ()), [2, 5], "</s> and <|endoftext|>");
    assert_eq!(ends("roberta", |file| file.unset("tokenizer.ggml.eos_token_id")), [5]);
    let unnamed = |file: &mut Written| {
        file.unset("tokenizer.ggml.eos_token_id");
        file.set("tokenizer.ggml.padding_token_id", I32, (-1i32).to_le_bytes().to_vec());
        let (.., tokens) =
            file.entries.iter_mut().find(|(key, ..)| key == "tokenizer.ggml.tokens").expect("it is there");
        let name = b"<|im_end|>";
        let at = tokens.windows(name.len()).position(|bytes| bytes == name).expect("it is among them");
        tokens[at + 2..at + 4].copy_from_slice(b"xx");
    };
    assert_eq!(ends("llama", unnamed), [2], "no key and no name, so that of the kind");
}

#[test]
fn a_vocabulary_that_cannot_be_is_refused_by_file_and_key() {
    type Edit = fn(&mut Written);
    let cases: [(Edit, &str); 7] = [
        (|w| w.unset("tokenizer.ggml.model"), "key 'tokenizer.ggml.model': it is missing"),
        (|w| w.set_u32("tokenizer.ggml.pre", 1), "key 'tokenizer.ggml.pre': 1 is not a string"),
        (
            |w| w.set_u32("tokenizer.ggml.add_bos_token", 1),
            "key 'tokenizer.ggml.add_bos_token': 1 is not true",
        ),
        (
            |w| w.set_string("tokenizer.ggml.scores", "x"),
            "key 'tokenizer.ggml.scores': a string is not an array",
        ),
        (
            |w| w.set_list("tokenizer.ggml.precompiled_charsmap", I32, &[256i32.to_le_bytes().to_vec()]),
            "key 'tokenizer.ggml.precompiled_charsmap': 256 is not a byte",
        ),
        (|w| w.unset("tokenizer.ggml.merges"), "it has no merges"),
        (|w| w.set_string("tokenizer.ggml.model", "rwkv"), "its tokenizer 'rwkv' is not supported"),
    ];
    for (number, (edit, reason)) in cases.into_iter().enumerate() {
        let mut file = writer("f16.gguf");
        edit(&mut file);
        let placed = placed(&format!("refused-{number}"), &file);
        let source =
            mainstem::model::ModelSource::open(&mainstem::model::ModelRef::Path(placed.file()), None);
        let error =
            format!("{:#}", start::open_tokenizer(&source.expect("it opens")).expect_err("it is refused"));
        let path = placed.file().display().to_string();
        assert!(error.starts_with(&path) && error.contains(reason), "{error}\nexpected: {reason}");
    }
}

#[test]
fn a_file_without_a_vocabulary_or_a_tokenizer_beside_it_says_so() {
    let mut file = writer("f16.gguf");
    file.entries.retain(|(key, ..)| !key.starts_with("tokenizer."));
    let placed = placed("absent", &file);
    let run = || mainstem().arg("run").arg(placed.file()).args(["hello", "--max-tokens", "1"]).output();
    assert!(run().expect("the program starts").status.success(), "the tokenizer beside it serves");
    std::fs::remove_file(placed.0.join("tokenizer.json")).expect("it was there");
    let output = run().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let expected = "model.gguf has no vocabulary, and its folder has no tokenizer.json or tokenizer.bin";
    assert!(error.contains(expected), "{error}");
}
