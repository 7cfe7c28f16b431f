//! Tests of GGUF files written by `quantize`, with a reader that is independent of the program.

use super::{Placed, content, writer};
use crate::common::fixture;
use crate::quantize::{Room, loaded, opened, target};
use mainstem::export::{OutputFormat, write_model};
use std::path::Path;

/// Returns the keys of a file that describe its model.
fn of_the_model(file: &super::Written) -> Vec<(String, u32, Vec<u8>)> {
    const OF_THE_FILE: [&str; 3] =
        ["general.file_type", "general.quantization_version", "mainstem.tensors_beside"];
    file.entries.iter().filter(|(key, ..)| !OF_THE_FILE.contains(&key.as_str())).cloned().collect()
}

fn read(path: &Path) -> super::Written {
    super::Written::read(&std::fs::read(path).expect("it was written"))
}

#[test]
fn a_file_becomes_another_with_all_its_keys() {
    for (name, rules) in
        [("f16.gguf", "*=q4_0"), ("f32.gguf", "*.ffn_down.*=q4_0,*=q8_0"), ("q8_0.gguf", "*.attn_q.*=q4_0")]
    {
        let room = Room::new(&format!("gguf-{name}"));
        let out = room.place("out.gguf");
        let source = opened(&fixture("gguf").join(name), rules);
        write_model(&source, &target(out.clone(), OutputFormat::Gguf)).expect("it is written");
        assert!(loaded(&source) == loaded(&opened(&out, "")), "{name}");
        let (before, after) = (writer(name), read(&out));
        assert_eq!(of_the_model(&before), of_the_model(&after), "{name}");
        let names = |file: &super::Written| {
            let mut names: Vec<String> = file.tensors.iter().map(|tensor| tensor.name.clone()).collect();
            names.sort();
            names
        };
        // Includes tensors that hold settings, such as rotary position factors.
        assert_eq!(names(&before), names(&after), "{name}");
        assert!(after.entries.iter().any(|(key, ty, value)| {
            (key.as_str(), *ty, &value[..])
                == ("general.quantization_version", super::writer::U32, &[2, 0, 0, 0])
        }));
    }
}

/// Number formats without a GGUF type are stored in keys.
#[test]
fn a_file_becomes_a_folder_in_formats_that_gguf_does_not_have() {
    let (room, source) = (Room::new("gguf-folder"), opened(&fixture("gguf/f32.gguf"), "*=q4"));
    let refused = write_model(&source, &target(room.place("out.gguf"), OutputFormat::Gguf))
        .expect_err("GGUF has no q4_b32t1a");
    let refused = format!("{refused:#}");
    assert!(refused.contains("q4_b32t1a") && refused.contains("tensor '"), "{refused}");
    assert!(room.names().is_empty());
    let out = room.place("out");
    write_model(&source, &target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
    for path in [out.clone(), out.join("model.gguf")] {
        assert!(loaded(&source) == loaded(&opened(&path, "")), "{}", path.display());
    }
    assert_eq!(Room(out.clone()).names(), ["model.gguf", "model.safetensors"]);
}

#[test]
fn a_vocabulary_beside_the_file_goes_into_a_folder_only() {
    let room = Room::new("gguf-vocabulary");
    let placed = Placed::of("quantized", &content("mixtral.gguf"), "f16");
    let source = opened(&placed.file(), "*=q8_0");
    let refused =
        write_model(&source, &target(room.place("out.gguf"), OutputFormat::Gguf)).expect_err("no vocabulary");
    assert!(format!("{refused:#}").contains("it has no vocabulary"), "{refused:#}");
    let out = room.place("out");
    write_model(&source, &target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
    let written = opened(&out, "");
    assert!(loaded(&source) == loaded(&written));
    // Stacked experts are ordinary matrices.
    assert!(
        written
            .checkpoint
            .tensors()
            .any(|tensor| tensor.shape.len() == 3 && tensor.stored_type_name() == "q8_0")
    );
    assert_eq!(
        std::fs::read(out.join("tokenizer.json")).ok(),
        std::fs::read(placed.0.join("tokenizer.json")).ok()
    );
}
