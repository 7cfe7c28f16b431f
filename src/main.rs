//! The `mainstem` binary, which runs [`mainstem::cli`].

/// The allocator of the program. That of the C library keeps for good what large requests took: their threads
/// allocate in areas of their own, where anything that lives longer holds the rest.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    mainstem::cli::run()
}
