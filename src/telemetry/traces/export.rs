//! Sends spans to the collector, and counts those that it does not get.
//!
//! Invariant: at most `WAITING_MAX` spans wait, and every span that ends is counted once: as exported or as
//! lost.

use super::super::TRACE_SPANS;
use crate::config::TraceEndpoint;
use anyhow::Result;
use async_trait::async_trait;
use opentelemetry::Context;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Maximum number of spans that wait for the collector; further ones are lost.
const WAITING_MAX: usize = 2048;

/// Maximum time of a request to the collector.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of an answer of the collector.
const ANSWER_BYTES: u64 = 64 << 10;

/// Returns what sends spans to an address. Fails if that is not valid.
pub(super) fn processor(endpoint: &TraceEndpoint) -> Result<impl SpanProcessor + 'static> {
    let agent = ureq::AgentBuilder::new().timeout(REQUEST_TIMEOUT).redirects(0).build();
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().with_http_client(Client(agent));
    let exporter = match endpoint {
        TraceEndpoint::Url(url) => exporter.with_endpoint(url),
        TraceEndpoint::Environment => exporter,
    };
    let waiting = Arc::<AtomicUsize>::default();
    let exporter = CountingExporter { exporter: exporter.build()?, waiting: waiting.clone() };
    // The delay between two requests and their size follow OpenTelemetry's variables.
    let config = BatchConfigBuilder::default().with_max_queue_size(WAITING_MAX).build();
    let processor = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
    Ok(BoundedProcessor { processor, waiting })
}

/// A client of the collector. It blocks, because the processor's thread has nothing else to do.
#[derive(Debug)]
struct Client(ureq::Agent);

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let mut call = self.0.request(head.method.as_str(), &head.uri.to_string());
        for (name, value) in &head.headers {
            call = call.set(name.as_str(), value.to_str()?);
        }
        let answer = match call.send_bytes(&body) {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => return Err(error.into()),
        };
        let mut response = Response::builder().status(answer.status());
        if let Some(seconds) = answer.header("retry-after") {
            response = response.header("retry-after", seconds);
        }
        let mut bytes = Vec::new();
        answer.into_reader().take(ANSWER_BYTES).read_to_end(&mut bytes)?;
        Ok(response.body(bytes.into())?)
    }
}

/// An exporter that counts what it exports and what it loses.
#[derive(Debug)]
struct CountingExporter {
    exporter: opentelemetry_otlp::SpanExporter,
    /// Number of spans that wait.
    waiting: Arc<AtomicUsize>,
}

impl SpanExporter for CountingExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let exported = self.exporter.export(batch).await;
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        let result = if exported.is_ok() { "exported" } else { "lost" };
        TRACE_SPANS.counter_with([result]).increment(spans as u64);
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// A processor that drops and counts the spans for which there is no place.
#[derive(Debug)]
struct BoundedProcessor {
    processor: BatchSpanProcessor,
    /// Number of spans that wait.
    waiting: Arc<AtomicUsize>,
}

impl SpanProcessor for BoundedProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.processor.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        let admit = |waiting| (waiting < WAITING_MAX).then_some(waiting + 1);
        match self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, admit) {
            Ok(_) => self.processor.on_end(span),
            Err(_) => TRACE_SPANS.count(["lost"]),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.processor.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.processor.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.processor.set_resource(resource);
    }
}
