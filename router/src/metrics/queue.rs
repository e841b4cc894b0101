//! Waiting for a worker: how long, and how it ended.

use super::{Counters, Family, Histogram, labels::QueueEnd, page::Page};

const ENDS: Family = Family::counter(
    "mla_router_queue_requests_total",
    "Requests that no worker could take at once, by how their wait ended.",
    &["end"],
);
const WAIT: Family = Family::histogram(
    "mla_router_queue_wait_seconds",
    "Time that requests waited until a worker could take them, of those that had to.",
);

#[derive(Debug, Default)]
pub struct Queue {
    pub ends: Counters<QueueEnd>,
    pub wait: Histogram,
}

impl Queue {
    pub(super) fn write(&self, page: &mut Page) {
        page.counters(&ENDS, &self.ends);
        self.wait.write(page, &WAIT);
    }
}
