//! The API of llama.cpp's server: `POST /completion`, `GET /props` and `GET /slots`.
//!
//! Invariant: the parameters are the native ones of the same names, of which those that change the shape of
//! the answer are left out.

use super::dialect::{Dialect, DialectContext, Inner};
use super::frames::{Frames, Framing};
use super::native_body::{NativeBody, missing};
use super::token_text::{AnswerToken, TokenText};
use crate::actors::live::LiveSequence;
use crate::server::App;
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use crate::server::inflight::WATCHERS_MAX;
use crate::text::Tokenizer;
use actix_web::{HttpResponse, web};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Parameters besides those of sampling that the native API has by the same names, or knows as unsupported.
const SAME: [&str; 30] = [
    "seed",
    "stop",
    "ignore_eos",
    "grammar",
    "json_schema",
    "n_probs",
    "min_keep",
    "n_indent",
    "n_keep",
    "n_discard",
    "n_cmpl",
    "cache_prompt",
    "n_cache_reuse",
    "id_slot",
    "t_max_prompt_ms",
    "t_max_predict_ms",
    "return_progress",
    "response_fields",
    "lora",
    "image_data",
    "post_sampling_probs",
    "penalize_nl",
    "verbose",
    "adaptive_target",
    "adaptive_decay",
    "speculative.n_max",
    "speculative.n_min",
    "speculative.p_min",
    "cache_salt",
    "add_special_tokens",
];

/// Number of steps after which the sequences in the slots are known to one who begins to watch.
const STEPS_TO_SEE: u64 = 2;

/// Maximum time to wait for these steps, and time between looks.
const SEE_TIMEOUT: Duration = Duration::from_secs(1);
const SEE_INTERVAL: Duration = Duration::from_millis(5);

/// A request of `POST /completion`.
pub struct Completion {
    model: String,
    tokenizer: Arc<Tokenizer>,
    context: usize,
    n_predict: Value,
    with_probabilities: bool,
    /// Whether each chunk has the times so far.
    with_timings: bool,
    text: TokenText,
    stream: bool,
    /// The last choice, which says why the answer ended.
    finish: Value,
    usage: Value,
    timings: Value,
}

impl Dialect for Completion {
    const FRAMING: Framing = Framing::Sse { named: false };

    fn open(mut fields: Fields, context: &DialectContext<'_>) -> Result<(Completion, Inner), ApiError> {
        let mut body = NativeBody::default();
        let prompt = fields.take("prompt").ok_or_else(|| missing("prompt"))?;
        if prompt.as_array().is_some_and(|list| list.iter().any(|entry| !entry.is_number())) {
            let message = "'prompt' must be a string or a list of token ids; send a request for each prompt";
            return Err(ApiError::invalid("prompt", message));
        }
        body.set("prompt", prompt);
        let with_timings = fields.take_bool("timings_per_token", false)?;
        let with_ids = fields.take_bool("return_tokens", false)?;
        let stream = fields.take_bool("stream", false)?;
        let with_probabilities = fields.get("n_probs").is_some_and(|count| count.as_f64() > Some(0.0));
        let n_predict = fields.take("n_predict").unwrap_or(json!(-1));
        body.set("n_predict", n_predict.clone());
        body.take_sampling(&mut fields);
        body.take_same(&mut fields, SAME);
        fields.finish(&[])?;
        body.set("timings_per_token", true);
        body.set("return_token_ids", with_ids);
        body.set("return_tokens_as_token_ids", with_probabilities);
        if stream {
            body.set("stream", true);
            body.set("stream_options", json!({"include_usage": true, "continuous_usage_stats": true}));
        }
        let parts = context.parts;
        let completion = Completion {
            model: parts.model.name.clone(),
            tokenizer: parts.tokenizer.clone(),
            context: parts.model.max_sequence_tokens,
            n_predict,
            with_probabilities,
            with_timings,
            text: TokenText::default(),
            stream,
            finish: Value::Null,
            usage: Value::Null,
            timings: Value::Null,
        };
        Ok((completion, Inner { path: "/v1/completions", body: body.into_value() }))
    }

    fn response(&mut self, mut inner: Value) -> Value {
        (self.usage, self.timings) = (inner["usage"].take(), inner["timings"].take());
        let choice = inner["choices"][0].take();
        let probabilities = self.probabilities(&choice);
        let text = choice["text"].clone();
        let ids = choice.get("token_ids").cloned();
        self.finish = choice;
        self.last(text, ids.unwrap_or(json!([])), probabilities)
    }

    fn chunk(&mut self, mut inner: Value, out: &mut Frames) {
        if inner["usage"].is_object() {
            (self.usage, self.timings) = (inner["usage"].take(), inner["timings"].take());
        }
        if inner["choices"].get(0).is_none() {
            return;
        }
        let choice = inner["choices"][0].take();
        let mut event = json!({
            "index": 0, "content": choice["text"],
            "tokens": choice.get("token_ids").cloned().unwrap_or(json!([])),
            "stop": false, "id_slot": -1, "tokens_predicted": self.usage["completion_tokens"],
            "tokens_evaluated": self.usage["prompt_tokens"],
        });
        if let Some(probabilities) = self.probabilities(&choice) {
            event["completion_probabilities"] = probabilities;
        }
        if self.with_timings {
            event["timings"] = self.timings.clone();
        }
        let has_news = choice["text"] != "" || choice["logprobs"].is_object();
        if choice["finish_reason"].is_string() {
            self.finish = choice;
        }
        if has_news {
            out.push("", &event);
        }
    }

    fn end(&mut self, out: &mut Frames) {
        let last = self.last("".into(), json!([]), None);
        out.push("", &last);
    }

    fn error(error: ErrorParts<'_>) -> Value {
        let code = match error.kind {
            "authentication_error" => 401,
            "permission_error" => 403,
            "not_found_error" => 404,
            "rate_limit_error" => 429,
            "server_error" => 500,
            "service_unavailable_error" => 503,
            _ => 400,
        };
        json!({"error": {"code": code, "message": error.message, "type": error.kind}})
    }
}

impl Completion {
    /// Returns the whole answer, or the last event of a stream.
    fn last(&self, content: Value, tokens: Value, probabilities: Option<Value>) -> Value {
        let count = |name: &str| self.usage[name].as_u64().unwrap_or(0);
        let (prompt, predicted) = (count("prompt_tokens"), count("completion_tokens"));
        let word = self.finish["stop_reason"].as_str();
        let stop_type = match (self.finish["finish_reason"].as_str(), word) {
            (Some("length"), _) => "limit",
            (_, Some(_)) => "word",
            (Some(_), None) => "eos",
            (None, None) => "none",
        };
        let mut answer = json!({
            "index": 0, "content": content, "tokens": tokens, "id_slot": -1, "stop": true,
            "model": self.model, "tokens_predicted": predicted, "tokens_evaluated": prompt,
            "generation_settings":
                {"n_ctx": self.context, "n_predict": self.n_predict, "stream": self.stream},
            "truncated": false, "stop_type": stop_type, "stopping_word": word.unwrap_or_default(),
            "tokens_cached": prompt + predicted, "timings": self.timings,
        });
        if let Some(probabilities) = probabilities {
            answer["completion_probabilities"] = probabilities;
        }
        answer
    }

    /// Returns the tokens of a choice with their log-probabilities, if these are asked for.
    fn probabilities(&mut self, choice: &Value) -> Option<Value> {
        if !self.with_probabilities {
            return None;
        }
        let tokenizer = &self.tokenizer;
        let one = |id: u32, logprob: &Value| {
            let (text, bytes) = (tokenizer.token_text(id), tokenizer.token_bytes(id));
            json!({"id": id, "token": text, "bytes": bytes, "logprob": logprob})
        };
        let mut listed = Vec::new();
        self.text.divide(choice, |token: AnswerToken<'_>| {
            let mut entry = one(token.id, token.logprob);
            entry["top_logprobs"] = token.top(usize::MAX).map(|(id, logprob)| one(id, logprob)).collect();
            listed.push(entry);
        });
        (!listed.is_empty()).then(|| listed.into())
    }
}

/// Handles `GET /props`.
pub async fn props(app: web::Data<App>) -> HttpResponse {
    let (parts, model) = (&app.parts, &app.parts.model);
    let text = |id: Option<u32>| id.map_or(String::new(), |id| parts.tokenizer.token_text(id));
    let template = model.chat_template.as_ref().map_or("", |template| template.source());
    HttpResponse::Ok().json(json!({
        "default_generation_settings": {"n_ctx": model.max_sequence_tokens, "params": {"n_predict": -1}},
        "total_slots": parts.live.slots.iter().map(|slots| slots.len()).sum::<usize>(),
        "model_alias": model.name, "model_path": model.name, "chat_template": template,
        "bos_token": text(parts.tokenizer.bos_id()), "eos_token": text(parts.tokenizer.eos_id()),
        "modalities": {"vision": false, "audio": false},
        "build_info": format!("mainstem {}", env!("CARGO_PKG_VERSION")),
    }))
}

/// Handles `GET /slots`: all slots, with the numbers of tokens of the sequences in them.
pub async fn slots(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let live = &app.parts.live;
    let watcher = live.watch(WATCHERS_MAX).ok_or_else(|| ApiError::too_many_watchers(WATCHERS_MAX))?;
    let (seen, last) = (watcher.totals().steps + STEPS_TO_SEE, Instant::now() + SEE_TIMEOUT);
    let is_running = || app.parts.status.counts().0 > 0;
    while is_running() && watcher.totals().steps < seen && Instant::now() < last {
        sleep(SEE_INTERVAL).await;
    }
    // What was there when somebody watched before is not there any more.
    let is_known = is_running() && watcher.totals().steps >= seen;
    let mut slots = Vec::new();
    for (lane, range) in live.slots.iter().enumerate() {
        let sequences = watcher.sequences(lane);
        for slot in range.clone() {
            let mut sequences = sequences.sequences.iter().filter(|_| is_known);
            slots.push(slot_card(&app, slot, sequences.find(|sequence| sequence.slot == slot)));
        }
    }
    Ok(HttpResponse::Ok().json(slots))
}

fn slot_card(app: &App, slot: u32, sequence: Option<&LiveSequence>) -> Value {
    let mut card = json!({
        "id": slot, "n_ctx": app.parts.model.max_sequence_tokens,
        "speculative": app.parts.model.speculation.is_some(), "is_processing": sequence.is_some(),
    });
    if let Some(LiveSequence { number, prompt, computed, generated, limit, .. }) = sequence {
        card["id_task"] = (*number).into();
        card["n_prompt_tokens"] = (*prompt).into();
        card["n_prompt_tokens_processed"] = (*computed).into();
        card["next_token"] = json!([{"n_decoded": generated, "n_remain": limit.saturating_sub(*generated)}]);
    }
    card
}
