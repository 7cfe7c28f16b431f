//! The answers of a batch job: a file with a line per answered request, which is also the record of what is
//! done.
//!
//! Invariant: a request is answered once its line is written whole, line feed included. No byte of a whole
//! line is ever changed, and only one process writes the file.

use super::input::Input;
use crate::server::access::RequestId;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The beginning of each line that is written.
const LINE_START: &str = "{\"id\":\"batch_req_";

/// Maximum length of a line in bytes; no response is so long.
const LINE_MAX: u64 = 1 << 30;

/// The open output file of a job, locked against other jobs.
pub struct Record {
    file: File,
    path: PathBuf,
    /// Length of its whole lines in bytes.
    length: u64,
    /// Whether each request is answered, by its index.
    answered: Vec<bool>,
    /// Number of answers that the file had when it was opened.
    pub before: AnswerCounts,
}

/// Numbers of answered requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerCounts {
    /// With status 200.
    pub ok: usize,
    /// With any other status.
    pub failed: usize,
}

impl AnswerCounts {
    /// Counts an answer.
    pub fn add(&mut self, status: u16) {
        match status {
            200 => self.ok += 1,
            _ => self.failed += 1,
        }
    }

    /// Returns the number of all answers.
    pub fn all(self) -> usize {
        self.ok + self.failed
    }
}

/// The answer to a request, whose body is JSON on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchAnswer {
    /// Id of the request in the API, which differs from run to run.
    pub request_id: String,
    pub custom_id: String,
    /// HTTP status.
    pub status: u16,
    pub body: Vec<u8>,
}

/// A line, as far as it is read when a job resumes.
#[derive(Deserialize)]
struct RecordedLine {
    custom_id: String,
    /// Null for a request that was not run, but never absent.
    #[serde(deserialize_with = "Option::deserialize")]
    response: Option<RecordedResponse>,
}

#[derive(Deserialize)]
struct RecordedResponse {
    status_code: u16,
}

impl BatchAnswer {
    /// Returns the line of the output, with its line feed.
    pub fn line(&self) -> Vec<u8> {
        let BatchAnswer { request_id, custom_id, status, body } = self;
        let id = json(custom_id);
        let mut line = format!(
            "{LINE_START}{request_id}\",\"custom_id\":{id},\"response\":{{\"status_code\":{status},\
             \"request_id\":\"{request_id}\",\"body\":"
        )
        .into_bytes();
        line.extend_from_slice(body);
        line.extend_from_slice(b"},\"error\":null}\n");
        line
    }
}

fn json(text: &impl Serialize) -> String {
    serde_json::to_string(text).expect("a text is JSON; this is a bug")
}

impl Record {
    /// Opens or creates the output file of a job, locks it, and reads which requests of `input` are answered.
    /// A last line that was not written whole is removed. Fails, without changing the file, if another job
    /// writes it, or if it has a line that is not an answer to a request of `input`, or is the second one.
    pub fn open(path: &Path, input_path: &Path, input: &Input) -> Result<Record> {
        let cannot_open = || format!("cannot open {}", path.display());
        let existed = path.exists();
        let (answered, before) = (vec![false; input.count()], AnswerCounts::default());
        let mut record = loop {
            let file = OpenOptions::new().read(true).append(true).create(true).open(path);
            let file = file.with_context(cannot_open)?;
            let metadata = file.metadata().with_context(cannot_open)?;
            ensure!(metadata.is_file(), "{} is not a regular file", path.display());
            let requests = input_path.metadata().with_context(|| input_path.display().to_string())?;
            ensure!(!is_same(&metadata, &requests), "{} is both the input and the output", path.display());
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => bail!("another job is writing {}", path.display()),
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
            let (answered, path) = (answered.clone(), path.to_owned());
            let record = Record { file, path, length: 0, answered, before };
            // Another job may have ended, and its output been moved away, since it was opened.
            if record.check_place().is_ok() {
                break record;
            }
        };
        if !existed {
            sync_folder(path);
        }
        record.read_lines(input)?;
        // Only now does nobody else write it.
        let length = record.file.metadata().with_context(cannot_open)?.len();
        if record.length < length {
            record.file.set_len(record.length).with_context(|| record.cannot_write())?;
        }
        Ok(record)
    }

    /// Reads the lines of the file, up to a last one that is torn.
    fn read_lines(&mut self, input: &Input) -> Result<()> {
        let name = self.path.display().to_string();
        let mut reader = BufReader::new(self.file.try_clone()?);
        let (mut line, mut number) = (Vec::new(), 0u64);
        loop {
            line.clear();
            number += 1;
            let read = (&mut reader).take(LINE_MAX).read_until(b'\n', &mut line);
            let bytes = read.with_context(|| format!("cannot read {name}"))?;
            if bytes == 0 {
                return Ok(());
            }
            let is_whole = line.ends_with(b"\n");
            ensure!(is_whole || (bytes as u64) < LINE_MAX, "{name}:{number}: the line is too long");
            let parsed = serde_json::from_slice(&line);
            match parsed {
                _ if is_whole && line.trim_ascii().is_empty() => {}
                Ok(recorded) if is_whole => {
                    self.add(&recorded, input).with_context(|| format!("{name}:{number}"))?;
                }
                _ if is_torn(&line, self.length > 0) && reader.fill_buf()?.is_empty() => return Ok(()),
                Ok(_) => bail!("{name}:{number}: the line does not end, and is not of a batch job"),
                Err(error) => {
                    let whole = self.length;
                    bail!("{name}:{number}: not an answer of a batch job ({whole} bytes precede it): {error}")
                }
            }
            self.length += bytes as u64;
        }
    }

    fn add(&mut self, recorded: &RecordedLine, input: &Input) -> Result<()> {
        let id = &recorded.custom_id;
        let index = input.index_of(id).with_context(|| {
            format!("no request of the input has the custom_id {id:?}; is this the output of another job?")
        })?;
        let is_second = std::mem::replace(&mut self.answered[index], true);
        ensure!(!is_second, "a second answer to the request {id:?}");
        self.before.add(recorded.response.as_ref().map_or(0, |response| response.status_code));
        Ok(())
    }

    /// Returns whether the request at `index` was answered when the file was opened.
    pub fn is_answered(&self, index: usize) -> bool {
        self.answered[index]
    }

    /// Appends an answer. If it cannot be written whole, the file stays as it was, as far as possible.
    pub fn append(&mut self, answer: &BatchAnswer) -> Result<()> {
        self.append_line(&answer.line())
    }

    /// Appends the line of a request that was not run, with the code and the message of the reason.
    pub fn append_unrun(&mut self, custom_id: &str, code: &str, message: &str) -> Result<()> {
        let (id, custom_id) = (RequestId::generate().0, json(&custom_id));
        let error = json(&serde_json::json!({"code": code, "message": message}));
        let line =
            format!("{LINE_START}{id}\",\"custom_id\":{custom_id},\"response\":null,\"error\":{error}}}\n");
        self.append_line(line.as_bytes())
    }

    /// Returns the length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.length
    }

    fn append_line(&mut self, line: &[u8]) -> Result<()> {
        // One call writes it, unless the disk is full: then the next one returns the error.
        if let Err(error) = self.file.write_all(line) {
            // What cannot be removed is removed when the job resumes.
            _ = self.file.set_len(self.length);
            return Err(error).with_context(|| self.cannot_write());
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Fails if the file has been removed or replaced: nobody would find the answers.
    pub fn check_place(&self) -> Result<()> {
        let is_there = match (self.path.metadata(), self.file.metadata()) {
            (Ok(named), Ok(open)) => is_same(&named, &open),
            (_, Err(_)) => true,
            (Err(error), _) => error.kind() != ErrorKind::NotFound,
        };
        ensure!(is_there, "{} has been removed or replaced by another program", self.path.display());
        Ok(())
    }

    /// Returns a function that blocks until everything written so far is on the disk.
    pub fn syncing(&self) -> Result<impl FnOnce() -> Result<()> + Send + 'static> {
        let (file, what) = (self.file.try_clone().with_context(|| self.cannot_write())?, self.cannot_write());
        Ok(move || match file.sync_data() {
            // Some file systems have no such operation.
            Err(error) if error.kind() != ErrorKind::InvalidInput => Err(error).context(what),
            _ => Ok(()),
        })
    }

    fn cannot_write(&self) -> String {
        format!("cannot write {}", self.path.display())
    }
}

impl Drop for Record {
    /// Releases the lock at once: a process that is just being started, or a clone that is being written to
    /// the disk, has the same open file.
    fn drop(&mut self) {
        _ = self.file.unlock();
    }
}

/// Returns whether a last line may be the part of an answer that was written before the job was killed or the
/// machine failed, which may leave zeros: only zeros behind other answers.
fn is_torn(line: &[u8], has_answers: bool) -> bool {
    let zeros = line.iter().rev().take_while(|byte| matches!(byte, 0 | b'\n')).count();
    let (written, start) = (&line[..line.len() - zeros], LINE_START.as_bytes());
    (has_answers || !written.is_empty()) && (written.starts_with(start) || start.starts_with(written))
}

/// Returns whether both are of the same file.
fn is_same(file: &Metadata, other: &Metadata) -> bool {
    (file.dev(), file.ino()) == (other.dev(), other.ino())
}

/// Writes the entry of a new file to the disk, if the file system can. Losing it loses only work.
fn sync_folder(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    _ = File::open(folder).and_then(|folder| folder.sync_all());
}

#[cfg(test)]
mod tests {
    use super::super::input::InputRules;
    use super::super::input::tests::{RULES, line};
    use super::*;
    use crate::testing::Scratch;
    use serde_json::{Value, json};

    /// A folder with an input of the requests a, b and "c\n", and an output.
    struct Files(Scratch);

    impl Files {
        fn new() -> Files {
            let files = Files(Scratch::new());
            let lines = ["a", "b", "c\n"].map(|id| line(id, &json!({})));
            std::fs::write(files.input(), lines.join("\n")).unwrap();
            files
        }

        fn input(&self) -> PathBuf {
            self.0.path().join("in.jsonl")
        }

        fn output(&self) -> PathBuf {
            self.0.path().join("out.jsonl")
        }

        fn open(&self) -> Result<Record> {
            let input = Input::open(&self.input(), &InputRules { body_limit: 1000, ..RULES })?;
            Record::open(&self.output(), &self.input(), &input)
        }

        /// Opens an output with these bytes. Asserts that a refused one is not changed.
        fn open_with(&self, text: &[u8]) -> Result<Record> {
            std::fs::write(self.output(), text).unwrap();
            let record = self.open();
            assert!(record.is_ok() || self.written() == text);
            record
        }

        fn written(&self) -> Vec<u8> {
            std::fs::read(self.output()).unwrap()
        }
    }

    fn answer(custom_id: &str, status: u16) -> BatchAnswer {
        let body = json!({"text": "line\nline"}).to_string().into_bytes();
        BatchAnswer { request_id: "7f".to_owned(), custom_id: custom_id.to_owned(), status, body }
    }

    #[test]
    fn a_line_is_in_the_format_of_the_batch_api() {
        let line = answer("c\n\"", 400).line();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let response = json!({"status_code": 400, "request_id": "7f", "body": {"text": "line\nline"}});
        let expected = json!({
            "id": "batch_req_7f", "custom_id": "c\n\"", "response": response, "error": null,
        });
        assert_eq!(serde_json::from_slice::<Value>(&line).unwrap(), expected);
    }

    #[test]
    fn what_was_appended_is_answered_when_the_file_is_opened_again() {
        let files = Files::new();
        let mut record = files.open().unwrap();
        assert_eq!(record.before, AnswerCounts::default());
        record.append(&answer("c\n", 200)).unwrap();
        record.append(&answer("a", 400)).unwrap();
        let sync = record.syncing().unwrap();
        let busy = files.open().err().unwrap().to_string();
        assert!(busy.starts_with("another job is writing"), "{busy}");
        drop(record);
        // Its lock does not last as long as a clone of the file.
        let record = files.open().unwrap();
        sync().unwrap();
        assert_eq!([0, 1, 2].map(|index| record.is_answered(index)), [true, false, true]);
        assert_eq!(record.before, AnswerCounts { ok: 1, failed: 1 });
    }

    #[test]
    fn a_request_that_was_not_run_counts_as_failed() {
        let files = Files::new();
        files.open().unwrap().append_unrun("a", "batch_expired", "too \"late\"").unwrap();
        let record = files.open().unwrap();
        assert!(record.is_answered(0) && record.before == AnswerCounts { ok: 0, failed: 1 });
        let line: Value = serde_json::from_slice(&files.written()).unwrap();
        let error = json!({"code": "batch_expired", "message": "too \"late\""});
        assert_eq!((&line["response"], &line["error"]), (&Value::Null, &error));
    }

    /// Cut at any byte, or with zeros after it, the last line is removed, and the lines before it stay.
    #[test]
    fn a_torn_last_line_is_cut_wherever_it_is_torn() {
        let (files, first, last) = (Files::new(), answer("a", 200).line(), answer("b", 200).line());
        for length in 0..=last.len() {
            for zeros in [0, 5] {
                let mut text = [&first, &last[..length], &vec![0; zeros]].concat();
                let mut record = files.open_with(&text).unwrap();
                let is_whole = length == last.len();
                let whole = first.len() + if is_whole { last.len() } else { 0 };
                text.truncate(whole);
                assert_eq!(files.written(), text, "{length}");
                assert_eq!([0, 1].map(|index| record.is_answered(index)), [true, is_whole]);
                record.append(&answer("c\n", 200)).unwrap();
                drop(record);
                assert_eq!(files.written(), [text, answer("c\n", 200).line()].concat());
            }
        }
        // A line that has its end, but not all of its bytes.
        let mut text = [&*first, b"{\"id\":\"batch_req_7f\0\0\0\0\n"].concat();
        files.open_with(&text).unwrap();
        text.truncate(first.len());
        assert_eq!(files.written(), text);
    }

    /// Regression: the answers of a job whose output was replaced were lost, and the job succeeded.
    #[test]
    fn an_output_that_is_removed_or_replaced_is_noticed() {
        let files = Files::new();
        let record = files.open().unwrap();
        assert!(record.check_place().is_ok());
        std::fs::remove_file(files.output()).unwrap();
        let error = record.check_place().unwrap_err().to_string();
        assert!(error.ends_with("out.jsonl has been removed or replaced by another program"), "{error}");
        std::fs::write(files.output(), "").unwrap();
        assert!(record.check_place().is_err());
        // A job of the new file is another one.
        assert!(files.open().unwrap().check_place().is_ok());
    }

    /// Nothing is cut from a file that is not the output of this job.
    #[test]
    fn other_files_are_refused_and_stay_as_they_are() {
        let (files, a) = (Files::new(), answer("a", 200).line());
        let torn = &a[..a.len() - 9];
        let no_line_feed = json!({"custom_id": "a", "response": {"status_code": 200}}).to_string();
        for (text, named) in [
            ([&a[..], &a].concat(), "out.jsonl:2: a second answer to the request \"a\""),
            ([&a[..], b"\n", &answer("d", 200).line()].concat(), "out.jsonl:3: no request of the input"),
            ([torn, b"\n", &a].concat(), "out.jsonl:1: not an answer of a batch job"),
            (line("a", &json!({})).into_bytes(), "out.jsonl:1: not an answer of a batch job"),
            ([&a[..], b"notes"].concat(), "out.jsonl:2: not an answer of a batch job"),
            (no_line_feed.into_bytes(), "out.jsonl:1: the line does not end"),
            (vec![0; 4096], "out.jsonl:1: not an answer of a batch job (0 bytes precede it)"),
        ] {
            let error = format!("{:#}", files.open_with(&text).err().unwrap());
            assert!(error.contains(named), "{error}");
        }
        std::fs::remove_file(files.output()).unwrap();
        std::fs::hard_link(files.input(), files.output()).unwrap();
        let error = files.open().err().unwrap().to_string();
        assert!(error.ends_with("is both the input and the output"), "{error}");
    }
}
