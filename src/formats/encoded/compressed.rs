//! The encodings of compressed-tensors with integers.
//!
//! | tensor | content |
//! |---|---|
//! | NAME`.weight_packed` | I32 (out, in / per word): words of consecutive columns (in) |
//! | NAME`.weight_shape` | I64 or I32 (2): out and in, for packed integers |
//! | NAME`.weight` | I8 (out, in), for integers of 8 bits that are not packed |
//! | NAME`.weight_scale` | floats (out, groups), (out, 1), (out) or (1) |
//! | NAME`.weight_zero_point` | I32 (out / per word, groups): words of rows, or I8 shaped like the scales |
//! | NAME`.weight_g_idx` | I32 (in), the group of each column, if they are in another order |
//!
//! 2^(bits - 1) has been added to packed integers and zero points. Symmetric integers have no zero points.
//! F8_E4M3 weights are those of all programs.

use super::super::{Checkpoint, Dtype};
use super::Encoded;
use super::integers::{Groups, Integers, Scales, ZeroPoints};
use super::method::CompressedConfig;
use super::packing::{Axis, Packing, per_word};
use super::stored::{FLOATS, Module, StoredPart};
use anyhow::{Context, Result, bail, ensure};

const PACKED: &str = ".weight_packed";
const TARGET: &str = ".weight";

/// Attaches the matrices with integers.
pub(super) fn attach(checkpoint: &mut Checkpoint, config: &CompressedConfig) -> Result<()> {
    checkpoint.attach_each([PACKED, TARGET], |_| true, |module| packed(module, config))?;
    let is_bytes = |entry: &super::TensorEntry| entry.dtype == Dtype::Unsupported("I8".to_owned());
    checkpoint.attach_each([TARGET, TARGET], is_bytes, |module| bytes(module, config))
}

fn packed(module: &mut Module, config: &CompressedConfig) -> Result<(Vec<usize>, Encoded)> {
    let (quants, shape) = (module.take(PACKED)?, module.take(".weight_shape")?);
    shape.check(&["I64", "I32"], &[2])?;
    let sizes = module.integers(&shape);
    let [rows, words] = quants.dimensions()?;
    let columns = usize::try_from(sizes[1]).unwrap_or(0);
    let bits = [2, 4, 8].into_iter().find(|bits| columns.div_ceil(per_word(*bits)) == words);
    let bits = bits.filter(|_| sizes[0] == rows as i64 && columns > 0).with_context(|| {
        format!("its shape {:?} does not fit '{}', which is {sizes:?}", quants.shape, shape.name)
    })?;
    quants.check(&["I32"], &[rows, words])?;
    let name = match bits {
        2 => "packed_int2",
        4 => "packed_int4",
        _ => "packed_int8",
    };
    let packing = Packing::by_rows(bits, Axis::Columns, columns);
    matrix(module, config, (name, bits, packing, quants), [rows, columns])
}

fn bytes(module: &mut Module, config: &CompressedConfig) -> Result<(Vec<usize>, Encoded)> {
    let quants = module.take(TARGET)?;
    let [rows, columns] = quants.dimensions()?;
    quants.check(&["I8"], &[rows, columns])?;
    matrix(module, config, ("int8", 8, Packing::bytes(128, columns), quants), [rows, columns])
}

/// Creates a matrix of integers with the scales and zero points of the module.
fn matrix(
    module: &mut Module,
    config: &CompressedConfig,
    (name, bits, packing, quants): (&'static str, u32, Packing, StoredPart),
    [rows, columns]: [usize; 2],
) -> Result<(Vec<usize>, Encoded)> {
    let scales = module.take(".weight_scale")?;
    let [row_stride, count] = match scales.shape[..] {
        [] | [1] | [1, 1] => [0, 1],
        [n] if n == rows => [1, 1],
        [n, groups] if n == rows && groups > 0 => [groups, groups],
        _ => [0, 0],
    };
    ensure!(
        count > 0,
        "'{}' of shape {:?} does not fit {rows} rows and {columns} columns",
        scales.name,
        scales.shape
    );
    scales.check(&FLOATS, &scales.shape)?;
    let sizes = [columns.div_ceil(count)]
        .into_iter()
        .filter(|_| count == 1)
        .chain(config.group_sizes.iter().copied());
    let size = sizes.into_iter().find(|size| columns.div_ceil(*size) == count).with_context(|| {
        format!(
            "'{}' has scales of {count} groups, but {columns} columns are not so many groups of a size in \
             'quantization_config.config_groups' ({:?})",
            scales.name, config.group_sizes
        )
    })?;
    let groups = match module.take_if_stored(".weight_g_idx") {
        None => Groups::Consecutive(size),
        Some(list) => {
            list.check(&["I32", "I64"], &[columns])?;
            let numbers = module.integers(&list);
            // It has -1 throughout if columns are in order.
            match numbers.iter().all(|number| *number == -1) {
                true => Groups::Consecutive(size),
                false => Groups::listed(module, &list, count)?,
            }
        }
    };
    let (zeros, points) = match module.take_if_stored(".weight_zero_point") {
        None => (None, None),
        Some(points) => {
            let packing = match points.dtype.as_str() {
                "I8" => {
                    points.check(&["I8"], &scales.shape)?;
                    let values = -(1 << (bits - 1))..1 << (bits - 1);
                    let outside = module.data(&points).iter().map(|byte| i16::from(*byte as i8));
                    if let Some(outside) = outside.into_iter().find(|value| !values.contains(value)) {
                        bail!("'{}' has the zero point {outside}, which {bits} bits lack", points.name);
                    }
                    Packing { row_stride, ..Packing::bytes(1 << (bits - 1), count) }
                }
                _ => {
                    points.check(&["I32", "I8"], &[rows.div_ceil(per_word(bits)), count])?;
                    Packing::by_rows(bits, Axis::Rows, count)
                }
            };
            (Some(ZeroPoints { packing, added: 0 }), Some(points))
        }
    };
    let scales_at = Scales { ty: scales.float_type()?, row_stride, group_stride: 1 };
    let integers = Integers { name, bits, quants: packing, scales: scales_at, zeros, groups };
    let parts = [quants, scales].into_iter().chain(points).collect();
    Ok((vec![rows, columns], integers.encoded(module, parts, [rows, columns])))
}
