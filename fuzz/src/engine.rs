//! The API of models without weights: requests are parsed and answered as those of a server, with tokens that
//! the target chooses.

use actix::{Actor, Context, Handler, System, SystemRunner};
use futures_util::StreamExt;
use mainstem::actors::response_memory::ResponseMemory;
use mainstem::actors::stream::event_channel;
use mainstem::actors::{
    EncoderDecoderPrompting, EmbeddingDefaults, IntakeHandle, Kind, LiveView, ModelInfo,
    PromptingDefaults, Status, Submit, TokenStream,
};
use mainstem::config::{Config, Overrides};
use mainstem::decoding::Pooling;
use mainstem::formats::PoolingConfig;
use mainstem::memory::{PagePool, split_slots};
use mainstem::request::{FinishReason, Request, RequestError, Task, Token, TokenEvent};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use mainstem::text::output::{CallFormat, OutputFormats, ReasoningFormat};
use mainstem::text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TEMPLATE: &str = include_str!("../../tests/fixtures/chat/tools.jinja");

/// Special tokens, after the tokens of single bytes.
const SPECIAL: [&str; 4] = ["<s>", "</s>", "<mask>", "__en__"];

/// Maximum number of tokens of a sequence.
const CONTEXT: usize = 96;

/// Maximum number of tokens of an answer.
const ANSWER: usize = 24;

/// The API of each kind of model.
pub struct Apis {
    system: SystemRunner,
    apis: Vec<(Vec<&'static str>, LocalApi)>,
    /// The bytes that requests are answered with.
    answer: Arc<Mutex<Vec<u8>>>,
}

/// An engine that answers every request at once.
struct FakeIntake(Arc<Mutex<Vec<u8>>>);

impl Actor for FakeIntake {
    type Context = Context<FakeIntake>;
}

impl Handler<Submit> for FakeIntake {
    type Result = Result<Vec<TokenStream>, RequestError>;

    fn handle(&mut self, Submit { requests, .. }: Submit, _: &mut Self::Context) -> Self::Result {
        let answer = self.0.lock().unwrap_or_else(|broken| broken.into_inner()).clone();
        Ok(requests.iter().map(|request| respond(request, &answer)).collect())
    }
}

/// Answers a request with these bytes as tokens.
fn respond(request: &Request, answer: &[u8]) -> TokenStream {
    let memory = ResponseMemory::new(usize::MAX);
    let (events, stream) = event_channel(memory.hold(request.client.id));
    let token = |id: u32, top: Option<u8>| Token {
        id,
        logprob: top.map(|_| -0.5),
        rank: None,
        top: (0..u32::from(top.unwrap_or(0))).map(|other| (other, -1.0)).collect(),
    };
    match &request.task {
        Task::Generate => {
            assert!(!request.prompt.is_empty(), "a request has a prompt");
            let in_vocabulary = |ids: &[u32]| ids.iter().all(|id| (*id as usize) < vocabulary());
            assert!(in_vocabulary(&request.prompt) && in_vocabulary(&request.encoder_input));
            events.send(TokenEvent::Started { cached_tokens: 0 });
            if let Some(top) = request.prompt_logprobs {
                let tokens = (0..).zip(request.prompt.iter());
                let of_prompt = tokens.map(|(at, id)| token(*id, (at > 0).then_some(top))).collect();
                events.send(TokenEvent::Prompt(of_prompt));
            }
            let tokens = answer.iter().take(ANSWER.min(request.max_tokens as usize));
            tokens.for_each(|id| events.send(TokenEvent::Token(token((*id).into(), request.logprobs))));
            if request.beams.is_some() {
                events.send(TokenEvent::BeamScore(-1.5));
            }
        }
        Task::Embed(_) => events.send(TokenEvent::Embedding(vec![0.5, -1.0, 2.0])),
        Task::EmbedTokens => {
            let vectors = [0.5, -1.0, 2.0].repeat(request.encoder_input.len());
            events.send(TokenEvent::Embedding(vectors));
        }
        Task::FillMask { positions, top_k } => {
            positions.iter().for_each(|_| events.send(TokenEvent::MaskFilled(token(7, Some(*top_k)))));
        }
    }
    events.send(TokenEvent::Finished(FinishReason::Length));
    stream
}

fn vocabulary() -> usize {
    256 + SPECIAL.len()
}

/// Returns a tokenizer with a token per byte, and the special ones.
fn tokenizer() -> Tokenizer {
    let is_printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    let letters = (0..256).map(|byte| if is_printable(&byte) { byte } else { others.next().unwrap_or(0) });
    let letters = letters.filter_map(char::from_u32).map(String::from);
    let vocab: Map<String, Value> = letters.zip(0..).map(|(letter, id)| (letter, json!(id))).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let added = (256..).zip(SPECIAL).map(|(id, name)| {
        json!({
            "id": id, "content": name, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
        })
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": []
        }
    });
    let files = crate::folder(&[("tokenizer.json", file.to_string().as_bytes())]);
    Tokenizer::from_folder(&files).expect("the tokenizer must be valid")
}

/// Returns the data of a model of each kind.
fn models() -> [ModelInfo; 3] {
    let template = ChatTemplate::new("tools.jinja", TEMPLATE, BTreeMap::new());
    let decoder = ModelInfo {
        name: "m".into(),
        kind: Kind::Decoder,
        endpoints: vec!["/v1/completions", "/v1/chat/completions"],
        has_head: true,
        context: CONTEXT,
        max_sequence_tokens: CONTEXT,
        encoder_context: 0,
        max_choices: 8,
        vocab: vocabulary(),
        source_vocab: vocabulary(),
        eos: vec![257],
        sampling_defaults: Default::default(),
        prompting: PromptingDefaults::Decoder(None),
        classifier: None,
        pair_template: None,
        chat_template: Some(Arc::new(template.expect("the fixture must be valid"))),
        output_formats: OutputFormats {
            calls: CallFormat::names().next().and_then(CallFormat::named),
            reasoning: ReasoningFormat::names().next().and_then(ReasoningFormat::named),
        },
        speculation: None,
        created: 1,
    };
    let translator = ModelInfo {
        kind: Kind::EncoderDecoder,
        endpoints: vec!["/v1/completions"],
        encoder_context: CONTEXT,
        prompting: PromptingDefaults::EncoderDecoder(EncoderDecoderPrompting {
            start_token: 257,
            forced_bos: None,
            special_tokens: ["<s>", "</s>"].map(str::to_owned).into(),
        }),
        ..decoder.clone()
    };
    let encoder = ModelInfo {
        kind: Kind::Encoder,
        endpoints: vec!["/v1/embeddings", "/v1/fill-mask"],
        encoder_context: CONTEXT,
        prompting: PromptingDefaults::Encoder(EmbeddingDefaults {
            dimensions: 3,
            pooling: PoolingConfig::Supported(Pooling::Cls),
            dense: Vec::new(),
            normalize: true,
            prompts: Default::default(),
            similarity: Default::default(),
            unsupported: Vec::new(),
            mask_tokens: vec!["<mask>".into()],
            pad_token: None,
        }),
        ..decoder.clone()
    };
    [decoder, translator, encoder]
}

impl Apis {
    /// Creates the APIs.
    pub fn new() -> Apis {
        let system = System::new();
        let answer: Arc<Mutex<Vec<u8>>> = Arc::default();
        let apis = system.block_on(async {
            let config = Config::load(None, Overrides::default()).expect("the defaults must be valid");
            let api = |model: ModelInfo| {
                let intake = IntakeHandle(FakeIntake(answer.clone()).start().recipient());
                let tokenizer = Arc::new(tokenizer());
                let sampling = model.sampling(&tokenizer).expect("the defaults must be valid");
                let status = Arc::new(Status::new(Duration::ZERO, 1));
                let paths = model.endpoints.iter().copied().chain(["/v1/tokenize", "/v1/detokenize"]);
                let paths = paths.collect();
                let live = Arc::new(LiveView::new(split_slots(1, 1), PagePool::new(2, 32)));
                let view = (live, [].into());
                let parts = ServeParts::new(intake, status, view, tokenizer, model, Arc::new(sampling));
                (paths, LocalApi::new(parts, config.server.clone()))
            };
            models().map(api).into()
        });
        Apis { system, apis, answer }
    }

    /// Posts a body to the endpoint number `choice`, answers with tokens, and checks the response.
    pub fn post(&self, choice: u8, body: &[u8], answer: &[u8]) {
        *self.answer.lock().unwrap_or_else(|broken| broken.into_inner()) = answer.to_vec();
        let (paths, api) = &self.apis[choice as usize % self.apis.len()];
        let path = paths[choice as usize / self.apis.len() % paths.len()];
        self.system.block_on(async {
            match api.post_bytes(path, body.to_vec().into()).await {
                Ok(ResponseBody::Json(json)) => {
                    let parsed: serde_json::Result<Value> = serde_json::from_slice(&json);
                    assert!(parsed.is_ok(), "the response is JSON");
                }
                Ok(ResponseBody::Events(events)) => {
                    let bytes: Vec<u8> = events.collect::<Vec<_>>().await.concat();
                    check_events(&String::from_utf8_lossy(&bytes));
                }
                Err(error) => {
                    let body = serde_json::to_string(&error.body()).expect("an error must be JSON");
                    assert!(error.code() != "internal_error", "{body}");
                }
            }
        });
    }
}

impl Default for Apis {
    fn default() -> Apis {
        Apis::new()
    }
}

/// Checks an event stream: JSON events, and a last one that ends it.
fn check_events(text: &str) {
    let events: Vec<&str> = text.split_terminator("\n\n").collect();
    let (last, events) = events.split_last().expect("a stream has events");
    assert_eq!(*last, "data: [DONE]");
    for event in events {
        let json = event.strip_prefix("data: ").expect("events have data");
        let parsed: serde_json::Result<Value> = serde_json::from_str(json);
        assert!(parsed.is_ok(), "an event is JSON: {json}");
    }
}
