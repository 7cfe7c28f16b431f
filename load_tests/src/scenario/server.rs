//! The server of a variant: a child process.
//!
//! Invariant: dropping a server leaves no process behind, and its log output never blocks on a full pipe.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::run::Progress;

/// A running server process.
pub struct ServerProcess {
    child: Child,
    /// Base URL without `/v1`.
    pub url: String,
    log: Log,
    /// Time limit for a graceful shutdown before the process is killed.
    shutdown_timeout: Duration,
}

/// The last lines of a server's log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<VecDeque<String>>>);

/// Number of log lines included in an error.
const LINES_SHOWN: usize = 20;

/// Log text that precedes the address once the server accepts requests.
const LISTENING: &str = "listening on ";

/// Time limit for the shutdown of a server without requests in flight.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for `--version`.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of polling a process and the stop flag.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl ServerProcess {
    /// Starts `program` with these arguments and waits until it logs its address. Environment variables that
    /// configure a server are removed, so that only the scenario configures it. Fails if the process exits,
    /// does not listen within `patience`, or the run is stopped.
    pub fn start(
        program: &Path,
        args: &[String],
        patience: Duration,
        progress: &Progress,
    ) -> Result<ServerProcess> {
        ServerProcess::start_with(program, args, &[], patience, progress)
    }

    /// Starts `program` as [`ServerProcess::start`] does, with these environment variables.
    pub fn start_with(
        program: &Path,
        args: &[String],
        variables: &[(&str, &str)],
        patience: Duration,
        progress: &Progress,
    ) -> Result<ServerProcess> {
        let mut child = clean_command(program)
            .args(args)
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let stderr = child.stderr.take().expect("the stream is piped");
        let (log, (found, url)) = (Log::default(), channel());
        log.clone().read_from(stderr, found);
        // From here on, dropping `server` ends the child.
        let mut server = ServerProcess { child, url: String::new(), log, shutdown_timeout: SHUTDOWN_TIMEOUT };
        server.url = server.wait_for(&url, patience, progress)?;
        Ok(server)
    }

    fn wait_for(
        &mut self,
        url: &Receiver<String>,
        patience: Duration,
        progress: &Progress,
    ) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            match url.recv_timeout(POLL_INTERVAL) {
                Ok(url) => return Ok(url),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = wait_for_exit(&mut self.child, SHUTDOWN_TIMEOUT)?
                        .context("the server closed its log")?;
                    bail!("the server ended with {status} before it was listening{}", self.log);
                }
                Err(RecvTimeoutError::Timeout) => {
                    ensure!(
                        !progress.stop.load(Ordering::Relaxed),
                        "interrupted while the server was starting"
                    );
                    ensure!(
                        Instant::now() < deadline,
                        "the server is not listening after {patience:?}{}",
                        self.log
                    );
                }
            }
        }
    }

    /// Returns the number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the signal to drain and to exit.
    pub fn terminate(&mut self) -> Result<()> {
        // An exited process has been reaped, and its number may have been reused.
        self.check()?;
        let process = Pid::from_raw(self.child.id() as i32);
        kill(process, Signal::SIGTERM).context("cannot send a signal to the server")
    }

    /// Waits until the server has exited with 0. Fails if it exits with another code, or not within
    /// `patience`.
    pub fn wait_for_success(&mut self, patience: Duration) -> Result<()> {
        match wait_for_exit(&mut self.child, patience)? {
            Some(status) => ensure!(status.success(), "the server ended with {status}{}", self.log),
            None => bail!("the server has not ended after {patience:?}{}", self.log),
        }
        Ok(())
    }

    /// Fails if the server process has exited.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait().context("cannot get the status of the server process")? {
            Some(status) => bail!("the server ended with {status}{}", self.log),
            None => Ok(()),
        }
    }
}

impl Drop for ServerProcess {
    /// Terminates the server; kills it if it does not exit in time.
    fn drop(&mut self) {
        // An exited process has been reaped, and its pid may have been reused.
        if let Ok(Some(_)) = self.child.try_wait() {
            return;
        }
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        if !matches!(wait_for_exit(&mut self.child, self.shutdown_timeout), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Log {
    /// Reads the server's log on a separate thread and sends the address once.
    fn read_from(self, stderr: ChildStderr, found: Sender<String>) {
        thread::spawn(move || {
            let mut found = Some(found);
            let mut reader = BufReader::new(stderr);
            let mut line = Vec::new();
            while reader.by_ref().take(1 << 16).read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if let (Some(url), Some(found)) = (parse_address(&text), &found) {
                    // The receiver may have given up after its timeout.
                    let _ = found.send(url);
                }
                if parse_address(&text).is_some() {
                    found = None;
                }
                self.push(text);
                line.clear();
            }
        });
    }

    fn push(&self, line: String) {
        let mut lines = self.0.lock().expect("no thread panics while it holds the log");
        if lines.len() == LINES_SHOWN {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

impl std::fmt::Display for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines = self.0.lock().expect("no thread panics while it holds the log");
        match lines.is_empty() {
            true => f.write_str("; it logged nothing"),
            false => lines.iter().try_fold((), |(), line| write!(f, "\n  {line}")),
        }
    }
}

/// Extracts the address from the log line that announces it.
fn parse_address(line: &str) -> Option<String> {
    let (_, rest) = line.split_once(LISTENING)?;
    let url = rest.split([' ', '"', '\u{1b}']).next()?;
    (url.starts_with("http://") || url.starts_with("https://")).then(|| url.to_owned())
}

/// Returns the version that the program prints.
pub fn version(program: &Path) -> Result<String> {
    let name = || format!("cannot get the version of {}", program.display());
    let mut child =
        clean_command(program).arg("--version").stdout(Stdio::piped()).spawn().with_context(name)?;
    let status = wait_for_exit(&mut child, VERSION_TIMEOUT).with_context(name)?;
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        bail!("{} does not print its version", program.display());
    };
    let mut output = String::new();
    let stdout = child.stdout.take().expect("the stream is piped");
    stdout.take(1000).read_to_string(&mut output).with_context(name)?;
    ensure!(status.success(), "{} --version ended with {status}", program.display());
    Ok(output.lines().next().unwrap_or("").trim().to_owned())
}

/// Creates a command with null standard streams and without `MAINSTEM_*` environment variables.
fn clean_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"MAINSTEM_") {
            command.env_remove(name);
        }
    }
    command
}

/// Waits up to `patience` for a process to exit. Returns `None` if it has not.
fn wait_for_exit(child: &mut Child, patience: Duration) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + patience;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() >= deadline => return Ok(None),
            None => thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A script that acts as the server; removed on drop.
    struct Script(PathBuf);

    impl Script {
        fn new(name: &str, text: &str) -> Script {
            let path = std::env::temp_dir().join(format!("load-tests-{}-{name}", std::process::id()));
            std::fs::write(&path, text).unwrap();
            Script(path)
        }

        /// Runs the script through the shell: executing a file that was just written can fail, because a
        /// child of another test may still hold it open for writing.
        fn start(&self, patience: Duration) -> Result<ServerProcess> {
            let args = [self.0.display().to_string(), "serve".into(), "model".into()];
            ServerProcess::start(Path::new("/bin/sh"), &args, patience, &Progress::default())
        }
    }

    impl Drop for Script {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    fn is_alive(pid: i32) -> bool {
        kill(Pid::from_raw(pid), None).is_ok()
    }

    #[test]
    fn a_server_is_found_and_ends_when_it_is_dropped() {
        let script = Script::new(
            "listens",
            "echo loading $1 $2 >&2\necho 'INFO x: listening on http://127.0.0.1:4711 for all' >&2\n\
             while :; do echo noise noise noise >&2; sleep 0.01; done\n",
        );
        let mut server = script.start(PATIENCE).unwrap();
        assert_eq!(server.url, "http://127.0.0.1:4711");
        server.check().unwrap();
        let pid = server.child.id() as i32;
        assert!(is_alive(pid));
        drop(server);
        assert!(!is_alive(pid));
    }

    /// The script writes more than a pipe holds before and after it listens, so it would block if the log
    /// were not read.
    #[test]
    fn a_long_log_holds_nobody_up() {
        let script = Script::new(
            "talks",
            "seq 1 50000 >&2\necho 'listening on http://h:1' >&2\nseq 1 50000 >&2\nexit 7\n",
        );
        let mut server = script.start(PATIENCE).unwrap();
        let status = wait_for_exit(&mut server.child, PATIENCE).unwrap().expect("it ends");
        assert_eq!(status.code(), Some(7));
        let error = server.check().unwrap_err().to_string();
        assert!(error.contains("the server ended with exit status: 7"), "{error}");
    }

    #[test]
    fn a_server_that_ends_is_reported_with_its_last_output() {
        let script = Script::new("ends", "echo first >&2\necho 'error: no such model' >&2\nexit 3\n");
        let error = script.start(PATIENCE).err().expect("it ended").to_string();
        assert!(
            error.contains("exit status: 3") && error.ends_with("\n  first\n  error: no such model"),
            "{error}"
        );
        let error = ServerProcess::start(Path::new("/no/such/program"), &[], PATIENCE, &Progress::default());
        assert!(error.err().expect("there is none").to_string().contains("cannot start /no/such/program"));
    }

    #[test]
    fn a_server_that_never_listens_is_given_up_and_ended() {
        let script = Script::new("silent", "echo $$ >&2\nexec sleep 1000\n");
        let error = script.start(Duration::from_secs(5)).err().expect("it says nothing").to_string();
        let (message, pid) = error.split_once('\n').expect("its number");
        assert_eq!(message, "the server is not listening after 5s");
        assert!(!is_alive(pid.trim().parse().unwrap()));
    }

    #[test]
    fn a_server_that_will_not_end_is_killed() {
        let script =
            Script::new("stays", "trap '' TERM\necho 'listening on http://h:1' >&2\nexec sleep 1000\n");
        let mut server = script.start(PATIENCE).unwrap();
        server.shutdown_timeout = Duration::from_millis(100);
        let pid = server.child.id() as i32;
        drop(server);
        assert!(!is_alive(pid));
    }

    #[test]
    fn an_interrupt_does_not_wait_for_a_server() {
        let script = Script::new("slow", "exec sleep 1000\n");
        let progress = Progress::default();
        progress.stop.store(true, Ordering::Relaxed);
        let args = [script.0.display().to_string()];
        let error = ServerProcess::start(Path::new("/bin/sh"), &args, PATIENCE, &progress)
            .err()
            .expect("it is stopped");
        assert!(error.to_string().contains("interrupted"), "{error}");
    }

    #[test]
    fn addresses_are_found_in_text_and_in_json() {
        for (line, url) in [
            ("2026 INFO listening on http://127.0.0.1:80", Some("http://127.0.0.1:80")),
            ("{\"message\":\"listening on https://[::1]:8443\",\"x\":1}", Some("https://[::1]:8443")),
            ("listening on stdin", None),
            ("nothing", None),
        ] {
            assert_eq!(parse_address(line).as_deref(), url, "{line}");
        }
    }

    #[test]
    fn a_version_is_its_first_line() {
        let echo = version(Path::new("/bin/echo")).unwrap();
        assert!(echo.contains("echo") || echo == "--version", "{echo}");
        assert!(
            version(Path::new("/bin/false")).unwrap_err().to_string().contains("ended with exit status: 1")
        );
    }
}
