//! Paths of vLLM's server beside OpenAI's API: `/ping`, `GET /load` and `GET /server_info`.

use crate::server::App;
use actix_web::{HttpResponse, web};
use serde_json::json;

/// Handles `GET /load`: the number of sequences in flight.
pub async fn load(app: web::Data<App>) -> HttpResponse {
    HttpResponse::Ok().json(json!({"server_load": app.parts.status.pending()}))
}

/// Handles `GET /server_info`: what the server is, and the limits of its model.
pub async fn server_info(app: web::Data<App>) -> HttpResponse {
    let model = &app.parts.model;
    HttpResponse::Ok().json(json!({
        "server": "mainstem", "version": env!("CARGO_PKG_VERSION"), "model": model.name, "kind": model.kind,
        "endpoints": model.endpoints, "max_model_len": model.max_sequence_tokens, "vocab_size": model.vocab,
        "max_num_seqs": app.parts.live.slots.iter().map(|slots| slots.len()).sum::<usize>(),
    }))
}
