//! APIs of other servers, translated: a request becomes one of the native API, whose answer is translated
//! back, chunk by chunk if it streams.
//!
//! Invariant: a dialect has no scheduling, sampling or parsing of output of its own, and its errors have its
//! own shape, whoever refused the request.

mod dialect;

mod frames;

mod handler;

mod native_body;

mod token_text;

mod anthropic;

pub mod inferflow;

pub mod llama_server;

pub mod ollama;

mod root;

pub mod tgi;

pub mod vllm;

pub mod responses;

mod errors;

use super::openapi::describe::Api;
use super::wire::Health;

pub use anthropic::{CountTokens, Messages};
pub use dialect::{Caller, Dialect};
pub use errors::shape_errors;
pub use frames::Framing;
pub use handler::respond;
pub use responses::Responses;
pub use root::is_of_tgi;

/// Describes the paths. What bodies have is documented by the servers whose APIs they are.
pub fn describe_paths(api: &mut Api) {
    let lines = "application/x-ndjson";
    for (path, summary, streams) in [
        ("/v1/messages", "Answers a conversation, as Anthropic's API does.", Some("text/event-stream")),
        ("/v1/messages/count_tokens", "Counts the tokens of a conversation.", None),
        (
            "/v1/responses",
            "Answers a conversation, as OpenAI's Responses API does.",
            Some("text/event-stream"),
        ),
        ("/generate", "Continues a text, as text-generation-inference does.", None),
        ("/generate_stream", "Continues a text in a stream.", Some("text/event-stream")),
        ("/", "Continues a text, as text-generation-inference or Inferflow does.", Some("text/event-stream")),
        ("/completion", "Continues a text, as llama.cpp's server does.", Some("text/event-stream")),
        ("/api/generate", "Continues a text, as Ollama does.", Some(lines)),
        ("/api/chat", "Answers a conversation, as Ollama does.", Some(lines)),
        ("/api/embed", "Returns embeddings of texts, as Ollama does.", None),
        ("/api/embeddings", "Returns the embedding of a text, as older versions of Ollama do.", None),
        ("/api/show", "Describes the model, as Ollama does.", None),
    ] {
        let described = api.post(path, summary).body_object().fails_otherwise().returns_object();
        streams.into_iter().fold(described, |described, kind| described.returns_as(kind));
    }
    api.get("/", "Shows the web page, or says that the server runs.").returns_as("text/html");
    for (path, summary) in [
        ("/info", "Describes the server, as text-generation-inference does."),
        ("/props", "Describes the server, as llama.cpp's does."),
        ("/load", "Returns the number of requests, as vLLM does."),
        ("/server_info", "Describes the server, as vLLM does."),
        ("/api/tags", "Lists the served model, as Ollama does."),
        ("/api/ps", "Lists the models in memory, as Ollama does."),
        ("/api/version", "Returns the version of Ollama's API."),
    ] {
        api.get(path, summary).fails_otherwise().returns_object();
    }
    api.get("/slots", "Lists the slots, as llama.cpp's server does.").fails_otherwise().returns_objects();
    let summary = "Tells whether requests are served.";
    api.get("/ping", summary).returns::<Health>().returns_with::<Health>("503");
    api.post("/ping", summary).returns::<Health>().returns_with::<Health>("503");
    api.get("/v1/responses/{id}", "Returns a response that is kept.").returns_object();
    api.delete("/v1/responses/{id}", "Deletes a response that is kept.").returns_object();
    api.get("/v1/responses/{id}/input_items", "Lists the input of a response.").returns_object();
}
