//! `GET /v1/inflight`: the sequences in flight as server-sent events, for the web page and dashboards.
//!
//! Invariant: nothing of what requests contain is shown, only numbers of tokens; and the engine waits for no
//! watcher.

use super::App;
use super::error::ApiError;
use super::openapi::describe::Api;
use crate::actors::Watcher;
use crate::actors::engine::{Fact, STORE};
use crate::actors::live::{LaneSequences, LiveSequence, LiveTotals};
use actix_web::http::Method;
use actix_web::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use utoipa::openapi::schema::Type;

use actix_web::web::{self, Bytes, Query};
use actix_web::{HttpRequest, HttpResponse};
use async_stream::stream;
use serde::Serialize;
use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Maximum number of clients that watch at once.
pub const WATCHERS_MAX: usize = 32;

/// The allowed times between two events in milliseconds, and the usual one.
const INTERVAL_MS: RangeInclusive<u64> = 50..=2000;
const USUAL_INTERVAL_MS: u64 = 200;

/// Time after which a watcher notices that the server shuts down.
const DRAIN_CHECK: Duration = Duration::from_millis(100);

const EVENTS: &str = "text/event-stream; charset=utf-8";

/// The first event.
#[derive(Serialize)]
struct Start<'a> {
    object: &'static str,
    model: &'a str,
    /// The first slot of each lane, and the number of its slots.
    lanes: Vec<[usize; 2]>,
    interval_ms: u64,
    /// Names and values of what the engine has.
    facts: Vec<&'a Fact>,
}

/// The state at a time.
#[derive(Serialize)]
struct Frame {
    object: &'static str,
    /// Time since the start.
    time_ms: u64,
    steps: u64,
    /// Time of all steps.
    step_time_ms: f64,
    generated_tokens: u64,
    /// Sequences that the shuffle has moved.
    moves: u64,
    running: usize,
    queued: usize,
    pages: Pages,
    lanes: Vec<Lane>,
}

#[derive(Serialize)]
struct Pages {
    used: usize,
    total: usize,
}

#[derive(Serialize)]
struct Lane {
    /// The lowest occupied slot, and the one after the highest.
    window: [u32; 2],
    /// Of each sequence: slot, number, tokens of the prompt, those that are computed, generated tokens and
    /// their maximum.
    sequences: Vec<[u64; 6]>,
}

/// Describes the path.
pub fn describe_paths(api: &mut Api) {
    api.get("/v1/inflight", "Shows the sequences in flight, without end.")
        .query("interval_ms", Type::Integer, "Time between two events in milliseconds.")
        .streams();
}

/// Handles `GET /v1/inflight`.
pub async fn handle(app: web::Data<App>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let interval_ms = interval_of(&request)?;
    if *request.method() == Method::HEAD {
        return Ok(HttpResponse::Ok().insert_header((CONTENT_TYPE, EVENTS)).finish());
    }
    let watcher =
        app.parts.live.watch(WATCHERS_MAX).ok_or_else(|| ApiError::too_many_watchers(WATCHERS_MAX))?;
    let events = stream! {
        yield Ok::<_, Infallible>(event(&start(&app, interval_ms)));
        let (interval, mut next) = (Duration::from_millis(interval_ms), Instant::now());
        // Shutdown does not wait for watchers, so they look often.
        while !app.parts.status.is_draining() {
            let now = Instant::now();
            if now >= next {
                next = now + interval;
                yield Ok(event(&frame(&app, &watcher)));
            }
            sleep_until(next.min(now + DRAIN_CHECK)).await;
        }
    };
    Ok(HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, EVENTS))
        .insert_header((CACHE_CONTROL, "no-cache"))
        .insert_header(("X-Accel-Buffering", "no"))
        .streaming(events))
}

/// Returns the time between events that a request asks for, in milliseconds.
fn interval_of(request: &HttpRequest) -> Result<u64, ApiError> {
    let query = Query::<HashMap<String, String>>::from_query(request.query_string());
    let query = query.map_err(|error| ApiError::malformed(format!("the query is invalid: {error}")))?;
    let Some(text) = query.get("interval_ms") else { return Ok(USUAL_INTERVAL_MS) };
    text.parse().ok().filter(|ms| INTERVAL_MS.contains(ms)).ok_or_else(|| {
        let (least, most) = (INTERVAL_MS.start(), INTERVAL_MS.end());
        ApiError::invalid("interval_ms", format!("'interval_ms' must be an integer from {least} to {most}"))
    })
}

fn start(app: &App, interval_ms: u64) -> Start<'_> {
    let parts = &app.parts;
    let lane = |slots: &std::ops::Range<u32>| [slots.start as usize, slots.len()];
    Start {
        object: "inflight.start",
        model: &parts.model.name,
        lanes: parts.live.slots.iter().map(lane).collect(),
        interval_ms,
        // Places on the server's disk are nobody else's business.
        facts: parts.facts.iter().filter(|(name, _)| *name != STORE).collect(),
    }
}

fn frame(app: &App, watcher: &Watcher) -> Frame {
    let (running, queued) = app.parts.status.counts();
    // Before the totals, which then have at least the tokens of these sequences.
    let lanes = (0..app.parts.live.slots.len()).map(|lane| Lane::from(&*watcher.sequences(lane))).collect();
    let LiveTotals { time, steps, step_time, generated, moves, pages_used } = watcher.totals();
    Frame {
        object: "inflight.frame",
        time_ms: time.as_millis() as u64,
        steps,
        step_time_ms: step_time.as_micros() as f64 / 1000.0,
        generated_tokens: generated,
        moves,
        running,
        queued,
        pages: Pages { used: pages_used, total: app.parts.live.pages() },
        lanes,
    }
}

impl From<&LaneSequences> for Lane {
    fn from(LaneSequences { window, sequences }: &LaneSequences) -> Lane {
        let row = |sequence: &LiveSequence| {
            let LiveSequence { slot, number, prompt, computed, generated, limit } = *sequence;
            [slot.into(), number, prompt as u64, computed as u64, generated.into(), limit.into()]
        };
        Lane { window: [window.start, window.end], sequences: sequences.iter().map(row).collect() }
    }
}

fn event(data: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(data).expect("numbers and names are JSON; anything else is a bug");
    Bytes::from(format!("data: {json}\n\n"))
}
