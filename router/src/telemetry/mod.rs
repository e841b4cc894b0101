//! The record of each request, written as an [`access_log`] line and as a trace.
//!
//! A trace has one span for the request and a child span for each attempt. It is sent to an OpenTelemetry collector
//! as OTLP over HTTP, in OpenTelemetry's own message types. Its SDK's tracer is not used: two kinds of span, complete
//! before they are written, need no processors and no context.

pub mod access_log;
mod context;
mod export;
pub mod record;
pub mod request_log;
mod span;

use std::sync::Arc;

use http::HeaderMap;
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::sync::{mpsc, oneshot};

pub use context::{HEADER, TraceContext, new_span};

use crate::{
    config::CollectorUrl,
    metrics::{Metrics, TraceOutcome},
};
use export::Exporter;
use record::RequestRecord;

/// Requests whose spans may wait for the collector. Further ones are dropped and counted: a request never waits for its
/// trace.
const QUEUE: usize = 4096;

/// A message to the exporter.
#[derive(Debug)]
enum Message {
    /// The spans of one request.
    Spans(Vec<Span>),
    /// Send the spans so far, then confirm.
    Flush(oneshot::Sender<()>),
}

/// Takes the spans of ended requests.
#[derive(Debug)]
pub struct Tracer {
    queue: mpsc::Sender<Message>,
    metrics: Arc<Metrics>,
}

impl Tracer {
    /// Starts the exporter to `collector`. Must be called within a tokio runtime.
    pub fn start(collector: CollectorUrl, metrics: Arc<Metrics>) -> Arc<Self> {
        let (queue, messages) = mpsc::channel(QUEUE);
        tokio::spawn(Exporter::new(collector, Arc::clone(&metrics)).run(messages));
        Arc::new(Self { queue, metrics })
    }

    /// Starts the trace of a request: a continuation of the client's trace, or a new one. `None` if the client does
    /// not want it sampled.
    pub fn begin(self: &Arc<Self>, headers: &HeaderMap) -> Option<(Arc<Self>, TraceContext)> {
        Some((Arc::clone(self), TraceContext::of(headers)?))
    }

    /// Queues the spans of an ended request.
    pub fn record(&self, record: &RequestRecord, context: &TraceContext) {
        let spans = span::of_request(record, context);
        if self.queue.try_send(Message::Spans(spans)).is_err() {
            self.metrics.traces.increment(TraceOutcome::Dropped);
        }
    }

    /// Returns when the collector has accepted or refused all spans queued before.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Message::Flush(done)).await.is_ok() {
            // An error means that the exporter has ended.
            let _ended = flushed.await;
        }
    }
}
