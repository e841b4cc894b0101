//! The pace of a worker, learned from its responses: limits for the wait for a first byte, for a whole answer, and for
//! the pauses of streams.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

/// A wait may last this many times the expected time. Prompt lengths are estimated from bytes and batches are
/// uneven, so a factor of two is common. A frozen worker exceeds any factor.
const LENIENCE: u32 = 4;

/// Factor by which each observation reduces the weight of the earlier ones.
const MEMORY: f64 = 0.95;

/// Seconds per prompt token, as the ratio of two decaying sums. A mean of ratios would give short prompts too much
/// weight: their wait depends little on their tokens.
#[derive(Debug, Default)]
pub(super) struct Pace(Mutex<Sums>);

#[derive(Debug)]
struct Sums {
    seconds: f64,
    tokens: f64,
}

impl Default for Sums {
    /// A pace below that of any engine in use, so that a queue which builds up before the first observation does not
    /// make requests move from worker to worker. The first observations outweigh it.
    fn default() -> Self {
        Self { seconds: 1.0, tokens: 1000.0 }
    }
}

impl Pace {
    /// Observes a first byte that came `after` this time, or had not come by then, with `tokens_ahead` to compute.
    pub(super) fn observe(&self, tokens_ahead: u64, after: Duration) {
        let mut sums = self.0.lock();
        sums.seconds = sums.seconds * MEMORY + after.as_secs_f64();
        sums.tokens = sums.tokens * MEMORY + tokens_ahead as f64;
    }

    /// The limit for a first byte behind `tokens_ahead` tokens; at least `least`.
    pub(super) fn limit(&self, tokens_ahead: u64, least: Duration) -> Duration {
        self.expected(tokens_ahead).saturating_mul(LENIENCE).max(least)
    }

    /// The expected time to a first byte behind `tokens_ahead` tokens.
    pub(super) fn expected(&self, tokens_ahead: u64) -> Duration {
        let sums = self.0.lock();
        let seconds = sums.seconds / sums.tokens.max(1.0) * tokens_ahead as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// The longest of the observed times in milliseconds. Each observation takes a hundredth off the longest one before.
#[derive(Debug, Default)]
pub(super) struct Longest(AtomicU64);

impl Longest {
    pub(super) fn observe(&self, took: Duration) {
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let before = self.0.load(Ordering::Relaxed);
        // Two threads at once may lose one of the two observations, which does no harm.
        self.0.store((before - before / 100).max(took), Ordering::Relaxed);
    }

    /// The limit for the next time; at least `least`.
    pub(super) fn limit(&self, least: Duration) -> Duration {
        let longest = Duration::from_millis(self.0.load(Ordering::Relaxed));
        least.max(longest.saturating_mul(LENIENCE))
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
    fn a_long_prompt_has_a_longer_limit() {
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
    fn slower_worker_gets_a_longer_limit() {
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

    #[test]
    fn the_longest_time_raises_the_limit_at_once_and_fades() {
        let (longest, least) = (Longest::default(), Duration::from_secs(60));
        assert_eq!(longest.limit(least), least);
        longest.observe(Duration::from_secs(100));
        assert_eq!(longest.limit(least), Duration::from_secs(400));
        for _ in 0..200 {
            longest.observe(Duration::from_secs(1));
        }
        assert_eq!(longest.limit(least), least);
    }
}
