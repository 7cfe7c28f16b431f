//! The emulator of GPUs, loaded into this process in place of the driver.
//!
//! Invariant: it is loaded before anything asks for the driver.

/// The library of the emulator.
pub struct Emulator(libloading::Library);

impl Emulator {
    /// Loads the emulator. It is then found under the name of the driver.
    pub fn load() -> Emulator {
        let program = std::env::current_exe().expect("this program has a path");
        // Sound: the library has no initializers.
        let library = unsafe { libloading::Library::new(program.with_file_name("libcuda.so")) };
        Emulator(library.expect("the emulator is built with this program"))
    }

    /// Returns what the emulator found wrong with kernels and calls so far.
    pub fn findings(&self) -> String {
        type Findings = unsafe extern "C" fn(*mut u8, usize) -> usize;
        let mut text = vec![0; 4096];
        // Sound: the function has this signature, and writes no more than it is told.
        let len = unsafe {
            let findings = self.0.get::<Findings>(b"cudaEmulatorFindings").expect("it is exported");
            findings(text.as_mut_ptr(), text.len())
        };
        text.truncate(len);
        String::from_utf8_lossy(&text).trim_end_matches('\0').into()
    }
}
