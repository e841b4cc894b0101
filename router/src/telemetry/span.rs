//! Makes spans of the record of a request, with the attributes of OpenTelemetry's conventions for HTTP and `gen_ai`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
    trace::v1::{
        ResourceSpans, ScopeSpans, Span, Status, span::SpanKind, status::StatusCode as SpanStatus,
    },
};

use super::{
    context::TraceContext,
    record::{Attempt, End, RequestRecord},
};
use crate::endpoint::Endpoint;

/// The instrumentation scope, and the name of the service.
const NAME: &str = "mla-router";

/// Makes all spans of a request that has just ended.
pub(super) fn of_request(record: &RequestRecord, context: &TraceContext) -> Vec<Span> {
    #[expect(clippy::disallowed_methods, reason = "spans have the time of day")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let lasted = record.started.elapsed();
    let clock = Clock { started: now.saturating_sub(lasted) };
    let mut spans = Vec::with_capacity(1 + record.attempts.len());
    spans.push(request(record, context, &clock, lasted));
    let ends = record.attempts.iter().skip(1).map(|next| next.at).chain([lasted]);
    for (number, (one, end)) in record.attempts.iter().zip(ends).enumerate() {
        let is_last = number + 1 == record.attempts.len();
        spans.push(attempt(one, record, context, &clock, end, is_last));
    }
    spans
}

/// The time of day at the start of the request.
struct Clock {
    started: Duration,
}

impl Clock {
    fn at(&self, after: Duration) -> u64 {
        u64::try_from((self.started + after).as_nanos()).unwrap_or(u64::MAX)
    }
}

fn request(
    record: &RequestRecord,
    context: &TraceContext,
    clock: &Clock,
    lasted: Duration,
) -> Span {
    let status = record.status.map(|status| status.as_u16());
    let (method, route) = (record.endpoint.method(), record.endpoint.route());
    let server_error = status.is_some_and(|status| status >= 500);
    let attributes = [
        text("http.request.method", method),
        text("http.route", route),
        text("client.address", record.client.ip().to_string()),
        text("http.request.header.x-request-id", record.request_id.to_str().unwrap_or("")),
        count("http.response.status_code", status.map(u64::from)),
        operation(record.endpoint).and_then(|name| text("gen_ai.operation.name", name)),
        count("gen_ai.usage.input_tokens", record.prompt_tokens),
        count("gen_ai.usage.cache_read.input_tokens", record.cached_tokens),
        seconds("gen_ai.response.time_to_first_chunk", record.first_byte),
        count("http.response.body.size", Some(record.bytes)),
        count("mla_router.attempts", Some(record.attempts.len() as u64)),
        text("mla_router.end", record.end.as_str()),
    ];
    Span {
        name: format!("{method} {route}"),
        start_time_unix_nano: clock.at(Duration::ZERO),
        end_time_unix_nano: clock.at(lasted),
        attributes: attributes.into_iter().flatten().collect(),
        status: failure(server_error || record.end == End::Broken),
        ..span(context, context.span, context.parent, SpanKind::Server)
    }
}

fn attempt(
    one: &Attempt,
    record: &RequestRecord,
    context: &TraceContext,
    clock: &Clock,
    end: Duration,
    is_last: bool,
) -> Span {
    // The last attempt gives the status.
    let status = record.status.filter(|_| is_last);
    let server_error = status.is_some_and(|status| status.is_server_error());
    let attributes = [
        text("url.full", one.replica.backend.url.as_str()),
        text("mla_router.reason", one.reason.as_str()),
        count("http.response.status_code", status.map(|status| u64::from(status.as_u16()))),
    ];
    Span {
        name: "worker".to_owned(),
        start_time_unix_nano: clock.at(one.at),
        end_time_unix_nano: clock.at(end),
        attributes: attributes.into_iter().flatten().collect(),
        status: failure(!is_last || record.end == End::Broken || server_error),
        ..span(context, one.span, context.span, SpanKind::Client)
    }
}

/// A span without times, name and attributes. `parent` is 0 for a root.
fn span(context: &TraceContext, span: u64, parent: u64, kind: SpanKind) -> Span {
    let parent = if parent == 0 { Vec::new() } else { parent.to_be_bytes().to_vec() };
    Span {
        trace_id: context.trace.to_be_bytes().to_vec(),
        span_id: span.to_be_bytes().to_vec(),
        parent_span_id: parent,
        kind: kind.into(),
        ..Span::default()
    }
}

fn failure(failed: bool) -> Option<Status> {
    failed.then(|| Status { code: SpanStatus::Error.into(), ..Status::default() })
}

/// The operation name of the conventions; `None` if they have none for the endpoint.
fn operation(endpoint: Endpoint) -> Option<&'static str> {
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Responses | Endpoint::Messages => Some("chat"),
        Endpoint::Completions | Endpoint::Generate => Some("text_completion"),
        _ => None,
    }
}

fn text(name: &str, value: impl Into<String>) -> Option<KeyValue> {
    attribute(name, Some(Value::StringValue(value.into())))
}

fn count(name: &str, value: Option<u64>) -> Option<KeyValue> {
    attribute(name, value.map(|value| Value::IntValue(value.cast_signed())))
}

fn seconds(name: &str, value: Option<Duration>) -> Option<KeyValue> {
    attribute(name, value.map(|value| Value::DoubleValue(value.as_secs_f64())))
}

/// An attribute; `None` without a value.
fn attribute(name: &str, value: Option<Value>) -> Option<KeyValue> {
    let value = AnyValue { value: Some(value?) };
    Some(KeyValue { key: name.to_owned(), value: Some(value), ..KeyValue::default() })
}

/// The request that exports the spans of several requests.
pub(super) fn export(spans: Vec<Span>) -> ExportTraceServiceRequest {
    let version = env!("CARGO_PKG_VERSION");
    let attributes = [text("service.name", NAME), text("service.version", version)];
    let resource =
        Resource { attributes: attributes.into_iter().flatten().collect(), ..Resource::default() };
    let scope = InstrumentationScope {
        name: NAME.to_owned(),
        version: version.to_owned(),
        ..InstrumentationScope::default()
    };
    let scope_spans = ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() };
    let resource_spans = ResourceSpans {
        resource: Some(resource),
        scope_spans: vec![scope_spans],
        ..ResourceSpans::default()
    };
    ExportTraceServiceRequest { resource_spans: vec![resource_spans] }
}
