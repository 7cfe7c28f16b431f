//! A safetensors or GGUF file that is written again, and read back: the tensors are the same.

#![no_main]

use mainstem::formats::save::{SavedFile, SavedTensor, check_gguf, gguf_file, safetensors_files};
use mainstem::formats::{Checkpoint, Dtype};
use mainstem_fuzz::{file, folder};

mainstem_fuzz::target!(parse);

/// Maximum bytes of tensors in a file, so that there are several.
const FILE_BYTES: usize = 64;

fn parse(bytes: &[u8]) {
    if bytes.starts_with(b"GGUF") {
        let Ok((checkpoint, gguf)) = Checkpoint::open_gguf(&file("read.gguf", bytes)) else { return };
        let Some((tensors, data)) = tensors(&checkpoint) else { return };
        if check_gguf(&tensors).is_ok()
            && let Ok(saved) = gguf_file("saved.gguf", &gguf, &tensors)
        {
            let path = file("saved.gguf", &written(&saved, &data));
            let (again, _) = Checkpoint::open_gguf(&path).expect("a written file must be readable");
            assert!(self::tensors(&again) == Some((tensors, data)), "the tensors are the same");
        }
        return;
    }
    let Ok(checkpoint) = Checkpoint::open_safetensors(&folder(&[("model.safetensors", bytes)])) else {
        return;
    };
    let Some((tensors, data)) = tensors(&checkpoint) else { return };
    let (files, index) = safetensors_files(&tensors, FILE_BYTES);
    let mut content: Vec<(String, Vec<u8>)> =
        files.iter().map(|saved| (saved.name.clone(), written(saved, &data))).collect();
    content.extend(index);
    let content: Vec<(&str, &[u8])> = content.iter().map(|(name, bytes)| (&**name, &**bytes)).collect();
    let again = Checkpoint::open_safetensors(&folder(&content)).expect("written files must be readable");
    assert!(self::tensors(&again) == Some((tensors, data)), "the tensors are the same");
}

/// Returns the tensors and their bytes; `None` if one is of a type that is not written.
fn tensors(checkpoint: &Checkpoint) -> Option<(Vec<SavedTensor>, Vec<Vec<u8>>)> {
    let saved = checkpoint.tensors().map(|tensor| match tensor.dtype {
        Dtype::Known(ty) => {
            let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
            Some((SavedTensor { name, ty: *ty, shape, transposed: false }, tensor.bytes().into_owned()))
        }
        Dtype::Unsupported(_) => None,
    });
    saved.collect()
}

/// Returns the content of a file.
fn written(file: &SavedFile, data: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = file.header.clone();
    for at in &file.tensors {
        bytes.resize(bytes.len().next_multiple_of(file.alignment), 0);
        bytes.extend_from_slice(&data[*at]);
    }
    bytes.resize(bytes.len().next_multiple_of(file.alignment), 0);
    bytes
}
