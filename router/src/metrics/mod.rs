//! The metrics of the router, as Prometheus text.
//!
//! Counters are atomics in arrays indexed by enums. A request touches a few words, without a hash or a lock, and a
//! label takes only the values written here. Counters of a worker are in the worker (`fleet/counters.rs`). Present
//! values are read when the page is requested (`admin`).
//!
//! To add a metric: a field, a [`Family`] with its name and help text, a line that writes it, and its line in
//! `docs/metrics.md`, which a test prints.

mod buckets;
mod counter;
mod histogram;
mod labels;
mod page;
mod process;
mod requests;

use http::StatusCode;

pub use buckets::Buckets;
pub(crate) use counter::labels;
pub use counter::{Counter, Counters, Gauge, Label};
pub use histogram::Histogram;
pub use labels::{
    ConnectionSource, Ejection, QueueEnd, ReplayOutcome, StatusClass, TraceOutcome, UpstreamFailure,
};
pub use page::{Family, Kind, Page};
pub use process::Process;
pub use requests::{Queue, Requests};

use crate::endpoint::Endpoint;

const UPSTREAM_ERRORS: Family = Family::counter(
    "mla_router_upstream_errors_total",
    "Failed requests to a worker, by kind.",
    &["kind"],
);
const RETRIES: Family = Family::counter(
    "mla_router_retries_total",
    "Requests sent to another worker before the first byte, by the failure of the previous attempt.",
    &["cause"],
);
const REPLAYS: Family = Family::counter(
    "mla_router_replays_total",
    "Attempts to continue a broken stream on another worker, by outcome.",
    &["outcome"],
);
const CLIENT_ABORTS: Family = Family::counter(
    "mla_router_client_aborts_total",
    "Requests whose client disconnected before the end.",
    &[],
);
const UPSTREAM_CONNECTIONS: Family = Family::counter(
    "mla_router_upstream_connections_total",
    "Connections used for requests to workers, opened or reused.",
    &["state"],
);
const CLIENT_CONNECTIONS: Family =
    Family::gauge("mla_router_client_connections", "Open connections of clients.", &[]);
const ACCEPTED: Family =
    Family::counter("mla_router_client_connections_total", "Accepted connections of clients.", &[]);
const OVERHEAD: Family = Family::histogram(
    "mla_router_overhead_seconds",
    "Time to choose a worker: scan of the body, tree, policy.",
);
const FIRST_BYTE: Family = Family::histogram(
    "mla_router_first_byte_seconds",
    "Time from the last byte of the request to the first byte of the response body.",
);
const FIRST_TOKEN: Family = Family::histogram(
    "mla_router_first_token_seconds",
    "Time from the last byte of the request to the first byte of the response body, for streamed answers.",
);
const DURATION: Family = Family::histogram(
    "mla_router_request_seconds",
    "Time from the last byte of the request to the end of its response.",
);

const TRACES: Family = Family::counter(
    "mla_router_traces_total",
    "Traces of requests, by the outcome of their export to the collector.",
    &["outcome"],
);

/// The counters of a router.
#[derive(Debug, Default)]
pub struct Metrics {
    pub requests: Requests,
    pub upstream_errors: Counters<UpstreamFailure>,
    pub retries: Counters<UpstreamFailure>,
    pub replays: Counters<ReplayOutcome>,
    pub client_aborts: Counter,
    pub client_connections: Gauge,
    pub client_connections_accepted: Counter,
    pub upstream_connections: Counters<ConnectionSource>,
    pub overhead: Histogram,
    pub first_byte: Histogram,
    /// The same as `first_byte`, for streamed answers only: other answers come after their last token.
    pub first_token: Histogram,
    /// Time from the last byte of the request to the end of its response.
    pub duration: Histogram,
    pub queue: Queue,
    pub traces: Counters<TraceOutcome>,
}

impl Metrics {
    pub fn request(&self, endpoint: Endpoint, status: StatusCode) {
        self.requests.increment(endpoint, status);
    }

    pub fn upstream_error(&self, failure: UpstreamFailure) {
        self.upstream_errors.increment(failure);
    }

    /// Counts a retry. `cause` is the failure of the previous attempt; `None` for the first attempt, which is not
    /// counted.
    pub fn retry(&self, cause: Option<UpstreamFailure>) {
        if let Some(cause) = cause {
            self.retries.increment(cause);
        }
    }

    pub fn client_abort(&self) {
        self.client_aborts.increment();
    }

    pub fn connection(&self, reused: bool) {
        let source = if reused { ConnectionSource::Reused } else { ConnectionSource::Opened };
        self.upstream_connections.increment(source);
    }

    /// Writes these counters to the page.
    pub fn write(&self, page: &mut Page) {
        self.requests.write(page);
        page.counters(&UPSTREAM_ERRORS, &self.upstream_errors);
        page.counters(&RETRIES, &self.retries);
        page.counters(&REPLAYS, &self.replays);
        page.counter(&CLIENT_ABORTS, &self.client_aborts);
        page.value(&CLIENT_CONNECTIONS, self.client_connections.get());
        page.counter(&ACCEPTED, &self.client_connections_accepted);
        page.counters(&UPSTREAM_CONNECTIONS, &self.upstream_connections);
        self.overhead.write(page, &OVERHEAD);
        self.first_byte.write(page, &FIRST_BYTE);
        self.first_token.write(page, &FIRST_TOKEN);
        self.duration.write(page, &DURATION);
        self.queue.write(page);
        page.counters(&TRACES, &self.traces);
    }
}
