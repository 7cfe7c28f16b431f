//! The container of PyTorch before 1.6: consecutive pickles (a magic number, the protocol, system
//! information, the object, the storage keys), then each storage in the order of these keys: its element
//! count and its elements.
//!
//! Invariant: an accepted file has exactly the length its parts imply.

use super::machine::{self, Pickle};
use super::tensor::StorageRanges;
use super::value::Value;
use crate::formats::fixed_bytes;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;

/// Value of the first pickle.
const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;

/// Value of the second pickle.
const PROTOCOL: i128 = 1001;

/// Whether a file begins like such a stream. Pickle protocols before 2, which weights were not saved with,
/// are not recognized.
pub(super) fn is_stream(bytes: &[u8]) -> bool {
    let digits = &MAGIC.to_le_bytes()[..10];
    let magic = [b"\x8a\x0a", digits].concat();
    bytes.first() == Some(&b'\x80') && bytes.get(2..).is_some_and(|rest| rest.starts_with(&magic))
}

/// Reads a stream: its object, and the byte ranges of the storages.
pub(super) fn read(bytes: &[u8]) -> Result<(Pickle<'_>, StorageRanges)> {
    let mut pickles = Pickles { bytes, at: 0 };
    ensure!(
        pickles.next()?.root == Value::Int(MAGIC),
        "not a PyTorch checkpoint: neither a zip archive nor a stream with PyTorch's magic number"
    );
    let protocol = pickles.next()?.root;
    ensure!(protocol == Value::Int(PROTOCOL), "the stream's protocol is not {PROTOCOL}");
    check_system(&pickles.next()?)?;
    let object = pickles.next()?;
    let keys = storage_keys(&pickles.next()?)?;
    let places = storage_ranges(bytes, pickles.at, &object, keys)?;
    Ok((object, places))
}

/// Executes consecutive pickles.
struct Pickles<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Pickles<'a> {
    fn next(&mut self) -> Result<Pickle<'a>> {
        let pickle = machine::run(&self.bytes[self.at..]);
        let pickle = pickle.with_context(|| format!("in the pickle that begins at byte {}", self.at))?;
        self.at += pickle.bytes;
        Ok(pickle)
    }
}

fn check_system(system: &Pickle) -> Result<()> {
    let little = (Value::Text("little_endian"), Value::Bool(true));
    let is_little = system.heap.pairs(system.root).is_some_and(|pairs| pairs.contains(&little));
    ensure!(is_little, "the stream does not declare its byte order as little-endian");
    Ok(())
}

fn storage_keys<'a>(list: &Pickle<'a>) -> Result<Vec<&'a str>> {
    ensure!(
        matches!(list.root, Value::List(_)),
        "expected the list of storage keys, found {}",
        list.root.kind()
    );
    let key = |item: &Value<'a>| match *item {
        Value::Text(key) => Ok(key),
        other => bail!("{} is used as a storage key", other.kind()),
    };
    list.heap.items(list.root).iter().map(key).collect()
}

/// Returns the byte ranges of the storages, which fill the file from `at` to its end in the order of `keys`.
fn storage_ranges(bytes: &[u8], mut at: usize, object: &Pickle, keys: Vec<&str>) -> Result<StorageRanges> {
    let units: BTreeMap<&str, usize> =
        object.heap.storages().iter().map(|storage| (storage.key, storage.element_bytes())).collect();
    let mut places = StorageRanges::new();
    for key in keys {
        let unit = units.get(key).with_context(|| format!("storage '{key}': the object does not use it"))?;
        let count = u64::from_le_bytes(fixed_bytes(bytes, at)?);
        let begin = at + size_of::<u64>();
        let length = usize::try_from(count).ok().and_then(|count| count.checked_mul(*unit));
        let end = length.and_then(|length| begin.checked_add(length)).filter(|end| *end <= bytes.len());
        let Some(end) = end else {
            bail!(
                "truncated: storage '{key}' has {count} elements, but the file has only {} bytes",
                bytes.len()
            );
        };
        ensure!(places.insert(key.to_owned(), begin..end).is_none(), "storage '{key}': it appears twice");
        at = end;
    }
    ensure!(
        at == bytes.len(),
        "oversized: the last storage ends at byte {at}, but the file has {} bytes",
        bytes.len()
    );
    Ok(places)
}
