//! Names the shared library so that a program that asks for the driver gets it, once it is loaded by its
//! path: cudarc asks for `libcuda.so` first, and the loader knows a library by this name.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");
}
