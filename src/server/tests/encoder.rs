//! A test server with a fake encoder-only engine.
//!
//! Invariant: the fake engine answers texts in reverse order, so that their order in the response is the
//! server's work.

use super::house::{BOS, Client, DEADLINE, House, Response, model, tokenizer_with};
use crate::actors::{Conventions, EncoderConventions, EventSender, ModelInfo};
use crate::config::ServerConfig;
use crate::formats::FoundPooling;
use crate::model::spec::Kind;
use crate::request::{FinishReason, Pooling, Request, TokenEvent};
use serde_json::{Value, json};

pub const EMBEDDINGS: &str = "/v1/embeddings";
pub const FILL_MASK: &str = "/v1/fill-mask";
pub const EOS: u32 = 257;
pub const MASK: u32 = 258;
/// Maximum number of tokens of a text.
pub const LONGEST: usize = 16;

pub fn conventions() -> EncoderConventions {
    EncoderConventions {
        dimensions: 3,
        pooling: FoundPooling::Served(Pooling::Cls),
        normalize: true,
        unserved: Vec::new(),
        masks: vec!["<mask>".into()],
        pad: None,
    }
}

pub fn encoder(conventions: EncoderConventions) -> ModelInfo {
    ModelInfo {
        kind: Kind::Encoder,
        source_context: LONGEST,
        longest: LONGEST,
        context: LONGEST,
        vocab: 259,
        endpoints: vec![EMBEDDINGS, FILL_MASK],
        conventions: Conventions::Encoder(conventions),
        ..model()
    }
}

pub fn house_of(model: ModelInfo) -> House {
    configured(model, |_| {})
}

pub fn configured(model: ModelInfo, configure: impl FnOnce(&mut ServerConfig)) -> House {
    let special = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let around = json!({
        "type": "TemplateProcessing", "single": [special("<s>"), text, special("</s>")], "pair": [],
        "special_tokens": {
            "<s>": { "id": "<s>", "ids": [BOS], "tokens": ["<s>"] },
            "</s>": { "id": "</s>", "ids": [EOS], "tokens": ["</s>"] }
        }
    });
    let tokenizer = tokenizer_with(&["<s>", "</s>", "<mask>"], around);
    House::of(model, tokenizer, None, configure, DEADLINE)
}

pub fn house() -> House {
    house_of(encoder(conventions()))
}

pub async fn begin(server: &House, path: &str, body: &Value) -> Client {
    Client::send(server.address, "POST", path, "", &body.to_string()).await
}

pub async fn post(server: &House, path: &str, body: &Value) -> Response {
    begin(server, path, body).await.response().await
}

/// Returns a text's tokens with the special tokens around it.
pub fn around(text: &str) -> Vec<u32> {
    [BOS].into_iter().chain(text.bytes().map(u32::from)).chain([EOS]).collect()
}

/// Posts `body` while the fake engine sends a list of events per text, for the last text first.
pub async fn play(
    server: &mut House,
    path: &str,
    body: Value,
    answers: Vec<Vec<TokenEvent>>,
) -> (Vec<Request>, Response) {
    let client = begin(server, path, &body).await;
    let mut calls: Vec<(Request, EventSender)> = Vec::new();
    for _ in &answers {
        calls.push(server.call().await);
    }
    for ((_, sender), events) in calls.iter().zip(answers).rev() {
        events.into_iter().for_each(|event| sender.send(event));
        sender.send(TokenEvent::Finished(FinishReason::Stop));
    }
    (calls.into_iter().map(|(request, _)| request).collect(), client.response().await)
}
