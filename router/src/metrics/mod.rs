//! What the router counts, as Prometheus text.
//!
//! Plain atomics in arrays indexed by enums: a request touches a handful of words, without hashing
//! or a lock, and a label can only take the values written here.

mod histogram;
mod page;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

pub use histogram::Histogram;

use http::StatusCode;
use page::Page;

use crate::{
    fleet::worker::{Phase, Worker},
    policy::Reason,
    proxy::endpoint::Endpoint,
    router::Router,
};

/// How a request to a worker went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamFailure {
    Connect,
    Reset,
    /// 502 or 503 from the worker.
    Status,
    /// The response broke off after its first byte.
    Body,
    Timeout,
}

impl UpstreamFailure {
    const LABELS: [&str; 5] = ["connect", "reset", "status", "body", "timeout"];
}

const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

#[derive(Debug, Default)]
pub struct Metrics {
    requests: [[AtomicU64; STATUS_CLASSES.len()]; Endpoint::ALL.len()],
    upstream_errors: [AtomicU64; UpstreamFailure::LABELS.len()],
    retries: AtomicU64,
    client_aborts: AtomicU64,
    connections_opened: AtomicU64,
    connections_reused: AtomicU64,
    /// Choosing a worker: scan of the body, tree, policy.
    pub overhead: Histogram,
    /// From the last byte of the request to the first byte of the response's body.
    pub first_byte: Histogram,
}

impl Metrics {
    pub fn request(&self, endpoint: Endpoint, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        self.requests[endpoint as usize][class].fetch_add(1, Relaxed);
    }

    pub fn upstream_error(&self, failure: UpstreamFailure) {
        self.upstream_errors[failure as usize].fetch_add(1, Relaxed);
    }

    pub fn retry(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    pub fn client_abort(&self) {
        self.client_aborts.fetch_add(1, Relaxed);
    }

    pub fn connection(&self, reused: bool) {
        let counter = if reused { &self.connections_reused } else { &self.connections_opened };
        counter.fetch_add(1, Relaxed);
    }

    /// The page of `GET /metrics`.
    pub fn render(&self, router: &Router) -> String {
        let mut page = Page::default();
        self.write_counters(&mut page);
        self.overhead.write(&mut page, "overhead_seconds", "Time to choose a worker.");
        self.first_byte.write(
            &mut page,
            "first_byte_seconds",
            "From the end of the request to the first byte of the response's body.",
        );
        write_state(&mut page, router);
        write_workers(&mut page, &router.registry.workers());
        page.finish()
    }

    fn write_counters(&self, page: &mut Page) {
        page.family("requests_total", "counter", "Requests answered, by endpoint and class.");
        for endpoint in Endpoint::ALL {
            for (label, count) in STATUS_CLASSES.iter().zip(&self.requests[endpoint as usize]) {
                let count = count.load(Relaxed);
                // A series appears with its first request; all of them would be mostly zeros.
                if count > 0 {
                    page.sample(&[("endpoint", endpoint.as_str()), ("status", label)], count);
                }
            }
        }
        page.family("upstream_errors_total", "counter", "Failed requests to a worker, by kind.");
        for (kind, count) in UpstreamFailure::LABELS.iter().zip(&self.upstream_errors) {
            page.sample(&[("kind", kind)], count.load(Relaxed));
        }
        page.family("retries_total", "counter", "Requests sent again to another worker.");
        page.sample(&[], self.retries.load(Relaxed));
        page.family("client_aborts_total", "counter", "Requests whose client left before the end.");
        page.sample(&[], self.client_aborts.load(Relaxed));
        page.family("upstream_connections_total", "counter", "Connections used, new or kept.");
        page.sample(&[("state", "opened")], self.connections_opened.load(Relaxed));
        page.sample(&[("state", "reused")], self.connections_reused.load(Relaxed));
    }
}

fn write_state(page: &mut Page, router: &Router) {
    page.family("requests_in_flight", "gauge", "Requests now in the router.");
    page.sample(&[], router.gate.in_flight() as u64);
    page.family("requests_waiting", "gauge", "Requests now waiting for a healthy worker.");
    page.sample(&[], router.waiting() as u64);
    let tree = router.tree.stats();
    page.family("tree_blocks", "gauge", "Blocks in the prefix tree, each counted once.");
    page.sample(&[], tree.blocks);
    page.family("tree_bytes", "gauge", "Memory of the prefix tree.");
    page.sample(&[], tree.bytes);
    page.family("build_info", "gauge", "The version that is running.");
    page.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
}

fn write_workers(page: &mut Page, workers: &[Arc<Worker>]) {
    page.family("selections_total", "counter", "Requests sent to a worker, by reason.");
    for worker in workers {
        for reason in Reason::ALL {
            let count = worker.selections[reason as usize].load(Relaxed);
            if count > 0 {
                let labels = [("worker", worker.url.as_str()), ("reason", reason.as_str())];
                page.sample(&labels, count);
            }
        }
    }
    let mut gauge = |name, help, value: fn(&Worker) -> u64| {
        page.family(name, "gauge", help);
        for worker in workers {
            page.sample(&[("worker", worker.url.as_str())], value(worker));
        }
    };
    gauge("worker_requests", "Requests now on a worker.", |worker| u64::from(worker.requests()));
    gauge(
        "worker_pending_tokens",
        "Prompt tokens that a worker has yet to compute.",
        Worker::pending_tokens,
    );
    gauge("worker_healthy", "1 if the worker is in rotation.", |worker| {
        u64::from(worker.phase() == Phase::Healthy)
    });
}
