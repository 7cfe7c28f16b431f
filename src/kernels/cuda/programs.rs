//! Programs of kernels: text that NVRTC compiles for the GPU, kept in a folder once it is compiled.
//!
//! Invariant: code in the folder is used only for the same text, macros, architecture, and version of the
//! compiler, and only if its checksum is right. A folder that cannot be written costs time and nothing else.

use super::nvrtc::{Code, Nvrtc, Program};
use super::{Architecture, PrecompiledKernels, Version, precompiled};
use crate::backend::DeviceError;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Compiles programs for a driver, or takes them from a folder.
#[derive(Clone, Debug)]
pub struct ProgramCache {
    /// The compiler, and whether it is to make CUBINs. Programs that were compiled beforehand need none.
    compiler: Option<(Nvrtc, bool)>,
    folder: Option<PathBuf>,
}

impl ProgramCache {
    /// Keeps code in `folder`, if given, for a driver that can run CUDA `driver`. Such a driver takes PTX
    /// only if it is not older than the compiler; code for older ones is compiled to CUBINs.
    pub fn new(nvrtc: Nvrtc, folder: Option<PathBuf>, driver: Version) -> ProgramCache {
        let to_cubin = driver < nvrtc.version();
        ProgramCache { compiler: Some((nvrtc, to_cubin)), folder }
    }

    /// Finds the compiler, the `configured` one if given ([`Nvrtc::open`]), and keeps code in `folder`, for a
    /// driver that can run CUDA `driver`. Fails with [`DeviceError::Unsupported`] if there is none, or if
    /// it is of a later major version than the driver, unless this program has kernels that were compiled
    /// when it was built.
    pub fn open(
        configured: Option<&Path>,
        folder: Option<PathBuf>,
        driver: Version,
    ) -> Result<ProgramCache, DeviceError> {
        let found = Nvrtc::open(configured).and_then(|nvrtc| match nvrtc.version() {
            version if version.major <= driver.major => Ok(nvrtc),
            version => Err(DeviceError::Unsupported(format!(
                "the driver is for CUDA {driver}, and may not run what NVRTC {version} compiles; install \
                 nvidia-cuda-nvrtc-cu12, and set device.nvrtc to its folder"
            ))),
        });
        match (found, PrecompiledKernels::find()) {
            (Ok(nvrtc), _) => Ok(ProgramCache::new(nvrtc, folder, driver)),
            (Err(_), PrecompiledKernels::Current) if configured.is_none() => {
                Ok(ProgramCache { compiler: None, folder: None })
            }
            (Err(DeviceError::Unsupported(text)), PrecompiledKernels::Stale) => {
                Err(DeviceError::Unsupported(format!("{text}; {}", PrecompiledKernels::STALE)))
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Fails with [`DeviceError::Unsupported`] if the compiler does not know an architecture, and this
    /// program has no kernels that were compiled when it was built.
    pub(super) fn check_architecture(&self, architecture: Architecture) -> Result<(), DeviceError> {
        match &self.compiler {
            Some((nvrtc, _)) if PrecompiledKernels::find() != PrecompiledKernels::Current => {
                nvrtc.check_architecture(architecture)
            }
            _ => Ok(()),
        }
    }

    /// Returns the code of a program with macros `defines`. Fails with the compiler's log, and the program's
    /// name; or with [`DeviceError::Unsupported`] if there is neither a compiler nor precompiled code for the
    /// architecture.
    pub fn code(
        &self,
        program: &Program,
        defines: &[(String, String)],
        architecture: Architecture,
    ) -> Result<Code, DeviceError> {
        if let Some(code) = precompiled::find(program, defines, architecture) {
            return Ok(code);
        }
        let Some((nvrtc, to_cubin)) = &self.compiler else {
            let text = format!("this program has no kernels for {architecture}, and NVRTC is not found");
            return Err(DeviceError::Unsupported(text));
        };
        let name = file_name(nvrtc, *to_cubin, (program, defines), architecture);
        let file = self.folder.as_ref().map(|folder| folder.join(name));
        if let Some(code) = file.as_deref().and_then(|file| read(file, *to_cubin)) {
            return Ok(code);
        }
        let compiled = nvrtc.compile(program.source, defines, architecture, *to_cubin);
        let code = compiled.map_err(|error| match error {
            DeviceError::Fault(text) => DeviceError::Fault(format!("{}: {text}", program.name)),
            other => other,
        })?;
        if let Some(file) = &file {
            let _ = write(file, code.bytes());
        }
        Ok(code)
    }
}

/// Returns the name of the file for a program with its macros, which has all that determines the code.
fn file_name(
    nvrtc: &Nvrtc,
    to_cubin: bool,
    (program, defines): (&Program, &[(String, String)]),
    architecture: Architecture,
) -> String {
    let mut key = format!("{} {} {architecture}\n", env!("CARGO_PKG_VERSION"), nvrtc.version());
    for (name, value) in defines {
        let _ = writeln!(key, "{name}={value}");
    }
    if nvrtc.has_line_info() {
        key.push_str("with lines\n");
    }
    key.push_str(program.source);
    let kind = if to_cubin { "cubin" } else { "ptx" };
    format!("{}-{architecture}-{}.{kind}", program.name, &hex_digest(key.as_bytes())[..16])
}

/// Reads code from a file. Returns `None` if there is none, or if it is damaged.
fn read(file: &Path, is_cubin: bool) -> Option<Code> {
    let bytes = std::fs::read(file).ok()?;
    let (digest, code) = bytes.split_at_checked(DIGEST_LEN)?;
    if digest != hex_digest(code).as_bytes() {
        return None;
    }
    match is_cubin {
        true => Some(Code::Cubin(code.to_vec())),
        false => Some(Code::Ptx(String::from_utf8(code.to_vec()).ok()?)),
    }
}

/// Number of hexadecimal digits of a checksum.
const DIGEST_LEN: usize = 64;

fn hex_digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Writes a checksum and code under another name, and renames the file, so that no reader sees a part of it.
fn write(file: &Path, code: &[u8]) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let part = file.with_extension(format!("{}-{number}.part", std::process::id()));
    let content = [hex_digest(code).as_bytes(), code].concat();
    let written = std::fs::write(&part, content).and_then(|()| std::fs::rename(&part, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written
}
