//! Policies: which worker gets a request. A policy is a pure function of the request's key and a
//! snapshot of the workers that can take it; it does no I/O and books nothing.
//!
//! To add one: a file here, a name in [`PolicyName`], a line in [`of`].

mod cache_aware;
mod cache_aware_threshold;
mod consistent_hash;
mod least_load;
mod manual;
mod power_of_two;
mod prefix_hash;
mod random;
mod rendezvous;
mod round_robin;
#[cfg(test)]
mod testing;

pub use cache_aware::CacheAware;
pub use cache_aware_threshold::CacheAwareThreshold;
pub use consistent_hash::ConsistentHash;
pub use least_load::{LeastLoad, least_loaded};
pub use manual::Manual;
pub use power_of_two::PowerOfTwo;
pub use prefix_hash::PrefixHash;
pub use random::Random;
pub use round_robin::RoundRobin;

use crate::{
    config::{Config, PolicyName},
    key::{BLOCK_TOKENS, RouteKey},
    metrics::labels,
    names::WorkerId,
};

/// A request as a policy sees it.
#[derive(Debug)]
pub struct PolicyRequest<'a> {
    /// `None` if the body has none that the router can read.
    pub key: Option<&'a RouteKey>,
    /// The share of prompt tokens, not known to be held by any worker, that was cached at the worker to
    /// which the prompt's hash points: other routers had sent it there.
    pub home_share: f64,
}

/// A worker that can take the request, as it was when the snapshot was taken.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub id: WorkerId,
    /// Outstanding requests of this router,
    pub requests: u32,
    /// and of others, as far as the worker has reported them lately.
    pub others: u32,
    /// Prompt tokens booked, not cached there, and not yet prefilled.
    pub pending_tokens: u64,
    /// Leading blocks of the request that the worker is believed to hold.
    pub matched_blocks: u32,
    /// Stable hash of the worker's URL, the same in every router.
    pub hash_seed: u64,
    /// Seconds that the worker takes for a prompt token, if that is known.
    pub token_seconds: Option<f32>,
}

labels! {
    /// Why a worker was chosen; a metric label and a log field.
    pub enum Reason {
        /// No other worker holds more of the prompt.
        CacheHit => "cache_hit",
        /// Another worker holds more of the prompt or is where its hash points to, but has too much
        /// to do.
        Balance => "balance",
        /// No worker holds any of the prompt, or none enough of it to matter.
        Cold => "cold",
        /// The same, and this is the worker to which all routers send such a prompt.
        Home => "home",
        /// There is no prompt, or too little of it to be found in a cache.
        NoPrefix => "no_prefix",
        /// The hash of the session or of the prompt's beginning points to it.
        Hash => "hash",
        /// The session has been there before.
        Session => "session",
        LeastLoad => "least_load",
        Random => "random",
        RoundRobin => "round_robin",
    }
}

/// A policy's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Into the slice of candidates.
    pub index: usize,
    /// Prompt tokens that the chosen worker will have to compute: what to book.
    pub uncached_tokens: u32,
    pub reason: Reason,
    /// Where no worker is known to hold more of the prompt than the chosen one and most others do:
    /// whether this is the worker to which the prompt's hash points.
    pub at_home: Option<bool>,
}

/// How a router chooses workers.
pub trait Policy: Send + Sync {
    /// As in `--policy`.
    fn name(&self) -> &'static str;

    /// `None` only if there are no workers.
    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice>;

    /// Whether the router should look prompts up and remember where they went.
    fn uses_tree(&self) -> bool;
}

/// The policy that `config` asks for, with its settings.
pub fn of(config: &Config) -> Box<dyn Policy> {
    match config.policy {
        PolicyName::CacheAware => Box::<CacheAware>::default(),
        PolicyName::CacheAwareThreshold => Box::new(CacheAwareThreshold::new(config)),
        PolicyName::ConsistentHash => Box::new(ConsistentHash),
        PolicyName::LeastLoad => Box::new(LeastLoad),
        PolicyName::Manual => Box::<Manual>::default(),
        PolicyName::PowerOfTwo => Box::new(PowerOfTwo),
        PolicyName::PrefixHash => Box::new(PrefixHash),
        PolicyName::Random => Box::new(Random),
        PolicyName::RoundRobin => Box::<RoundRobin>::default(),
    }
}

impl PolicyRequest<'_> {
    /// A hash that names the client's session, if it has one.
    fn session(&self) -> Option<u64> {
        self.key?.session
    }

    /// Answers that it asks for.
    fn answers(&self) -> u64 {
        1 + self.key.map_or(0, |key| u64::from(key.more_answers))
    }

    /// The choice of `workers[index]`.
    fn choice(&self, workers: &[Candidate], index: usize, reason: Reason) -> Choice {
        let uncached_tokens = self.uncached_tokens(&workers[index]);
        Choice { index, uncached_tokens, reason, at_home: None }
    }

    /// Prompt tokens that `worker` does not hold. At least one block: the last token is always
    /// computed, and a request is never free.
    fn uncached_tokens(&self, worker: &Candidate) -> u32 {
        let Some(key) = self.key else {
            return BLOCK_TOKENS;
        };
        let cached = u64::from(worker.matched_blocks) * u64::from(BLOCK_TOKENS);
        let tokens = key.prompt_tokens.saturating_sub(cached).max(u64::from(BLOCK_TOKENS));
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_policy_has_its_name_and_needs_workers() {
        for name in PolicyName::value_variants() {
            let policy = of(&Config { policy: *name, ..Config::default() });
            assert_eq!(policy.name(), name.as_str());
            assert_eq!(policy.choose(&PolicyRequest { key: None, home_share: 0.0 }, &[]), None);
            let one = testing::workers(&[(3, 100, 0)]);
            let choice = policy
                .choose(&PolicyRequest { key: None, home_share: 0.0 }, &one)
                .expect("one worker");
            assert_eq!((choice.index, choice.uncached_tokens), (0, BLOCK_TOKENS), "{name:?}");
        }
    }
}
