//! Matrices in number formats that safetensors cannot express ("packed"): the file stores their bytes as
//! tensors of type U8 and describes them in its metadata.
//!
//! | metadata key | content |
//! |---|---|
//! | `mainstem.format_version` | `1` |
//! | `mainstem.tensors` | a JSON object with, for each such tensor, `type` (the number format), `shape` (of
//! the elements) and `turned` (whether it is transposed) |
//!
//! The U8 tensor has the shape of the elements except for the last dimension, which is the bytes per row. A
//! transposed tensor has the shape (K, N), and its bytes are those of rows (N, K): these rows must be whole
//! blocks.
//! Invariant: metadata that is read is checked against the tensor's own type, shape and bytes; everything
//! that is written can be read back.

use super::elements;
use super::save::SavedTensor;
use super::sharded::{ByTensor, Metadata};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const VERSION_KEY: &str = "mainstem.format_version";
const TENSORS_KEY: &str = "mainstem.tensors";
const VERSION: &str = "1";

/// The types of other tensors, by their names in the header.
pub(super) const DTYPES: [(&str, QuantType); 3] =
    [("F32", QuantType::F32), ("F16", QuantType::F16), ("BF16", QuantType::BF16)];

/// The safetensors type of packed tensors.
pub(super) const U8_DTYPE: &str = "U8";

/// Metadata of a packed tensor.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PackedTensor {
    #[serde(rename = "type")]
    ty: String,
    /// Shape of the elements, outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// Whether the bytes are those of matrices (N, K), although the shape is (K, N).
    #[serde(rename = "turned", default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) transposed: bool,
}

/// Parses the packed tensors listed in a header's metadata; empty if there are none.
pub(super) fn parse_metadata(metadata: &Metadata) -> Result<BTreeMap<String, PackedTensor>> {
    let (version, tensors) = match (&metadata.version, &metadata.tensors) {
        (None, None) => return Ok(BTreeMap::new()),
        (None, Some(_)) => bail!("key '{VERSION_KEY}': it is missing, but '{TENSORS_KEY}' is present"),
        (Some(version), tensors) => (version, tensors),
    };
    ensure!(
        version == VERSION,
        "key '{VERSION_KEY}': version \"{version}\" is not supported (supported: \"{VERSION}\")"
    );
    let text = tensors.as_ref().with_context(|| format!("key '{TENSORS_KEY}': it is missing"))?;
    let coded: ByTensor<PackedTensor> =
        serde_json::from_str(text).with_context(|| format!("key '{TENSORS_KEY}'"))?;
    Ok(coded.tensors)
}

/// Whether safetensors cannot express the tensor, so that it is stored as U8 with metadata.
pub(super) fn is_packed(tensor: &SavedTensor) -> bool {
    tensor.transposed || !DTYPES.iter().any(|(_, ty)| *ty == tensor.ty)
}

/// Returns the header metadata of a file with these tensors.
pub(super) fn build_metadata<'a>(tensors: impl IntoIterator<Item = &'a SavedTensor>) -> Value {
    let coded = tensors.into_iter().filter(|tensor| is_packed(tensor));
    let coded: Map<String, Value> =
        coded.map(|tensor| (tensor.name.clone(), json!(PackedTensor::from_saved(tensor)))).collect();
    match coded.is_empty() {
        true => json!({ "format": "pt" }),
        false => json!({ "format": "pt", VERSION_KEY: VERSION, TENSORS_KEY: json!(coded).to_string() }),
    }
}

impl PackedTensor {
    fn from_saved(tensor: &SavedTensor) -> PackedTensor {
        let (ty, shape) = (tensor.ty.name().to_owned(), tensor.shape.clone());
        PackedTensor { ty, shape, transposed: tensor.transposed }
    }

    /// Checks a stored tensor's type, shape and size of `held` bytes against the metadata, and returns its
    /// number format.
    pub(super) fn check(&self, dtype: &str, shape: &[usize], held: usize) -> Result<QuantType> {
        let Some(ty) = QuantType::by_name(&self.ty) else {
            let known = QuantType::all().map(QuantType::name).collect::<Vec<_>>().join(", ");
            bail!("unknown number format '{}' (known: {known})", self.ty);
        };
        let expected = stored_shape(ty, &self.shape, self.transposed)?;
        ensure!(
            dtype == U8_DTYPE && shape == expected,
            "shape {:?} of {ty}{} needs {U8_DTYPE} {expected:?}, but it is {dtype} {shape:?}",
            self.shape,
            if self.transposed { " transposed" } else { "" }
        );
        let needed =
            elements(&expected).with_context(|| format!("shape {expected:?} is too large to count"))?;
        ensure!(needed == held, "{U8_DTYPE} {expected:?} needs {needed} bytes, but it has {held}");
        Ok(ty)
    }
}

/// Returns the shape of the U8 tensor that stores elements of shape `shape`.
pub(super) fn stored_shape(ty: QuantType, shape: &[usize], transposed: bool) -> Result<Vec<usize>> {
    let [outer @ .., a, b] = shape else { bail!("shape {shape:?} is not a matrix") };
    let (rows, width) = if transposed { (*b, *a) } else { (*a, *b) };
    let row = ty.bytes(width).with_context(|| {
        format!(
            "rows of {width} elements are not a whole number of {ty} blocks of {} elements",
            ty.row().block_elements
        )
    })?;
    Ok([outer, &[rows, row]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coded(ty: &str, shape: &[usize], turned: bool) -> PackedTensor {
        PackedTensor { ty: ty.to_owned(), shape: shape.to_vec(), transposed: turned }
    }

    #[test]
    fn bytes_are_rows_of_whole_blocks() {
        for (ty, shape, turned, stored) in [
            ("q4_0", &[3, 64][..], false, &[3, 36][..]),
            ("q4_0", &[64, 3], true, &[3, 36]),
            ("q4_K", &[2, 5, 512], false, &[2, 5, 288]),
            ("q8_0", &[2, 32, 7], true, &[2, 7, 34]),
            ("f16", &[4, 3], true, &[3, 8]),
        ] {
            let held = stored.iter().product();
            assert_eq!(coded(ty, shape, turned).check("U8", stored, held).unwrap().name(), ty);
            assert!(coded(ty, shape, !turned).check("U8", stored, held).is_err(), "{ty} {shape:?}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_reason() {
        for (coded, dtype, stored, held, reason) in [
            (coded("q9", &[3, 64], false), "U8", &[3, 36][..], 108, "unknown number format 'q9'"),
            (coded("q4_0", &[3, 48], false), "U8", &[3, 27], 81, "rows of 48 elements"),
            (coded("q4_0", &[3, 64], true), "U8", &[3, 36], 108, "rows of 3 elements"),
            (coded("q4_0", &[64], false), "U8", &[36], 36, "not a matrix"),
            (coded("q4_0", &[3, 64], false), "I8", &[3, 36], 108, "needs U8 [3, 36], but it is I8"),
            (coded("q4_0", &[3, 64], false), "U8", &[108], 108, "but it is U8 [108]"),
            (coded("q4_0", &[3, 64], false), "U8", &[3, 36], 107, "needs 108 bytes, but it has 107"),
            (coded("q4_0", &[1 << 62, 64], false), "U8", &[1 << 62, 36], 0, "too large"),
        ] {
            let error = coded.check(dtype, stored, held).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}\nexpected: {reason}");
        }
    }

    #[test]
    fn metadata_of_another_kind_is_refused_and_of_none_passed_over() {
        let tensors = r#"{"a":{"type":"q4_0","shape":[1,32]}}"#;
        let of = |value: Value| {
            let metadata: Metadata = serde_json::from_value(value).map_err(|error| error.to_string())?;
            parse_metadata(&metadata).map_err(|error| format!("{error:#}"))
        };
        assert!(of(json!({})).unwrap().is_empty() && of(json!({"format": [{}]})).unwrap().is_empty());
        assert_eq!(of(json!({VERSION_KEY: "1", TENSORS_KEY: tensors})).unwrap()["a"].shape, [1, 32]);
        for (metadata, reason) in [
            (json!({VERSION_KEY: "2", TENSORS_KEY: tensors}), "version \"2\" is not supported"),
            (json!({VERSION_KEY: 1, TENSORS_KEY: tensors}), "invalid type: integer"),
            (json!({TENSORS_KEY: tensors}), "'mainstem.format_version': it is missing"),
            (json!({VERSION_KEY: "1"}), "'mainstem.tensors': it is missing"),
            (json!({VERSION_KEY: "1", TENSORS_KEY: {}}), "invalid type: map"),
            (json!({VERSION_KEY: "1", TENSORS_KEY: "["}), "'mainstem.tensors'"),
            (json!({VERSION_KEY: "1", TENSORS_KEY: r#"{"a":{"type":"q4_0"}}"#}), "missing field `shape`"),
            (
                json!({VERSION_KEY: "1", TENSORS_KEY: r#"{"a":{"type":"q4_0","shape":[1],"x":1}}"#}),
                "unknown field",
            ),
            (
                json!({
                    VERSION_KEY: "1",
                    TENSORS_KEY: tensors.replace("}}", r#"},"a":{"type":"q4_0","shape":[1]}}"#)
                }),
                "'a': it is described twice",
            ),
        ] {
            let error = of(metadata).unwrap_err();
            assert!(error.contains(reason), "{error}\nexpected: {reason}");
        }
    }
}
