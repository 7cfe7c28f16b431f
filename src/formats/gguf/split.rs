//! Models split into several files: `name-00001-of-00003.gguf` and so on. The first file has the metadata,
//! and each file has the number of files and its own index, from 0.
//!
//! Invariant: files are combined only if the metadata of each agrees with its name.

use super::metadata::Gguf;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The parsed name of a file of a split model, `name-00002-of-00003.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SplitName {
    pub(super) name: String,
    /// Number of the file, from 1.
    number: u32,
    count: u32,
}

impl SplitName {
    /// Parses a file name, or returns `None` if it is not that of a split file.
    pub(super) fn parse(file_name: &str) -> Option<SplitName> {
        let (rest, count) =
            file_name.strip_suffix(super::EXTENSION)?.strip_suffix('.')?.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        (1..=count).contains(&number).then(|| SplitName { name: name.to_owned(), number, count })
    }

    fn file_name(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.{}", self.name, self.count, super::EXTENSION)
    }

    /// Returns the name of the first file.
    pub(super) fn first(&self) -> String {
        self.file_name(1)
    }
}

fn five_digits(text: &str) -> Option<u32> {
    let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { text.parse().ok() } else { None }
}

/// Returns the files of the split model that `gguf` belongs to, in order, or `None` if the model is a single
/// file.
pub(super) fn files(gguf: &Gguf) -> Result<Option<Vec<PathBuf>>> {
    let path = gguf.path();
    let count = gguf.opt_u32(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(None);
    }
    let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let split = SplitName::parse(&file_name).filter(|split| split.count == count);
    let split = split.with_context(|| {
        let form = format!("NAME-00001-of-{count:05}.{}", super::EXTENSION);
        gguf.key_error(
            COUNT,
            format_args!("the model has {count} files, whose names must have the form {form}"),
        )
    })?;
    Ok(Some((1..=count).map(|number| path.with_file_name(split.file_name(number))).collect()))
}

/// Checks that the metadata of a file agrees with its index `place`, from 0, among `count` files.
pub(super) fn check_index(gguf: &Gguf, place: usize, count: usize) -> Result<()> {
    let (number, of) = (gguf.opt_u32(NUMBER)?.unwrap_or(0), gguf.opt_u32(COUNT)?.unwrap_or(1).max(1));
    if (number as usize, of as usize) != (place, count) {
        let reason =
            format!("it is {number} of {of} (from 0), but by its name the file is {place} of {count}");
        return Err(gguf.key_error(NUMBER, reason));
    }
    Ok(())
}

/// Checks that all files together have as many tensors as the first one declares, if it does.
pub(super) fn check_tensor_count(first: &Gguf, tensors: usize) -> Result<()> {
    let declared = first.opt_u32(TENSORS)?.map_or(tensors, |declared| declared as usize);
    if declared != tensors {
        return Err(
            first.key_error(TENSORS, format_args!("it is {declared}, but the files have {tensors} tensors"))
        );
    }
    Ok(())
}

/// Returns the name of a file without extension and split suffix.
pub(super) fn stem(path: &Path) -> Option<String> {
    let file_name = path.file_name()?.to_string_lossy();
    match SplitName::parse(&file_name) {
        Some(split) => Some(split.name),
        None => Some(path.file_stem()?.to_string_lossy().into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_several_files_are_taken_apart_and_others_left() {
        let split = SplitName::parse("a-b-00002-of-00010.gguf").unwrap();
        assert_eq!((split.name.as_str(), split.number, split.count), ("a-b", 2, 10));
        assert_eq!(split.first(), "a-b-00001-of-00010.gguf");
        for other in [
            "a.gguf",
            "a-00000-of-00002.gguf",
            "a-00003-of-00002.gguf",
            "a-1-of-2.gguf",
            "a-00001-of-00002.bin",
            "a-00001-of-00002",
            "a-0000x-of-00002.gguf",
            "a-+0001-of-00002.gguf",
            "00001-of-00002.gguf",
        ] {
            assert_eq!(SplitName::parse(other), None, "{other}");
        }
        assert_eq!(stem(Path::new("m/a-b-00002-of-00010.gguf")).unwrap(), "a-b");
        assert_eq!(stem(Path::new("m/a.Q4_0.gguf")).unwrap(), "a.Q4_0");
    }
}
