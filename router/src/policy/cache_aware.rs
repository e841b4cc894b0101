//! The default: the worker whose load grows least.
//!
//! **Cost.** The work of a request is the part of its prompt that has to be computed, which depends on
//! the worker, and its answer; the load of a worker is the work of all requests there, times its
//! slowness. They run together, so each takes about as long as the whole load, and the sum of the
//! squared loads stands for the time that all requests wait. The cost of a request is its increase of
//! that sum: `slowness^2 * work * (2 * load + work)`, where slowness is the time of a prompt token on
//! this worker, by that of the fastest. Always taking the least is within 1 + sqrt(2) of
//! the best that could be done with all future requests known, for jobs that take longer on some
//! machines than on others (Awerbuch et al., Load Balancing in the Lp Norm, 1995). A cached prefix makes
//! a worker cheaper; a worker that many requests want becomes dearer with each, until computing the
//! prefix once more elsewhere is cheaper.
//!
//! **Bound.** That comes late where nearly all of a prompt is cached: the cost knows this request, not
//! the following ones with the same prefix. So each request above an eighth more than the worker's
//! share, and a few, counts as [`EXCESS_TOKENS`] more to compute: consistent hashing with bounded loads
//! (Mirrokni et al., arXiv:1608.01350), with a price in place of a gate. One computed prefix takes the
//! rest of its group along, to a worker with less to do; a prefix of 100,000 tokens is not computed
//! again for the sake of one request.
//!
//! **Home.** What this router has not sent may be cached all the same: other routers may have sent it. So
//! each prompt has a home, the worker to which a hash points in every router alike: the hash of the 256
//! bytes behind the part that more than half of the workers hold, such as a system prompt. Of what is not
//! known to be cached there, a share counts as cached: as much as was found of prompts of which no worker
//! was known to hold more than that part. For a router that is alone that is nothing, and the home only
//! decides between equal workers.
//!
//! LMetric (arXiv:2603.15202) has `(pending + uncached) * (requests + 1)`. It counts the queue as if
//! this request had put it there, and so leaves a worker that is just computing the very prefix it
//! needs, for another that has to compute it again.

use std::{
    cmp::Reverse,
    sync::atomic::{AtomicU64, Ordering},
};

use smallvec::SmallVec;

use super::{
    Candidate, Choice, Policy, PolicyRequest, Reason,
    rendezvous::{bid, highest},
};
use crate::key::BLOCK_TOKENS;

/// Equal costs are decided by 256 bytes of the prompt: requests of one group meet at one worker from the
/// first on, in every router that has the same workers, without a word between the routers. Shorter
/// beginnings than that are not worth a cache.
const ANCHOR_BLOCKS: usize = 4;

/// The work of an answer, in prompt tokens; how long it gets nobody knows. A token of an answer takes as
/// long in a batch as about two of a prompt (Llama 3.1 8B on an A100, see `mla-mock-worker --help`), so
/// this is an answer of 192. With half of it workers stand idle while a prefix is hot; with several times
/// as much prefixes are computed anew for the sake of small differences.
const ANSWER_TOKENS: u64 = 384;

/// By how many requests a worker may exceed an eighth above its share: so few cost an engine next to
/// nothing, and where there are few, chance alone makes such differences.
const FEW_REQUESTS: u64 = 8;

/// The price of each request beyond, in prompt tokens. A prefix of this length is computed again for the
/// sake of one, a longer one for as many as it is longer.
const EXCESS_TOKENS: u64 = 2048;

/// Slowness in units of 1/16, so that equal costs are equal to the last bit. Workers whose measured times
/// differ by less than [`ALIKE`] are taken for equal: then the prompt's hash decides, not noise.
const USUAL: u32 = 16;
const ALIKE: f32 = 1.5;
const SLOWEST: f32 = 16.0;

#[derive(Debug, Default)]
pub struct CacheAware {
    /// Decides between equal workers where the prompt can't.
    turn: AtomicU64,
}

/// A hash of what comes in the prompt after its first `common` blocks.
fn anchor(request: &PolicyRequest<'_>, common: u32) -> Option<u64> {
    let blocks = &request.key?.blocks;
    blocks.get(common as usize + ANCHOR_BLOCKS - 1).or(blocks.last()).copied()
}

/// The leading blocks that more than half of the workers hold.
fn widely_held(workers: &[Candidate]) -> u32 {
    let mut held: SmallVec<[u32; 128]> = workers.iter().map(|it| it.matched_blocks).collect();
    let place = (held.len() - 1) / 2;
    *held.select_nth_unstable(place).1
}

/// Prompt tokens that the prompt's home will probably have to compute. Other routers are only expected to
/// have brought the part behind the first `common` blocks there.
fn uncached_at_home(request: &PolicyRequest<'_>, home: &Candidate, common: u32) -> u32 {
    let uncached = request.uncached_tokens(home);
    let missing = common.saturating_sub(home.matched_blocks).saturating_mul(BLOCK_TOKENS);
    let unknown = f64::from(uncached.saturating_sub(missing));
    #[expect(clippy::cast_sign_loss, reason = "a share of a count")]
    let found = (unknown * request.home_share.clamp(0.0, 1.0)) as u32;
    (uncached - found).max(BLOCK_TOKENS)
}

/// By how much the square of the worker's load would grow with so many answers. In u128 nothing
/// overflows.
fn cost(uncached: u32, answers: u64, excess: u64, slowness: u32, worker: &Candidate) -> u128 {
    let of_answers = |count| u128::from(ANSWER_TOKENS) * u128::from(count);
    let load = u128::from(worker.pending_tokens) + of_answers(u64::from(worker.requests));
    let price = u128::from(EXCESS_TOKENS) * u128::from(excess);
    let work = u128::from(uncached) + of_answers(answers) + price;
    u128::from(slowness).pow(2) * work * (2 * load + work)
}

/// What the workers are to each other: how fast, and how many requests each should have at most.
struct Fleet {
    /// Seconds for a prompt token of the fastest worker, as far as known.
    fastest: f32,
    requests: u64,
    speeds: u64,
}

impl Fleet {
    /// With the request that is to be placed now, which counts as one even if it asks for many answers:
    /// it cannot be divided.
    fn of(workers: &[Candidate]) -> Self {
        let known = workers.iter().filter_map(|worker| worker.token_seconds);
        let mut fleet = Self {
            fastest: known.fold(f32::INFINITY, f32::min),
            requests: 1 + workers.iter().map(Self::requests).sum::<u64>(),
            speeds: 0,
        };
        fleet.speeds = workers.iter().map(|worker| fleet.speed(worker)).sum();
        fleet
    }

    /// Of all routers.
    fn requests(worker: &Candidate) -> u64 {
        u64::from(worker.requests) + u64::from(worker.others)
    }

    fn slowness(&self, worker: &Candidate) -> u32 {
        match worker.token_seconds.map(|seconds| seconds / self.fastest) {
            #[expect(clippy::cast_sign_loss, reason = "a ratio of times")]
            Some(ratio) if ratio >= ALIKE => (ratio.min(SLOWEST) * USUAL as f32) as u32,
            _ => USUAL,
        }
    }

    fn speed(&self, worker: &Candidate) -> u64 {
        u64::from((USUAL << 16) / self.slowness(worker))
    }

    /// The most requests for its speed, and a few.
    fn most_requests(&self, worker: &Candidate) -> u64 {
        let share = u128::from(9 * self.requests) * u128::from(self.speed(worker));
        let share = share.div_ceil(8 * u128::from(self.speeds));
        FEW_REQUESTS.saturating_add(u64::try_from(share).unwrap_or(u64::MAX))
    }

    /// The requests beyond that, with one more.
    fn excess(&self, worker: &Candidate) -> u64 {
        (Self::requests(worker) + 1).saturating_sub(self.most_requests(worker))
    }
}

impl Policy for CacheAware {
    fn name(&self) -> &'static str {
        "cache_aware"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let longest = workers.iter().map(|worker| worker.matched_blocks).max()?;
        let common = if longest > 0 { widely_held(workers) } else { 0 };
        let anchor = anchor(request, common);
        let home = anchor.and_then(|anchor| highest(anchor, workers));
        let is_unknown = longest == common;
        // What more than half of the workers hold is in use: computing it once more serves later requests,
        // too, and half of that counts for this one. Else a new worker would stand idle beside busy ones.
        let invested = |worker: &Candidate| {
            common.saturating_sub(worker.matched_blocks).saturating_mul(BLOCK_TOKENS) / 2
        };
        let uncached = |index: usize| match home {
            Some(home) if home == index => uncached_at_home(request, &workers[index], common),
            _ => request.uncached_tokens(&workers[index]),
        };
        let salt = anchor.unwrap_or_else(|| self.turn.fetch_add(1, Ordering::Relaxed));
        let fleet = Fleet::of(workers);
        // Of equal costs the longer match, lest a whole prompt in two caches where one would do.
        let (index, chosen) = workers.iter().enumerate().min_by_key(|(index, worker)| {
            let preference = (worker.matched_blocks, bid(salt, worker));
            let (excess, slowness) = (fleet.excess(worker), fleet.slowness(worker));
            let tokens = uncached(*index).saturating_sub(invested(worker));
            let cost = cost(tokens, request.answers(), excess, slowness, worker);
            (cost, Reverse(preference))
        })?;
        let reason = match chosen.matched_blocks {
            _ if anchor.is_none() => Reason::NoPrefix,
            _ if longest == 0 && home == Some(index) => Reason::Home,
            _ if longest == 0 => Reason::Cold,
            matched if matched == longest => Reason::CacheHit,
            _ => Reason::Balance,
        };
        let is_sample = is_unknown && anchor.is_some() && chosen.matched_blocks == longest;
        let at_home = is_sample.then_some(home == Some(index));
        Some(Choice { index, uncached_tokens: uncached(index), reason, at_home })
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
            let choice = choose(&key, states);
            let chosen = (choice.index, choice.uncached_tokens, choice.reason);
            assert_eq!(chosen, (index, uncached_tokens, reason), "{case}");
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
            let workers = workers(states);
            assert!(
                Fleet::of(&workers).most_requests(&workers[0]) > u64::from(states[0].0),
                "{}",
                states.len()
            );
        }
    }

    #[test]
    fn a_request_over_the_bound_does_not_cost_a_long_prefix() {
        // One more than the bound, and 32 more: prefixes of 1,600 and of 100,000 tokens.
        for (blocks, over, stays) in [(100, 1, false), (6250, 1, true), (6250, 32, true)] {
            let states = [(12, 0, 0), (34 + over, 0, blocks)];
            let choice = choose(&prompt(1, u64::from(blocks)), &states);
            assert_eq!(choice.index == 1, stays, "{blocks} {over}");
        }
        let choice = choose(&prompt(1, 6250), &[(12, 0, 0), (300, 0, 6250)]);
        assert_eq!(choice.index, 0, "the price has an end");
    }

    #[test]
    fn a_slower_worker_gets_less_to_do_and_noise_decides_nothing() {
        let mut workers = workers(&[(0, 0, 0); 2]);
        let key = prompt(1, 100);
        let request = PolicyRequest { key: Some(&key), home_share: 0.0 };
        let policy = CacheAware::default();
        let home = policy.choose(&request, &workers).expect("two").index;
        let chosen = |workers: &[Candidate]| policy.choose(&request, workers).expect("two").index;
        (workers[home].token_seconds, workers[1 - home].token_seconds) = (Some(1.4e-4), Some(1e-4));
        assert_eq!(chosen(&workers), home, "nearly as fast");
        workers[home].token_seconds = Some(3e-4);
        assert_eq!(chosen(&workers), 1 - home, "three times slower");
        workers[1 - home].token_seconds = None;
        assert_eq!(chosen(&workers), home, "nothing to compare it to");
        workers[1 - home].token_seconds = Some(1e-4);
        workers[1 - home].requests = 30;
        assert_eq!(chosen(&workers), home, "it is not left idle");
    }

    #[test]
    fn the_home_is_found_behind_a_system_prompt_and_only_the_unknown_is_expected_there() {
        let chained = |group: u64| {
            let blocks = (0..100).map(|block| if block < 50 { block } else { group << 32 | block });
            RouteKey { blocks: blocks.collect(), prompt_tokens: 1600, ..RouteKey::default() }
        };
        let mut chosen = [0; 8];
        for group in 1..=400 {
            let choice = choose_with(&chained(group), &[(0, 0, 50); 8], 0.75);
            assert_eq!((choice.reason, choice.at_home), (Reason::CacheHit, Some(true)));
            assert_eq!(choice.uncached_tokens, 200, "a quarter of the other fifty blocks");
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|groups| (25..=80).contains(groups)), "{chosen:?}");
        // A home that lacks the system prompt has to compute that all the same.
        let home = choose(&chained(1), &[(0, 0, 50); 8]).index;
        let mut states = [(0, 0, 50); 8];
        states[home].2 = 0;
        let choice = choose_with(&chained(1), &states, 0.75);
        assert_eq!((choice.index, choice.uncached_tokens), (home, 800 + 200));
        assert_ne!(choose(&chained(1), &states).index, home);
        // A worker is known to hold more, which says nothing about other routers.
        states[home].2 = 50;
        states[(home + 1) % 8].2 = 60;
        let choice = choose_with(&chained(1), &states, 0.75);
        assert_eq!((choice.index, choice.at_home), (home, None));
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
