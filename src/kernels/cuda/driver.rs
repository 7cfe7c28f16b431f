//! The CUDA driver and the GPUs that it finds.
//!
//! Invariant: only names that the driver of CUDA 12.0 exports are called, so that every later driver has
//! them.

use super::Version;
use crate::backend::DeviceError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::fmt;

/// The CUDA driver of this machine, initialized.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    version: Version,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Number of the GPU, in the driver's order.
    pub number: u32,
    /// Name of the product.
    pub name: String,
    /// Architecture, which kernels are compiled for.
    pub architecture: Architecture,
    /// Memory, in bytes, used or not.
    pub memory: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block of threads may have, in bytes.
    pub shared_memory: u32,
    /// Address on the PCI bus: domain, bus and device.
    pub pci: [u32; 3],
    /// Numbers of the GPUs whose memory this one can access directly.
    pub peers: Vec<u32>,
}

/// The architecture of a GPU, also called compute capability: kernels for `sm_90` run on 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Architecture {
    pub major: u32,
    pub minor: u32,
}

impl Architecture {
    /// The first architecture with the asynchronous copies and products of matrices that kernels use.
    pub const OLDEST: Architecture = Architecture { major: 8, minor: 0 };
}

impl Architecture {
    /// Returns the architecture in the names of targets of compilers: 9.0 with what only Hopper has.
    pub(super) fn target(self) -> String {
        let Architecture { major, minor } = self;
        let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
        format!("{major}{minor}{suffix}")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

impl Driver {
    /// Loads and initializes the driver. Fails with [`DeviceError::Unsupported`] if there is none, if it is
    /// older than CUDA 12.0, or if it finds no GPU.
    pub fn open() -> Result<Driver, DeviceError> {
        let unsupported = |text: String| DeviceError::Unsupported(text);
        // Sound: it only tries to load the driver's library.
        if !unsafe { sys::is_culib_present() } {
            return Err(unsupported("there is no CUDA driver (libcuda.so.1)".into()));
        }
        match result::init() {
            Ok(()) => {}
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
                return Err(unsupported("the CUDA driver finds no GPU".into()));
            }
            Err(error) => return Err(fault("start the CUDA driver", error)),
        }
        let mut version = 0;
        // Sound: the function writes one number.
        let read = unsafe { sys::cuDriverGetVersion(&mut version) };
        read.result().map_err(|error| fault("read the version of the CUDA driver", error))?;
        let version = Version { major: version as u32 / 1000, minor: version as u32 % 1000 / 10 };
        match version.major {
            12.. => Ok(Driver { version }),
            _ => Err(unsupported(format!("the driver is for CUDA {version}, and 12.0 or later is required"))),
        }
    }

    /// Returns the newest version of CUDA that the driver can run.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the GPUs, in the driver's order, and the error of each one whose properties the driver cannot
    /// tell. `CUDA_VISIBLE_DEVICES` selects and orders them.
    pub fn gpus(&self) -> Result<Vec<Result<Gpu, DeviceError>>, DeviceError> {
        let count = result::device::get_count().map_err(|error| fault("count the GPUs", error))?;
        Ok((0..count).map(|number| self.gpu(number, count)).collect())
    }

    /// Returns a GPU that kernels can run on. Fails with [`DeviceError::Unsupported`] if there is no GPU
    /// `number`, or if its architecture is too old.
    pub fn supported_gpu(&self, number: u32) -> Result<Gpu, DeviceError> {
        let (mut gpus, oldest) = (self.gpus()?, Architecture::OLDEST);
        let unsupported = |text| Err(DeviceError::Unsupported(text));
        if number as usize >= gpus.len() {
            let found = gpus.len();
            return unsupported(format!("there is no GPU cuda:{number}; the driver finds {found}"));
        }
        let gpu = gpus.swap_remove(number as usize)?;
        match gpu.architecture {
            old if old < oldest => {
                unsupported(format!("cuda:{number} is {old}, and {oldest} or later is required"))
            }
            _ => Ok(gpu),
        }
    }

    fn gpu(&self, number: i32, count: i32) -> Result<Gpu, DeviceError> {
        let failed = |error| fault(&format!("read the properties of GPU {number}"), error);
        let device = result::device::get(number).map_err(failed)?;
        // Sound: the device exists.
        let read = |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(failed);
        let number_of = |attribute| Ok::<u32, DeviceError>(read(attribute)?.max(0) as u32);
        let architecture = Architecture {
            major: number_of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: number_of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };
        let others = (0..count).filter(|other| *other != number);
        let peers = others.filter(|other| can_access(device, *other)).map(|other| other as u32).collect();
        Ok(Gpu {
            number: number as u32,
            name: result::device::get_name(device).map_err(failed)?,
            architecture,
            // Sound: the device exists.
            memory: unsafe { result::device::total_mem(device) }.map_err(failed)? as u64,
            multiprocessors: number_of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: number_of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            pci: [
                number_of(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
                number_of(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
                number_of(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
            ],
            peers,
        })
    }
}

/// Returns whether a GPU can access the memory of GPU `other`; false if the driver cannot tell.
fn can_access(device: sys::CUdevice, other: i32) -> bool {
    let mut can = 0;
    let Ok(other) = result::device::get(other) else { return false };
    // Sound: both devices exist, and the function writes one number.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, other) };
    asked.result().is_ok() && can != 0
}

/// Returns the error of a call of the driver that was to do `what`.
pub(super) fn fault(what: &str, error: DriverError) -> DeviceError {
    let text = |found: Result<&std::ffi::CStr, DriverError>| match found {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => format!("error {}", error.0 as u32),
    };
    let (name, text) = (text(error.error_name()), text(error.error_string()));
    DeviceError::Fault(format!("CUDA cannot {what}: {text} ({name})"))
}
