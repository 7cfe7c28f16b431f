//! A test server with a fake encoder-only engine.
//!
//! Invariant: the fake engine answers texts in reverse order, so that their order in the response is the
//! server's work.

use super::test_server::{BOS, Client, DEADLINE, Response, TestServer, model, tokenizer_with};
use crate::actors::{EmbeddingDefaults, EventSender, ModelInfo, PromptingDefaults};
use crate::config::ServerConfig;
use crate::formats::PoolingConfig;
use crate::model::spec::Kind;
use crate::request::{FinishReason, Pooling, Request, TokenEvent};
use serde_json::{Value, json};

pub const EMBEDDINGS: &str = "/v1/embeddings";
pub const FILL_MASK: &str = "/v1/fill-mask";
pub const EOS: u32 = 257;
pub const MASK: u32 = 258;
/// Maximum number of tokens of a text.
pub const LONGEST: usize = 16;

pub fn prompting() -> EmbeddingDefaults {
    EmbeddingDefaults {
        dimensions: 3,
        pooling: PoolingConfig::Supported(Pooling::Cls),
        dense: Vec::new(),
        normalize: true,
        prompts: Default::default(),
        similarity: Default::default(),
        unsupported: Vec::new(),
        mask_tokens: vec!["<mask>".into()],
        pad_token: None,
    }
}

pub fn encoder(prompting: EmbeddingDefaults) -> ModelInfo {
    ModelInfo {
        kind: Kind::Encoder,
        encoder_context: LONGEST,
        max_sequence_tokens: LONGEST,
        context: LONGEST,
        vocab: 259,
        endpoints: vec![EMBEDDINGS, FILL_MASK],
        prompting: PromptingDefaults::Encoder(prompting),
        ..model()
    }
}

pub fn server_for(model: ModelInfo) -> TestServer {
    server_with_config(model, |_| {})
}

pub fn server_with_config(model: ModelInfo, configure: impl FnOnce(&mut ServerConfig)) -> TestServer {
    let special = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let second = json!({ "Sequence": { "id": "B", "type_id": 1 } });
    let end = json!({ "SpecialToken": { "id": "</s>", "type_id": 1 } });
    let around = json!({
        "type": "TemplateProcessing", "single": [special("<s>"), text.clone(), special("</s>")],
        "pair": [special("<s>"), text, special("</s>"), second, end],
        "special_tokens": {
            "<s>": { "id": "<s>", "ids": [BOS], "tokens": ["<s>"] },
            "</s>": { "id": "</s>", "ids": [EOS], "tokens": ["</s>"] }
        }
    });
    let tokenizer = tokenizer_with(&["<s>", "</s>", "<mask>"], around);
    TestServer::for_model(model, tokenizer, None, configure, DEADLINE)
}

pub fn encoder_server() -> TestServer {
    server_for(encoder(prompting()))
}

pub async fn begin(server: &TestServer, path: &str, body: &Value) -> Client {
    Client::send(server.address, "POST", path, "", &body.to_string()).await
}

pub async fn post(server: &TestServer, path: &str, body: &Value) -> Response {
    begin(server, path, body).await.response().await
}

/// Returns a text's tokens with the special tokens around it.
pub fn around(text: &str) -> Vec<u32> {
    [BOS].into_iter().chain(text.bytes().map(u32::from)).chain([EOS]).collect()
}

/// Posts `body` while the fake engine sends a list of events per text, for the last text first.
pub async fn play(
    server: &mut TestServer,
    path: &str,
    body: Value,
    answers: Vec<Vec<TokenEvent>>,
) -> (Vec<Request>, Response) {
    let client = begin(server, path, &body).await;
    let mut calls: Vec<(Request, EventSender)> = Vec::new();
    for _ in &answers {
        calls.push(server.next_request().await);
    }
    for ((_, sender), events) in calls.iter().zip(answers).rev() {
        events.into_iter().for_each(|event| sender.send(event));
        sender.send(TokenEvent::Finished(FinishReason::Stop));
    }
    (calls.into_iter().map(|(request, _)| request).collect(), client.response().await)
}
