//! Files and batches: requests in a file that are answered later, behind interactive ones, by the server
//! (`/v1/files`, `/v1/batches`) or by `mainstem batch`, which shares [`input`], [`output`] and [`job`].
//!
//! Invariant: the files of answers are the record of what is done; the database has only what the API shows
//! of a batch. So after the end of the process, however it came, each request is answered once.

pub mod input;

pub mod output;

pub mod exclusion;

pub mod job;

pub mod wire;

mod database;

mod folder;

mod tables;

mod upload;

pub mod query;

pub mod responses;

pub mod files;

pub mod requests;

mod answers;

mod run;

pub mod runner;

#[cfg(test)]
mod testing;

use super::access::RequestId;
use super::auth::Owner;
use super::error::ApiError;
use crate::config::BatchConfig;
use crate::server::openapi::describe::{Api, Described};
use crate::server::openapi::requests::{BatchBody, UploadBody};
use actix_web::rt::spawn;
use anyhow::{Context, Error, Result};
use database::Database;
use folder::Folder;
use rusqlite::ErrorCode;
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tracing::{error, info, warn};
use utoipa::openapi::schema::Type;
use wire::{BatchObject, RequestCounts};

/// Maximum time for which a server that ends waits for its database.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The files and batches of a server; `None` if it has none.
pub struct Service(pub Option<Arc<Batches>>);

/// The files and batches of a server.
pub struct Batches {
    config: BatchConfig,
    folder: Folder,
    database: Database,
    /// Bytes of the uploads that are not complete, by owner.
    uploading: Mutex<HashMap<Owner, u64>>,
    /// The batches that run, by id.
    live: Mutex<HashMap<String, Arc<LiveBatch>>>,
    /// Wakes the runner.
    changed: Notify,
}

/// A batch that runs.
struct LiveBatch {
    owner: Owner,
    /// Bytes of its answers, and of its owner's files in the database.
    bytes: AtomicU64,
    used: AtomicU64,
    total: AtomicU64,
    completed: AtomicU64,
    failed: AtomicU64,
    /// The reason for which the batch is to end, if it is.
    stop: watch::Sender<Option<StopReason>>,
}

/// The reason for which a batch ends before its requests are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopReason {
    Cancelled,
    /// The API key of its client is not accepted any more.
    KeyRevoked,
}

impl Service {
    /// Opens the folder of the configuration, if there is one. Fails if another server uses it.
    pub fn open(config: &BatchConfig) -> Result<Service> {
        let Some(path) = &config.data_dir else { return Ok(Service(None)) };
        let folder = Folder::open(path)?;
        let remove_others = |db: &rusqlite::Connection| {
            let mut known = tables::file_ids(db)?;
            known.extend(tables::open_batches(db)?.iter().flat_map(|row| output_ids(&row.object.id)));
            Ok(folder.remove_others(&known)?)
        };
        let (database, removed) = Database::open(&folder.database(), remove_others)?;
        if removed > 0 {
            info!(removed, "files without an entry in the database are removed");
        }
        let (uploading, live) = (Mutex::default(), Mutex::default());
        let batches =
            Batches { config: config.clone(), folder, database, uploading, live, changed: Notify::new() };
        Ok(Service(Some(Arc::new(batches))))
    }

    /// Lets other servers use the folder, as soon as what this one still writes is written. Waits for the
    /// database, for a limited time.
    pub async fn release(&self) {
        let Some(batches) = &self.0 else { return };
        match timeout(CLOSE_TIMEOUT, batches.database.close()).await {
            Ok(()) => batches.folder.release(),
            Err(_) => warn!("the database of batches takes too long to close; its folder stays locked"),
        }
    }

    /// Returns the files and batches. Fails if the server has none.
    fn get(&self) -> Result<&Arc<Batches>, ApiError> {
        self.0.as_ref().ok_or_else(ApiError::batches_disabled)
    }
}

impl Batches {
    /// Returns a batch as the API shows it, with the numbers of requests that are answered by now.
    fn current(&self, mut object: BatchObject) -> BatchObject {
        if let Some(live) = lock(&self.live).get(&object.id).filter(|_| !object.status.is_final()) {
            object.request_counts = live.counts();
        }
        object
    }

    /// Returns the number of bytes of the answers of an owner's batches that run: files that are not in the
    /// database yet.
    fn answer_bytes(&self, owner: &Owner) -> u64 {
        let live = lock(&self.live);
        let own = live.values().filter(|batch| batch.owner == *owner);
        own.map(|batch| batch.bytes.load(Ordering::Relaxed)).sum()
    }

    /// Changes a batch that has not ended by `change`. Returns it, as it is then.
    async fn update(
        &self,
        owner: &Owner,
        id: &str,
        change: impl FnOnce(&mut BatchObject) + Send + 'static,
    ) -> Result<Option<BatchObject>> {
        let (owner, id, now) = (owner.clone(), id.to_owned(), now());
        let update = move |db: &rusqlite::Transaction<'_>| {
            let Some(mut row) = tables::batch(db, &owner, &id)? else { return Ok(None) };
            if !row.object.status.is_final() {
                change(&mut row.object);
                tables::update_batch(db, &row.object, now)?;
            }
            Ok(Some(row.object))
        };
        self.database.call(update).await
    }
}

impl LiveBatch {
    fn new(owner: Owner, counts: RequestCounts) -> LiveBatch {
        let RequestCounts { total, completed, failed } = counts;
        LiveBatch {
            owner,
            bytes: 0.into(),
            used: 0.into(),
            total: total.into(),
            completed: completed.into(),
            failed: failed.into(),
            stop: watch::Sender::new(None),
        }
    }

    fn counts(&self) -> RequestCounts {
        let [total, completed, failed] =
            [&self.total, &self.completed, &self.failed].map(|count| count.load(Ordering::Relaxed));
        RequestCounts { total, completed, failed }
    }

    /// Ends the batch, unless it ends already.
    fn stop(&self, reason: StopReason) {
        self.stop.send_if_modified(|stop| {
            let is_first = stop.is_none();
            stop.get_or_insert(reason);
            is_first
        });
    }
}

/// Returns the ids of a batch's files: of the answers, and of those that are errors.
fn output_ids(batch: &str) -> [String; 2] {
    let name = batch.strip_prefix(BATCH_PREFIX).unwrap_or(batch);
    ["output", "errors"].map(|kind| format!("{FILE_PREFIX}{name}-{kind}"))
}

const BATCH_PREFIX: &str = "batch_";
const FILE_PREFIX: &str = "file-";

/// Makes an id that nobody can guess.
fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", RequestId::generate().0)
}

/// Returns the time in seconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether an error is that of a full disk.
fn is_disk_full(error: &Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let database = cause.downcast_ref::<rusqlite::Error>().and_then(rusqlite::Error::sqlite_error_code);
        matches!(io, Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge))
            || database == Some(ErrorCode::DiskFull)
    })
}

/// Logs a failure of the disk or of the database, and returns the error that clients get, without paths.
fn storage_error(failure: &Error) -> ApiError {
    error!("files and batches: {}", format!("{failure:#}").escape_debug());
    match is_disk_full(failure) {
        true => ApiError::storage_full(),
        false => ApiError::internal("the server could not read or write its files"),
    }
}

/// Runs the changes of a request to their end, even if its client goes away: otherwise a file could be left
/// of which the database knows nothing.
async fn to_the_end<T: 'static>(
    changes: impl Future<Output = Result<T, ApiError>> + 'static,
) -> Result<T, ApiError> {
    spawn(changes).await.map_err(|error| storage_error(&error.into()))?
}

/// Runs `work` that blocks on another thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.context("a thread has panicked")?
}

/// Describes the paths of files and batches.
pub fn describe_paths(api: &mut Api) {
    let list = |operation: Described<'_>| {
        operation
            .query("limit", Type::Integer, "Maximum number of entries.")
            .query("after", Type::String, "Id of the entry after which the list begins.")
            .query("order", Type::String, "asc or desc, by the time of creation.");
    };
    api.post("/v1/files", "Uploads a file of requests.")
        .body_as::<UploadBody>("multipart/form-data")
        .returns::<wire::FileObject>();
    list(
        api.get("/v1/files", "Lists files.")
            .returns_generic::<wire::ListObject<wire::FileObject>, wire::FileObject>("FileList"),
    );
    api.get("/v1/files/{id}", "Describes a file.").returns::<wire::FileObject>();
    api.delete("/v1/files/{id}", "Deletes a file.").returns::<wire::DeletedFile>();
    api.get("/v1/files/{id}/content", "Returns the content of a file.")
        .returns_as("application/octet-stream");
    api.post("/v1/batches", "Begins a batch.").body::<BatchBody>().returns::<wire::BatchObject>();
    list(
        api.get("/v1/batches", "Lists batches.")
            .returns_generic::<wire::ListObject<wire::BatchObject>, wire::BatchObject>("BatchList"),
    );
    api.get("/v1/batches/{id}", "Describes a batch.").returns::<wire::BatchObject>();
    api.post("/v1/batches/{id}/cancel", "Cancels a batch.").returns::<wire::BatchObject>();
}
