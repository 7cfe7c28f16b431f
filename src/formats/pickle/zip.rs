//! The container of PyTorch 1.6 and later: a zip archive with the pickle as `NAME/data.pkl` and each storage as
//! `NAME/data/KEY`, none of them compressed.
//!
//! Invariant: the members of an accepted archive lie inside it, apart from each other and from its directory,
//! and no two have one name. Their bytes are used where they are.

use super::tensor::Places;
use anyhow::{Context, Result, bail, ensure};
use rawzip::{CompressionMethod, ZipArchive, ZipFileHeaderRecord, ZipSliceArchive};
use std::collections::BTreeMap;
use std::ops::Range;

/// What such a file begins with: the header of its first member.
pub(super) const MAGIC: &[u8] = b"PK\x03\x04";

const PICKLE: &str = "/data.pkl";

/// The archive's parts, as ranges of its bytes.
pub(super) struct Archive {
    pub(super) pickle: Range<usize>,
    pub(super) places: Places,
}

/// Where each member's bytes lie, by its name.
type Members = BTreeMap<String, Range<usize>>;

/// Finds the parts of the archive that `bytes` are.
pub(super) fn read(bytes: &[u8]) -> Result<Archive> {
    let members = members(bytes)?;
    let folder = folder(&members)?;
    if let Some(order) = members.get(&format!("{folder}/byteorder")) {
        ensure!(
            &bytes[order.clone()] == b"little",
            "{folder}/byteorder does not say 'little': only numbers of that order can be read"
        );
    }
    let storages = format!("{folder}/data/");
    let place = |(name, range): (&String, &Range<usize>)| {
        Some((name.strip_prefix(&storages)?.to_owned(), range.clone()))
    };
    Ok(Archive {
        pickle: members[&format!("{folder}{PICKLE}")].clone(),
        places: members.iter().filter_map(place).collect(),
    })
}

/// The folder that all is in: that of the pickle.
fn folder(members: &Members) -> Result<&str> {
    let folders = members.keys().filter_map(|name| name.strip_suffix(PICKLE));
    let folders: Vec<&str> = folders.filter(|folder| !folder.contains('/')).collect();
    match folders.as_slice() {
        [folder] => Ok(folder),
        [] => bail!("a zip archive without a data.pkl: no PyTorch checkpoint"),
        [one, other, ..] => bail!("{one}{PICKLE} and {other}{PICKLE} are both there"),
    }
}

fn members(bytes: &[u8]) -> Result<Members> {
    let archive = ZipArchive::from_slice(bytes).context("truncated or damaged zip archive")?;
    let end = archive.end_offset();
    ensure!(end == bytes.len() as u64, "oversized: the archive ends at {end} of {} bytes", bytes.len());
    let mut members = Members::new();
    let mut taken = Vec::new();
    for record in archive.entries() {
        let record = record.context("damaged directory of the zip archive")?;
        let name = std::str::from_utf8(record.file_path().as_bytes()).context("a member's name")?;
        let extent = extent(&archive, &record).with_context(|| format!("member '{name}'"))?;
        ensure!(members.insert(name.to_owned(), extent.data).is_none(), "member '{name}': it is there twice");
        taken.push(extent.whole);
    }
    let (count, declared) = (members.len() as u64, archive.entries_hint());
    ensure!(count == declared, "the zip archive has {count} members and says that it has {declared}");
    check_apart(taken, archive.directory_offset())?;
    Ok(members)
}

/// Where a member lies, with its header and without.
struct Extent {
    whole: Range<u64>,
    data: Range<usize>,
}

fn extent(archive: &ZipSliceArchive<&[u8]>, record: &ZipFileHeaderRecord) -> Result<Extent> {
    let method = record.compression_method();
    ensure!(
        method == CompressionMethod::STORE,
        "it is compressed ({method}): only stored members can be mapped, and torch.save makes no others"
    );
    ensure!(!record.flags().is_encrypted(), "it is encrypted");
    let entry =
        archive.get_entry(record.wayfinder()).context("truncated, or no header where it should be")?;
    ensure!(
        entry.local_header().file_path().as_bytes() == record.file_path().as_bytes(),
        "its header has another name than the directory"
    );
    let (stored, meant) = (record.compressed_size_hint(), record.uncompressed_size_hint());
    ensure!(stored == meant, "it is stored in {stored} bytes, and is of {meant}");
    let (begin, end) = entry.compressed_data_range();
    Ok(Extent {
        whole: record.local_header_offset()..end,
        data: usize::try_from(begin)?..usize::try_from(end)?,
    })
}

/// Asserts that no member reaches into another, nor into the directory.
fn check_apart(mut taken: Vec<Range<u64>>, directory: u64) -> Result<()> {
    taken.sort_unstable_by_key(|range| (range.start, range.end));
    let begins = taken.iter().skip(1).map(|range| range.start).chain([directory]);
    for (range, next) in taken.iter().zip(begins) {
        ensure!(
            range.end <= next,
            "the member at byte {} ends at {}, inside what begins at {next}",
            range.start,
            range.end
        );
    }
    Ok(())
}
