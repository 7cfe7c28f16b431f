//! Tests of checkpoints with F8_E4M3 weights and three layouts of scales (tests/oracle/make_f8.py).

use crate::common::{Copied, fixture, mainstem};
use crate::oracle::check_at;
use crate::quantize::{Room, loaded, opened, target};
use mainstem::export::{OutputFormat, write_model};
use mainstem_kernels::QuantType;
use serde_json::Value;
use std::collections::BTreeSet;

const STYLES: [&str; 3] = ["tensor", "channel", "block"];

/// Returns a copy of the fixture with the tokenizer of another fixture of the same vocabulary size.
fn placed(style: &str, test: &str) -> Copied {
    let model = Copied::of(&format!("f8/{style}"), &format!("f8-{test}-{style}"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("gqa").join(file), model.file(file)).expect("a file is copied");
    }
    model
}

#[actix::test]
async fn the_recorded_answers_come_whatever_the_scales_are_for() {
    for style in STYLES {
        let model = placed(style, "answers");
        for kind in ["cpu", "reference"] {
            check_at(&model.0, &format!("f8/{style}/answers.json"), kind).await;
        }
    }
}

/// Weights are requantized from quants times scales, not from their 16-bit roundings, when loaded and when
/// written.
#[test]
fn they_are_loaded_in_16_bits_or_by_rules() {
    for style in STYLES {
        let (model, room) = (placed(style, "rules"), Room::new(&format!("f8-{style}")));
        let types = |rules: &str| -> BTreeSet<&str> {
            let source = opened(&model.0, rules);
            loaded(&source)
                .iter()
                .map(|(_, ty, bytes)| if bytes.len() > 128 { ty.name() } else { "small" })
                .collect()
        };
        assert_eq!(types(""), BTreeSet::from(["bf16", "small"]), "{style}");
        assert!(types("*proj*=q8_0").contains("q8_0"), "{style}");
        for rules in ["*proj*=q8_0", "*=bf16"] {
            let (source, out) = (opened(&model.0, rules), room.place(&rules.replace('*', "")));
            write_model(&source, &target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
            let written = opened(&out, "");
            assert!(loaded(&source) == loaded(&written), "{style} by {rules}");
            let is_f8 = |name: &str| {
                written.checkpoint.tensor(name).expect("its name").stored_type_name() == "f8_e4m3"
            };
            assert!(!written.checkpoint.names().any(is_f8), "{style}");
        }
    }
}

#[test]
fn inspect_names_what_is_stored_and_what_is_left_out() {
    let model = placed("tensor", "inspect");
    let output = mainstem().args(["inspect", "--json"]).arg(&model.0).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let tensors = report["tensors"].as_array().expect("a list");
    let down = tensors.iter().find(|tensor| tensor["role"] == "down").expect("there is one");
    assert_eq!(
        (&down["stored"], &down["type"], &down["bits"]),
        (&"f8_e4m3".into(), &"bf16".into(), &16.0.into())
    );
    let unused = report["unused"].as_array().expect("a list");
    assert_eq!(unused.len(), 7, "{unused:?}");
    for tensor in unused {
        assert_eq!(tensor["why"], "activations are not rounded to 8 bits");
        assert!(tensor["name"].as_str().is_some_and(|name| name.ends_with(".input_scale")));
    }
}

/// An unsupported 8-bit type is refused with an error that lists the supported formats.
#[test]
fn another_type_of_8_bits_is_refused_by_its_name() {
    let model = placed("tensor", "refused");
    let file = model.file("model.safetensors");
    let bytes = std::fs::read(&file).expect("it was copied");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let text =
        String::from_utf8(bytes[8..header].to_vec()).expect("it is JSON").replace("F8_E4M3", "F8_E5M2");
    std::fs::write(&file, [&bytes[..8], text.as_bytes(), &bytes[header..]].concat())
        .expect("it can be written");
    let output = mainstem().arg("inspect").arg(&model.0).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("F8_E5M2"), "{error}");
    assert!(QuantType::by_name("f8_e5m2").is_none() && error.contains("F8_E4M3 in safetensors"), "{error}");
}
