//! What the router counts, as Prometheus text.
//!
//! Plain atomics in arrays indexed by enums: a request touches a handful of words, without hashing
//! or a lock, and a label can only take the values written here. What is counted for each worker
//! lies in the worker ([`WorkerCounters`]).
//!
//! To add a metric: a field here or there, a [`Family`] with its name and meaning, a line that writes
//! it, and its line in `docs/metrics.md` (a test prints it).

mod counter;
mod family;
mod histogram;
mod labels;
mod page;
mod requests;
mod state;
mod worker;

use http::StatusCode;

pub(crate) use counter::labels;
pub use counter::{Counter, Counters, Label};
pub use family::{Family, Kind};
pub use histogram::Histogram;
pub use labels::{ConnectionSource, StatusClass, UpstreamFailure};
pub use requests::Requests;
pub use worker::WorkerCounters;

use crate::{proxy::endpoint::Endpoint, router::Router};
use page::Page;

const UPSTREAM_ERRORS: Family = Family::counter(
    "mla_router_upstream_errors_total",
    "Failed requests to a worker, by kind.",
    &["kind"],
);
const RETRIES: Family =
    Family::counter("mla_router_retries_total", "Requests sent again to another worker.", &[]);
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
const OVERHEAD: Family = Family::histogram(
    "mla_router_overhead_seconds",
    "Time to choose a worker: scan of the body, tree, policy.",
);
const FIRST_BYTE: Family = Family::histogram(
    "mla_router_first_byte_seconds",
    "From the last byte of the request to the first byte of the response's body.",
);

/// The counters of a router. Fields are public: to count is `metrics.retries.increment()`.
#[derive(Debug, Default)]
pub struct Metrics {
    pub requests: Requests,
    pub upstream_errors: Counters<UpstreamFailure>,
    pub retries: Counter,
    pub client_aborts: Counter,
    pub upstream_connections: Counters<ConnectionSource>,
    pub overhead: Histogram,
    pub first_byte: Histogram,
}

impl Metrics {
    pub fn request(&self, endpoint: Endpoint, status: StatusCode) {
        self.requests.increment(endpoint, status);
    }

    pub fn upstream_error(&self, failure: UpstreamFailure) {
        self.upstream_errors.increment(failure);
    }

    pub fn retry(&self) {
        self.retries.increment();
    }

    pub fn client_abort(&self) {
        self.client_aborts.increment();
    }

    pub fn connection(&self, reused: bool) {
        let source = if reused { ConnectionSource::Reused } else { ConnectionSource::Opened };
        self.upstream_connections.increment(source);
    }

    /// The page of `GET /metrics`.
    pub fn render(&self, router: &Router) -> String {
        self.page(router).finish().0
    }

    fn page(&self, router: &Router) -> Page {
        let mut page = Page::default();
        self.requests.write(&mut page);
        page.counters(&UPSTREAM_ERRORS, &self.upstream_errors);
        page.counter(&RETRIES, &self.retries);
        page.counter(&CLIENT_ABORTS, &self.client_aborts);
        page.counters(&UPSTREAM_CONNECTIONS, &self.upstream_connections);
        self.overhead.write(&mut page, &OVERHEAD);
        self.first_byte.write(&mut page, &FIRST_BYTE);
        state::write(&mut page, router);
        worker::write(&mut page, &router.registry.workers());
        page
    }
}
