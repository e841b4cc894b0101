//! The retry budget. Retries must not multiply the load of workers that are failing.

use tokio::time::Instant;

use super::window::{SECONDS, Window};

/// Retries a second that are always allowed, so that a router with few requests can retry.
const MIN_RETRIES: u64 = 10;

/// Limits retries to a share of the requests of the last ten seconds.
#[derive(Debug)]
pub struct Budget {
    share: f64,
    retries: Window,
}

impl Budget {
    pub(crate) fn new(share: f64) -> Self {
        Self { share, retries: Window::new(Instant::now()) }
    }

    /// Takes one retry from the budget. `requests` is the number of requests in the window. Returns false if the
    /// budget is used up.
    pub(crate) fn spend(&self, requests: u64, now: Instant) -> bool {
        let allowed = (MIN_RETRIES * SECONDS) as f64 + self.share * requests as f64;
        // Two threads may both take the last retry. The budget need not be exact.
        let affordable = (self.retries.sum(now) as f64) < allowed;
        if affordable {
            self.retries.add(now);
        }
        affordable
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn spent(budget: &Budget, requests: u64, now: Instant) -> usize {
        (0..100_000).take_while(|_| budget.spend(requests, now)).count()
    }

    #[test]
    fn retries_are_a_share_of_the_requests_and_ten_a_second() {
        let now = Instant::now();
        let later = now + Duration::from_secs(SECONDS + 1);
        let budget = Budget::new(0.2);
        assert_eq!(spent(&budget, 10_000, now), 2100);
        assert_eq!(spent(&budget, 10_000, now), 0);
        assert_eq!(spent(&budget, 0, later), 100);
        assert_eq!(spent(&Budget::new(0.0), 10_000, now), 100);
    }
}
