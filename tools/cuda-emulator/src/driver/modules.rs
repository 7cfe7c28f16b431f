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

/// The buffer that the driver's compiler writes errors to.
#[derive(Clone, Copy)]
struct Log {
    buffer: *mut u8,
    bytes: usize,
}

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const LOG_BUFFER: u32 = 5;
const LOG_BYTES: u32 = 6;

impl Log {
    const NONE: Log = Log { buffer: std::ptr::null_mut(), bytes: 0 };

    /// The buffer among the options of a call.
    fn among(count: u32, options: *const u32, values: *const *mut c_void) -> Log {
        let mut log = Log::NONE;
        for at in 0..count as usize {
            // SAFETY: the caller passes so many options, and a value for each.
            let (option, value) = unsafe { (*options.add(at), *values.add(at)) };
            match option {
                LOG_BUFFER => log.buffer = value.cast(),
                LOG_BYTES => log.bytes = value.addr(),
                _ => {}
            }
        }
        log
    }

    fn write(self, text: &str) {
        if self.buffer.is_null() || self.bytes == 0 {
            return;
        }
        let fits = text.len().min(self.bytes - 1);
        // SAFETY: the caller passes a buffer of that size.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.buffer, fits);
            self.buffer.add(fits).write(0);
        }
    }
}

fn load(to: *mut Handle, image: &str, log: Log) -> Result {
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
            log.write(&error.to_string());
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

fn load_image(to: *mut Handle, image: *const c_void, log: Log) -> Result {
    if image.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: an image has at least four bytes: a cubin its magic number, a text its end.
    let first = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
    // ELF and fat binaries hold code of a real GPU.
    if first == *b"\x7fELF" || first == [0x50, 0xed, 0x55, 0xba] {
        return Err(code::NO_BINARY);
    }
    load(to, &text(image.cast())?, log)
}

interface! {
    fn cuModuleLoadData(to: *mut Handle, image: *const c_void) {
        load_image(to, image, Log::NONE)
    }

    fn cuModuleLoadDataEx(
        to: *mut Handle,
        image: *const c_void,
        count: u32,
        options: *mut u32,
        values: *mut *mut c_void,
    ) {
        load_image(to, image, Log::among(count, options, values))
    }

    fn cuModuleLoadFatBinary(_to: *mut Handle, _image: *const c_void) {
        Err(code::NO_BINARY)
    }

    fn cuModuleLoad(to: *mut Handle, path: *const c_char) {
        let data = std::fs::read(text(path)?).map_err(|_| code::FILE_NOT_FOUND)?;
        if data.starts_with(b"\x7fELF") {
            return Err(code::NO_BINARY);
        }
        load(to, &String::from_utf8_lossy(&data), Log::NONE)
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
