//! Encodes the record of a request as spans, with the attributes of OpenTelemetry's conventions for HTTP and `gen_ai`.
//! Numbers are field numbers of `opentelemetry/proto/trace/v1/trace.proto`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{
    context::TraceContext,
    record::{Attempt, End, RequestRecord},
    wire::Message,
};
use crate::endpoint::Endpoint;

const SERVER: u64 = 2;
const CLIENT: u64 = 3;
const STATUS_ERROR: u64 = 2;

/// Field number of `ScopeSpans.spans`.
const SPANS: u64 = 2;

/// Encodes all spans of a request that has just ended, as fields of a `ScopeSpans`.
pub(super) fn of_request(record: &RequestRecord, context: &TraceContext) -> Vec<u8> {
    #[expect(clippy::disallowed_methods, reason = "spans have the time of day")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let lasted = record.started.elapsed();
    let clock = Clock { started: now.saturating_sub(lasted) };
    let mut spans = Message::default().message(SPANS, &request(record, context, &clock, lasted));
    let ends = record.attempts.iter().skip(1).map(|next| next.at).chain([lasted]);
    for (number, (one, end)) in record.attempts.iter().zip(ends).enumerate() {
        let is_last = number + 1 == record.attempts.len();
        spans = spans.message(SPANS, &attempt(one, record, context, &clock, end, is_last));
    }
    spans.finish()
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
) -> Message {
    let status = record.status.map(|status| status.as_u16());
    let route = record.endpoint.route();
    let mut span = span(context, context.span, context.parent, SERVER)
        .bytes(5, format!("{} {route}", record.endpoint.method()).as_bytes())
        .fixed(7, clock.at(Duration::ZERO))
        .fixed(8, clock.at(lasted));
    let mut attributes = Attributes::default();
    attributes.text("http.request.method", record.endpoint.method());
    attributes.text("http.route", route);
    attributes.text("client.address", &record.client.ip().to_string());
    attributes.text("http.request.header.x-request-id", record.request_id.to_str().unwrap_or(""));
    attributes.count("http.response.status_code", status.map(u64::from));
    if let Some(operation) = operation(record.endpoint) {
        attributes.text("gen_ai.operation.name", operation);
    }
    attributes.count("gen_ai.usage.input_tokens", record.prompt_tokens);
    attributes.count("gen_ai.usage.cache_read.input_tokens", record.cached_tokens);
    attributes.seconds("gen_ai.response.time_to_first_chunk", record.first_byte);
    attributes.count("http.response.body.size", Some(record.bytes));
    attributes.count("mla_router.attempts", Some(record.attempts.len() as u64));
    attributes.text("mla_router.end", record.end.as_str());
    span = attributes.into(span);
    let server_error = status.is_some_and(|status| status >= 500);
    if server_error || record.end == End::Broken { failed(span) } else { span }
}

fn attempt(
    one: &Attempt,
    record: &RequestRecord,
    context: &TraceContext,
    clock: &Clock,
    end: Duration,
    is_last: bool,
) -> Message {
    let mut attributes = Attributes::default();
    attributes.text("url.full", one.replica.backend.url.as_str());
    attributes.text("mla_router.reason", one.reason.as_str());
    let mut is_failure = !is_last || record.end == End::Broken;
    if is_last {
        attributes.count("http.response.status_code", record.status.map(|s| u64::from(s.as_u16())));
        is_failure |= record.status.is_some_and(|status| status.is_server_error());
    }
    let span = span(context, one.span, context.span, CLIENT)
        .bytes(5, b"worker")
        .fixed(7, clock.at(one.at))
        .fixed(8, clock.at(end));
    let span = attributes.into(span);
    if is_failure { failed(span) } else { span }
}

fn span(context: &TraceContext, span: u64, parent: u64, kind: u64) -> Message {
    let message = Message::default()
        .bytes(1, &context.trace.to_be_bytes())
        .bytes(2, &span.to_be_bytes())
        .number(6, kind);
    if parent == 0 { message } else { message.bytes(4, &parent.to_be_bytes()) }
}

fn failed(span: Message) -> Message {
    span.message(15, &Message::default().number(3, STATUS_ERROR))
}

/// The operation name of the conventions; `None` if they have none for the endpoint.
fn operation(endpoint: Endpoint) -> Option<&'static str> {
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Responses | Endpoint::Messages => Some("chat"),
        Endpoint::Completions | Endpoint::Generate => Some("text_completion"),
        _ => None,
    }
}

#[derive(Default)]
struct Attributes(Vec<Message>);

impl Attributes {
    fn text(&mut self, name: &str, value: &str) {
        self.push(name, &Message::default().bytes(1, value.as_bytes()));
    }

    fn count(&mut self, name: &str, value: Option<u64>) {
        if let Some(value) = value {
            self.push(name, &Message::default().number(3, value));
        }
    }

    fn seconds(&mut self, name: &str, value: Option<Duration>) {
        if let Some(value) = value {
            self.push(name, &Message::default().double(4, value.as_secs_f64()));
        }
    }

    fn push(&mut self, name: &str, value: &Message) {
        self.0.push(attribute(name, value));
    }

    fn into(self, span: Message) -> Message {
        self.0.iter().fold(span, |span, attribute| span.message(9, attribute))
    }
}

fn attribute(name: &str, value: &Message) -> Message {
    Message::default().bytes(1, name.as_bytes()).message(2, value)
}

/// Encodes an `ExportTraceServiceRequest` with the spans of several requests.
pub(super) fn export(spans: &[u8]) -> Vec<u8> {
    let text = |value: &str| Message::default().bytes(1, value.as_bytes());
    let version = env!("CARGO_PKG_VERSION");
    let resource = Message::default()
        .message(1, &attribute("service.name", &text("mla-router")))
        .message(1, &attribute("service.version", &text(version)));
    let scope = Message::default().bytes(1, b"mla-router").bytes(2, version.as_bytes());
    let scope_spans = Message::default().message(1, &scope).raw(spans);
    let resource_spans = Message::default().message(1, &resource).message(2, &scope_spans);
    Message::default().message(1, &resource_spans).finish()
}
