//! The requests of other routers on a worker, from the reports of the worker.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time for which a report is valid. Reports come with responses: a worker that got no requests because of an old
/// report would never send a new one.
const VALID: Duration = Duration::from_secs(10);

/// The latest report of one worker.
#[derive(Debug, Default)]
pub struct OtherRouters {
    /// Whether there is a report: workers of other kinds never send one, and every choice reads it.
    has_report: AtomicBool,
    report: Mutex<Option<Report>>,
}

#[derive(Clone, Copy, Debug)]
struct Report {
    requests: u32,
    at: Instant,
}

impl OtherRouters {
    /// Records a report: `requests` of all routers together, `own` of them from this router.
    pub fn observe(&self, requests: u32, own: u32, now: Instant) {
        let report = Report { requests: requests.saturating_sub(own), at: now };
        *self.report.lock() = Some(report);
        self.has_report.store(true, Ordering::Release);
    }

    /// Requests of other routers by the last report; 0 without a valid one.
    pub fn requests(&self, now: Instant) -> u32 {
        if !self.has_report.load(Ordering::Acquire) {
            return 0;
        }
        let report = *self.report.lock();
        report
            .filter(|report| now.saturating_duration_since(report.at) < VALID)
            .map_or(0, |report| report.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_counts_requests_of_other_routers_and_expires() {
        let (others, now) = (OtherRouters::default(), Instant::now());
        assert_eq!(others.requests(now), 0);
        others.observe(30, 10, now);
        assert_eq!(others.requests(now), 20);
        assert_eq!(others.requests(now + VALID / 2), 20);
        assert_eq!(others.requests(now + VALID), 0);
        others.observe(3, 5, now);
        assert_eq!(others.requests(now), 0, "own requests that have not arrived there yet");
    }
}
