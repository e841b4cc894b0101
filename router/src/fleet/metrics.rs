//! The metrics of the workers on the page of `/metrics`.

use std::sync::Arc;

use super::{
    backend::Backend, breaker::BreakerState, counters::ReplicaCounters, health_state::Phase,
    registry::backends, replica::Replica,
};
use crate::{
    metrics::{Counters, Family, Label, Page},
    tree::PrefixTree,
};

const SELECTIONS: Family = Family::counter(
    "mla_router_selections_total",
    "Requests sent to a worker, by the reason of the policy.",
    &["worker", "reason"],
);
const PROMPT_TOKENS: Family = Family::counter(
    "mla_router_prompt_tokens_total",
    "Prompt tokens of the requests with a report of cached tokens, by the reason of the policy.",
    &["worker", "reason"],
);
const PREDICTED_TOKENS: Family = Family::counter(
    "mla_router_predicted_cached_tokens_total",
    "Prompt tokens among these that the router predicted to be cached.",
    &["worker", "reason"],
);
const CACHED_TOKENS: Family = Family::counter(
    "mla_router_cached_tokens_total",
    "Prompt tokens among these that were cached.",
    &["worker", "reason"],
);
const UNREPORTED: Family = Family::counter(
    "mla_router_unreported_answers_total",
    "Complete answers without a report of cached tokens: the prefix tree learns nothing from them.",
    &["worker"],
);
const PREFIX_WAITS: Family = Family::counter(
    "mla_router_prefix_waits_total",
    "Requests that waited until a worker had computed their prefix for another request.",
    &["worker"],
);
const EVICTED_BLOCKS: Family = Family::counter(
    "mla_router_tree_corrected_blocks_total",
    "Blocks removed from a worker in the prefix tree because its reports showed that it had evicted them.",
    &["worker"],
);
const EMPTIED: Family = Family::counter(
    "mla_router_tree_purges_total",
    "Times that the reports of a worker showed that it had lost its whole cache.",
    &["worker"],
);
const EJECTIONS: Family = Family::counter(
    "mla_router_ejections_total",
    "Times that a worker was taken out of rotation, by cause.",
    &["worker", "cause"],
);
const TRANSITIONS: Family = Family::counter(
    "mla_router_breaker_transitions_total",
    "Transitions of the circuit breaker of a worker, by new state.",
    &["worker", "to"],
);
const BREAKER: Family = Family::gauge(
    "mla_router_worker_breaker_state",
    "1 for the present state of the circuit breaker of a worker, 0 for the others.",
    &["worker", "state"],
);
const PHASE: Family = Family::gauge(
    "mla_router_worker_phase",
    "1 for the present phase of a worker, 0 for the others. Only a healthy worker is in rotation.",
    &["worker", "phase"],
);
const TAKES_REQUESTS: Family = Family::gauge(
    "mla_router_worker_healthy",
    "1 if a worker takes requests: it is healthy and its breaker admits them.",
    &["worker"],
);
const REQUESTS: Family = Family::gauge(
    "mla_router_worker_requests",
    "Requests on a worker now, each counted once for each completion that it asks for.",
    &["worker"],
);
const PENDING_TOKENS: Family = Family::gauge(
    "mla_router_worker_pending_tokens",
    "Prompt tokens that a worker has yet to compute.",
    &["worker"],
);
const TREE_BLOCKS: Family = Family::gauge(
    "mla_router_worker_tree_blocks",
    "Blocks that a worker owns in the prefix tree.",
    &["worker"],
);

/// Writes the counters of the workers and their present state.
pub fn write(page: &mut Page, replicas: &[Arc<Replica>], tree: &PrefixTree) {
    counters(page, &SELECTIONS, replicas, |counters| &counters.selections);
    counters(page, &PROMPT_TOKENS, replicas, |counters| &counters.prompt_tokens);
    counters(page, &PREDICTED_TOKENS, replicas, |counters| &counters.predicted_tokens);
    counters(page, &CACHED_TOKENS, replicas, |counters| &counters.cached_tokens);
    values(page, &UNREPORTED, replicas, |replica| replica.counters.unreported.get());
    values(page, &PREFIX_WAITS, replicas, |replica| replica.counters.prefix_waits.get());
    values(page, &EVICTED_BLOCKS, replicas, |replica| replica.counters.evicted_blocks.get());
    values(page, &EMPTIED, replicas, |replica| replica.counters.emptied.get());
    page.family(&EJECTIONS);
    for backend in backends(replicas) {
        occurred(page, backend.url.as_str(), &backend.counters.ejections);
    }
    page.family(&TRANSITIONS);
    for backend in backends(replicas) {
        occurred(page, backend.url.as_str(), &backend.counters.breaker);
    }
    states(page, &BREAKER, replicas, BreakerState::as_str, Backend::breaker);
    states(page, &PHASE, replicas, Phase::as_str, Backend::phase);
    page.family(&TAKES_REQUESTS);
    for backend in backends(replicas) {
        page.sample(&[backend.url.as_str()], u64::from(backend.takes_requests()));
    }
    values(page, &REQUESTS, replicas, |replica| u64::from(replica.requests()));
    values(page, &PENDING_TOKENS, replicas, Replica::pending_tokens);
    values(page, &TREE_BLOCKS, replicas, |replica| tree.owned_by(replica.id));
}

/// Writes a family with one series for each replica.
fn values(
    page: &mut Page,
    family: &'static Family,
    replicas: &[Arc<Replica>],
    value: impl Fn(&Replica) -> u64,
) {
    page.family(family);
    for replica in replicas {
        page.sample(&[replica.name()], value(replica));
    }
}

/// Writes a family with a series for each backend and state: 1 for the present state of the backend, 0 for the others.
fn states<S: Label + PartialEq>(
    page: &mut Page,
    family: &'static Family,
    replicas: &[Arc<Replica>],
    name: fn(S) -> &'static str,
    now: fn(&Backend) -> S,
) {
    page.family(family);
    for backend in backends(replicas) {
        let now = now(backend);
        for state in S::ALL {
            page.sample(&[backend.url.as_str(), name(*state)], u64::from(*state == now));
        }
    }
}

/// Writes a family with a series for each replica and each label value that has occurred on it.
fn counters<L: Label>(
    page: &mut Page,
    family: &'static Family,
    replicas: &[Arc<Replica>],
    counters: fn(&ReplicaCounters) -> &Counters<L>,
) {
    page.family(family);
    for replica in replicas {
        occurred(page, replica.name(), counters(&replica.counters));
    }
}

/// Writes a sample for each label value of `counters` that has occurred.
fn occurred<L: Label>(page: &mut Page, worker: &str, counters: &Counters<L>) {
    for (value, count) in counters.iter().filter(|(_, count)| *count > 0) {
        page.sample(&[worker, value.as_str()], count);
    }
}
