//! The container of PyTorch 1.6 and later: a zip archive with the pickle as `NAME/data.pkl` and each storage
//! as `NAME/data/KEY`, all uncompressed.
//!
//! Invariant: the members of an accepted archive lie inside it, overlap neither each other nor the directory,
//! and have unique names. Their bytes are used in place.

use super::tensor::StorageRanges;
use anyhow::{Context, Result, bail, ensure};
use rawzip::{CompressionMethod, ZipArchive, ZipFileHeaderRecord, ZipSliceArchive};
use std::collections::BTreeMap;
use std::ops::Range;

/// First bytes of a zip archive: the header of its first member.
pub(super) const MAGIC: &[u8] = b"PK\x03\x04";

const PICKLE: &str = "/data.pkl";

/// Byte ranges of the archive's parts.
pub(super) struct Archive {
    pub(super) pickle: Range<usize>,
    pub(super) storages: StorageRanges,
}

/// Byte range of each member, by name.
type Members = BTreeMap<String, Range<usize>>;

/// Locates the parts of the archive.
pub(super) fn read(bytes: &[u8]) -> Result<Archive> {
    let members = members(bytes)?;
    let folder = folder(&members)?;
    if let Some(order) = members.get(&format!("{folder}/byteorder")) {
        ensure!(
            &bytes[order.clone()] == b"little",
            "{folder}/byteorder is not 'little': only little-endian checkpoints are supported"
        );
    }
    let storages = format!("{folder}/data/");
    let place = |(name, range): (&String, &Range<usize>)| {
        Some((name.strip_prefix(&storages)?.to_owned(), range.clone()))
    };
    Ok(Archive {
        pickle: members[&format!("{folder}{PICKLE}")].clone(),
        storages: members.iter().filter_map(place).collect(),
    })
}

/// Returns the top-level folder of the archive, which has the pickle.
fn folder(members: &Members) -> Result<&str> {
    let folders = members.keys().filter_map(|name| name.strip_suffix(PICKLE));
    let folders: Vec<&str> = folders.filter(|folder| !folder.contains('/')).collect();
    match folders.as_slice() {
        [folder] => Ok(folder),
        [] => bail!("not a PyTorch checkpoint: a zip archive without a data.pkl"),
        [one, other, ..] => bail!("it has both {one}{PICKLE} and {other}{PICKLE}"),
    }
}

fn members(bytes: &[u8]) -> Result<Members> {
    let archive = ZipArchive::from_slice(bytes).context("truncated or damaged zip archive")?;
    let end = archive.end_offset();
    ensure!(
        end == bytes.len() as u64,
        "oversized: the archive ends at byte {end}, but the file has {} bytes",
        bytes.len()
    );
    let mut members = Members::new();
    let mut taken = Vec::new();
    for record in archive.entries() {
        let record = record.context("damaged directory of the zip archive")?;
        let name = std::str::from_utf8(record.file_path().as_bytes()).context("the name of a member")?;
        let extent = extent(&archive, &record).with_context(|| format!("member '{name}'"))?;
        ensure!(members.insert(name.to_owned(), extent.data).is_none(), "member '{name}': it appears twice");
        taken.push(extent.whole);
    }
    let (count, declared) = (members.len() as u64, archive.entries_hint());
    ensure!(count == declared, "the zip archive has {count} members, but declares {declared}");
    check_disjoint(taken, archive.directory_offset())?;
    Ok(members)
}

/// Byte ranges of a member, with its header (`whole`) and without (`data`).
struct Extent {
    whole: Range<u64>,
    data: Range<usize>,
}

fn extent(archive: &ZipSliceArchive<&[u8]>, record: &ZipFileHeaderRecord) -> Result<Extent> {
    let method = record.compression_method();
    ensure!(
        method == CompressionMethod::STORE,
        "it is compressed ({method}): only uncompressed members, as torch.save writes, can be memory-mapped"
    );
    ensure!(!record.flags().is_encrypted(), "it is encrypted");
    let entry = archive.get_entry(record.wayfinder()).context("truncated, or its header is missing")?;
    ensure!(
        entry.local_header().file_path().as_bytes() == record.file_path().as_bytes(),
        "its header and the directory disagree about its name"
    );
    let (stored, meant) = (record.compressed_size_hint(), record.uncompressed_size_hint());
    ensure!(stored == meant, "it is stored in {stored} bytes, but has a size of {meant}");
    let (begin, end) = entry.compressed_data_range();
    Ok(Extent {
        whole: record.local_header_offset()..end,
        data: usize::try_from(begin)?..usize::try_from(end)?,
    })
}

/// Checks that no member overlaps another or the directory.
fn check_disjoint(mut taken: Vec<Range<u64>>, directory: u64) -> Result<()> {
    taken.sort_unstable_by_key(|range| (range.start, range.end));
    let begins = taken.iter().skip(1).map(|range| range.start).chain([directory]);
    for (range, next) in taken.iter().zip(begins) {
        ensure!(
            range.end <= next,
            "the member at byte {} ends at {}, beyond the start of the next at {next}",
            range.start,
            range.end
        );
    }
    Ok(())
}
