//! How much of the prompts that are unknown to this router other routers have had cached.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::key::BLOCK_TOKENS;

/// The weight of an observation halves in this time, so that a finding fades although no prompt comes
/// that could refute it.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// The factor by which each further observation reduces the weight of the earlier ones.
const DECAY: f64 = 0.98;

/// The least weight of observations that count: a single one counts for a minute. Eight routers that each
/// waited for eight had 83% of their prompts cached where these have 85%, and would gain nothing: what
/// a restart finds at one home is not expected at the others, since the home lies behind what most workers hold.
const LEAST: f64 = 0.5;

/// The share of unknown prompts found cached from which on there must be other routers.
const OTHERS: f64 = 0.02;

/// The least share that is expected at a home if there are other routers: a router that does not send
/// its prompts home cannot find those of the others there.
const TRUST: f64 = 0.7;

/// Tokens that may be cached without another router: the beginning of a template that all prompts
/// share is shorter than a block, or differs from the router's text.
const SLACK: u64 = 6 * BLOCK_TOKENS as u64;

/// The share of unknown prompt tokens that was cached at the prompt's home, the worker to which all
/// routers send such a prompt. Zero if there is one router, most of it if there are many.
#[derive(Debug, Default)]
pub struct HomeShare(Mutex<Sums>);

/// Tokens of unknown prompts, decayed.
#[derive(Debug, Default)]
struct Sums {
    count: f64,
    prompt: f64,
    cached: f64,
    prompt_at_home: f64,
    cached_at_home: f64,
    last: Option<Instant>,
}

impl HomeShare {
    /// A worker reports how many of `unknown_tokens`, which it was not known to hold, were cached.
    pub fn observe(&self, at_home: bool, unknown_tokens: u64, cached_tokens: u64, now: Instant) {
        let beyond = |tokens: u64| tokens.saturating_sub(SLACK) as f64;
        let (prompt, cached) = (beyond(unknown_tokens), beyond(cached_tokens));
        let sums = &mut *self.0.lock();
        sums.scale(DECAY * sums.fading(now));
        sums.last = Some(now);
        sums.count += 1.0;
        sums.prompt += prompt;
        sums.cached += cached;
        if at_home {
            sums.prompt_at_home += prompt;
            sums.cached_at_home += cached;
        }
    }

    pub fn share(&self, now: Instant) -> f64 {
        let sums = self.0.lock();
        if sums.count * sums.fading(now) < LEAST {
            return 0.0;
        }
        let share = |cached: f64, prompt: f64| if prompt > 0.0 { cached / prompt } else { 0.0 };
        let at_home = share(sums.cached_at_home, sums.prompt_at_home).min(1.0);
        if share(sums.cached, sums.prompt) > OTHERS { at_home.max(TRUST) } else { at_home }
    }
}

impl Sums {
    /// The part of the weights that is left at `now`.
    fn fading(&self, now: Instant) -> f64 {
        let age = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        (-age.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2()
    }

    fn scale(&mut self, factor: f64) {
        for sum in [
            &mut self.count,
            &mut self.prompt,
            &mut self.cached,
            &mut self.prompt_at_home,
            &mut self.cached_at_home,
        ] {
            *sum *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_zero(home: &HomeShare, now: Instant) -> bool {
        home.share(now).abs() < 1e-9
    }

    #[test]
    fn a_template_that_all_prompts_begin_with_is_no_other_router() {
        let (home, now) = (HomeShare::default(), Instant::now());
        for _ in 0..1000 {
            home.observe(true, 200, 32, now);
            home.observe(false, 200, 64, now);
        }
        assert!(is_zero(&home, now));
    }

    #[test]
    fn the_share_is_that_of_the_last_prompts_and_of_some_trust() {
        let (home, now) = (HomeShare::default(), Instant::now());
        assert!(is_zero(&home, now));
        for _ in 0..1000 {
            home.observe(true, 1000, 0, now);
        }
        assert!(is_zero(&home, now));
        home.observe(false, 3000, 3000, now);
        assert!((home.share(now) - TRUST).abs() < 1e-9);
        for _ in 0..200 {
            home.observe(true, 1000, 900, now);
        }
        assert!((0.85..0.9).contains(&home.share(now)), "{}", home.share(now));
        for _ in 0..1000 {
            home.observe(true, 1000, 0, now);
        }
        assert!(home.share(now) < 0.01);
    }

    #[test]
    fn an_observation_fades_although_nothing_refutes_it() {
        let (home, now) = (HomeShare::default(), Instant::now());
        home.observe(true, 2000, 1600, now);
        assert!(home.share(now) >= TRUST);
        assert!(home.share(now + HALF_LIFE / 2) >= TRUST);
        assert!(is_zero(&home, now + 2 * HALF_LIFE));
    }
}
