//! Tests of the whole reader: PyTorch's own files, malicious ones, damaged ones.

pub(super) mod assemble;

mod damage;
mod hostile;
mod kinds;
mod programs;

use crate::formats::Checkpoint;
use std::path::{Path, PathBuf};

/// Path of a file created by `tests/oracle/make_pickles.py`.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pickle").join(name)
}

fn content(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap()
}

/// Opens a file with these bytes and, as loading would, reads the elements of every tensor.
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

/// Returns the error for a file with these bytes.
fn refusal(bytes: &[u8]) -> String {
    let error = opened(bytes).expect_err("it should have been refused");
    error.strip_prefix("model.bin: ").expect("an error names the file").to_owned()
}

/// Returns the error for an archive whose pickle creates `value`.
fn value_refusal(value: &[u8]) -> String {
    refusal(&assemble::archive(value))
}
