//! Tests of checkpoints in the encodings of other packages (tests/oracle/make_encodings.py).

use crate::common::{Copied, fixture, mainstem};
use crate::oracle::check_at;
use crate::quantize::{Room, loaded, opened, target};
use half::{bf16, f16};
use mainstem::export::{OutputFormat, write_model};
use mainstem::formats::{Checkpoint, Folder};
use mainstem::model::spec::{SliceBounds, TensorSlice};
use mainstem::model::{ModelRef, ModelSource, tensor_slices, tensors};
use mainstem_kernels::random::philox;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

pub const STYLES: [&str; 6] = ["gptq", "gptq_any_order", "gptq_v2", "awq", "compressed", "mxfp4"];
const DOWN: &str = "model.layers.0.mlp.down_proj";

/// Returns a copy of the fixture with the tokenizer of another fixture of the same vocabulary size.
pub fn placed(style: &str, test: &str) -> Copied {
    let model = Copied::of(&format!("encodings/{style}"), &format!("encodings-{test}-{style}"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("gqa").join(file), model.file(file)).expect("a file is copied");
    }
    model
}

/// A matrix as the package decodes it.
#[derive(Deserialize)]
struct Matrix {
    #[serde(rename = "type")]
    ty: String,
    fnv: String,
    loaded: String,
}

fn matrices(style: &str) -> BTreeMap<String, Matrix> {
    let file = fixture("encodings").join(style).join("matrices.json");
    let text = std::fs::read(file).expect("the fixture is there");
    serde_json::from_slice(&text).expect("it is in its form")
}

/// Returns the 64-bit FNV-1a hash.
fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step))
}

#[actix::test]
async fn the_recorded_answers_come_in_every_encoding() {
    for style in STYLES {
        let model = placed(style, "answers");
        for kind in ["cpu", "reference"] {
            check_at(&model.0, &format!("encodings/{style}/answers.json"), kind).await;
        }
    }
}

#[test]
fn matrices_are_those_that_the_packages_decode_bit_for_bit() {
    for style in STYLES {
        let (model, recorded) = (placed(style, "matrices"), matrices(style));
        let source = opened(&model.0, "");
        let mut slices: BTreeMap<&str, Vec<&TensorSlice>> = BTreeMap::new();
        for piece in tensors::required_slices(&source.spec) {
            slices.entry(&piece.name).or_default().push(piece);
        }
        for (name, matrix) in &recorded {
            let pieces = &slices[name.as_str()];
            let values: Vec<f32> = pieces
                .iter()
                .flat_map(|piece| {
                    tensor_slices::read_slice(&source.checkpoint, piece).expect("it reads").to_f32()
                })
                .collect();
            let found = match matrix.ty.as_str() {
                "float16" => fnv(values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
                _ => fnv(values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
            };
            assert_eq!(found, matrix.fnv, "{style} {name}");
            assert_eq!(source.load_type(pieces[0]).name(), matrix.loaded, "{style} {name}");
        }
    }
}

/// Ranks read rows or columns of a matrix, and matrices of a stack.
#[test]
fn a_part_is_what_the_whole_has_there() {
    for style in STYLES {
        let (model, recorded) = (placed(style, "parts"), matrices(style));
        let source = opened(&model.0, "");
        for piece in tensors::required_slices(&source.spec) {
            if !recorded.contains_key(&piece.name) {
                continue;
            }
            let whole = tensor_slices::read_slice(&source.checkpoint, piece).expect("it reads");
            let (n, k, values) = (whole.n(), whole.k(), whole.to_f32());
            for (rows, columns) in [(5..n - 3, 0..k), (0..n, 0..32), (17..18, k - 32..k), (n - 1..n, 0..k)] {
                let bounds = SliceBounds { rows: Some(rows.clone()), columns: Some(columns.clone()) };
                let part = TensorSlice { bounds, ..piece.clone() };
                let part = tensor_slices::read_slice(&source.checkpoint, &part).expect("it reads");
                let expected: Vec<f32> =
                    rows.clone().flat_map(|row| &values[row * k..][columns.clone()]).copied().collect();
                assert_eq!(part.to_f32(), expected, "{style} {} {rows:?} {columns:?}", piece.name);
            }
            let is_stacked = piece.plane.is_some();
            assert_eq!(is_stacked, style == "mxfp4", "{}", piece.name);
        }
    }
}

#[test]
fn they_are_written_as_they_are_loaded() {
    for style in STYLES {
        let (model, room) = (placed(style, "written"), Room::new(&format!("encodings-{style}")));
        for rules in ["", "*proj*=q8_0"] {
            let (source, out) = (opened(&model.0, rules), room.place(&format!("out{}", rules.len())));
            write_model(&source, &target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
            let written = opened(&out, "");
            assert!(loaded(&source) == loaded(&written), "{style} by '{rules}'");
            let config = |folder: &Path| -> Map<String, Value> {
                let text = std::fs::read(folder.join("config.json")).expect("it is there");
                serde_json::from_slice(&text).expect("it is an object")
            };
            let mut expected = config(&model.0);
            assert!(expected.remove("quantization_config").is_some());
            assert_eq!(config(&out), expected, "{style}");
        }
    }
}

#[test]
fn inspect_names_encodings_and_biases_of_zeros() {
    for (style, stored, ty) in [
        ("gptq", "gptq_int4", "q4_0"),
        ("gptq_v2", "gptq_int8", "q8_0"),
        ("awq", "awq_int4", "q8_0"),
        ("compressed", "f8_e4m3", "bf16"),
        ("mxfp4", "mxfp4", "mxfp4"),
    ] {
        let model = placed(style, "inspect");
        let output = mainstem().args(["inspect", "--json"]).arg(&model.0).output().expect("it starts");
        assert!(output.status.success(), "{style}: {}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
        let tensors = report["tensors"].as_array().expect("a list");
        let is_down =
            |tensor: &&Value| tensor["name"].as_str().is_some_and(|name| name.contains("down_proj"));
        let down = tensors.iter().find(is_down).expect("there is one");
        assert_eq!((&down["stored"], &down["type"]), (&stored.into(), &ty.into()), "{style}");
        let unused: Vec<_> = report["unused"].as_array().expect("a list").iter().collect();
        match style {
            "gptq" => {
                assert_eq!(unused[0]["name"], format!("{DOWN}.bias"));
                assert_eq!((unused.len(), &unused[0]["why"]), (1, &"all its numbers are 0".into()));
            }
            _ => assert!(unused.is_empty(), "{style}: {unused:?}"),
        }
    }
}

/// Returns the error of opening the model.
fn refusal(path: &Path) -> String {
    match ModelSource::open(&ModelRef::Path(path.to_owned()), None) {
        Ok(_) => panic!("{} opens", path.display()),
        Err(error) => format!("{error:#}"),
    }
}

/// Changes the header and the data of a model's safetensors.
fn change(model: &Copied, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
    let file = model.file("model.safetensors");
    let bytes = std::fs::read(&file).expect("it was copied");
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..end]).expect("it is JSON");
    let mut data = bytes[end..].to_vec();
    change(&mut header, &mut data);
    let header = serde_json::to_vec(&header).expect("it is JSON");
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(&file, [&length[..], &header, &data].concat()).expect("it can be written");
}

fn rename(header: &mut Map<String, Value>, from: &str, to: &str) {
    let tensor = header.remove(from).expect("the tensor is there");
    header.insert(to.to_owned(), tensor);
}

/// Overwrites the first number of an I32 or I64 tensor.
fn overwrite(header: &Map<String, Value>, data: &mut [u8], name: &str, number: i32) {
    let start = header[name]["data_offsets"][0].as_u64().expect("an offset") as usize;
    data[start..start + 4].copy_from_slice(&number.to_le_bytes());
}

/// Gives the last four bytes of a tensor to another one.
fn truncate(header: &mut Map<String, Value>, name: &str) {
    let end = header[name]["data_offsets"][1].as_u64().expect("an offset");
    header[name]["data_offsets"][1] = json!(end - 4);
    let rest = json!({ "dtype": "U8", "shape": [4], "data_offsets": [end - 4, end] });
    header.insert("rest".to_owned(), rest);
}

/// GPTQModel subtracts a word of ones from the words of zero points.
#[test]
fn zero_points_of_0_borrow_from_their_neighbours_in_files_of_gptqmodel() {
    let model = placed("gptq", "borrow");
    change(&model, |header, data| {
        let start =
            header[&format!("{DOWN}.qzeros")]["data_offsets"][0].as_u64().expect("an offset") as usize;
        let word = 0x8888_8880u32.wrapping_sub(0x1111_1111);
        data[start..start + 4].copy_from_slice(&word.to_le_bytes());
    });
    let rows = |quantizer: Value| -> Vec<f32> {
        let text =
            std::fs::read(fixture("encodings/gptq").join("config.json")).expect("the fixture is there");
        let config: Value = serde_json::from_slice(&text).expect("it is JSON");
        let mut quantization = config["quantization_config"].clone();
        quantization["meta"] = json!({ "quantizer": quantizer });
        model.configure("quantization_config", quantization);
        let source = opened(&model.0, "");
        let tensor = source.checkpoint.tensor(&format!("{DOWN}.weight")).expect("it is there");
        let mut numbers = vec![0.0; tensor.shape.iter().product()];
        tensor.quant_type().expect("a known type").dequantize(&tensor.bytes(), &mut numbers);
        numbers
    };
    let original = opened(&placed("gptq", "borrow-original").0, "");
    let tensor = original.checkpoint.tensor(&format!("{DOWN}.weight")).expect("it is there");
    let mut expected = vec![0.0; tensor.shape.iter().product()];
    tensor.quant_type().expect("a known type").dequantize(&tensor.bytes(), &mut expected);
    for quantizer in [json!("gptqmodel:1.4.0"), json!(["optimum:1.24.0", "gptqmodel:2.0.0"])] {
        let found = rows(quantizer);
        // Row 0 has another zero point; row 1 and all others have what they had.
        assert!(found[..32] != expected[..32] && found[96..] == expected[96..]);
    }
    assert!(rows(json!("auto-gptq:0.7.1"))[96..] != expected[96..]);
}

type Damage = fn(&mut Map<String, Value>, &mut Vec<u8>, &dyn Fn(&str) -> String);

#[test]
fn damaged_tensors_are_refused_by_their_names_and_files() {
    let cases: [(&str, &str, Damage, &str); 17] = [
        ("gptq", "qweight", |header, _, at| rename(header, &at("scales"), "x"), ".scales' is missing"),
        ("gptq", "qweight", |header, _, at| rename(header, &at("qzeros"), "x"), ".qzeros' is missing"),
        (
            "gptq",
            "qweight",
            |header, _, at| header[&at("qweight")]["shape"] = json!([6, 64]),
            ".qweight' is I32 [6, 64], but it has to be I32 [12, 64]",
        ),
        (
            "gptq",
            "qweight",
            |header, _, at| header[&at("qzeros")]["shape"] = json!([4, 3]),
            ".qzeros' is I32 [4, 3], but it has to be I32 [3, 4]",
        ),
        (
            "gptq",
            "qweight",
            |header, _, at| header[&at("scales")]["shape"] = json!([32, 3]),
            ".scales' is F16 [32, 3], but it has to be F16 or BF16 or F32 [32, 32]",
        ),
        (
            "gptq",
            "qweight",
            |header, _, at| truncate(header, &at("qweight")),
            ".qweight' of shape [12, 32] has 1532 bytes",
        ),
        (
            "gptq",
            "qweight",
            |header, data, at| overwrite(header, data, &at("g_idx"), 3),
            ".g_idx' has a number that is not one of 3 groups",
        ),
        (
            "gptq",
            "qweight",
            |header, data, at| overwrite(header, data, &at("g_idx"), -1),
            "not one of 3 groups",
        ),
        (
            "gptq",
            "qweight",
            |header, data, at| overwrite(header, data, &at("g_idx"), 1),
            ".g_idx' is not in groups of 32 consecutive columns, as 'quantization_config.group_size' says",
        ),
        (
            "gptq",
            "qweight",
            |header, data, at| {
                let start = header[&at("g_idx")]["data_offsets"][0].as_u64().expect("an offset") as usize;
                data[start..start + 4 * 96].fill(0);
            },
            ".g_idx' has no column of group 1, but there are scales of 3 groups",
        ),
        (
            "gptq",
            "qweight",
            |header, _, at| rename(header, &at("bias"), &at("weight")),
            ".weight' is stored too",
        ),
        (
            "gptq_any_order",
            "qweight",
            |header, _, at| rename(header, &at("g_idx"), "x"),
            "which 'quantization_config.desc_act' requires",
        ),
        (
            "awq",
            "qweight",
            |header, _, at| header[&at("qweight")]["shape"] = json!([4, 96]),
            "but it has to be",
        ),
        (
            "compressed",
            "weight",
            |header, _, at| rename(header, &at("weight_scale"), "x"),
            ".weight_scale' is missing",
        ),
        (
            "compressed",
            "weight",
            |header, _, at| truncate(header, &at("weight")),
            "which do not fit its type F8_E4M3",
        ),
        (
            "gptq_any_order",
            "qweight",
            |header, data, at| {
                let start = header[&at("g_idx")]["data_offsets"][0].as_u64().expect("an offset") as usize;
                data[start..start + 4 * 96].fill(0);
            },
            ".g_idx' has no column of group 1",
        ),
        (
            "mxfp4",
            "",
            |header, _, _| header["model.layers.0.mlp.experts.down_proj_scales"]["shape"] = json!([4, 64, 1]),
            "down_proj_scales' is U8 [4, 64, 1], but it has to be U8 [4, 32, 2]",
        ),
    ];
    for (at, (style, tensor, damage, reason)) in cases.into_iter().enumerate() {
        let model = placed(style, &format!("damage-{at}"));
        change(&model, |header, data| damage(header, data, &|suffix| format!("{DOWN}.{suffix}")));
        let error = refusal(&model.0);
        assert!(error.contains(reason), "{style}: {error}\nexpected: {reason}");
        let tensor =
            if style == "mxfp4" { "down_proj_blocks".to_owned() } else { format!("{DOWN}.{tensor}") };
        let named = error.contains("model.safetensors: tensor") && error.contains(&tensor);
        assert!(named, "{style}: {error}");
    }
}

#[test]
fn methods_that_are_not_supported_are_refused_by_key_and_value() {
    for (style, path, value, reason) in [
        (
            "gptq",
            "/quant_method",
            json!("bitsandbytes"),
            "'quantization_config.quant_method': \"bitsandbytes\" is not supported",
        ),
        ("gptq", "/quant_method", json!(null), "'quantization_config.quant_method': it is missing"),
        ("gptq", "/bits", json!(3), "'quantization_config.bits': 3 is not supported (supported: 2, 4, 8)"),
        (
            "gptq",
            "/group_size",
            json!(0),
            "'quantization_config.group_size': 0 is not a positive integer or -1",
        ),
        (
            "awq",
            "/group_size",
            json!(16),
            "scales' has scales of 3 groups, but 96 columns in groups of 16 need 6",
        ),
        (
            "gptq",
            "/checkpoint_format",
            json!("marlin"),
            "'quantization_config.checkpoint_format': \"marlin\"",
        ),
        ("awq", "/bits", json!(3), "'quantization_config.bits': 3 is not supported (supported: 4)"),
        (
            "awq",
            "/version",
            json!("gemv"),
            "'quantization_config.version': \"gemv\" is not supported (supported: gemm)",
        ),
        (
            "compressed",
            "/format",
            json!("nvfp4-pack-quantized"),
            "'quantization_config.format': \"nvfp4-pack-quantized\"",
        ),
        (
            "compressed",
            "/config_groups/group_0/weights/num_bits",
            json!(3),
            "'quantization_config.config_groups.group_0.weights.num_bits': 3",
        ),
        (
            "compressed",
            "/config_groups/group_0/weights/strategy",
            json!("token"),
            "weights.strategy': \"token\"",
        ),
        (
            "compressed",
            "/transform_config",
            json!({"config_groups": {"u": {}}}),
            "'quantization_config.transform_config'",
        ),
    ] {
        let model = placed(style, &format!("method{}", path.replace('/', "-")));
        let text = std::fs::read(model.file("config.json")).expect("it was copied");
        let config: Value = serde_json::from_slice(&text).expect("it is JSON");
        let mut quantization = config["quantization_config"].clone();
        match quantization.pointer_mut(path) {
            Some(place) => *place = value,
            None => quantization[&path[1..]] = value,
        }
        model.configure("quantization_config", quantization);
        let error = refusal(&model.0);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
        assert!(error.contains("config.json") || reason.starts_with("scales"), "{error}");
    }
}

/// Numbers of the header and of the settings are changed at random. What still opens can be read.
#[test]
fn no_random_damage_makes_it_panic() {
    let mut opened = 0;
    for style in STYLES {
        let folder = fixture("encodings").join(style);
        let read = |name: &str| std::fs::read(folder.join(name)).expect("the fixture is there");
        let (weights, config) = (read("model.safetensors"), read("config.json"));
        let header = 8..8 + u64::from_le_bytes(weights[..8].try_into().expect("eight bytes")) as usize;
        for trial in 0..400u32 {
            let [at, which, digit, _] = philox([trial, 0, 0, 0], [7, 7]);
            let (mut weights, mut config) = (weights.clone(), config.clone());
            let text = if which % 4 == 0 { &mut config[..] } else { &mut weights[header.clone()] };
            let digits: Vec<usize> = (0..text.len()).filter(|at| text[*at].is_ascii_digit()).collect();
            text[digits[at as usize % digits.len()]] = b'0' + (digit % 10) as u8;
            let files = [("model.safetensors", weights), ("config.json", config)];
            let files = files.map(|(name, content)| (name.to_owned(), content));
            if let Ok(checkpoint) = Checkpoint::open_folder(&Folder::memory(style, files)) {
                opened += 1;
                for tensor in checkpoint.tensors() {
                    assert_eq!(tensor.bytes().len(), tensor.bytes_len());
                }
            }
        }
    }
    assert!(opened > 100, "{opened}");
}
