//! The time limit of a worker's health check. A worker whose checks took milliseconds, and which now does not answer,
//! has stopped. A worker whose checks take a little longer each time is busy.

use std::time::Duration;

/// A check may take this many times the time of the last one.
const LIMIT_FACTOR: u32 = 4;

/// Upper bound, as a multiple of --health-check-timeout-secs.
const MAX_MULTIPLE: u32 = 4;

/// The adaptive limit. It grows with the time of the checks, doubles with each missed check, and halves with each
/// answer, like the retransmission timeout of TCP.
#[derive(Debug)]
pub(super) struct CheckTimeout {
    least: Duration,
    limit: Duration,
}

impl CheckTimeout {
    /// `least` is --health-check-timeout-secs.
    pub(super) fn new(least: Duration) -> Self {
        Self { least, limit: least }
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    pub(super) fn answered(&mut self, after: Duration) {
        self.set((self.limit / 2).max(after.saturating_mul(LIMIT_FACTOR)));
    }

    pub(super) fn missed(&mut self) {
        self.set(self.limit.saturating_mul(2));
    }

    fn set(&mut self, limit: Duration) {
        self.limit = limit.clamp(self.least, self.least.saturating_mul(MAX_MULTIPLE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN_TIMEOUT: Duration = Duration::from_secs(1);

    #[test]
    fn limit_follows_the_speed_of_the_worker() {
        let mut timeout = CheckTimeout::new(MIN_TIMEOUT);
        timeout.answered(Duration::from_millis(2));
        assert_eq!(timeout.limit(), MIN_TIMEOUT);
        timeout.answered(Duration::from_millis(600));
        assert_eq!(timeout.limit(), Duration::from_millis(2400));
        timeout.answered(Duration::from_secs(2));
        assert_eq!(timeout.limit(), MAX_MULTIPLE * MIN_TIMEOUT);
        for _ in 0..2 {
            timeout.answered(Duration::from_millis(2));
        }
        assert_eq!(timeout.limit(), MIN_TIMEOUT);
    }

    #[test]
    fn a_missed_check_doubles_it() {
        let mut timeout = CheckTimeout::new(MIN_TIMEOUT);
        for limit in [2, 4, 4] {
            timeout.missed();
            assert_eq!(timeout.limit(), Duration::from_secs(limit));
        }
    }
}
