//! Sends spans to the collector, in batches.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use thiserror::Error;
use tokio::{
    net::TcpStream,
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{Message, span};
use crate::{
    config::CollectorUrl,
    metrics::{Metrics, TraceOutcome},
};

/// Time that the first span of a batch waits for others.
const LINGER: Duration = Duration::from_secs(1);

/// Requests in one batch.
const BATCH: usize = 512;

/// Time limit for sending a batch.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
enum ExportError {
    #[error("cannot connect: {0}")]
    Connect(#[from] io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("it answered {0}")]
    Refused(StatusCode),
    #[error("no answer within {LIMIT:?}")]
    Late,
}

pub(super) struct Exporter {
    collector: CollectorUrl,
    metrics: Arc<Metrics>,
    /// Whether the present series of failures has been logged.
    failure_logged: bool,
}

impl Exporter {
    pub(super) fn new(collector: CollectorUrl, metrics: Arc<Metrics>) -> Self {
        Self { collector, metrics, failure_logged: false }
    }

    /// Runs until the tracer is dropped.
    pub(super) async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        let mut received = Vec::with_capacity(BATCH);
        while messages.recv_many(&mut received, BATCH).await > 0 {
            if !received.iter().any(|message| matches!(message, Message::Flush(_))) {
                sleep(LINGER).await;
                while received.len() < BATCH
                    && let Ok(message) = messages.try_recv()
                {
                    received.push(message);
                }
            }
            let (mut spans, mut requests, mut waiting) = (Vec::new(), 0, Vec::new());
            for message in received.drain(..) {
                match message {
                    Message::Spans(more) => {
                        spans.extend(more);
                        requests += 1;
                    }
                    Message::Flush(done) => waiting.push(done),
                }
            }
            if requests > 0 {
                self.send(spans, requests).await;
            }
            for done in waiting {
                // The receiver may have stopped waiting.
                let _gone = done.send(());
            }
        }
    }

    async fn send(&mut self, spans: Vec<Span>, requests: u64) {
        let body = span::export(spans).encode_to_vec();
        let sent = timeout(LIMIT, self.post(body)).await;
        match sent.unwrap_or(Err(ExportError::Late)) {
            Ok(()) => {
                self.metrics.traces.add(TraceOutcome::Sent, requests);
                self.failure_logged = false;
            }
            Err(error) => {
                self.metrics.traces.add(TraceOutcome::Failed, requests);
                if !std::mem::replace(&mut self.failure_logged, true) {
                    let url = String::from(self.collector.clone());
                    tracing::warn!(
                        "traces are lost: the collector {url} does not accept them: {error}"
                    );
                }
            }
        }
    }

    /// Posts a batch over a new connection: one batch a second needs no pool.
    async fn post(&self, body: Vec<u8>) -> Result<(), ExportError> {
        let stream = TcpStream::connect(self.collector.address()).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.collector.path())
            .header(header::HOST, self.collector.authority().as_str())
            .header(header::CONTENT_TYPE, "application/x-protobuf")
            .body(Full::new(Bytes::from(body)))
            .expect("contract: a URL that was checked when it was read");
        let response = tokio::select! {
            response = sender.send_request(request) => response?,
            Err(error) = connection => return Err(error.into()),
        };
        if response.status().is_success() {
            Ok(())
        } else {
            Err(ExportError::Refused(response.status()))
        }
    }
}
