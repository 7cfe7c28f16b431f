//! `POST /v1/completions`: text or ids in, an answer out, whole or as it is made.
//!
//! Invariant: the reply stream lives in the handler's future or in the response's body and nowhere else, so
//! that either one's end is the end of the request.

use super::access::RequestId;
use super::error::ApiError;
use super::params::{CompletionParams, Delivery, Prompt};
use super::wire::{Choice, Completion, Logprobs};
use super::{App, OpenResponse, ServeParts};
use crate::actors::reply::{Echo, ReplyStream};
use crate::actors::stream::TokenStream;
use crate::request::{Request, RequestError};
use crate::telemetry;
use crate::text::Tokenizer;
use actix_web::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, rt};
use async_stream::stream;
use futures_util::Stream;
use serde::Serialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bodies longer than this are read and tokenised off the event loop, a few at a time.
const INLINE_BODY_BYTES: usize = 8192;

/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

const COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");
const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// The handler.
pub async fn completions(
    app: web::Data<App>,
    id: web::ReqData<RequestId>,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let body = read_body(payload, app.config.body_limit_bytes).await?;
    // From here on shutdown waits for the answer; an upload that never ends is not waited for.
    let open = app.open_response();
    if app.parts.status.is_draining() {
        return Err(refused(RequestError::Draining));
    }
    let (params, prompt) = prepare(&app, body).await?;
    let request = Request {
        id: id.0.clone(),
        prompt: prompt.into(),
        max_tokens: params.max_tokens,
        ignore_eos: params.ignore_eos,
        sampling: params.sampling,
        logprobs: params.logprobs,
        prompt_logprobs: params.echo == Echo::Prompt && params.logprobs.is_some(),
    };
    let events = submit(&app, request.clone()).await?;
    let reply = ReplyStream::new(events, app.parts.tokenizer.clone(), &request, params.echo);
    let answer = Answer::new(app, &request, params.return_token_ids);
    match params.delivery {
        Delivery::Whole => answer.whole(reply).await,
        Delivery::Stream { usage } => Ok(answer.stream(reply, usage, open)),
    }
}

async fn read_body(payload: web::Payload, limit: usize) -> Result<Bytes, ApiError> {
    let read = rt::time::timeout(BODY_TIMEOUT, payload.to_bytes_limited(limit))
        .await
        .map_err(|_| ApiError::body_too_slow(BODY_TIMEOUT))?
        .map_err(|_| ApiError::body_too_large(limit))?;
    read.map_err(|error| ApiError::malformed(format!("the body cannot be read: {error}")))
}

fn check_model(params: &CompletionParams, served: &str) -> Result<(), ApiError> {
    match &params.model {
        Some(model) if model != served => {
            let served = served.to_string();
            Err(RequestError::UnknownModel { model: model.clone(), served }.into())
        }
        _ => Ok(()),
    }
}

/// The parameters and the prompt's ids. Long bodies take turns: reading one takes many times its memory.
async fn prepare(app: &web::Data<App>, body: Bytes) -> Result<(CompletionParams, Vec<u32>), ApiError> {
    if body.len() <= INLINE_BODY_BYTES {
        return read_request(&app.parts, &body);
    }
    let turn = app.long_bodies.wait().await.map_err(refused)?;
    let app = app.clone();
    let read = web::block(move || {
        let _turn = turn;
        read_request(&app.parts, &body)
    });
    read.await.map_err(|error| ApiError::internal(format!("reading the body failed: {error}")))?
}

fn read_request(parts: &ServeParts, body: &[u8]) -> Result<(CompletionParams, Vec<u32>), ApiError> {
    let mut params = CompletionParams::parse(body, parts.model.vocab)?;
    check_model(&params, &parts.model.name)?;
    let prompt = tokens(&parts.tokenizer, std::mem::replace(&mut params.prompt, Prompt::Ids(Vec::new())))?;
    Ok((params, prompt))
}

/// The prompt's ids. An empty prompt is the token that opens a text, if the model has one.
fn tokens(tokenizer: &Tokenizer, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let ids = match prompt {
        Prompt::Ids(ids) => ids,
        Prompt::Text(text) => tokenizer
            .encode(&text, true)
            .map_err(|error| ApiError::invalid("prompt", format!("cannot tokenise: {error}")))?,
    };
    if !ids.is_empty() {
        return Ok(ids);
    }
    let empty =
        || ApiError::invalid("prompt", "the prompt is empty, and the model has no token to begin with");
    tokenizer.bos_id().map(|bos| vec![bos]).ok_or_else(empty)
}

/// Hands the request in.
async fn submit(app: &App, request: Request) -> Result<TokenStream, ApiError> {
    app.parts.intake.submit(request).await.map_err(refused)
}

/// Counts a refusal. An engine that is gone or failed refuses nobody: that is our fault, not a decision.
fn refused(error: RequestError) -> ApiError {
    let reason = match error {
        RequestError::TooLong { .. } => Some("too_long"),
        RequestError::TooLarge { .. } => Some("too_large"),
        RequestError::Busy { .. } => Some("busy"),
        RequestError::Draining => Some("draining"),
        RequestError::Invalid { .. } | RequestError::UnknownModel { .. } => Some("invalid"),
        RequestError::EngineGone | RequestError::DeviceFailed(_) => None,
    };
    if let Some(reason) = reason {
        telemetry::ADMISSION_REJECTIONS.count([reason]);
    }
    error.into()
}

/// What the chunks of an answer have in common.
struct Answer {
    app: web::Data<App>,
    id: String,
    created: u64,
    wants_logprobs: bool,
    /// The prompt's ids, if ids are wanted.
    prompt_token_ids: Option<Arc<[u32]>>,
}

impl Answer {
    fn new(app: web::Data<App>, request: &Request, return_token_ids: bool) -> Answer {
        Answer {
            app,
            id: format!("cmpl-{}", request.id),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            wants_logprobs: request.logprobs.is_some(),
            prompt_token_ids: return_token_ids.then(|| request.prompt.clone()),
        }
    }

    /// A choice with the lists that are wanted, still empty.
    fn choice(&self) -> Choice {
        Choice {
            logprobs: self.wants_logprobs.then(Logprobs::default),
            token_ids: self.prompt_token_ids.as_ref().map(|_| Vec::new()),
            ..Choice::empty()
        }
    }

    fn completion<'a>(&'a self, choices: &'a [Choice], reply: Option<&ReplyStream>) -> Completion<'a> {
        Completion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.app.parts.model.name,
            choices,
            usage: reply.map(|reply| reply.usage().into()),
        }
    }

    async fn whole(self, mut reply: ReplyStream) -> Result<HttpResponse, ApiError> {
        let mut choice = self.choice();
        choice.prompt_token_ids = self.prompt_token_ids.as_deref().map(<[u32]>::to_vec);
        while let Some(piece) = reply.next().await {
            choice.append(piece?, &self.app.parts.tokenizer);
        }
        Ok(HttpResponse::Ok().json(self.completion(&[choice], Some(&reply))))
    }

    fn stream(self, reply: ReplyStream, usage: bool, open: OpenResponse) -> HttpResponse {
        HttpResponse::Ok()
            .insert_header((CONTENT_TYPE, "text/event-stream; charset=utf-8"))
            .insert_header((CACHE_CONTROL, "no-cache"))
            .insert_header(("X-Accel-Buffering", "no"))
            .streaming(self.events(reply, usage, open))
    }

    /// The body: a chunk for each piece, comments in long silences, and `[DONE]` whatever happened.
    fn events(
        self,
        mut reply: ReplyStream,
        usage: bool,
        open: OpenResponse,
    ) -> impl Stream<Item = Result<Bytes, Infallible>> {
        stream! {
            let _open = open;
            let mut prompt_token_ids = self.prompt_token_ids.as_deref().map(<[u32]>::to_vec);
            let mut usage = usage;
            loop {
                match within(self.app.config.stream_comment_interval, reply.next()).await {
                    None => yield Ok(COMMENT),
                    Some(None) => break,
                    Some(Some(Ok(piece))) => {
                        let mut choice = self.choice();
                        choice.prompt_token_ids = prompt_token_ids.take();
                        // An object of empty lists would say no more than null.
                        choice.logprobs = choice.logprobs.filter(|_| !piece.tokens.is_empty());
                        choice.append(piece, &self.app.parts.tokenizer);
                        yield Ok(event(&self.completion(&[choice], None)));
                    }
                    Some(Some(Err(error))) => {
                        usage = false;
                        yield Ok(event(&ApiError::from(error).body()));
                    }
                }
            }
            if usage {
                yield Ok(event(&self.completion(&[], Some(&reply))));
            }
            yield Ok(DONE);
        }
    }
}

/// What the future gives, unless it takes longer than `limit`.
async fn within<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    rt::time::timeout(limit, future).await.ok()
}

/// One event: a `data:` line and the empty line that ends it.
fn event(value: &impl Serialize) -> Bytes {
    let mut line = Vec::with_capacity(256);
    line.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut line, value).expect("wire types are plain data; anything else is a bug");
    line.extend_from_slice(b"\n\n");
    line.into()
}
