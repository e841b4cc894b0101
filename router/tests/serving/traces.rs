//! Spans, read by OpenTelemetry's own definitions of them. A fake worker plays the collector.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use http::HeaderValue;
use mla_router::{Config, metrics::TraceOutcome};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{Span, span::SpanKind, status::StatusCode},
};
use prost::Message;
use tokio::time::sleep;

use crate::support::{Client, FakeWorker, Reply, config, post, router, soon};

const CLIENTS: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;

fn traced(collector: &FakeWorker) -> Config {
    let url = collector.url().parse().expect("a collector's URL");
    Config { otlp_traces_endpoint: Some(url), ..config() }
}

/// Returns the spans of the next batch and their resource.
async fn batch(collector: &mut FakeWorker) -> (Vec<Span>, Vec<KeyValue>) {
    let seen = soon(collector.request()).await;
    assert_eq!((seen.head.method.as_str(), seen.head.uri.path()), ("POST", "/v1/traces"));
    assert_eq!(seen.head.headers["content-type"], "application/x-protobuf");
    let mut export = ExportTraceServiceRequest::decode(&seen.body[..]).expect("OTLP");
    assert_eq!(export.resource_spans.len(), 1);
    let mut resource = export.resource_spans.remove(0);
    let scope = resource.scope_spans.remove(0);
    assert_eq!(scope.scope.expect("a scope").name, "mla-router");
    (scope.spans, resource.resource.expect("a resource").attributes)
}

fn attributes(all: &[KeyValue]) -> HashMap<&str, String> {
    let text = |value: &KeyValue| match value.value.clone().and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => format!("{:.0}", number.floor()),
        other => panic!("{other:?}"),
    };
    all.iter().map(|pair| (pair.key.as_str(), text(pair))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_is_a_span_with_a_child_for_each_attempt() {
    let mut collector = FakeWorker::plain().await;
    let mut busy = FakeWorker::start(|_| Reply::status(503)).await;
    let mut free = FakeWorker::plain().await;
    let router = router(
        Config { policy: mla_router::config::PolicyName::RoundRobin, ..traced(&collector) },
        &[&busy, &free],
    )
    .await;
    let mut client = Client::connect(router.local_addr()).await;
    let begun = Instant::now();
    let mut seen = Vec::new();
    // In turn: one of the first two requests goes to the busy worker first.
    for _ in 0..2 {
        let mut request = post("/v1/chat/completions", r#"{"messages":[]}"#);
        request.headers_mut().insert("traceparent", HeaderValue::from_static(CLIENTS));
        request.headers_mut().insert("x-request-id", HeaderValue::from_static("mine"));
        assert_eq!(client.call(request).await.expect("an answer").status, 200);
        seen.push(soon(free.request()).await.head.headers["traceparent"].clone());
    }
    seen.push(soon(busy.request()).await.head.headers["traceparent"].clone());
    client.get("/liveness").await;
    let passed = begun.elapsed().as_secs();
    router.stop(Duration::from_secs(5)).await;
    let mut spans = Vec::new();
    let is_request = |span: &&Span| span.kind() == SpanKind::Server;
    while spans.iter().filter(is_request).count() < 2 {
        let (more, resource) = batch(&mut collector).await;
        assert_eq!(attributes(&resource)["service.name"], "mla-router");
        spans.extend(more);
    }
    let (requests, workers): (Vec<_>, Vec<_>) = spans.iter().partition(is_request);
    // Each has been to the free one, and at least one to the busy one before.
    assert_eq!(requests.len(), 2, "and no health check");
    assert!(workers.len() >= 3, "{workers:?}");
    for header in &seen {
        let told = |span: &&&Span| *header == traceparent(span);
        assert_eq!(workers.iter().filter(told).count(), 1, "{header:?}");
    }
    for span in &spans {
        assert_eq!(span.trace_id, TRACE.to_be_bytes());
        assert!(span.start_time_unix_nano > 1 << 60);
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
    }
    for span in &requests {
        assert_eq!(span.name, "POST /v1/chat/completions");
        assert_eq!(span.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
        let said = attributes(&span.attributes);
        assert_eq!(said["gen_ai.operation.name"], "chat");
        assert_eq!(said["http.response.status_code"], "200");
        assert_eq!(said["http.request.header.x-request-id"], "mine");
        let first_chunk: u64 =
            said["gen_ai.response.time_to_first_chunk"].parse().expect("a number");
        assert!(first_chunk <= passed, "{first_chunk} of {passed} s");
        assert!(span.status.is_none());
    }
    for span in &workers {
        assert!(requests.iter().any(|request| request.span_id == span.parent_span_id));
        let is_busy = attributes(&span.attributes)["url.full"] == busy.url();
        let failed = span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error);
        assert_eq!(failed, is_busy);
    }
}

/// The trace context of a worker's own span.
fn traceparent(span: &Span) -> String {
    let name = u64::from_be_bytes(span.span_id[..].try_into().expect("eight bytes"));
    format!("00-{TRACE:032x}-{name:016x}-01")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsampled_trace_is_not_exported() {
    let mut collector = FakeWorker::plain().await;
    let mut worker = FakeWorker::plain().await;
    let router = router(traced(&collector), &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    let unsampled = CLIENTS.replace("-01", "-00");
    let mut request = post("/generate", "{}");
    request.headers_mut().insert("traceparent", unsampled.parse().expect("a value"));
    client.call(request).await.expect("an answer");
    assert_eq!(soon(worker.request()).await.head.headers["traceparent"], unsampled);
    router.stop(Duration::from_secs(5)).await;
    assert_eq!(collector.requests_so_far(), 0);
}

#[tokio::test(start_paused = true)]
async fn failing_collector_loses_traces_only() {
    // The clock stands still while requests come: they fill the queue before the first batch is late.
    let (at_once, slowly) = (Duration::ZERO, Duration::from_secs(1));
    for (reply, pause, outcome) in [
        ((|| Reply::Hang) as fn() -> Reply, at_once, TraceOutcome::Dropped),
        (|| Reply::status(500), slowly, TraceOutcome::Failed),
    ] {
        let collector = FakeWorker::start(move |_| reply()).await;
        let worker = FakeWorker::plain().await;
        let router = router(traced(&collector), &[&worker]).await;
        let lost = || router.router().metrics.traces.get(outcome);
        let mut client = Client::connect(router.local_addr()).await;
        while lost() == 0 {
            assert_eq!(client.post("/generate", "{}").await.status, 200);
            sleep(pause).await;
        }
        router.stop(Duration::from_secs(5)).await;
    }
}
