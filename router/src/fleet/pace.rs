//! How fast a worker gets through prompts, learned from first bytes: what a request may wait for its
//! own before something is wrong.

use std::time::Duration;

use parking_lot::Mutex;

/// A first byte may take so many times what the worker's pace says. Prompts are estimated from
/// their bytes and batches are uneven, so that twice is nothing; a frozen worker takes for ever.
const LENIENCE: u32 = 4;

/// The share of what was observed before that each observation leaves.
const MEMORY: f64 = 0.95;

/// Seconds per prompt token, as a ratio of sums that fade. The sums, and not a mean of ratios: a
/// short prompt's wait is mostly not about its tokens, and so it weighs little.
#[derive(Debug, Default)]
pub(super) struct Pace(Mutex<Sums>);

#[derive(Debug)]
struct Sums {
    seconds: f64,
    tokens: f64,
}

impl Default for Sums {
    /// Slower than any engine in use, and forgotten with the first observations: a queue that has
    /// built up before anything was observed is no reason to send requests from worker to worker.
    fn default() -> Self {
        Self { seconds: 1.0, tokens: 1000.0 }
    }
}

impl Pace {
    /// A first byte came `after` so long, or had not come by then, with so many tokens to compute.
    pub(super) fn observe(&self, tokens_ahead: u64, after: Duration) {
        let mut sums = self.0.lock();
        sums.seconds = sums.seconds * MEMORY + after.as_secs_f64();
        sums.tokens = sums.tokens * MEMORY + tokens_ahead as f64;
    }

    /// What a first byte behind so many tokens may take.
    pub(super) fn limit(&self, tokens_ahead: u64, least: Duration) -> Duration {
        self.expected(tokens_ahead).saturating_mul(LENIENCE).max(least)
    }

    /// What it should take.
    pub(super) fn expected(&self, tokens_ahead: u64) -> Duration {
        let sums = self.0.lock();
        let seconds = sums.seconds / sums.tokens.max(1.0) * tokens_ahead as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_secs(10);

    #[test]
    fn an_unknown_worker_has_the_setting_for_a_prompt_and_time_for_a_queue() {
        assert_eq!(Pace::default().limit(2000, LEAST), LEAST);
        assert!(Pace::default().limit(200_000, LEAST) > 10 * LEAST);
    }

    #[test]
    fn a_long_prompt_has_what_its_length_takes() {
        let pace = Pace::default();
        for _ in 0..100 {
            pace.observe(10_000, Duration::from_secs(1));
            pace.observe(16, Duration::from_millis(30)); // weighs little
        }
        assert_eq!(pace.limit(10_000, LEAST), LEAST);
        let long = pace.limit(200_000, LEAST);
        assert!((80..90).contains(&long.as_secs()), "{long:?} for 20 s of work");
    }

    #[test]
    fn a_worker_that_slows_down_is_given_more() {
        let pace = Pace::default();
        for _ in 0..100 {
            pace.observe(1000, Duration::from_millis(100));
        }
        assert_eq!(pace.limit(1000, LEAST), LEAST);
        for _ in 0..20 {
            pace.observe(1000, LEAST);
        }
        assert!(pace.limit(1000, LEAST) > 2 * LEAST);
    }
}
