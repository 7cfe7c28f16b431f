//! Endpoints that describe the server: models, health, metrics, version.
//!
//! Invariant: no handler here waits for the engine.

use super::error::ApiError;
use super::openapi::describe::Api;
use super::{App, wire};
use crate::actors::ModelInfo;
use crate::actors::speculation::SpeculationSetup;
use crate::request::DraftSource;
use crate::telemetry;
use actix_web::{HttpResponse, web};
use metrics_exporter_prometheus::PrometheusHandle;

/// Describes the paths.
pub fn describe_paths(api: &mut Api) {
    api.get("/v1/models", "Lists the served model.").returns::<wire::ModelList<'static>>();
    api.get("/v1/models/{id}", "Describes the served model.").returns::<wire::ModelCard<'static>>();
    api.get("/health", "Tells whether requests are served.")
        .returns::<wire::Health>()
        .returns_with::<wire::Health>("503");
    api.get("/version", "Returns the version of the program.").returns::<wire::Version>();
    api.get("/metrics", "Returns metrics in the Prometheus text format.").returns_as("text/plain");
}

/// Handles `GET /v1/models`.
pub async fn models(app: web::Data<App>) -> HttpResponse {
    let data = app.model_names().map(|name| model_card(&app.parts.model, name)).collect();
    HttpResponse::Ok().json(wire::ModelList { object: "list", data })
}

/// Handles `GET /v1/models/{id}`.
pub async fn model(app: web::Data<App>, id: web::Path<String>) -> Result<HttpResponse, ApiError> {
    app.check_model(Some(&id))?;
    Ok(HttpResponse::Ok().json(model_card(&app.parts.model, &id)))
}

/// Returns the description of the model under one of its names.
fn model_card<'a>(model: &'a ModelInfo, name: &'a str) -> wire::ModelCard<'a> {
    wire::ModelCard {
        id: name,
        object: "model",
        created: model.created,
        owned_by: "mainstem",
        max_model_len: model.max_sequence_tokens,
        kind: model.kind,
        endpoints: &model.endpoints,
        context: model.context,
        source_context: (model.encoder_context > 0).then_some(model.encoder_context),
        dimensions: model.prompting.embedding().map(|defaults| defaults.dimensions),
        speculation: model.speculation.as_ref().map(speculation_card),
    }
}

fn speculation_card(setup: &SpeculationSetup) -> wire::SpeculationCard<'_> {
    wire::SpeculationCard {
        method: setup.drafter.map_or("off", DraftSource::name),
        draft_model: setup.draft.as_ref().map(|draft| draft.name.as_str()),
        max_drafts: setup.max_drafts,
        acceptance: setup.acceptance.name(),
    }
}

/// Handles `GET /health`: 503 while the server drains, when requests are in flight but the decode loop makes
/// no progress, and after the engine has failed.
pub async fn health(app: web::Data<App>) -> HttpResponse {
    let status = &app.parts.status;
    let stalled = status.stalled_for() > app.config.stalled_after;
    let (mut response, word) = match (status.has_failed(), status.is_draining(), stalled) {
        (true, _, _) => (HttpResponse::ServiceUnavailable(), "failed"),
        (_, true, _) => (HttpResponse::ServiceUnavailable(), "draining"),
        (_, _, true) => (HttpResponse::ServiceUnavailable(), "stalled"),
        (false, false, false) => (HttpResponse::Ok(), "ok"),
    };
    let dropped = Some(telemetry::dropped_log_lines()).filter(|dropped| *dropped > 0);
    response.json(wire::Health { status: word, log_lines_dropped: dropped })
}

/// Handles `GET /metrics`.
pub async fn metrics(metrics: web::Data<PrometheusHandle>) -> HttpResponse {
    telemetry::LOG_LINES_DROPPED.counter().absolute(telemetry::dropped_log_lines());
    let text = "text/plain; version=0.0.4; charset=utf-8";
    HttpResponse::Ok().content_type(text).body(metrics.render())
}

/// Handles `GET /version`.
pub async fn version() -> HttpResponse {
    HttpResponse::Ok().json(wire::Version { version: env!("CARGO_PKG_VERSION") })
}
