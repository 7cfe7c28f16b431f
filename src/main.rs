//! The `mainstem` binary, which runs [`mainstem::cli`].

fn main() -> std::process::ExitCode {
    mainstem::cli::run()
}
