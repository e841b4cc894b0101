//! The longest that answers of a worker have taken: what one that comes in one piece may be waited for
//! before something is wrong.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// An answer may take this many times as long as the longest before.
const LENIENCE: u32 = 4;

/// Least limit, as a multiple of the limit for a first byte: an answer is many tokens.
const LEAST: u32 = 6;

/// Milliseconds. Each answer takes a hundredth off what was longest before.
#[derive(Debug, Default)]
pub(super) struct Longest(AtomicU64);

impl Longest {
    pub(super) fn observe(&self, took: Duration) {
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let before = self.0.load(Ordering::Relaxed);
        // Two at a time may lose one: that is of no consequence.
        self.0.store((before - before / 100).max(took), Ordering::Relaxed);
    }

    pub(super) fn limit(&self, first_byte: Duration) -> Duration {
        let longest = Duration::from_millis(self.0.load(Ordering::Relaxed));
        first_byte.saturating_mul(LEAST).max(longest.saturating_mul(LENIENCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_at_once_and_fades() {
        let (longest, first) = (Longest::default(), Duration::from_secs(10));
        assert_eq!(longest.limit(first), Duration::from_secs(60));
        longest.observe(Duration::from_secs(100));
        assert_eq!(longest.limit(first), Duration::from_secs(400));
        for _ in 0..200 {
            longest.observe(Duration::from_secs(1));
        }
        assert_eq!(longest.limit(first), Duration::from_secs(60));
    }
}
