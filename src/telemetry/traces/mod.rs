//! Traces of requests by OpenTelemetry: spans of an HTTP request, of each of its choices, and of their
//! phases.
//!
//! The phases of a choice are recorded at its end, from times that are measured anyway, so the engine does
//! nothing for traces.
//! Invariant: without `telemetry.traces` there are no spans; with it, nobody waits for the collector.

mod export;

use super::requests::FinishedRequest;
use crate::config::TraceEndpoint;
use anyhow::{Context as _, Result};
use opentelemetry::context::FutureExt;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{Event, Span, SpanBuilder, SpanKind, Status, TraceContextExt, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use std::future::Future;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

/// Maximum time that the end of the program waits for the collector.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// The process's traces, if there are any.
static TRACES: OnceLock<Traces> = OnceLock::new();

struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    model: String,
}

/// Starts to send traces of requests to the served model `model`. Later calls have no effect. Fails if the
/// address is not valid.
pub fn start_traces(endpoint: &TraceEndpoint, model: &str) -> Result<()> {
    if TRACES.get().is_some() {
        return Ok(());
    }
    let processor = export::processor(endpoint).context("cannot send traces (telemetry.traces)")?;
    // OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to it.
    let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
        None => Resource::builder().with_service_name("mainstem"),
        Some(_) => Resource::builder(),
    };
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = resource.with_attribute(version).build();
    let provider =
        SdkTracerProvider::builder().with_span_processor(processor).with_resource(resource).build();
    let tracer = provider.tracer("mainstem");
    _ = TRACES.set(Traces { provider, tracer, model: model.to_owned() });
    Ok(())
}

/// Sends the spans that wait, but only for a moment if the collector is slow.
pub fn stop_traces() {
    if let Some(traces) = TRACES.get() {
        // What could not be sent is counted.
        _ = traces.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT);
    }
}

/// The span of an HTTP request, which ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct RequestSpan(Context);

/// The headers that name the parent of a request's span, by W3C's recommendation.
#[derive(Clone, Copy, Debug, Default)]
pub struct TraceHeaders<'a> {
    pub traceparent: Option<&'a str>,
    pub tracestate: Option<&'a str>,
}

impl Extractor for TraceHeaders<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => self.traceparent,
            "tracestate" => self.tracestate,
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        Vec::new()
    }
}

impl RequestSpan {
    /// Begins the span of a request; `None` if there are no traces. `parent` names its parent, if there is
    /// one.
    pub fn begin(method: &'static str, path: &str, parent: TraceHeaders<'_>) -> Option<RequestSpan> {
        let traces = TRACES.get()?;
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &parent);
        let span = SpanBuilder::from_name(format!("{method} {path}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("http.request.method", method),
                KeyValue::new("http.route", path.to_owned()),
            ])
            .start_with_context(&traces.tracer, &parent);
        Some(RequestSpan(parent.with_span(span)))
    }

    /// Returns the span of the request that the current task handles, if it has one.
    pub fn current() -> Option<RequestSpan> {
        TRACES.get()?;
        let context = Context::current();
        context.has_active_span().then_some(RequestSpan(context))
    }

    /// Runs a future as a task of the request.
    pub async fn scope<F: Future>(&self, task: F) -> F::Output {
        task.with_context(self.0.clone()).await
    }

    /// Sets the id and the status of the response.
    pub fn set_response(&self, id: &str, status: u16) {
        let span = self.0.span();
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        span.set_attribute(KeyValue::new("mainstem.request.id", id.to_owned()));
        if status >= 500 {
            span.set_attribute(KeyValue::new("error.type", status.to_string()));
            span.set_status(Status::error(""));
        }
    }

    /// Records a request that has ended: its span, and those of its phases.
    pub(super) fn record(&self, request: &FinishedRequest<'_>) {
        let Some(Traces { tracer, model, .. }) = TRACES.get() else { return };
        let clock = Clock { system: SystemTime::now(), steady: Instant::now() };
        let at = |moment: Instant| clock.at(moment);
        let ended = request.ended;
        let mut span = SpanBuilder::from_name(format!("{} {model}", request.operation))
            .with_start_time(at(request.arrived))
            .with_attributes(attributes(request, model))
            .with_events(events(request, at))
            .start_with_context(tracer, &self.0);
        if matches!(request.reason, "abort" | "error" | "timeout") {
            span.set_attribute(KeyValue::new("error.type", request.reason));
            span.set_status(Status::error(""));
        }
        let context = self.0.with_span(span);
        let decoded = request.first_token.zip(request.last_token);
        let computed = decoded.map_or(ended, |(first, _)| first);
        let phases = [
            Some(("queue", request.arrived, request.scheduled.unwrap_or(ended))),
            request.scheduled.map(|scheduled| ("prefill", scheduled, computed)),
            decoded.map(|(first, last)| ("decode", first, last)),
        ];
        for (name, start, end) in phases.into_iter().flatten() {
            let phase = SpanBuilder::from_name(name).with_start_time(at(start));
            phase.start_with_context(tracer, &context).end_with_timestamp(at(end));
        }
        context.span().end_with_timestamp(at(ended));
    }
}

/// A moment by both clocks.
struct Clock {
    system: SystemTime,
    steady: Instant,
}

impl Clock {
    /// Returns the date of an earlier moment.
    fn at(&self, moment: Instant) -> SystemTime {
        let ago = self.steady.saturating_duration_since(moment);
        self.system.checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// Returns the attributes of a request, by the conventions for generative AI where these have names.
fn attributes(request: &FinishedRequest<'_>, model: &str) -> Vec<KeyValue> {
    let count = |name: &'static str, count: usize| KeyValue::new(name, count as i64);
    let reasons = opentelemetry::Array::String(vec![request.reason.into()]);
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", request.operation),
        KeyValue::new("gen_ai.provider.name", "mainstem"),
        KeyValue::new("gen_ai.request.model", model.to_owned()),
        KeyValue::new("gen_ai.response.model", model.to_owned()),
        KeyValue::new("gen_ai.response.finish_reasons", opentelemetry::Value::Array(reasons)),
        count("gen_ai.usage.input_tokens", request.prompt_tokens),
        count("gen_ai.usage.output_tokens", request.generated_tokens),
        count("gen_ai.usage.cache_read.input_tokens", request.cached_tokens),
        KeyValue::new("mainstem.request.id", request.id.to_owned()),
    ];
    if request.max_tokens > 0 {
        attributes.push(count("gen_ai.request.max_tokens", request.max_tokens as usize));
    }
    attributes.extend(request.slot.map(|slot| count("mainstem.slot", slot as usize)));
    attributes
}

/// Returns the moments of a request that take no time.
fn events(request: &FinishedRequest<'_>, at: impl Fn(Instant) -> SystemTime) -> Vec<Event> {
    let event = |name: &'static str, moment| Event::new(name, at(moment), Vec::new(), 0);
    let first = request.first_token.map(|moment| event("first_token", moment));
    first.into_iter().chain([event("end", request.ended)]).collect()
}
