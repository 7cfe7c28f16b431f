//! Tests on whole files, built byte by byte from the format's description.

mod contents;

mod damage;

mod split_files;

use super::*;
use crate::formats::{ChatConfig, Dtype, elements};
use crate::testing::Scratch;
use mainstem_kernels::QuantType;
use mainstem_kernels::random::philox;

/// A GGUF file to be written. Each value is preceded by the id of its type.
#[derive(Clone)]
struct GgufBuilder {
    version: u32,
    entries: Vec<(&'static str, Vec<u8>)>,
    /// Name, dimensions innermost first, type, offset.
    tensors: Vec<(&'static str, Vec<u64>, u32, u64)>,
    alignment: usize,
    data: Vec<u8>,
}

impl GgufBuilder {
    /// Two matrices and a vector, in reverse order in the data, with gaps between them.
    fn sample(version: u32) -> GgufBuilder {
        let mut data = vec![0; 192];
        data[..6].copy_from_slice(&[1, 0, 2, 0, 3, 0]);
        data[64..64 + 34].copy_from_slice(&[9; 34]);
        data[128..128 + 24].copy_from_slice(&[7; 24]);
        GgufBuilder {
            version,
            entries: vec![
                ("general.architecture", text(version, "llama")),
                ("a.u8", tagged(0, &[200])),
                ("a.i8", tagged(1, &[0x80])),
                ("a.u16", tagged(2, &65535u16.to_le_bytes())),
                ("a.i16", tagged(3, &(-2i16).to_le_bytes())),
                ("a.u32", tagged(4, &70_000u32.to_le_bytes())),
                ("a.i32", tagged(5, &(-70_000i32).to_le_bytes())),
                ("a.f32", tagged(6, &1.5f32.to_le_bytes())),
                ("a.bool", tagged(7, &[1])),
                ("a.u64", tagged(10, &(1u64 << 40).to_le_bytes())),
                ("a.i64", tagged(11, &(-1i64).to_le_bytes())),
                ("a.f64", tagged(12, &0.25f64.to_le_bytes())),
                ("a.strings", array(version, 8, 2, &[string(version, "x"), string(version, "é")].concat())),
                ("a.i32s", array(version, 5, 3, &[1i32, -2, 3].map(i32::to_le_bytes).concat())),
                ("a.f32s", array(version, 6, 2, &[0.5f32, -4.0].map(f32::to_le_bytes).concat())),
                ("a.bools", array(version, 7, 2, &[0, 1])),
                ("a.nested", nested(version, 2)),
            ],
            tensors: vec![("m", vec![3, 2], 0, 128), ("q", vec![32, 1], 8, 64), ("v", vec![3], 1, 0)],
            alignment: 32,
            data,
        }
    }

    fn head(&self) -> Vec<u8> {
        let mut bytes = [&b"GGUF"[..], &self.version.to_le_bytes()].concat();
        bytes.extend(size(self.version, self.tensors.len() as u64));
        bytes.extend(size(self.version, self.entries.len() as u64));
        for (key, value) in &self.entries {
            bytes.extend(string(self.version, key));
            bytes.extend(value);
        }
        for (name, dims, ty, offset) in &self.tensors {
            bytes.extend(string(self.version, name));
            bytes.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| bytes.extend(size(self.version, *dim)));
            bytes.extend(ty.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head();
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        [bytes, self.data.clone()].concat()
    }

    fn with(mut self, edit: impl FnOnce(&mut GgufBuilder)) -> Vec<u8> {
        edit(&mut self);
        self.bytes()
    }
}

fn size(version: u32, size: u64) -> Vec<u8> {
    if version == 1 { (size as u32).to_le_bytes().to_vec() } else { size.to_le_bytes().to_vec() }
}

fn string(version: u32, text: &str) -> Vec<u8> {
    [size(version, text.len() as u64), text.as_bytes().to_vec()].concat()
}

fn tagged(ty: u32, bytes: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], bytes].concat()
}

fn text(version: u32, text: &str) -> Vec<u8> {
    tagged(8, &string(version, text))
}

fn array(version: u32, ty: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    tagged(9, &[tagged(ty, &size(version, len)), elements.to_vec()].concat())
}

/// Nested arrays around one byte.
fn nested(version: u32, depth: usize) -> Vec<u8> {
    let innermost = array(version, 0, 1, &[5]);
    (1..depth).fold(innermost, |inner, _| array(version, 9, 1, &inner[4..]))
}

fn open_made(bytes: &[u8]) -> (Scratch, Result<(Checkpoint, Gguf)>) {
    let folder = Scratch::new();
    let opened = Checkpoint::open_gguf(&folder.write("model.gguf", bytes));
    (folder, opened)
}

fn refusal(bytes: &[u8]) -> String {
    let (folder, opened) = open_made(bytes);
    let error = format!("{:#}", opened.expect_err("the file is refused"));
    assert!(error.starts_with(folder.path().join("model.gguf").to_str().unwrap()), "{error}");
    error
}
