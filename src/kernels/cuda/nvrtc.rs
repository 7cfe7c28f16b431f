//! NVRTC, the compiler of kernels: where it is found, and what it compiles.
//!
//! Invariant: a failed compilation is an error with the compiler's log.

use super::{Architecture, Version};
use crate::backend::DeviceError;
use cudarc::nvrtc::{result, sys};
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// The source of kernels: CUDA C++ that includes no headers.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Name, for errors and for the names of files with its code.
    pub name: &'static str,
    /// Text, in CUDA C++.
    pub source: &'static str,
}

/// Compiled code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Code {
    /// PTX, which the driver compiles for the GPU.
    Ptx(String),
    /// The GPU's own instructions.
    Cubin(Vec<u8>),
}

/// Resources of a multiprocessor that a kernel takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelResources {
    /// Name of the kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of slow memory of a thread: values that found no register, and arrays.
    pub local_bytes: u32,
}

/// The NVRTC library.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    version: Version,
    /// File of the library; `None` if the system's search found it.
    path: Option<PathBuf>,
    /// Whether code says which line of the source it is from.
    line_info: bool,
}

impl Nvrtc {
    /// Finds and loads NVRTC: the `configured` file, or the library in the `configured` folder; otherwise one
    /// that the system finds, then those of `CUDA_HOME` and `CUDA_PATH`, then those that the packages of
    /// NVIDIA install in the environment of Python that is active or that has this program, then
    /// `/usr/local/cuda`. The first that is loaded serves the whole process. Fails with
    /// [`DeviceError::Unsupported`] if none is found, if another than the configured one would be used, or if
    /// it is older than CUDA 12.0.
    pub fn open(configured: Option<&Path>) -> Result<Nvrtc, DeviceError> {
        let path = match configured {
            Some(path) => Some(load_configured(path)?),
            // Sound: it only tries to load the library.
            None if unsafe { sys::is_culib_present() } => None,
            None => Some(folders().iter().find_map(|folder| load_from(folder)).ok_or_else(missing)?),
        };
        // Sound: as above. The library is found by its name now, wherever it was loaded from.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing());
        }
        let (mut major, mut minor) = (0, 0);
        // Sound: the function writes two numbers.
        let read = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        read.result()
            .map_err(|error| DeviceError::Fault(format!("NVRTC does not tell its version: {error}")))?;
        let version = Version { major: major as u32, minor: minor as u32 };
        match version.major {
            12.. => Ok(Nvrtc { version, path, line_info: false }),
            _ => Err(DeviceError::Unsupported(format!("NVRTC is {version}, and 12.0 or later is required"))),
        }
    }

    /// Returns the compiler with lines of the source in the code that it makes, which is the same otherwise.
    pub fn with_line_info(self) -> Nvrtc {
        Nvrtc { line_info: true, ..self }
    }

    /// Returns whether code says which line of the source it is from.
    pub(super) fn has_line_info(&self) -> bool {
        self.line_info
    }

    /// Returns the version of CUDA that the library belongs to.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the file of the library; `None` if the system's search found it.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Fails with [`DeviceError::Unsupported`] if the compiler does not know an architecture, and tells which
    /// one does.
    pub(super) fn check_architecture(&self, architecture: Architecture) -> Result<(), DeviceError> {
        let failed = |error| DeviceError::Fault(format!("NVRTC does not list its architectures: {error}"));
        let mut count = 0;
        // Sound: the function writes one number.
        unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }.result().map_err(failed)?;
        let mut known = vec![0; count.max(0) as usize];
        // Sound: the list has the length that the function will write.
        unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result().map_err(failed)?;
        let number = architecture.major * 10 + architecture.minor;
        match known.contains(&(number as i32)) {
            true => Ok(()),
            false => Err(DeviceError::Unsupported(unknown_architecture(architecture, self.version))),
        }
    }

    /// Compiles a program for an architecture, to PTX for its virtual counterpart or to a CUBIN. `defines`
    /// are the names and values of macros. Fails with the compiler's log.
    pub fn compile(
        &self,
        source: &str,
        defines: &[(String, String)],
        architecture: Architecture,
        to_cubin: bool,
    ) -> Result<Code, DeviceError> {
        self.compile_with(source, defines, architecture, to_cubin).map(|(code, _)| code)
    }

    /// Compiles a program to a CUBIN, and returns what each kernel of it takes. Fails as
    /// [`Nvrtc::compile`] does.
    pub fn resources(
        &self,
        source: &str,
        defines: &[(String, String)],
        architecture: Architecture,
    ) -> Result<Vec<KernelResources>, DeviceError> {
        let (_, log) = self.compile_with(source, defines, architecture, true)?;
        Ok(resources_in(&log))
    }

    /// Compiles a program, and returns its code and the compiler's log.
    fn compile_with(
        &self,
        source: &str,
        defines: &[(String, String)],
        architecture: Architecture,
        to_cubin: bool,
    ) -> Result<(Code, String), DeviceError> {
        self.check_architecture(architecture)?;
        let failed = |what: String| DeviceError::Fault(format!("NVRTC cannot compile a kernel: {what}"));
        let text = CString::new(source).map_err(|_| failed("its source has a zero byte".into()))?;
        let kind = if to_cubin { "sm" } else { "compute" };
        let target = architecture.target();
        let mut options = vec![format!("--gpu-architecture={kind}_{target}"), "--std=c++17".into()];
        if to_cubin {
            // The log then has what kernels take.
            options.push("--ptxas-options=-v".into());
        }
        options.push("-default-device".into());
        // Arithmetic is as it is written: products and sums are fused only where the source says so.
        options.push("--fmad=false".into());
        if self.line_info {
            options.push("-lineinfo".into());
        }
        options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        let program = result::create_program(&text, None).map_err(|error| failed(error.to_string()))?;
        // Sound: the program was created above, and is destroyed once, after its last use.
        unsafe {
            let compiled = result::compile_program(program, &options);
            let code = match compiled {
                Ok(()) if to_cubin => cubin(program).map(Code::Cubin),
                Ok(()) => result::get_ptx(program).map(|ptx| Code::Ptx(text_of(ptx))),
                Err(error) => Err(error),
            };
            let log = result::get_program_log(program).map(text_of).unwrap_or_default();
            let _ = result::destroy_program(program);
            code.map_err(|error| failed(format!("{error}\n{log}"))).map(|code| (code, log))
        }
    }
}

/// Returns what kernels take, as the assembler writes it into the log.
fn resources_in(log: &str) -> Vec<KernelResources> {
    let number_before = |line: &str, unit: &str| -> Option<u32> {
        line.split(unit).next()?.split_whitespace().last()?.parse().ok()
    };
    let mut found: Vec<KernelResources> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(KernelResources { entry, registers: 0, local_bytes: 0 });
        } else if let Some(last) = found.last_mut() {
            let stack = number_before(line, " bytes stack frame").filter(|_| line.contains("stack frame"));
            last.local_bytes = last.local_bytes.max(stack.unwrap_or(0));
            let used = number_before(line, " registers").filter(|_| line.contains(" registers"));
            last.registers = last.registers.max(used.unwrap_or(0));
        }
    }
    found
}

impl Code {
    /// Returns the bytes of the code.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Code::Ptx(text) => text.as_bytes(),
            Code::Cubin(bytes) => bytes,
        }
    }
}

/// Returns the CUBIN of a compiled program.
///
/// # Safety
///
/// The program exists and was compiled.
unsafe fn cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // Sound: the function writes one number.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut size) }.result()?;
    let mut code = vec![0_u8; size];
    // Sound: the buffer has the size that the function will write.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

/// Returns the text of C characters, up to the first zero.
fn text_of(characters: Vec<std::ffi::c_char>) -> String {
    let bytes: Vec<u8> = characters.into_iter().map(|c| c as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn missing() -> DeviceError {
    let hint = "install it with pip install nvidia-cuda-nvrtc-cu12, or set device.nvrtc";
    DeviceError::Unsupported(format!("NVRTC, which compiles kernels, is not found ({hint})"))
}

/// Returns a sentence about an architecture that NVRTC does not know, with the version that knows it.
fn unknown_architecture(architecture: Architecture, version: Version) -> String {
    let since = |major, minor| Some(Version { major, minor });
    let first = match architecture.major * 10 + architecture.minor {
        100 | 101 | 120 => since(12, 8),
        103 | 121 => since(12, 9),
        88 | 110 => since(13, 0),
        _ => None,
    };
    let needed = match first.filter(|first| *first > version) {
        Some(first) => format!("NVRTC {first} or later is required"),
        None => "another version is required".into(),
    };
    format!(
        "NVRTC {version} does not compile for {architecture}; {needed} (install it with pip install \
         --upgrade nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc, or set device.nvrtc)"
    )
}

/// Loads the library at a path, or in a folder.
fn load_configured(path: &Path) -> Result<PathBuf, DeviceError> {
    let loaded = if path.is_dir() { load_from(path) } else { load(path) };
    let unsupported = |what| DeviceError::Unsupported(format!("device.nvrtc: {} {what}", path.display()));
    let loaded = loaded.ok_or_else(|| unsupported("has no NVRTC library that can be loaded"))?;
    match is_used(&loaded) {
        true => Ok(loaded),
        false => Err(unsupported("cannot be used, because the system finds another NVRTC first")),
    }
}

/// Returns whether a loaded library is the one that calls go to: the first that is found by its name.
fn is_used(path: &Path) -> bool {
    let version = |library: &libloading::Library| {
        // Sound: only the address of the function is used.
        unsafe { library.get::<*const std::ffi::c_void>(b"nvrtcVersion") }.ok().map(|symbol| *symbol)
    };
    let names = cudarc::get_lib_name_candidates("nvrtc");
    // Sound: they are loaded already, or are NVRTC, whose initializers have no requirements.
    let first = names.iter().find_map(|name| unsafe { libloading::Library::new(name) }.ok());
    let own = unsafe { libloading::Library::new(path) }.ok();
    let used = first.as_ref().and_then(version);
    used.is_some() && used == own.as_ref().and_then(version)
}

/// Loads the library in a folder, the newest if there are several.
fn load_from(folder: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> = files.filter(|path| major_version(path).is_some()).collect();
    files.sort_by_key(|path| std::cmp::Reverse(major_version(path)));
    files.iter().find_map(|path| load(path))
}

/// Returns the major version in the name of a file `libnvrtc.so.MAJOR`; `None` for other files.
fn major_version(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix("libnvrtc.so.")?.parse().ok()
}

/// Loads NVRTC for the life of the process. A library that is loaded once is found by its name.
fn load(path: &Path) -> Option<PathBuf> {
    // Sound: the initializers of NVRTC have no requirements.
    let library = unsafe { libloading::Library::new(path) }.ok()?;
    // Sound: only whether there is such a function matters.
    unsafe { library.get::<*const std::ffi::c_void>(b"nvrtcVersion") }.ok()?;
    std::mem::forget(library);
    Some(path.to_owned())
}

/// Returns the folders where the library may be, besides those of the system.
fn folders() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    let own = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.parent()?.to_owned()));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).chain(own);
    let mut folders: Vec<PathBuf> = toolkits.map(|root| root.join("lib64")).collect();
    environments.for_each(|root| folders.extend(package_folders(&root)));
    folders.push("/usr/local/cuda/lib64".into());
    folders
}

/// Returns the folders of NVIDIA's packages in an environment of Python.
fn package_folders(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(root.join("lib")) else { return Vec::new() };
    let versions = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let pythons = versions.filter(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python"))
    });
    let packages = pythons.map(|python| python.join("site-packages/nvidia"));
    packages.flat_map(|nvidia| [nvidia.join("cu13/lib"), nvidia.join("cuda_nvrtc/lib")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_recognized_by_its_name() {
        let version = |name: &str| major_version(Path::new(name));
        assert_eq!(version("/x/libnvrtc.so.12"), Some(12));
        for other in ["libnvrtc-builtins.so.12.9", "libnvrtc.so", "libnvrtc.alt.so.12", "libnvrtc.so.x"] {
            assert_eq!(version(other), None, "{other}");
        }
    }

    #[test]
    fn the_version_that_knows_an_architecture_is_named() {
        let text = |major, minor| {
            unknown_architecture(Architecture { major, minor }, Version { major: 12, minor: 4 })
        };
        assert!(text(10, 0).contains("NVRTC 12.4 does not compile for sm_100; NVRTC 12.8 or later"));
        assert!(text(10, 3).contains("NVRTC 12.9 or later"), "{}", text(10, 3));
        assert!(text(42, 0).contains("sm_420; another version is required"), "{}", text(42, 0));
    }

    #[test]
    fn a_configured_file_that_is_no_library_is_an_error_with_its_name() {
        let missing = Nvrtc::open(Some(Path::new("/nowhere/libnvrtc.so.12"))).unwrap_err().to_string();
        assert!(missing.contains("device.nvrtc") && missing.contains("/nowhere/libnvrtc.so.12"), "{missing}");
    }
}
