//! A GPU that computes: its memory, its stream of work, and the kernels loaded there.
//!
//! Work is queued on one stream, in order, and nothing waits for it but [`Context::synchronize`] and
//! downloads.
//! Invariant: an error of the driver, also of work that was queued earlier, is returned by the call that
//! finds it.

use super::driver::fault;
use super::primary::{Handle, PrimaryContext};
use super::staging::Staging;
use super::{Architecture, Code, Driver, Program, ProgramCache};
use crate::backend::DeviceError;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as FunctionAttribute, CUjit_option as JitOption};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A GPU with one stream of work, which one thread at a time queues.
pub struct Context {
    primary: Arc<PrimaryContext>,
    stream: Handle<sys::CUstream>,
    architecture: Architecture,
    programs: ProgramCache,
    modules: HashMap<String, Handle<sys::CUmodule>>,
    /// Bytes of shared memory that a kernel may use besides those that it declares, by its handle.
    shared: HashMap<usize, u32>,
    staging: Staging,
    /// Bytes that were copied to the GPU.
    uploaded: u64,
}

/// A buffer in the memory of a GPU.
#[derive(Debug)]
pub struct CudaBuf {
    address: sys::CUdeviceptr,
    bytes: usize,
    primary: Arc<PrimaryContext>,
}

/// A kernel that is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: Handle<sys::CUfunction>,
}

/// The size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks of threads, in three dimensions.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory of a block besides those that the kernel declares.
    pub shared: u32,
}

/// Arguments of a kernel, in order: at most [`Arguments::MOST`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Arguments {
    values: [u64; Arguments::MOST],
    count: usize,
}

impl Context {
    /// Takes GPU `number`, and compiles kernels by `programs`. Fails with [`DeviceError::Unsupported`] if
    /// there is no such GPU, or if its architecture is too old, or unknown to the compiler.
    pub fn new(driver: &Driver, number: u32, programs: ProgramCache) -> Result<Context, DeviceError> {
        let architecture = driver.supported_gpu(number)?.architecture;
        programs.check_architecture(architecture)?;
        let primary = Arc::new(PrimaryContext::retain(number)?);
        primary.make_current()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let stream = Handle(stream.map_err(|error| fault("create a stream", error))?);
        let staging = Staging::new(&primary)?;
        let (modules, shared) = (HashMap::new(), HashMap::new());
        Ok(Context { primary, stream, architecture, programs, modules, shared, staging, uploaded: 0 })
    }

    /// Returns the bytes of the live buffers.
    pub fn allocated_bytes(&self) -> usize {
        self.primary.allocated.load(Ordering::Relaxed)
    }

    /// Returns the bytes that were copied to the GPU so far.
    pub fn uploaded_bytes(&self) -> u64 {
        self.uploaded
    }

    /// Allocates a zeroed buffer. Fails with [`DeviceError::OutOfMemory`].
    pub fn alloc(&self, bytes: usize) -> Result<CudaBuf, DeviceError> {
        self.primary.make_current()?;
        let mut buf = CudaBuf { address: 0, bytes, primary: self.primary.clone() };
        if bytes == 0 {
            return Ok(buf);
        }
        // Sound: the memory is not read before it is zeroed, as both are done on the stream.
        buf.address = unsafe { result::malloc_sync(bytes) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let reason = match result::mem_get_info() {
                    Ok((free, total)) => format!("{free} of {total} bytes are free on the GPU"),
                    Err(_) => "the GPU has no more memory".into(),
                };
                DeviceError::OutOfMemory { bytes, reason }
            }
            _ => fault("allocate memory", error),
        })?;
        self.primary.allocated.fetch_add(bytes, Ordering::Relaxed);
        // Sound: the buffer was just allocated, with this size.
        let zeroed = unsafe { result::memset_d8_async(buf.address, 0, bytes, self.stream.0) };
        zeroed.map_err(|error| fault("clear memory", error))?;
        Ok(buf)
    }

    /// Returns the bytes of memory of GPU `number` that a context can still allocate. Fails as
    /// [`Context::new`] does.
    pub fn free_memory(driver: &Driver, number: u32) -> Result<u64, DeviceError> {
        driver.supported_gpu(number)?;
        let primary = PrimaryContext::retain(number)?;
        primary.make_current()?;
        let (free, _) = result::mem_get_info().map_err(|error| fault("read the free memory", error))?;
        Ok(free as u64)
    }

    /// Queues a copy of `bytes` to `to`, from byte `offset` on; they may change afterwards. Panics if they
    /// are not within the buffer.
    pub fn upload(&mut self, to: &mut CudaBuf, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        to.check_range(offset, bytes.len());
        self.primary.make_current()?;
        self.uploaded += bytes.len() as u64;
        let (mut at, mut rest) = (to.address + offset as u64, bytes);
        while !rest.is_empty() {
            let staged = self.staging.next(rest.len(), self.stream)?;
            let (part, later) = rest.split_at(staged.len());
            staged.copy_from_slice(part);
            // Sound: the range is within the buffer, and the pinned memory is not touched before the copy is
            // done.
            let copied = unsafe { result::memcpy_htod_async(at, staged, self.stream.0) };
            copied.map_err(|error| fault("copy to the GPU", error))?;
            at += part.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Copies from byte `offset` of `from` on to `bytes`, once all queued work is done. Panics if they are
    /// not within the buffer.
    pub fn download(&mut self, from: &CudaBuf, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let mut rest = bytes;
        self.read(from, offset, rest.len(), |staged| {
            let (part, later) = std::mem::take(&mut rest).split_at_mut(staged.len());
            part.copy_from_slice(staged);
            rest = later;
        })
    }

    /// Gives `len` bytes from byte `offset` of `from` on to `take`, once all queued work is done: one part
    /// after another, of which all but the last have a multiple of 64 bytes. Panics if they are not within
    /// the buffer.
    pub fn read(
        &mut self,
        from: &CudaBuf,
        offset: usize,
        len: usize,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        from.check_range(offset, len);
        self.primary.make_current()?;
        let mut read = 0;
        while read < len {
            let staged = self.staging.next(len - read, self.stream)?;
            let at = from.address + (offset + read) as u64;
            // Sound: the range is within the buffer, and the pinned memory is not touched before the copy is
            // done.
            let copied = unsafe { result::memcpy_dtoh_async(staged, at, self.stream.0) };
            copied.map_err(|error| fault("copy from the GPU", error))?;
            // Sound: the stream lives as long as this context.
            let done = unsafe { result::stream::synchronize(self.stream.0) };
            done.map_err(|error| fault("finish a step", error))?;
            read += staged.len();
            take(staged);
        }
        Ok(())
    }

    /// Copies `bytes` bytes within a buffer, from byte `from` on to byte `to` on, which do not overlap.
    /// Panics if they are not within the buffer.
    pub fn copy_within(
        &mut self,
        buf: &mut CudaBuf,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        buf.check_range(from, bytes);
        buf.check_range(to, bytes);
        assert!(from.abs_diff(to) >= bytes, "copies do not overlap");
        self.primary.make_current()?;
        let (from, to) = (buf.address + from as u64, buf.address + to as u64);
        // Sound: both ranges are within the buffer.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.0) };
        copied.map_err(|error| fault("copy within a GPU", error))
    }

    /// Queues the clearing of `bytes` bytes of a buffer, from byte `offset` on. Panics if they are not within
    /// the buffer.
    pub fn clear(&mut self, buf: &mut CudaBuf, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        buf.check_range(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.primary.make_current()?;
        // Sound: the range is within the buffer.
        let cleared =
            unsafe { result::memset_d8_async(buf.address + offset as u64, 0, bytes, self.stream.0) };
        cleared.map_err(|error| fault("clear memory", error))
    }

    /// Returns kernel `entry` of a program with macros `defines`, compiled and loaded if it is not yet, which
    /// may use `shared` bytes of shared memory besides those that it declares.
    pub fn kernel(
        &mut self,
        program: &Program,
        defines: &[(String, String)],
        entry: &str,
        shared: u32,
    ) -> Result<Kernel, DeviceError> {
        self.primary.make_current()?;
        let module = self.module(program, defines)?;
        let name = CString::new(entry).expect("names of kernels have no zero byte; this is a bug");
        let failed = |error| fault(&format!("find the kernel {entry} of {}", program.name), error);
        // Sound: the module is loaded as long as this context exists.
        let function = unsafe { result::module::get_function(module.0, name) }.map_err(failed)?;
        // The limit only grows, as others may use the same kernel with more.
        let largest = self.shared.entry(function as usize).or_insert(0);
        if shared > *largest {
            *largest = shared;
            let most = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // Sound: the function exists.
            unsafe { result::function::set_function_attribute(function, most, shared as i32) }
                .map_err(failed)?;
        }
        Ok(Kernel { function: Handle(function) })
    }

    fn module(
        &mut self,
        program: &Program,
        defines: &[(String, String)],
    ) -> Result<Handle<sys::CUmodule>, DeviceError> {
        let values = defines.iter().map(|(name, value)| format!(" {name}={value}"));
        // By the address of the source, as names are for people.
        let name = format!("{} {:p}", program.name, program.source);
        let key = std::iter::once(name).chain(values).collect::<String>();
        if let Some(module) = self.modules.get(&key) {
            return Ok(*module);
        }
        let code = self.programs.code(program, defines, self.architecture)?;
        let image = match code {
            Code::Ptx(text) => {
                CString::new(text).map_err(|_| DeviceError::Fault("PTX with a zero byte".into()))?
            }
            // A CUBIN has its length in its header; the zero byte after it is not read.
            Code::Cubin(bytes) => {
                return self.load(program, key, bytes.as_ptr().cast());
            }
        };
        self.load(program, key, image.as_ptr().cast())
    }

    fn load(
        &mut self,
        program: &Program,
        key: String,
        image: *const c_void,
    ) -> Result<Handle<sys::CUmodule>, DeviceError> {
        const LOG_BYTES: usize = 4096;
        let (mut log, mut module) = ([0_u8; LOG_BYTES], std::ptr::null_mut());
        let mut options = [JitOption::CU_JIT_ERROR_LOG_BUFFER, JitOption::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
        // Sound: the image is PTX with a zero byte after it, or a whole CUBIN, and lives through the call, as
        // the log does; there is a value for each option.
        let loaded = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, image, 2, options, values).result()
        };
        loaded.map_err(|error| {
            let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
            let text = String::from_utf8_lossy(text);
            match fault(&format!("load the kernels of {}", program.name), error) {
                DeviceError::Fault(what) if !text.trim().is_empty() => {
                    DeviceError::Fault(format!("{what}\n{}", text.trim()))
                }
                error => error,
            }
        })?;
        self.modules.insert(key, Handle(module));
        Ok(Handle(module))
    }

    /// Queues a launch.
    ///
    /// # Safety
    ///
    /// The kernel and the buffers must be of this context, and those buffers must be cleared by work that was
    /// awaited or is on this stream. The arguments must be those that the kernel declares, and the buffers
    /// among them must live, and be as long as what the kernel accesses, until the work is done.
    pub unsafe fn launch(
        &mut self,
        kernel: Kernel,
        grid: Grid,
        mut arguments: Arguments,
    ) -> Result<(), DeviceError> {
        self.primary.make_current()?;
        let mut pointers =
            arguments.values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        let [x, y, z] = grid.blocks;
        // Sound: the caller warrants it; the driver copies the arguments within the call.
        let launched = unsafe {
            let threads = (grid.threads, 1, 1);
            let function = kernel.function.0;
            result::launch_kernel(
                function,
                (x, y, z),
                threads,
                grid.shared,
                self.stream.0,
                &mut pointers[..arguments.count],
            )
        };
        launched.map_err(|error| fault("launch a kernel", error))
    }

    /// Waits until all queued work is done. Fails if any of it failed.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.primary.make_current()?;
        // Sound: the stream lives as long as this context.
        let done = unsafe { result::stream::synchronize(self.stream.0) };
        done.map_err(|error| fault("finish a step", error))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // After a fault the driver refuses all of this, and frees everything with its context.
        if self.primary.make_current().is_ok() {
            let _ = self.synchronize();
            // Sound: no work uses the modules and the stream any more.
            unsafe {
                for module in self.modules.values() {
                    let _ = result::module::unload(module.0);
                }
                let _ = result::stream::destroy(self.stream.0);
            }
        }
    }
}

impl CudaBuf {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Panics if the buffer has no `bytes` bytes at `offset`.
    fn check_range(&self, offset: usize, bytes: usize) {
        let is_within = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(is_within, "{bytes} bytes at {offset} of {}", self.bytes);
    }

    /// Returns whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for CudaBuf {
    fn drop(&mut self) {
        if self.address != 0 {
            self.primary.allocated.fetch_sub(self.bytes, Ordering::Relaxed);
            if self.primary.make_current().is_ok() {
                // Sound: it was allocated once, and the driver waits for work that uses it.
                let _ = unsafe { result::memory_free(self.address) };
            }
        }
    }
}

impl Arguments {
    /// Number of arguments that a kernel may have.
    pub const MOST: usize = 30;

    /// Panics if there are too many.
    fn push(mut self, value: u64) -> Arguments {
        self.values[self.count] = value;
        self.count += 1;
        self
    }

    /// Returns the arguments with a buffer after them, of which the kernel accesses the first `bytes` bytes.
    /// Panics if it is shorter.
    pub fn buf(self, buf: &CudaBuf, bytes: usize) -> Arguments {
        self.buf_at(buf, 0, bytes)
    }

    /// Returns the arguments with the address at byte `offset` of a buffer after them, from which the kernel
    /// accesses `bytes` bytes. Panics if it is shorter.
    pub fn buf_at(self, buf: &CudaBuf, offset: usize, bytes: usize) -> Arguments {
        buf.check_range(offset, bytes);
        self.push(buf.address + offset as u64)
    }

    /// Returns the arguments with a buffer after them as [`Arguments::buf`] does, or with a null pointer.
    pub fn optional(self, buf: Option<&CudaBuf>, bytes: usize) -> Arguments {
        match buf {
            Some(buf) => self.buf(buf, bytes),
            None => self.push(0),
        }
    }

    /// Returns the arguments with an `unsigned long long` after them.
    pub fn long(self, value: usize) -> Arguments {
        self.push(value as u64)
    }

    /// Returns the arguments with an `unsigned int` after them.
    pub fn word(self, value: u32) -> Arguments {
        self.push(value.into())
    }

    /// Returns the arguments with an `int` after them. Panics if it does not fit.
    pub fn int(self, value: usize) -> Arguments {
        let value = i32::try_from(value).expect("sizes of kernels fit into an int; this is a bug");
        self.push(u64::from(value as u32))
    }

    /// Returns the arguments with a `float` after them.
    pub fn float(self, value: f32) -> Arguments {
        self.push(u64::from(value.to_bits()))
    }
}
