//! Writing safetensors: one file, or several of bounded size with an index.
//!
//! Invariant: within a file, tensors are ordered by descending element size, so that each is aligned to its
//! element size.

use super::{SavedFile, SavedTensor};
use crate::formats::packed;
use crate::formats::safetensors::{INDEX, SINGLE};
use crate::formats::sharded::METADATA;
use serde_json::{Map, Value, json};

/// Alignment of the header's length, in bytes.
const HEADER_ALIGNMENT: usize = 8;

/// Returns the files for these tensors, each of at most `bytes_max` bytes of tensors (a larger tensor has a
/// file of its own), and the index, as name and content, if there is more than one file.
pub fn safetensors_files(
    tensors: &[SavedTensor],
    bytes_max: usize,
) -> (Vec<SavedFile>, Option<(String, Vec<u8>)>) {
    let shards = shards(tensors, bytes_max);
    let name = |number: usize| match shards.len() {
        1 => SINGLE.to_owned(),
        count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    };
    let file = |(number, shard): (usize, &Vec<usize>)| {
        let mut order = shard.clone();
        order.sort_by_key(|at| std::cmp::Reverse(element_bytes(&tensors[*at])));
        SavedFile { name: name(number), header: header(tensors, &order), tensors: order, alignment: 1 }
    };
    let files: Vec<SavedFile> = shards.iter().enumerate().map(file).collect();
    let index = (files.len() > 1).then(|| (INDEX.to_owned(), index(tensors, &files)));
    (files, index)
}

/// Distributes the tensors to files in order, as indices.
fn shards(tensors: &[SavedTensor], bytes_max: usize) -> Vec<Vec<usize>> {
    let (mut shards, mut held) = (vec![Vec::new()], 0);
    for (at, tensor) in tensors.iter().enumerate() {
        if held > 0 && held + tensor.bytes() > bytes_max {
            shards.push(Vec::new());
            held = 0;
        }
        held += tensor.bytes();
        shards.last_mut().expect("there is at least one shard; this is a bug").push(at);
    }
    shards
}

fn element_bytes(tensor: &SavedTensor) -> usize {
    if packed::is_packed(tensor) { 1 } else { tensor.ty.row().block_bytes }
}

/// Returns the header's length followed by the header.
fn header(tensors: &[SavedTensor], order: &[usize]) -> Vec<u8> {
    let of_file = || order.iter().map(|at| &tensors[*at]);
    let mut header = Map::new();
    header.insert(METADATA.to_owned(), packed::build_metadata(of_file()));
    let mut begin = 0;
    for tensor in of_file() {
        let end = begin + tensor.bytes();
        header.insert(tensor.name.clone(), tensor_header(tensor, begin, end));
        begin = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

fn tensor_header(tensor: &SavedTensor, begin: usize, end: usize) -> Value {
    let known = packed::DTYPES.iter().find(|(_, ty)| *ty == tensor.ty && !tensor.transposed);
    let (dtype, shape) = match known {
        Some((name, _)) => (*name, tensor.shape.clone()),
        None => {
            let stored = packed::stored_shape(tensor.ty, &tensor.shape, tensor.transposed);
            (packed::U8_DTYPE, stored.expect("packed tensors are matrices of whole blocks; this is a bug"))
        }
    };
    json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] })
}

fn index(tensors: &[SavedTensor], files: &[SavedFile]) -> Vec<u8> {
    let total: usize = tensors.iter().map(SavedTensor::bytes).sum();
    let place = |file: &SavedFile| {
        let of_file = |at: &usize| (tensors[*at].name.clone(), Value::from(file.name.as_str()));
        file.tensors.iter().map(of_file).collect::<Vec<_>>()
    };
    let places: Map<String, Value> = files.iter().flat_map(place).collect();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": places });
    format!("{index:#}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{Checkpoint, Dtype};
    use crate::testing::Scratch;
    use mainstem_kernels::QuantType;

    fn tensor(name: &str, ty: QuantType, shape: &[usize], turned: bool) -> SavedTensor {
        SavedTensor { name: name.to_owned(), ty, shape: shape.to_vec(), transposed: turned }
    }

    fn sample_tensors() -> Vec<SavedTensor> {
        vec![
            tensor("a \"b\"", QuantType::Q4_B32T1A, &[3, 64], false),
            tensor("norm", QuantType::BF16, &[5], false),
            tensor("turned", QuantType::Q8_0, &[32, 7], true),
            tensor("f", QuantType::F32, &[2, 1], false),
            tensor("plain", QuantType::F16, &[4, 3], true),
            tensor("experts", QuantType::Q6_K, &[2, 3, 256], false),
        ]
    }

    /// Writes the files; every byte of a tensor is the tensor's index.
    fn write_files(bytes_max: usize) -> (Scratch, usize) {
        let (tensors, folder) = (sample_tensors(), Scratch::new());
        let (files, index) = safetensors_files(&tensors, bytes_max);
        for file in &files {
            let mut bytes = file.header.clone();
            file.tensors.iter().for_each(|at| bytes.extend(vec![*at as u8; tensors[*at].bytes()]));
            folder.write(&file.name, &bytes);
        }
        index.iter().for_each(|(name, content)| _ = folder.write(name, content));
        assert_eq!(index.is_some(), files.len() > 1);
        (folder, files.len())
    }

    #[test]
    fn what_is_written_is_read_as_it_was_whatever_the_number_of_files() {
        for (bytes_max, files) in [(usize::MAX, 1), (300, 3), (1, 6)] {
            let (folder, count) = write_files(bytes_max);
            assert_eq!(count, files);
            let checkpoint = Checkpoint::open_safetensors(&folder.folder()).unwrap();
            assert_eq!(checkpoint.names().count(), 6);
            for (at, tensor) in sample_tensors().into_iter().enumerate() {
                let found = checkpoint.tensor(&tensor.name).unwrap();
                assert_eq!((found.dtype, found.shape), (&Dtype::Known(tensor.ty), &tensor.shape[..]));
                assert_eq!(
                    (found.is_transposed(), &found.bytes()[..]),
                    (tensor.transposed, &vec![at as u8; tensor.bytes()][..])
                );
            }
        }
    }

    /// Edits the metadata of a file so that it contradicts the tensors.
    #[test]
    fn a_description_that_does_not_fit_its_tensor_is_refused_by_name() {
        let tensors = sample_tensors();
        let (files, _) = safetensors_files(&tensors, usize::MAX);
        let text = String::from_utf8(files[0].header[8..].to_vec()).unwrap();
        for (from, to, reason) in [
            (
                r#"{\"type\":\"q8_0\""#,
                r#"{\"type\":\"q9_0\""#,
                "tensor 'turned': unknown number format 'q9_0'",
            ),
            (
                r#"\"turned\":{"#,
                r#"\"tormed\":{"#,
                "tensor 'tormed': the metadata describes it, but it is not in the file",
            ),
            (
                r#"\"shape\":[32,7]"#,
                r#"\"shape\":[32,8]"#,
                "tensor 'turned': shape [32, 8] of q8_0 transposed needs U8 [8, 34]",
            ),
            (r#"format_version":"1""#, r#"format_version":"3""#, "version \"3\" is not supported"),
        ] {
            assert!(text.contains(from), "{text}");
            let text = text.replacen(from, to, 1);
            let mut bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
            files[0].tensors.iter().for_each(|at| bytes.extend(vec![0; tensors[*at].bytes()]));
            let folder = Scratch::new();
            let file = folder.write(SINGLE, &bytes);
            let error = format!("{:#}", Checkpoint::open_safetensors(&folder.folder()).unwrap_err());
            assert!(
                error.starts_with(file.to_str().unwrap()) && error.contains(reason),
                "{error}\nexpected: {reason}"
            );
        }
    }
}
