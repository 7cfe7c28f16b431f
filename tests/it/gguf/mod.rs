//! Tests of GGUF files written by the gguf package (tests/oracle/make_gguf.py), against the answers of
//! transformers for the same values.

mod conversions;
mod converted;
mod families;
mod from_folders;
mod inspect;
mod quantized;
mod refused;
mod vocabulary;
mod writer;

use crate::common::{fixture, skipped};
use crate::oracle::{check_at, check_prompts};
use mainstem::formats::gguf::GgufHeader;
use mainstem::formats::{Checkpoint, Gguf};
use mainstem::model::{ModelRef, ModelSource};
use mainstem_kernels::QuantType;
use serde::Deserialize;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use writer::Written;

/// A GGUF file, the fixture whose tokenizer and prompts it uses, and its recorded answers.
const MODELS: [(&str, &str, &str); 4] = [
    ("f32.gguf", "rope_llama3", "rope_llama3/answers.json"),
    ("f16.gguf", "bf16", "bf16/answers.json"),
    ("q8_0.gguf", "f16", "gguf/q8_0.json"),
    ("q4_0.gguf", "f16", "gguf/q4_0.json"),
];

fn content(name: &str) -> Vec<u8> {
    std::fs::read(fixture("gguf").join(name)).expect("the fixture is there")
}

fn writer(name: &str) -> Written {
    Written::read(&content(name))
}

/// A directory with a GGUF model and the tokenizer of a fixture, which is used only if the file has no
/// vocabulary; removed on drop.
struct Placed(PathBuf);

impl Placed {
    /// Creates the directory. `name` must be unique among the tests.
    fn of(name: &str, file: &[u8], tokenizer: &str) -> Placed {
        let folder = std::env::temp_dir().join(format!("mainstem-gguf-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(fixture(tokenizer).join(name), folder.join(name)).expect("a file is copied");
        }
        std::fs::write(folder.join("model.gguf"), file).expect("it can be written");
        Placed(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.join("model.gguf")
    }

    /// Returns the error of opening the model, which must name the file.
    fn refusal(&self) -> String {
        let error = ModelSource::open(&ModelRef::Path(self.file()), None).err().expect("it is refused");
        let error = format!("{error:#}");
        assert!(error.contains(self.file().to_str().expect("the path is text")), "{error}");
        error
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[actix::test]
async fn the_recorded_answers_come_on_both_backends() {
    for (name, tokenizer, answers) in MODELS {
        let placed = Placed::of(&format!("answers-{name}"), &content(name), tokenizer);
        for kind in ["cpu", "reference"] {
            check_at(&placed.file(), answers, kind).await;
        }
    }
}

/// Rounded activations change log-probabilities only slightly if the right weights are used.
#[actix::test]
async fn fast_activations_stay_near_the_recorded_answers() {
    for (name, tokenizer, answers) in MODELS.iter().filter(|(name, ..)| name.starts_with('q')) {
        let placed = Placed::of(&format!("fast-{name}"), &content(name), tokenizer);
        let settings = [("device.activations", "fast".into()), ("scheduler.token_budget", 48.into())];
        check_prompts(&placed.file(), answers, &settings, 1.0).await;
    }
}

/// Version 1 has narrower counts; the order of the tensors in the data and the padding between them are
/// arbitrary. A model can be given by its directory or its file.
#[actix::test]
async fn every_version_and_order_gives_the_same() {
    let written = writer("q8_0.gguf");
    let count = written.tensors.len();
    let mut apart = written.clone();
    apart.set_u32("general.alignment", 256);
    let files = [
        ("v1", written.bytes(1, 32, |at| at)),
        ("v2", written.bytes(2, 32, |at| at)),
        ("backwards", written.bytes(3, 32, |at| count - 1 - at)),
        // 11 is coprime to the number of tensors, so each is visited once.
        ("shuffled", apart.bytes(2, 256, |at| at * 11 % count)),
    ];
    assert_eq!(count, 21, "11 is no divisor");
    for (name, file) in files {
        let placed = Placed::of(name, &file, "f16");
        check_at(&placed.0, "gguf/q8_0.json", "cpu").await;
    }
}

#[actix::test]
async fn a_model_in_several_files_is_served_by_any_of_them() {
    let whole = writer("f16.gguf");
    let placed = Placed::of("split", &[], "bf16");
    std::fs::remove_file(placed.file()).expect("it was written");
    for (number, tensors) in whole.tensors.chunks(8).enumerate() {
        let mut part = Written { entries: Vec::new(), tensors: tensors.to_vec() };
        if number == 0 {
            part.entries.clone_from(&whole.entries);
        }
        part.set_u32("split.no", number as u32);
        part.set_u32("split.count", 3);
        part.set_u32("split.tensors.count", whole.tensors.len() as u32);
        let name = format!("model-{:05}-of-00003.gguf", number + 1);
        std::fs::write(placed.0.join(name), part.bytes(3, 32, |at| at)).expect("it can be written");
    }
    for path in [placed.0.clone(), placed.0.join("model-00002-of-00003.gguf")] {
        check_at(&path, "bf16/answers.json", "cpu").await;
        let source = ModelSource::open(&ModelRef::Path(path), None).expect("it opens");
        assert_eq!(source.name(), "model");
    }
}

/// The quantized bytes that the gguf package produces for blocks of values.
#[test]
fn quants_of_blocks_are_those_of_the_gguf_package() {
    #[derive(Deserialize)]
    struct Blocks {
        /// The bits of the values.
        values: Vec<Vec<u32>>,
        q8_0: Vec<String>,
        q4_0: Vec<String>,
    }
    let blocks: Blocks = serde_json::from_slice(&content("blocks.json")).expect("it is in its form");
    for (ty, expected) in [(QuantType::Q8_0, &blocks.q8_0), (QuantType::Q4_0, &blocks.q4_0)] {
        assert!(blocks.values.len() == expected.len() && expected.len() > 10);
        for (values, expected) in blocks.values.iter().zip(expected) {
            let values: Vec<f32> = values.iter().map(|bits| f32::from_bits(*bits)).collect();
            let mut quantized = vec![0; ty.bytes(values.len()).expect("a whole block")];
            ty.quantize(&values, &mut quantized);
            let hex: String = quantized.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(&hex, expected, "{ty} of {values:?}");
        }
    }
}

/// Tensor bytes are not copied from the mapped file: the matrices of a model are only on the device.
#[test]
fn tensors_are_used_where_the_file_has_them() {
    let (checkpoint, gguf) = Checkpoint::open_gguf(&fixture("gguf/q4_0.gguf")).expect("the fixture opens");
    let file = content("q4_0.gguf");
    let head = GgufHeader::read(&file).expect("the fixture is sound");
    let mut starts = Vec::new();
    for tensor in &head.tensors {
        let stored = checkpoint.tensor(&tensor.name).expect("it is there").bytes();
        assert!(*stored == file[tensor.bytes.clone()], "{}", tensor.name);
        let Cow::Borrowed(stored) = stored else { panic!("{} is a copy", tensor.name) };
        starts.push(stored.as_ptr() as usize - tensor.bytes.start);
    }
    assert!(starts.iter().all(|start| *start == starts[0]), "all lie in one mapping");
    assert_eq!(gguf.strings("tokenizer.ggml.tokens").expect("it has a vocabulary").len(), 288);
    assert_eq!(gguf.i32s("tokenizer.ggml.token_type").expect("it has types")[..4], [3, 3, 3, 1]);
}

/// A given specification describes the file, whatever its declared architecture.
#[test]
fn a_specification_of_ones_own_reads_any_architecture() {
    let mut written = writer("q4_0.gguf");
    for (key, ..) in &mut written.entries {
        *key = key.replace("llama.", "unheard.");
    }
    written.set_string("general.architecture", "unheard");
    let placed = Placed::of("own-spec", &written.bytes(3, 32, |at| at), "f16");
    assert!(placed.refusal().contains("use --spec FILE"));
    let names = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
        ("\"neox\"", "\"gptj\""),
    ];
    let shipped = include_str!("../../../specs/llama.toml").to_owned();
    let own = names.iter().fold(shipped, |text, (hub, gguf)| text.replace(hub, gguf));
    let spec = placed.0.join("mine.toml");
    std::fs::write(&spec, own).expect("it can be written");
    let source = ModelSource::open(&ModelRef::Path(placed.file()), Some(&spec)).expect("it opens");
    let stack = source.spec.last_stack();
    assert_eq!((stack.layers.len(), stack.layers[0].attention.kv_heads), (2, 2));
    assert!(stack.head.as_ref().is_some_and(|head| head.tied));
    // Keys that change the computation are still refused, unless the specification declares support.
    for (key, value) in [("unheard.logit_scale", 0.5), ("unheard.attention.clamp_kqv", 8.0)] {
        let mut written = written.clone();
        written.set_f32(key, value);
        std::fs::write(placed.file(), written.bytes(3, 32, |at| at)).expect("it can be written");
        let open = || ModelSource::open(&ModelRef::Path(placed.file()), Some(&spec));
        let error = format!("{:#}", open().err().expect("it is refused"));
        assert!(error.contains(&format!("key '{key}': {value:?} is not supported")), "{error}");
        let text = std::fs::read_to_string(&spec).expect("it is there");
        std::fs::write(&spec, format!("{text}\n[supported_values]\n\"{key}\" = [{value:?}]\n"))
            .expect("it can be written");
        assert!(open().is_ok(), "{key}");
        std::fs::write(&spec, text).expect("it can be written");
    }
}

/// Vocabularies of real models next to the checkout, if present.
#[test]
fn real_vocabularies_are_read_where_they_are_at_hand() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/tokenizers/ggml-vocab");
    for (name, tokens, merges) in [("bert-bge", 30_522, None), ("gpt-2", 50_257, Some(50_000))] {
        let path = folder.join(format!("ggml-vocab-{name}.gguf"));
        if !path.exists() {
            skipped(&format!("no {name} vocabulary beside the checkout"));
            continue;
        }
        let (checkpoint, gguf): (Checkpoint, Gguf) = Checkpoint::open_gguf(&path).expect("it opens");
        assert_eq!(checkpoint.names().count(), 0);
        assert_eq!(gguf.strings("tokenizer.ggml.tokens").expect("it has tokens").len(), tokens);
        let found = gguf.opt_strings("tokenizer.ggml.merges").expect("they are text").map(|list| list.len());
        assert_eq!(found, merges, "{name}");
    }
}
