//! What the router counts, as Prometheus text.
//!
//! Plain atomics in arrays indexed by enums: a request touches a handful of words, without hashing
//! or a lock, and a label can only take the values written here. What is counted for each worker
//! lies in the worker (`fleet/metrics.rs`), and what is read when it is asked for is `admin`'s.
//!
//! To add a metric: a field here or there, a [`Family`] with its name and meaning, a line that writes
//! it, and its line in `docs/metrics.md` (a test prints it).

mod buckets;
mod counter;
mod family;
mod histogram;
mod labels;
mod page;
mod process;
mod queue;
mod requests;

use http::StatusCode;

pub use buckets::Buckets;
pub(crate) use counter::labels;
pub use counter::{Counter, Counters, Gauge, Label};
pub use family::{Family, Kind};
pub use histogram::Histogram;
pub use labels::{
    ConnectionSource, Ejection, QueueEnd, ReplayOutcome, StatusClass, TraceOutcome, UpstreamFailure,
};
pub use page::Page;
pub use process::Process;
pub use queue::Queue;
pub use requests::Requests;

use crate::endpoint::Endpoint;

const UPSTREAM_ERRORS: Family = Family::counter(
    "mla_router_upstream_errors_total",
    "Failed requests to a worker, by kind.",
    &["kind"],
);
const RETRIES: Family = Family::counter(
    "mla_router_retries_total",
    "Requests sent to another worker before the first byte, by what had gone wrong.",
    &["cause"],
);
const REPLAYS: Family = Family::counter(
    "mla_router_replays_total",
    "Broken streams that were to be continued on another worker, by outcome.",
    &["outcome"],
);
const CLIENT_ABORTS: Family = Family::counter(
    "mla_router_client_aborts_total",
    "Requests whose client left before the end.",
    &[],
);
const UPSTREAM_CONNECTIONS: Family = Family::counter(
    "mla_router_upstream_connections_total",
    "Connections used for requests to workers, new or kept.",
    &["state"],
);
const CLIENT_CONNECTIONS: Family =
    Family::gauge("mla_router_client_connections", "Connections of clients that are open.", &[]);
const ACCEPTED: Family = Family::counter(
    "mla_router_client_connections_total",
    "Connections of clients that were accepted.",
    &[],
);
const OVERHEAD: Family = Family::histogram(
    "mla_router_overhead_seconds",
    "Time to choose a worker: scan of the body, tree, policy.",
);
const FIRST_BYTE: Family = Family::histogram(
    "mla_router_first_byte_seconds",
    "From the last byte of the request to the first byte of the response's body.",
);
const FIRST_TOKEN: Family = Family::histogram(
    "mla_router_first_token_seconds",
    "From the last byte of the request to the first byte of the response's body, of streamed answers.",
);
const DURATION: Family = Family::histogram(
    "mla_router_request_seconds",
    "From the last byte of the request to the end of its response, however it ended.",
);

const TRACES: Family = Family::counter(
    "mla_router_traces_total",
    "Traces of requests, by what became of them on their way to the collector.",
    &["outcome"],
);

/// The counters of a router. Fields are public: to count is `metrics.retries.increment()`.
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
    /// The same of streamed answers: others come when their last token is there.
    pub first_token: Histogram,
    /// From the last byte of the request to the end of its response, however it ended.
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

    /// A request goes on to another worker; `cause` is what has gone wrong before, if anything has.
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

    /// All that is counted here.
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
