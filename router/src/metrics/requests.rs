//! Answered requests, by endpoint and class of status.

use http::StatusCode;

use super::{Counters, Family, labels::StatusClass, page::Page};
use crate::endpoint::Endpoint;

const REQUESTS: Family = Family::counter(
    "mla_router_requests_total",
    "Requests answered, by endpoint and class of status.",
    &["endpoint", "status"],
);

/// A table: a row for each endpoint, a column for each class.
#[derive(Debug, Default)]
pub struct Requests([Counters<StatusClass>; Endpoint::ALL.len()]);

impl Requests {
    pub fn increment(&self, endpoint: Endpoint, status: StatusCode) {
        self.0[endpoint as usize].increment(status.into());
    }

    /// Answers of that class to requests of the data plane.
    pub fn served(&self, class: StatusClass) -> u64 {
        let endpoints = Endpoint::ALL.into_iter().filter(|endpoint| *endpoint != Endpoint::Admin);
        endpoints.map(|endpoint| self.0[endpoint as usize].get(class)).sum()
    }

    pub(super) fn write(&self, page: &mut Page) {
        page.family(&REQUESTS);
        for endpoint in Endpoint::ALL {
            for (class, count) in self.0[endpoint as usize].iter() {
                // A series appears with its first request; all of them would be mostly zeros.
                if count > 0 {
                    page.sample(&[endpoint.as_str(), class.as_str()], count);
                }
            }
        }
    }
}
