//! The time that a worker takes for a prompt token, learned from first bytes. A slower worker of a mixed fleet gets
//! fewer requests.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

/// The factor by which each observation reduces the weight of the earlier ones.
const DECAY: f64 = 0.99;

/// Minimum total weight of the observations for an estimate.
const MIN_WEIGHT: f64 = 20.0;

/// Minimum ratio of the estimate to its standard error.
const MIN_CERTAINTY: f64 = 8.0;

/// Minimum mean time to the first byte, in seconds, at which the constant part of that time is small.
const MIN_MEAN_SECONDS: f64 = 0.12;

/// The slope of a least-squares line through the observations (tokens, seconds). The intercept is the constant part of
/// the time to a first byte, so a worker with mostly cached prompts does not look slow. Prompts of equal length have
/// no slope. If they are long, the ratio of the sums is used: it is close to the slope.
#[derive(Debug, Default)]
pub struct Speed {
    sums: Mutex<Sums>,
    /// The estimate as the bits of an f32, 0 while unknown. Each choice reads it for each candidate.
    seconds: AtomicU32,
}

#[derive(Debug, Default)]
struct Sums {
    count: f64,
    tokens: f64,
    seconds: f64,
    tokens_tokens: f64,
    tokens_seconds: f64,
    seconds_seconds: f64,
}

impl Speed {
    /// Records the time `after` which a first byte came. `computed` is the reported number of uncached tokens of the
    /// prompt, `before` the estimated number of tokens of other prompts ahead of it.
    pub fn observe(&self, before: u64, computed: u64, after: Duration) {
        // The estimate of the tokens ahead may be wrong by any factor.
        if before > computed / 4 {
            return;
        }
        let mut sums = self.sums.lock();
        sums.add((before + computed) as f64, after.as_secs_f64());
        let seconds = sums.slope().unwrap_or(0.0) as f32;
        self.seconds.store(seconds.to_bits(), Ordering::Relaxed);
    }

    /// Seconds for a prompt token, if there is enough evidence.
    pub fn token_seconds(&self) -> Option<f32> {
        let seconds = f32::from_bits(self.seconds.load(Ordering::Relaxed));
        (seconds > 0.0).then_some(seconds)
    }
}

impl Sums {
    fn add(&mut self, tokens: f64, seconds: f64) {
        for (sum, value) in [
            (&mut self.count, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.tokens_tokens, tokens * tokens),
            (&mut self.tokens_seconds, tokens * seconds),
            (&mut self.seconds_seconds, seconds * seconds),
        ] {
            *sum = *sum * DECAY + value;
        }
    }

    fn slope(&self) -> Option<f64> {
        if self.count < MIN_WEIGHT {
            return None;
        }
        let spread = self.tokens_tokens - self.tokens * self.tokens / self.count;
        let together = self.tokens_seconds - self.tokens * self.seconds / self.count;
        let noise = self.seconds_seconds - self.seconds * self.seconds / self.count;
        let slope = together / spread;
        let error = ((noise - slope * together).max(0.0) / (self.count - 2.0) / spread).sqrt();
        // Prompts of equal length have no spread: both values are NaN, and the comparison is false.
        if slope > 0.0 && slope >= MIN_CERTAINTY * error {
            return Some(slope);
        }
        let is_long = self.seconds > MIN_MEAN_SECONDS * self.count && self.tokens > 0.0;
        is_long.then(|| self.seconds / self.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(speed: &Speed, seconds: f32) -> bool {
        speed.token_seconds().is_some_and(|estimate| (estimate / seconds - 1.0).abs() < 0.1)
    }

    fn worker(seconds_per_token: f64, lengths: &[u64]) -> Speed {
        let (speed, mut dice) = (Speed::default(), fastrand::Rng::with_seed(1));
        for _ in 0..200 {
            let tokens = lengths[dice.usize(..lengths.len())];
            let noise = 0.01 * dice.f64();
            let seconds = 0.03 + noise + tokens as f64 * seconds_per_token;
            speed.observe(0, tokens, Duration::from_secs_f64(seconds));
        }
        speed
    }

    #[test]
    fn speed_is_per_token_and_not_per_request() {
        assert!(close(&worker(1e-4, &[100, 500, 2000, 4000]), 1e-4));
        assert!(close(&worker(3e-4, &[100, 500, 2000, 4000]), 3e-4));
        // Nearly all of its prompts were cached, and took as long as a request takes.
        assert!(close(&worker(1e-4, &[16, 16, 16, 16, 16, 16, 2000]), 1e-4));
    }

    #[test]
    fn prompts_of_one_length_suffice() {
        let speed = worker(1e-4, &[4000]);
        assert!(speed.token_seconds().is_some_and(|estimate| (1e-4..1.25e-4).contains(&estimate)));
    }

    #[test]
    fn without_evidence_it_is_unknown() {
        assert_eq!(Speed::default().token_seconds(), None);
        assert_eq!(worker(1e-4, &[16]).token_seconds(), None, "prompts of one length");
        assert_eq!(worker(1e-4, &[16, 32]).token_seconds(), None, "the noise is larger");
        let speed = Speed::default();
        for tokens in [100, 5000, 10_000] {
            speed.observe(0, tokens, Duration::from_micros(100 * tokens));
        }
        assert_eq!(speed.token_seconds(), None, "three requests");
    }

    #[test]
    fn slower_worker_is_detected() {
        let speed = Speed::default();
        for (microseconds, rounds) in [(100, 300), (400, 600)] {
            for round in 0..rounds {
                let tokens = 200 + 300 * (round % 10);
                speed.observe(0, tokens, Duration::from_micros(microseconds * tokens));
            }
        }
        assert!(close(&speed, 4e-4), "{:?}", speed.token_seconds());
    }
}
