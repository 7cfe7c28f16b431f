//! Handlers of the responses that are kept: `/v1/responses/{id}` and its input items.
//!
//! Invariant: a response of another owner is answered like one that does not exist.

use crate::server::auth::Owner;
use crate::server::batches::Service;
use crate::server::batches::query::ListQuery;
use crate::server::batches::wire::ListObject;
use crate::server::error::ApiError;
use actix_web::http::header::CONTENT_TYPE;
use actix_web::web::{Data, Path, ReqData};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::{Value, json};

/// Default and maximum number of input items in a page of the list, as in OpenAI's API.
const PAGE_ITEMS: [i64; 2] = [20, 100];

/// Returns a response: `GET /v1/responses/{id}`.
pub async fn retrieve(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    if request.query_string().split('&').any(|part| part == "stream=true") {
        return Err(ApiError::unsupported("stream", "'stream' is not supported for responses that are kept"));
    }
    let object = service.response(&owner, &id).await?;
    Ok(HttpResponse::Ok().insert_header((CONTENT_TYPE, "application/json")).body(object))
}

/// Removes a response: `DELETE /v1/responses/{id}`.
pub async fn delete(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
) -> Result<HttpResponse, ApiError> {
    service.delete_response(&owner, &id).await?;
    Ok(HttpResponse::Ok().json(json!({"id": &*id, "object": "response", "deleted": true})))
}

/// Lists the input of a response: `GET /v1/responses/{id}/input_items`.
pub async fn input_items(
    service: Data<Service>,
    owner: ReqData<Owner>,
    id: Path<String>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let [usual, most] = PAGE_ITEMS;
    let query = ListQuery::parse(&request, usual, most)?;
    let mut items = service.response_input(&owner, &id).await?;
    if !query.page.is_ascending {
        items.reverse();
    }
    let id_of = |item: &Value| item["id"].as_str().unwrap_or_default().to_owned();
    if let Some(after) = &query.page.after {
        let at = items.iter().position(|item| id_of(item) == *after).ok_or_else(|| query.unknown_after())?;
        items.drain(..=at);
    }
    let limit = usize::try_from(query.page.limit).unwrap_or(usize::MAX);
    let has_more = items.len() > limit;
    items.truncate(limit);
    Ok(HttpResponse::Ok()
        .json(ListObject::new(items, has_more, |item| item["id"].as_str().unwrap_or_default())))
}
