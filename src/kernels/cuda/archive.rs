//! The archive of kernels that are compiled before the program is built.
//!
//! Invariant: it is what [`super::precompiled`] reads.

use super::precompiled::{MAGIC, digest, sources_digest};
use super::{Architecture, Nvrtc, all_programs};
use crate::backend::DeviceError;
use flate2::read::DeflateEncoder;
use std::io::Read;

/// Compiles all programs for these architectures, and returns the archive of their code. Fails with the
/// compiler's log.
pub fn compile_archive(nvrtc: &Nvrtc, architectures: &[Architecture]) -> Result<Vec<u8>, DeviceError> {
    let (mut index, mut code, mut count) = (Vec::new(), Vec::new(), 0_u32);
    for (program, defines) in all_programs() {
        for architecture in architectures {
            let cubin = nvrtc.compile(program.source, &defines, *architecture, true)?;
            let before = code.len();
            DeflateEncoder::new(cubin.bytes(), flate2::Compression::best())
                .read_to_end(&mut code)
                .map_err(|error| DeviceError::Fault(format!("cannot compress {}: {error}", program.name)))?;
            index.extend(digest(program, &defines, *architecture));
            index.extend(((code.len() - before) as u32).to_le_bytes());
            count += 1;
        }
    }
    Ok([MAGIC, &sources_digest(), &count.to_le_bytes(), &index, &code].concat())
}
