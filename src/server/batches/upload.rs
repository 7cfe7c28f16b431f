//! Uploads: a form with a file, which is written to the disk as it arrives.
//!
//! Invariant: a file is in the database only once its content is on the disk; what does not get there is
//! removed.

use super::folder::Upload;
use super::tables::{self, Checked, FileRow};
use super::wire::{FileObject, Purpose};
use super::{Batches, FILE_PREFIX, blocking, lock, new_id, now, storage_error, to_the_end};
use crate::config::UnknownFieldsPolicy;
use crate::server::auth::Owner;
use crate::server::body::{BodyHead, discard};
use crate::server::error::ApiError;
use crate::server::fields::shorten;
use actix_multipart::{Field, Multipart};
use actix_web::error::PayloadError;
use actix_web::http::header::HeaderMap;
use actix_web::web::{Bytes, Payload};
use anyhow::Error;
use futures_util::{Stream, StreamExt};
use std::cell::RefCell;
use std::io::Write;
use std::mem::take;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Maximum time without any byte of an upload.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Time that any upload may take, and bytes that have to arrive in each second beyond it.
const SLOW_TIME: Duration = Duration::from_secs(60);
const SLOW_BYTES: u64 = 16 << 10;

/// Bytes that are written to the disk at once.
const WRITTEN_BYTES: usize = 64 << 10;

/// Maximum size of a form beside its file, and of each of its other values.
const FORM_BYTES: u64 = 64 << 10;
const VALUE_BYTES: usize = 1024;

/// Maximum number of parts of a form.
const PARTS_MAX: usize = 32;

/// Maximum number of characters of a file's name.
const NAME_CHARS_MAX: usize = 200;

/// Seconds for which a client may have a file kept, as in OpenAI's API.
pub const LIFETIMES: std::ops::RangeInclusive<i64> = 3600..=2_592_000;

/// The rules of an upload, and where it goes.
pub struct Uploading<'a> {
    pub batches: &'a Arc<Batches>,
    pub owner: Owner,
    pub head: BodyHead,
    pub unknown_fields: UnknownFieldsPolicy,
    pub began: Instant,
}

impl Uploading<'_> {
    /// Receives a form, and adds its file. Returns the file.
    pub async fn receive(self, headers: &HeaderMap, payload: Payload) -> Result<FileObject, ApiError> {
        let limit = self.batches.config.file_limit_bytes;
        if self.head.length.is_some_and(|length| length > limit.saturating_add(FORM_BYTES)) {
            return Err(ApiError::file_too_large(limit));
        }
        let mut payload = SharedPayload(Rc::new(RefCell::new(payload)));
        let form = Multipart::new(headers, payload.clone());
        let received = self.read(form).await;
        self.head.connection.iter().for_each(|connection| connection.set_busy());
        match received {
            Ok(form) => to_the_end(add(self.batches.clone(), self.owner, form)).await,
            Err(refusal) => {
                discard(&mut payload).await;
                Err(refusal)
            }
        }
    }

    /// Reads all parts of a form.
    async fn read(&self, mut parts: Multipart) -> Result<Form, ApiError> {
        let mut form = Form::default();
        for _ in 0..PARTS_MAX {
            let received = form.file.as_ref().map_or(0, |file| file.bytes);
            let Some(part) = self.in_time(received, parts.next()).await? else { return Ok(form) };
            let mut part = part.map_err(|error| malformed(&error))?;
            let name = part.name().unwrap_or_default().to_owned();
            let value = match &*name {
                "file" if form.file.is_some() => {
                    return Err(ApiError::invalid("file", "the form has a second 'file'"));
                }
                "file" => {
                    form.file = Some(self.store(&mut part).await?);
                    continue;
                }
                "purpose" => &mut form.purpose,
                "expires_after[anchor]" => &mut form.anchor,
                "expires_after[seconds]" => &mut form.seconds,
                _ if self.unknown_fields == UnknownFieldsPolicy::Reject => {
                    return Err(ApiError::unknown_parameter(&shorten(&name)));
                }
                _ => {
                    while let Some(bytes) = self.in_time(received, part.next()).await? {
                        bytes.map_err(|error| malformed(&error))?;
                    }
                    continue;
                }
            };
            let bytes = self.in_time(received, part.bytes(VALUE_BYTES)).await?;
            let bytes = bytes.map_err(|_| {
                ApiError::invalid(&*name, format!("'{name}' has more than {VALUE_BYTES} bytes"))
            })?;
            let bytes = bytes.map_err(|error| malformed(&error))?;
            *value = Some(String::from_utf8_lossy(&bytes).trim().to_owned());
            form.check()?;
        }
        Err(ApiError::malformed(format!("the form has more than {PARTS_MAX} parts")))
    }

    /// Waits for the next bytes of an upload, of which `received` bytes are there.
    async fn in_time<T>(&self, received: u64, next: impl Future<Output = T>) -> Result<T, ApiError> {
        let slowest = self.began + SLOW_TIME + Duration::from_secs(received / SLOW_BYTES);
        let next = timeout_at(slowest.min(Instant::now() + STALL_TIMEOUT), next).await;
        self.head.connection.iter().for_each(|connection| connection.touch());
        next.map_err(|_| ApiError::upload_too_slow())
    }

    /// Writes the part of the file to the disk.
    async fn store(&self, part: &mut Field) -> Result<ReceivedFile, ApiError> {
        let disposition = part.content_disposition();
        let name = disposition.and_then(|it| it.get_filename()).unwrap_or_default();
        let name: String = name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
        let name = if name.is_empty() { "requests.jsonl".to_owned() } else { name };
        let (batches, id) = (self.batches.clone(), new_id(FILE_PREFIX));
        let owner = self.owner.clone();
        let used = batches.database.call(move |db| tables::used_bytes(db, &owner)).await;
        let used = used.map_err(|error| storage_error(&error))?;
        let mut reserved =
            Reserved { batches: self.batches.clone(), owner: self.owner.clone(), bytes: 0, used };
        let mut upload = {
            let id = id.clone();
            blocking(move || Ok(batches.folder.create_upload(&id)?))
                .await
                .map_err(|error| storage_error(&error))?
        };
        let (mut bytes, mut buffer) = (0, Vec::with_capacity(WRITTEN_BYTES));
        let limit = self.batches.config.file_limit_bytes;
        while let Some(chunk) = self.in_time(bytes, part.next()).await? {
            let chunk = chunk.map_err(|error| malformed(&error))?;
            bytes += chunk.len() as u64;
            if bytes > limit {
                return Err(ApiError::file_too_large(limit));
            }
            reserved.grow(chunk.len() as u64)?;
            buffer.extend_from_slice(&chunk);
            if buffer.len() >= WRITTEN_BYTES {
                upload = write(upload, take(&mut buffer)).await?;
            }
        }
        upload = write(upload, buffer).await?;
        Ok(ReceivedFile { id, name, bytes, upload, _reserved: reserved })
    }
}

/// Adds the file of an owner's form.
async fn add(batches: Arc<Batches>, owner: Owner, form: Form) -> Result<FileObject, ApiError> {
    let lifetime = form.check()?;
    if form.purpose.is_none() {
        return Err(ApiError::invalid("purpose", "'purpose' is missing; it must be \"batch\""));
    }
    let missing = || ApiError::invalid("file", "'file' is missing");
    let ReceivedFile { id, name, bytes, upload, _reserved } = form.file.ok_or_else(missing)?;
    if bytes == 0 {
        return Err(ApiError::invalid("file", "the file is empty"));
    }
    let retention = i64::try_from(batches.config.retention.as_secs()).unwrap_or(i64::MAX);
    let created_at = now();
    let expires_at = Some(created_at.saturating_add(lifetime.unwrap_or(retention)));
    let purpose = Purpose::Batch;
    let row = FileRow { id: id.clone(), owner, name, purpose, bytes, created_at, expires_at };
    let quota = batches.config.quota_bytes;
    let inserted = async {
        blocking(move || Ok(upload.keep()?)).await?;
        let added = row.clone();
        let left = quota.saturating_sub(batches.answer_bytes(&row.owner));
        let insert = move |db: &rusqlite::Transaction<'_>| tables::insert_file(db, &added, Some(left));
        Ok::<_, Error>((batches.database.call(insert).await?, row))
    };
    let refusal = match inserted.await {
        Ok((Checked::Done, row)) => return Ok(row.object()),
        Ok((Checked::Refused, _)) => quota_exceeded(quota),
        Err(error) => storage_error(&error),
    };
    // Otherwise it would stay until the next start.
    let batches = batches.clone();
    _ = blocking(move || Ok(batches.folder.remove(&id)?)).await;
    Err(refusal)
}

/// Writes bytes to an upload.
async fn write(mut upload: Upload, bytes: Vec<u8>) -> Result<Upload, ApiError> {
    let write = move || {
        upload.file.write_all(&bytes)?;
        Ok(upload)
    };
    blocking(write).await.map_err(|error| storage_error(&error))
}

fn malformed(error: &actix_multipart::MultipartError) -> ApiError {
    ApiError::malformed(format!("the request body is not a form (multipart/form-data) with a file: {error}"))
}

fn quota_exceeded(quota: u64) -> ApiError {
    ApiError::quota_exceeded(format!(
        "with this file, the client's files would take more than {quota} bytes (batches.quota); delete others"
    ))
}

/// The values of a form.
#[derive(Default)]
struct Form {
    purpose: Option<String>,
    anchor: Option<String>,
    seconds: Option<String>,
    file: Option<ReceivedFile>,
}

impl Form {
    /// Checks the values that are there. Returns the time in seconds for which the file is to be kept.
    fn check(&self) -> Result<Option<i64>, ApiError> {
        if let Some(purpose) = self.purpose.as_deref().filter(|purpose| *purpose != Purpose::Batch.name()) {
            let message = format!("'purpose' is \"{}\"; it must be \"batch\"", shorten(purpose));
            return Err(ApiError::invalid("purpose", message));
        }
        if self.anchor.as_deref().is_some_and(|anchor| anchor != "created_at") {
            let name = "expires_after[anchor]";
            return Err(ApiError::invalid(name, format!("'{name}' must be \"created_at\"")));
        }
        let Some(text) = &self.seconds else { return Ok(None) };
        match text.parse().ok().filter(|seconds| LIFETIMES.contains(seconds)) {
            Some(seconds) => Ok(Some(seconds)),
            None => {
                let (name, least, most) = ("expires_after[seconds]", LIFETIMES.start(), LIFETIMES.end());
                let message = format!("'{name}' must be an integer from {least} to {most}");
                Err(ApiError::invalid(name, message))
            }
        }
    }
}

/// A file that is on the disk, but not in the database.
struct ReceivedFile {
    id: String,
    name: String,
    bytes: u64,
    upload: Upload,
    /// Until it is in the database.
    _reserved: Reserved,
}

/// The part of its owner's quota that an upload takes before it is in the database.
struct Reserved {
    batches: Arc<Batches>,
    owner: Owner,
    bytes: u64,
    /// Bytes of the owner's files when the upload began.
    used: u64,
}

impl Reserved {
    /// Takes more of the quota. Fails if there is no more.
    fn grow(&mut self, bytes: u64) -> Result<(), ApiError> {
        let quota = self.batches.config.quota_bytes;
        let used = self.used.saturating_add(self.batches.answer_bytes(&self.owner));
        let mut uploading = lock(&self.batches.uploading);
        let total = uploading.entry(self.owner.clone()).or_default();
        if used.saturating_add(*total).saturating_add(bytes) > quota {
            return Err(quota_exceeded(quota));
        }
        *total += bytes;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut uploading = lock(&self.batches.uploading);
        if let Some(total) = uploading.get_mut(&self.owner) {
            *total -= self.bytes;
            if *total == 0 {
                uploading.remove(&self.owner);
            }
        }
    }
}

/// The payload of a request, whose rest can be read after its form was refused.
#[derive(Clone)]
struct SharedPayload(Rc<RefCell<Payload>>);

impl Stream for SharedPayload {
    type Item = Result<Bytes, PayloadError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_next(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::super::LiveBatch;
    use super::super::testing::{open, wait_until};
    use super::super::wire::RequestCounts;
    use super::*;
    use crate::testing::Scratch;
    use actix_web::FromRequest;
    use actix_web::test::TestRequest;
    use futures_util::FutureExt;
    use std::future::pending;
    use std::sync::atomic::Ordering;

    const FORM: &str = "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\n\
                        Content-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}\r\n--b--\r\n";

    /// Returns an upload of [`FORM`] that began some seconds ago, with its headers and its body.
    async fn upload(batches: &Arc<Batches>, seconds: u64) -> (Uploading<'_>, HeaderMap, Payload) {
        let request =
            TestRequest::default().insert_header(("content-type", "multipart/form-data; boundary=b"));
        let (request, mut body) = request.set_payload(FORM).to_http_parts();
        let head = BodyHead::from_request(&request, &mut body).await.unwrap();
        let payload = Payload::from_request(&request, &mut body).await.unwrap();
        let began = Instant::now() - Duration::from_secs(seconds);
        let (owner, unknown_fields) = (Owner::default(), UnknownFieldsPolicy::Ignore);
        (Uploading { batches, owner, head, unknown_fields, began }, request.headers().clone(), payload)
    }

    /// Otherwise a client could hold a connection and a part of its quota by a byte every few seconds.
    #[actix_web::test]
    async fn an_upload_has_to_keep_a_rate() {
        let folder = Scratch::new();
        let batches = open(&folder);
        for (seconds, received, is_slow) in [
            (0, 0, false),
            (59, 0, false),
            (61, 0, true),
            (61, 2 * SLOW_BYTES, false),
            (3661, 3600 * SLOW_BYTES, true),
            (3661, 3602 * SLOW_BYTES, false),
        ] {
            let (upload, ..) = upload(&batches, seconds).await;
            let next = upload.in_time(received, pending::<()>());
            let refusal = next.now_or_never().map(|ended| ended.unwrap_err().code());
            assert_eq!(refusal, is_slow.then_some("upload_too_slow"), "{seconds} {received}");
        }
        let (late, headers, payload) = upload(&batches, 61).await;
        // What is there at once is in time.
        assert_eq!(late.receive(&headers, payload).await.map(|file| file.bytes).ok(), Some(2));
    }

    /// Regression: the content of a file was left without an entry, which does not count in the quota.
    #[actix_web::test]
    async fn an_upload_whose_client_goes_away_is_whole_or_gone() {
        let folder = Scratch::new();
        let batches = open(&folder);
        let contents = || std::fs::read_dir(folder.path().join("files")).unwrap().count();
        let (uploading, headers, payload) = upload(&batches, 0).await;
        let mut receiving = Box::pin(uploading.receive(&headers, payload));
        // Until its content is there.
        wait_until(|| contents() > 0 || receiving.as_mut().now_or_never().is_some()).await;
        drop(receiving);
        let is_known = || lock(&batches.uploading).is_empty();
        wait_until(is_known).await;
        let known = batches.database.call(|db| tables::file_ids(db)).await.unwrap();
        assert_eq!((known.len(), contents()), (1, 1));
    }

    /// Regression: uploads beside a batch that ran could take as much again as the quota.
    #[actix_web::test]
    async fn answers_of_a_batch_that_runs_take_a_part_of_the_quota() {
        let folder = Scratch::new();
        let batches = open(&folder);
        let quota = batches.config.quota_bytes;
        let live = |owner| Arc::new(LiveBatch::new(owner, RequestCounts::default()));
        for (owner, bytes) in [(Owner::default(), quota - 1), (Owner::with_key("other"), quota)] {
            let batch = live(owner);
            batch.bytes.store(bytes, Ordering::Relaxed);
            lock(&batches.live).insert(bytes.to_string(), batch);
        }
        let (uploading, headers, payload) = upload(&batches, 0).await;
        let refusal = uploading.receive(&headers, payload).await.unwrap_err();
        assert_eq!(refusal.code(), "quota_exceeded");
        lock(&batches.live).clear();
        let (uploading, headers, payload) = upload(&batches, 0).await;
        assert!(uploading.receive(&headers, payload).await.is_ok());
    }
}
