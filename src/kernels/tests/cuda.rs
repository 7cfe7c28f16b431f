//! The compiler of kernels, and a context in which they run, on emulated GPUs. Without NVRTC the checks are
//! skipped, which is printed; with `NVRTC_FOLDER`, the folder that has it, they are required.
//!
//! A program without a harness, so that what is skipped is seen.

use cuda::Emulator;
use mainstem_kernels::DeviceError;
use mainstem_kernels::cuda::{
    Architecture, Arguments, Code, Context, Driver, Grid, Nvrtc, Program, ProgramCache, Version,
};
use std::path::{Path, PathBuf};

const SCALE: Program = Program {
    name: "scale",
    source: r#"
extern "C" __global__ void scale(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= FACTOR;
}
"#,
};
const AMPERE: Architecture = Architecture::OLDEST;
const HOPPER: Architecture = Architecture { major: 9, minor: 0 };

fn main() {
    let folder = std::env::var_os("NVRTC_FOLDER").map(PathBuf::from);
    let nvrtc = match Nvrtc::open(folder.as_deref()) {
        Ok(nvrtc) => nvrtc,
        Err(error) if folder.is_none() => {
            println!("skipped: the checks of the compiler of kernels ({error})");
            return;
        }
        Err(error) => panic!("NVRTC_FOLDER: {error}"),
    };
    println!("NVRTC {}, {:?}", nvrtc.version(), nvrtc.path());
    let caches = own_folder();
    a_program_is_compiled_for_its_architecture(&nvrtc);
    an_architecture_that_nvrtc_does_not_know_is_an_error_that_says_so(&nvrtc);
    a_program_that_is_wrong_is_an_error_with_its_name_and_the_compilers_log(&nvrtc);
    compiled_code_is_kept_and_damaged_code_is_compiled_again(&nvrtc, &caches);
    an_older_driver_gets_a_cubin(&nvrtc, &caches);
    std::fs::remove_dir_all(&caches).unwrap();

    // Sound: this process has one thread.
    unsafe { std::env::set_var("CUDA_EMULATOR_DEVICES", "2") };
    let emulator = Emulator::load();
    let driver = Driver::open().unwrap();
    let gpus = driver.gpus().unwrap();
    let first = gpus[0].as_ref().unwrap().architecture;
    println!("{} emulated GPUs, CUDA {}: {first}", gpus.len(), driver.version());
    let context =
        |number| Context::new(&driver, number, ProgramCache::new(nvrtc.clone(), None, driver.version()));
    a_kernel_computes_on_its_own_gpu(&context);
    buffers_are_zeroed_counted_and_freed(&context);
    copies_longer_than_the_staging_memory_are_whole(&context);
    what_does_not_exist_is_an_error(&context);
    assert_eq!(emulator.findings(), "", "what the emulator found");
    a_broken_gpu_is_listed_with_its_error(&driver, &emulator);
    code_that_the_driver_refuses_is_an_error_with_its_log(&context, &emulator);
    a_kernel_out_of_bounds_fails_the_step_and_the_next_context_works(&context, &emulator);
    println!("12 checks passed");
}

fn an_architecture_that_nvrtc_does_not_know_is_an_error_that_says_so(nvrtc: &Nvrtc) {
    let future = Architecture { major: 99, minor: 0 };
    let Err(DeviceError::Unsupported(text)) = nvrtc.compile(SCALE.source, &factor("2.0f"), future, false)
    else {
        panic!("NVRTC compiles for sm_990");
    };
    assert!(text.contains("does not compile for sm_990") && text.contains("device.nvrtc"), "{text}");
}

fn a_broken_gpu_is_listed_with_its_error(driver: &Driver, emulator: &Emulator) {
    // Sound: this process has one thread.
    unsafe { std::env::set_var("CUDA_EMULATOR_INJECT", "device=1 properties error=46") };
    emulator.reset();
    let gpus = driver.gpus().unwrap();
    assert_eq!(gpus[0].as_ref().unwrap().number, 0);
    let error = gpus[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("GPU 1") && error.contains("CUDA_ERROR_DEVICE_UNAVAILABLE"), "{error}");
    assert!(driver.supported_gpu(0).is_ok() && driver.supported_gpu(1).is_err());
    // Sound: as above.
    unsafe { std::env::remove_var("CUDA_EMULATOR_INJECT") };
    emulator.reset();
}

fn code_that_the_driver_refuses_is_an_error_with_its_log(context: MakeContext, emulator: &Emulator) {
    const UNKNOWN: Program = Program {
        name: "unknown",
        source: "extern \"C\" __global__ void unknown() { asm volatile(\"frobnicate.b32;\"); }",
    };
    let error = context(0).unwrap().kernel(&UNKNOWN, &[], "unknown", 0).unwrap_err().to_string();
    assert!(error.contains("load the kernels of unknown"), "{error}");
    assert!(error.contains("frobnicate.b32"), "without the driver's log: {error}");
    emulator.reset();
}

type MakeContext<'a> = &'a dyn Fn(u32) -> Result<Context, DeviceError>;

/// Queues x (n) *= 3 for the first `n` numbers of a buffer.
fn scale(context: &mut Context, buf: &mainstem_kernels::cuda::CudaBuf, n: usize) {
    let kernel = context.kernel(&SCALE, &factor("3.0f"), "scale", 0).unwrap();
    let grid = Grid { blocks: [n.div_ceil(64) as u32, 1, 1], threads: 64, shared: 0 };
    // Sound: these are the arguments of the kernel.
    unsafe { context.launch(kernel, grid, Arguments::default().buf(buf, 0).int(n)) }.unwrap();
}

fn a_kernel_computes_on_its_own_gpu(context: MakeContext) {
    for number in [0, 1] {
        let mut context = context(number).unwrap();
        let mut buf = context.alloc(100 * 4).unwrap();
        let x: Vec<u8> = (0..100).flat_map(|i| (i as f32).to_le_bytes()).collect();
        context.upload(&mut buf, 0, &x).unwrap();
        scale(&mut context, &buf, 70);
        let mut y = [0; 40 * 4];
        context.download(&buf, 60 * 4, &mut y).unwrap();
        for (i, y) in (60..).zip(y.as_chunks().0) {
            let factor = if i < 70 { 3.0 } else { 1.0 };
            assert_eq!(f32::from_le_bytes(*y), i as f32 * factor, "number {i} on GPU {number}");
        }
    }
}

fn buffers_are_zeroed_counted_and_freed(context: MakeContext) {
    let mut context = context(0).unwrap();
    let first = context.alloc(1000).unwrap();
    let second = context.alloc(24).unwrap();
    assert_eq!((context.allocated_bytes(), first.len()), (1024, 1000));
    let mut bytes = [1; 1000];
    context.download(&first, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 1000]);
    drop(first);
    assert_eq!(context.allocated_bytes(), 24);
    drop(second);
    assert!(context.alloc(0).unwrap().is_empty());
    assert_eq!(context.allocated_bytes(), 0);
    let error = context.alloc(1 << 50).unwrap_err();
    assert!(matches!(&error, DeviceError::OutOfMemory { bytes, .. } if *bytes == 1 << 50), "{error}");
}

fn copies_longer_than_the_staging_memory_are_whole(context: MakeContext) {
    let mut context = context(0).unwrap();
    let bytes: Vec<u8> = (0..9_000_001_u32).map(|i| (i % 251) as u8).collect();
    let mut buf = context.alloc(bytes.len() + 3).unwrap();
    context.upload(&mut buf, 3, &bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    context.download(&buf, 3, &mut back).unwrap();
    assert!(back == bytes);
}

fn what_does_not_exist_is_an_error(context: MakeContext) {
    let error = context(99).err().unwrap().to_string();
    assert!(error.contains("cuda:99"), "{error}");
    let error = context(0).unwrap().kernel(&SCALE, &factor("3.0f"), "missing", 0).unwrap_err().to_string();
    assert!(error.contains("missing") && error.contains("scale"), "{error}");
}

fn a_kernel_out_of_bounds_fails_the_step_and_the_next_context_works(
    context: MakeContext,
    emulator: &Emulator,
) {
    let mut faulty = context(0).unwrap();
    let buf = faulty.alloc(64).unwrap();
    scale(&mut faulty, &buf, 1000);
    let error = faulty.synchronize().unwrap_err().to_string();
    assert!(error.contains("CUDA cannot finish a step"), "{error}");
    assert!(faulty.alloc(4).is_err(), "a context stays failed");
    assert!(emulator.findings().contains("scale"), "{}", emulator.findings());
    drop(buf);
    drop(faulty);
    a_kernel_computes_on_its_own_gpu(context);
}

/// Returns a folder of this process.
fn own_folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn factor(value: &str) -> Vec<(String, String)> {
    vec![("FACTOR".to_owned(), value.to_owned())]
}

fn ptx(code: Code) -> String {
    match code {
        Code::Ptx(text) => text,
        Code::Cubin(_) => panic!("PTX was asked for"),
    }
}

fn a_program_is_compiled_for_its_architecture(nvrtc: &Nvrtc) {
    for (architecture, target) in [(AMPERE, ".target sm_80"), (HOPPER, ".target sm_90")] {
        let ptx = ptx(nvrtc.compile(SCALE.source, &factor("3.0f"), architecture, false).unwrap());
        assert!(ptx.contains(target) && ptx.contains(".visible .entry scale("), "{ptx}");
        // 3.0f as PTX writes it: the macro was used.
        assert!(ptx.contains("0f40400000"), "{ptx}");
    }
}

fn a_program_that_is_wrong_is_an_error_with_its_name_and_the_compilers_log(nvrtc: &Nvrtc) {
    let cache = ProgramCache::new(nvrtc.clone(), None, nvrtc.version());
    let error = cache.code(&SCALE, &[], AMPERE).unwrap_err().to_string();
    assert!(error.contains("scale: ") && error.contains("FACTOR"), "{error}");
}

fn compiled_code_is_kept_and_damaged_code_is_compiled_again(nvrtc: &Nvrtc, folder: &Path) {
    let cache = ProgramCache::new(nvrtc.clone(), Some(folder.join("kept")), nvrtc.version());
    let code = |value| ptx(cache.code(&SCALE, &factor(value), AMPERE).unwrap());
    let first = code("3.0f");
    let files = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder.join("kept")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let [file] = &files()[..] else { panic!("one file is kept, not {:?}", files()) };
    assert_ne!(first, code("5.0f"), "other macros are another program");
    assert_eq!(files().len(), 2);

    // What another program left under this name, whole, is what is returned: nothing was compiled.
    let other = files().into_iter().find(|other| other != file).unwrap();
    std::fs::copy(&other, file).unwrap();
    assert_eq!(code("3.0f"), code("5.0f"));

    let mut damaged = std::fs::read(file).unwrap();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    std::fs::write(file, damaged).unwrap();
    assert_eq!(code("3.0f"), first);
    std::fs::write(file, "short").unwrap();
    assert_eq!(code("3.0f"), first);
}

fn an_older_driver_gets_a_cubin(nvrtc: &Nvrtc, folder: &Path) {
    let older = Version { major: nvrtc.version().major - 1, minor: 9 };
    let cache = ProgramCache::new(nvrtc.clone(), Some(folder.join("older")), older);
    for _ in 0..2 {
        let code = cache.code(&SCALE, &factor("2.0f"), HOPPER).unwrap();
        let Code::Cubin(bytes) = code else { panic!("an older driver cannot compile this PTX") };
        assert!(bytes.starts_with(b"\x7fELF"), "a CUBIN is an ELF file");
    }
}
