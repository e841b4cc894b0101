//! Policies: the choice of a worker for a request. A policy is a pure function of the request's key and a snapshot
//! of the candidates. It does no I/O and reserves nothing.
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

/// The input of a policy for one request.
#[derive(Debug, Default)]
pub struct PolicyRequest<'a> {
    /// `None` if the router cannot read a prompt in the body.
    pub key: Option<&'a RouteKey>,
    /// Share of unknown prompt tokens that was found cached at the rendezvous owner of the prompt: other routers
    /// had sent the prompt there.
    pub owner_share: f64,
}

/// A worker that can take the request, at the time of the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub id: WorkerId,
    /// Requests of this router on the worker.
    pub requests: u32,
    /// Requests of other routers, by the latest report of the worker.
    pub other_requests: u32,
    /// Reserved prompt tokens that the worker has yet to compute.
    pub pending_tokens: u64,
    /// Leading blocks of the prompt that the worker probably holds.
    pub matched_blocks: u32,
    /// Hash of the URL, the same in every router.
    pub hash_seed: u64,
    /// Seconds for a prompt token on the worker, if known.
    pub token_seconds: Option<f32>,
}

labels! {
    /// The reason of a choice: a metric label and a log field.
    pub enum Reason {
        /// No other worker holds more of the prompt.
        CacheHit => "cache_hit",
        /// Another worker holds more of the prompt, or is the owner by hash, but has too much load.
        Balance => "balance",
        /// No worker holds enough of the prompt.
        Cold => "cold",
        /// The same as `Cold`, and the worker is the rendezvous owner of the prompt.
        RendezvousOwner => "rendezvous_owner",
        /// There is no prompt, or less than one block of it.
        NoPrefix => "no_prefix",
        /// The hash of the session or of the prompt selects the worker.
        Hash => "hash",
        /// The session was on this worker before.
        Session => "session",
        LeastLoad => "least_load",
        Random => "random",
        RoundRobin => "round_robin",
    }
}

/// The choice of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index into the slice of candidates.
    pub index: usize,
    /// Prompt tokens that the chosen worker will have to compute; they are reserved.
    pub uncached_tokens: u32,
    pub reason: Reason,
    /// Whether the chosen worker is the rendezvous owner. `None` unless the prompt is a sample for `OwnerShare`: no
    /// worker is known to hold more of it than the chosen one and most others.
    pub at_owner: Option<bool>,
}

/// A routing policy.
pub trait Policy: Send + Sync {
    /// The name for `--policy`.
    fn name(&self) -> &'static str;

    /// Chooses one of `workers`. `None` only if there are none.
    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice>;

    /// Whether the policy needs prefix matches: then the router keeps the tree. By default it does not.
    fn uses_tree(&self) -> bool {
        false
    }
}

/// Creates the policy of `config`.
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
    /// The hash of the client's session, if there is one.
    fn session(&self) -> Option<u64> {
        self.key?.session
    }

    /// Number of completions.
    fn answers(&self) -> u64 {
        1 + self.key.map_or(0, |key| u64::from(key.more_answers))
    }

    /// Returns the choice of `workers[index]`.
    fn choice(&self, workers: &[Candidate], index: usize, reason: Reason) -> Choice {
        let uncached_tokens = self.uncached_tokens(&workers[index]);
        Choice { index, uncached_tokens, reason, at_owner: None }
    }

    /// Prompt tokens that `worker` does not hold. At least one block, because an engine always computes the last token.
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
            assert_eq!(policy.choose(&PolicyRequest::default(), &[]), None);
            let one = testing::workers(&[(3, 100, 0)]);
            let choice = policy.choose(&PolicyRequest::default(), &one).expect("one worker");
            assert_eq!((choice.index, choice.uncached_tokens), (0, BLOCK_TOKENS), "{name:?}");
        }
    }
}
