//! The API of Hugging Face's text-generation-inference: `POST /generate`, `/generate_stream` and `/`, and
//! `GET /info`.
//!
//! Invariant: a stream has an event for each token, whose texts together are the generated text; the last one
//! has this text.

mod request;

use super::dialect::{Dialect, DialectContext, Inner};
use super::frames::{Frames, Framing};
use super::token_text::{AnswerToken, TokenText};
use crate::server::App;
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use crate::text::Tokenizer;
use actix_web::{HttpResponse, web};
use request::{BEST_OF_MAX, Settings, parse};
use serde_json::{Value, json};
use std::marker::PhantomData;
use std::mem;
use std::sync::Arc;

/// The paths of the API, which differ in the form of the response.
pub trait Form: Send + 'static {
    /// Returns whether the answer to a request is a stream.
    fn is_stream(fields: &mut Fields) -> Result<bool, ApiError>;

    /// Returns the response body of an answer.
    fn whole(answer: Value) -> Value {
        answer
    }
}

/// `POST /generate`.
pub struct Whole;

/// `POST /generate_stream`.
pub struct Streamed;

/// `POST /`, which Hugging Face's clients use: a list with one answer, or a stream.
pub struct Either;

impl Form for Whole {
    fn is_stream(fields: &mut Fields) -> Result<bool, ApiError> {
        fields.take_bool("stream", false)?;
        Ok(false)
    }
}

impl Form for Streamed {
    fn is_stream(fields: &mut Fields) -> Result<bool, ApiError> {
        fields.take_bool("stream", true)?;
        Ok(true)
    }
}

impl Form for Either {
    fn is_stream(fields: &mut Fields) -> Result<bool, ApiError> {
        fields.take_bool("stream", false)
    }

    fn whole(answer: Value) -> Value {
        json!([answer])
    }
}

/// A request of the API.
pub struct Generate<F> {
    settings: Settings,
    tokenizer: Arc<Tokenizer>,
    /// The model's end tokens.
    eos: Vec<u32>,
    stream: StreamState,
    form: PhantomData<F>,
}

/// The state of a stream.
#[derive(Default)]
struct StreamState {
    text: TokenText,
    generated: String,
    /// Number of tokens so far.
    tokens: u64,
    /// The event of the last token, which waits for the end of the stream.
    held: Option<Value>,
    finish: Option<&'static str>,
    input_length: Value,
}

impl<F: Form> Dialect for Generate<F> {
    const FRAMING: Framing = Framing::Sse { named: false };

    fn open(mut fields: Fields, context: &DialectContext<'_>) -> Result<(Generate<F>, Inner), ApiError> {
        let stream = F::is_stream(&mut fields)?;
        let (settings, body) = parse(fields, stream)?;
        let generate = Generate {
            settings,
            tokenizer: context.parts.tokenizer.clone(),
            eos: context.parts.model.eos.clone(),
            stream: StreamState::default(),
            form: PhantomData,
        };
        Ok((generate, Inner { path: "/v1/completions", body }))
    }

    fn response(&mut self, inner: Value) -> Value {
        let choices = inner["choices"].as_array().map_or(&[][..], Vec::as_slice);
        let numbered = choices.iter().enumerate();
        let mut sequences: Vec<(f64, Value)> =
            numbered.map(|(index, choice)| (mean_logprob(choice), self.sequence(index, choice))).collect();
        sequences.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut sequences = sequences.into_iter().map(|(_, sequence)| sequence);
        let mut best = sequences.next().unwrap_or_default();
        let text = best.as_object_mut().and_then(|best| best.shift_remove("generated_text"));
        let mut answer = json!({"generated_text": text});
        if self.settings.details {
            let others: Vec<Value> = sequences.collect();
            if !others.is_empty() {
                best["best_of_sequences"] = others.into();
            }
            answer["details"] = best;
        }
        F::whole(answer)
    }

    fn chunk(&mut self, inner: Value, out: &mut Frames) {
        let state = &mut self.stream;
        if let Some(tokens) = inner["usage"].get("prompt_tokens") {
            state.input_length = tokens.clone();
        }
        let Some(choice) = inner["choices"].get(0) else { return };
        state.finish = state.finish.or_else(|| finish_reason(choice));
        state.generated += choice["text"].as_str().unwrap_or_default();
        let mut text = mem::take(&mut state.text);
        let mut is_end_token = false;
        text.divide(choice, |token| {
            is_end_token = self.eos.contains(&token.id) || self.tokenizer.is_special(token.id);
            let event = self.event(&token);
            if let Some(before) = self.stream.held.replace(event) {
                out.push("", &before);
            }
        });
        self.stream.text = text;
        // The last token's event has what is known at the end.
        let is_last =
            is_end_token || self.stream.finish.is_some() || self.stream.tokens == self.settings.limit;
        if let Some(event) = self.stream.held.take_if(|_| !is_last) {
            out.push("", &event);
        }
    }

    fn end(&mut self, out: &mut Frames) {
        let state = mem::take(&mut self.stream);
        // An answer may end without a token of its own.
        let silent = || {
            let token = json!({"id": 0, "text": "", "logprob": 0.0, "special": true});
            json!({"index": state.tokens + 1, "token": token})
        };
        let mut event = state.held.unwrap_or_else(silent);
        event["generated_text"] = format!("{}{}", self.settings.prefix, state.generated).into();
        event["details"] = match self.settings.details {
            false => Value::Null,
            true => json!({
                "finish_reason": state.finish, "generated_tokens": state.tokens, "seed": self.settings.seed,
                "input_length": state.input_length,
            }),
        };
        out.push("", &event);
    }

    fn error(error: ErrorParts<'_>) -> Value {
        json!({"error": error.message, "error_type": error_type(error)})
    }

    fn rename(error: ApiError) -> ApiError {
        error
            .rename_param("prompt", "inputs")
            .replace_in_names("'prompt'", "'inputs'")
            .replace_in_names("truncate_prompt_tokens", "truncate")
            .replace_in_names("prompt_logprobs", "decoder_input_details")
            .replace_in_names("guided_json", "grammar.value")
            .replace_in_names("guided_regex", "grammar.value")
    }
}

/// Returns the type of an error, by which TGI's clients tell errors apart.
pub fn error_type(error: ErrorParts<'_>) -> &str {
    match error.kind {
        "invalid_request_error" => "validation",
        "rate_limit_error" | "service_unavailable_error" => "overloaded",
        "server_error" => "generation",
        kind => kind,
    }
}

impl<F> Generate<F> {
    /// Returns a whole sequence, with its details.
    fn sequence(&self, index: usize, choice: &Value) -> Value {
        let text = choice["text"].as_str().unwrap_or_default();
        let generated = format!("{}{text}", self.settings.prefix);
        if !self.settings.details {
            return json!({"generated_text": generated});
        }
        let (mut tokens, mut top) = (Vec::new(), Vec::new());
        TokenText::default().divide(choice, |token| {
            tokens.push(self.token(&token));
            top.push(self.top_tokens(&token));
        });
        let mut sequence = json!({
            "generated_text": generated, "finish_reason": finish_reason(choice),
            "generated_tokens": tokens.len(),
            "seed": self.settings.seed.map(|seed| seed.wrapping_add(index as u64)),
            "prefill": if self.settings.prefill { self.prefill(choice) } else { json!([]) },
            "tokens": tokens,
        });
        if self.settings.top_n > 0 {
            sequence["top_tokens"] = top.into();
        }
        sequence
    }

    /// Returns the event of the next token.
    fn event(&mut self, token: &AnswerToken<'_>) -> Value {
        self.stream.tokens += 1;
        let mut event = json!({
            "index": self.stream.tokens, "token": self.token(token), "generated_text": null, "details": null,
        });
        if self.settings.top_n > 0 {
            event["top_tokens"] = self.top_tokens(token).into();
        }
        event
    }

    fn token(&self, token: &AnswerToken<'_>) -> Value {
        let special = self.tokenizer.is_special(token.id);
        json!({"id": token.id, "text": token.text, "logprob": token.logprob, "special": special})
    }

    /// Returns the tokens of the prompt, of which the first one has no log-probability. Those of an
    /// encoder-decoder are the encoder's input, of which none has one.
    fn prefill(&self, choice: &Value) -> Value {
        let (tokenizer, scores) = match &choice["decoder_prompt_token_ids"] {
            Value::Null => (&*self.tokenizer, &choice["prompt_logprobs"]),
            _ => (self.tokenizer.source(), &Value::Null),
        };
        let ids = choice["prompt_token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let token = |(at, id): (usize, u64)| {
            let logprob = &scores[at][id.to_string()]["logprob"];
            json!({"id": id, "text": tokenizer.token_text(id as u32), "logprob": logprob})
        };
        ids.enumerate().map(token).collect()
    }

    fn top_tokens(&self, token: &AnswerToken<'_>) -> Vec<Value> {
        let entry = |(id, logprob): (u32, &Value)| {
            let (text, special) = (self.tokenizer.token_text(id), self.tokenizer.is_special(id));
            json!({"id": id, "text": text, "logprob": logprob, "special": special})
        };
        token.top(self.settings.top_n).map(entry).collect()
    }
}

fn finish_reason(choice: &Value) -> Option<&'static str> {
    match (choice["finish_reason"].as_str()?, &choice["stop_reason"]) {
        ("length", _) => Some("length"),
        (_, Value::String(_)) => Some("stop_sequence"),
        _ => Some("eos_token"),
    }
}

/// Returns the mean log-probability of a choice's tokens, by which sequences are compared.
fn mean_logprob(choice: &Value) -> f64 {
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().map_or(&[][..], Vec::as_slice);
    let sum: f64 = logprobs.iter().filter_map(Value::as_f64).sum();
    if logprobs.is_empty() { f64::NEG_INFINITY } else { sum / logprobs.len() as f64 }
}

/// Handles `GET /info`.
pub async fn info(app: web::Data<App>) -> HttpResponse {
    let (model, config) = (&app.parts.model, &app.config);
    HttpResponse::Ok().json(json!({
        "model_id": model.name, "model_sha": null, "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": model.max_choices, "max_best_of": BEST_OF_MAX, "max_stop_sequences": 64,
        "max_input_tokens": model.max_sequence_tokens.saturating_sub(1),
        "max_total_tokens": model.max_sequence_tokens, "validation_workers": config.workers,
        "max_client_batch_size": 1, "router": "mainstem", "version": env!("CARGO_PKG_VERSION"), "sha": null,
        "docker_label": null,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_of_an_encoder_decoder_has_the_tokens_of_the_source() {
        let tokenizers = Tokenizer::bytes(256).unwrap().with_source(Tokenizer::bytes(300).unwrap());
        let generate = Generate::<Whole> {
            settings: Settings {
                details: true,
                prefill: true,
                prefix: String::new(),
                limit: 1,
                top_n: 0,
                seed: None,
            },
            tokenizer: Arc::new(tokenizers),
            eos: Vec::new(),
            stream: StreamState::default(),
            form: PhantomData,
        };
        let scores = json!([{"299": {"logprob": -1.0}}]);
        let mut choice = json!({ "prompt_token_ids": [299], "prompt_logprobs": scores });
        assert_eq!(generate.prefill(&choice), json!([{"id": 299, "text": "", "logprob": -1.0}]));
        choice["decoder_prompt_token_ids"] = json!([1]);
        assert_eq!(generate.prefill(&choice), json!([{"id": 299, "text": " 299", "logprob": null}]));
    }
}
