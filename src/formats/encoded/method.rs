//! The quantization method of a model folder: `quantization_config` in config.json.
//!
//! Invariant: a method or a variant of one that is not supported is an error with its key and value, unless
//! no tensor is stored by it. F8_E4M3 tensors are read by any method that is not one of those known. Keys
//! that say what the stored tensors show anyway are not read: the list of modules that are not encoded,
//! whether integers are symmetric, and everything about activations.

use super::super::HubConfig;
use super::super::config::CONFIG;
use super::super::folder::Folder;
use anyhow::{Result, ensure};
use serde_json::Value;
use std::fmt::Display;

const SECTION: &str = "quantization_config";
const METHODS: [&str; 6] = ["gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4"];

/// A quantization method, with the settings that its tensors do not show.
#[derive(Debug)]
pub(super) enum Method {
    Gptq(GptqConfig),
    Awq(AwqConfig),
    Compressed(CompressedConfig),
    /// F8_E4M3, with the rows and columns that share a scale, if there is one per block.
    Fp8(Vec<[usize; 2]>),
    Mxfp4,
    /// Another method: the error for tensors other than F8_E4M3, and the blocks of F8_E4M3.
    Other(anyhow::Error, Vec<[usize; 2]>),
}

/// Settings of GPTQ.
#[derive(Debug)]
pub(super) struct GptqConfig {
    pub(super) bits: u32,
    /// Columns of a group where `g_idx` does not list them; `None` for all columns of a row.
    pub(super) group_size: Option<usize>,
    /// Whether the columns of groups are in any order, so that `g_idx` is required; `None` if unknown.
    pub(super) has_any_order: Option<bool>,
    pub(super) zeros: StoredZeros,
    /// Whether matrices may differ in their bits and groups.
    pub(super) is_mixed: bool,
}

/// The form in which GPTQ stores zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredZeros {
    Exact,
    /// Less 1, each modulo 2^bits.
    EachLessOne,
    /// In words of 32 bits from which a word of ones has been subtracted.
    WordsLessOnes,
}

/// Settings of AWQ.
#[derive(Debug)]
pub(super) struct AwqConfig {
    /// Columns of a group; `None` for all columns of a row.
    pub(super) group_size: Option<usize>,
}

/// Settings of compressed-tensors, of all its groups of modules.
#[derive(Debug, Default)]
pub(super) struct CompressedConfig {
    /// Columns that share a scale.
    pub(super) group_sizes: Vec<usize>,
    /// Rows and columns that share a scale.
    blocks: Vec<[usize; 2]>,
}

impl Method {
    /// Reads the method of a model folder; `None` if its weights are not quantized.
    pub(super) fn of_folder(folder: &Folder) -> Result<Option<Method>> {
        let Some(config) = HubConfig::read_if_present(folder, CONFIG)? else { return Ok(None) };
        let Some(section) = config.section(SECTION)? else { return Ok(None) };
        let other = |refusal| -> Result<Option<Method>> {
            Ok(Some(Method::Other(refusal, pair(&section, "weight_block_size")?.into_iter().collect())))
        };
        let method = match section.str("quant_method") {
            Ok(method) => method,
            Err(refusal) => return other(refusal),
        };
        Ok(Some(match method {
            "gptq" => Method::Gptq(gptq(&section)?),
            "awq" => Method::Awq(awq(&section)?),
            "compressed-tensors" => Method::Compressed(compressed(&section)?),
            "fp8" | "fbgemm_fp8" => {
                check_known(&section, "fmt", &["e4m3", "float8_e4m3fn"])?;
                Method::Fp8(pair(&section, "weight_block_size")?.into_iter().collect())
            }
            "mxfp4" => Method::Mxfp4,
            _ => return other(unsupported(&section, "quant_method", &METHODS)),
        }))
    }

    /// Rows and columns that share a scale of F8_E4M3, in all variants that occur.
    pub(super) fn blocks(&self) -> &[[usize; 2]] {
        match self {
            Method::Fp8(blocks) | Method::Other(_, blocks) => blocks,
            Method::Compressed(config) => &config.blocks,
            Method::Gptq(_) | Method::Awq(_) | Method::Mxfp4 => &[],
        }
    }
}

fn gptq(section: &HubConfig) -> Result<GptqConfig> {
    let bits = section.usize("bits")?;
    if ![2, 4, 8].contains(&bits) {
        return Err(unsupported(section, "bits", &[2, 4, 8]));
    }
    let quantizer = section.section("meta")?.and_then(|meta| meta.get("quantizer").cloned());
    // A name and a version, or a list of them.
    let is_gptqmodel = quantizer.is_some_and(|quantizer| {
        let named =
            |value: &Value| value.as_str().is_some_and(|it| it.to_lowercase().starts_with("gptqmodel"));
        named(&quantizer) || quantizer.as_array().is_some_and(|list| list.iter().any(named))
    });
    let mut zeros = if is_gptqmodel { StoredZeros::WordsLessOnes } else { StoredZeros::EachLessOne };
    for key in ["checkpoint_format", "format"] {
        check_known(section, key, &["gptq", "gptq_v2"])?;
        if section.opt_str(key)? == Some("gptq_v2") {
            zeros = StoredZeros::Exact;
        }
    }
    section.opt_bool("sym")?;
    Ok(GptqConfig {
        bits: bits as u32,
        group_size: group_size(section)?,
        has_any_order: section.opt_bool("desc_act")?,
        zeros,
        is_mixed: section.section("dynamic")?.is_some(),
    })
}

fn awq(section: &HubConfig) -> Result<AwqConfig> {
    if section.usize("bits")? != 4 {
        return Err(unsupported(section, "bits", &[4]));
    }
    for key in ["version", "checkpoint_format", "format"] {
        let value = section.opt_str(key)?.map(str::to_lowercase);
        if value.is_some_and(|value| value != "gemm") {
            return Err(unsupported(section, key, &["gemm"]));
        }
    }
    if section.opt_bool("zero_point")? == Some(false) {
        return Err(unsupported(section, "zero_point", &[true]));
    }
    Ok(AwqConfig { group_size: group_size(section)? })
}

/// Reads the columns of a group; `None` for all columns of a row, which is -1 in files.
fn group_size(section: &HubConfig) -> Result<Option<usize>> {
    const KEY: &str = "group_size";
    let size = section.typed(KEY, "a positive integer or -1", |value| match value.as_i64()? {
        -1 => Some(None),
        size => usize::try_from(size).ok().filter(|size| *size > 0).map(Some),
    })?;
    section.require(KEY, size)
}

fn compressed(section: &HubConfig) -> Result<CompressedConfig> {
    const FORMATS: [&str; 6] =
        ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"];
    check_known(section, "format", &FORMATS)?;
    if let Some(sparsity) = section.section("sparsity_config")? {
        check_known(&sparsity, "format", &["dense"])?;
    }
    if let Some(transforms) = section.section("transform_config")? {
        let groups = transforms.section("config_groups")?;
        let is_empty = groups.is_none_or(|groups| groups.keys().next().is_none());
        ensure!(
            is_empty,
            section.key_error("transform_config", "transforms of activations are not supported")
        );
    }
    let mut read = CompressedConfig::default();
    let Some(groups) = section.section("config_groups")? else { return Ok(read) };
    for key in groups.keys() {
        let Some(group) = groups.section(key)? else { continue };
        check_known(&group, "format", &FORMATS)?;
        let Some(weights) = group.section("weights")? else { continue };
        check_known(&weights, "type", &["int", "float"])?;
        check_known(&weights, "strategy", &["tensor", "channel", "group", "block"])?;
        let is_float = weights.opt_str("type")? == Some("float");
        let bits: &[usize] = if is_float { &[8] } else { &[2, 4, 8] };
        if weights.opt_usize("num_bits")?.is_some_and(|found| !bits.contains(&found)) {
            return Err(unsupported(&weights, "num_bits", bits));
        }
        let size = weights.typed("group_size", "a positive integer or -1", |value| value.as_i64())?;
        let size = size.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
        read.group_sizes.extend(size);
        read.blocks.extend(size.map(|size| [1, size]));
        read.blocks.extend(pair(&weights, "block_structure")?);
    }
    Ok(read)
}

/// Reads two positive integers: rows and columns.
fn pair(section: &HubConfig, key: &str) -> Result<Option<[usize; 2]>> {
    section.typed(key, "two positive integers", |value| {
        let numbers = value.as_array()?.iter().map(|number| number.as_u64().filter(|number| *number > 0));
        let numbers: Vec<usize> = numbers.map(|number| number?.try_into().ok()).collect::<Option<_>>()?;
        numbers.try_into().ok()
    })
}

/// Checks that the string at a key is one of those known, or absent.
fn check_known(section: &HubConfig, key: &str, known: &[&str]) -> Result<()> {
    match section.opt_str(key)? {
        Some(value) if !known.contains(&value) => Err(unsupported(section, key, known)),
        _ => Ok(()),
    }
}

fn unsupported<T: Display>(section: &HubConfig, key: &str, known: &[T]) -> anyhow::Error {
    let value = section.get(key).unwrap_or(&Value::Null);
    let known = known.iter().map(T::to_string).collect::<Vec<_>>().join(", ");
    section.key_error(key, format_args!("{value} is not supported (supported: {known})"))
}
