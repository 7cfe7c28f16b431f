//! Tests of every model family as GGUF, against the answers of transformers and the tensors of the hub
//! directory.

use super::conversions::{DECODERS, OTHERS, older_mixtral};
use super::converted::Conversion;
use super::writer::Written;
use super::{Placed, content};
use crate::common::{Copied, fixture};
use crate::families::family;
use crate::oracle::{check_at, check_within};
use crate::quantize::{self, Room};
use mainstem::export::{OutputFormat, write_model};
use mainstem::formats::PoolingConfig;
use mainstem::model::spec::MlpSpec;
use mainstem::model::tensor_slices::read_slice;
use mainstem::model::tensors::required_slices;
use mainstem::model::{ModelRef, ModelSource, ModelSpec};
use mainstem::request::Pooling;
use mainstem_kernels::{Activation, Mask};
use serde_json::json;
use std::path::Path;

/// Files written by the gguf package (tests/oracle/make_family_gguf.py).
const STORED: [&str; 5] = ["bloom", "falcon_40b", "mixtral", "phi3", "t5"];

fn placed(name: &str, file: &Written) -> Placed {
    Placed::of(&format!("family-{name}"), &file.bytes(3, 32, |at| at), "families")
}

fn opened(path: &Path) -> ModelSource {
    ModelSource::open(&ModelRef::Path(path.to_owned()), None).unwrap_or_else(|error| panic!("{error:#}"))
}

fn conversion(fixture: &str) -> &'static Conversion {
    DECODERS.iter().chain(OTHERS).find(|one| one.fixture == fixture).expect("it is there")
}

#[actix::test]
async fn decoders_of_every_family_give_the_recorded_answers() {
    for one in DECODERS {
        let placed = placed(one.fixture, &one.written());
        // The activation has no key, and this one is unusual.
        let tolerance = if one.fixture == "gpt_neox" { 5e-3 } else { 1e-3 };
        let answers = format!("families/{}/answers.json", one.fixture);
        check_within(&placed.file(), &answers, "cpu", tolerance).await;
    }
}

/// The writer of the tests and the gguf package, which knows names of its own, write the same tensors;
/// and what that one wrote is read.
#[actix::test]
async fn what_the_gguf_package_wrote_is_read_and_is_what_the_tests_write() {
    for name in STORED {
        let bytes = content(&format!("{name}.gguf"));
        let (stored, mut ours) = (Written::read(&bytes), conversion(name).written());
        let mut theirs = stored.tensors;
        theirs.sort_by(|a, b| a.name.cmp(&b.name));
        ours.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(theirs, ours.tensors, "{name}");
        let placed = Placed::of(&format!("stored-{name}"), &bytes, "families");
        match DECODERS.iter().any(|one| one.fixture == name) {
            true => check_at(&placed.file(), &format!("families/{name}/answers.json"), "cpu").await,
            false => same_model(&opened(&fixture("families").join(name)), &opened(&placed.file())),
        }
    }
}

#[actix::test]
async fn experts_that_each_have_a_tensor_are_read_too() {
    let older = Conversion { change: older_mixtral, ..*conversion("mixtral") };
    let file = older.written();
    assert!(file.tensors.iter().any(|tensor| tensor.name == "blk.1.ffn_down.4.weight"));
    let placed = placed("older-mixtral", &file);
    check_at(&placed.file(), "families/mixtral/answers.json", "cpu").await;
}

/// Formats the specification without tensor locations and origins of values.
fn wiring(source: &ModelSource) -> String {
    let mut spec = source.spec.clone();
    (spec.ignored, spec.provenance.values) = Default::default();
    (spec.provenance.specification, spec.provenance.config) = Default::default();
    (spec.provenance.model_type, spec.provenance.model_types) = Default::default();
    let head = spec.decoder.as_mut().and_then(|stack| stack.head.as_mut());
    head.into_iter().for_each(|head| head.unused_names.clear());
    let text = format!("{spec:?}");
    let mut parts = text.split("TensorSlice {");
    let begin = parts.next().unwrap_or_default().to_owned();
    parts.fold(begin, |text, part| {
        let end = part.find("transposed: ").expect("the last of a slice's fields");
        text + "\nTensorSlice" + part[end..].split_once('}').expect("its end").1
    })
}

/// Asserts that a file is the same model as the directory: same structure, same values.
fn same_model(folder: &ModelSource, file: &ModelSource) {
    let name = file.path.display();
    let (wired, expected) = (wiring(file), wiring(folder));
    for (ours, theirs) in wired.lines().zip(expected.lines()) {
        assert_eq!(ours, theirs, "{name}");
    }
    assert_eq!(wired, expected, "{name}");
    let (ours, theirs) = (required_slices(&file.spec), required_slices(&folder.spec));
    assert_eq!(ours.len(), theirs.len(), "{name}");
    for (ours, theirs) in ours.into_iter().zip(theirs) {
        let [taken, expected] = [(file, ours), (folder, theirs)].map(|(source, piece)| {
            let taken = read_slice(&source.checkpoint, piece).expect("it was there at opening");
            (taken.shape.clone(), taken.to_f32())
        });
        assert!(taken == expected, "{name}: {} and {}", ours.name, theirs.name);
    }
}

/// A masked language model's head is left out, and distances have no key: they reach as far as T5's.
#[test]
fn encoders_and_models_with_both_are_their_folders_piece_by_piece() {
    for name in ["bert", "t5", "flan_t5"] {
        let model = family(name, "gguf");
        if name == "flan_t5" {
            model.configure("relative_attention_max_distance", json!(128));
        }
        let placed = placed(name, &conversion(name).written());
        let mut folder = opened(&model.0);
        if let ModelSpec { encoder: Some(encoder), decoder: None, .. } = &mut folder.spec {
            encoder.head = None;
        }
        same_model(&folder, &opened(&placed.file()));
    }
}

/// There is one factor for what config.json has two for, so the fixture's are made equal. The parts of `kv_b`
/// are transposed where keys are made of latents, too.
#[test]
fn latent_attention_is_its_folders_piece_by_piece() {
    for (name, all) in [("deepseek_v2_lite", 0.5), ("deepseek_v3", 1.0)] {
        let model = family(name, "gguf");
        model.configure(
            "rope_scaling",
            json!({ "type": "yarn", "factor": 4, "original_max_position_embeddings": 32,
                "mscale": all, "mscale_all_dim": all }),
        );
        let file = placed(name, &conversion(name).of_folder(&model.0));
        let (mut folder, mut file) = (opened(&model.0), opened(&file.file()));
        same_model(&folder, &file);
        for source in [&mut folder, &mut file] {
            source.spec.open_with_heads().expect("it has latent attention");
        }
        same_model(&folder, &file);
    }
}

/// The first layer with experts, and so the first with a correction of their scores, may be any.
#[test]
fn experts_are_corrected_whatever_their_first_layer() {
    let mut file = conversion("deepseek_v3").written();
    for tensor in &mut file.tensors {
        tensor.name = tensor.name.replace("blk.1.", "blk.5.");
    }
    let dense: Vec<_> =
        file.tensors.iter().filter(|tensor| tensor.name.starts_with("blk.0.")).cloned().collect();
    for layer in 1..5 {
        file.tensors.extend(dense.iter().cloned().map(|mut tensor| {
            tensor.name = tensor.name.replace("blk.0.", &format!("blk.{layer}."));
            tensor
        }));
    }
    file.set_u32("deepseek2.block_count", 6);
    file.set_u32("deepseek2.leading_dense_block_count", 5);
    let source = opened(&placed("deepseek-dense", &file).file());
    let layers = &source.spec.decoder.as_ref().expect("it is a decoder").layers;
    let is_corrected = |mlp: &MlpSpec| match mlp {
        MlpSpec::Experts(moe) => moe.correction.is_some(),
        MlpSpec::Dense(_) => false,
    };
    let corrected: Vec<bool> = layers.iter().map(|layer| is_corrected(&layer.mlp)).collect();
    assert_eq!(corrected, [false, false, false, false, false, true]);
}

/// The factors of the published model are known, and longrope's factors are for its whole context.
#[test]
fn minicpm3_is_its_folder_piece_by_piece() {
    let model = family("minicpm3", "gguf");
    let config = std::fs::read(model.file("config.json")).expect("it is there");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("it is JSON");
    let mut scaling = config["rope_scaling"].clone();
    scaling["original_max_position_embeddings"] = config["max_position_embeddings"].clone();
    model.configure("rope_scaling", scaling);
    model.configure("dim_model_base", json!(256));
    let file = placed("minicpm3", &conversion("minicpm3").of_folder(&model.0));
    same_model(&opened(&model.0), &opened(&file.file()));
}

/// The fixture has layers without experts, of which GGUF knows nothing; of the others it has one.
#[test]
fn experts_beside_a_shared_one_are_their_folders_piece_by_piece() {
    let model = family("qwen2_moe", "gguf");
    keep_layer(&model, 1);
    for (key, value) in
        [("num_hidden_layers", json!(1)), ("decoder_sparse_step", json!(1)), ("mlp_only_layers", json!([]))]
    {
        model.configure(key, value);
    }
    let mut file = conversion("qwen2_moe").of_folder(&model.0);
    let folder = opened(&model.0);
    same_model(&folder, &opened(&placed("qwen2_moe", &file).file()));
    // Old files have no key for the expert width: 2 experts are used per token.
    let (mut older, key) = (file.clone(), "qwen2moe.expert_feed_forward_length");
    older.unset(key);
    older.set_u32("qwen2moe.feed_forward_length", 2 * 16);
    same_model(&folder, &opened(&placed("qwen2_moe-older", &older).file()));
    // Programs that rewrite files omit dimensions of 1.
    let gate = file.tensors.iter_mut().find(|tensor| tensor.name == "blk.0.ffn_gate_inp_shexp.weight");
    gate.expect("it is there").drop_outermost();
    let vector = placed("qwen2_moe-vector", &file);
    same_model(&folder, &opened(&vector.file()));
    // A single row is still a matrix, and is quantized and written as one.
    let (room, source) = (Room::new("gguf-vector"), quantize::opened(&vector.file(), "*=q8_0"));
    let out = room.place("out");
    write_model(&source, &quantize::target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
    let written = opened(&out);
    assert!(quantize::loaded(&source) == quantize::loaded(&written));
    let gate = written.checkpoint.tensor("blk.0.ffn_gate_inp_shexp.weight").expect("it is there");
    assert_eq!((gate.stored_type_name(), gate.shape), ("q8_0", &[1, source.spec.hidden][..]));
}

/// Keeps only one layer of a directory, as the first.
fn keep_layer(model: &Copied, layer: usize) {
    let path = model.file("model.safetensors");
    let file = std::fs::read(&path).expect("the copy is there");
    let (length, rest) = file.split_first_chunk::<8>().expect("it has a header");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(header).expect("it is JSON");
    let (kept, mut bytes) = (format!("layers.{layer}."), Vec::new());
    let mut left = serde_json::Map::new();
    for (name, mut entry) in header {
        if name.contains("layers.") && !name.contains(&kept) {
            continue;
        }
        let Ok([begin, end]) = serde_json::from_value::<[usize; 2]>(entry["data_offsets"].clone()) else {
            continue;
        };
        let at = bytes.len();
        bytes.extend(&data[begin..end]);
        entry["data_offsets"] = json!([at, bytes.len()]);
        left.insert(name.replace(&kept, "layers.0."), entry);
    }
    let header = serde_json::Value::Object(left).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::write(path, file).expect("it can be written");
}

/// Returns a model that repeats the first two layers of a fixture.
fn repeated(fixture: &str, layers: usize) -> Written {
    let one = conversion(fixture);
    let mut file = one.written();
    let (within, around): (Vec<_>, Vec<_>) =
        file.tensors.into_iter().partition(|tensor| tensor.name.starts_with("blk."));
    file.tensors = around;
    for at in 0..layers {
        let stem = format!("blk.{}.", at % 2);
        for tensor in within.iter().filter(|tensor| tensor.name.starts_with(&stem)) {
            let mut tensor = tensor.clone();
            tensor.name = tensor.name.replace(&stem, &format!("blk.{at}."));
            file.tensors.push(tensor);
        }
    }
    file.set_u32(&format!("{}.block_count", one.architecture), layers as u32);
    file
}

/// Properties without a key, in which the largest models of a family differ, are derived from the number of
/// layers.
#[test]
fn the_largest_models_are_known_by_their_layers() {
    let of = |fixture: &str, layers: usize| {
        opened(&placed(&format!("{fixture}-{layers}"), &repeated(fixture, layers)).file())
    };
    let scale = |source: ModelSource| source.spec.last_stack().layers[0].attention.scale;
    // 32 wide, 4 heads of 12.
    for (fixture, largest) in [("gemma2", 46), ("gemma3", 62)] {
        assert_eq!(
            [scale(of(fixture, largest)), scale(of(fixture, 2))],
            [8f32.sqrt().recip(), 12f32.sqrt().recip()]
        );
    }
    let activation = |source: ModelSource| match &source.spec.last_stack().layers[0].mlp {
        MlpSpec::Dense(dense) => dense.activation,
        MlpSpec::Experts(_) => panic!("it has no experts"),
    };
    assert_eq!(
        [activation(of("gpt_neox", 44)), activation(of("gpt_neox", 2))],
        [Activation::GeluTanh, Activation::Gelu]
    );
}

/// Files use the same name for relatives of BERT, and the pooling is a number.
#[test]
fn what_berts_files_say_of_token_types_and_pooling_is_read() {
    let mut file = conversion("bert").written();
    let pooling = |file: &Written| {
        let source = opened(&placed("pooling", file).file());
        source.sentence.map(|config| (config.pooling, config.normalize))
    };
    assert_eq!(pooling(&file), None);
    for (number, served) in [(1, Pooling::Mean), (2, Pooling::Cls), (3, Pooling::Last)] {
        file.set_u32("bert.pooling_type", number);
        assert_eq!(pooling(&file), Some((PoolingConfig::Supported(served), true)));
    }
    file.set_u32("bert.pooling_type", 0);
    let Some((PoolingConfig::Unsupported(unserved), _)) = pooling(&file) else { panic!("none is served") };
    assert_eq!(unserved.reason, "the key 'bert.pooling_type' is 0, which means no pooling");

    let all = required_slices(&opened(&placed("with-types", &file).file()).spec).len();
    file.tensors.retain(|tensor| tensor.name != "token_types.weight");
    file.set_u32("tokenizer.ggml.token_type_count", 1);
    assert_eq!(required_slices(&opened(&placed("without-types", &file).file()).spec).len(), all - 1);
}

/// With a pooling type, a decoder embeds texts, and its head may be there or not.
#[test]
fn a_decoder_with_a_pooling_type_has_no_head() {
    let mut file = conversion("qwen3").written();
    let read = |file: &Written| {
        let source = opened(&placed("decoder-pooling", file).file());
        (source.spec.has_head(), source.sentence.map(|config| config.pooling))
    };
    file.set_u32("qwen3.pooling_type", 0);
    assert_eq!(read(&file), (true, None));
    for (number, served) in [(1, Pooling::Mean), (3, Pooling::Last)] {
        file.set_u32("qwen3.pooling_type", number);
        assert_eq!(read(&file), (false, Some(PoolingConfig::Supported(served))));
    }
    file.set_u32("qwen3.pooling_type", 2);
    let (_, Some(PoolingConfig::Unsupported(unserved))) = read(&file) else { panic!("cls is served") };
    assert!(unserved.reason.contains("first token"), "{unserved}");
    file.set_u32("qwen3.pooling_type", 3);
    file.tensors.retain(|tensor| tensor.name != "output.weight");
    assert!(!read(&file).0);
}

/// Old files have no such key; later ones have it, with 0 for none.
#[test]
fn the_window_that_phi3s_first_files_leave_out_is_known_by_their_context() {
    let window = |context: u32, key: Option<u32>| {
        let mut file = conversion("phi3").written();
        file.set_u32("phi3.context_length", context);
        file.unset("phi3.attention.sliding_window");
        key.into_iter().for_each(|window| file.set_u32("phi3.attention.sliding_window", window));
        opened(&placed("phi3-window", &file).file()).spec.last_stack().layers[0].attention.mask
    };
    assert_eq!(window(4096, None), Mask::Causal { window: Some(2047) });
    assert_eq!(window(4096, Some(0)), Mask::Causal { window: None });
    assert_eq!(window(131_072, None), Mask::Causal { window: None });
}

/// Keys that files may omit.
#[test]
fn what_gemmas_files_leave_out_is_known() {
    let without = |fixture: &str, keys: &[&str]| {
        let mut file = conversion(fixture).written();
        keys.iter().for_each(|key| file.unset(key));
        opened(&placed(&format!("{fixture}-without"), &file).file()).spec
    };
    let spec = without("gemma2", &["gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"]);
    let stack = spec.last_stack();
    let caps = (stack.layers[0].attention.softcap, stack.head.as_ref().and_then(|head| head.softcap));
    assert_eq!(caps, (Some(50.0), Some(30.0)));

    let window = "gemma3.attention.sliding_window";
    let masks = |spec: &ModelSpec| -> Vec<Mask> {
        spec.last_stack().layers.iter().map(|layer| layer.attention.mask).collect()
    };
    let (with, spec) = (without("gemma3", &[]), without("gemma3", &[window]));
    let local = Mask::Causal { window: Some(8) };
    let all = Mask::Causal { window: None };
    assert_eq!(masks(&with), [local, local, local, local, local, all, local]);
    assert_eq!(masks(&spec), [all; 7]);
    let bases = |spec: &ModelSpec| -> Vec<f64> {
        spec.last_stack().ropes.iter().map(|rope| rope.config.theta).collect()
    };
    assert_eq!((bases(&with), bases(&spec)), (vec![100.0, 10_000.0], vec![10_000.0]));
}
