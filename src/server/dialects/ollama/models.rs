//! Descriptions of the model in Ollama's API: `GET /api/tags`, `/api/ps`, `/api/version`, `POST /api/show`.

use crate::server::App;
use crate::server::body::{BodyHead, INLINE_BYTES, RequestBody};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue};
use actix_web::{HttpResponse, web};
use jiff::Timestamp;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Version of Ollama whose API this is; its clients refuse older ones than they know.
const VERSION: &str = "0.12.6";

/// When a model that stays loaded is unloaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Handles `GET /api/version`.
pub async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": VERSION}))
}

/// Handles `GET /api/tags`: the names of the model.
pub async fn tags(app: web::Data<App>) -> HttpResponse {
    let models: Vec<Value> = app.model_names().map(|name| card(&app, name)).collect();
    HttpResponse::Ok().json(json!({"models": models}))
}

/// Handles `GET /api/ps`: the names of the model, which is always loaded.
pub async fn process_list(app: web::Data<App>) -> HttpResponse {
    let loaded = |name| {
        let mut card = card(&app, name);
        card["expires_at"] = NEVER.into();
        card["size_vram"] = 0.into();
        card["context_length"] = app.parts.model.max_sequence_tokens.into();
        card
    };
    let models: Vec<Value> = app.model_names().map(loaded).collect();
    HttpResponse::Ok().json(json!({"models": models}))
}

/// Handles `POST /api/show`: describes the model.
pub async fn show(
    app: web::Data<App>,
    head: BodyHead,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let body = RequestBody::receive(&app, head, payload).await?;
    // It is read here, between the chunks of streams.
    if body.bytes.len() > INLINE_BYTES {
        return Err(ApiError::body_too_large(INLINE_BYTES));
    }
    let mut fields = Fields::parse(&body.bytes)?;
    // Before, it was `name`.
    let old = fields.take_string("name")?;
    let name = fields.take_string("model")?.or(old);
    app.check_model(name.as_deref())?;
    fields.finish(&[&[
        ("verbose", NoOpValue::Any),
        ("system", NoOpValue::Any),
        ("options", NoOpValue::Any),
    ]])?;
    let (parts, model) = (&app.parts, &app.parts.model);
    let template = model.chat_template.as_ref().map_or("", |template| template.source());
    Ok(HttpResponse::Ok().json(json!({
        "modelfile": "", "parameters": "", "license": "", "template": template,
        "modified_at": time(model.created), "details": details(),
        "model_info": {
            "general.architecture": "mainstem", "general.basename": model.name,
            "mainstem.context_length": model.max_sequence_tokens, "mainstem.vocab_size": model.vocab,
            "tokenizer.ggml.bos_token_id": parts.tokenizer.bos_id(),
            "tokenizer.ggml.eos_token_id": parts.tokenizer.eos_id(),
        },
        "capabilities": capabilities(&app),
    })))
}

/// Returns what the model can do.
fn capabilities(app: &App) -> Vec<&'static str> {
    let model = &app.parts.model;
    let (formats, generates) = (&model.output_formats, model.generates());
    let of = [
        (model.prompting.embedding().is_some(), "embedding"),
        (generates, "completion"),
        (generates && formats.calls.is_some(), "tools"),
        (generates && formats.reasoning.is_some(), "thinking"),
    ];
    of.into_iter().filter(|(can, _)| *can).map(|(_, name)| name).collect()
}

fn card(app: &App, name: &str) -> Value {
    // Clients show the beginning of a digest; the files have none.
    let digest = Sha256::digest(name.as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "name": name, "model": name, "modified_at": time(app.parts.model.created), "size": 0,
        "digest": digest, "details": details(),
    })
}

fn details() -> Value {
    json!({
        "parent_model": "", "format": "mainstem", "family": "", "families": [], "parameter_size": "",
        "quantization_level": "",
    })
}

/// Returns a time in the form of the API.
fn time(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(0);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}
