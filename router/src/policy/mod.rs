//! Policies: which worker gets a request. A policy is a pure function of the request's key and a
//! snapshot of the workers that can take it; it does no I/O and books nothing.
//!
//! To add one: a file here, a line in [`by_name`], a row in its test.

mod cache_aware;
mod round_robin;

pub use cache_aware::CacheAware;
pub use round_robin::RoundRobin;

use crate::{
    fleet::worker_id::WorkerId,
    key::{BLOCK_TOKENS, RouteKey},
    metrics::labels,
};

/// A request as a policy sees it.
#[derive(Debug)]
pub struct PolicyRequest<'a> {
    /// `None` if the body has none that the router can read.
    pub key: Option<&'a RouteKey>,
}

/// A worker that can take the request, as it was when the snapshot was taken.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub id: WorkerId,
    /// Outstanding requests.
    pub requests: u32,
    /// Prompt tokens booked, not cached there, and not yet prefilled.
    pub pending_tokens: u64,
    /// Leading blocks of the request that the worker is believed to hold.
    pub matched_blocks: u32,
    /// Stable hash of the worker's URL, the same in every router.
    pub hash_seed: u64,
}

labels! {
    /// Why a worker was chosen; a metric label and a log field.
    pub enum Reason {
        /// No other worker holds more of the prompt.
        CacheHit => "cache_hit",
        /// Another worker holds more of the prompt, but this one will be done sooner.
        Balance => "balance",
        /// No worker holds any of the prompt.
        Cold => "cold",
        /// There is no prompt, or too little of it to be found in a cache.
        NoPrefix => "no_prefix",
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

/// The policy of that name.
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    match name {
        "cache_aware" => Some(Box::<CacheAware>::default()),
        "round_robin" => Some(Box::<RoundRobin>::default()),
        _ => None,
    }
}

impl PolicyRequest<'_> {
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
    use super::by_name;

    #[test]
    fn a_policy_answers_to_its_name() {
        for (name, uses_tree) in [("cache_aware", true), ("round_robin", false)] {
            let policy = by_name(name).expect(name);
            assert_eq!((policy.name(), policy.uses_tree()), (name, uses_tree));
        }
        assert!(by_name("cache-aware").is_none());
    }
}
