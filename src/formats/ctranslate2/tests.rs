//! Tests of small files made here: what the variables become, and damaged files.

use super::vocabulary::{Vocabularies, Vocabulary};
use crate::formats::{Checkpoint, Folder};
use mainstem_kernels::QuantType;
use serde_json::json;

/// A variable: name, shape, type and data.
type Stored<'a> = (&'a str, &'a [u32], u8, Vec<u8>);

const CONFIG: &str =
    r#"{"eos_token": "</s>", "bos_token": "<s>", "decoder_start_token": "b", "unk_token": "<unk>"}"#;
const TOKENS: &str = r#"["<unk>", "</s>", "a", "b"]"#;

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u16 + 1).to_le_bytes()[..], text.as_bytes(), &[0]].concat()
}

fn model(variables: &[Stored], aliases: &[[&str; 2]]) -> Vec<u8> {
    let mut file = [&6u32.to_le_bytes()[..], &string("TransformerSpec"), &7u32.to_le_bytes()].concat();
    file.extend((variables.len() as u32).to_le_bytes());
    for (name, shape, ty, data) in variables {
        file.extend([&string(name)[..], &[shape.len() as u8]].concat());
        shape.iter().for_each(|size| file.extend(size.to_le_bytes()));
        file.push(*ty);
        file.extend([&(data.len() as u32).to_le_bytes()[..], data].concat());
    }
    file.extend((aliases.len() as u32).to_le_bytes());
    aliases.iter().flatten().for_each(|name| file.extend(string(name)));
    file
}

fn folder(model: Vec<u8>) -> Folder {
    let files = [
        ("model.bin", model),
        ("config.json", CONFIG.as_bytes().to_vec()),
        ("shared_vocabulary.json", TOKENS.as_bytes().to_vec()),
    ];
    Folder::memory("model", files.map(|(name, content)| (name.to_owned(), content)))
}

fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn numbers(checkpoint: &Checkpoint, name: &str) -> (QuantType, QuantType, Vec<f32>) {
    let tensor = checkpoint.tensor(name).unwrap();
    let (ty, mut numbers) = (tensor.quant_type().unwrap(), vec![0.0; tensor.shape.iter().product()]);
    ty.dequantize(&tensor.bytes(), &mut numbers);
    (ty, tensor.default_load_type().unwrap(), numbers)
}

fn good() -> Vec<Stored<'static>> {
    let wide: Vec<u8> = (0..64i32).map(|number| (2 * number - 64) as i8 as u8).collect();
    let short: Vec<u8> = [-1024i16, 3, 512, 0].into_iter().flat_map(i16::to_le_bytes).collect();
    vec![
        ("decoder/embeddings/weight", &[2, 32], 1, wide),
        ("decoder/embeddings/weight_scale", &[2], 0, floats(&[3.0, 100.0])),
        ("decoder/layer_0/a/weight", &[2, 2], 1, vec![1, 255, 127, 128]),
        ("decoder/layer_0/a/weight_scale", &[2], 0, floats(&[3.0, 0.5])),
        ("decoder/layer_0/b", &[], 3, 12i32.to_le_bytes().to_vec()),
        ("decoder/layer_1/a/weight", &[2, 2], 2, short),
        ("decoder/layer_1/a/weight_scale", &[], 0, floats(&[512.0])),
        ("decoder/layer_01/b", &[], 3, 5i32.to_le_bytes().to_vec()),
        ("decoder/layer_1/b", &[], 3, (-1i32).to_le_bytes().to_vec()),
        ("decoder/scale_embeddings", &[], 1, vec![1]),
        ("decoder/start_from_zero_embedding", &[], 1, vec![1]),
        ("decoder/x", &[3], 5, vec![0, 0x3f, 0x80, 0x3f, 0, 0x40]),
        ("encoder/embeddings/multiply_by_sqrt_depth", &[], 1, vec![0]),
        ("encoder/scale_embeddings", &[], 0, floats(&[1.5])),
    ]
}

const ALIASES: [[&str; 2]; 2] =
    [["decoder/projection/weight", "decoder/embeddings/weight"], ["other/x", "decoder/x"]];

#[test]
fn variables_are_tensors_or_settings() {
    let (checkpoint, config) = Checkpoint::open_ctranslate2(&folder(model(&good(), &ALIASES))).unwrap();
    let (ty, load_type, wide) = numbers(&checkpoint, "decoder/projection/weight");
    // With a row for the token that the decoder starts with.
    assert_eq!((ty, load_type, wide.len()), (QuantType::Q8_0, QuantType::Q8_0, 96));
    assert!((wide[0] + 64.0 / 3.0).abs() < 1e-2 && (wide[63] - 0.62).abs() < 1e-3, "{wide:?}");
    assert!(wide[64..].iter().all(|x| *x == 0.0));
    let third = 1.0 / 3.0f32;
    let expected = (QuantType::F32, QuantType::F16, vec![third, -third, 254.0, -256.0]);
    assert_eq!(numbers(&checkpoint, "decoder/layer_0/a/weight"), expected);
    let expected = (QuantType::F32, QuantType::F16, vec![-2.0, 3.0 / 512.0, 1.0, 0.0]);
    assert_eq!(numbers(&checkpoint, "decoder/layer_1/a/weight"), expected);
    let expected = (QuantType::F32, QuantType::F32, vec![0.0, 0.0, -60000.0]);
    assert_eq!(numbers(&checkpoint, "decoder/projection/bias"), expected);
    assert_eq!(numbers(&checkpoint, "other/x"), (QuantType::BF16, QuantType::BF16, vec![0.5, 1.0, 2.0]));
    assert!(checkpoint.names().all(|name| !name.ends_with("_scale") && !name.ends_with("/b")));
    let value = |key: &str| config.at(key).cloned().unwrap_or_default();
    for (key, expected) in [
        ("model_type", json!("TransformerSpec")),
        ("decoder/layer/b", json!([12, -1])),
        ("decoder/layer_01/b", json!(5)),
        ("decoder/scale_embeddings", json!(true)),
        ("encoder/embeddings/multiply_by_sqrt_depth", json!(false)),
        ("encoder/scale_embeddings", json!(1.5)),
        ("layers.decoder", json!(2)),
        ("shapes.decoder/embeddings/weight.rows", json!(3)),
        ("shapes.decoder/layer/a/weight.columns", json!([2, 2])),
        ("aliases.decoder/projection/weight", json!("decoder/embeddings/weight")),
        ("eos_token_id", json!(1)),
        ("decoder_start_token_id", json!(2)),
        ("bos_token_id", json!(null)),
        ("eos_token", json!("</s>")),
    ] {
        assert_eq!(value(key), expected, "{key}");
    }
}

#[test]
fn damage_is_refused_with_the_file_and_the_variable() {
    let refusal = |file: Vec<u8>| format!("{:#}", Checkpoint::open_ctranslate2(&folder(file)).unwrap_err());
    let changed = |change: &dyn Fn(&mut Vec<Stored<'static>>)| {
        let mut variables = good();
        change(&mut variables);
        model(&variables, &[])
    };
    let good_file = model(&good(), &ALIASES);
    let mut version = good_file.clone();
    version[0] = 5;
    let count_at = 4 + string("TransformerSpec").len() + 4;
    let mut count = good_file.clone();
    count[count_at..count_at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    for (file, expected) in [
        (version, "binary version 5 is not supported"),
        (count, "4294967295 variables are declared"),
        (b"\x06\0\0\0".to_vec(), "it is not a model of CTranslate2"),
        (changed(&|all| all[0].2 = 9), "variable 'decoder/embeddings/weight': its type 9"),
        (changed(&|all| all[0].1 = &[u32::MAX, u32::MAX]), "do not fit its 64 bytes"),
        (changed(&|all| all[0].1 = &[2; 9]), "it has 9 dimensions"),
        (changed(&|all| all[0].0 = "decoder/x"), "variable 'decoder/x': it is in the file twice"),
        (changed(&|all| _ = all.remove(1)), "variable 'decoder/embeddings/weight': its scale is missing"),
        (
            changed(&|all| (all[1].1, all[1].3) = (&[3], floats(&[1.0; 3]))),
            "its scale 'decoder/embeddings/weight_scale' of type F32 and shape [3]",
        ),
        (changed(&|all| all[4].0 = "decoder/layer_4096/b"), "layers are numbered below 4096"),
        (
            changed(&|all| all.last_mut().unwrap().3 = floats(&[f32::NAN])),
            "'encoder/scale_embeddings': it is not finite",
        ),
        (model(&good(), &[["a", "b"]]), "alias 'a': there is no variable 'b'"),
        (model(&good(), &[["decoder/x", "decoder/x"]]), "alias 'decoder/x': it is in the file twice"),
        ([&good_file[..], b"x"].concat(), "1 bytes follow the last alias"),
    ] {
        let error = refusal(file);
        assert!(error.starts_with("memory:model") && error.contains(expected), "{expected}: {error}");
    }
    let names: Vec<String> = (0..5000).map(|number| format!("x/{number}")).collect();
    let many: Vec<[&str; 2]> = names.iter().map(|name| [name.as_str(), "decoder/x"]).collect();
    let error = refusal(model(&good(), &many));
    assert!(error.contains("variable 'decoder/x': it has 5000 aliases, more than 4096"), "{error}");
    for end in 0..good_file.len() {
        let error = refusal(good_file[..end].to_vec());
        assert!(error.starts_with("memory:model"), "{error}");
    }
}

/// A file of llama2.c has this name, too.
#[test]
fn a_model_is_recognized_by_its_content() {
    let is_there = |file: &[u8]| Checkpoint::is_in_folder(&folder(file.to_vec()));
    assert!(is_there(&model(&good(), &ALIASES)));
    let header = [288i32, 768, 6, 6, 6, 32000, 256];
    let llama2c: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
    assert!(
        !is_there(&[&llama2c[..], &[0; 4096]].concat()) && !is_there(b"ak42\x01\0\0\0") && !is_there(b"")
    );
}

#[test]
fn tokens_are_read_from_both_kinds_of_lists() {
    let read = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec()));
        Vocabularies::read(&Folder::memory("model", files), Some("?"))
    };
    let tokens = |vocabulary: &Vocabulary| (vocabulary.tokens.join("|"), vocabulary.unknown);
    let both =
        read(&[("source_vocabulary.txt", "a\r\nb\r\n"), ("target_vocabulary.json", r#"["?", "a\r"]"#)]);
    let both = both.unwrap().unwrap();
    assert_eq!(tokens(&both.source), ("a|b|?".to_owned(), 2));
    assert_eq!(tokens(&both.target), ("?|a\r".to_owned(), 0));
    let shared = read(&[("shared_vocabulary.txt", "a\r\nb\n?")]).unwrap().unwrap();
    assert_eq!(tokens(&shared.source), ("a\r|b|?".to_owned(), 2));
    assert!(shared.source == shared.target && read(&[]).unwrap().is_none());
    assert!(read(&[("source_vocabulary.txt", "a")]).is_err() && read(&[("vocabulary.json", "{}")]).is_err());
}

#[test]
fn a_token_that_the_vocabulary_lacks_is_refused() {
    let files = [
        ("model.bin", model(&good(), &[])),
        ("config.json", br#"{"eos_token": "</x>"}"#.to_vec()),
        ("shared_vocabulary.json", TOKENS.as_bytes().to_vec()),
    ];
    let folder = Folder::memory("model", files.map(|(name, content)| (name.to_owned(), content)));
    let error = format!("{:#}", Checkpoint::open_ctranslate2(&folder).unwrap_err());
    assert!(error.contains("key 'eos_token': '</x>' is not a token of shared_vocabulary.json"), "{error}");
}
