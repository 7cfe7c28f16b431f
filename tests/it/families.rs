//! Tests of every model family in its original repository layout against transformers
//! (tests/oracle/make_families.py).

use crate::common::{Copied, config, fixture, mainstem};
use crate::kinds::{ENCODER_DECODERS, ENCODERS};
use crate::oracle::{check_alone, check_at, check_prompts, check_under};
use mainstem::cli::start;
use mainstem::model::{ModelRef, ModelSource, load};
use mainstem::specs;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Decoders.
const DECODERS: &[&str] = &[
    "apertus",
    "arcee",
    "baichuan2",
    "baichuan2_13b",
    "baichuan_13b",
    "baichuan_7b",
    "biogpt",
    "bloom",
    "bloom_heads6",
    "chatglm2",
    "codegen",
    "cohere",
    "cohere2",
    "cohere_plus",
    "deepseek_moe",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "dots1",
    "dynamic_ntk",
    "ernie4_5_moe",
    "ernie4_5",
    "exaone4",
    "exaone4_full",
    "falcon_40b",
    "falcon_7b",
    "falcon_rw",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_bigcode_heads",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox_sequential",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gptj",
    "granitemoe",
    "granite",
    "helium",
    "hunyuan",
    "hunyuan_moe",
    "internlm",
    "internlm2",
    "invented_one",
    "llama4_text",
    "minicpm",
    "minicpm3",
    "minimax_m2",
    "mistral",
    "mixtral",
    "olmoe",
    "mpt",
    "mpt_story",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "openelm",
    "opt",
    "opt_350m",
    "orion",
    "persimmon",
    "phi",
    "phi3",
    "phi3_longrope",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen2_window",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "stablelm_12b",
    "starcoder2",
    "xglm",
    "xverse",
    "yarn",
    "yarn_attention_factor",
];

/// Returns a copy of a family's model with the tokenizer shared by all families.
pub fn family(name: &str, test: &str) -> Copied {
    let model = Copied::of(&format!("families/{name}"), &format!("{test}-{name}"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("families").join(file), model.file(file)).expect("a file is copied");
    }
    // The second version of a family may be identified by a vocabulary size that small models lack.
    if name.starts_with("baichuan2") {
        let (_, shipped) =
            specs::ALL.iter().find(|(file, _)| file.ends_with("baichuan.toml")).expect("it ships");
        assert!(shipped.contains("125696"));
        std::fs::write(model.file("spec.toml"), shipped.replace("125696", "96")).expect("it can be written");
    }
    model
}

/// Returns the names of all decoders.
pub fn decoders() -> &'static [&'static str] {
    DECODERS
}

/// Returns the names of all other models.
pub fn others() -> impl Iterator<Item = &'static str> {
    ENCODERS.into_iter().chain(ENCODER_DECODERS)
}

fn answers(name: &str) -> String {
    format!("families/{name}/answers.json")
}

#[actix::test]
async fn decoders_of_every_family_give_the_recorded_answers_alone_and_fused() {
    for name in DECODERS.iter().copied() {
        let model = family(name, "cpu");
        check_at(&model.0, &answers(name), "cpu").await;
        check_alone(&model.0, &answers(name), "cpu").await;
    }
}

#[actix::test]
async fn and_so_they_do_on_the_reference_backend() {
    for name in DECODERS.iter().copied() {
        let model = family(name, "reference");
        check_at(&model.0, &answers(name), "reference").await;
    }
}

/// Prompts of 40 tokens attend to keys and values of all heads, and shorter ones to latents.
#[actix::test]
async fn models_with_latent_attention_give_them_with_openings_too() {
    for name in ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "minicpm3"] {
        for kind in ["cpu", "reference"] {
            let model = family(name, &format!("openings-{kind}"));
            check_under(&model.0, &answers(name), kind, &[("attention.mla", "fast".into())]).await;
        }
    }
    let other = family("qwen2", "openings");
    let settings = config(&other.0, &[("attention.mla", "fast".into())]);
    let error = start::open_source(&ModelRef::Path(other.0.clone()), &settings.model).err();
    let error = format!("{:#}", error.expect("it has no latent attention"));
    let expected = [
        "attention.mla is \"fast\"",
        other.0.to_str().expect("it is text"),
        "not all layers have latent attention",
    ];
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    let short = family("deepseek_v2", "openings-short");
    for (key, value) in [("scheduler.token_budget", 16), ("scheduler.batch_rows", 31), ("kv.max_context", 24)]
    {
        let settings = config(&short.0, &[("attention.mla", "fast".into()), (key, value.into())]);
        let error = start::start_engine(&settings).await.err().expect("no opening is so short");
        let error = format!("{error:#}");
        let expected = ["attention.mla is \"fast\"", &format!("{key} is {value}"), "at least 32 tokens"];
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    }
    let classifying = family("deepseek_v2", "openings-classifier");
    let settings = [("attention.mla", "fast".into()), ("model.classifier_tokens", "no,yes".into())];
    let settings = config(&classifying.0, &settings);
    let error = start::open_source(&ModelRef::Path(classifying.0.clone()), &settings.model).err();
    let error = format!("{:#}", error.expect("texts that are classified have no openings"));
    assert!(error.contains("embeds or classifies texts"), "{error}");
}

/// Log-probabilities with weights and cache in 16 bits: BF16 has 8 bits of a number, F16 11.
const BOUNDS: [(&str, f32); 2] = [("bf16", 0.25), ("f16", 0.04)];

/// Models stored in F32, with weights and cache rounded to 16 bits, are close to the full-precision answers.
#[actix::test]
async fn rounded_to_16_bits_a_model_says_nearly_the_same() {
    let mut tried = 0;
    for name in DECODERS.iter().copied() {
        for (ty, bound) in BOUNDS {
            let model = family(name, ty);
            if !round(&model.file("model.safetensors"), ty) {
                break;
            }
            check_prompts(&model.0, &answers(name), &[("kv.type", ty.into())], bound).await;
            tried += 1;
        }
    }
    assert!(tried >= 20, "only {tried} were tried");
}

/// Converts the numbers of the file to this type if all of them are F32. Returns whether they were.
fn round(file: &Path, ty: &str) -> bool {
    let stored = std::fs::read(file).expect("the weights are there");
    let (len, rest) = stored.split_at(8);
    let len = u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize;
    let mut head: serde_json::Map<String, Value> =
        serde_json::from_slice(&rest[..len]).expect("a head of JSON");
    head.remove("__metadata__");
    if head.values().any(|tensor| tensor["dtype"] != "F32") {
        return false;
    }
    let mut numbers = Vec::new();
    for tensor in head.values_mut() {
        let offset = |end: usize| tensor["data_offsets"][end].as_u64().expect("an offset") as usize;
        let bytes = &rest[len..][offset(0)..offset(1)];
        let begin = numbers.len();
        for number in bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)) {
            numbers.extend(match ty {
                "bf16" => half::bf16::from_f32(number).to_le_bytes(),
                _ => half::f16::from_f32(number).to_le_bytes(),
            });
        }
        tensor["dtype"] = ty.to_uppercase().into();
        tensor["data_offsets"] = json!([begin, numbers.len()]);
    }
    let head = Value::from(head).to_string();
    let parts = [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &numbers];
    std::fs::write(file, parts.concat()).expect("it can be written");
    true
}

/// A tensor used by two parts must have the shape that both need, or the model is refused before it is
/// loaded.
#[test]
fn a_tensor_of_two_uses_must_have_both_shapes() {
    let model = family("qwen2", "two-uses");
    let spec = "base = 'qwen2'\nmodel_types = ['qwen2']\nignored = ['model.norm.weight']\n\
                [tensors]\nnorm = 'model.embed_tokens.weight'\n";
    std::fs::write(model.file("spec.toml"), spec).expect("it can be written");
    let error = ModelSource::open(&ModelRef::Path(model.0.clone()), None).err().expect("it is refused");
    let error = format!("{error:#}");
    assert!(error.contains("'model.embed_tokens.weight' has shape [96, 32]"), "{error}");
}

/// Every fixture directory is used by a test.
#[test]
fn every_family_is_tried() {
    let folders = fixture("families").read_dir().expect("the folder is there").flatten();
    let folders = folders.filter(|entry| entry.path().is_dir());
    let mut folders: Vec<String> =
        folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    folders.sort();
    let mut tried: Vec<&str> = DECODERS.iter().copied().chain(others()).collect();
    tried.sort();
    assert_eq!(tried, folders);
}

/// Names with slashes, and cross-attention keys and values in one tensor, as in files of other programs: the
/// biases are found by the names of the weights.
#[actix::test]
async fn a_model_answers_the_same_with_names_of_another_style() {
    let model = family("m2m100", "renamed");
    let weights = model.file("model.safetensors");
    let stored = std::fs::read(&weights).expect("the weights are there");
    let mut tensors = tensors_of(&stored);
    for layer in 0..2 {
        for part in ["weight", "bias"] {
            let name = |matrix: &str| format!("model.decoder.layers.{layer}.encoder_attn.{matrix}.{part}");
            let (mut keys, values) = (tensors[&name("k_proj")].clone(), tensors[&name("v_proj")].clone());
            keys.0["shape"][0] = (2 * keys.0["shape"][0].as_u64().expect("a size")).into();
            keys.1.extend(values.1);
            tensors.insert(name("kv_proj"), keys);
            for matrix in ["k_proj", "v_proj"] {
                tensors.remove(&name(matrix));
            }
        }
    }
    let renamed = tensors.into_iter().map(|(name, tensor)| (name.replace('.', "/"), tensor)).collect();
    std::fs::write(&weights, safetensors(renamed)).expect("it can be written");
    let (_, shipped) = specs::ALL.iter().find(|(file, _)| file.ends_with("m2m_100.toml")).expect("it ships");
    let is_name = |line: &&str| ["weight\"", "prefixes", "ignored"].iter().any(|part| line.contains(part));
    let renamed = |line: &str| match line {
        line if line.starts_with("cross_v =") => String::new(),
        line if is_name(&line) => line.replace('.', "/") + "\n",
        line => line.to_owned() + "\n",
    };
    let spec: String = shipped.lines().map(renamed).collect();
    let fused = spec.replace(
        "cross_k = \"decoder/layers/{i}/encoder_attn/k_proj/weight\"",
        "cross_kv = \"decoder/layers/{i}/encoder_attn/kv_proj/weight\"",
    );
    assert!(fused.contains("kv_proj"));
    std::fs::write(model.file("spec.toml"), fused).expect("it can be written");
    check_at(&model.0, &answers("m2m100"), "cpu").await;
}

/// A model of CTranslate2 has its settings in its weight file, and vocabularies without a tokenizer.
#[test]
fn ctranslate2s_numbers_and_vocabularies_are_inspected_and_not_written() {
    let model = family("ctranslate2_marian_two_vocabularies", "inspected");
    let inspect = |model: &Copied| {
        let output = mainstem().args(["inspect", "--json"]).arg(&model.0).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).expect("it is JSON")
    };
    // The tokenizer has a word more than the target vocabulary. The decoder has a start token of its own.
    let report = inspect(&model);
    assert_eq!(report["tokenizer"], json!({ "error": null, "tokens": 95, "source_tokens": 96 }));
    let own: Vec<&Value> = report["unread_keys"].as_array().expect("a list").iter().collect();
    assert!(own.is_empty(), "{own:?}");
    let report = inspect(&family("ctranslate2_marian", "inspected"));
    let tensor = |name: &str| {
        let mut tensors = report["tensors"].as_array().expect("a list").iter();
        let found = tensors.find(|tensor| tensor["name"] == name).expect("it is required");
        (found["stored"].clone(), found["type"].clone())
    };
    for (name, ty) in [
        ("decoder/embeddings/weight", "q8_0"),
        ("encoder/layer_0/ffn/linear_0/weight", "q8_0"),
        ("encoder/layer_0/ffn/linear_1/weight", "f16"), // of 48 columns
    ] {
        assert_eq!(tensor(name), ("int8".into(), ty.into()), "{name}");
    }
    let out = model.0.join("out");
    let output =
        mainstem().args(["quantize", "--weights", "q8"]).arg(&model.0).arg(&out).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("models of CTranslate2 are not written"), "{error}");
}

/// A tensor of a safetensors file: its entry and its bytes.
type StoredTensor = (Value, Vec<u8>);

fn tensors_of(file: &[u8]) -> BTreeMap<String, StoredTensor> {
    let (len, rest) = file.split_at(8);
    let len = u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize;
    let mut head: serde_json::Map<String, Value> =
        serde_json::from_slice(&rest[..len]).expect("a head of JSON");
    head.remove("__metadata__");
    let tensor = |(name, entry): (String, Value)| {
        let offset = |end: usize| entry["data_offsets"][end].as_u64().expect("an offset") as usize;
        let bytes = rest[len..][offset(0)..offset(1)].to_vec();
        (name, (entry, bytes))
    };
    head.into_iter().map(tensor).collect()
}

fn safetensors(tensors: BTreeMap<String, StoredTensor>) -> Vec<u8> {
    let (mut head, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (name, (mut entry, numbers)) in tensors {
        entry["data_offsets"] = json!([bytes.len(), bytes.len() + numbers.len()]);
        bytes.extend(numbers);
        head.insert(name, entry);
    }
    let head = Value::from(head).to_string();
    [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &bytes].concat()
}

/// Layers with the same tensors are loaded once, however many there are.
#[test]
fn layers_share_the_weights_of_the_same_tensors() {
    let model = family("albert", "shared");
    let source = ModelSource::open(&ModelRef::Path(model.0.clone()), None).expect("the model opens");
    assert_eq!(source.spec.layers(), 3);
    let records = load::records(&source, &source.spec);
    let mut names: Vec<&str> = records.iter().map(|record| record.name.as_str()).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}
