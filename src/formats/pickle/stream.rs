//! The container before PyTorch 1.6: pickles one after the other (a magic number, the protocol, what is known of
//! the system, the object, the storages' keys), then each storage of those keys as the count of its numbers and
//! the numbers.
//!
//! Invariant: an accepted file is exactly as long as its parts say.

use super::machine::{self, Pickle};
use super::tensor::Places;
use super::value::Value;
use crate::formats::fixed_bytes;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;

/// The first pickle's number.
const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;

/// The second pickle's.
const PROTOCOL: i128 = 1001;

/// Whether a file that begins so is such a stream. Protocols before 2, which nobody saved weights with, are not
/// seen.
pub(super) fn is_stream(bytes: &[u8]) -> bool {
    let digits = &MAGIC.to_le_bytes()[..10];
    let magic = [b"\x8a\x0a", digits].concat();
    bytes.first() == Some(&b'\x80') && bytes.get(2..).is_some_and(|rest| rest.starts_with(&magic))
}

/// Reads such a stream: its object, and where the storages are.
pub(super) fn read(bytes: &[u8]) -> Result<(Pickle<'_>, Places)> {
    let mut pickles = Pickles { bytes, at: 0 };
    ensure!(
        pickles.next()?.root == Value::Int(MAGIC),
        "no PyTorch checkpoint: neither a zip archive nor a stream that begins with PyTorch's number"
    );
    let protocol = pickles.next()?.root;
    ensure!(protocol == Value::Int(PROTOCOL), "the stream's protocol is not {PROTOCOL}");
    check_system(&pickles.next()?)?;
    let object = pickles.next()?;
    let keys = keys(&pickles.next()?)?;
    let places = places(bytes, pickles.at, &object, keys)?;
    Ok((object, places))
}

/// Pickles that follow each other.
struct Pickles<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Pickles<'a> {
    fn next(&mut self) -> Result<Pickle<'a>> {
        let pickle = machine::run(&self.bytes[self.at..]);
        let pickle = pickle.with_context(|| format!("the pickle that begins at byte {}", self.at))?;
        self.at += pickle.bytes;
        Ok(pickle)
    }
}

fn check_system(system: &Pickle) -> Result<()> {
    let little = (Value::Text("little_endian"), Value::Bool(true));
    let is_little = system.heap.pairs(system.root).is_some_and(|pairs| pairs.contains(&little));
    ensure!(is_little, "the stream does not say that its numbers are little-endian");
    Ok(())
}

fn keys<'a>(list: &Pickle<'a>) -> Result<Vec<&'a str>> {
    ensure!(matches!(list.root, Value::List(_)), "{} where the list of keys should be", list.root.kind());
    let key = |item: &Value<'a>| match *item {
        Value::Text(key) => Ok(key),
        other => bail!("{} is a storage's key", other.kind()),
    };
    list.heap.items(list.root).iter().map(key).collect()
}

/// The storages, which lie from `at` to the end of the file in the order of `keys`.
fn places(bytes: &[u8], mut at: usize, object: &Pickle, keys: Vec<&str>) -> Result<Places> {
    let units: BTreeMap<&str, usize> =
        object.heap.storages().iter().map(|storage| (storage.key, storage.unit())).collect();
    let mut places = Places::new();
    for key in keys {
        let unit = units.get(key).with_context(|| format!("storage '{key}': the object has none of it"))?;
        let count = u64::from_le_bytes(fixed_bytes(bytes, at)?);
        let begin = at + size_of::<u64>();
        let length = usize::try_from(count).ok().and_then(|count| count.checked_mul(*unit));
        let end = length.and_then(|length| begin.checked_add(length)).filter(|end| *end <= bytes.len());
        let Some(end) = end else {
            bail!("truncated: storage '{key}' of {count} numbers in a file of {} bytes", bytes.len());
        };
        ensure!(places.insert(key.to_owned(), begin..end).is_none(), "storage '{key}': it is there twice");
        at = end;
    }
    ensure!(at == bytes.len(), "oversized: the last storage ends at {at} of {} bytes", bytes.len());
    Ok(places)
}
