//! The default: the worker where the request costs the least waiting, its own and that of others.
//!
//! The cost of a worker is `pending + uncached * (requests + 1)`, in tokens: the prefill that is
//! queued there before the request's own (`pending + uncached` is its wait for the first token), and
//! the wait that its prefill adds for each of the `requests` already there. There is nothing to
//! tune. A cached prefix makes a worker cheaper by just what it saves; a worker that everybody wants
//! becomes dearer with each request, until computing the prefix once more elsewhere is the cheaper
//! way, which is how a hot prefix gets to several workers.
//!
//! LMetric (arXiv:2603.15202) has `(pending + uncached) * (requests + 1)`. It counts the queue as if
//! this request had put it there, and so leaves a worker that is just computing the very prefix it
//! needs, for another that has to compute it again.

use std::{
    cmp::Reverse,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{Candidate, Choice, Policy, PolicyRequest, Reason, rendezvous::bid};

/// Equal costs are decided by the prompt's first 256 bytes: requests of one group meet at one
/// worker from the first on, in every router that has the same workers, without a word between
/// the routers. Shorter beginnings than that are not worth a cache.
const ANCHOR_BLOCKS: usize = 4;

#[derive(Debug, Default)]
pub struct CacheAware {
    /// Decides between equal workers where the prompt can't.
    turn: AtomicU64,
}

impl CacheAware {
    /// What the prompt begins with, as one hash.
    fn anchor(request: &PolicyRequest<'_>) -> Option<u64> {
        let blocks = &request.key?.blocks;
        blocks.get(ANCHOR_BLOCKS - 1).or(blocks.last()).copied()
    }
}

fn cost(request: &PolicyRequest<'_>, worker: &Candidate) -> u64 {
    let uncached = u64::from(request.uncached_tokens(worker));
    let waits = uncached.saturating_mul(u64::from(worker.requests) + 1);
    worker.pending_tokens.saturating_add(waits)
}

impl Policy for CacheAware {
    fn name(&self) -> &'static str {
        "cache_aware"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let anchor = Self::anchor(request);
        let salt = anchor.unwrap_or_else(|| self.turn.fetch_add(1, Ordering::Relaxed));
        // Of equal costs the longer match, lest a whole prompt in two caches where one would do.
        let (index, chosen) = workers.iter().enumerate().min_by_key(|(_, worker)| {
            (cost(request, worker), Reverse((worker.matched_blocks, bid(salt, worker))))
        })?;
        let longest = workers.iter().map(|worker| worker.matched_blocks).max()?;
        let reason = match chosen.matched_blocks {
            _ if anchor.is_none() => Reason::NoPrefix,
            _ if longest == 0 => Reason::Cold,
            matched if matched == longest => Reason::CacheHit,
            _ => Reason::Balance,
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
    use crate::{
        key::RouteKey,
        policy::testing::{prompt, workers},
    };

    fn choose(key: &RouteKey, states: &[(u32, u64, u32)]) -> Choice {
        let request = PolicyRequest { key: Some(key) };
        CacheAware::default().choose(&request, &workers(states)).expect("there are workers")
    }

    /// Name, workers, and the choice's index, uncached tokens and reason.
    type Case<'a> = (&'a str, &'a [(u32, u64, u32)], usize, u32, Reason);

    #[test]
    fn the_least_cost_wins() {
        let key = prompt(1, 100);
        let table: [Case<'_>; 8] = [
            ("idle, one has it", &[(0, 0, 0), (0, 0, 90)], 1, 160, Reason::CacheHit),
            ("the longer match", &[(0, 0, 80), (0, 0, 90)], 1, 160, Reason::CacheHit),
            ("a whole match costs a block", &[(0, 0, 100), (0, 0, 99)], 0, 16, Reason::CacheHit),
            ("busy, but worth it", &[(0, 0, 0), (8, 0, 90)], 1, 160, Reason::CacheHit),
            ("too busy", &[(0, 0, 0), (10, 0, 90)], 0, 1600, Reason::Balance),
            ("behind a long prefill", &[(0, 0, 0), (0, 1441, 90)], 0, 1600, Reason::Balance),
            ("others wait, yet sooner", &[(0, 0, 0), (2, 1500, 100)], 1, 16, Reason::CacheHit),
            ("nobody has it", &[(1, 0, 0), (0, 0, 0)], 1, 1600, Reason::Cold),
        ];
        for (case, states, index, uncached_tokens, reason) in table {
            assert_eq!(choose(&key, states), Choice { index, uncached_tokens, reason }, "{case}");
        }
    }

    #[test]
    fn a_hot_prefix_spreads_and_stays_off_no_worker() {
        let key = prompt(1, 100);
        let mut states = [(0, 0, 0); 4];
        for _ in 0..200 {
            let choice = choose(&key, &states);
            let (requests, pending, matched) = &mut states[choice.index];
            *requests += 1;
            *pending += u64::from(choice.uncached_tokens);
            *matched = 100;
        }
        let requests = states.map(|(requests, ..)| requests);
        assert!(requests.iter().all(|requests| (40..=60).contains(requests)), "{requests:?}");
    }

    #[test]
    fn a_cold_group_goes_where_every_router_sends_it() {
        let idle = [(0, 0, 0); 8];
        let mut chosen = [0; 8];
        for group in 0..400 {
            let short = choose(&prompt(group, 8), &idle);
            let long = choose(&prompt(group, 50), &idle);
            assert_eq!((short.index, short.reason), (long.index, Reason::Cold));
            chosen[short.index] += 1;
        }
        assert!(chosen.iter().all(|groups| (25..=80).contains(groups)), "{chosen:?}");
    }

    #[test]
    fn without_a_prefix_equal_workers_share_the_load() {
        let policy = CacheAware::default();
        let all = workers(&[(0, 0, 0); 4]);
        let mut chosen = [0; 4];
        for _ in 0..400 {
            let choice = policy.choose(&PolicyRequest { key: None }, &all).expect("workers");
            assert_eq!((choice.uncached_tokens, choice.reason), (16, Reason::NoPrefix));
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|requests| (70..=130).contains(requests)), "{chosen:?}");
    }

    #[test]
    fn costs_saturate() {
        let key = RouteKey { prompt_tokens: u64::MAX, ..prompt(1, 1) };
        let choice = choose(&key, &[(u32::MAX, u64::MAX, 0), (0, 0, 0)]);
        assert_eq!((choice.index, choice.uncached_tokens), (1, u32::MAX));
    }
}
