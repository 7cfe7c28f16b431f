//! The compiler of kernels. Without NVRTC the checks are skipped, which is printed; with `NVRTC_FOLDER`, the
//! folder that has it, they are required.
//!
//! A program without a harness, so that what is skipped is seen.

use mainstem_kernels::cuda::{Architecture, Code, Nvrtc, Program, ProgramCache, Version};
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
    a_program_that_is_wrong_is_an_error_with_its_name_and_the_compilers_log(&nvrtc);
    compiled_code_is_kept_and_damaged_code_is_compiled_again(&nvrtc, &caches);
    an_older_driver_gets_a_cubin(&nvrtc, &caches);
    std::fs::remove_dir_all(&caches).unwrap();
    println!("4 checks passed");
}

/// Returns a folder of this process.
fn own_folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn factor(value: &str) -> Vec<(&'static str, String)> {
    vec![("FACTOR", value.to_owned())]
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
