//! The share of unknown prompts that were cached at their rendezvous owner, because other routers had sent them there.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::key::BLOCK_TOKENS;

/// Half-life of the weight of an observation. An old finding fades even if no new prompt refutes it.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// Factor by which each observation reduces the weight of the earlier ones.
const DECAY: f64 = 0.98;

/// Minimum total weight of the observations for a result. A single observation counts for one minute: a higher bound
/// would delay the cooperation of several routers, and a false finding after a restart concerns one owner only.
const MIN_WEIGHT: f64 = 0.5;

/// Share of unknown tokens found cached above which other routers must exist.
const MIN_FOUND_SHARE: f64 = 0.02;

/// Minimum share that is expected at an owner if other routers exist. Otherwise a router would not send prompts to
/// their owners, and would never find the prompts of other routers there.
const MIN_OWNER_SHARE: f64 = 0.7;

/// Tokens that may be cached without other routers: the chat template is shared by all prompts.
const SLACK: u64 = 6 * BLOCK_TOKENS as u64;

/// The share of unknown prompt tokens that was cached at the rendezvous owner. Zero with one router, large with many.
#[derive(Debug, Default)]
pub struct OwnerShare(Mutex<Sums>);

/// Decaying sums of tokens of unknown prompts.
#[derive(Debug, Default)]
struct Sums {
    count: f64,
    prompt: f64,
    cached: f64,
    prompt_at_owner: f64,
    cached_at_owner: f64,
    last: Option<Instant>,
}

impl OwnerShare {
    /// Observes a report: `cached_tokens` of the `unknown_tokens`, which the tree did not know at the worker, were
    /// cached. `at_owner` tells whether the worker is the rendezvous owner.
    pub fn observe(&self, at_owner: bool, unknown_tokens: u64, cached_tokens: u64, now: Instant) {
        let beyond = |tokens: u64| tokens.saturating_sub(SLACK) as f64;
        let (prompt, cached) = (beyond(unknown_tokens), beyond(cached_tokens));
        let sums = &mut *self.0.lock();
        sums.scale(DECAY * sums.fading(now));
        sums.last = Some(now);
        sums.count += 1.0;
        sums.prompt += prompt;
        sums.cached += cached;
        if at_owner {
            sums.prompt_at_owner += prompt;
            sums.cached_at_owner += cached;
        }
    }

    /// The share at `now`, from 0 to 1.
    pub fn share(&self, now: Instant) -> f64 {
        let sums = self.0.lock();
        // The first comparison is the usual case, and computes no power.
        if sums.count < MIN_WEIGHT || sums.count * sums.fading(now) < MIN_WEIGHT {
            return 0.0;
        }
        let share = |cached: f64, prompt: f64| if prompt > 0.0 { cached / prompt } else { 0.0 };
        let at_owner = share(sums.cached_at_owner, sums.prompt_at_owner).min(1.0);
        if share(sums.cached, sums.prompt) > MIN_FOUND_SHARE {
            at_owner.max(MIN_OWNER_SHARE)
        } else {
            at_owner
        }
    }
}

impl Sums {
    /// Factor by which the weights have decayed until `now`.
    fn fading(&self, now: Instant) -> f64 {
        let age = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        (-age.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2()
    }

    fn scale(&mut self, factor: f64) {
        for sum in [
            &mut self.count,
            &mut self.prompt,
            &mut self.cached,
            &mut self.prompt_at_owner,
            &mut self.cached_at_owner,
        ] {
            *sum *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_zero(shares: &OwnerShare, now: Instant) -> bool {
        shares.share(now).abs() < 1e-9
    }

    #[test]
    fn a_common_template_is_no_evidence_of_other_routers() {
        let (shares, now) = (OwnerShare::default(), Instant::now());
        for _ in 0..1000 {
            shares.observe(true, 200, 32, now);
            shares.observe(false, 200, 64, now);
        }
        assert!(is_zero(&shares, now));
    }

    #[test]
    fn the_share_follows_the_latest_prompts_and_has_a_least_value() {
        let (shares, now) = (OwnerShare::default(), Instant::now());
        assert!(is_zero(&shares, now));
        for _ in 0..1000 {
            shares.observe(true, 1000, 0, now);
        }
        assert!(is_zero(&shares, now));
        shares.observe(false, 3000, 3000, now);
        assert!((shares.share(now) - MIN_OWNER_SHARE).abs() < 1e-9);
        for _ in 0..200 {
            shares.observe(true, 1000, 900, now);
        }
        assert!((0.85..0.9).contains(&shares.share(now)), "{}", shares.share(now));
        for _ in 0..1000 {
            shares.observe(true, 1000, 0, now);
        }
        assert!(shares.share(now) < 0.01);
    }

    #[test]
    fn an_observation_fades_although_nothing_refutes_it() {
        let (shares, now) = (OwnerShare::default(), Instant::now());
        shares.observe(true, 2000, 1600, now);
        assert!(shares.share(now) >= MIN_OWNER_SHARE);
        assert!(shares.share(now + HALF_LIFE / 2) >= MIN_OWNER_SHARE);
        assert!(is_zero(&shares, now + 2 * HALF_LIFE));
    }
}
