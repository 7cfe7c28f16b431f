//! One batch, from the check of its requests to the files of its answers.
//!
//! Invariant: a batch ends in one transaction, with its files. What happens before can be repeated: the
//! requests that the files of answers have are not run again.

use super::answers::{QuotaExceeded, RunAnswers};
use super::exclusion::Exclusion;
use super::input::{Input, InputRules};
use super::job::{BatchApi, FAILURES_TOGETHER, Job, JobEnd, Retries};
use super::tables::{self, BatchRow, FileRow};
use super::wire::{BatchObject, BatchStatus, Purpose};
use super::{Batches, LiveBatch, StopReason, blocking, is_disk_full, lock, now, output_ids};
use crate::request::client::{ClientId, ClientSettings};
use crate::request::{Class, Client};
use crate::server::auth::{Keys, Owner};
use crate::server::body::INLINE_BYTES;
use crate::server::error::ApiError;
use crate::server::turns::Share;
use crate::server::{App, LocalApi, ResponseBody};
use actix_web::web::{Bytes, Data};
use anyhow::{Context, Result, ensure};
use futures_util::future::{LocalBoxFuture, pending};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::select;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// A request that fails because of a device is sent again; the device is rebuilt meanwhile. Others share the
/// device: one that failed alone is not sent again.
const RETRIES: Retries =
    Retries { attempts: FAILURES_TOGETHER + 1, pause: Duration::from_millis(500), is_shared: true };

/// Time after which a batch goes on whose requests all failed, and the number of times in succession that
/// they do until the batch fails.
const FAILED_PAUSE: Duration = Duration::from_secs(30);
const FAILED_ROUNDS: usize = 4;

/// Time after which the end of a batch is written again that could not be written.
const STORAGE_PAUSE: Duration = Duration::from_secs(10);

/// Time after which the size of the client's files is read again, which share its quota with the answers.
const QUOTA_TIME: Duration = Duration::from_secs(5);

/// Longest time without a look at the clock, which may be set.
const CLOCK_STEP: Duration = Duration::from_secs(60);

/// State that the runs of all batches share.
pub struct RunContext {
    pub batches: Arc<Batches>,
    /// The server's state, for requests without a time limit.
    pub app: Arc<App>,
    pub keys: Data<Keys>,
    /// Set to true when the batches are to stop.
    pub halt: watch::Receiver<bool>,
    /// The exclusion of [`Job`]: the requests of all batches run on the same device.
    pub exclusion: Exclusion,
}

/// A batch that runs.
struct Run<'a> {
    cx: &'a RunContext,
    owner: Owner,
    object: BatchObject,
    output_lifetime: Option<i64>,
    live: Arc<LiveBatch>,
}

/// Runs a batch until it has ended, or the server shuts down.
pub async fn run_batch(cx: &RunContext, row: BatchRow) {
    let BatchRow { owner, output_lifetime, object } = row;
    let live = Arc::new(LiveBatch::new(owner.clone(), object.request_counts));
    let id = object.id.clone();
    lock(&cx.batches.live).insert(id.clone(), live.clone());
    let mut run = Run { cx, owner, object, output_lifetime, live };
    let mut ended = run.run().await;
    while let Err(error) = ended {
        ended = run.fail(&error).await;
        // The pause is as long for a batch that is over.
        if ended.is_err() && timeout(STORAGE_PAUSE, run.is_halted()).await.is_ok() {
            break;
        }
    }
    lock(&cx.batches.live).remove(&id);
}

impl Run<'_> {
    /// Runs the batch. Fails if its files or the database cannot be read or written.
    async fn run(&mut self) -> Result<()> {
        // It may have been cancelled before it was known to run.
        self.update(|_| {}).await?;
        if self.object.status == BatchStatus::Cancelling {
            self.live.stop(StopReason::Cancelled);
            if self.object.in_progress_at.is_none() {
                return self.end(BatchStatus::Cancelled, [0, 0]).await;
            }
        }
        let Some(input) = self.read_input().await? else { return Ok(()) };
        let mut answers = self.open_answers(input.clone()).await?;
        info!(batch = self.object.id, requests = input.count(), answered = answers.done(), "batch runs");
        let status = match self.run_requests(&input, &mut answers).await {
            Ok(Some(status)) => status,
            Ok(None) => return blocking(move || answers.finish(None)).await.map(drop),
            Err(error) => {
                self.add_failure(&error);
                // What is recorded stays, as far as it is written.
                let bytes = answers.bytes();
                let finished = blocking(move || answers.finish(None)).await;
                let bytes = finished.map_or(bytes, |(_, bytes)| bytes);
                return self.end(BatchStatus::Failed, bytes).await;
            }
        };
        let unrun = (status == BatchStatus::Expired).then_some(input);
        let (counts, bytes) = blocking(move || answers.finish(unrun)).await?;
        self.object.request_counts = counts;
        self.end(status, bytes).await
    }

    /// Reads the requests. Checks them, and ends the batch if they have faults, unless that was done before.
    async fn read_input(&mut self) -> Result<Option<Arc<Input>>> {
        let is_new = self.object.status == BatchStatus::Validating;
        let (path, url) =
            (self.cx.batches.folder.content(&self.object.input_file_id), self.object.endpoint.clone());
        let (body_limit, requests_max) = match is_new {
            true => (self.cx.app.config.body_limit_bytes, self.cx.batches.config.max_requests),
            // The limits may have changed since.
            false => (usize::MAX / 2, usize::MAX),
        };
        let scan = move || Input::scan(&path, &InputRules { body_limit, requests_max, urls: &[&url] });
        let (input, faults) = blocking(scan).await?;
        if !is_new {
            ensure!(faults.listed.is_empty(), "the file of requests has changed");
            return Ok(Some(Arc::new(input)));
        }
        let mut errors = faults.listed;
        if errors.is_empty() && input.count() == 0 {
            errors.push((1, "the file has no requests".to_owned()));
        }
        if errors.is_empty() {
            let total = input.count() as u64;
            self.update(move |object| {
                object.request_counts.total = total;
                if object.status == BatchStatus::Validating {
                    object.set_status(BatchStatus::InProgress, now());
                }
            })
            .await?;
            return Ok(Some(Arc::new(input)));
        }
        for (line, message) in errors {
            self.object.add_error("invalid_request", Some(line), message);
        }
        if faults.unlisted > 0 {
            let message = format!("{} more lines are invalid", faults.unlisted);
            self.object.add_error("invalid_request", None, message);
        }
        self.end(BatchStatus::Failed, [0, 0]).await?;
        Ok(None)
    }

    /// Opens the files of answers.
    async fn open_answers(&self, input: Arc<Input>) -> Result<RunAnswers> {
        self.read_used_bytes().await?;
        let (batches, live, quota) =
            (self.cx.batches.clone(), self.live.clone(), self.cx.batches.config.quota_bytes);
        let (id, input_file) = (self.object.id.clone(), self.object.input_file_id.clone());
        blocking(move || RunAnswers::open(&batches.folder, [&id, &input_file], &input, quota, live)).await
    }

    /// Runs the requests that have no answer yet. Returns the status in which the batch ends; `None` if the
    /// server shuts down before.
    async fn run_requests(&mut self, input: &Input, answers: &mut RunAnswers) -> Result<Option<BatchStatus>> {
        let api = OwnerApi { cx: self.cx, owner: self.owner.clone(), live: self.live.clone() };
        let (width, sequences) =
            (self.cx.batches.config.requests_at_once, self.cx.app.parts.model.max_choices.max(1));
        let (mut rounds, mut done, exclusion) = (0, answers.done(), &self.cx.exclusion);
        loop {
            let mut job = Job { api: &api, input, answers, width, sequences, retries: RETRIES, exclusion };
            let interrupted = async {
                select! {
                    () = self.is_over() => {}
                    () = self.is_halted() => {}
                    () = self.watch_used_bytes() => {}
                }
            };
            match job.run(interrupted).await? {
                JobEnd::Halted => return Ok(None),
                _ if *self.cx.halt.borrow() => return Ok(None),
                // The engine has failed for good, and the batch goes on at the next start.
                JobEnd::Finished | JobEnd::GaveUp if self.has_engine_failed() && answers.has_failures() => {
                    answers.forget_failures();
                    if self.is_halted_within(FAILED_PAUSE).await {
                        return Ok(None);
                    }
                }
                JobEnd::Finished => {
                    answers.record_failures()?;
                    self.update(|object| {
                        if object.status == BatchStatus::InProgress {
                            object.set_status(BatchStatus::Finalizing, now());
                        }
                    })
                    .await?;
                    break;
                }
                JobEnd::Interrupted => {
                    self.update(|_| {}).await?;
                    break;
                }
                JobEnd::GaveUp => {
                    let reason = answers.forget_failures();
                    rounds = if answers.done() > done { 1 } else { rounds + 1 };
                    done = answers.done();
                    warn!(batch = self.object.id, reason, "all requests of the batch fail");
                    if rounds >= FAILED_ROUNDS {
                        self.object.add_error(
                            "requests_failed",
                            None,
                            format!("no request is answered: {reason}"),
                        );
                        return Ok(Some(BatchStatus::Failed));
                    }
                    if self.is_halted_within(FAILED_PAUSE).await {
                        return Ok(None);
                    }
                }
            }
        }
        let stop = *self.live.stop.borrow();
        Ok(Some(match stop {
            None if answers.done() == input.count() => BatchStatus::Completed,
            None => BatchStatus::Expired,
            Some(StopReason::Cancelled) => BatchStatus::Cancelled,
            Some(StopReason::KeyRevoked) => {
                let message = "the API key of this batch is not accepted any more";
                self.object.add_error("invalid_api_key", None, message.to_owned());
                BatchStatus::Cancelled
            }
        }))
    }

    /// Reads the number of bytes of the client's other files, with which its answers share the quota.
    async fn read_used_bytes(&self) -> Result<()> {
        let owner = self.owner.clone();
        let used = self.cx.batches.database.call(move |db| tables::used_bytes(db, &owner)).await?;
        self.live.used.store(used, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the number of bytes of the client's other files again and again, without end.
    async fn watch_used_bytes(&self) {
        loop {
            sleep(QUOTA_TIME).await;
            // A database that fails is noticed when the batch ends.
            _ = self.read_used_bytes().await;
        }
    }

    fn has_engine_failed(&self) -> bool {
        self.cx.app.parts.status.has_failed()
    }

    /// Completes when the batch is cancelled or has expired.
    fn is_over(&self) -> impl Future<Output = ()> + use<> {
        let (mut stop, expires_at) = (self.live.stop.subscribe(), self.object.expires_at);
        async move {
            let expired = async {
                while let Ok(left @ 1..) = u64::try_from(expires_at.saturating_sub(now())) {
                    sleep(Duration::from_secs(left).min(CLOCK_STEP)).await;
                }
            };
            select! {
                _ = stop.wait_for(Option::is_some) => {}
                () = expired => {}
            }
        }
    }

    /// Completes when the server shuts down.
    fn is_halted(&self) -> impl Future<Output = ()> + use<> {
        let mut halt = self.cx.halt.clone();
        async move { _ = halt.wait_for(|halt| *halt).await }
    }

    /// Waits for some time, unless the batch is over or the server shuts down before. Returns whether it
    /// does.
    async fn is_halted_within(&self, time: Duration) -> bool {
        select! {
            biased;
            () = self.is_halted() => true,
            () = self.is_over() => false,
            () = sleep(time) => false,
        }
    }

    /// Changes the batch in the database, and reads what else has changed.
    async fn update(&mut self, change: impl FnOnce(&mut BatchObject) + Send + 'static) -> Result<()> {
        let updated = self.cx.batches.update(&self.owner, &self.object.id, change).await?;
        self.object = updated.context("the batch is not in the database any more")?;
        Ok(())
    }

    /// Logs a failure of the server, and adds what clients are told of it.
    fn add_failure(&mut self, error: &anyhow::Error) {
        warn!(batch = self.object.id, "{}", format!("{error:#}").escape_debug());
        let (code, message) = match error.downcast_ref::<QuotaExceeded>() {
            Some(error) => ("quota_exceeded", error.to_string()),
            None if is_disk_full(error) => ("storage_full", "the server's disk is full".to_owned()),
            None => {
                ("storage_failed", "the server could not read or write the files of the batch".to_owned())
            }
        };
        if self.object.errors.is_none() {
            self.object.add_error(code, None, message);
        }
    }

    /// Ends the batch because of a failure of the server.
    async fn fail(&mut self, error: &anyhow::Error) -> Result<()> {
        self.add_failure(error);
        let bytes = output_ids(&self.object.id).map(|id| {
            let path = self.cx.batches.folder.content(&id);
            path.metadata().map_or(0, |metadata| metadata.len())
        });
        self.end(BatchStatus::Failed, bytes).await
    }

    /// Ends the batch, whose files of answers have these sizes.
    async fn end(&mut self, status: BatchStatus, bytes: [u64; 2]) -> Result<()> {
        let (now, batches) = (now(), &self.cx.batches);
        let object = &mut self.object;
        object.set_status(status, now);
        if object.in_progress_at.is_some() {
            object.request_counts = self.live.counts();
        }
        let retention = i64::try_from(batches.config.retention.as_secs()).unwrap_or(i64::MAX);
        let expires_at = Some(now.saturating_add(self.output_lifetime.unwrap_or(retention)));
        let ids = output_ids(&object.id);
        let mut files = Vec::new();
        for (id, (bytes, kind)) in ids.into_iter().zip(bytes.into_iter().zip(["output", "errors"])) {
            if bytes == 0 {
                batches.folder.remove(&id)?;
                continue;
            }
            match kind {
                "output" => object.output_file_id = Some(id.clone()),
                _ => object.error_file_id = Some(id.clone()),
            }
            let (name, owner) = (format!("{}_{kind}.jsonl", object.id), self.owner.clone());
            let (purpose, created_at) = (Purpose::BatchOutput, now);
            files.push(FileRow { id, owner, name, purpose, bytes, created_at, expires_at });
        }
        let object = object.clone();
        let counts = object.request_counts;
        let (id, reason) = (object.id.clone(), object.errors.clone());
        let write = move |db: &rusqlite::Transaction<'_>| {
            for file in &files {
                tables::insert_file(db, file, None)?;
            }
            tables::update_batch(db, &object, now)
        };
        batches.database.call(write).await?;
        let reason = reason.and_then(|reason| reason.data.into_iter().next()).map(|error| error.message);
        let (status, reason) = (status.name(), reason.as_deref());
        info!(
            batch = id,
            status,
            completed = counts.completed,
            failed = counts.failed,
            reason,
            "batch ended"
        );
        Ok(())
    }
}

/// The API for the requests of an owner's batch.
struct OwnerApi<'a> {
    cx: &'a RunContext,
    owner: Owner,
    live: Arc<LiveBatch>,
}

impl OwnerApi<'_> {
    /// Returns the client of the requests, with its present settings; `None` if its key is not accepted any
    /// more.
    fn client(&self) -> Option<Arc<Client>> {
        let client = match self.owner == Owner::default() {
            true if self.cx.keys.count() > 0 => return None,
            true => {
                let (id, name) = (ClientId::Local, "batches".into());
                Client { id, name, settings: self.cx.app.config.clients }
            }
            false => Client::clone(&*self.cx.keys.client_of(&self.owner)?),
        };
        let settings = ClientSettings { class: Class::Batch, ..client.settings };
        Some(Arc::new(Client { settings, ..client }))
    }
}

impl BatchApi for OwnerApi<'_> {
    fn post<'a>(
        &'a self,
        id: Arc<str>,
        url: &'a str,
        body: Bytes,
        memory: Option<Share>,
    ) -> LocalBoxFuture<'a, Result<ResponseBody, ApiError>> {
        Box::pin(async move {
            let Some(client) = self.client() else {
                self.live.stop(StopReason::KeyRevoked);
                return pending().await;
            };
            LocalApi::of_server(self.cx.app.clone(), client).post_with_id(id, url, body, memory).await
        })
    }

    /// The memory is that of the bodies of HTTP requests.
    fn reserve(&self, bytes: usize) -> LocalBoxFuture<'_, Result<Option<Share>, ApiError>> {
        Box::pin(async move {
            let Some(client) = self.client().filter(|_| bytes > INLINE_BYTES) else { return Ok(None) };
            Ok(Some(self.cx.app.bodies.acquire(client.id, bytes, bytes).await?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ApiKey, BatchConfig};
    use crate::request::Client;
    use crate::server::batches::Service;
    use crate::server::batches::testing::object;
    use crate::server::batches::wire::RequestCounts;
    use crate::server::tests::test_server::app;
    use crate::testing::Scratch;

    /// Returns what batches need to run, with these keys.
    fn context(folder: &Scratch, keys: &[&str]) -> RunContext {
        let mut app = app(|config| config.clients.tokens_per_minute = Some(5));
        let config = BatchConfig { data_dir: Some(folder.path().to_owned()), ..app.config.batches.clone() };
        app.config.batches = config.clone();
        let settings = ClientSettings { weight: 7, ..ClientSettings::default() };
        let key = |key: &&str| ApiKey { key: key.to_string(), name: None, settings };
        let keys = Keys::new(&keys.iter().map(key).collect::<Vec<_>>()).unwrap();
        let batches = Service::open(&config).unwrap().0.unwrap();
        let (halt, exclusion) = (watch::channel(false).1, Exclusion::default());
        RunContext { batches, app: Arc::new(app), keys: Data::new(keys), halt, exclusion }
    }

    /// Requests of a batch never go before interactive ones, and have the limits of their client.
    #[actix_web::test]
    async fn requests_have_the_later_class_and_the_settings_of_their_key() {
        let owner = Owner::with_key("one");
        for (keys, owner, expected) in [
            (&[][..], Owner::default(), Some((1, Some(5)))),
            (&["one", "two"], owner.clone(), Some((7, None))),
            (&["two"], owner.clone(), None),
            (&["two"], Owner::default(), None),
            (&[], owner, None),
        ] {
            let folder = Scratch::new();
            let cx = context(&folder, keys);
            let live = Arc::new(LiveBatch::new(owner.clone(), RequestCounts::default()));
            let api = OwnerApi { cx: &cx, owner: owner.clone(), live: live.clone() };
            let client = api.client();
            let settings = client
                .as_deref()
                .map(|Client { settings, .. }| (settings.weight, settings.tokens_per_minute));
            assert_eq!(settings, expected, "{keys:?} {owner:?}");
            assert!(client.is_none_or(|client| client.settings.class == Class::Batch));
        }
    }

    /// The end of a batch is one transaction, which can be repeated if it fails.
    #[actix_web::test]
    async fn a_batch_whose_requests_cannot_be_read_fails_with_what_it_has() {
        let folder = Scratch::new();
        let cx = context(&folder, &[]);
        let row = BatchRow {
            owner: Owner::default(),
            output_lifetime: Some(10),
            object: BatchObject { in_progress_at: Some(1), ..object("batch_1", BatchStatus::InProgress) },
        };
        let batch = row.clone();
        cx.batches.database.call(move |db| tables::insert_batch(db, &batch, 1)).await.unwrap();
        let [output, errors] = output_ids("batch_1");
        std::fs::write(cx.batches.folder.content(&output), "line").unwrap();
        cx.batches.folder.create_content(&errors).unwrap();
        run_batch(&cx, row).await;
        let read = move |db: &rusqlite::Transaction<'_>| {
            let ended = tables::batch(db, &Owner::default(), "batch_1")?;
            Ok((ended, tables::file(db, &Owner::default(), &output)?))
        };
        let (ended, file) = cx.batches.database.call(read).await.unwrap();
        let ended = ended.unwrap().object;
        assert_eq!((ended.status, ended.error_file_id), (BatchStatus::Failed, None));
        assert_eq!(ended.errors.unwrap().data[0].code, "storage_failed");
        let file = file.unwrap();
        assert_eq!(
            (Some(file.id), file.bytes, file.expires_at),
            (ended.output_file_id, 4, Some(file.created_at + 10))
        );
        assert!(!cx.batches.folder.content(&errors).exists());
    }
}
