//! What each request leaves behind: its [`journal`], of which a line in the [`access_log`] and a trace
//! are made.
//!
//! Traces are a span for each request of the data plane and one below it for each worker that was asked,
//! sent to an OpenTelemetry collector as OTLP over HTTP. OpenTelemetry's SDK would more than double the
//! crates that the router is built from, for the sake of two kinds of span that are complete before they
//! are written. So they are encoded here ([`wire`]), and a test decodes them with OpenTelemetry's own
//! definitions.

pub mod access_log;
mod context;
mod export;
pub mod journal;
mod span;
mod wire;

use std::sync::Arc;

use http::HeaderMap;
use tokio::sync::{mpsc, oneshot};

pub use context::{HEADER, TraceContext, new_span};

use crate::{
    config::CollectorUrl,
    metrics::{Metrics, TraceOutcome},
};
use export::Exporter;
use journal::{Facts, Journal};

/// Requests whose spans may wait for the collector. More are dropped, and counted: a request never
/// waits for its trace.
const QUEUE: usize = 4096;

/// What a request leaves behind when it has ended, and what the exporter is told.
#[derive(Debug)]
enum Message {
    Spans(Vec<u8>),
    /// Send what there is, then say so.
    Flush(oneshot::Sender<()>),
}

/// Where requests leave their spans.
#[derive(Debug)]
pub struct Tracer {
    queue: mpsc::Sender<Message>,
    metrics: Arc<Metrics>,
}

impl Tracer {
    /// Sends to `collector` from now on. Must be called within a tokio runtime.
    pub fn start(collector: CollectorUrl, metrics: Arc<Metrics>) -> Arc<Self> {
        let (queue, messages) = mpsc::channel(QUEUE);
        tokio::spawn(Exporter::new(collector, Arc::clone(&metrics)).run(messages));
        Arc::new(Self { queue, metrics })
    }

    /// The trace of a request: the client's, if it has named one, else a new one. `None` if the client
    /// does not want it recorded.
    pub fn begin(self: &Arc<Self>, headers: &HeaderMap) -> Option<(Arc<Self>, TraceContext)> {
        Some((Arc::clone(self), TraceContext::of(headers)?))
    }

    /// Takes down a request that has ended.
    pub fn record(&self, journal: &Journal, facts: &Facts, context: &TraceContext) {
        let spans = span::of_request(journal, facts, context);
        if self.queue.try_send(Message::Spans(spans)).is_err() {
            self.metrics.traces.increment(TraceOutcome::Dropped);
        }
    }

    /// Returns when the collector has what was recorded before, or has refused it.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Message::Flush(done)).await.is_ok() {
            // An error: the exporter has ended, and nothing is left to wait for.
            let _ended = flushed.await;
        }
    }
}
