//! The configured GPUs: their driver, kernels and memory.
//!
//! Invariant: what is missing to use a configured GPU is an error that names `device.groups`.

use super::cache_folder::cache_folder;
use crate::actors::engine::available_memory;
use crate::config::{DeviceConfig, DeviceKind, DeviceName, KernelCache};
use anyhow::{Context as _, Result};
use mainstem_kernels::DeviceError;
use mainstem_kernels::cuda::{
    Context, CudaBackend, CudaSizes, Driver, Gpu, PrecompiledKernels, ProgramCache,
};
use std::path::PathBuf;
use std::sync::Once;
use tracing::warn;

/// Takes a GPU, with the configured compiler of kernels.
pub(super) fn backend(device: DeviceName, config: &DeviceConfig) -> Result<CudaBackend> {
    static STALE: Once = Once::new();
    if PrecompiledKernels::find() == PrecompiledKernels::Stale {
        STALE.call_once(|| warn!("{}", PrecompiledKernels::STALE));
    }
    let open = || -> Result<CudaBackend> {
        let driver = Driver::open()?;
        let programs = ProgramCache::open(config.nvrtc.as_deref(), kernel_folder(config), driver.version())?;
        Ok(CudaBackend::new(&driver, device.number, programs, config.activation_precision)?)
    };
    open().with_context(|| unusable(device))
}

/// Returns the sizes of what a GPU allocates, without taking it.
pub(super) fn sizes(device: DeviceName, config: &DeviceConfig) -> Result<CudaSizes> {
    let gpu = Driver::open().and_then(|driver| driver.supported_gpu(device.number));
    let gpu = gpu.with_context(|| unusable(device))?;
    Ok(CudaSizes::new(&gpu, config.activation_precision))
}

/// Returns the bytes that a device can still allocate, if it has memory of its own.
pub(super) fn own_memory(device: DeviceName) -> Result<Option<usize>> {
    if !device.kind.has_own_memory() {
        return Ok(None);
    }
    let free = Driver::open().and_then(|driver| Context::free_memory(&driver, device.number));
    Ok(Some(usize::try_from(free.with_context(|| unusable(device))?).unwrap_or(usize::MAX)))
}

/// Returns the bytes that the configured devices can still allocate, in the memory of the host and in their
/// own.
pub fn free_memory(config: &DeviceConfig) -> Result<usize> {
    let own = config.devices().map(|device| own_memory(*device)).collect::<Result<Vec<_>>>()?;
    let host = own.contains(&None).then(available_memory);
    Ok(own.into_iter().flatten().chain(host).fold(0, usize::saturating_add))
}

/// Returns a sentence about the GPUs of this machine if none is configured.
pub fn unused(config: &DeviceConfig) -> Option<String> {
    if config.devices().any(|device| device.kind == DeviceKind::Cuda) {
        return None;
    }
    Some(match Driver::open().and_then(|driver| driver.gpus()) {
        Ok(gpus) => {
            let name = |(number, gpu): (usize, Result<Gpu, DeviceError>)| match gpu {
                Ok(gpu) => format!("cuda:{number} ({})", gpu.name),
                Err(error) => format!("cuda:{number} ({error})"),
            };
            let names: Vec<String> = gpus.into_iter().enumerate().map(name).collect();
            format!("not used: {}; --device cuda runs the model on the first", names.join(", "))
        }
        Err(error) => format!("none: {error}"),
    })
}

fn unusable(device: DeviceName) -> String {
    format!("device.groups: {device} cannot be used")
}

/// Returns the folder of compiled kernels; `None` if they are not kept, or the user has no cache folder.
fn kernel_folder(config: &DeviceConfig) -> Option<PathBuf> {
    match &config.kernel_cache {
        KernelCache::Usual => Some(cache_folder().ok()?.join("kernels")),
        KernelCache::Folder(folder) => Some(folder.clone()),
        KernelCache::Off => None,
    }
}
