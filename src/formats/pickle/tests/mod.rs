//! The whole reader: PyTorch's own files, hostile ones, damaged ones.

pub(super) mod assemble;

mod damage;
mod hostile;
mod kinds;
mod programs;

use crate::formats::Checkpoint;
use std::path::{Path, PathBuf};

/// A file that `tests/oracle/make_pickles.py` made.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pickle").join(name)
}

fn content(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap()
}

/// What comes of a file with these bytes. The numbers of every tensor are read, as loading would.
fn opened(bytes: &[u8]) -> Result<Checkpoint, String> {
    let checkpoint = Checkpoint::from_pickle(Path::new("model.bin"), bytes.to_vec());
    let checkpoint = checkpoint.map_err(|error| format!("{error:#}"))?;
    for tensor in checkpoint.tensors() {
        assert_eq!(tensor.bytes().len(), tensor.bytes_len(), "{}", tensor.name);
        if let Ok(ty) = tensor.quant_type() {
            let count = crate::formats::elements(tensor.shape).unwrap();
            assert_eq!(Some(tensor.bytes_len()), ty.bytes(count), "{}", tensor.name);
        }
    }
    Ok(checkpoint)
}

/// What a file with these bytes is refused for.
fn refusal(bytes: &[u8]) -> String {
    let error = opened(bytes).expect_err("it should have been refused");
    error.strip_prefix("model.bin: ").expect("an error names the file").to_owned()
}

/// The same of the values that its pickle makes.
fn value_refusal(value: &[u8]) -> String {
    refusal(&assemble::archive(value))
}
