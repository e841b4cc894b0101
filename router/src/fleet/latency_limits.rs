//! Limits learned from the responses of a worker: for the wait for a first byte, for a whole answer, and for the pauses
//! of streams.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

use super::silence_limit::SilenceLimit;

/// Minimum limit for the silence of an engine that reports its progress in each step.
const MIN_SILENCE_LIMIT: Duration = Duration::from_millis(2500);

/// Minimum limit for an answer in one piece, as a multiple of --first-token-timeout-secs: an answer has many tokens.
const MIN_ANSWER_MULTIPLE: u32 = 6;

/// A wait may last this many times the expected time. Prompt lengths are estimated from bytes and batches are
/// uneven, so a factor of two is common. A frozen worker exceeds any factor.
const LIMIT_FACTOR: u32 = 4;

/// Factor by which each observation reduces the weight of the earlier ones.
const DECAY: f64 = 0.95;

/// The limits for the waits on one worker.
#[derive(Debug)]
pub struct LatencyLimits {
    first_token_timeout: Duration,
    pub(super) first_byte_time: FirstByteTime,
    pub(super) silence_limit: SilenceLimit,
    longest_answer: LongestTime,
    /// Pauses of streams of at least a second.
    longest_pause: LongestTime,
}

impl LatencyLimits {
    pub(super) fn new(first_token_timeout: Duration) -> Self {
        Self {
            first_token_timeout,
            first_byte_time: FirstByteTime::default(),
            silence_limit: SilenceLimit::default(),
            longest_answer: LongestTime::default(),
            longest_pause: LongestTime::default(),
        }
    }

    /// Records the time of a complete answer.
    pub(super) fn answered(&self, took: Duration) {
        self.longest_answer.observe(took);
        // Each answer makes earlier long pauses count less.
        self.longest_pause.observe(Duration::ZERO);
    }

    /// Records a pause in a stream.
    pub fn stream_paused(&self, pause: Duration) {
        self.longest_pause.observe(pause);
    }

    /// The limit for a first byte behind `tokens_ahead` prompt tokens: --first-token-timeout-secs, or more if the
    /// worker has been slow.
    pub(super) fn first_token(&self, tokens_ahead: u64) -> Duration {
        self.first_byte_time.limit(tokens_ahead, self.first_token_timeout)
    }

    /// The limit for the silence of the worker while an answer in one piece is awaited: a multiple of
    /// --first-token-timeout-secs, or more if its answers take longer.
    pub fn answer(&self) -> Duration {
        self.longest_answer.limit(self.first_token_timeout.saturating_mul(MIN_ANSWER_MULTIPLE))
    }

    /// The limit for a pause in a stream: at least `least`, more if the worker's streams had long pauses recently.
    pub fn pause(&self, least: Duration) -> Duration {
        self.longest_pause.limit(least)
    }

    /// The limit for the silence of an engine that reports its progress by itself and has `pending_tokens` prompt
    /// tokens to compute.
    pub(super) fn silence(&self, pending_tokens: u64) -> Duration {
        let limit = self.silence_limit.limit(MIN_SILENCE_LIMIT, self.first_token_timeout);
        self.first_byte_time.limit(pending_tokens, limit)
    }
}

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
