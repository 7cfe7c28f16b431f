//! Copies the kernels that were compiled beforehand, in the file that `MAINSTEM_KERNELS` names, to where the
//! build finds them; without the variable there are none.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-env-changed=MAINSTEM_KERNELS");
    let to = Path::new(&std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("kernels.bin");
    let bytes = match std::env::var_os("MAINSTEM_KERNELS").filter(|file| !file.is_empty()) {
        Some(file) => {
            println!("cargo:rerun-if-changed={}", Path::new(&file).display());
            std::fs::read(&file).unwrap_or_else(|error| panic!("MAINSTEM_KERNELS: {file:?}: {error}"))
        }
        None => Vec::new(),
    };
    std::fs::write(to, bytes).expect("OUT_DIR is writable");
}
