//! The default: the worker whose load grows least, of those that don't have too many requests already.
//!
//! **Cost.** The work of a request is what has to be computed of its prompt, which depends on the worker,
//! and its answer; the load of a worker is the work of all requests there. They are under way together,
//! so each is there for about as long as the whole load takes, and the sum of the loads' squares stands
//! for what all wait. The cost is what a request adds to it: `work * (2 * load + work)`. Always taking
//! the least is within 1 + sqrt(2) of the best that could be done knowing all that is to come, for jobs
//! that take longer on some machines than on others (Awerbuch et al., Load Balancing in the Lp Norm,
//! 1995). A cached prefix makes a worker cheaper; a worker that everybody wants becomes dearer with each
//! request, until computing the prefix once more elsewhere is the cheaper way.
//!
//! **Bound.** That comes late where nearly all of a prompt is cached: the cost knows of this request, not
//! of those with the same prefix that follow it. So a worker with an eighth more requests than the mean,
//! and a few, takes no more: consistent hashing with bounded loads (Mirrokni et al., arXiv:1608.01350).
//! One computed prefix takes the rest of its group along, to where there is less to do.
//!
//! **Home.** What this router has not sent may be cached all the same: other routers may have sent it. So
//! each prompt has a home, the worker that its first 256 bytes point to in every router alike, and of what
//! is not known to be cached there a share counts as cached: as much as has been found there of prompts
//! that were unknown here. For a router that is alone that is nothing, and the home only decides
//! between equal workers.
//!
//! LMetric (arXiv:2603.15202) has `(pending + uncached) * (requests + 1)`. It counts the queue as if
//! this request had put it there, and so leaves a worker that is just computing the very prefix it
//! needs, for another that has to compute it again.

use std::{
    cmp::Reverse,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    Candidate, Choice, Policy, PolicyRequest, Reason,
    rendezvous::{bid, highest},
};
use crate::key::BLOCK_TOKENS;

/// Equal costs are decided by the prompt's first 256 bytes: requests of one group meet at one
/// worker from the first on, in every router that has the same workers, without a word between
/// the routers. Shorter beginnings than that are not worth a cache.
const ANCHOR_BLOCKS: usize = 4;

/// The work of an answer, in prompt tokens; how long it gets nobody knows. A token of an answer takes as
/// long in a batch as about two of a prompt (Llama 3.1 8B on an A100, see `mla-mock-worker --help`), so
/// this is an answer of 192. With half of it workers stand idle while a prefix is hot; with several times
/// as much prefixes are computed anew for the sake of small differences.
const ANSWER_TOKENS: u64 = 384;

/// By how many requests a worker may exceed an eighth above the mean: so few cost an engine next to
/// nothing, and where there are few, chance alone makes such differences.
const FEW_REQUESTS: u64 = 8;

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

/// Prompt tokens that the prompt's home will probably have to compute.
fn uncached_at_home(request: &PolicyRequest<'_>, home: &Candidate) -> u32 {
    let uncached = f64::from(request.uncached_tokens(home));
    #[expect(clippy::cast_sign_loss, reason = "a share of a count")]
    let expected = (uncached * (1.0 - request.home_share.clamp(0.0, 1.0))) as u32;
    expected.max(BLOCK_TOKENS)
}

/// By how much the square of the worker's load would grow with so many answers. In u128 nothing
/// overflows.
fn cost(uncached: u32, answers: u64, worker: &Candidate) -> u128 {
    let of_answers = |count| u128::from(ANSWER_TOKENS) * u128::from(count);
    let load = u128::from(worker.pending_tokens) + of_answers(u64::from(worker.requests));
    let work = u128::from(uncached) + of_answers(answers);
    work * (2 * load + work)
}

/// The most requests that one of `workers` should have, with the one that is to be placed now, which
/// counts as one even if it asks for many answers: it cannot be divided. The least loaded of them never
/// has more.
fn most_requests(workers: &[Candidate]) -> u64 {
    let all = 1 + workers.iter().map(|worker| u64::from(worker.requests)).sum::<u64>();
    FEW_REQUESTS + (9 * all).div_ceil(8 * workers.len() as u64)
}

impl Policy for CacheAware {
    fn name(&self) -> &'static str {
        "cache_aware"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let anchor = Self::anchor(request);
        let longest = workers.iter().map(|worker| worker.matched_blocks).max()?;
        let home = anchor.and_then(|anchor| highest(anchor, workers));
        let uncached = |index: usize| match home {
            Some(home) if home == index => uncached_at_home(request, &workers[index]),
            _ => request.uncached_tokens(&workers[index]),
        };
        let salt = anchor.unwrap_or_else(|| self.turn.fetch_add(1, Ordering::Relaxed));
        let most = most_requests(workers);
        // Of equal costs the longer match, lest a whole prompt in two caches where one would do.
        let (index, chosen) = workers.iter().enumerate().min_by_key(|(index, worker)| {
            let has_too_many = u64::from(worker.requests) + 1 > most;
            let preference = (worker.matched_blocks, bid(salt, worker));
            (has_too_many, cost(uncached(*index), request.answers(), worker), Reverse(preference))
        })?;
        let reason = match chosen.matched_blocks {
            _ if anchor.is_none() => Reason::NoPrefix,
            _ if longest == 0 && home == Some(index) => Reason::Home,
            _ if longest == 0 => Reason::Cold,
            matched if matched == longest => Reason::CacheHit,
            _ => Reason::Balance,
        };
        Some(Choice { index, uncached_tokens: uncached(index), reason })
    }

    fn uses_tree(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, iter};

    use super::*;
    use crate::{
        key::RouteKey,
        policy::testing::{prompt, workers},
    };

    fn choose(key: &RouteKey, states: &[(u32, u64, u32)]) -> Choice {
        choose_with(key, states, 0.0)
    }

    fn choose_with(key: &RouteKey, states: &[(u32, u64, u32)], home_share: f64) -> Choice {
        let request = PolicyRequest { key: Some(key), home_share };
        CacheAware::default().choose(&request, &workers(states)).expect("there are workers")
    }

    /// Name, workers, and the choice's index, uncached tokens and reason.
    type Case<'a> = (&'a str, &'a [(u32, u64, u32)], usize, u32, Reason);

    #[test]
    fn the_least_cost_wins() {
        let key = prompt(1, 100);
        let table: [Case<'_>; 13] = [
            ("idle, one has it", &[(0, 0, 0), (0, 0, 90)], 1, 160, Reason::CacheHit),
            ("the longer match", &[(0, 0, 80), (0, 0, 90)], 1, 160, Reason::CacheHit),
            ("a whole match costs a block", &[(0, 0, 100), (0, 0, 99)], 0, 16, Reason::CacheHit),
            ("busy, but worth it", &[(0, 0, 0), (8, 0, 90)], 1, 160, Reason::CacheHit),
            ("too busy", &[(0, 0, 0), (9, 0, 90)], 0, 1600, Reason::Balance),
            ("as many as it may", &[(12, 0, 0), (34, 0, 100)], 1, 16, Reason::CacheHit),
            ("too many, though cheaper", &[(12, 0, 0), (35, 0, 100)], 0, 1600, Reason::Balance),
            ("a prefill is worth it", &[(0, 0, 0), (0, 3345, 90)], 1, 160, Reason::CacheHit),
            ("behind a long prefill", &[(0, 0, 0), (0, 3346, 90)], 0, 1600, Reason::Balance),
            ("others wait, yet sooner", &[(0, 0, 0), (2, 1500, 100)], 1, 16, Reason::CacheHit),
            ("rather behind many", &[(0, 12_000, 0), (16, 0, 0)], 1, 1600, Reason::Home),
            ("nobody has it", &[(1, 0, 0), (0, 0, 0)], 1, 1600, Reason::Home),
            ("nor at home", &[(0, 0, 0), (1, 0, 0)], 0, 1600, Reason::Cold),
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
            assert_eq!((short.index, short.reason), (long.index, Reason::Home));
            chosen[short.index] += 1;
        }
        assert!(chosen.iter().all(|groups| (25..=80).contains(groups)), "{chosen:?}");
    }

    #[test]
    fn the_more_other_routers_have_brought_home_the_more_it_may_have_to_do() {
        let key = prompt(1, 100);
        let home = choose(&key, &[(0, 0, 0); 2]).index;
        // Requests at home, blocks that the other worker holds, and the share found at homes.
        for (requests, matched, share, at_home) in [
            (1, 0, 0.1, false),
            (1, 0, 0.3, true),
            (5, 0, 0.6, false),
            (5, 0, 0.8, true),
            (0, 50, 0.4, false),
            (0, 50, 0.6, true),
        ] {
            let mut states = [(0, 0, matched); 2];
            states[home] = (requests, 0, 0);
            let choice = choose_with(&key, &states, share);
            assert_eq!(choice.index == home, at_home, "{requests} {matched} {share}");
        }
        let certain = choose_with(&key, &[(0, 0, 0); 2], 1.0);
        assert_eq!((certain.uncached_tokens, certain.reason), (16, Reason::Home));
    }

    #[test]
    fn without_a_prefix_equal_workers_share_the_load() {
        let policy = CacheAware::default();
        let all = workers(&[(0, 0, 0); 4]);
        let mut chosen = [0; 4];
        for _ in 0..4000 {
            let choice = policy
                .choose(&PolicyRequest { key: None, home_share: 0.0 }, &all)
                .expect("workers");
            assert_eq!((choice.uncached_tokens, choice.reason), (16, Reason::NoPrefix));
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|requests| (700..=1300).contains(requests)), "{chosen:?}");
    }

    /// Sends 1,024 prompts of these groups at once to eight workers, 2,048 of each's 2,176 tokens common
    /// to its group. The requests of each worker, and how many times a prefix is computed.
    fn burst(groups: &[u64]) -> ([u32; 8], usize) {
        let mut states = [(0, 0, 0); 8];
        let mut holders = HashSet::new();
        for &group in groups {
            for (worker, state) in states.iter_mut().enumerate() {
                state.2 = if holders.contains(&(group, worker)) { 128 } else { 0 };
            }
            let choice = choose(&prompt(group, 136), &states);
            states[choice.index].0 += 1;
            states[choice.index].1 += u64::from(choice.uncached_tokens);
            holders.insert((group, choice.index));
        }
        (states.map(|(requests, ..)| requests), holders.len())
    }

    #[test]
    fn a_burst_of_groups_is_shared_evenly_and_hardly_a_prefix_computed_twice() {
        for seed in 0..20 {
            let mut dice = fastrand::Rng::with_seed(seed);
            let mut equal: Vec<u64> = (0..1024).map(|number| number / 16).collect();
            dice.shuffle(&mut equal);
            // More than a quarter of all requests belong to one of 64 groups.
            let unequal = iter::repeat_with(|| {
                let groups = 1 << dice.u32(..7);
                dice.u64(..groups)
            });
            for groups in [equal, unequal.take(1024).collect()] {
                let distinct = groups.iter().collect::<HashSet<_>>().len();
                let (requests, computed) = burst(&groups);
                assert!(requests.iter().all(|requests| *requests <= 152), "{seed}: {requests:?}");
                assert!(computed <= distinct + 8, "{seed}: {computed} of {distinct}");
            }
        }
    }

    #[test]
    fn the_least_loaded_never_has_too_many() {
        for states in [&[(0, 0, 0); 1][..], &[(9, 0, 0); 7], &[(u32::MAX, 0, 0); 300]] {
            assert!(most_requests(&workers(states)) > u64::from(states[0].0), "{}", states.len());
        }
    }

    #[test]
    fn many_answers_go_where_there_is_less_to_do_and_not_where_the_prompt_is() {
        let states = [(2, 0, 40), (0, 0, 0)];
        assert_eq!(choose(&prompt(1, 40), &states).index, 0);
        let batch = RouteKey { more_answers: 63, ..prompt(1, 40) };
        assert_eq!(choose(&batch, &states).index, 1);
    }

    #[test]
    fn the_largest_numbers_fit() {
        let key = RouteKey { prompt_tokens: u64::MAX, more_answers: u32::MAX, ..prompt(1, 1) };
        let choice = choose(&key, &[(u32::MAX, u64::MAX, 0), (0, 0, 0)]);
        assert_eq!((choice.index, choice.uncached_tokens), (1, u32::MAX));
    }
}
