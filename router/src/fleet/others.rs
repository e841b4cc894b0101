//! The requests that other routers have on a worker, from the worker's own reports.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// A report counts for so long: a worker that gets no requests because of an old report would not make a
/// new one.
const VALID: Duration = Duration::from_secs(10);

/// Of one worker.
#[derive(Debug, Default)]
pub struct Others(Mutex<Option<Report>>);

#[derive(Clone, Copy, Debug)]
struct Report {
    others: u32,
    at: Instant,
}

impl Others {
    /// The worker reports `requests` of all routers, when this router had `own` of them there.
    pub fn observe(&self, requests: u32, own: u32, now: Instant) {
        *self.0.lock() = Some(Report { others: requests.saturating_sub(own), at: now });
    }

    /// Requests of other routers, as last reported.
    pub fn requests(&self, now: Instant) -> u32 {
        let report =
            self.0.lock().filter(|report| now.saturating_duration_since(report.at) < VALID);
        report.map_or(0, |report| report.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_what_is_not_ours_and_not_for_ever() {
        let (others, now) = (Others::default(), Instant::now());
        assert_eq!(others.requests(now), 0);
        others.observe(30, 10, now);
        assert_eq!(others.requests(now), 20);
        assert_eq!(others.requests(now + VALID / 2), 20);
        assert_eq!(others.requests(now + VALID), 0);
        others.observe(3, 5, now);
        assert_eq!(others.requests(now), 0, "ours that have not arrived there yet");
    }
}
