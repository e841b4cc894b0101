//! The limit for the silence of a working engine, learned from the silences that ended with a sign of life.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// A silence may last this many times the longest recent one.
const LIMIT_FACTOR: u32 = 4;

/// In each period without an equally long silence, the longest one shrinks by 1/10.
const DECAY_DIVISOR: u64 = 10;

/// The longest silences, in milliseconds.
#[derive(Debug, Default)]
pub(super) struct SilenceLimit {
    /// The longest silence of the present period.
    longest: AtomicU64,
    /// The longest silence of earlier periods; 0 before the first period has ended.
    before: AtomicU64,
}

impl SilenceLimit {
    /// Records a silence that ended with a sign of life.
    pub(super) fn observe(&self, silence: u64) {
        if self.longest.load(Ordering::Relaxed) < silence {
            self.longest.fetch_max(silence, Ordering::Relaxed);
        }
    }

    /// Ends a period in which the engine has worked.
    pub(super) fn end_period(&self) {
        let before = self.before.load(Ordering::Relaxed);
        let longest = self.longest.swap(0, Ordering::Relaxed);
        self.before.store(longest.max(before - before / DECAY_DIVISOR).max(1), Ordering::Relaxed);
    }

    /// The limit for a silence: at least `least`, and at least `unknown` before the first period has ended.
    pub(super) fn limit(&self, least: Duration, unknown: Duration) -> Duration {
        let before = self.before.load(Ordering::Relaxed);
        let longest = Duration::from_millis(self.longest.load(Ordering::Relaxed).max(before));
        let learned = longest.saturating_mul(LIMIT_FACTOR).max(least);
        if before == 0 { learned.max(unknown) } else { learned }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Duration = Duration::from_millis(2500);
    const UNKNOWN: Duration = Duration::from_secs(10);

    #[test]
    fn limit_is_learned_from_completed_silences() {
        let silence_limit = SilenceLimit::default();
        silence_limit.observe(40);
        assert_eq!(silence_limit.limit(MIN, UNKNOWN), UNKNOWN, "nothing is known yet");
        silence_limit.end_period();
        assert_eq!(silence_limit.limit(MIN, UNKNOWN), MIN);
        silence_limit.observe(3000);
        assert_eq!(silence_limit.limit(MIN, UNKNOWN), Duration::from_secs(12), "at once");
        silence_limit.end_period();
        silence_limit.end_period();
        assert_eq!(silence_limit.limit(MIN, UNKNOWN), Duration::from_millis(4 * 2700));
        for _ in 0..20 {
            silence_limit.end_period();
        }
        assert_eq!(silence_limit.limit(MIN, UNKNOWN), MIN);
    }
}
