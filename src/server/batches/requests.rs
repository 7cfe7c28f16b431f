//! Handlers of `/v1/batches`.
//!
//! Invariant: a batch of another owner is answered like one that does not exist.

use super::query::ListQuery;
use super::tables::{self, BatchRow, Checked};
use super::upload::LIFETIMES;
use super::wire::{BatchObject, BatchStatus, ListObject, Purpose, RequestCounts};
use super::{BATCH_PREFIX, Service, StopReason, lock, new_id, now, storage_error, to_the_end};
use crate::config::parse_duration;
use crate::request::RequestError;
use crate::server::App;
use crate::server::auth::Owner;
use crate::server::body::{BodyHead, RequestBody};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, IgnoredFields};
use actix_web::web::{Data, Path, Payload, ReqData};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::{Map, Value};
use tracing::info;

/// The endpoints that batches may be for.
const ENDPOINTS: [&str; 7] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/fill-mask",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
];

/// Default and maximum number of batches in a page of the list, as in OpenAI's API.
const PAGE_BATCHES: [i64; 2] = [20, 100];

/// Maximum number of pairs of metadata, and of characters of a name and of a value, as in OpenAI's API.
const METADATA_MAX: [usize; 3] = [16, 64, 512];

/// Shortest and longest completion window, in seconds.
const WINDOWS: std::ops::RangeInclusive<u64> = 1..=30 * 86_400;

/// The fields of a request for a batch.
struct NewBatch {
    input_file_id: String,
    endpoint: String,
    completion_window: String,
    window_s: i64,
    metadata: Option<Map<String, Value>>,
    output_lifetime: Option<i64>,
}

impl NewBatch {
    /// Parses the fields of a request. `served` are the endpoints of the model.
    fn parse(fields: &mut Fields, served: &[&str]) -> Result<NewBatch, ApiError> {
        let missing = |name: &'static str| move || ApiError::invalid(name, format!("'{name}' is missing"));
        let input_file_id = fields.take_string("input_file_id")?.ok_or_else(missing("input_file_id"))?;
        let endpoint = fields.take_string("endpoint")?.ok_or_else(missing("endpoint"))?;
        if !ENDPOINTS.contains(&&*endpoint) {
            let message = format!("'endpoint' must be one of {}", ENDPOINTS.join(", "));
            return Err(ApiError::invalid("endpoint", message));
        }
        if !served.contains(&&*endpoint) {
            let message =
                format!("the model does not have the endpoint {endpoint}, but {}", served.join(", "));
            return Err(ApiError::invalid("endpoint", message));
        }
        let completion_window =
            fields.take_string("completion_window")?.ok_or_else(missing("completion_window"))?;
        let window_s = parse_duration(&completion_window).ok().map(|window| window.as_secs());
        let window_s = window_s.filter(|seconds| WINDOWS.contains(seconds)).ok_or_else(|| {
            let message =
                "'completion_window' must be a time such as \"24h\", from 1 s to 30 days (\"720h\")";
            ApiError::invalid("completion_window", message)
        })?;
        let metadata = fields.take_object("metadata")?;
        metadata.iter().try_for_each(check_metadata)?;
        let output_lifetime = output_lifetime(fields)?;
        let window_s = i64::try_from(window_s).unwrap_or(i64::MAX);
        Ok(NewBatch { input_file_id, endpoint, completion_window, window_s, metadata, output_lifetime })
    }

    /// Makes the batch.
    fn row(self, owner: Owner) -> BatchRow {
        let created_at = now();
        let object = BatchObject {
            id: new_id(BATCH_PREFIX),
            object: "batch".to_owned(),
            endpoint: self.endpoint,
            errors: None,
            input_file_id: self.input_file_id,
            completion_window: self.completion_window,
            status: BatchStatus::Validating,
            output_file_id: None,
            error_file_id: None,
            created_at,
            in_progress_at: None,
            expires_at: created_at.saturating_add(self.window_s),
            finalizing_at: None,
            completed_at: None,
            failed_at: None,
            expired_at: None,
            cancelling_at: None,
            cancelled_at: None,
            request_counts: RequestCounts::default(),
            metadata: self.metadata,
        };
        BatchRow { owner, output_lifetime: self.output_lifetime, object }
    }
}

fn check_metadata(metadata: &Map<String, Value>) -> Result<(), ApiError> {
    let [pairs, name_chars, value_chars] = METADATA_MAX;
    let is_valid = |(name, value): (&String, &Value)| {
        let value = value.as_str().is_some_and(|text| text.chars().count() <= value_chars);
        value && name.chars().count() <= name_chars
    };
    if metadata.len() <= pairs && metadata.iter().all(is_valid) {
        return Ok(());
    }
    let message = format!(
        "'metadata' may have {pairs} pairs, whose names have at most {name_chars} characters, and whose \
         values are strings of at most {value_chars}"
    );
    Err(ApiError::invalid("metadata", message))
}

/// Takes `output_expires_after` out of the fields: the time in seconds for which answers are kept.
fn output_lifetime(fields: &mut Fields) -> Result<Option<i64>, ApiError> {
    let name = "output_expires_after";
    let Some(members) = fields.take_object(name)? else { return Ok(None) };
    let mut members = fields.nested(name, members);
    if members.take_string("anchor")?.as_deref() != Some("created_at") {
        let anchor = format!("{name}.anchor");
        let message = format!("'{anchor}' must be \"created_at\"");
        return Err(ApiError::invalid(anchor, message));
    }
    let seconds = members.take_integer("seconds", *LIFETIMES.start(), *LIFETIMES.end())?;
    members.finish(&[])?;
    match seconds {
        Some(seconds) => Ok(Some(seconds)),
        None => Err(ApiError::invalid(format!("{name}.seconds"), format!("'{name}.seconds' is missing"))),
    }
}

/// Creates a batch: `POST /v1/batches`. Returns it with the fields that are unknown.
pub async fn create(
    app: &App,
    service: &Service,
    owner: Owner,
    head: BodyHead,
    payload: Payload,
) -> Result<(BatchObject, IgnoredFields), ApiError> {
    let batches = service.get()?;
    let body = RequestBody::receive(app, head, payload).await?;
    if app.parts.status.is_draining() {
        return Err(RequestError::Draining.into());
    }
    let mut fields = Fields::parse(&body.bytes)?;
    let new = NewBatch::parse(&mut fields, &app.parts.model.endpoints)?;
    let unknown = fields.unknown();
    fields.finish(&[])?;
    let ignored = unknown.apply(app.config.unknown_fields)?;
    let (row, most) = (new.row(owner), batches.config.max_batches);
    let insert = move |db: &rusqlite::Transaction<'_>| {
        let input = tables::file(db, &row.owner, &row.object.input_file_id)?;
        match input.map(|file| file.purpose) {
            None => {
                let error = ApiError::no_such("file", &row.object.input_file_id);
                return Ok(Err(error.rename_param("id", "input_file_id")));
            }
            Some(Purpose::BatchOutput) => {
                let message = "'input_file_id' is a file of answers; its purpose must be \"batch\"";
                return Ok(Err(ApiError::invalid("input_file_id", message)));
            }
            Some(Purpose::Batch) => {}
        }
        Ok(match tables::insert_batch(db, &row, most)? {
            Checked::Done => Ok(row.object),
            Checked::Refused => Err(ApiError::too_many_batches(most)),
        })
    };
    let object = batches.database.call(insert).await.map_err(|error| storage_error(&error))??;
    info!(batch = object.id, endpoint = object.endpoint, file = object.input_file_id, "batch created");
    batches.changed.notify_one();
    Ok((object, ignored))
}

/// Lists batches: `GET /v1/batches`.
pub async fn list(
    service: Data<Service>,
    owner: ReqData<Owner>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let batches = service.get()?;
    let [default, most] = PAGE_BATCHES;
    let query = ListQuery::parse(&request, default, most)?;
    let page = query.page.clone();
    let read = move |db: &rusqlite::Transaction<'_>| tables::batches(db, &owner, &page);
    let found = batches.database.call(read).await.map_err(|error| storage_error(&error))?;
    let (rows, has_more) = found.ok_or_else(|| query.unknown_after())?;
    let objects: Vec<_> = rows.into_iter().map(|row| batches.current(row.object)).collect();
    Ok(HttpResponse::Ok().json(ListObject::new(objects, has_more, |object| &object.id)))
}

/// Describes a batch: `GET /v1/batches/{id}`.
pub async fn retrieve(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let (batches, wanted) = (service.get()?, id.clone());
    let read = move |db: &rusqlite::Transaction<'_>| tables::batch(db, &owner, &wanted);
    let found = batches.database.call(read).await.map_err(|error| storage_error(&error))?;
    let row = found.ok_or_else(|| ApiError::no_such("batch", &id))?;
    Ok(HttpResponse::Ok().json(batches.current(row.object)))
}

/// Cancels a batch: `POST /v1/batches/{id}/cancel`. What is answered by then is kept.
pub async fn cancel(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let (batches, wanted) = (service.get()?.clone(), id.clone());
    let cancel = move |db: &rusqlite::Transaction<'_>| {
        let Some(mut row) = tables::batch(db, &owner, &wanted)? else {
            return Ok(Err(ApiError::no_such("batch", &wanted)));
        };
        let status = row.object.status;
        if status.is_final() || status == BatchStatus::Finalizing {
            let message = format!("the batch cannot be cancelled: its status is {}", status.name());
            return Ok(Err(ApiError::conflict(message)));
        }
        row.object.set_status(BatchStatus::Cancelling, now());
        tables::update_batch(db, &row.object, now())?;
        Ok(Ok(row.object))
    };
    let object = to_the_end(async move {
        let object = batches.database.call(cancel).await.map_err(|error| storage_error(&error))??;
        if let Some(live) = lock(&batches.live).get(&*id) {
            live.stop(StopReason::Cancelled);
        }
        batches.changed.notify_one();
        Ok(batches.current(object))
    });
    Ok(HttpResponse::Ok().json(object.await?))
}
