//! CUDA: the driver and the GPUs of this machine, and the compiler of kernels.
//!
//! Nothing of CUDA is needed to build or to start: the driver's and NVRTC's libraries are loaded when they
//! are used, and what is missing is an error that says so. Every call into one of them is here, behind a
//! value that exists only if the library was found, because `cudarc` panics if it is missing.
//!
//! Invariant: all `unsafe` of CUDA is in this folder.

#![allow(unsafe_code)]

mod archive;

mod backend;

mod context;

mod driver;

mod nvrtc;

mod precompiled;

mod primary;

mod programs;

mod staging;

pub use archive::compile_archive;
pub use backend::{CudaBackend, CudaSizes, all_programs};
pub use context::{Arguments, Context, CudaBuf, Grid, Kernel};
pub use driver::{Architecture, Driver, Gpu};
pub use nvrtc::{Code, KernelResources, Nvrtc, Program};
pub use precompiled::PrecompiledKernels;
pub use programs::ProgramCache;

/// A version of CUDA, of the driver or of NVRTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
