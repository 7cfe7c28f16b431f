//! `GET /openapi.json`: the OpenAPI document. Each module of handlers describes its paths beside them, with
//! the types of its bodies.
//!
//! Invariant: the document has every path that is registered, and no other.

pub mod describe;

pub mod requests;

use super::error::ErrorBody;
use super::scoring::{classify, rerank, score};
use super::{batches, chat, completions, dialects, embeddings, fill_mask, inflight, info, tokenize};
use actix_web::HttpResponse;
use actix_web::http::header::CONTENT_TYPE;
use actix_web::web::Bytes;
use describe::{Api, JSON};
use std::sync::LazyLock;
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{Components, InfoBuilder, OpenApi, OpenApiBuilder};

/// The path of the document.
pub const PATH: &str = "/openapi.json";

/// The document as JSON.
static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| {
    let json = serde_json::to_vec(&document()).expect("a document is JSON; anything else is a bug");
    json.into()
});

/// Handles `GET /openapi.json`.
pub async fn handle() -> HttpResponse {
    HttpResponse::Ok().insert_header((CONTENT_TYPE, JSON)).body(DOCUMENT.clone())
}

/// Describes all paths. Modules of further paths are added here.
fn describe_all(api: &mut Api) {
    chat::describe_paths(api);
    completions::describe_paths(api);
    embeddings::describe_paths(api);
    fill_mask::describe_paths(api);
    score::describe_paths(api);
    rerank::describe_paths(api);
    classify::describe_paths(api);
    tokenize::describe_paths(api);
    batches::describe_paths(api);
    inflight::describe_paths(api);
    info::describe_paths(api);
    dialects::describe_paths(api);
    api.get(PATH, "Returns this document.").returns_object();
}

/// Returns the document.
fn document() -> OpenApi {
    let mut api = Api::default();
    describe_all(&mut api);
    let (paths, schemas) = api.finish::<ErrorBody<'static>>();
    let key = HttpBuilder::new().scheme(HttpAuthScheme::Bearer);
    let key = key.description(Some("An API key, if the server requires one.")).build();
    let components = Components::builder().schemas_from_iter(schemas);
    let in_header = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("x-api-key")));
    let components = components
        .security_scheme("key", SecurityScheme::Http(key))
        .security_scheme("x-api-key", in_header)
        .build();
    let info = InfoBuilder::new().title("Mainstem").version(env!("CARGO_PKG_VERSION")).description(Some(
        "An inference server for transformer models. Which paths it serves depends on the model and on its \
         configuration.",
    ));
    OpenApiBuilder::new()
        .info(info.build())
        .paths(paths)
        .components(Some(components))
        // Without a key, or with one in either header.
        .security(Some([
            SecurityRequirement::default(),
            SecurityRequirement::new("key", [] as [&str; 0]),
            SecurityRequirement::new("x-api-key", [] as [&str; 0]),
        ]))
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::routes::registered_paths;
    use crate::server::web_page;
    use std::collections::BTreeSet;

    /// Returns a registered path as the document writes it: without the patterns of its parameters.
    fn without_patterns(path: &str) -> String {
        let mut parts = path.split(':');
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| text + &part[part.find('}').unwrap_or(0)..])
    }

    /// Returns the methods of a path in the document, as in an `Allow` header.
    fn methods(item: &serde_json::Value) -> String {
        let has = |name: &str| item.get(name).is_some();
        let names = [("get", "GET, HEAD"), ("post", "POST"), ("delete", "DELETE")];
        names.into_iter().filter(|(name, _)| has(name)).map(|(_, text)| text).collect::<Vec<_>>().join(", ")
    }

    /// A path that is added without a description, or a description of nothing, fails here.
    #[test]
    fn the_document_has_every_registered_path_with_its_methods() {
        let document = serde_json::to_value(document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let described: BTreeSet<_> = paths.iter().map(|(path, item)| (path.clone(), methods(item))).collect();
        let registered =
            registered_paths().into_iter().filter(|(path, _)| path == "/" || !web_page::is_file(path));
        let registered: BTreeSet<_> =
            registered.map(|(path, allowed)| (without_patterns(&path), allowed.to_owned())).collect();
        assert_eq!(described, registered);
        assert!(described.len() > 15);
    }

    /// A reader that takes the schema for an event's finds that the answers are none.
    #[test]
    fn server_sent_events_have_no_schema() {
        let document = serde_json::to_value(document()).unwrap();
        let has_schema = |operation: &serde_json::Value| {
            let events = operation["responses"]["200"]["content"].get("text/event-stream")?;
            Some(events.get("schema").is_some())
        };
        let items = document["paths"].as_object().unwrap().values();
        let operations = items.flat_map(|item| item.as_object().unwrap().values());
        let found: Vec<_> = operations.filter_map(has_schema).collect();
        assert!(found.len() > 5 && !found.contains(&true), "{found:?}");
    }

    #[test]
    fn every_reference_has_its_schema_and_every_operation_an_id_of_its_own() {
        let document = serde_json::to_value(document()).unwrap();
        let text = document.to_string();
        for name in text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
        }
        let ids: Vec<_> =
            text.split("\"operationId\":\"").skip(1).filter_map(|it| it.split('"').next()).collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
        assert_eq!(without_patterns("/v1/models/{id:.+}"), "/v1/models/{id}");
    }
}
