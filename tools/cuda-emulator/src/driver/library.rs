//! The shared library of this crate, loaded by tests in the place of the driver.
//!
//! Invariant: it is another copy of this crate than the one linked into the tests, so its state is reached by
//! its exported functions only.

/// The shared library, which programs find under the name of the driver while this exists.
pub struct Emulator(libloading::Library);

impl Emulator {
    /// Loads the library, which cargo builds into the folder of the tests or the one above it. It reads the
    /// settings when the driver is initialized.
    ///
    /// # Panics
    /// If the library is not there.
    pub fn load() -> Emulator {
        let program = std::env::current_exe().expect("this program has a path");
        let paths = ["libcuda.so", "../libcuda.so"].map(|name| program.with_file_name(name));
        let path = paths.iter().find(|path| path.exists()).expect("cargo builds the library with the tests");
        // SAFETY: the library has no initializers.
        Emulator(unsafe { libloading::Library::new(path) }.expect("the library loads"))
    }

    /// Returns what the library found wrong with kernels and calls so far, as lines of JSON.
    ///
    /// # Panics
    /// If the library is one of another crate.
    pub fn findings(&self) -> String {
        type Findings = unsafe extern "C" fn(*mut u8, usize) -> usize;
        // SAFETY: the function has this signature, and writes no more than it is told.
        unsafe {
            let findings = self.0.get::<Findings>(b"cudaEmulatorFindings").expect("it is exported");
            let mut text = vec![0; findings(std::ptr::null_mut(), 0)];
            let len = findings(text.as_mut_ptr(), text.len());
            text.truncate(len);
            String::from_utf8_lossy(&text).into_owned()
        }
    }

    /// Forgets findings, releases launches that hang, and reads the settings anew.
    ///
    /// # Panics
    /// If the library is one of another crate.
    pub fn reset(&self) {
        // SAFETY: the function has this signature.
        unsafe { self.0.get::<unsafe extern "C" fn()>(b"cudaEmulatorReset").expect("it is exported")() }
    }
}
