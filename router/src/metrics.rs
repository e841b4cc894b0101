//! What the router counts, as Prometheus text.
//!
//! Plain atomics in arrays indexed by enums: a request touches a handful of words, without hashing
//! or a lock, and a label can only take the values written here.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use http::StatusCode;

use crate::{
    endpoint::Endpoint,
    policy::Reason,
    router::Router,
    worker::{Phase, Worker},
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

    /// The exposition of `GET /metrics`.
    pub fn render(&self, router: &Router) -> String {
        let mut page = Page::default();
        page.family(
            "requests_total",
            "counter",
            "Requests answered, by endpoint and status class.",
        );
        for endpoint in Endpoint::ALL {
            for (class, label) in STATUS_CLASSES.iter().enumerate() {
                let count = self.requests[endpoint as usize][class].load(Relaxed);
                // A series appears with its first request; all of them would be mostly zeros.
                if count > 0 {
                    let endpoint = endpoint.as_str();
                    page.sample(&[("endpoint", endpoint), ("status", label)], count);
                }
            }
        }
        page.family("upstream_errors_total", "counter", "Failed requests to a worker, by kind.");
        for (kind, count) in UpstreamFailure::LABELS.iter().zip(&self.upstream_errors) {
            page.sample(&[("kind", kind)], count.load(Relaxed));
        }
        page.single(
            "retries_total",
            "counter",
            "Requests sent again to another worker.",
            &self.retries,
        );
        page.single(
            "client_aborts_total",
            "counter",
            "Requests whose client left before the end of the response.",
            &self.client_aborts,
        );
        page.family("upstream_connections_total", "counter", "Connections taken, new or reused.");
        page.sample(&[("state", "opened")], self.connections_opened.load(Relaxed));
        page.sample(&[("state", "reused")], self.connections_reused.load(Relaxed));
        page.histogram("overhead_seconds", "Time to choose a worker.", &self.overhead);
        page.histogram(
            "first_byte_seconds",
            "From the end of the request to the first byte of the response's body.",
            &self.first_byte,
        );
        page.family("requests_in_flight", "gauge", "Requests now in the router.");
        page.sample(&[], router.gate.in_flight() as u64);
        page.family("requests_waiting", "gauge", "Requests now waiting for a healthy worker.");
        page.sample(&[], router.waiting() as u64);
        let tree = router.tree.stats();
        page.family("tree_blocks", "gauge", "Blocks in the prefix tree, each counted once.");
        page.sample(&[], tree.blocks);
        page.family("tree_bytes", "gauge", "Memory of the prefix tree.");
        page.sample(&[], tree.bytes);
        page.workers(&router.registry.workers());
        page.family("build_info", "gauge", "The version that is running.");
        page.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        page.text
    }
}

/// Latencies in buckets of a factor of about 2 to 2.5, from 1 us to 100 s.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS.len()],
    sum_ns: AtomicU64,
    count: AtomicU64,
}

/// Upper bounds in nanoseconds, and as the label says it.
const BOUNDS: [(u64, &str); 25] = [
    (1_000, "0.000001"),
    (2_500, "0.0000025"),
    (5_000, "0.000005"),
    (10_000, "0.00001"),
    (25_000, "0.000025"),
    (50_000, "0.00005"),
    (100_000, "0.0001"),
    (250_000, "0.00025"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_500_000, "0.0025"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (25_000_000, "0.025"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (250_000_000, "0.25"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1"),
    (2_500_000_000, "2.5"),
    (5_000_000_000, "5"),
    (10_000_000_000, "10"),
    (25_000_000_000, "25"),
    (50_000_000_000, "50"),
    (100_000_000_000, "100"),
];

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|(bound, _)| *bound < ns);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Relaxed);
        }
        self.sum_ns.fetch_add(ns, Relaxed);
        self.count.fetch_add(1, Relaxed);
    }
}

/// The text under construction.
#[derive(Default)]
struct Page {
    text: String,
    family: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.family = format!("mla_router_{name}");
        self.line(format_args!("# HELP {} {help}", self.family.clone()));
        self.line(format_args!("# TYPE {} {kind}", self.family.clone()));
    }

    fn sample(&mut self, labels: &[(&str, &str)], value: u64) {
        self.series("", labels, format_args!("{value}"));
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: &AtomicU64) {
        self.family(name, kind, help);
        self.sample(&[], value.load(Relaxed));
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        // Read first: observations come in meanwhile, and no bucket may exceed the total.
        let mut cumulative = 0;
        for ((_, bound), bucket) in BOUNDS.iter().zip(&histogram.buckets) {
            cumulative += bucket.load(Relaxed);
            self.series("_bucket", &[("le", bound)], format_args!("{cumulative}"));
        }
        let count = histogram.count.load(Relaxed).max(cumulative);
        self.series("_bucket", &[("le", "+Inf")], format_args!("{count}"));
        let seconds = Duration::from_nanos(histogram.sum_ns.load(Relaxed)).as_secs_f64();
        self.series("_sum", &[], format_args!("{seconds}"));
        self.series("_count", &[], format_args!("{count}"));
    }

    fn workers(&mut self, workers: &[std::sync::Arc<Worker>]) {
        self.family(
            "selections_total",
            "counter",
            "Requests sent to a worker, by the policy's reason.",
        );
        for worker in workers {
            for reason in Reason::ALL {
                let count = worker.selections[reason as usize].load(Relaxed);
                if count > 0 {
                    let labels = [("worker", worker.url.as_str()), ("reason", reason.as_str())];
                    self.sample(&labels, count);
                }
            }
        }
        self.per_worker(workers, "worker_requests", "Requests now on a worker.", |worker| {
            u64::from(worker.requests())
        });
        self.per_worker(
            workers,
            "worker_pending_tokens",
            "Prompt tokens that a worker has yet to compute.",
            Worker::pending_tokens,
        );
        self.per_worker(workers, "worker_healthy", "1 if the worker is in rotation.", |worker| {
            u64::from(worker.phase() == Phase::Healthy)
        });
    }

    fn per_worker(
        &mut self,
        workers: &[std::sync::Arc<Worker>],
        name: &str,
        help: &str,
        value: impl Fn(&Worker) -> u64,
    ) {
        self.family(name, "gauge", help);
        for worker in workers {
            self.sample(&[("worker", worker.url.as_str())], value(worker));
        }
    }

    fn series(&mut self, suffix: &str, labels: &[(&str, &str)], value: std::fmt::Arguments<'_>) {
        let labels = labels
            .iter()
            // No value needs escaping: they are names of ours, and URLs without quotes.
            .map(|(name, value)| format!("{name}=\"{value}\""))
            .collect::<Vec<_>>()
            .join(",");
        let family = self.family.clone();
        if labels.is_empty() {
            self.line(format_args!("{family}{suffix} {value}"));
        } else {
            self.line(format_args!("{family}{suffix}{{{labels}}} {value}"));
        }
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("contract: a String takes any text");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_cumulative_and_whole() {
        let histogram = Histogram::default();
        for micros in [1, 2, 2, 300_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let mut page = Page::default();
        page.histogram("x_seconds", "Help.", &histogram);
        for line in [
            "# HELP mla_router_x_seconds Help.",
            "# TYPE mla_router_x_seconds histogram",
            "mla_router_x_seconds_bucket{le=\"0.000001\"} 1",
            "mla_router_x_seconds_bucket{le=\"0.0000025\"} 3",
            "mla_router_x_seconds_bucket{le=\"100\"} 3",
            "mla_router_x_seconds_bucket{le=\"+Inf\"} 4",
            "mla_router_x_seconds_sum 300.000005",
            "mla_router_x_seconds_count 4",
        ] {
            assert!(page.text.lines().any(|l| l == line), "{line} not in\n{}", page.text);
        }
    }
}
