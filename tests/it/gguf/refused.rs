//! Tests of GGUF files that are refused, and of the names in the errors.

use super::writer::{U32, Written};
use super::{Placed, content, writer};
use mainstem::formats::gguf::GgufHeader;
use mainstem::model::{ModelRef, ModelSource};
use mainstem_kernels::random::philox;

/// Keys and values that would change the computation are refused, never ignored.
#[test]
fn what_is_not_served_is_refused_by_key() {
    type Edit = fn(&mut Written);
    let cases: [(Edit, &str); 22] = [
        (
            |w| w.set_string("general.architecture", "unheard"),
            "key 'general.architecture': there is no built-in",
        ),
        (
            |w| w.set_string("general.architecture", &"x".repeat(65)),
            "key 'general.architecture': a name of 65 bytes is too long",
        ),
        (
            |w| w.set_string("llama.rope.scaling.type", &"x".repeat(1025)),
            "key 'llama.rope.scaling.type': a string of 1025 bytes is too long",
        ),
        (|w| w.set_u32("llama.attention.head_count", 0), "the number of heads is 0"),
        (
            |w| w.set_u32("tokenizer.ggml.eos_token_id", 288),
            "key 'tokenizer.ggml.eos_token_id': token 288 is not in the vocabulary of 288",
        ),
        (|w| w.set_u32("llama.expert_count", 8), "the key 'llama.expert_used_count' is missing"),
        (
            |w| w.set_u32("llama.nextn_predict_layers", 1),
            "key 'llama.nextn_predict_layers': 1 is not supported",
        ),
        (|w| w.set_f32("llama.attention.scale", 0.5), "key 'llama.attention.scale': 0.5 is not supported"),
        (|w| w.set_f32("llama.logit_scale", 2.0), "key 'llama.logit_scale': 2.0 is not supported"),
        (|w| w.set_f32("llama.expert_weights_scale", 2.5), "key 'llama.expert_weights_scale': 2.5 is not"),
        (|w| w.set_u32("llama.expert_gating_func", 2), "key 'llama.expert_gating_func': 2 is not supported"),
        (
            |w| w.set_f32("llama.rope.scaling.yarn_log_multiplier", 0.1),
            "key 'llama.rope.scaling.yarn_log_multiplier': 0.1 is not supported",
        ),
        (|w| w.set_u32("llama.attention.sliding_window", 4096), "key 'llama.attention.sliding_window': 4096"),
        (|w| w.set_string("general.type", "adapter"), "key 'general.type': \"adapter\" is not supported"),
        (
            |w| w.set_u32("tokenizer.ggml.eom_token_id", 300),
            "key 'tokenizer.ggml.eom_token_id': token 300 is not in the vocabulary of 288",
        ),
        (
            |w| w.set_u32("tokenizer.ggml.bos_token_id", u32::MAX),
            "key 'tokenizer.ggml.bos_token_id': token 4294967295 is not in",
        ),
        (
            |w| w.set_list("llama.rope.dimension_sections", U32, &[vec![4, 0, 0, 0]]),
            "key 'llama.rope.dimension_sections': a list of 1 values is not supported",
        ),
        (
            |w| w.set_u32("llama.rope.dimension_count", 18),
            "positions rotate 18 dimensions, but heads have 16",
        ),
        (
            |w| w.set_string("llama.rope.scaling.type", "longrope"),
            "key 'llama.rope.scaling.type': \"longrope\" is",
        ),
        (
            |w| w.set_string("llama.block_count", "two"),
            "key 'llama.block_count': invalid type: string \"two\"",
        ),
        (
            |w| w.entries.retain(|(key, ..)| key != "llama.context_length"),
            "key 'llama.context_length' is missing",
        ),
        (|w| w.tensors.retain(|tensor| tensor.name != "blk.1.ffn_up.weight"), "tensor 'blk.1.ffn_up.weight'"),
    ];
    for (number, (edit, reason)) in cases.into_iter().enumerate() {
        let mut written = writer("q4_0.gguf");
        edit(&mut written);
        let placed = Placed::of(&format!("refused-{number}"), &written.bytes(3, 32, |at| at), "f16");
        let error = placed.refusal();
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// Keys that other architectures do not support are refused too.
#[test]
fn every_architecture_refuses_by_its_own_keys() {
    type Edit = fn(&mut Written);
    let cases: [(&str, Edit, &str); 9] = [
        (
            "phi3",
            |w| w.set_f32("phi3.rope.scaling.attn_factor", 1.5),
            "key 'phi3.rope.scaling.attn_factor': 1.5 is only supported with longrope",
        ),
        (
            "phi3",
            |w| w.set_string("phi3.rope.scaling.type", "longrope"),
            "key 'rope_factors_short.weight': it is missing",
        ),
        (
            "mixtral",
            |w| w.set_bool("llama.expert_weights_norm", false),
            "key 'llama.expert_weights_norm': false",
        ),
        ("mixtral", |w| w.set_u32("llama.expert_used_count", 6), "top_k is 6, but must be between 1 and 5"),
        (
            "bloom",
            |w| w.set_f32("bloom.attention.max_alibi_bias", 4.0),
            "key 'bloom.attention.max_alibi_bias'",
        ),
        (
            "bloom",
            |w| w.set_bool("bloom.attention.causal", false),
            "key 'bloom.attention.causal': false is not",
        ),
        ("falcon_40b", |w| w.set_string("falcon.tensor_data_layout", "x"), "key 'falcon.tensor_data_layout'"),
        (
            "falcon_40b",
            |w| w.set_list("falcon.attention.head_count_kv", U32, &[vec![2, 0, 0, 0], vec![1, 0, 0, 0]]),
            "key 'falcon.attention.head_count_kv': it has 2 values, but one value for all layers is required",
        ),
        // Another family with the same name: each layer has its own relative position biases.
        (
            "t5",
            |w| {
                let bias = w.tensors.iter().find(|tensor| tensor.name == "enc.blk.0.attn_rel_b.weight");
                let mut bias = bias.expect("it is there").clone();
                bias.name = bias.name.replace('0', "1");
                w.tensors.push(bias);
            },
            "does not use tensor 'enc.blk.1.attn_rel_b.weight'",
        ),
    ];
    for (number, (name, edit, reason)) in cases.into_iter().enumerate() {
        let mut written = writer(&format!("{name}.gguf"));
        edit(&mut written);
        let placed = Placed::of(&format!("unserved-{number}"), &written.bytes(3, 32, |at| at), "families");
        let error = placed.refusal();
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// For any value of a key, the file opens or is refused by name, without panic or overflow.
#[test]
fn no_value_of_any_key_does_harm() {
    let text = |len: usize| [&(len as u64).to_le_bytes()[..], &b"x".repeat(len)].concat();
    let values = [
        (4, 0u32.to_le_bytes().to_vec()),
        (4, 1u32.to_le_bytes().to_vec()),
        (4, u32::MAX.to_le_bytes().to_vec()),
        (5, (-1i32).to_le_bytes().to_vec()),
        (10, u64::MAX.to_le_bytes().to_vec()),
        (6, f32::NAN.to_le_bytes().to_vec()),
        (6, 0f32.to_le_bytes().to_vec()),
        (12, (-1e300f64).to_le_bytes().to_vec()),
        (7, vec![1]),
        (8, text(0)),
        (8, text(1 << 20)),
        (9, [&4u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat()),
    ];
    let placed = Placed::of("values", &[], "rope_llama3");
    let (mut opened, mut refused) = (0, 0);
    for (architecture, name) in [("llama", "f32"), ("llama", "mixtral"), ("t5", "t5")] {
        let whole = writer(&format!("{name}.gguf"));
        let added = ["rope.scaling.factor", "attention.key_length", "decoder_block_count"];
        let added = added.iter().map(|key| format!("{architecture}.{key}"));
        let added = added.chain(["general.alignment", "split.count"].map(str::to_owned));
        for key in whole.entries.iter().map(|(key, ..)| key.clone()).chain(added) {
            for (ty, value) in &values {
                let mut written = whole.clone();
                written.set(&key, *ty, value.clone());
                std::fs::write(placed.file(), written.bytes(3, 32, |at| at)).expect("it can be written");
                let Err(error) = ModelSource::open(&ModelRef::Path(placed.file()), None) else {
                    opened += 1;
                    continue;
                };
                let error = format!("{error:#}");
                assert!(error.contains(placed.file().to_str().expect("the path is text")), "{key}: {error}");
                assert!(error.len() < 4096, "{key}: an error of {} bytes", error.len());
                refused += 1;
            }
        }
    }
    assert!(opened > 150 && refused > 400, "{opened} opened, {refused} refused");
}

/// Damage anywhere in the head does no harm; most files can still be opened after it.
#[test]
fn no_damage_to_a_head_does_harm() {
    let whole = content("q4_0.gguf");
    let head = GgufHeader::read(&whole).expect("the fixture is sound").tensors[0].bytes.start;
    let placed = Placed::of("damage", &[], "f16");
    let mut opened = 0;
    for round in 0..600 {
        let mut file = whole.clone();
        let [at, value, ..] = philox([round, 0, 0, 0], [7, 8]);
        file[at as usize % head] = value as u8;
        std::fs::write(placed.file(), file).expect("it can be written");
        opened += u32::from(ModelSource::open(&ModelRef::Path(placed.file()), None).is_ok());
    }
    assert!(opened > 100, "damage to a vocabulary leaves a file sound: {opened}");
}

#[test]
fn files_of_older_formats_are_refused_whatever_they_are_called() {
    let placed = Placed::of("older", &content("q4_0.gguf"), "f16");
    let file = placed.0.join("ggml-model-q4_0.bin");
    std::fs::write(&file, b"tjgg\x03\0\0\0and so on").expect("it can be written");
    let error = format!("{:#}", ModelSource::open(&ModelRef::Path(file), None).err().expect("it is refused"));
    assert!(
        error.contains("ggml-model-q4_0.bin") && error.contains("ggjt") && error.contains("convert"),
        "{error}"
    );
    // GGUF files are recognized whatever their name.
    let file = placed.0.join("model.bin");
    std::fs::rename(placed.file(), &file).expect("it can be renamed");
    assert!(ModelSource::open(&ModelRef::Path(file), None).is_ok());
}

/// A real file truncated at any byte of its header is refused.
#[test]
fn a_file_cut_within_its_head_is_refused() {
    let whole = content("q8_0.gguf");
    let head = GgufHeader::read(&whole).expect("the fixture is sound").tensors[0].bytes.start;
    for end in (0..head).chain((head..whole.len() - 64).step_by(997)) {
        let error = format!("{:#}", GgufHeader::read(&whole[..end]).expect_err("it is refused"));
        assert!(error.contains("truncated"), "{end}: {error}");
    }
}
