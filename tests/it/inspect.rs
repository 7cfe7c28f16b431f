//! Tests that the output of `mainstem inspect` matches what the loader and the engine do.

use crate::common::{Copied, config, fixture};
use mainstem::cli::start;
use mainstem::formats::{Checkpoint, Folder, HubConfig};
use mainstem::model::spec::SpecFile;
use mainstem::model::tensors::required_tensors;
use mainstem::model::{ModelRef, ModelSource};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::Output;

fn inspect(model: &Path, flags: &[&str]) -> Output {
    let mut command = crate::common::mainstem();
    command.arg("inspect").arg(model).args(flags).output().expect("the program starts")
}

fn answer(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("the answer is text")
}

fn inspect_json(model: &Path, flags: &[&str]) -> Value {
    let flags: Vec<&str> = flags.iter().copied().chain(["--json"]).collect();
    serde_json::from_str(&answer(&inspect(model, &flags))).expect("the answer is JSON")
}

/// Checks that a broken model is refused with the error of the loader.
fn check_refused(model: &Path, named: &str) {
    let output = inspect(model, &[]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(output.stdout.is_empty() && error.contains(named), "{error}");
}

#[test]
fn each_value_comes_with_its_origin() {
    let model = Copied::of("gqa", "origins");
    for key in ["num_key_value_heads", "attention_bias", "rms_norm_eps", "hidden_act"] {
        // Null counts as absent.
        model.configure(key, if key == "num_key_value_heads" { json!(2) } else { Value::Null });
    }
    model.configure("rope_theta", Value::Null);
    model.configure("rope_parameters", json!({"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}));
    let answer = inspect_json(&model.0, &[]);
    let values = answer["specification"]["values"].as_array().expect("a list");
    let find_setting = |key: &str| values.iter().find(|value| value["key"] == key).expect(key);
    for (key, value, origin, by) in [
        ("size.hidden", json!(48), "config", json!(["hidden_size"])),
        ("norm.eps", json!(1e-6), "default", json!(["rms_norm_eps"])),
        ("attention.kv_heads", json!(2), "config", json!(["num_key_value_heads"])),
        ("attention.head_dim", json!(6), "derived", json!(["size.hidden / attention.heads"])),
        ("attention.bias", json!(false), "default", json!(["attention_bias"])),
        ("position.style", json!("neox"), "specification", json!(["position.style"])),
        ("position.theta", json!(5e5), "config", json!(["rope_parameters.rope_theta"])),
        ("position.scaling", json!({"kind": "linear", "factor": 4.0}), "config", json!(["rope_parameters"])),
        ("mlp.activation", json!("silu"), "default", json!(["hidden_act"])),
    ] {
        assert_eq!(*find_setting(key), json!({"key": key, "value": value, "origin": origin, "by": by}));
    }
    assert_eq!(answer["specification"]["file"], "specs/llama.toml");
    assert_eq!(answer["architecture"]["rope_theta"], json!(5e5));
}

#[test]
fn a_specification_of_ones_own_is_reported_by_its_name() {
    let model = Copied::of("gqa", "own-spec");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("specs/llama.toml");
    let text = std::fs::read_to_string(&shipped).expect("it is there");
    let own = model.file("mine.toml");
    let text = text.replace("eps = { key = \"rms_norm_eps\", default = 1e-6 }", "eps = 1e-3");
    let text = text.replacen("\n[size]", "\nignored_keys = [\"rms_norm_eps\"]\n[size]", 1);
    std::fs::write(&own, text).expect("it can be written");
    let answer = inspect_json(&model.0, &["--spec", &own.display().to_string()]);
    assert_eq!(answer["specification"]["file"], json!(own));
    let values = answer["specification"]["values"].as_array().expect("a list");
    let eps = values.iter().find(|value| value["key"] == "norm.eps").expect("it is there");
    assert_eq!((&eps["value"], &eps["origin"]), (&json!(1e-3), &json!("specification")));
}

/// The reported memory matches the engine's sizes for the same settings; `tests/allocator` compares those
/// with actual allocations. Step buffers can only be measured without concurrent allocations.
#[test]
fn memory_is_what_the_engine_takes() {
    for (model, kv_type, slots) in [
        ("gqa", "f32", 4),
        ("f16", "f16", 7),
        ("tied", "bf16", 1),
        ("biased", "f16", 32),
        ("gqa", "q8", 3),
        ("odd_head_dim", "q4", 2),
    ] {
        let flags = ["--kv-type", kv_type, "--max-context", "100", "--slots", &slots.to_string()];
        let memory = inspect_json(&fixture(model), &flags)["memory"].clone();
        let settings = [
            ("kv.type", kv_type.into()),
            ("scheduler.slots", i64::from(slots).into()),
            ("kv.max_context", 100.into()),
        ];
        let config = config(&fixture(model), &settings);
        let source = ModelSource::open(&ModelRef::Path(fixture(model)), None).expect("the fixture opens");
        let setup = start::engine_setup(&config, &source).expect("the settings fit");
        let engine = &start::forecast(&config.device, &source, &setup).expect("the device is there")[0][0];
        let bytes = |key: &str| memory[key].as_u64().expect(key) as usize;
        let parts = ["weights", "kv", "activations"].map(bytes);
        assert_eq!(parts, [engine.weight_bytes, engine.kv_bytes, engine.activation_bytes], "{model}");
        assert_eq!(bytes("total"), parts.iter().sum::<usize>() + bytes("step_buffers"), "{model}");
        // Four pages of 32 hold 100 tokens, plus the null page.
        assert_eq!(bytes("kv_per_sequence"), 128 * bytes("kv_per_token"), "{model}");
        assert_eq!(bytes("kv_for_slots"), (slots as usize * 4 + 1) * 32 * bytes("kv_per_token"), "{model}");
        assert_eq!((bytes("kv"), bytes("context_tokens")), (bytes("kv_for_slots"), 100), "{model}");
    }
}

/// DeepSeek V3's config.json with fewer layers and experts, which are narrower. Its tensors are in a file
/// without data, of which the parts that are not read take no space on the disk.
#[test]
fn a_latent_takes_576_numbers_per_token_and_layer() {
    let config = json!({
        "model_type": "deepseek_v3", "vocab_size": 1280, "hidden_size": 256, "num_hidden_layers": 4,
        "intermediate_size": 512, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "moe_intermediate_size": 64, "n_routed_experts": 2, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    });
    let model = Copied::of("gqa", "latent-memory");
    std::fs::write(model.file("config.json"), config.to_string()).expect("it can be written");
    let entries = config.as_object().expect("it is an object").clone();
    let spec = SpecFile::for_model_type("deepseek_v3").expect("it ships");
    let spec = spec.resolve(&HubConfig::from_entries(Path::new("config.json"), entries), &|_| true);
    let (mut head, mut end) = (serde_json::Map::new(), 0);
    for piece in required_tensors(&spec.expect("the configuration fits")) {
        let begin = end;
        end += 2 * piece.shape.iter().product::<usize>();
        let tensor = json!({"dtype": "BF16", "shape": piece.shape, "data_offsets": [begin, end]});
        head.insert(piece.name.clone(), tensor);
    }
    let head = Value::from(head).to_string();
    let mut file = std::fs::File::create(model.file("model.safetensors")).expect("it can be written");
    file.write_all(&(head.len() as u64).to_le_bytes()).expect("it can be written");
    file.write_all(head.as_bytes()).expect("it can be written");
    file.set_len((8 + head.len() + end) as u64).expect("a file may have parts without data");
    for (ty, bytes) in [("bf16", 2 * 576), ("f32", 4 * 576), ("q8", 576 / 32 * 34), ("q4", 576 / 64 * 36)] {
        let flags = ["--kv-type", ty, "--max-context", "64", "--slots", "1"];
        let memory = inspect_json(&model.0, &flags)["memory"].clone();
        assert_eq!(memory["kv_per_token"], json!(4 * bytes), "{ty}");
    }
    let scaling = inspect_json(&model.0, &[])["architecture"]["rope_scaling"].clone();
    let factor = (0.1 * 40f64.ln() + 1.0).powi(2);
    assert_eq!(
        (scaling["score_factor"].as_f64(), scaling["attention_factor"].as_f64()),
        (Some(factor), Some(1.0))
    );
}

#[test]
fn every_tensor_is_in_the_json_with_its_place_and_size() {
    for model in ["gqa", "sharded", "biased", "tied"] {
        let answer = inspect_json(&fixture(model), &[]);
        let checkpoint =
            Checkpoint::open_safetensors(&Folder::Disk(fixture(model))).expect("the fixture opens");
        let listed = answer["tensors"].as_array().expect("a list");
        let unused = answer["unused"].as_array().expect("a list");
        assert_eq!(listed.len() + unused.len(), checkpoint.tensors().count(), "{model}");
        for tensor in listed {
            let stored = checkpoint.tensor(tensor["name"].as_str().expect("a name")).expect("it is stored");
            assert_eq!(tensor["shape"], json!(stored.shape));
            assert_eq!(tensor["bytes"], json!(stored.bytes_len()));
            assert_eq!(tensor["type"], json!(stored.quant_type().expect("it is computable").name()));
            let pattern = tensor["pattern"].as_str().expect("a pattern");
            let name = tensor["layer"]
                .as_u64()
                .map_or(pattern.to_owned(), |i| pattern.replace("{i}", &i.to_string()));
            assert_eq!(tensor["name"], json!(name));
        }
        let files: Vec<_> = checkpoint.files().collect();
        assert_eq!(answer["files"], json!(files));
    }
}

#[test]
fn the_table_is_narrow_and_has_a_line_for_alike_tensors_or_for_each() {
    let output = answer(&inspect(&fixture("rope_llama3"), &[]));
    let layers = "model.layers.{i}.self_attn.q_proj.weight";
    assert_eq!(output.matches(layers).count(), 1, "{output}");
    let parts =
        ["specs/llama.toml", "key num_hidden_layers", "llama3, factor 8", "2, 260 (generation_config.json)"];
    assert!(parts.iter().all(|part| output.contains(part)), "{output}");
    let is_path = |line: &&str| line.trim_start().starts_with("path");
    let widest = output.lines().filter(|line| !is_path(line)).map(|line| line.chars().count()).max();
    assert!(widest <= Some(110), "{output}");
    let output = answer(&inspect(&fixture("rope_llama3"), &["--tensors"]));
    assert!(!output.contains("{i}"), "{output}");
    for layer in 0..2 {
        assert!(output.contains(&layers.replace("{i}", &layer.to_string())), "{output}");
    }
}

#[test]
fn end_tokens_are_reported_with_their_origin() {
    let model = Copied::of("gqa", "end-tokens");
    let end_tokens = || inspect_json(&model.0, &[])["end_tokens"].clone();
    assert_eq!(
        end_tokens(),
        json!({"ids": [2], "source": "generation_config.json", "said_by": "generation_config.json"})
    );
    let recommended = json!({"do_sample": true, "temperature": 0.7, "top_p": 0.95});
    std::fs::write(model.file("generation_config.json"), recommended.to_string()).expect("it can be written");
    model.configure("eos_token_id", json!([2, 5]));
    assert_eq!(end_tokens(), json!({"ids": [2, 5], "source": "config.json", "said_by": "config.json"}));
    model.configure("eos_token_id", json!([5, 2, 5, 5]));
    assert_eq!(end_tokens()["ids"], json!([5, 2]));
    assert_eq!(inspect_json(&model.0, &[])["sampling"], recommended);
    model.configure("eos_token_id", Value::Null);
    let by_tokenizer = end_tokens();
    assert!([json!("tokenizer"), Value::Null].contains(&by_tokenizer["source"]), "{by_tokenizer}");
}

/// Neutral and irrelevant settings are ignored; all other unsupported ones are listed, and starting the model
/// logs one warning.
#[test]
fn what_a_model_asks_for_and_does_not_get_is_reported() {
    let model = Copied::of("gqa", "unserved");
    let unserved = json!({"max_new_tokens": 400, "encoder_no_repeat_ngram_size": 3, "length_penalty": 1.3});
    let mut settings = json!({"temperature": 0.0, "top_k": -1, "num_beams": 1, "use_cache": true});
    let write = |settings: &Value| {
        std::fs::write(model.file("generation_config.json"), settings.to_string())
            .expect("it can be written");
    };
    let run = |more: &[&str]| {
        let mut command = crate::common::mainstem();
        let output = command.arg("run").arg(&model.0).args(["a b", "--raw", "--max-tokens", "1"]).args(more);
        let output = output.output().expect("the program starts");
        answer(&output);
        String::from_utf8(output.stderr).expect("the log is text")
    };
    write(&settings);
    assert_eq!(inspect_json(&model.0, &[])["unserved"], json!({}));
    assert_eq!(inspect_json(&model.0, &[])["sampling"], json!({"temperature": 0.0, "top_k": -1}));
    assert!(!answer(&inspect(&model.0, &[])).contains("not supported"));
    assert_eq!(run(&[]), "");

    let entries = unserved.as_object().expect("an object").clone();
    settings.as_object_mut().expect("an object").extend(entries);
    write(&settings);
    let output = inspect(&model.0, &[]);
    let listed = answer(&output);
    let listed = listed.lines().filter_map(|line| line.trim().strip_prefix("not supported"));
    let settings = ["max_new_tokens 400", "encoder_no_repeat_ngram_size 3", "length_penalty 1.3"];
    assert_eq!(listed.map(str::trim).collect::<Vec<_>>(), settings);
    assert!(output.stderr.is_empty(), "it is in the answer");
    assert_eq!(inspect_json(&model.0, &[])["unserved"], unserved);
    let warned = run(&[]);
    let keys = "max_new_tokens, encoder_no_repeat_ngram_size, length_penalty";
    assert!(warned.lines().count() == 1 && warned.contains("WARN") && warned.contains(keys), "{warned}");
    assert_eq!(run(&["--sampling-defaults", "neutral"]), "");
}

#[test]
fn an_unused_head_is_reported() {
    let model = Copied::of("gqa", "unused-head");
    model.configure("tie_word_embeddings", json!(true));
    let answer = inspect_json(&model.0, &[]);
    assert_eq!(answer["unused"][0]["name"], "lm_head.weight");
    assert_eq!(answer["unused"][0]["why"], "the head is the embedding");
    assert_eq!(answer["architecture"]["tied_head"], true);
}

#[test]
fn a_llama2c_file_is_a_model_too() {
    let answer = inspect_json(&fixture("llama2c").join("v1.bin"), &["--slots", "3"]);
    assert_eq!(answer["architecture"]["family"], json!(["llama2c"]));
    assert_eq!(answer["end_tokens"], json!({"ids": [1, 2], "source": "format", "said_by": "format"}));
    assert_eq!(answer["memory"]["slots"], 3);
    let values = answer["specification"]["values"].as_array().expect("a list");
    let origin = |key: &str| values.iter().find(|value| value["key"] == key).expect(key)["origin"].clone();
    assert_eq!(origin("norm.eps"), "specification");
    assert_eq!(origin("position.theta"), "format");
}

#[test]
fn a_broken_model_is_refused_as_the_loader_refuses_it() {
    let model = Copied::of("mha", "inspect-broken");
    let file = model.file("model.safetensors");
    let bytes = std::fs::read(&file).expect("the copy is there");
    std::fs::write(&file, &bytes[..bytes.len() - 100]).expect("it can be written");
    check_refused(&model.0, "model.safetensors");
    std::fs::write(&file, &bytes).expect("it can be written");
    model.configure("num_attention_heads", json!(0));
    check_refused(&model.0, "config.json");
    check_refused(Path::new("no/such/model"), "no/such/model");
    check_refused(Path::new("hf:only-a-name"), "owner/name");
}

/// Returns the header of a safetensors file of F32 tensors, and the number of bytes that follow it.
fn header_of(tensors: &[(&str, &[u64])]) -> (Vec<u8>, u64) {
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let begin = end;
        end += 4 * shape.iter().product::<u64>();
        let described = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
        header.insert((*name).to_owned(), described);
    }
    let text = Value::Object(header).to_string();
    ([&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat(), end)
}

/// The weights are a sparse file: there is enough memory to map them, but not to load them.
#[test]
fn inspecting_loads_no_weights() {
    const VOCAB: u64 = 420_000;
    const HIDDEN: u64 = 4096;
    let model = Copied::of("tied", "hole");
    for (key, value) in [("vocab_size", VOCAB), ("hidden_size", HIDDEN), ("num_hidden_layers", 1)] {
        model.configure(key, json!(value));
    }
    let (half, mlp) = (HIDDEN / 2, 36);
    let (header, bytes) = header_of(&[
        ("model.embed_tokens.weight", &[VOCAB, HIDDEN]),
        ("model.norm.weight", &[HIDDEN]),
        ("model.layers.0.input_layernorm.weight", &[HIDDEN]),
        ("model.layers.0.post_attention_layernorm.weight", &[HIDDEN]),
        ("model.layers.0.self_attn.q_proj.weight", &[HIDDEN, HIDDEN]),
        ("model.layers.0.self_attn.k_proj.weight", &[half, HIDDEN]),
        ("model.layers.0.self_attn.v_proj.weight", &[half, HIDDEN]),
        ("model.layers.0.self_attn.o_proj.weight", &[HIDDEN, HIDDEN]),
        ("model.layers.0.mlp.gate_proj.weight", &[mlp, HIDDEN]),
        ("model.layers.0.mlp.up_proj.weight", &[mlp, HIDDEN]),
        ("model.layers.0.mlp.down_proj.weight", &[HIDDEN, mlp]),
    ]);
    let file = std::fs::File::create(model.file("model.safetensors")).expect("it can be written");
    (&file).write_all(&header).expect("it can be written");
    file.set_len(header.len() as u64 + bytes).expect("a hole needs no room");
    let limited = "ulimit -v 9000000; exec \"$0\" inspect \"$1\" --json";
    let output = crate::common::alone("sh")
        .args(["-c", limited, env!("CARGO_BIN_EXE_mainstem")])
        .arg(&model.0)
        .output()
        .expect("the shell starts");
    let report: Value = serde_json::from_str(&answer(&output)).expect("the answer is JSON");
    assert!(report["memory"]["weights"].as_u64() > Some(bytes), "{}", report["memory"]);
}

#[test]
fn flags_are_checked_as_those_of_serve() {
    let output = inspect(&fixture("gqa"), &["--slots", "0"]);
    assert_eq!(output.status.code(), Some(2));
    let output = inspect(&fixture("gqa"), &["--max-context", "129"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("kv.max_context"));
}
