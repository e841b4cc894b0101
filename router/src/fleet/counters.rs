//! The counters of one worker. They are fields of its replica and its backend: no map from URL to counter is needed.

use crate::{
    fleet::breaker::BreakerState,
    metrics::{Counter, Counters, Ejection, Histogram},
    policy::Reason,
};

/// The counters of an engine process.
#[derive(Debug, Default)]
pub struct BackendCounters {
    pub ejections: Counters<Ejection>,
    /// Transitions of its circuit breaker, by the new state.
    pub breaker: Counters<BreakerState>,
}

/// The counters of a replica.
#[derive(Debug, Default)]
pub struct ReplicaCounters {
    /// Requests sent to the worker, by the reason of the policy.
    pub selections: Counters<Reason>,
    /// Prompt tokens of the requests for which the worker has reported its cached tokens.
    pub prompt_tokens: Counters<Reason>,
    /// Tokens among these that the router predicted to be cached.
    pub predicted_tokens: Counters<Reason>,
    /// Tokens among these that were cached.
    pub cached_tokens: Counters<Reason>,
    /// Complete answers without a report of cached tokens.
    pub unreported: Counter,
    /// Requests that waited for a prefix before they were sent.
    pub prefix_waits: Counter,
    /// Blocks that reports have removed from its share of the tree.
    pub evicted_blocks: Counter,
    /// Number of times that a report has emptied its share of the tree.
    pub emptied: Counter,
    /// Time from the choice of the worker to the first byte of a streamed answer. Only the dashboard shows it: on the
    /// page of metrics it would be fifty series for each worker, and the workers report the same.
    pub first_token: Histogram,
}

impl ReplicaCounters {
    /// Counts a report of cached tokens: tokens of the prompt, predicted tokens, cached tokens.
    pub fn cache(&self, reason: Reason, prompt: u64, predicted: u64, cached: u64) {
        self.prompt_tokens.add(reason, prompt);
        self.predicted_tokens.add(reason, predicted);
        self.cached_tokens.add(reason, cached);
    }
}
