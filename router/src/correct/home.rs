//! What other routers do for this one.

use parking_lot::Mutex;

use crate::key::BLOCK_TOKENS;

/// What each further prompt leaves of the weight of those before.
const DECAY: f64 = 0.98;

/// If this much of the prompts that were unknown here was cached all the same, there are other routers.
const OTHERS: f64 = 0.02;

/// Then their prompts are expected at their homes, for only a router that sends its own there finds
/// those of the others.
const TRUST: f64 = 0.7;

/// Tokens that a worker may have of a prompt that was unknown here without another router: a template's beginning, which
/// all prompts share, is shorter than a block or differs from ours.
const SLACK: u64 = 6 * BLOCK_TOKENS as u64;

/// How much of the prompts that were unknown here was cached at their home, the worker to which all
/// routers send such prompts: nothing if there is one router, most if there are many.
#[derive(Debug, Default)]
pub struct HomeShare(Mutex<Sums>);

/// Tokens of prompts that were unknown here, decayed.
#[derive(Debug, Default)]
struct Sums {
    prompt: f64,
    cached: f64,
    prompt_at_home: f64,
    cached_at_home: f64,
}

impl HomeShare {
    /// A worker says what it had of a prompt of which it was not known to have anything.
    pub fn observe(&self, at_home: bool, prompt_tokens: u64, cached_tokens: u64) {
        let beyond = |tokens: u64| tokens.saturating_sub(SLACK);
        let (prompt_tokens, cached_tokens) = (beyond(prompt_tokens), beyond(cached_tokens));
        let sums = &mut *self.0.lock();
        sums.prompt = sums.prompt * DECAY + prompt_tokens as f64;
        sums.cached = sums.cached * DECAY + cached_tokens as f64;
        if at_home {
            sums.prompt_at_home = sums.prompt_at_home * DECAY + prompt_tokens as f64;
            sums.cached_at_home = sums.cached_at_home * DECAY + cached_tokens as f64;
        }
    }

    pub fn share(&self) -> f64 {
        let sums = self.0.lock();
        let share = |cached: f64, prompt: f64| if prompt > 0.0 { cached / prompt } else { 0.0 };
        let at_home = share(sums.cached_at_home, sums.prompt_at_home).min(1.0);
        if share(sums.cached, sums.prompt) > OTHERS { at_home.max(TRUST) } else { at_home }
    }
}

#[cfg(test)]
mod tests {
    use super::{HomeShare, TRUST};

    #[test]
    fn a_template_that_all_prompts_begin_with_is_no_other_router() {
        let home = HomeShare::default();
        for _ in 0..1000 {
            home.observe(true, 200, 32);
            home.observe(false, 200, 64);
        }
        assert!(home.share().abs() < 1e-9);
    }

    #[test]
    fn the_share_is_that_of_the_last_prompts_and_of_some_trust() {
        let home = HomeShare::default();
        assert!(home.share().abs() < 1e-9);
        for _ in 0..1000 {
            home.observe(true, 1000, 0);
        }
        assert!(home.share().abs() < 1e-9);
        home.observe(false, 3000, 3000);
        assert!((home.share() - TRUST).abs() < 1e-9);
        for _ in 0..200 {
            home.observe(true, 1000, 900);
        }
        assert!((0.85..0.9).contains(&home.share()), "{}", home.share());
        for _ in 0..1000 {
            home.observe(true, 1000, 0);
        }
        assert!(home.share() < 0.01);
    }
}
