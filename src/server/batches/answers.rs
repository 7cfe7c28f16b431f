//! The answers of a batch that runs: those with status 200 in one file, errors in another one.
//!
//! Invariant: a request has a line in one of the files at most.

use super::folder::Folder;
use super::input::Input;
use super::job::Answers;
use super::output::{BatchAnswer, Record};
use super::wire::RequestCounts;
use super::{LiveBatch, output_ids};
use crate::telemetry;
use anyhow::Result;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const EXPIRED: (&str, &str) =
    ("batch_expired", "This request could not be executed before the completion window expired.");

/// The error of answers that are larger than what is left of the client's quota.
#[derive(Debug, thiserror::Error)]
#[error("the client's files, with the answers of the batch, take more than {0} bytes (batches.quota)")]
pub struct QuotaExceeded(u64);

/// The answers of a batch: those with status 200 in one file, errors in another one.
pub struct RunAnswers {
    output: Record,
    errors: Record,
    answered: Vec<bool>,
    /// Requests that failed for a reason that is not their own, since the last answer.
    failures: Vec<(usize, BatchAnswer, String)>,
    /// Maximum number of bytes of the client's files.
    quota: u64,
    live: Arc<LiveBatch>,
}

impl RunAnswers {
    /// Opens or creates the files of a batch with the requests `input`. The ids are those of the batch, and
    /// of the file of its requests. All files of the client may have `quota` bytes.
    pub fn open(
        folder: &Folder,
        [batch, input_file]: [&str; 2],
        input: &Input,
        quota: u64,
        live: Arc<LiveBatch>,
    ) -> Result<RunAnswers> {
        let input_path = folder.content(input_file);
        let open = |id: String| {
            folder.create_content(&id)?;
            Record::open(&folder.content(&id), &input_path, input)
        };
        let [output, errors] = output_ids(batch);
        let (output, errors) = (open(output)?, open(errors)?);
        let is_answered = |index| output.is_answered(index) || errors.is_answered(index);
        let answered: Vec<bool> = (0..input.count()).map(is_answered).collect();
        let answers = RunAnswers { output, errors, answered, failures: Vec::new(), quota, live };
        let [completed, failed] = answers.counts_before();
        answers.live.total.store(input.count() as u64, Ordering::Relaxed);
        answers.live.completed.store(completed, Ordering::Relaxed);
        answers.live.failed.store(failed, Ordering::Relaxed);
        answers.count_bytes();
        Ok(answers)
    }

    /// Returns the numbers of answers with status 200 and of others when the files were opened.
    fn counts_before(&self) -> [u64; 2] {
        let (output, errors) = (self.output.before, self.errors.before);
        [output.ok + errors.ok, output.failed + errors.failed].map(|count| count as u64)
    }

    /// Returns the number of answers.
    pub fn done(&self) -> usize {
        self.answered.iter().filter(|is_answered| **is_answered).count()
    }

    /// Records an answer. Fails if the client's files take more than its quota then.
    fn record(&mut self, index: usize, answer: &BatchAnswer) -> Result<()> {
        let (record, count, outcome) = match answer.status {
            200 => (&mut self.output, &self.live.completed, "ok"),
            _ => (&mut self.errors, &self.live.failed, "failed"),
        };
        record.append(answer)?;
        count.fetch_add(1, Ordering::Relaxed);
        telemetry::BATCH_REQUESTS.count([outcome]);
        self.answered[index] = true;
        if self.count_bytes().saturating_add(self.live.used.load(Ordering::Relaxed)) > self.quota {
            return Err(QuotaExceeded(self.quota).into());
        }
        Ok(())
    }

    /// Counts the bytes of the answers for the client's quota, and returns them.
    fn count_bytes(&self) -> u64 {
        let bytes = self.bytes().iter().sum();
        self.live.bytes.store(bytes, Ordering::Relaxed);
        bytes
    }

    /// Records the errors of the requests that have failed: since others are answered, it is theirs.
    pub fn record_failures(&mut self) -> Result<()> {
        take(&mut self.failures).iter().try_for_each(|(index, answer, _)| self.record(*index, answer))
    }

    /// Returns whether requests have failed since the last answer.
    pub fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    /// Lets the requests that have failed be sent again. Returns the reason of the first failure.
    pub fn forget_failures(&mut self) -> String {
        take(&mut self.failures).into_iter().next().map(|(.., reason)| reason).unwrap_or_default()
    }

    /// Returns the sizes of the files in bytes.
    pub fn bytes(&self) -> [u64; 2] {
        [self.output.bytes(), self.errors.bytes()]
    }

    /// Records all requests of `unrun` without an answer as expired, and blocks until everything is on the
    /// disk. Returns the numbers of requests, and the sizes of the files.
    pub fn finish(mut self, unrun: Option<Arc<Input>>) -> Result<(RequestCounts, [u64; 2])> {
        let unanswered = (0..self.answered.len()).filter(|index| !self.answered[*index]);
        for (input, index) in
            unrun.iter().flat_map(|input| unanswered.clone().map(move |index| (input, index)))
        {
            let (code, message) = EXPIRED;
            self.errors.append_unrun(&input.read(index)?.custom_id, code, message)?;
            self.live.failed.fetch_add(1, Ordering::Relaxed);
            telemetry::BATCH_REQUESTS.count(["expired"]);
        }
        self.output.syncing()?()?;
        self.errors.syncing()?()?;
        Ok((self.live.counts(), self.bytes()))
    }
}

impl Answers for RunAnswers {
    fn is_answered(&self, index: usize) -> bool {
        self.answered[index]
    }

    fn add(&mut self, index: usize, answer: &BatchAnswer, _: Option<String>) -> Result<()> {
        self.record_failures()?;
        self.record(index, answer)
    }

    fn add_failure(&mut self, index: usize, answer: &BatchAnswer, reason: String) -> Result<()> {
        self.failures.push((index, answer.clone(), reason));
        Ok(())
    }

    fn sync(&mut self) -> Result<Box<dyn FnOnce() -> Result<()> + Send>> {
        self.output.check_place()?;
        self.errors.check_place()?;
        let (output, errors) = (self.output.syncing()?, self.errors.syncing()?);
        Ok(Box::new(|| {
            output()?;
            errors()
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::input::tests::{RULES, line};
    use super::*;
    use crate::server::auth::Owner;
    use crate::testing::Scratch;
    use serde_json::json;

    /// A folder with a batch of three requests.
    struct Files {
        _scratch: Scratch,
        folder: Folder,
        input: Arc<Input>,
    }

    impl Files {
        fn new() -> Files {
            let scratch = Scratch::new();
            let folder = Folder::open(scratch.path()).unwrap();
            std::fs::write(
                folder.content("file-1"),
                ["a", "b", "c"].map(|id| line(id, &json!({}))).join("\n"),
            )
            .unwrap();
            let input = Arc::new(Input::open(&folder.content("file-1"), &RULES).unwrap());
            Files { _scratch: scratch, folder, input }
        }

        fn open(&self) -> RunAnswers {
            let live = Arc::new(LiveBatch::new(Owner::default(), RequestCounts::default()));
            RunAnswers::open(&self.folder, ["batch_1", "file-1"], &self.input, 1000, live).unwrap()
        }
    }

    fn answer(custom_id: &str, status: u16) -> BatchAnswer {
        let (request_id, custom_id) = ("7f".to_owned(), custom_id.to_owned());
        BatchAnswer { request_id, custom_id, status, body: b"{}".to_vec() }
    }

    fn counts(completed: u64, failed: u64) -> RequestCounts {
        RequestCounts { total: 3, completed, failed }
    }

    /// A failure is that of the request only if others are answered after it.
    #[test]
    fn failures_are_recorded_with_the_next_answer() {
        let files = Files::new();
        let mut answers = files.open();
        answers.add_failure(1, &answer("b", 500), "status 500: gone".to_owned()).unwrap();
        assert_eq!((answers.has_failures(), answers.is_answered(1), answers.done()), (true, false, 0));
        assert_eq!(answers.forget_failures(), "status 500: gone");
        answers.add(0, &answer("a", 200), None).unwrap();
        assert_eq!((answers.done(), answers.live.counts()), (1, counts(1, 0)));
        answers.add_failure(1, &answer("b", 500), String::new()).unwrap();
        answers.add(2, &answer("c", 400), None).unwrap();
        assert_eq!((answers.done(), answers.live.counts()), (3, counts(1, 2)));
        let bytes = answers.bytes();
        drop(answers);
        let answers = files.open();
        assert_eq!((answers.done(), answers.live.counts(), answers.bytes()), (3, counts(1, 2), bytes));
    }

    #[test]
    fn what_was_not_run_in_time_is_recorded_once() {
        let files = Files::new();
        let mut answers = files.open();
        answers.add(1, &answer("b", 200), None).unwrap();
        answers.add_failure(2, &answer("c", 500), String::new()).unwrap();
        let ended = answers.finish(Some(files.input.clone())).unwrap();
        assert_eq!(ended.0, counts(1, 2));
        // The end of the process came before that of the batch.
        let again = files.open().finish(Some(files.input.clone())).unwrap();
        assert_eq!(again, ended);
    }

    #[test]
    fn answers_beyond_the_quota_are_an_error() {
        let files = Files::new();
        let line = answer("a", 200).line().len() as u64;
        let mut answers = files.open();
        answers.live.used.store(1000 - 2 * line, Ordering::Relaxed);
        answers.add(0, &answer("a", 200), None).unwrap();
        answers.add(1, &answer("b", 200), None).unwrap();
        let error = answers.add(2, &answer("c", 200), None).unwrap_err();
        assert_eq!(error.downcast_ref::<QuotaExceeded>().map(|error| error.0), Some(1000));
        assert!(error.to_string().contains("1000 bytes (batches.quota)"), "{error}");
        assert_eq!(answers.live.bytes.load(Ordering::Relaxed), 3 * line);
    }
}
