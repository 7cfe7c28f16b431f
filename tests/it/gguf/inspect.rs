//! Tests of the values that `inspect` reports for GGUF files, and their source keys.

use super::writer::Written;
use super::{Placed, writer};
use crate::common::{config, fixture, mainstem};
use mainstem::cli::start;
use mainstem::model::{ModelRef, ModelSource};
use serde_json::{Value, json};
use std::path::Path;

/// Returns the JSON output of `inspect`.
fn inspected(path: &Path, flags: &[&str]) -> Value {
    let output = mainstem().arg("inspect").arg(path).arg("--json").args(flags).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the answer is JSON")
}

#[test]
fn inspect_tells_the_keys_that_values_are_from_and_the_types_of_tensors() {
    let answer = inspected(&fixture("gguf/q4_0.gguf"), &[]);
    let values = answer["specification"]["values"].as_array().expect("a list");
    let find_setting = |key: &str| values.iter().find(|value| value["key"] == key).expect(key);
    for (key, value, origin, by) in [
        ("size.hidden", json!(64), "config", "llama.embedding_length"),
        ("size.vocab", json!(288), "config", "tokenizer.ggml.tokens"),
        ("norm.eps", json!(1e-5), "config", "llama.attention.layer_norm_rms_epsilon"),
        ("attention.heads", json!(4), "config", "llama.attention.head_count"),
        ("attention.kv_heads", json!(2), "config", "llama.attention.head_count_kv"),
        ("attention.bias", json!(false), "config", "blk.0.attn_q.bias, blk.0.attn_qkv.bias"),
        ("position.style", json!("gptj"), "specification", "position.style"),
        ("position.dims", json!(16), "config", "llama.rope.dimension_count"),
        ("position.theta", json!(10000.0), "config", "llama.rope.freq_base"),
        ("head.tied", json!(true), "config", "output.weight"),
    ] {
        assert_eq!(*find_setting(key), json!({"key": key, "value": value, "origin": origin, "by": [by]}));
    }
    assert_eq!(find_setting("position.scaling")["origin"], "format");
    assert_eq!(answer["specification"]["file"], "specs/llama.toml with specs/gguf.toml");
    assert_eq!(
        answer["end_tokens"],
        json!({"ids": [2], "source": "GGUF metadata", "said_by": "GGUF metadata"})
    );
    let types = |name: &str| {
        let tensors = answer["tensors"].as_array().expect("a list");
        tensors.iter().find(|tensor| tensor["name"] == name).expect(name).clone()
    };
    let q = types("blk.1.attn_q.weight");
    assert_eq!((&q["type"], &q["shape"], &q["bytes"]), (&json!("q4_0"), &json!([64, 64]), &json!(64 * 36)));
    assert_eq!(types("blk.1.attn_norm.weight")["type"], "f32");
    assert_eq!(answer["name"], "q4_0");
}

#[test]
fn factors_of_rotary_frequencies_are_a_setting_and_no_weight() {
    let answer = inspected(&fixture("gguf/f32.gguf"), &[]);
    let scaling = &answer["architecture"]["rope_scaling"];
    assert_eq!(*scaling, json!({"kind": "factors", "pairs": 8, "largest": 8.0}));
    assert_eq!(answer["unused"], json!([]));
    assert_eq!(answer["end_tokens"]["ids"], json!([2, 260]));
}

#[test]
fn memory_is_what_the_engine_takes() {
    for name in ["q8_0.gguf", "q4_0.gguf"] {
        let path = fixture("gguf").join(name);
        let memory = inspected(&path, &["--kv-type", "f16", "--slots", "3"])["memory"].clone();
        let settings = [("kv.type", "f16".into()), ("scheduler.slots", 3.into())];
        let config = config(&path, &settings);
        let source = ModelSource::open(&ModelRef::Path(path), None).expect("the fixture opens");
        let setup = start::engine_setup(&config, &source).expect("the settings fit");
        let engine = &start::forecast(&config.device, &source, &setup).expect("the device is there")[0][0];
        assert_eq!(memory["weights"], json!(engine.weight_bytes), "{name}");
        let stored = source.checkpoint.total_bytes();
        // A table of cosines and sines beside what the file holds: 128 positions, 8 pairs.
        assert_eq!(engine.weight_bytes, stored + 128 * 8 * 2 * 4, "{name}");
    }
}

/// A factor without a type is linear scaling, as in llama.cpp; type none or a factor of 1 has no effect.
#[test]
fn scaling_is_read_as_llama_cpp_reads_it() {
    let scaling = |name: &str, edit: &dyn Fn(&mut Written)| {
        let mut written = writer("q4_0.gguf");
        edit(&mut written);
        let placed = Placed::of(name, &written.bytes(3, 32, |at| at), "f16");
        let answer = inspected(&placed.file(), &[]);
        let values = answer["specification"]["values"].as_array().expect("a list");
        let setting = values.iter().find(|value| value["key"] == "position.scaling").expect("it is there");
        (setting["value"].clone(), setting["by"].clone())
    };
    let f32_of = |written: &mut Written, key: &str, value: f32| {
        written.entries.push((key.to_owned(), 6, value.to_le_bytes().to_vec()));
    };
    let linear = json!({"kind": "linear", "factor": 4.0});
    let factor = "llama.rope.scaling.factor";
    let found = scaling("factor", &|w| f32_of(w, factor, 4.0));
    assert_eq!(found, (linear.clone(), json!([factor])));
    assert_eq!(scaling("older", &|w| f32_of(w, "llama.rope.scale_linear", 4.0)).0, linear);
    let nothing = (json!({"kind": "none"}), json!([]));
    assert_eq!(scaling("one", &|w| f32_of(w, factor, 1.0)), nothing);
    let none = |w: &mut Written| {
        f32_of(w, factor, 4.0);
        w.set_string("llama.rope.scaling.type", "none");
    };
    assert_eq!(scaling("none", &none), nothing);
}
