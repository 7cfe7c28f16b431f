//! The safetensors format: a little-endian header length, a JSON header with the type, shape and byte range
//! of each tensor, and then the data. Tensors in formats that safetensors cannot express are described in the
//! header's metadata.
//!
//! Invariant: the tensors of an accepted file tile its data section: without overlaps, gaps, or bytes after
//! the last tensor.

use super::folder::Folder;
use super::packed::{self, PackedTensor};
use super::sharded::{ByTensor, FolderFormat};
use super::{Checkpoint, Dtype, Layout, TensorEntry, elements, fixed_bytes};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Weight file of a model folder.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Index of weights in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Maximum header size, as the format defines it.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// File names of safetensors weights in a model folder.
pub(super) const FOLDER_FORMAT: FolderFormat =
    FolderFormat { single: SINGLE, index: INDEX, read: read_tensors };

impl Checkpoint {
    /// Opens a folder's safetensors: `model.safetensors`, or the files listed in
    /// `model.safetensors.index.json`.
    pub fn open_safetensors(folder: &Folder) -> Result<Checkpoint> {
        let mut checkpoint = FOLDER_FORMAT.open_required(folder)?;
        checkpoint.attach_encodings(folder)?;
        Ok(checkpoint)
    }
}

/// Parses the tensors of a safetensors file.
fn read_tensors(bytes: &[u8], file: usize) -> Result<BTreeMap<String, TensorEntry>> {
    let declared = u64::from_le_bytes(fixed_bytes(bytes, 0)?);
    ensure!(
        declared <= HEADER_BYTES_MAX,
        "a header of {declared} bytes is too large (at most {HEADER_BYTES_MAX})"
    );
    let data_start = 8 + declared as usize;
    let Some(header) = bytes.get(8..data_start) else {
        bail!("truncated: a header of {declared} bytes is declared in a file of {} bytes", bytes.len());
    };
    ensure!(header.first() == Some(&b'{'), "not a safetensors file: the header is not a JSON object");
    let described: ByTensor<TensorHeader> = serde_json::from_slice(header).context("in the header")?;
    check_tiling(&described.tensors, bytes.len() - data_start)?;
    let coded = packed::parse_metadata(&described.metadata).context("in the header's metadata")?;
    if let Some(name) = coded.keys().find(|name| !described.tensors.contains_key(*name)) {
        bail!("tensor '{name}': the metadata describes it, but it is not in the file");
    }
    let entry = |(name, tensor): (String, TensorHeader)| {
        let entry = match coded.get(&name) {
            Some(coded) => {
                tensor.packed_entry(coded, file, data_start).with_context(|| format!("tensor '{name}'"))
            }
            None => tensor.entry(&name, file, data_start),
        };
        entry.map(|entry| (name, entry))
    };
    described.tensors.into_iter().map(entry).collect()
}

/// Checks that the tensors' byte ranges follow each other from the first byte of the data to the last.
fn check_tiling(tensors: &BTreeMap<String, TensorHeader>, data_bytes: usize) -> Result<()> {
    let mut ranges: Vec<_> = tensors.iter().map(|(name, t)| (t.data_offsets, name)).collect();
    ranges.sort_unstable();
    let mut covered = 0;
    for ([begin, end], name) in ranges {
        ensure!(begin <= end, "tensor '{name}': it ends at {end}, before its start at {begin}");
        ensure!(
            begin >= covered,
            "tensor '{name}': it begins at {begin}, inside the tensor that ends at {covered}"
        );
        ensure!(
            begin <= covered,
            "tensor '{name}': the bytes {covered} to {begin} before it belong to no tensor"
        );
        ensure!(
            end <= data_bytes,
            "truncated: tensor '{name}' ends at {end}, and the data has {data_bytes} bytes"
        );
        covered = end;
    }
    ensure!(
        covered == data_bytes,
        "oversized: the last tensor ends at {covered} of {data_bytes} bytes of data"
    );
    Ok(())
}

/// A tensor as the header describes it. Offsets are in bytes from the start of the data section.
#[derive(Deserialize)]
struct TensorHeader {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl TensorHeader {
    /// Converts the description to an entry. Its byte range must lie inside the data section.
    fn entry(self, name: &str, file: usize, data_start: usize) -> Result<TensorEntry> {
        let TensorHeader { dtype, shape, data_offsets: [begin, end] } = self;
        let dtype = match packed::DTYPES.into_iter().find(|(known, _)| *known == dtype) {
            Some((_, ty)) => Dtype::Known(ty),
            None => Dtype::Unsupported(dtype),
        };
        if let Dtype::Known(ty) = dtype {
            let Some(needed) = elements(&shape).and_then(|n| ty.bytes(n)) else {
                bail!("tensor '{name}': shape {shape:?} of {ty} is too large");
            };
            let held = end - begin;
            ensure!(
                needed == held,
                "tensor '{name}': shape {shape:?} of {ty} needs {needed} bytes, but it has {held}"
            );
        }
        let bytes = data_start + begin..data_start + end;
        Ok(TensorEntry { dtype, shape, file, bytes, layout: Layout::Dense })
    }

    /// Converts the description of a packed tensor, which the metadata explains, to an entry.
    fn packed_entry(self, coded: &PackedTensor, file: usize, data_start: usize) -> Result<TensorEntry> {
        let TensorHeader { dtype, shape, data_offsets: [begin, end] } = self;
        let ty = coded.check(&dtype, &shape, end - begin)?;
        let layout = if coded.transposed { Layout::Transposed } else { Layout::Dense };
        let bytes = data_start + begin..data_start + end;
        Ok(TensorEntry { dtype: Dtype::Known(ty), shape: coded.shape.clone(), file, bytes, layout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use mainstem_kernels::QuantType;
    use mainstem_kernels::random::philox;

    const HEADER: &str = r#"{"__metadata__":{"format":"pt","shape":"free text"},
        "a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},
        "none":{"dtype":"F16","shape":[0,7],"data_offsets":[8,8]},
        "one":{"dtype":"BF16","shape":[],"data_offsets":[14,16]},
        "b":{"dtype":"F16","shape":[3],"data_offsets":[8,14]}}  "#;
    const DATA: [u8; 16] = [0, 0, 128, 63, 0, 0, 0, 64, 0, 60, 0, 64, 0, 66, 128, 63];

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    /// Opens a file with these bytes and returns the error.
    fn refusal(bytes: &[u8]) -> String {
        let folder = Scratch::new();
        let path = folder.write(SINGLE, bytes);
        let error = format!("{:#}", Checkpoint::open_safetensors(&folder.folder()).unwrap_err());
        assert!(error.starts_with(path.to_str().unwrap()), "{error}");
        error
    }

    #[test]
    fn tensors_come_back_with_their_types_shapes_and_bytes() {
        let folder = Scratch::new();
        let path = folder.write(SINGLE, &file(HEADER, &DATA));
        let checkpoint = Checkpoint::open_safetensors(&folder.folder()).unwrap();
        assert!(checkpoint.names().eq(["a", "b", "none", "one"]));
        let seen: Vec<_> =
            checkpoint.tensors().map(|t| (t.name, t.quant_type().unwrap(), t.shape, t.bytes())).collect();
        assert_eq!(seen[0], ("a", QuantType::F32, &[2, 1][..], DATA[..8].into()));
        assert_eq!(seen[1], ("b", QuantType::F16, &[3][..], DATA[8..14].into()));
        assert_eq!(seen[2], ("none", QuantType::F16, &[0, 7][..], DATA[..0].into()));
        assert_eq!(seen[3], ("one", QuantType::BF16, &[][..], DATA[14..].into()));
        assert_eq!(checkpoint.tensor("b").unwrap().file, path);
        assert!(checkpoint.tensor("c").is_none());
        assert_eq!(checkpoint.total_bytes(), DATA.len());
    }

    #[test]
    fn a_foreign_dtype_is_refused_only_where_its_numbers_are_wanted() {
        for (foreign, shape) in [("I64", "[2,1]"), ("f32", "[2,1]"), ("F8_E5M2", "[4611686018427387904,4]")] {
            let folder = Scratch::new();
            let header =
                HEADER.replacen("\"F32\",\"shape\":[2,1]", &format!("\"{foreign}\",\"shape\":{shape}"), 1);
            let path = folder.write(SINGLE, &file(&header, &DATA));
            let checkpoint = Checkpoint::open_safetensors(&folder.folder()).unwrap();
            assert_eq!(checkpoint.tensor("b").unwrap().quant_type().unwrap(), QuantType::F16);
            let tensor = checkpoint.tensor("a").unwrap();
            assert_eq!(
                (tensor.dtype, tensor.bytes()),
                (&Dtype::Unsupported(foreign.into()), DATA[..8].into())
            );
            let error = tensor.quant_type().unwrap_err().to_string();
            let expected = format!("{}: tensor 'a': its dtype {foreign} is not supported", path.display());
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn every_kind_of_damage_is_refused_by_name() {
        let a = |field: &str, value: &str| HEADER.replacen(field, value, 1);
        let cases = [
            (a("F32\",\"shape\":[2,1]", "I64\",\"shape\":[-2]"), "tensor 'a': invalid value"),
            (a("[2,1]", "[2,2]"), "tensor 'a': shape [2, 2] of f32 needs 16 bytes, but it has 8"),
            (
                a("[2,1]", "[4294967296,4294967296]"),
                "tensor 'a': shape [4294967296, 4294967296] of f32 is too large",
            ),
            (
                a("[2,1]", "[4611686018427387904]"),
                "tensor 'a': shape [4611686018427387904] of f32 is too large",
            ),
            (a("[2,1]", "[-2,-1]"), "tensor 'a': invalid value"),
            (a("[2,1]", "[2.5]"), "tensor 'a': invalid type"),
            (a("[0,8]", "[0,8,16]"), "tensor 'a'"),
            (a("[0,8]", "[8,0]"), "tensor 'a': it ends at 0, before its start at 8"),
            (a("[0,8]", "[0,10]"), "tensor 'none': it begins at 8, inside the tensor that ends at 10"),
            (a("[0,8]", "[2,8]"), "tensor 'a': the bytes 0 to 2 before it belong to no tensor"),
            (a("[14,16]", "[15,16]"), "tensor 'one': the bytes 14 to 15 before it"),
            (a("[14,16]", "[14,18]"), "truncated: tensor 'one' ends at 18, and the data has 16 bytes"),
            (a("[14,16]", "[14,18446744073709551615]"), "truncated: tensor 'one' ends at"),
            (a("[14,16]", "[14,18446744073709551616]"), "tensor 'one'"),
            (a("\"b\":", "\"a\":"), "tensor 'a': it is described twice"),
            (a("\"dtype\":\"F32\",", ""), "tensor 'a': missing field `dtype`"),
            (a("\"shape\":[2,1]", "\"shape\":[2,1],\"shape\":[2]"), "tensor 'a': duplicate field `shape`"),
            (a("{\"__meta", "[\"__meta"), "the header is not a JSON object"),
            (a("{\"__meta", " {\"__meta"), "the header is not a JSON object"),
            (a("}}", "}"), "in the header"),
            (HEADER.to_owned() + "{}", "in the header: trailing characters"),
            (String::new(), "the header is not a JSON object"),
        ];
        for (header, reason) in cases {
            let error = refusal(&file(&header, &DATA));
            assert!(error.contains(reason), "{header}\n{error}\nexpected: {reason}");
        }
    }

    #[test]
    fn files_of_the_wrong_length_are_refused() {
        let whole = file(HEADER, &DATA);
        for end in 0..whole.len() {
            let error = refusal(&whole[..end]);
            assert!(error.contains("truncated"), "{end}: {error}");
        }
        let error = refusal(&[&whole[..], b"\0"].concat());
        assert!(error.contains("oversized: the last tensor ends at 16 of 17 bytes"), "{error}");
        for declared in [HEADER_BYTES_MAX + 1, u64::MAX] {
            let error = refusal(&[&declared.to_le_bytes()[..], &whole[8..]].concat());
            assert!(error.contains(&format!("a header of {declared} bytes")), "{error}");
        }
    }

    #[test]
    fn no_random_damage_makes_it_panic_or_read_outside() {
        let whole = file(HEADER, &DATA);
        for round in 0..20_000u32 {
            let mut bytes = whole.clone();
            let [first, second, value, _] = philox([round, 0, 0, 0], [1, 2]);
            for at in [first, second] {
                bytes[at as usize % whole.len()] = value.rotate_left(at) as u8;
            }
            for (name, entry) in read_tensors(&bytes, 0).into_iter().flatten() {
                let held = bytes[entry.bytes].len();
                if let Dtype::Known(ty) = entry.dtype {
                    assert_eq!(elements(&entry.shape).and_then(|n| ty.bytes(n)), Some(held), "{name}");
                }
            }
        }
    }

    const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

    /// Creates a folder with an index and two files of one tensor each, "x" and "y".
    fn sharded(index: &str) -> Scratch {
        let folder = Scratch::new();
        for (shard, name) in SHARDS.iter().zip(["x", "y"]) {
            let header = format!(r#"{{"{name}":{{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}}}"#);
            folder.write(shard, &file(&header, name.repeat(2).as_bytes()));
        }
        folder.write(INDEX, index.as_bytes());
        folder
    }

    fn index(x: &str, y: &str) -> String {
        format!(r#"{{"metadata":{{"total_size":4}},"weight_map":{{"x":"{x}","y":"{y}"}}}}"#)
    }

    #[test]
    fn a_sharded_model_is_one_checkpoint() {
        let folder = sharded(&index(SHARDS[0], SHARDS[1]));
        let checkpoint = Checkpoint::open_safetensors(&folder.folder()).unwrap();
        assert_eq!(checkpoint.tensor("x").unwrap().bytes(), &b"xx"[..]);
        assert_eq!(checkpoint.tensor("y").unwrap().bytes(), &b"yy"[..]);
        assert_eq!(checkpoint.tensor("y").unwrap().file, folder.path().join(SHARDS[1]));
        assert!(checkpoint.files().eq(SHARDS.map(|shard| folder.path().join(shard))));
    }

    #[test]
    fn an_index_that_disagrees_with_its_files_or_leaves_its_folder_is_refused() {
        let [one, two] = SHARDS;
        let listed_once = format!(r#"{{"weight_map":{{"x":"{one}"}}}}"#);
        let twice = format!(r#"{{"weight_map":{{"x":"{one}","y":"{two}","x":"{two}"}}}}"#);
        let swapped = format!("{one}: tensor 'y': it is listed in the index, but not in this file");
        let mut cases = vec![
            (index(two, one), swapped.as_str()),
            (index(one, one), "tensor 'y': it is listed in the index, but not"),
            (index(one, "absent.safetensors"), "absent.safetensors"),
            (listed_once.replace(one, two), "tensor 'x': it is listed in the index, but not"),
            (twice, "tensor 'x': it is described twice"),
            (r#"{"weight_map":{"x":3}}"#.to_owned(), "tensor 'x': invalid type"),
            ("{}".to_owned(), "missing field `weight_map`"),
        ];
        for outside in ["../a.safetensors", "/etc/passwd", "sub/a", "..", ".", "", "a\\\\b", "C:a"] {
            cases.push((index(outside, two), "is not the name of a file in this folder"));
        }
        for (index, reason) in cases {
            let folder = sharded(&index);
            let error = format!("{:#}", Checkpoint::open_safetensors(&folder.folder()).unwrap_err());
            assert!(error.contains(reason), "{index}\n{error}\nexpected: {reason}");
        }
    }

    #[test]
    fn tensors_the_index_does_not_list_are_refused() {
        let folder = sharded(&index(SHARDS[0], SHARDS[1]));
        let header = r#"{"y":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},
            "z":{"dtype":"F16","shape":[0],"data_offsets":[2,2]}}"#;
        folder.write(SHARDS[1], &file(header, b"yy"));
        let error = format!("{:#}", Checkpoint::open_safetensors(&folder.folder()).unwrap_err());
        assert!(error.contains("tensor 'z': it is in this file, but the index does not say so"), "{error}");
    }

    #[test]
    fn a_folder_without_weights_says_what_it_looked_for() {
        let folder = Scratch::new();
        let error = format!("{:#}", Checkpoint::open_safetensors(&folder.folder()).unwrap_err());
        assert!(error.contains(SINGLE) && error.contains(INDEX), "{error}");
    }
}
