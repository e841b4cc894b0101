//! The rule of SGLang's router (v0.4), with its flags. While the loads are balanced, a prompt goes to the worker
//! that holds the longest prefix of it, if that is more than `--cache-threshold` of the prompt. Otherwise it goes
//! to the least loaded worker.
//!
//! In v0.4 a miss went to the worker with the smallest tree. That is often a worker with a problem: it has just
//! restarted, or it evicts more than the others (sglang#14305).

use super::{Candidate, Choice, Policy, PolicyRequest, Reason, least_load::least_loaded};
use crate::{config::Config, key::BLOCK_TOKENS};

#[derive(Debug)]
pub struct CacheAwareThreshold {
    /// Share of the prompt that must be cached for a hit.
    hit: f64,
    /// Maximum difference between the request counts of balanced workers.
    difference: u32,
    /// Maximum ratio between them.
    ratio: f64,
}

impl CacheAwareThreshold {
    pub fn new(config: &Config) -> Self {
        Self {
            hit: config.cache_threshold.get(),
            difference: config.balance_abs_threshold,
            ratio: config.balance_rel_threshold.get(),
        }
    }

    fn is_balanced(&self, workers: &[Candidate]) -> bool {
        let requests = || workers.iter().map(|worker| worker.requests);
        let (least, most) = (requests().min().unwrap_or(0), requests().max().unwrap_or(0));
        most - least <= self.difference || f64::from(most) <= f64::from(least) * self.ratio
    }

    /// Whether `blocks` cached blocks are a hit.
    fn is_hit(&self, request: &PolicyRequest<'_>, blocks: u32) -> bool {
        let tokens = request.key.map_or(0, |key| key.prompt_tokens).max(1);
        let held = u64::from(blocks) * u64::from(BLOCK_TOKENS);
        blocks > 0 && held as f64 / tokens as f64 > self.hit
    }
}

impl Policy for CacheAwareThreshold {
    fn name(&self) -> &'static str {
        "cache_aware_threshold"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let longest = workers.iter().map(|worker| worker.matched_blocks).max()?;
        let is_hit = self.is_hit(request, longest);
        if is_hit && self.is_balanced(workers) {
            let holder = (0..workers.len())
                .filter(|index| workers[*index].matched_blocks == longest)
                .min_by_key(|index| workers[*index].requests)?;
            return Some(request.choice(workers, holder, Reason::CacheHit));
        }
        let index = least_loaded(workers)?;
        let reason = match request.key {
            Some(key) if !key.blocks.is_empty() => {
                if is_hit {
                    Reason::Balance
                } else {
                    Reason::Cold
                }
            }
            _ => Reason::NoPrefix,
        };
        Some(request.choice(workers, index, reason))
    }

    fn uses_tree(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{prompt, workers};

    /// Name, workers, and the choice's index and reason.
    type Case<'a> = (&'a str, &'a [(u32, u64, u32)], usize, Reason);

    #[test]
    fn the_rule_of_sglang() {
        let policy = CacheAwareThreshold::new(&Config::default());
        let key = prompt(1, 100);
        let table: [Case<'_>; 8] = [
            ("a hit", &[(9, 0, 51), (0, 0, 0)], 0, Reason::CacheHit),
            ("not more than half of it", &[(9, 0, 50), (0, 0, 0)], 1, Reason::Cold),
            ("the longest match", &[(0, 0, 60), (9, 0, 70)], 1, Reason::CacheHit),
            ("of equal ones the less loaded", &[(2, 0, 60), (1, 0, 60)], 1, Reason::CacheHit),
            ("just in balance", &[(32, 0, 60), (0, 0, 0)], 0, Reason::CacheHit),
            ("out of balance", &[(33, 0, 60), (0, 0, 0)], 1, Reason::Balance),
            ("by ratio in balance", &[(400_033, 0, 60), (400_000, 0, 0)], 0, Reason::CacheHit),
            ("out of balance, a miss", &[(33, 0, 0), (0, 0, 9)], 1, Reason::Cold),
        ];
        for (case, states, index, reason) in table {
            let choice = policy.choose(
                &PolicyRequest { key: Some(&key), ..PolicyRequest::default() },
                &workers(states),
            );
            let choice = choice.expect("workers");
            assert_eq!((choice.index, choice.reason), (index, reason), "{case}");
        }
    }

    #[test]
    fn the_thresholds_are_settings() {
        let config = Config {
            cache_threshold: 0.1_f64.try_into().expect("a share"),
            balance_abs_threshold: 2,
            balance_rel_threshold: 3.0.try_into().expect("a ratio"),
            ..Config::default()
        };
        let policy = CacheAwareThreshold::new(&config);
        let key = prompt(1, 100);
        let chosen = |states: &[(u32, u64, u32)]| {
            policy
                .choose(
                    &PolicyRequest { key: Some(&key), ..PolicyRequest::default() },
                    &workers(states),
                )
                .map(|c| c.index)
        };
        assert_eq!(chosen(&[(0, 0, 11), (0, 0, 0)]), Some(0));
        assert_eq!(chosen(&[(6, 0, 11), (2, 0, 0)]), Some(0), "three times the least is allowed");
        assert_eq!(chosen(&[(7, 0, 11), (2, 0, 0)]), Some(1));
    }
}
