//! `model.safetensors`, or its index if the bytes begin like a JSON object.

#![no_main]

use mainstem::formats::Checkpoint;
use mainstem_fuzz::{folder, read_all};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let name = match bytes.first() {
        Some(b'{') => "model.safetensors.index.json",
        _ => "model.safetensors",
    };
    if let Ok(checkpoint) = Checkpoint::open_safetensors(&folder(&[(name, bytes)])) {
        read_all(&checkpoint);
    }
}
