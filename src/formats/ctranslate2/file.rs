//! The file `model.bin`: named variables and their other names.
//!
//! ```text
//! u32 version 6, string specification, u32 revision
//! u32 count, then for each variable: string name, u8 rank, u32 dimensions, u8 type, u32 bytes, the data
//! u32 count, then for each alias: string alias, string name of a variable
//! ```
//!
//! All little-endian. A string is its length with the terminating zero byte (u16), and its bytes.
//! Invariant: the bytes of each variable lie inside the file, and are as many as its shape and type require.

use crate::formats::{elements, fixed_bytes};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::ops::Range;

/// The supported version. Earlier ones have their settings elsewhere.
const VERSION: u32 = 6;

/// Maximum number of dimensions of a variable.
const RANK_MAX: u8 = 8;

/// Maximum number of aliases of one variable. Converters make equal variables aliases, such as the biases of
/// all layers that are zeros.
const ALIASES_MAX: usize = 1 << 12;

/// Whether a file begins as one of CTranslate2, of any version.
pub(super) fn is_model_file(bytes: &[u8]) -> bool {
    let mut cursor = Cursor { bytes, at: 0 };
    cursor.specification().is_ok_and(|(_, name)| name.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

/// The content of a file.
pub(super) struct ModelFile {
    /// Name of the specification, such as `TransformerSpec`.
    pub(super) specification: String,
    pub(super) variables: BTreeMap<String, Variable>,
    /// Other names of variables.
    pub(super) aliases: BTreeMap<String, String>,
}

/// A variable of the file.
#[derive(Debug)]
pub(super) struct Variable {
    pub(super) ty: VariableType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
}

/// Type of a variable's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VariableType {
    F32,
    I8,
    I16,
    I32,
    F16,
    BF16,
}

impl VariableType {
    fn from_id(id: u8) -> Result<VariableType> {
        use VariableType::{BF16, F16, F32, I8, I16, I32};
        let all = [F32, I8, I16, I32, F16, BF16];
        all.get(usize::from(id)).copied().with_context(|| format!("its type {id} is not one of 0 to 5"))
    }

    fn size(self) -> usize {
        match self {
            VariableType::F32 | VariableType::I32 => 4,
            VariableType::I16 | VariableType::F16 | VariableType::BF16 => 2,
            VariableType::I8 => 1,
        }
    }

    /// Name of the type in safetensors.
    pub(super) fn name(self) -> &'static str {
        match self {
            VariableType::F32 => "F32",
            VariableType::I8 => "I8",
            VariableType::I16 => "I16",
            VariableType::I32 => "I32",
            VariableType::F16 => "F16",
            VariableType::BF16 => "BF16",
        }
    }

    /// Whether the elements are integers.
    pub(super) fn is_integer(self) -> bool {
        matches!(self, VariableType::I8 | VariableType::I16 | VariableType::I32)
    }
}

impl ModelFile {
    /// Reads the names, shapes and places of all variables.
    pub(super) fn read(bytes: &[u8]) -> Result<ModelFile> {
        let mut cursor = Cursor { bytes, at: 0 };
        let (version, specification) = cursor.specification()?;
        ensure!(
            version == VERSION,
            "its binary version {version} is not supported (supported: {VERSION}); convert the model again"
        );
        cursor.u32().context("the revision of its specification")?;
        let mut file = ModelFile { specification, variables: BTreeMap::new(), aliases: BTreeMap::new() };
        // Rank, type and length of the smallest variable, and its name.
        let count = cursor.count("variables", 2 + 1 + 1 + 1 + 4)?;
        for number in 0..count {
            let name = cursor.string().with_context(|| format!("the name of variable {number}"))?;
            let variable = cursor.variable().with_context(|| format!("variable '{name}'"))?;
            let twice = file.variables.insert(name.clone(), variable).is_some();
            ensure!(!twice, "variable '{name}': it is in the file twice");
        }
        let count = cursor.count("aliases", 2 * (2 + 1))?;
        let mut counts = BTreeMap::<String, usize>::new();
        for number in 0..count {
            let mut name = || cursor.string().with_context(|| format!("the names of alias {number}"));
            let (alias, of) = (name()?, name()?);
            ensure!(file.variables.contains_key(&of), "alias '{alias}': there is no variable '{of}'");
            let twice = file.variables.contains_key(&alias) || file.aliases.contains_key(&alias);
            ensure!(!twice, "alias '{alias}': it is in the file twice");
            *counts.entry(of.clone()).or_default() += 1;
            file.aliases.insert(alias, of);
        }
        if let Some((of, count)) = counts.iter().find(|(_, count)| **count > ALIASES_MAX) {
            bail!("variable '{of}': it has {count} aliases, more than {ALIASES_MAX}");
        }
        ensure!(cursor.at == bytes.len(), "{} bytes follow the last alias", bytes.len() - cursor.at);
        Ok(file)
    }

    /// Returns the variable with a name or an alias, and the name of the variable.
    pub(super) fn resolve<'a>(&'a self, name: &'a str) -> Option<(&'a str, &'a Variable)> {
        let name = self.aliases.get(name).map_or(name, String::as_str);
        self.variables.get_key_value(name).map(|(name, variable)| (name.as_str(), variable))
    }
}

/// A read position in the bytes of a file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let taken = fixed_bytes(self.bytes, self.at)?;
        self.at += N;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn skip(&mut self, len: usize) -> Result<Range<usize>> {
        let left = self.bytes.len() - self.at;
        ensure!(len <= left, "truncated: expected {len} bytes at offset {}, but {left} follow", self.at);
        self.at += len;
        Ok(self.at - len..self.at)
    }

    /// Reads the number of `what` that follow, each of at least `bytes_min` bytes.
    fn count(&mut self, what: &str, bytes_min: usize) -> Result<usize> {
        let count = self.u32().with_context(|| format!("the number of {what}"))? as usize;
        let left = self.bytes.len() - self.at;
        ensure!(
            count.checked_mul(bytes_min).is_some_and(|needed| needed <= left),
            "truncated: {count} {what} are declared, but {left} bytes follow"
        );
        Ok(count)
    }

    fn string(&mut self) -> Result<String> {
        let len = usize::from(u16::from_le_bytes(self.take()?));
        let range = self.skip(len)?;
        let Some((0, text)) = self.bytes[range].split_last() else {
            bail!("a string before offset {} does not end with a zero byte", self.at)
        };
        Ok(std::str::from_utf8(text)?.to_owned())
    }

    /// Reads the version of the file and the name of the specification.
    fn specification(&mut self) -> Result<(u32, String)> {
        let version = self.u32()?;
        let name = self.string().ok().filter(|_| (1..1 << 16).contains(&version));
        Ok((version, name.context("it is not a model of CTranslate2")?))
    }

    fn variable(&mut self) -> Result<Variable> {
        let [rank] = self.take()?;
        ensure!(rank <= RANK_MAX, "it has {rank} dimensions, more than {RANK_MAX}");
        let shape = (0..rank).map(|_| Ok(self.u32()? as usize)).collect::<Result<Vec<usize>>>()?;
        let [ty] = self.take()?;
        let (ty, len) = (VariableType::from_id(ty)?, self.u32()? as usize);
        let needed = elements(&shape).and_then(|count| count.checked_mul(ty.size()));
        ensure!(needed == Some(len), "its shape {shape:?} and type {} do not fit its {len} bytes", ty.name());
        Ok(Variable { ty, shape, bytes: self.skip(len)? })
    }
}
