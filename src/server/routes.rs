//! Routes, and the HTTP side of their handlers: limits on request bodies, status codes and headers.
//!
//! Invariant: a path answers other methods than its own with 405 and an `Allow` header.

use super::access::RequestId;
use super::auth::Owner;
use super::batches::{self, Service};
use super::body::{BodyHead, RequestBody};
use super::chat::ChatApi;
use super::completions::CompletionsApi;
use super::dialects::inferflow::Query;
use super::dialects::responses::stored;
use super::dialects::{
    self, Caller, CountTokens, Dialect, Framing, Messages, Responses, is_of_tgi, llama_server, ollama, tgi,
    vllm,
};
use super::embeddings::EmbeddingsRequest;
use super::encoders::{EncoderApi, run_encoder_request};
use super::error::ApiError;
use super::fields::{Fields, IgnoredFields};
use super::fill_mask::FillMaskRequest;
use super::respond::{ApiResponse, GenerationApi, ResponseBody, Turn, respond};
use super::scoring::classify::{self, ClassifyRequest};
use super::scoring::rerank::{self, RerankRequest};
use super::scoring::score::{self, ScoreRequest};
use super::tokenize::{detokenize, run_tokenizer_request, tokenize};
use super::{App, OpenResponse, ServeParts, inflight, info, openapi, web_page};
use crate::request::Client;
use crate::telemetry;
use actix_web::body::SizedStream;
use actix_web::http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, Resource, ResponseError, Route, guard};
use async_stream::stream;
use futures_util::{Stream, StreamExt};
use serde::Serialize;
#[cfg(test)]
use std::cell::RefCell;
use std::convert::Infallible;
use std::sync::Arc;
use tracing::info;

/// Response header with the ignored fields of a request.
const IGNORED_FIELDS: HeaderName = HeaderName::from_static("x-mainstem-ignored");

/// Size of the chunks in which a response body is passed to the connection.
const CHUNK_BYTES: usize = 32 << 10;

/// Registers the path of the metrics.
pub fn metrics_route(config: &mut web::ServiceConfig) {
    config.service(resource("/metrics", GET).route(get().to(info::metrics)));
}

/// Registers `/`, which takes requests of other servers' clients, and shows the web page, or without
/// `with_page` says that the server runs: some clients ask for it first.
pub fn root_route(config: &mut web::ServiceConfig, with_page: bool) {
    let root = |allowed| resource("/", allowed).route(web::post().to(handle_root));
    config.service(match with_page {
        true => root("GET, HEAD, POST").route(get().to(web_page::handle)),
        false => root("GET, HEAD, POST").route(get().to(async || "Mainstem is running\n")),
    });
}

/// Registers the other files of the web page, and the sequences in flight, which it shows.
pub fn page_routes(config: &mut web::ServiceConfig) {
    config
        .service(resource("/v1/inflight", GET).route(get().to(inflight::handle)))
        .service(resource("/slots", GET).route(get().to(llama_server::slots)));
    for path in web_page::paths().filter(|path| *path != "/") {
        config.service(resource(path, GET).route(get().to(web_page::handle)));
    }
}

/// Registers all paths but those of the metrics and of the web page, with their handlers.
pub fn routes(config: &mut web::ServiceConfig) {
    config
        .service(
            resource(CompletionsApi::PATH, "POST").route(web::post().to(handle_generation::<CompletionsApi>)),
        )
        .service(resource(ChatApi::PATH, "POST").route(web::post().to(handle_generation::<ChatApi>)))
        .service(
            resource(EmbeddingsRequest::PATH, "POST")
                .route(web::post().to(handle_encoder_request::<EmbeddingsRequest>)),
        )
        .service(
            resource(FillMaskRequest::PATH, "POST")
                .route(web::post().to(handle_encoder_request::<FillMaskRequest>)),
        )
        .configure(scoring_routes)
        .service(resource("/v1/models", GET).route(get().to(info::models)))
        .service(resource("/v1/models/{id:.+}", GET).route(get().to(info::model)))
        .configure(batch_routes)
        .configure(dialect_routes)
        .configure(server_routes)
        .service(resource("/health", GET).route(get().to(info::health)))
        .service(resource(openapi::PATH, GET).route(get().to(openapi::handle)))
        .service(resource("/version", GET).route(get().to(info::version)))
        .default_service(web::to(async |app: web::Data<App>| {
            Err::<HttpResponse, ApiError>(ApiError::not_found(&app.parts.model.endpoints))
        }));
    // Other servers have these paths without the prefix.
    for prefix in ["/v1", ""] {
        let tokens = resource(&format!("{prefix}/tokenize"), "POST");
        let texts = resource(&format!("{prefix}/detokenize"), "POST");
        config
            .service(tokens.route(
                web::post().to(|app, id, head, body| handle_tokenizer_request(app, id, head, body, tokenize)),
            ))
            .service(
                texts.route(
                    web::post()
                        .to(|app, id, head, body| handle_tokenizer_request(app, id, head, body, detokenize)),
                ),
            );
    }
}

/// Registers the paths of the APIs that compare and classify texts, with those that other servers have.
fn scoring_routes(config: &mut web::ServiceConfig) {
    let encoder = |path, route: Route| resource(path, "POST").route(route);
    let [native, short, cohere] = rerank::PATHS;
    for path in [native, short] {
        config.service(encoder(path, web::post().to(handle_encoder_request::<RerankRequest<true>>)));
    }
    config.service(encoder(cohere, web::post().to(handle_encoder_request::<RerankRequest<false>>)));
    for path in score::PATHS {
        config.service(encoder(path, web::post().to(handle_encoder_request::<ScoreRequest>)));
    }
    for path in classify::PATHS {
        config.service(encoder(path, web::post().to(handle_encoder_request::<ClassifyRequest>)));
    }
}

/// Registers the paths of other APIs.
fn dialect_routes(config: &mut web::ServiceConfig) {
    let dialect = |path, route: Route| resource(path, "POST").route(route);
    config
        .service(dialect("/v1/messages", web::post().to(handle_dialect::<Messages>)))
        .service(dialect("/v1/messages/count_tokens", web::post().to(handle_dialect::<CountTokens>)))
        .service(dialect("/v1/responses", web::post().to(handle_dialect::<Responses>)))
        .service(
            resource("/v1/responses/{id}", "GET, HEAD, DELETE")
                .route(get().to(stored::retrieve))
                .route(web::delete().to(stored::delete)),
        )
        .service(resource("/v1/responses/{id}/input_items", GET).route(get().to(stored::input_items)));
}

/// Registers the paths of other servers.
fn server_routes(config: &mut web::ServiceConfig) {
    config
        .configure(ollama_routes)
        .service(resource("/generate", "POST").route(translated::<tgi::Generate<tgi::Whole>>()))
        .service(resource("/generate_stream", "POST").route(translated::<tgi::Generate<tgi::Streamed>>()))
        .service(resource("/info", GET).route(get().to(tgi::info)))
        .service(resource("/completion", "POST").route(translated::<llama_server::Completion>()))
        .service(resource("/props", GET).route(get().to(llama_server::props)))
        .service(resource("/load", GET).route(get().to(vllm::load)))
        .service(resource("/server_info", GET).route(get().to(vllm::server_info)))
        .service(
            resource("/ping", "GET, HEAD, POST")
                .route(get().to(info::health))
                .route(web::post().to(info::health)),
        );
}

/// Registers the paths of Ollama's API.
fn ollama_routes(config: &mut web::ServiceConfig) {
    config
        .service(resource("/api/generate", "POST").route(translated::<ollama::Generate>()))
        .service(resource("/api/chat", "POST").route(translated::<ollama::Chat>()))
        .service(resource("/api/embed", "POST").route(translated::<ollama::Embed>()))
        .service(resource("/api/embeddings", "POST").route(translated::<ollama::Embeddings>()))
        .service(resource("/api/show", "POST").route(web::post().to(ollama::show)))
        .service(resource("/api/tags", GET).route(get().to(ollama::tags)))
        .service(resource("/api/ps", GET).route(get().to(ollama::process_list)))
        .service(resource("/api/version", GET).route(get().to(ollama::version)));
}

/// Returns a route for the requests of a dialect.
fn translated<D: Dialect>() -> Route {
    web::post().to(handle_dialect::<D>)
}

/// Registers the paths of files and batches.
fn batch_routes(config: &mut web::ServiceConfig) {
    use batches::{files, requests};
    let (list_or_new, get_or_delete) = ("GET, HEAD, POST", "GET, HEAD, DELETE");
    config
        .service(
            resource("/v1/files", list_or_new)
                .route(get().to(files::list))
                .route(web::post().to(files::upload)),
        )
        .service(
            resource("/v1/files/{id}", get_or_delete)
                .route(get().to(files::retrieve))
                .route(web::delete().to(files::delete)),
        )
        .service(resource("/v1/files/{id}/content", GET).route(get().to(files::content)))
        .service(
            resource("/v1/batches", list_or_new)
                .route(get().to(requests::list))
                .route(web::post().to(handle_new_batch)),
        )
        .service(resource("/v1/batches/{id}", GET).route(get().to(requests::retrieve)))
        .service(resource("/v1/batches/{id}/cancel", "POST").route(web::post().to(requests::cancel)));
}

/// Methods of the read-only paths.
const GET: &str = "GET, HEAD";

/// Returns a route for GET and HEAD.
fn get() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

/// Returns a resource that answers 405 to every method without a route. `allowed` is its `Allow` header.
fn resource(path: &str, allowed: &'static str) -> Resource {
    #[cfg(test)]
    REGISTERED.with_borrow_mut(|paths| paths.push((path.to_owned(), allowed)));
    web::resource(path).default_service(web::to(move || async move {
        let mut response = ApiError::method_not_allowed(allowed).error_response();
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        response
    }))
}

/// Handles a text generation request.
async fn handle_generation<A: GenerationApi + 'static>(
    app: web::Data<App>,
    id: web::ReqData<RequestId>,
    client: web::ReqData<Arc<Client>>,
    head: BodyHead,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    // Registered after the upload: shutdown must not wait for an upload that never ends.
    let body = RequestBody::receive(&app, head, payload).await?;
    let open = app.open_response();
    let ApiResponse { body, ignored } = respond::<A>(&app, id.0.clone(), client.into_inner(), body).await?;
    let response = response(body, Framing::Sse { named: false }, open);
    Ok(name_ignored_fields(response, &id, &ignored))
}

/// Handles a request of another server's API.
async fn handle_dialect<D: Dialect>(
    app: web::Data<App>,
    service: web::Data<Service>,
    id: web::ReqData<RequestId>,
    client: web::ReqData<Arc<Client>>,
    owner: web::ReqData<Owner>,
    (head, payload): (BodyHead, web::Payload),
) -> Result<HttpResponse, ApiError> {
    let body = RequestBody::receive(&app, head, payload).await?;
    let (client, owner) = (client.into_inner(), owner.into_inner());
    translate::<D>(app, (id.0.clone(), client, owner, service), body).await
}

/// Handles `POST /`: a request of TGI or of Inferflow.
async fn handle_root(
    app: web::Data<App>,
    service: web::Data<Service>,
    id: web::ReqData<RequestId>,
    client: web::ReqData<Arc<Client>>,
    owner: web::ReqData<Owner>,
    (head, payload): (BodyHead, web::Payload),
) -> Result<HttpResponse, ApiError> {
    let body = RequestBody::receive(&app, head, payload).await?;
    let (client, owner) = (client.into_inner(), owner.into_inner());
    let caller = (id.0.clone(), client, owner, service);
    match is_of_tgi(body.bytes.clone()).await? {
        true => translate::<tgi::Generate<tgi::Either>>(app, caller, body).await,
        false => translate::<Query>(app, caller, body).await,
    }
}

/// Answers a request of a dialect, whose body has been received.
async fn translate<D: Dialect>(
    app: web::Data<App>,
    (id, client, owner, service): (Arc<str>, Arc<Client>, Owner, web::Data<Service>),
    body: RequestBody,
) -> Result<HttpResponse, ApiError> {
    let open = app.open_response();
    let (held, body_bytes) = (app.parts.status.responses.hold(client.id), body.bytes.len());
    // What is translated may be somewhat longer than the body.
    let native_bytes_max = app.config.body_limit_bytes.saturating_mul(2);
    let caller = Caller { id: id.clone(), client, owner, service, held, body_bytes, native_bytes_max };
    let id = RequestId(id);
    let ApiResponse { body, ignored } = dialects::respond::<D>(&app, caller, body).await?;
    Ok(name_ignored_fields(response(body, D::FRAMING, open), &id, &ignored))
}

/// Returns the response with a body, whose stream has this framing.
fn response(body: ResponseBody, framing: Framing, open: OpenResponse) -> HttpResponse {
    match body {
        ResponseBody::Json(json) => json_response(json, open),
        ResponseBody::Events(events) => HttpResponse::Ok()
            .insert_header((CONTENT_TYPE, framing.content_type()))
            .insert_header((CACHE_CONTROL, "no-cache"))
            .insert_header(("X-Accel-Buffering", "no"))
            .streaming(events.map(Ok::<_, Infallible>)),
    }
}

/// Names the ignored fields of a request in a header, in the log and in a metric.
fn name_ignored_fields(mut response: HttpResponse, id: &RequestId, ignored: &IgnoredFields) -> HttpResponse {
    if ignored.count > 0 {
        let names = HeaderValue::from_str(&ignored.names).expect("the names are ASCII; this is a bug");
        response.headers_mut().insert(IGNORED_FIELDS, names);
        telemetry::IGNORED_FIELDS.add(ignored.count as u64);
        info!(request = &*id.0, count = ignored.count, fields = ignored.names, "ignored unknown fields");
    }
    response
}

/// Handles a request to an encoder API.
async fn handle_encoder_request<Q: EncoderApi>(
    app: web::Data<App>,
    id: web::ReqData<RequestId>,
    client: web::ReqData<Arc<Client>>,
    head: BodyHead,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let body = RequestBody::receive(&app, head, payload).await?;
    let open = app.open_response();
    let (json, ignored) = run_encoder_request::<Q>(&app, id.0.clone(), client.into_inner(), body).await?;
    Ok(name_ignored_fields(json_response(json, open), &id, &ignored))
}

/// Creates a batch.
async fn handle_new_batch(
    app: web::Data<App>,
    service: web::Data<Service>,
    id: web::ReqData<RequestId>,
    owner: web::ReqData<Owner>,
    head: BodyHead,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let created = batches::requests::create(&app, &service, owner.into_inner(), head, payload);
    let (batch, ignored) = created.await?;
    Ok(name_ignored_fields(HttpResponse::Ok().json(batch), &id, &ignored))
}

/// Returns a JSON response. `open` is dropped once the body has been passed to the connection.
fn json_response(json: Bytes, open: OpenResponse) -> HttpResponse {
    let body = SizedStream::new(json.len() as u64, body_chunks(json, open));
    HttpResponse::Ok().insert_header((CONTENT_TYPE, "application/json")).body(body)
}

/// Splits a body into chunks, so that `open` is dropped when its last chunk, not its first, is passed on.
fn body_chunks(body: Bytes, open: OpenResponse) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream! {
        let _open = open;
        let mut rest = body;
        while !rest.is_empty() {
            yield Ok(rest.split_to(rest.len().min(CHUNK_BYTES)));
        }
    }
}

/// Handles a request that needs only the tokenizer.
async fn handle_tokenizer_request<T: Serialize + Send + 'static>(
    app: web::Data<App>,
    id: web::ReqData<RequestId>,
    head: BodyHead,
    payload: web::Payload,
    answer: fn(&ServeParts, &Turn, Fields) -> Result<T, ApiError>,
) -> Result<HttpResponse, ApiError> {
    let body = RequestBody::receive(&app, head, payload).await?;
    let open = app.open_response();
    let (json, ignored) = run_tokenizer_request(&app, body, answer).await?;
    Ok(name_ignored_fields(json_response(json, open), &id, &ignored))
}

#[cfg(test)]
thread_local! {
    /// Paths with their `Allow` headers, as they are registered.
    static REGISTERED: RefCell<Vec<(String, &'static str)>> = const { RefCell::new(Vec::new()) };
}

/// Returns all paths that a server registers, with their `Allow` headers.
#[cfg(test)]
pub fn registered_paths() -> Vec<(String, &'static str)> {
    REGISTERED.take();
    let root = |config: &mut web::ServiceConfig| root_route(config, false);
    let app = actix_web::App::new().configure(routes).configure(root);
    let _ = app.configure(metrics_route).configure(page_routes);
    REGISTERED.take()
}
