//! Kernels that were compiled when the program was built, so that a GPU needs no compiler.
//!
//! An archive is made by `cargo run -p mainstem-kernels --example compile_kernels`, and becomes part of a
//! program that is built with `MAINSTEM_KERNELS=FILE`. It has the text `MSKERN1\n`, the number of entries,
//! and for each entry the SHA-256 of what determines its code, and the length of that code, compressed; then
//! all code in the same order. Numbers are 32 bits, little-endian.
//!
//! Invariant: code is used only for the same text, macros and architecture.

use super::{Architecture, Code, Program};
use flate2::read::DeflateDecoder;
use sha2::{Digest, Sha256};
use std::io::Read;

/// The archive of this program; empty if it was built without one.
const ARCHIVE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bin"));

pub(super) const MAGIC: &[u8] = b"MSKERN1\n";

/// Bytes of the digest and the length of an entry.
const ENTRY_BYTES: usize = 36;

/// Returns whether this program has kernels that were compiled when it was built.
pub fn has_precompiled_kernels() -> bool {
    !ARCHIVE.is_empty()
}

/// Returns the precompiled code of a program for the architecture, or for an earlier one with the same major
/// number, whose code it runs.
pub(super) fn find(
    program: &Program,
    defines: &[(String, String)],
    architecture: Architecture,
) -> Option<Code> {
    let Architecture { major, minor } = architecture;
    let earlier = (0..=minor).rev().map(|minor| Architecture { major, minor });
    let digests = earlier.map(|architecture| digest(program, defines, architecture));
    digests.into_iter().find_map(|digest| find_in(ARCHIVE, &digest))
}

fn find_in(archive: &[u8], digest: &[u8]) -> Option<Code> {
    let (count, rest) = archive.strip_prefix(MAGIC)?.split_first_chunk::<4>()?;
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
        let archive = [MAGIC, &2_u32.to_le_bytes(), &index, &first, &second].concat();
        let find = |archive: &[u8], number| find_in(archive, &[number; 32]);
        assert_eq!(find(&archive, 1), Some(Code::Cubin(b"first".to_vec())));
        assert_eq!(find(&archive, 2), Some(Code::Cubin(b"second".to_vec())));
        assert_eq!(find(&archive, 3), None);
        for len in 0..archive.len() {
            assert_eq!(find(&archive[..len], 2), None, "{len} bytes");
        }
    }
}
