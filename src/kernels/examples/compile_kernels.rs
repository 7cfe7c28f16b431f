//! Compiles all kernels for GPUs from Ampere to Blackwell and writes them to a file, which a build with
//! `MAINSTEM_KERNELS=FILE` makes part of the program. NVRTC is found as the program finds it, or in the
//! folder `NVRTC_FOLDER`; it must be as new as the newest architecture, so 12.8 or later.
//!
//!     cargo run -p mainstem-kernels --example compile_kernels -- target/kernels.bin
//!     MAINSTEM_KERNELS=$PWD/target/kernels.bin cargo build --release

use mainstem_kernels::cuda::{Architecture, Nvrtc, compile_archive};
use std::error::Error;
use std::path::Path;

/// The architectures, as pairs of numbers. Others run the code of an earlier one of the same major number.
const ARCHITECTURES: [(u32, u32); 6] = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];

fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args().nth(1).ok_or("compile_kernels FILE")?;
    let folder = std::env::var_os("NVRTC_FOLDER");
    let nvrtc = Nvrtc::open(folder.as_deref().map(Path::new))?;
    let architectures = ARCHITECTURES.map(|(major, minor)| Architecture { major, minor });
    let archive = compile_archive(&nvrtc, &architectures)?;
    std::fs::write(&file, &archive).map_err(|error| format!("{file}: {error}"))?;
    println!("{file}: {:.1} MiB, compiled by NVRTC {}", archive.len() as f64 / 1048576.0, nvrtc.version());
    Ok(())
}
