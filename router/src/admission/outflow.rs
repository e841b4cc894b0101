//! The rate at which requests leave the queue, and the waiting times that follow from this rate.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::window::{SECONDS, Window};

/// Maximum value for Retry-After in seconds. The present load says nothing about a longer time.
const MAX_RETRY_AFTER: u64 = 60;

/// Counts the requests that leave the queue for a worker.
#[derive(Debug)]
pub(super) struct Outflow {
    left: Window,
    /// Time when the queue was last empty.
    since: Mutex<Instant>,
}

impl Outflow {
    pub(super) fn new(now: Instant) -> Self {
        Self { left: Window::new(now), since: Mutex::new(now) }
    }

    /// Records the first request in an empty queue: the earlier rate no longer counts.
    pub(super) fn begin(&self, now: Instant) {
        *self.since.lock() = now;
    }

    /// Records a request that leaves the queue for a worker.
    pub(super) fn add(&self, now: Instant) {
        self.left.add(now);
    }

    /// Returns the seconds until `waiting` requests have left, for Retry-After.
    pub(super) fn retry_after_s(&self, waiting: usize, now: Instant) -> u64 {
        let (left, span) = self.lately(now);
        seconds(wait(waiting, left.max(1), span.max(Duration::from_secs(1))))
    }

    /// Returns the wait of the last of `waiting` requests. `None` without a reliable rate: the queue was empty in the
    /// last ten seconds, or no request has left it.
    pub(super) fn expected_wait(&self, waiting: usize, now: Instant) -> Option<Duration> {
        let (left, span) = self.lately(now);
        let is_reliable = left > 0 && span >= Duration::from_secs(SECONDS);
        is_reliable.then(|| wait(waiting, left, span))
    }

    /// Returns the number of requests that have left since the queue was last empty, and the time since then. Both
    /// cover at most the last ten seconds.
    fn lately(&self, now: Instant) -> (u32, Duration) {
        let since = *self.since.lock();
        let (left, span) = self.left.since(since, now);
        (u32::try_from(left).unwrap_or(u32::MAX), span)
    }
}

/// Returns the time in which `waiting` requests leave, at the rate of `left` requests in `span`.
fn wait(waiting: usize, left: u32, span: Duration) -> Duration {
    span.saturating_mul(u32::try_from(waiting).unwrap_or(u32::MAX)) / left
}

/// Returns `wait` in whole seconds, for Retry-After.
pub(super) fn seconds(wait: Duration) -> u64 {
    wait.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX).clamp(1, MAX_RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_follows_from_the_rate_of_the_last_ten_seconds() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let outflow = Outflow::new(begun);
        outflow.begin(begun);
        for second in 1..=10 {
            assert_eq!(outflow.expected_wait(40, at(second - 1)), None, "too early");
            outflow.add(at(second));
            outflow.add(at(second));
        }
        assert_eq!(outflow.expected_wait(40, at(10)), Some(Duration::from_secs(20)));
        assert_eq!(outflow.retry_after_s(40, at(10)), 20);
        assert_eq!(outflow.expected_wait(40, at(15)), Some(Duration::from_secs(40)));
        assert_eq!(outflow.expected_wait(40, at(30)), None, "no request has left");
        outflow.begin(at(31));
        assert_eq!(outflow.expected_wait(40, at(31)), None, "the queue was empty");
    }
}
