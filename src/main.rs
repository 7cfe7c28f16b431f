//! The program: its arguments go to `cli`.

fn main() -> std::process::ExitCode {
    mainstem::cli::run()
}
