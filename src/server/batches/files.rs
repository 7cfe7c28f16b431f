//! Handlers of `/v1/files`.
//!
//! Invariant: a file of another owner is answered like one that does not exist.

use super::query::ListQuery;
use super::tables;
use super::upload::Uploading;
use super::wire::{DeletedFile, FileObject, ListObject};
use super::{Service, blocking, storage_error, to_the_end};
use crate::request::RequestError;
use crate::server::auth::Owner;
use crate::server::body::BodyHead;
use crate::server::error::ApiError;
use crate::server::{App, OpenResponse};
use actix_web::body::SizedStream;
use actix_web::http::header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use actix_web::web::{Bytes, Data, Path, Payload, ReqData};
use actix_web::{HttpRequest, HttpResponse};
use anyhow::Result as AnyResult;
use async_stream::stream;
use futures_util::Stream;
use std::fs::File;
use std::io::Read;
use tokio::time::Instant;

/// Default and maximum number of files in a page of the list, as in OpenAI's API.
const PAGE_FILES: i64 = 10_000;

/// Bytes of a file that are read at once.
const READ_BYTES: usize = 64 << 10;

/// Adds a file: `POST /v1/files`.
pub async fn upload(
    app: Data<App>,
    service: Data<Service>,
    owner: ReqData<Owner>,
    head: BodyHead,
    request: HttpRequest,
    payload: Payload,
) -> Result<HttpResponse, ApiError> {
    let (batches, unknown_fields) = (service.get()?, app.config.unknown_fields);
    if app.parts.status.is_draining() {
        return Err(RequestError::Draining.into());
    }
    let (owner, began) = (owner.into_inner(), Instant::now());
    let uploading = Uploading { batches, owner, head, unknown_fields, began };
    let file = uploading.receive(request.headers(), payload).await?;
    Ok(HttpResponse::Ok().json(file))
}

/// Lists files: `GET /v1/files`.
pub async fn list(
    service: Data<Service>,
    owner: ReqData<Owner>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let batches = service.get()?;
    let query = ListQuery::parse(&request, PAGE_FILES, PAGE_FILES)?;
    let (page, purpose) = (query.page.clone(), query.purpose.clone());
    let read = move |db: &rusqlite::Transaction<'_>| tables::files(db, &owner, &page, purpose.as_deref());
    let found = batches.database.call(read).await.map_err(|error| storage_error(&error))?;
    let (files, has_more) = found.ok_or_else(|| query.unknown_after())?;
    let files: Vec<FileObject> = files.into_iter().map(tables::FileRow::object).collect();
    Ok(HttpResponse::Ok().json(ListObject::new(files, has_more, |file| &file.id)))
}

/// Describes a file: `GET /v1/files/{id}`.
pub async fn retrieve(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(find(&service, owner.into_inner(), &id).await?))
}

/// Returns a file of an owner.
async fn find(service: &Service, owner: Owner, id: &str) -> Result<FileObject, ApiError> {
    let wanted = id.to_owned();
    let read = move |db: &rusqlite::Transaction<'_>| tables::file(db, &owner, &wanted);
    let found = service.get()?.database.call(read).await.map_err(|error| storage_error(&error))?;
    found.map(tables::FileRow::object).ok_or_else(|| ApiError::no_such("file", id))
}

/// Sends the content of a file: `GET /v1/files/{id}/content`.
pub async fn content(
    app: Data<App>,
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let file = find(&service, owner.into_inner(), &id).await?;
    let path = service.get()?.folder.content(&file.id);
    let opened = blocking(move || Ok(File::open(path)?)).await.map_err(|error| storage_error(&error))?;
    let body = SizedStream::new(file.bytes, chunks(opened, file.bytes, app.open_response()));
    Ok(HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, "application/octet-stream"))
        .insert_header((X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .body(body))
}

/// Reads a file of `bytes` bytes in parts. `open` is dropped at its end.
fn chunks(file: File, bytes: u64, open: OpenResponse) -> impl Stream<Item = AnyResult<Bytes>> {
    stream! {
        let (_open, mut file) = (open, file.take(bytes));
        loop {
            let read = move || {
                let mut part = Vec::with_capacity(READ_BYTES);
                (&mut file).take(READ_BYTES as u64).read_to_end(&mut part)?;
                Ok((file, part))
            };
            let part = match blocking(read).await {
                Ok((rest, part)) => {
                    file = rest;
                    part
                }
                Err(error) => {
                    storage_error(&error);
                    yield Err(error);
                    break;
                }
            };
            if part.is_empty() {
                break;
            }
            yield Ok(part.into());
        }
    }
}

/// Removes a file: `DELETE /v1/files/{id}`.
pub async fn delete(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let (batches, id, owner) = (service.get()?, id.into_inner(), owner.into_inner());
    let wanted = id.clone();
    let remove = move |db: &rusqlite::Transaction<'_>| {
        if tables::file(db, &owner, &wanted)?.is_none() {
            return Ok(Err(ApiError::no_such("file", &wanted)));
        }
        if let Some(batch) = tables::batch_with_input(db, &wanted)? {
            let message = format!("the file has the requests of the batch '{batch}', which has not ended");
            return Ok(Err(ApiError::conflict(message)));
        }
        Ok(Ok(tables::delete_file(db, &wanted)?))
    };
    let (batches, removed) = (batches.clone(), id.clone());
    to_the_end(async move {
        batches.database.call(remove).await.map_err(|error| storage_error(&error))??;
        let remove = blocking(move || Ok(batches.folder.remove(&removed)?));
        // It is removed at the next start.
        _ = remove.await.map_err(|error| storage_error(&error));
        Ok(())
    })
    .await?;
    Ok(HttpResponse::Ok().json(DeletedFile { id, object: "file", deleted: true }))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{open, wait_until};
    use super::super::wire::Purpose;
    use super::*;
    use crate::testing::Scratch;
    use actix_web::test::TestRequest;
    use actix_web::{FromRequest, HttpMessage};
    use futures_util::FutureExt;

    /// Regression: its content stayed, and did not count in the quota any more.
    #[actix_web::test]
    async fn a_file_is_removed_even_if_the_client_goes_away() {
        let folder = Scratch::new();
        let batches = open(&folder);
        let (id, owner, name, expires_at) = ("file-1".to_owned(), Owner::default(), String::new(), None);
        let row =
            tables::FileRow { id, owner, name, purpose: Purpose::Batch, bytes: 1, created_at: 1, expires_at };
        batches.database.call(move |db| tables::insert_file(db, &row, None)).await.unwrap();
        batches.folder.create_content("file-1").unwrap();
        let request = TestRequest::default().to_http_request();
        request.extensions_mut().insert(Owner::default());
        let owner = ReqData::extract(&request).await.unwrap();
        let service = Data::new(Service(Some(batches.clone())));
        // It is dropped while it waits.
        assert!(delete(service, owner, Path::from("file-1".to_owned())).now_or_never().is_none());
        wait_until(|| !batches.folder.content("file-1").exists()).await;
    }
}
