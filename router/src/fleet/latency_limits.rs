//! Limits learned from the responses of a worker: for the wait for a first byte, for a whole answer, and for the pauses
//! of streams.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

/// A wait may last this many times the expected time. Prompt lengths are estimated from bytes and batches are
/// uneven, so a factor of two is common. A frozen worker exceeds any factor.
const LIMIT_FACTOR: u32 = 4;

/// Factor by which each observation reduces the weight of the earlier ones.
const DECAY: f64 = 0.95;

/// Seconds per prompt token, as the ratio of two decaying sums. A mean of ratios would give short prompts too much
/// weight: their wait depends little on their tokens. Each request takes the lock, so it has a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct FirstByteTime(Mutex<Sums>);

#[derive(Debug)]
struct Sums {
    seconds: f64,
    tokens: f64,
}

impl Default for Sums {
    /// Slower than any engine in use: requests must not move between workers because of a queue that builds up before
    /// the first observation. The first observations outweigh this value.
    fn default() -> Self {
        Self { seconds: 1.0, tokens: 1000.0 }
    }
}

impl FirstByteTime {
    /// Records the time until a first byte behind `tokens_ahead` tokens, or a lower bound of it.
    pub(super) fn observe(&self, tokens_ahead: u64, after: Duration) {
        let mut sums = self.0.lock();
        sums.seconds = sums.seconds * DECAY + after.as_secs_f64();
        sums.tokens = sums.tokens * DECAY + tokens_ahead as f64;
    }

    /// The limit for a first byte behind `tokens_ahead` tokens; at least `least`.
    pub(super) fn limit(&self, tokens_ahead: u64, least: Duration) -> Duration {
        self.expected(tokens_ahead).saturating_mul(LIMIT_FACTOR).max(least)
    }

    /// The expected time to a first byte behind `tokens_ahead` tokens.
    pub(super) fn expected(&self, tokens_ahead: u64) -> Duration {
        let sums = self.0.lock();
        let seconds = sums.seconds / sums.tokens.max(1.0) * tokens_ahead as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// The longest of the observed times in milliseconds. Each observation first reduces the longest one by 1%.
#[derive(Debug, Default)]
pub(super) struct LongestTime(AtomicU64);

impl LongestTime {
    pub(super) fn observe(&self, took: Duration) {
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let before = self.0.load(Ordering::Relaxed);
        let after = (before - before / 100).max(took);
        // Two threads at once may lose one of the two observations, which does no harm. A value that would not change
        // is not written: other threads keep it in their caches.
        if after != before {
            self.0.store(after, Ordering::Relaxed);
        }
    }

    /// The limit for the next time; at least `least`.
    pub(super) fn limit(&self, least: Duration) -> Duration {
        let longest = Duration::from_millis(self.0.load(Ordering::Relaxed));
        least.max(longest.saturating_mul(LIMIT_FACTOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN_LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn an_unknown_worker_has_the_setting_for_a_prompt_and_time_for_a_queue() {
        assert_eq!(FirstByteTime::default().limit(2000, MIN_LIMIT), MIN_LIMIT);
        assert!(FirstByteTime::default().limit(200_000, MIN_LIMIT) > 10 * MIN_LIMIT);
    }

    #[test]
    fn a_long_prompt_has_a_longer_limit() {
        let time = FirstByteTime::default();
        for _ in 0..100 {
            time.observe(10_000, Duration::from_secs(1));
            time.observe(16, Duration::from_millis(30)); // weighs little
        }
        assert_eq!(time.limit(10_000, MIN_LIMIT), MIN_LIMIT);
        let long = time.limit(200_000, MIN_LIMIT);
        assert!((80..90).contains(&long.as_secs()), "{long:?} for 20 s of work");
    }

    #[test]
    fn slower_worker_gets_a_longer_limit() {
        let time = FirstByteTime::default();
        for _ in 0..100 {
            time.observe(1000, Duration::from_millis(100));
        }
        assert_eq!(time.limit(1000, MIN_LIMIT), MIN_LIMIT);
        for _ in 0..20 {
            time.observe(1000, MIN_LIMIT);
        }
        assert!(time.limit(1000, MIN_LIMIT) > 2 * MIN_LIMIT);
    }

    #[test]
    fn the_longest_time_raises_the_limit_at_once_and_fades() {
        let (longest, least) = (LongestTime::default(), Duration::from_secs(60));
        assert_eq!(longest.limit(least), least);
        longest.observe(Duration::from_secs(100));
        assert_eq!(longest.limit(least), Duration::from_secs(400));
        for _ in 0..200 {
            longest.observe(Duration::from_secs(1));
        }
        assert_eq!(longest.limit(least), least);
    }
}
