//! What is counted for each worker, kept in the worker itself: no map from URL to counter.

use std::sync::Arc;

use super::{Counters, Family, Label, page::Page};
use crate::{
    fleet::worker::{Phase, Worker},
    policy::Reason,
};

const SELECTIONS: Family = Family::counter(
    "mla_router_selections_total",
    "Requests sent to a worker, by the policy's reason.",
    &["worker", "reason"],
);
const REQUESTS: Family =
    Family::gauge("mla_router_worker_requests", "Requests now on a worker.", &["worker"]);
const PENDING_TOKENS: Family = Family::gauge(
    "mla_router_worker_pending_tokens",
    "Prompt tokens that a worker has yet to compute.",
    &["worker"],
);
const HEALTHY: Family =
    Family::gauge("mla_router_worker_healthy", "1 if the worker is in rotation.", &["worker"]);

/// The counters of one worker. They end with it.
#[derive(Debug, Default)]
pub struct WorkerCounters {
    /// Requests sent here, by the reason of the policy.
    pub selections: Counters<Reason>,
}

pub(super) fn write(page: &mut Page, workers: &[Arc<Worker>]) {
    counters(page, &SELECTIONS, workers, |worker| &worker.counters.selections);
    values(page, &REQUESTS, workers, |worker| u64::from(worker.requests()));
    values(page, &PENDING_TOKENS, workers, Worker::pending_tokens);
    values(page, &HEALTHY, workers, |worker| u64::from(worker.phase() == Phase::Healthy));
}

/// One series a worker.
fn values(
    page: &mut Page,
    family: &'static Family,
    workers: &[Arc<Worker>],
    value: fn(&Worker) -> u64,
) {
    page.family(family);
    for worker in workers {
        page.sample(&[worker.url.as_str()], value(worker));
    }
}

/// A series for each worker and value of a label that has come up there.
fn counters<L: Label>(
    page: &mut Page,
    family: &'static Family,
    workers: &[Arc<Worker>],
    counters: fn(&Worker) -> &Counters<L>,
) {
    page.family(family);
    for worker in workers {
        for (value, count) in counters(worker).iter().filter(|(_, count)| *count > 0) {
            page.sample(&[worker.url.as_str(), value.as_str()], count);
        }
    }
}
