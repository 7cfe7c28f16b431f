//! Reading of prompt and trace files: bounded whole-file reads, and JSON lines.
//!
//! Invariant: an error in a file's content is reported with its line, and no content causes a panic.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;

/// Maximum size of a file in bytes.
const BYTES_MAX: u64 = 1 << 30;

/// Reads the text of `file` without a byte order mark. Errors do not name the file.
pub(super) fn read_text(file: &Path) -> anyhow::Result<String> {
    text_within(File::open(file).context("cannot be opened")?, BYTES_MAX)
}

/// Reads at most `bytes_max` bytes, because the size of a pipe or a device is not known in advance.
fn text_within(source: impl Read, bytes_max: u64) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    source.take(bytes_max + 1).read_to_end(&mut bytes).context("cannot be read")?;
    ensure!(bytes.len() as u64 <= bytes_max, "is larger than {bytes_max} bytes");
    if bytes.starts_with("\u{feff}".as_bytes()) {
        bytes.drain(..3);
    }
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        anyhow!("line {line}: not UTF-8")
    })
}

/// Parses each non-empty line as a JSON value. Returns it with the line number.
pub(super) fn json_lines(content: &str) -> impl Iterator<Item = anyhow::Result<(usize, Value)>> {
    let lines = content.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    lines.filter(|(_, line)| !line.is_empty()).map(|(number, line)| {
        let value = serde_json::from_str(line).map_err(|error| {
            // serde_json counts lines from the start of the text that it parses.
            let place = format!(" at line {} column {}", error.line(), error.column());
            let message = error.to_string();
            let message = message.strip_suffix(&place).unwrap_or(&message);
            anyhow!("line {number}, column {}: {message}", error.column())
        })?;
        Ok((number, value))
    })
}

/// A file written by a test, removed on drop.
#[cfg(test)]
pub(super) struct TempFile(std::path::PathBuf);

#[cfg(test)]
impl TempFile {
    /// Writes the file. `name` must be unique among the tests.
    pub fn new(name: &str, content: impl AsRef<[u8]>) -> Self {
        let path = std::env::temp_dir().join(format!("mainstem-load-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

#[cfg(test)]
impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_text<T: std::fmt::Debug>(result: anyhow::Result<T>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn the_bound_is_the_last_length_that_is_read() {
        assert_eq!(text_within(&b"four"[..], 4).unwrap(), "four");
        assert_eq!(error_text(text_within(&b"fives"[..], 4)), "is larger than 4 bytes");
        // An endless source.
        assert_eq!(error_text(text_within(std::io::repeat(b'a'), 9)), "is larger than 9 bytes");
    }

    #[test]
    fn a_byte_order_mark_is_no_content_and_what_is_not_utf8_is_reported_by_line() {
        assert_eq!(text_within("\u{feff}a\u{feff}".as_bytes(), 99).unwrap(), "a\u{feff}");
        assert_eq!(error_text(text_within(&b"a\nb\n\xffc\n"[..], 99)), "line 3: not UTF-8");
        assert!(error_text(read_text(Path::new("/nowhere/to/be/found"))).starts_with("cannot be opened"));
        assert!(error_text(read_text(&std::env::temp_dir())).starts_with("cannot be"));
    }

    #[test]
    fn lines_of_json_keep_their_numbers() {
        let values: Vec<_> = json_lines("{}\r\n\n 7 \n").map(Result::unwrap).collect();
        assert_eq!(values, [(1, serde_json::json!({})), (3, serde_json::json!(7))]);
        let deep = format!("1\n{}", "[".repeat(100_000));
        for (content, expected) in [
            ("1\n\n{\"a\": }", "line 3, column 7: expected value"),
            ("1\n{\"a\": 1e999}", "line 2, column 11: number out of range"),
            ("1\n{} {}", "line 2, column 4: trailing characters"),
            (deep.as_str(), "line 2, column 128: recursion limit exceeded"),
        ] {
            assert_eq!(error_text(json_lines(content).collect::<Result<Vec<_>, _>>()), expected);
        }
    }
}
