//! The encodings of GPTQ and AWQ: unsigned integers in words of 32 bits, with scales and zero points for
//! groups of columns.
//!
//! | tensor | GPTQ | AWQ |
//! |---|---|---|
//! | NAME`.qweight` | I32 (in * bits / 32, out): words of columns | I32 (in, out / 8): words of rows |
//! | NAME`.scales` | floats (groups, out) | the same |
//! | NAME`.qzeros` | I32 (groups, out * bits / 32): words of rows | I32 (groups, out / 8): words of rows |
//! | NAME`.g_idx` | I32 (in), the group of each column | none |
//!
//! A word has the integers of consecutive columns (in) or rows (out); AWQ has an order of its own for them.
//! The first version of GPTQ's format stores zero points less 1; `gptq_v2` stores them as they are. GPTQModel
//! subtracts from whole words, so that a zero point of 0 borrows from the next one; other packages subtract
//! from each zero point.

use super::super::Checkpoint;
use super::Encoded;
use super::integers::{Groups, Integers, Scales, ZeroPoints};
use super::method::{AwqConfig, GptqConfig, StoredZeros};
use super::packing::{Axis, Packing, per_word};
use super::stored::{FLOATS, Module, StoredPart};
use anyhow::{Result, ensure};

const QUANTS: &str = ".qweight";
const TARGET: &str = ".weight";
const AWQ_BITS: u32 = 4;

/// Attaches the matrices of GPTQ.
pub(super) fn attach_gptq(checkpoint: &mut Checkpoint, config: &GptqConfig) -> Result<()> {
    checkpoint.attach_each([QUANTS, TARGET], |_| true, |module| gptq(module, config))
}

/// Attaches the matrices of AWQ.
pub(super) fn attach_awq(checkpoint: &mut Checkpoint, config: &AwqConfig) -> Result<()> {
    checkpoint.attach_each([QUANTS, TARGET], |_| true, |module| awq(module, config))
}

fn gptq(module: &mut Module, config: &GptqConfig) -> Result<(Vec<usize>, Encoded)> {
    let quants = module.take(QUANTS)?;
    let scales = module.take(".scales")?;
    let zeros = module.take(".qzeros")?;
    let list = module.take_if_stored(".g_idx");
    let [words, rows] = quants.dimensions()?;
    quants.check(&["I32"], &[words, rows])?;
    let [groups, _] = scales.dimensions()?;
    let columns = match &list {
        Some(list) => list.dimensions::<1>()?[0],
        None => words * per_word(config.bits),
    };
    let bits = if config.is_mixed { bits_of(words, columns).unwrap_or(config.bits) } else { config.bits };
    let per = per_word(bits);
    ensure!(columns.is_multiple_of(per), "{columns} columns are not whole words of {per} integers");
    ensure!(rows.is_multiple_of(per), "{rows} rows are not whole words of {per} zero points");
    quants.check(&["I32"], &[columns / per, rows])?;
    scales.check(&FLOATS, &[groups, rows])?;
    zeros.check(&["I32"], &[groups, rows / per])?;
    ensure!(
        list.is_some() || config.has_any_order != Some(true),
        "'.g_idx' is missing, which 'quantization_config.desc_act' requires"
    );
    let groups = match &list {
        None => consecutive(&scales, columns, config.group_size)?,
        Some(list) => {
            list.check(&["I32", "I64"], &[columns])?;
            let listed = Groups::listed(module, list, groups)?;
            if config.has_any_order == Some(false) && !config.is_mixed {
                let size = config.group_size.unwrap_or(columns);
                let mut expected = (0..).map(|column| column / size as i64);
                ensure!(
                    module.integers(list).into_iter().all(|group| Some(group) == expected.next()),
                    "'{}' is not in groups of {size} consecutive columns, as \
                     'quantization_config.group_size' says without 'desc_act'",
                    list.name
                );
            }
            listed
        }
    };
    let integers = Integers {
        name: match bits {
            2 => "gptq_int2",
            4 => "gptq_int4",
            _ => "gptq_int8",
        },
        bits,
        quants: Packing::by_columns(bits, Axis::Columns, rows),
        scales: Scales { ty: scales.float_type()?, row_stride: 1, group_stride: rows },
        zeros: Some(zero_points(config.zeros, bits, rows)),
        groups,
    };
    Ok((vec![rows, columns], integers.encoded(module, vec![quants, scales, zeros], [rows, columns])))
}

/// Returns the arrangement of the zero points.
fn zero_points(stored: StoredZeros, bits: u32, rows: usize) -> ZeroPoints {
    let packing = Packing::by_columns(bits, Axis::Rows, rows);
    match stored {
        StoredZeros::Exact => ZeroPoints { packing, added: 0 },
        StoredZeros::EachLessOne => ZeroPoints { packing, added: 1 },
        StoredZeros::WordsLessOnes => {
            let ones = u32::MAX / ((1 << bits) - 1);
            ZeroPoints { packing: Packing { added: ones, ..packing }, added: 0 }
        }
    }
}

/// Returns the bits of the integers of a column, which takes so many words.
fn bits_of(words: usize, columns: usize) -> Option<u32> {
    [2, 4, 8].into_iter().find(|bits| words * per_word(*bits) == columns)
}

fn awq(module: &mut Module, config: &AwqConfig) -> Result<(Vec<usize>, Encoded)> {
    let quants = module.take(QUANTS)?;
    let scales = module.take(".scales")?;
    let zeros = module.take(".qzeros")?;
    let [columns, words] = quants.dimensions()?;
    quants.check(&["I32"], &[columns, words])?;
    let [groups, _] = scales.dimensions()?;
    let rows = words * per_word(AWQ_BITS);
    scales.check(&FLOATS, &[groups, rows])?;
    zeros.check(&["I32"], &[groups, words])?;
    let integers = Integers {
        name: "awq_int4",
        bits: AWQ_BITS,
        quants: Packing::by_columns(AWQ_BITS, Axis::AwqRows, rows),
        groups: consecutive(&scales, columns, config.group_size)?,
        scales: Scales { ty: scales.float_type()?, row_stride: 1, group_stride: rows },
        zeros: Some(ZeroPoints { packing: Packing::by_columns(AWQ_BITS, Axis::AwqRows, rows), added: 0 }),
    };
    Ok((vec![rows, columns], integers.encoded(module, vec![quants, scales, zeros], [rows, columns])))
}

/// Returns groups of `size` columns, or one group. Fails if there are not as many as scales (groups, rows).
fn consecutive(scales: &StoredPart, columns: usize, size: Option<usize>) -> Result<Groups> {
    let size = size.unwrap_or(columns);
    let (groups, needed) = (scales.shape[0], columns.div_ceil(size));
    ensure!(
        groups == needed,
        "'{}' has scales of {groups} groups, but {columns} columns in groups of {size} need {needed}",
        scales.name
    );
    Ok(Groups::Consecutive(size))
}
