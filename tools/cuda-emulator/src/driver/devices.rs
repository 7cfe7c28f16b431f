//! Initialization, versions and properties of devices.

use super::code::{self, Result};
use super::entry::{interface, put};
use super::settings::{Injection, Settings};
use super::state::{initialize, lock, state};
use std::ffi::{c_char, c_int};

/// Multiprocessors of a device.
pub(super) const MULTIPROCESSORS: i32 = 4;

/// Bytes of shared memory that a CTA may have if it asks for more than 48 KiB.
pub(super) fn largest_shared(arch: u32) -> i32 {
    match arch {
        ..75 => 98_304,
        75 => 65_536,
        80 | 87 => 166_912,
        86 | 89 | 120 | 121 => 101_376,
        _ => 232_448,
    }
}

/// A device attribute by its number in `CUdevice_attribute`.
fn attribute(settings: &Settings, device: usize, number: i32) -> Result<i32> {
    let arch = settings.arch;
    Ok(match number {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 => 49_152,
        9 => 65_536,
        10 => 32,
        12 | 82 => 65_536,
        13 => 1_410_000,
        16 => MULTIPROCESSORS,
        19 | 31 | 41 => 1,
        33 => device as i32 + 1,
        36 => 1_215_000,
        37 => 5120,
        38 => 40 << 20,
        39 => {
            if matches!(arch, 86 | 89 | 120) {
                1536
            } else {
                2048
            }
        }
        40 => 3,
        75 => (arch / 10) as i32,
        76 => (arch % 10) as i32,
        81 => largest_shared(arch) + 1024,
        95 => 1,
        97 => largest_shared(arch),
        106 => 32,
        111 => 1024,
        115 => i32::from(settings.pools),
        0 | 161.. => return Err(code::INVALID_VALUE),
        _ => 0,
    })
}

fn uuid(device: usize) -> [u8; 16] {
    let mut bytes = *b"cuda-emulator-00";
    bytes[14] = b'0' + (device / 10 % 10) as u8;
    bytes[15] = b'0' + (device % 10) as u8;
    bytes
}

interface! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        initialize()
    }

    // NVRTC asks the driver for tables of private functions. This one says by its size that it has none.
    fn cuGetExportTable(to: *mut usize, _id: *const [u8; 16]) {
        static TABLE: [usize; 8] = [16, 0, 0, 0, 0, 0, 0, 0];
        put(to, TABLE.as_ptr() as usize)
    }

    fn cuDriverGetVersion(to: *mut c_int) {
        put(to, Settings::read().driver)
    }

    fn cuDeviceGetCount(to: *mut c_int) {
        put(to, state(&mut lock())?.devices.len() as c_int)
    }

    fn cuDeviceGet(to: *mut c_int, ordinal: c_int) {
        put(to, state(&mut lock())?.device(ordinal)? as c_int)
    }

    fn cuDeviceGetName(to: *mut c_char, len: c_int, device: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.device(device)?;
        let name = format!("Emulated GPU (sm_{})", it.settings.arch);
        let bytes = name.as_bytes();
        let fits = bytes.len().min((len.max(1) - 1) as usize);
        for (at, byte) in bytes[..fits].iter().chain(&[0]).enumerate() {
            put(to.wrapping_add(at), *byte as c_char)?;
        }
        Ok(())
    }

    fn cuDeviceGetUuid(to: *mut [u8; 16], device: c_int) {
        let device = state(&mut lock())?.device(device)?;
        put(to, uuid(device))
    }

    fn cuDeviceGetUuid_v2(to: *mut [u8; 16], device: c_int) {
        let device = state(&mut lock())?.device(device)?;
        put(to, uuid(device))
    }

    fn cuDeviceTotalMem_v2(to: *mut usize, device: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.device(device)?;
        put(to, it.settings.memory as usize)
    }

    fn cuDeviceGetAttribute(to: *mut c_int, number: c_int, device: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let device = it.device(device)?;
        let fails = |injection: &&Injection| {
            injection.properties && injection.device.is_none_or(|broken| broken == device)
        };
        if let Some(injection) = it.settings.injections.iter().find(fails) {
            return Err(injection.error);
        }
        put(to, attribute(&it.settings, device, number)?)
    }

    fn cuDeviceGetPCIBusId(to: *mut c_char, len: c_int, device: c_int) {
        let device = state(&mut lock())?.device(device)?;
        let name = format!("0000:{:02x}:00.0", device + 1);
        if (len as usize) <= name.len() {
            return Err(code::INVALID_VALUE);
        }
        for (at, byte) in name.as_bytes().iter().chain(&[0]).enumerate() {
            put(to.wrapping_add(at), *byte as c_char)?;
        }
        Ok(())
    }

    fn cuDeviceCanAccessPeer(to: *mut c_int, device: c_int, peer: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        let (device, peer) = (it.device(device)?, it.device(peer)?);
        put(to, c_int::from(device != peer))
    }

    fn cuDeviceGetP2PAttribute(to: *mut c_int, number: c_int, device: c_int, peer: c_int) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        if it.device(device)? == it.device(peer)? {
            return Err(code::INVALID_DEVICE);
        }
        // 1: performance rank, 2: access, 3: atomics, 4: arrays.
        put(to, c_int::from(matches!(number, 2)))
    }

    fn cuDeviceGetDefaultMemPool(to: *mut usize, device: c_int) {
        let device = state(&mut lock())?.device(device)?;
        put(to, 0x6000_0000 + device)
    }

    fn cuDeviceGetMemPool(to: *mut usize, device: c_int) {
        let device = state(&mut lock())?.device(device)?;
        put(to, 0x6000_0000 + device)
    }

    fn cuMemPoolTrimTo(_pool: usize, _keep: usize) {
        Ok(())
    }

    fn cuMemPoolSetAttribute(_pool: usize, _attribute: c_int, _value: *mut std::ffi::c_void) {
        Ok(())
    }
}
