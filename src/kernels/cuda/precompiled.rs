//! Kernels that were compiled when the program was built, so that a GPU needs no compiler.
//!
//! An archive is made by `cargo run -p mainstem-kernels --example compile_kernels`, and becomes part of a
//! program that is built with `MAINSTEM_KERNELS=FILE`. It has the text `MSKERN2\n`, the SHA-256 of all
//! sources, the number of entries, and for each entry the SHA-256 of what determines its code, and the length
//! of that code, compressed; then all code in the same order. Numbers are 32 bits, little-endian.
//!
//! Invariant: code is used only for the same text, macros and architecture, and none of an archive that was
//! made from other sources.

use super::{Architecture, Code, Program, all_programs};
use flate2::read::DeflateDecoder;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::sync::OnceLock;

/// The archive of this program; empty if it was built without one.
const ARCHIVE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bin"));

pub(super) const MAGIC: &[u8] = b"MSKERN2\n";

/// Bytes of a digest, and of the digest and the length of an entry.
const DIGEST_BYTES: usize = 32;
const ENTRY_BYTES: usize = DIGEST_BYTES + 4;

/// The kernels that were compiled before this program was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrecompiledKernels {
    /// The program was built without any.
    Absent,
    /// Kernels of this program.
    Current,
    /// Kernels that were compiled from other sources than this program has, and are not used.
    Stale,
}

impl PrecompiledKernels {
    /// A sentence about those that are stale.
    pub const STALE: &str = "the kernels that this program was built with (MAINSTEM_KERNELS) were \
         compiled from other sources, and are not used";

    /// Returns those of this program.
    pub fn find() -> PrecompiledKernels {
        static FOUND: OnceLock<PrecompiledKernels> = OnceLock::new();
        *FOUND.get_or_init(|| PrecompiledKernels::of(ARCHIVE))
    }

    fn of(archive: &[u8]) -> PrecompiledKernels {
        match archive.strip_prefix(MAGIC) {
            _ if archive.is_empty() => PrecompiledKernels::Absent,
            Some(rest) if rest.starts_with(&sources_digest()) => PrecompiledKernels::Current,
            _ => PrecompiledKernels::Stale,
        }
    }
}

/// Returns the digest of all programs that the backend may use, with their macros.
pub(super) fn sources_digest() -> Vec<u8> {
    let programs = all_programs().into_iter();
    let digests = programs.map(|(program, defines)| digest(program, &defines, Architecture::OLDEST));
    Sha256::digest(digests.collect::<Vec<_>>().concat()).to_vec()
}

/// Returns the precompiled code of a program for the architecture, or for an earlier one with the same major
/// number, whose code it runs.
pub(super) fn find(
    program: &Program,
    defines: &[(String, String)],
    architecture: Architecture,
) -> Option<Code> {
    if PrecompiledKernels::find() != PrecompiledKernels::Current {
        return None;
    }
    let Architecture { major, minor } = architecture;
    let earlier = (0..=minor).rev().map(|minor| Architecture { major, minor });
    let digests = earlier.map(|architecture| digest(program, defines, architecture));
    digests.into_iter().find_map(|digest| find_in(ARCHIVE, &digest))
}

fn find_in(archive: &[u8], digest: &[u8]) -> Option<Code> {
    let (count, rest) = archive.strip_prefix(MAGIC)?.get(DIGEST_BYTES..)?.split_first_chunk::<4>()?;
    let (index, mut code) = rest.split_at_checked(u32::from_le_bytes(*count) as usize * ENTRY_BYTES)?;
    for entry in index.chunks_exact(ENTRY_BYTES) {
        let (own, length) = entry.split_last_chunk::<4>()?;
        let (first, rest) = code.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        if own == digest {
            let mut cubin = Vec::new();
            DeflateDecoder::new(first).read_to_end(&mut cubin).ok()?;
            return Some(Code::Cubin(cubin));
        }
        code = rest;
    }
    None
}

/// Returns the digest of all that determines the code of a program, besides the compiler's version.
pub(super) fn digest(program: &Program, defines: &[(String, String)], architecture: Architecture) -> Vec<u8> {
    let mut hash = Sha256::new();
    hash.update(format!("{architecture}\n"));
    defines.iter().for_each(|(name, value)| hash.update(format!("{name}={value}\n")));
    hash.update(program.source);
    hash.finalize().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::read::DeflateEncoder;

    #[test]
    fn code_is_found_by_its_digest_and_damaged_archives_have_none() {
        let code = |text: &[u8]| {
            let mut bytes = Vec::new();
            DeflateEncoder::new(text, flate2::Compression::best()).read_to_end(&mut bytes).unwrap();
            bytes
        };
        let (first, second) = (code(b"first"), code(b"second"));
        let entry =
            |number: u8, code: &[u8]| [&[number; 32][..], &(code.len() as u32).to_le_bytes()].concat();
        let index = [entry(1, &first), entry(2, &second)].concat();
        let archive = [MAGIC, &[0; DIGEST_BYTES], &2_u32.to_le_bytes(), &index, &first, &second].concat();
        let find = |archive: &[u8], number| find_in(archive, &[number; 32]);
        assert_eq!(find(&archive, 1), Some(Code::Cubin(b"first".to_vec())));
        assert_eq!(find(&archive, 2), Some(Code::Cubin(b"second".to_vec())));
        assert_eq!(find(&archive, 3), None);
        for len in 0..archive.len() {
            assert_eq!(find(&archive[..len], 2), None, "{len} bytes");
        }
    }

    #[test]
    fn archives_of_other_sources_are_stale() {
        let of = |magic: &[u8], digest: Vec<u8>| PrecompiledKernels::of(&[magic, &digest, &[0; 4]].concat());
        assert_eq!(of(MAGIC, sources_digest()), PrecompiledKernels::Current);
        assert_eq!(of(MAGIC, vec![7; DIGEST_BYTES]), PrecompiledKernels::Stale);
        assert_eq!(of(b"MSKERN1\n", sources_digest()), PrecompiledKernels::Stale);
        assert_eq!(PrecompiledKernels::of(&[]), PrecompiledKernels::Absent);
    }
}
