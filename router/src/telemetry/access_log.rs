//! One line for each request, at its end: `--access-log`. The subscriber makes text or JSON of it.

use http::StatusCode;

use crate::telemetry::journal::{Facts, Journal};

/// The target of these lines, so that `--log-level` does not silence what `--access-log` asks for.
pub const TARGET: &str = "access";

/// nginx's word for a client that left before the answer.
const CLIENT_CLOSED_REQUEST: u16 = 499;

pub(super) fn write(journal: &Journal, facts: &Facts) {
    let last = facts.tries.last();
    let milliseconds = |time: std::time::Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    tracing::info!(
        target: TARGET,
        // A word of visible ASCII, see `request_id`: a client cannot forge a line with it.
        request_id = journal.request_id.to_str().unwrap_or_default(),
        client = display(journal.client),
        endpoint = journal.endpoint.as_str(),
        status = facts.status.as_ref().map_or(CLIENT_CLOSED_REQUEST, StatusCode::as_u16),
        end = facts.end.as_str(),
        worker = last.map(|last| last.worker.url.as_str()),
        reason = last.map(|last| last.reason.as_str()),
        attempts = facts.tries.len(),
        prompt_tokens = facts.prompt_tokens,
        cached_tokens = facts.cached_tokens,
        bytes = facts.bytes,
        first_byte_ms = facts.first_byte.map(milliseconds),
        total_ms = milliseconds(journal.begun.elapsed()),
        "request"
    );
}
