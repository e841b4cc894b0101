//! How long a worker takes for a prompt token, learned from first bytes: so that a slower worker of a
//! mixed fleet gets less to do.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

/// The factor by which each observation reduces the weight of the earlier ones.
const MEMORY: f64 = 0.99;

/// The least weight of observations that count.
const LEAST: f64 = 20.0;

/// The estimate counts if it is so many times its standard error.
const CERTAINTY: f64 = 8.0;

/// The mean time to the first byte from which on the part that does not depend on the prompt is small.
const LONG_SECONDS: f64 = 0.12;

/// The slope of a line through the observations, by least squares. Its height is what a first byte takes
/// however short the prompt, so that a worker of which most prompts are cached does not look slow. Prompts
/// of one length have no slope; if they are long, the ratio of the sums is close to it.
#[derive(Debug, Default)]
pub struct Speed {
    sums: Mutex<Sums>,
    /// Bits of an f32, 0 while unknown: read for each candidate of each choice.
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
    /// A first byte came `after` so long: of a prompt of which `computed` tokens were not cached, as its
    /// worker has reported, behind an estimate of `before` tokens of other prompts.
    pub fn observe(&self, before: u64, computed: u64, after: Duration) {
        // The estimates of prompts that were just being computed may be wrong by any factor.
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
            *sum = *sum * MEMORY + value;
        }
    }

    fn slope(&self) -> Option<f64> {
        if self.count < LEAST {
            return None;
        }
        let spread = self.tokens_tokens - self.tokens * self.tokens / self.count;
        let together = self.tokens_seconds - self.tokens * self.seconds / self.count;
        let noise = self.seconds_seconds - self.seconds * self.seconds / self.count;
        let slope = together / spread;
        let error = ((noise - slope * together).max(0.0) / (self.count - 2.0) / spread).sqrt();
        // Without any spread in the lengths of prompts both are not numbers, and no comparison holds.
        if slope > 0.0 && slope >= CERTAINTY * error {
            return Some(slope);
        }
        let is_long = self.seconds > LONG_SECONDS * self.count && self.tokens > 0.0;
        is_long.then(|| self.seconds / self.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(speed: &Speed, seconds: f32) -> bool {
        speed.token_seconds().is_some_and(|told| (told / seconds - 1.0).abs() < 0.1)
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
    fn it_is_the_time_of_a_token_and_not_that_of_a_request() {
        assert!(close(&worker(1e-4, &[100, 500, 2000, 4000]), 1e-4));
        assert!(close(&worker(3e-4, &[100, 500, 2000, 4000]), 3e-4));
        // Nearly all of its prompts were cached, and took as long as a request takes.
        assert!(close(&worker(1e-4, &[16, 16, 16, 16, 16, 16, 2000]), 1e-4));
    }

    #[test]
    fn long_prompts_of_one_length_tell_it_as_well() {
        let speed = worker(1e-4, &[4000]);
        assert!(speed.token_seconds().is_some_and(|told| (1e-4..1.25e-4).contains(&told)));
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
    fn a_worker_that_slows_down_is_found_out() {
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
