//! The access log (`--access-log`): one line for each request, at its end. The subscriber formats it as text or JSON.

use http::StatusCode;

use super::record::RequestRecord;

/// The tracing target of these lines. It has its own filter, so `--log-level` does not hide them.
pub const TARGET: &str = "access";

/// nginx's status for a client that disconnected before the response.
const CLIENT_CLOSED_REQUEST: u16 = 499;

pub(super) fn write(record: &RequestRecord) {
    let last = record.attempts.last();
    let milliseconds = |time: std::time::Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    tracing::info!(
        target: TARGET,
        // Visible ASCII without spaces (see `request_id`), so a client cannot forge a line.
        request_id = record.request_id.to_str().unwrap_or_default(),
        client = display(record.client),
        endpoint = record.endpoint.as_str(),
        status = record.status.as_ref().map_or(CLIENT_CLOSED_REQUEST, StatusCode::as_u16),
        end = record.end.as_str(),
        worker = last.map(|last| last.replica.name()),
        reason = last.map(|last| last.reason.as_str()),
        attempts = record.attempts.len(),
        prompt_tokens = record.prompt_tokens,
        cached_tokens = record.cached_tokens,
        bytes = record.bytes,
        first_byte_ms = record.first_byte.map(milliseconds),
        total_ms = milliseconds(record.started.elapsed()),
        "request"
    );
}
