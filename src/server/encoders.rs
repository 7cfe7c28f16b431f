//! Requests to encoder-only models: a list of texts, and one response when all of them are processed. The
//! engine batches the texts; this module submits a limited number at a time, so that other requests find
//! capacity, and collects their events.
//!
//! Invariant: the outputs are in the order of the texts, an error in one text fails the request, and once the
//! first texts are accepted, the others are accepted too.

use super::body::RequestBody;
use super::error::ApiError;
use super::fields::{Fields, IgnoredFields, UnsupportedParams};
use super::held_body::json_body;
use super::origin::{Origin, Urgency};
use super::prompt_ids::{check_text_len, check_vocabulary, encode_text};
use super::prompts::{Prompt, parse_prompts};
use super::respond::{Turn, admit, interrupt, parse_off_loop};
use super::{App, ServeParts};
use crate::actors::Kind;
use crate::actors::TokenStream;
use crate::actors::request_metrics::RequestMetrics;
use crate::actors::response_memory::{HeldBytes, event_bytes};
use crate::request::{Client, FinishReason, Request, RequestError, Task, TokenEvent};
use actix_web::web::{self, Bytes};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use serde::Serialize;
use std::sync::Arc;
use tokio::select;
use tokio::time::Instant;

/// Maximum number of texts of one request, as in the OpenAI API.
const INPUTS_MAX: usize = 2048;

/// Maximum memory of the candidates of a mask with the values of the response that are made of them, as a
/// multiple of the candidates.
const CANDIDATES_FACTOR: usize = 12;

/// Responses for more texts than this are serialized off the event loop.
pub const INLINE_INPUTS: usize = 16;

/// An API of encoder-only models: parsing of its request bodies and construction of its responses.
pub trait EncoderApi: Sized + Send + 'static {
    /// Path of the endpoint.
    const PATH: &'static str;
    /// Response body.
    type Response: Serialize;

    /// Parses the fields of a request, in its turn, into the request and its inputs, in order.
    fn parse(parts: &ServeParts, turn: &Turn, fields: Fields) -> Result<(Self, Vec<EncoderInput>), ApiError>;

    /// Builds the response to the request `id` from the outputs of all inputs, in their order.
    fn build_response(
        &self,
        parts: &ServeParts,
        id: &str,
        found: Vec<EncoderOutput>,
    ) -> Result<Self::Response, ApiError>;

    /// Returns whether the response for `texts` texts takes long enough to serialize that it must not block
    /// the event loop.
    fn is_large(&self, texts: usize) -> bool {
        texts > INLINE_INPUTS
    }
}

/// A tokenized text and the task to run on it.
#[derive(Clone)]
pub struct EncoderInput {
    /// Token ids: at least one, and at most the encoder's context.
    pub ids: Arc<[u32]>,
    /// Index of the first token of the second of two texts, if the model tells them apart.
    pub second_text: Option<u32>,
    pub task: Task,
}

/// The engine's events for one input.
pub struct EncoderOutput {
    pub input: EncoderInput,
    pub events: Vec<TokenEvent>,
}

/// Takes the shared parameters of the encoder APIs out of a body and returns its tokenized texts. Parameters
/// in `unsupported` are an error unless their value has no effect. `prompt` goes before each text.
pub fn parse_texts(
    mut fields: Fields,
    (parts, turn): (&ServeParts, &Turn),
    unsupported: UnsupportedParams,
    prompt: &str,
) -> Result<Vec<Arc<[u32]>>, ApiError> {
    let add_special = fields.take_bool("add_special_tokens", true)?;
    let value = fields.take("input");
    // Tokenization may take a while, so other errors are reported first.
    fields.finish(&[unsupported])?;
    let is_list = value.as_ref().and_then(|value| value.get(0)).is_some_and(|first| !first.is_number());
    let texts = parse_prompts("input", value, parts.model.vocab)?;
    check_input_count("input", texts.len())?;
    let with_prompts = texts.iter().map(|text| match text {
        Prompt::Text(text) => prompt.len().saturating_add(text.len()),
        Prompt::Ids(_) => 0,
    });
    turn.hold_text(with_prompts.fold(0, usize::saturating_add), "input")?;
    let named = |index| if is_list { format!("'input[{index}]'") } else { "'input'".to_owned() };
    let ids = texts.into_iter().enumerate();
    ids.map(|(index, text)| tokenize_text(parts, (prompt, text), &named(index), add_special)).collect()
}

/// Returns an error if the parameter `name` has too many elements.
pub fn check_input_count(name: &str, count: usize) -> Result<(), ApiError> {
    if count <= INPUTS_MAX {
        return Ok(());
    }
    Err(ApiError::invalid(name, format!("'{name}' has {count} elements; the maximum is {INPUTS_MAX}")))
}

/// Returns an error if a number that a response would have is not finite.
pub fn check_finite(numbers: &[f32]) -> Result<(), ApiError> {
    match numbers.iter().all(|number| number.is_finite()) {
        true => Ok(()),
        false => Err(ApiError::internal("the model computed a number that is not finite")),
    }
}

/// Tokenizes one text, with a prompt before it. `name` is what error messages call it.
fn tokenize_text(
    parts: &ServeParts,
    (prompt, text): (&str, Prompt),
    name: &str,
    add_special: bool,
) -> Result<Arc<[u32]>, ApiError> {
    let empty = || ApiError::invalid("input", format!("{name} is empty"));
    if text.is_empty() {
        return Err(empty());
    }
    let ids = match text {
        Prompt::Ids(ids) => ids,
        Prompt::Text(text) => encode_text(parts, &[prompt, &text].concat(), add_special, "input", name)?,
    };
    if ids.is_empty() {
        return Err(empty());
    }
    check_text_len(parts, "input", name, ids.len())?;
    check_vocabulary(parts, "input", name, &ids)?;
    Ok(ids.into())
}

/// Handles a request of a client: parses the body, runs its inputs and serializes the response. Returns it
/// with the ignored fields of the request.
pub async fn run_encoder_request<Q: EncoderApi>(
    app: &Arc<App>,
    id: Arc<str>,
    client: Arc<Client>,
    body: RequestBody,
) -> Result<(Bytes, IgnoredFields), ApiError> {
    let arrived = Instant::now();
    let _open = admit(app, Q::PATH, client.id)?;
    let held = app.parts.status.responses.hold(client.id);
    let parse = |parts: &ServeParts, turn: &Turn, mut fields: Fields| {
        let urgency = Urgency::parse(&mut fields)?;
        Ok((urgency, Q::parse(parts, turn, fields)?))
    };
    let ((urgency, (question, inputs)), ignored) =
        parse_off_loop(app, body, app.parts.longest_text, parse).await?;
    let origin = Origin::new(client, urgency)?;
    let found = EncoderCall { app, id: id.clone(), origin, arrived, held: &held }.run(&inputs).await?;
    if !question.is_large(found.len()) {
        return Ok((serialize_response(&app.parts, &id, &question, found, held)?, ignored));
    }
    let app = app.clone();
    let written = web::block(move || serialize_response(&app.parts, &id, &question, found, held));
    let failed = |error| ApiError::internal(format!("serializing the response failed: {error}"));
    Ok((written.await.map_err(failed)??, ignored))
}

fn serialize_response<Q: EncoderApi>(
    parts: &ServeParts,
    id: &str,
    question: &Q,
    found: Vec<EncoderOutput>,
    held: HeldBytes,
) -> Result<Bytes, ApiError> {
    let answer = question.build_response(parts, id, found)?;
    Ok(json_body(held, &answer)?)
}

/// A request whose inputs run in the engine.
struct EncoderCall<'a> {
    app: &'a App,
    id: Arc<str>,
    origin: Origin,
    arrived: Instant,
    /// The memory of its outputs.
    held: &'a HeldBytes,
}

impl EncoderCall<'_> {
    /// Runs all inputs and returns their outputs in order. At most half of the engine's capacity is used at a
    /// time; as inputs finish, further ones are submitted.
    async fn run(self, inputs: &[EncoderInput]) -> Result<Vec<EncoderOutput>, RequestError> {
        let half = (self.app.parts.model.max_choices / 2).max(1);
        let first = self.requests(&inputs[..half.min(inputs.len())]);
        let tokens = inputs.iter().map(|input| input.ids.len()).sum();
        let first_request = first[0].clone();
        let streams = self.app.parts.intake.submit(first).await?;
        let mut measure = RequestMetrics::new(&first_request).with_prompt_tokens(tokens);
        let ends = self.app.config.request_timeout.map(|limit| (self.arrived + limit, limit));
        let ended = select! {
            biased;
            ended = self.collect_outputs(inputs, streams, &measure) => ended,
            error = interrupt(ends, self.app.abort.subscribe()) => Err(error),
        };
        match &ended {
            Ok(_) => measure.finish(FinishReason::Stop.as_str()),
            Err(error) => measure.fail(error),
        }
        let found = ended?.into_iter().zip(inputs);
        Ok(found.map(|(events, input)| EncoderOutput { input: input.clone(), events }).collect())
    }

    /// Collects the events of all inputs and submits a further input for each one that finishes. `first` are
    /// the streams of the inputs that are submitted already. Dropping the future cancels the inputs in the
    /// engine.
    async fn collect_outputs(
        &self,
        inputs: &[EncoderInput],
        first: Vec<TokenStream>,
        measure: &RequestMetrics,
    ) -> Result<Vec<Vec<TokenEvent>>, RequestError> {
        let mut found = vec![Vec::new(); inputs.len()];
        let mut submitted = first.len();
        let numbered = first.into_iter().enumerate();
        let mut pending: FuturesUnordered<_> =
            numbered.map(|(index, stream)| self.collect_events(index, stream, measure)).collect();
        while let Some(done) = pending.next().await {
            let mut finished = vec![done?];
            while let Some(Some(another)) = pending.next().now_or_never() {
                finished.push(another?);
            }
            let next = inputs.len().min(submitted + finished.len());
            finished.into_iter().for_each(|(index, events)| found[index] = events);
            if next > submitted {
                let streams = self
                    .app
                    .parts
                    .intake
                    .submit_continuation(self.requests(&inputs[submitted..next]))
                    .await?;
                let numbered = (submitted..).zip(streams);
                pending.extend(numbered.map(|(index, stream)| self.collect_events(index, stream, measure)));
                submitted = next;
            }
        }
        Ok(found)
    }

    fn requests(&self, inputs: &[EncoderInput]) -> Vec<Request> {
        let is_prompt = self.app.parts.model.kind == Kind::Decoder;
        let request = |EncoderInput { ids, second_text, task }: &EncoderInput| {
            let (prompt, encoder_input) =
                if is_prompt { (ids.clone(), Arc::default()) } else { (Arc::default(), ids.clone()) };
            Request {
                task: task.clone(),
                encoder_input,
                second_text: *second_text,
                arrived: self.arrived.into(),
                time_limit: self.app.config.request_timeout,
                ..Request::greedy(self.id.clone(), prompt, 0)
            }
        };
        inputs.iter().map(request).map(|request| self.origin.of(request)).collect()
    }

    /// Collects all events of an input. Returns them with the input's index.
    async fn collect_events(
        &self,
        index: usize,
        mut stream: TokenStream,
        measure: &RequestMetrics,
    ) -> Result<(usize, Vec<TokenEvent>), RequestError> {
        let mut events = Vec::new();
        loop {
            match stream.next().await {
                Some(TokenEvent::Finished(_)) => return Ok((index, events)),
                Some(TokenEvent::Failed(error)) => return Err(error),
                Some(TokenEvent::Started { .. }) => measure.record_scheduled(stream.produced_at()),
                Some(event) => {
                    // An embedding becomes a part of the response as it is.
                    let factor = if let TokenEvent::MaskFilled(_) = event { CANDIDATES_FACTOR } else { 1 };
                    self.held.grow(factor * event_bytes(&event))?;
                    events.push(event);
                }
                None => return Err(measure.closed_error()),
            }
        }
    }
}
