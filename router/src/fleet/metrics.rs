//! What is counted for each worker, kept in the worker itself: no map from URL to counter. And how the
//! page of `/metrics` shows it.

use std::sync::Arc;

use crate::{
    fleet::worker::{BreakerState, Phase, Worker},
    metrics::{Counter, Counters, Ejection, Family, Histogram, Label, Page},
    policy::Reason,
    tree::PrefixTree,
};

const SELECTIONS: Family = Family::counter(
    "mla_router_selections_total",
    "Requests sent to a worker, by the policy's reason.",
    &["worker", "reason"],
);
const PROMPT_TOKENS: Family = Family::counter(
    "mla_router_prompt_tokens_total",
    "Prompt tokens of the requests for which a worker has reported its cache hits, by the policy's reason.",
    &["worker", "reason"],
);
const PREDICTED_TOKENS: Family = Family::counter(
    "mla_router_predicted_cached_tokens_total",
    "Those of them that the router expected to be cached.",
    &["worker", "reason"],
);
const CACHED_TOKENS: Family = Family::counter(
    "mla_router_cached_tokens_total",
    "Those of them that were cached.",
    &["worker", "reason"],
);
const UNREPORTED: Family = Family::counter(
    "mla_router_unreported_answers_total",
    "Whole answers to prompts that did not say how many tokens were cached: the prefix tree learns nothing from them.",
    &["worker"],
);
const PREFIX_WAITS: Family = Family::counter(
    "mla_router_prefix_waits_total",
    "Requests that were sent to a worker only when it had computed a prefix for another one.",
    &["worker"],
);
const EVICTED_BLOCKS: Family = Family::counter(
    "mla_router_tree_corrected_blocks_total",
    "Blocks that the prefix tree took from a worker because its cache hits showed that it had evicted them.",
    &["worker"],
);
const EMPTIED: Family = Family::counter(
    "mla_router_tree_purges_total",
    "Times that a worker's cache hits showed that it had lost its whole cache.",
    &["worker"],
);
const EJECTIONS: Family = Family::counter(
    "mla_router_ejections_total",
    "Times that a worker was taken out of rotation, by what found it bad.",
    &["worker", "cause"],
);
const TRANSITIONS: Family = Family::counter(
    "mla_router_breaker_transitions_total",
    "Times that a worker's circuit breaker came into a state.",
    &["worker", "to"],
);
const BREAKER: Family = Family::gauge(
    "mla_router_worker_breaker_state",
    "1 for the state in which a worker's circuit breaker is.",
    &["worker", "state"],
);
const PHASE: Family = Family::gauge(
    "mla_router_worker_phase",
    "1 for the phase in which a worker is; only a healthy one is in rotation.",
    &["worker", "phase"],
);
const TAKES_REQUESTS: Family = Family::gauge(
    "mla_router_worker_healthy",
    "1 if a worker takes requests: it is healthy, and its breaker lets them through.",
    &["worker"],
);
const REQUESTS: Family = Family::gauge(
    "mla_router_worker_requests",
    "Requests now on a worker, each as often as it asks for answers.",
    &["worker"],
);
const PENDING_TOKENS: Family = Family::gauge(
    "mla_router_worker_pending_tokens",
    "Prompt tokens that a worker has yet to compute.",
    &["worker"],
);
const TREE_BLOCKS: Family = Family::gauge(
    "mla_router_worker_tree_blocks",
    "Blocks that the prefix tree believes a worker to hold.",
    &["worker"],
);

/// The counters of one worker. They end with it.
#[derive(Debug, Default)]
pub struct WorkerCounters {
    /// Requests sent here, by the reason of the policy.
    pub selections: Counters<Reason>,
    /// Of the requests for which it has said what was cached: all tokens of their prompts,
    pub prompt_tokens: Counters<Reason>,
    /// those that the router took for cached,
    pub predicted_tokens: Counters<Reason>,
    /// and those that were.
    pub cached_tokens: Counters<Reason>,
    /// Answers that have not said what was cached.
    pub unreported: Counter,
    /// Requests that first waited for a prefix.
    pub prefix_waits: Counter,
    /// What its reports have taken from its share of the tree, in blocks,
    pub evicted_blocks: Counter,
    /// and how often they took all.
    pub emptied: Counter,
    pub ejections: Counters<Ejection>,
    /// From the choice of the worker to the first byte of a streamed answer. The dashboard shows it; on the
    /// page of metrics it would be fifty series a worker, and the workers tell the same.
    pub first_token: Histogram,
    /// Changes of its circuit breaker, by the state that it came to.
    pub breaker: Counters<BreakerState>,
}

impl WorkerCounters {
    /// A worker has said how much of a prompt it had; `predicted` is what the router expected.
    pub fn cache(&self, reason: Reason, prompt: u64, predicted: u64, cached: u64) {
        self.prompt_tokens.add(reason, prompt);
        self.predicted_tokens.add(reason, predicted);
        self.cached_tokens.add(reason, cached);
    }
}

/// What was counted for `workers`, and what is on them now.
pub fn write(page: &mut Page, workers: &[Arc<Worker>], tree: &PrefixTree) {
    counters(page, &SELECTIONS, workers, |counters| &counters.selections);
    counters(page, &PROMPT_TOKENS, workers, |counters| &counters.prompt_tokens);
    counters(page, &PREDICTED_TOKENS, workers, |counters| &counters.predicted_tokens);
    counters(page, &CACHED_TOKENS, workers, |counters| &counters.cached_tokens);
    values(page, &UNREPORTED, workers, |worker| worker.counters.unreported.get());
    values(page, &PREFIX_WAITS, workers, |worker| worker.counters.prefix_waits.get());
    values(page, &EVICTED_BLOCKS, workers, |worker| worker.counters.evicted_blocks.get());
    values(page, &EMPTIED, workers, |worker| worker.counters.emptied.get());
    counters(page, &EJECTIONS, workers, |counters| &counters.ejections);
    counters(page, &TRANSITIONS, workers, |counters| &counters.breaker);
    states(page, &BREAKER, workers, BreakerState::as_str, Worker::breaker);
    states(page, &PHASE, workers, Phase::as_str, Worker::phase);
    values(page, &TAKES_REQUESTS, workers, |worker| u64::from(worker.takes_requests()));
    values(page, &REQUESTS, workers, |worker| u64::from(worker.requests()));
    values(page, &PENDING_TOKENS, workers, Worker::pending_tokens);
    values(page, &TREE_BLOCKS, workers, |worker| tree.held_by(worker.id));
}

/// One series a worker.
fn values(
    page: &mut Page,
    family: &'static Family,
    workers: &[Arc<Worker>],
    value: impl Fn(&Worker) -> u64,
) {
    page.family(family);
    for worker in workers {
        page.sample(&[worker.url.as_str()], value(worker));
    }
}

/// A series for each worker and state: 1 where it is in it.
fn states<S: Label + PartialEq>(
    page: &mut Page,
    family: &'static Family,
    workers: &[Arc<Worker>],
    name: fn(S) -> &'static str,
    now: fn(&Worker) -> S,
) {
    page.family(family);
    for worker in workers {
        let now = now(worker);
        for state in S::ALL {
            page.sample(&[worker.url.as_str(), name(*state)], u64::from(*state == now));
        }
    }
}

/// A series for each worker and value of a label that has come up there.
fn counters<L: Label>(
    page: &mut Page,
    family: &'static Family,
    workers: &[Arc<Worker>],
    counters: fn(&WorkerCounters) -> &Counters<L>,
) {
    page.family(family);
    for worker in workers {
        for (value, count) in counters(&worker.counters).iter().filter(|(_, count)| *count > 0) {
            page.sample(&[worker.url.as_str(), value.as_str()], count);
        }
    }
}
