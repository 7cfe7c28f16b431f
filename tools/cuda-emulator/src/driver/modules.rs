//! Modules: PTX text only.

use super::code::{self, Result};
use super::entry::{interface, put, text};
use super::queue::machine;
use super::state::{Function, Handle, lock, state};
use crate::findings::{Finding, Kind};
use crate::ptx::PtxError;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, PoisonError};

/// Shared memory that a function may have without asking; no more of it may be static.
const SHARED: u32 = 48 << 10;

fn load(to: *mut Handle, image: &str) -> Result {
    let mut guard = lock();
    let it = state(&mut guard)?;
    let device = it.healthy()?;
    let (arch, newest) = (it.settings.arch, it.settings.newest_ptx());
    drop(guard);
    let machine = machine(device).ok_or(code::INVALID_DEVICE)?;
    let loaded = machine.lock().unwrap_or_else(PoisonError::into_inner).load(image);
    let mut guard = lock();
    let it = state(&mut guard)?;
    // More static shared memory is an error of the driver's compiler.
    let loaded =
        loaded.and_then(|module| match module.program.functions.iter().find(|it| it.shared > SHARED) {
            Some(it) => {
                let what = format!("'{}' has {} bytes of static shared memory", it.name, it.shared);
                Err(PtxError::new(0, what))
            }
            None => Ok(module),
        });
    let module = match loaded {
        Ok(module) => module,
        Err(error) => {
            eprintln!("cuda-emulator: {error}");
            it.findings.push(Finding {
                kind: Kind::Unsupported,
                kernel: String::new(),
                line: error.line,
                cta: [0; 3],
                thread: 0,
                address: 0,
                what: error.problem,
                count: 1,
            });
            return Err(code::INVALID_PTX);
        }
    };
    if module.program.target > arch {
        return Err(code::NO_BINARY);
    }
    if module.program.version > newest {
        return Err(code::PTX_VERSION);
    }
    let handle = it.handle();
    it.modules.insert(handle, (device, module));
    put(to, handle)
}

fn load_image(to: *mut Handle, image: *const c_void) -> Result {
    if image.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: an image has at least four bytes: a cubin its magic number, a text its end.
    let first = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
    // ELF and fat binaries hold code of a real GPU.
    if first == *b"\x7fELF" || first == [0x50, 0xed, 0x55, 0xba] {
        return Err(code::NO_BINARY);
    }
    load(to, &text(image.cast())?)
}

interface! {
    fn cuModuleLoadData(to: *mut Handle, image: *const c_void) {
        load_image(to, image)
    }

    fn cuModuleLoadDataEx(
        to: *mut Handle,
        image: *const c_void,
        _count: u32,
        _options: *mut u32,
        _values: *mut *mut c_void,
    ) {
        load_image(to, image)
    }

    fn cuModuleLoadFatBinary(_to: *mut Handle, _image: *const c_void) {
        Err(code::NO_BINARY)
    }

    fn cuModuleLoad(to: *mut Handle, path: *const c_char) {
        let data = std::fs::read(text(path)?).map_err(|_| code::FILE_NOT_FOUND)?;
        if data.starts_with(b"\x7fELF") {
            return Err(code::NO_BINARY);
        }
        load(to, &String::from_utf8_lossy(&data))
    }

    fn cuModuleUnload(module: Handle) {
        let mut guard = lock();
        let it = state(&mut guard)?;
        it.healthy()?;
        let (device, module) = it.modules.remove(&module).ok_or(code::INVALID_HANDLE)?;
        it.functions.retain(|_, it| !Arc::ptr_eq(&it.module.program, &module.program));
        drop(guard);
        if let (Some(base), Some(machine)) = (module.base, machine(device)) {
            machine.lock().unwrap_or_else(PoisonError::into_inner).free(base);
        }
        Ok(())
    }

    fn cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char) {
        let name = text(name)?;
        let mut guard = lock();
        let it = state(&mut guard)?;
        let (device, module) = it.modules.get(&module).cloned().ok_or(code::INVALID_HANDLE)?;
        let kernel = module.program.kernel(&name).ok_or(code::NOT_FOUND)?;
        let handle = it.handle();
        let max_dynamic_shared = SHARED - module.program.functions[kernel].shared;
        it.functions.insert(handle, Function { device, module, kernel, max_dynamic_shared });
        put(to, handle)
    }

    fn cuModuleGetGlobal_v2(to: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char) {
        let name = text(name)?;
        let mut guard = lock();
        let it = state(&mut guard)?;
        let (_, module) = it.modules.get(&module).ok_or(code::INVALID_HANDLE)?;
        let found = module.variables.iter().find(|(it, ..)| *it == name);
        let (_, address, size) = found.ok_or(code::NOT_FOUND)?;
        if !to.is_null() {
            put(to, *address)?;
        }
        if bytes.is_null() { Ok(()) } else { put(bytes, *size as usize) }
    }
}
