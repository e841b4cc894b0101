//! Requests: those that were answered, and those that waited in the queue.

use http::StatusCode;

use super::{
    Counters, Histogram,
    labels::{QueueEnd, StatusClass},
    page::{Family, Page},
};
use crate::endpoint::Endpoint;

const REQUESTS: Family = Family::counter(
    "mla_router_requests_total",
    "Requests answered, by endpoint and class of status.",
    &["endpoint", "status"],
);

const ENDS: Family = Family::counter(
    "mla_router_queue_requests_total",
    "Requests that had to wait for a worker, by the end of their wait.",
    &["end"],
);
const WAIT: Family = Family::histogram(
    "mla_router_queue_wait_seconds",
    "Time that requests waited for a worker, for those that had to wait.",
);

/// Answered requests: a row for each endpoint, a column for each status class.
#[derive(Debug, Default)]
pub struct Requests([Counters<StatusClass>; Endpoint::ALL.len()]);

impl Requests {
    pub fn increment(&self, endpoint: Endpoint, status: StatusCode) {
        self.0[endpoint as usize].increment(status.into());
    }

    /// Number of responses of that class on data-plane endpoints.
    pub fn served(&self, class: StatusClass) -> u64 {
        let endpoints = Endpoint::ALL.into_iter().filter(|endpoint| *endpoint != Endpoint::Admin);
        endpoints.map(|endpoint| self.0[endpoint as usize].get(class)).sum()
    }

    pub(super) fn write(&self, page: &mut Page) {
        page.family(&REQUESTS);
        for endpoint in Endpoint::ALL {
            for (class, count) in self.0[endpoint as usize].iter() {
                // Most pairs never occur, so a series appears with its first request.
                if count > 0 {
                    page.sample(&[endpoint.as_str(), class.as_str()], count);
                }
            }
        }
    }
}

/// Requests that waited for a worker.
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
