//! The default policy: the worker on which the request adds the least waiting time for all requests.
//!
//! **Cost.** The work of a request is its uncached prompt tokens on a worker plus its answer. The load of a worker
//! is the work of all its requests, times its slowness: its time for a prompt token relative to the fastest worker.
//! The requests of a worker run together, so each takes about as long as the whole load, and the sum of the squared
//! loads stands for the waiting time of all requests. The cost is the increase of that sum:
//! `slowness^2 * work * (2 * load + work)`. The greedy choice of the least cost is within 1 + sqrt(2) of the optimum
//! with all future requests known (Awerbuch et al., Load Balancing in the Lp Norm, 1995). A cached prefix makes a
//! worker cheaper. A worker with many requests becomes expensive, until another computation of the prefix elsewhere
//! is cheaper.
//!
//! **Bound.** If nearly all of a prompt is cached, a worker becomes expensive too late: the cost includes this
//! request, but not the next ones with the same prefix. So each request above the worker's share plus one eighth plus
//! [`FEW_REQUESTS`] counts as [`EXCESS_TOKENS`] more tokens to compute. This is consistent hashing with bounded loads
//! (Mirrokni et al., arXiv:1608.01350) with a price instead of a hard limit: once one more worker has computed a
//! prefix, the rest of the group goes to this less loaded worker, and a prefix of 100,000 tokens is not computed again
//! for one request.
//!
//! **Rendezvous owner.** Other routers may have sent a prompt that this router does not know. So each prompt has a
//! rendezvous owner: the worker with the highest hash, the same in every router. The hashed part is the 256 bytes
//! after the prefix that more than half of the workers hold, such as a system prompt. The cost counts a share of the
//! unknown tokens as cached at the owner: the share that was found cached for earlier unknown prompts. Without other
//! routers the share is zero, and the owner only breaks ties.
//!
//! LMetric (arXiv:2603.15202) uses `(pending + uncached) * (requests + 1)`. It multiplies a queue that exists
//! anyway, so a request leaves the worker that is computing its prefix for another worker that must compute the
//! prefix again.

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

/// Blocks of the prompt (256 bytes) whose hash selects the rendezvous owner. Requests of one group have
/// the same owner, in every router with the same workers. A shorter common prefix is not worth keeping a
/// group together.
const ANCHOR_BLOCKS: usize = 4;

/// The estimated work of an answer in prompt tokens: 192 output tokens, each as expensive in a batch as two prompt
/// tokens. A smaller estimate leaves workers idle while a prefix is hot; a larger one computes prefixes again for
/// small differences.
const ANSWER_TOKENS: u64 = 384;

/// Requests that a worker may have above its share plus one eighth without an additional cost. A few requests cost an
/// engine little.
const FEW_REQUESTS: u64 = 8;

/// The price of each further request, in prompt tokens. One excess request outweighs a cached prefix of this length.
const EXCESS_TOKENS: u64 = 2048;

/// Slowness of the fastest worker. Slowness is an integer in units of 1/16, so equal costs are equal to the last bit.
const FASTEST: u32 = 16;
/// Workers whose times differ by less than this factor count as equally fast: the hash decides between them, not noise.
const MIN_DIFFERENCE: f32 = 1.5;
/// Upper limit of the factor.
const MAX_SLOWNESS: f32 = 16.0;

#[derive(Debug, Default)]
pub struct CacheAware {
    /// Breaks ties for requests without a prompt.
    turn: AtomicU64,
}

impl Policy for CacheAware {
    fn name(&self) -> &'static str {
        "cache_aware"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let longest = workers.iter().map(|worker| worker.matched_blocks).max()?;
        let common = if longest > 0 { common_blocks(workers) } else { 0 };
        let anchor = anchor(request, common);
        let owner = anchor.and_then(|anchor| highest(anchor, workers));
        let is_unknown = longest == common;
        // A prefix that more than half of the workers hold serves later requests as well, so half of its tokens are not
        // charged to this one. Otherwise a new worker would stay idle beside busy ones.
        let invested = |worker: &Candidate| {
            common.saturating_sub(worker.matched_blocks).saturating_mul(BLOCK_TOKENS) / 2
        };
        let uncached = |index: usize| match owner {
            Some(owner) if owner == index => uncached_at_owner(request, &workers[index], common),
            _ => request.uncached_tokens(&workers[index]),
        };
        let salt = anchor.unwrap_or_else(|| self.turn.fetch_add(1, Ordering::Relaxed));
        let fleet = Fleet::of(workers);
        // Ties go to the longer match: one cache with the whole prompt is enough.
        let (index, chosen) = workers.iter().enumerate().min_by_key(|(index, worker)| {
            let preference = (worker.matched_blocks, bid(salt, worker));
            let (excess, slowness) = (fleet.excess(worker), fleet.slowness(worker));
            let tokens = uncached(*index).saturating_sub(invested(worker));
            let cost = cost(tokens, request.answers(), excess, slowness, worker);
            (cost, Reverse(preference))
        })?;
        let reason = match chosen.matched_blocks {
            _ if anchor.is_none() => Reason::NoPrefix,
            _ if longest == 0 && owner == Some(index) => Reason::RendezvousOwner,
            _ if longest == 0 => Reason::Cold,
            matched if matched == longest => Reason::CacheHit,
            _ => Reason::Balance,
        };
        let is_sample = is_unknown && anchor.is_some() && chosen.matched_blocks == longest;
        let at_owner = is_sample.then_some(owner == Some(index));
        Some(Choice { index, uncached_tokens: uncached(index), reason, at_owner })
    }

    fn uses_tree(&self) -> bool {
        true
    }
}

/// The hash of the prompt after its first `common` blocks; `None` without a prompt.
fn anchor(request: &PolicyRequest<'_>, common: u32) -> Option<u64> {
    let blocks = &request.key?.blocks;
    blocks.get(common as usize + ANCHOR_BLOCKS - 1).or(blocks.last()).copied()
}

/// Number of leading blocks that more than half of the workers hold.
fn common_blocks(workers: &[Candidate]) -> u32 {
    let mut held: SmallVec<[u32; 128]> = workers.iter().map(|it| it.matched_blocks).collect();
    let place = (held.len() - 1) / 2;
    *held.select_nth_unstable(place).1
}

/// Prompt tokens that the rendezvous owner will probably have to compute. Other routers are expected to have sent
/// only the part after the first `common` blocks to the owner.
fn uncached_at_owner(request: &PolicyRequest<'_>, owner: &Candidate, common: u32) -> u32 {
    let uncached = request.uncached_tokens(owner);
    let missing = common.saturating_sub(owner.matched_blocks).saturating_mul(BLOCK_TOKENS);
    let unknown = f64::from(uncached.saturating_sub(missing));
    #[expect(clippy::cast_sign_loss, reason = "a share of a count")]
    let found = (unknown * request.owner_share.clamp(0.0, 1.0)) as u32;
    (uncached - found).max(BLOCK_TOKENS)
}

/// The increase of the squared load of `worker` by a request with `uncached` tokens and `answers` completions. The
/// result fits into u128.
fn cost(uncached: u32, answers: u64, excess: u64, slowness: u32, worker: &Candidate) -> u128 {
    let of_answers = |count| u128::from(ANSWER_TOKENS) * u128::from(count);
    let load = u128::from(worker.pending_tokens) + of_answers(u64::from(worker.requests));
    let price = u128::from(EXCESS_TOKENS) * u128::from(excess);
    let work = u128::from(uncached) + of_answers(answers) + price;
    u128::from(slowness).pow(2) * work * (2 * load + work)
}

/// Figures of all candidates together: their speeds and their requests.
struct Fleet {
    /// Seconds for a prompt token on the fastest worker; infinite if no speed is known.
    fastest: f32,
    /// Requests of all workers and all routers, with the present one.
    requests: u64,
    /// Sum of the speeds.
    speeds: u64,
}

impl Fleet {
    /// Sums the candidates. The present request counts once even if it asks for many completions: it cannot be divided.
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

    /// Requests on the worker, of all routers.
    fn requests(worker: &Candidate) -> u64 {
        u64::from(worker.requests) + u64::from(worker.other_requests)
    }

    fn slowness(&self, worker: &Candidate) -> u32 {
        match worker.token_seconds.map(|seconds| seconds / self.fastest) {
            #[expect(clippy::cast_sign_loss, reason = "a ratio of times")]
            Some(ratio) if ratio >= MIN_DIFFERENCE => {
                (ratio.min(MAX_SLOWNESS) * FASTEST as f32) as u32
            }
            _ => FASTEST,
        }
    }

    fn speed(&self, worker: &Candidate) -> u64 {
        u64::from((FASTEST << 16) / self.slowness(worker))
    }

    /// The number of requests that the worker may have without an additional cost, by its speed.
    fn request_limit(&self, worker: &Candidate) -> u64 {
        let share = (9 * self.requests).saturating_mul(self.speed(worker));
        FEW_REQUESTS + share.div_ceil(8 * self.speeds)
    }

    /// The number of requests above that, with the present one.
    fn excess(&self, worker: &Candidate) -> u64 {
        (Self::requests(worker) + 1).saturating_sub(self.request_limit(worker))
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

    fn choose_with(key: &RouteKey, states: &[(u32, u64, u32)], owner_share: f64) -> Choice {
        let request = PolicyRequest { key: Some(key), owner_share };
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
            ("rather behind many", &[(0, 12_000, 0), (16, 0, 0)], 1, 1600, Reason::RendezvousOwner),
            ("no worker has it", &[(1, 0, 0), (0, 0, 0)], 1, 1600, Reason::RendezvousOwner),
            (
                "no worker has it, and the owner is busy",
                &[(0, 0, 0), (1, 0, 0)],
                0,
                1600,
                Reason::Cold,
            ),
        ];
        for (case, states, index, uncached_tokens, reason) in table {
            let choice = choose(&key, states);
            let chosen = (choice.index, choice.uncached_tokens, choice.reason);
            assert_eq!(chosen, (index, uncached_tokens, reason), "{case}");
        }
    }

    #[test]
    fn hot_prefix_spreads_over_all_workers() {
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
    fn cold_prefix_goes_to_its_rendezvous_owner() {
        let idle = [(0, 0, 0); 8];
        let mut chosen = [0; 8];
        for group in 0..400 {
            let short = choose(&prompt(group, 8), &idle);
            let long = choose(&prompt(group, 50), &idle);
            assert_eq!((short.index, short.reason), (long.index, Reason::RendezvousOwner));
            chosen[short.index] += 1;
        }
        assert!(chosen.iter().all(|groups| (25..=80).contains(groups)), "{chosen:?}");
    }

    #[test]
    fn an_owner_with_prompts_of_other_routers_may_have_more_load() {
        let key = prompt(1, 100);
        let owner = choose(&key, &[(0, 0, 0); 2]).index;
        // Requests on the owner, blocks that the other worker holds, and the share found at owners.
        for (requests, matched, share, at_owner) in [
            (1, 0, 0.1, false),
            (1, 0, 0.3, true),
            (5, 0, 0.6, false),
            (5, 0, 0.8, true),
            (0, 50, 0.4, false),
            (0, 50, 0.6, true),
        ] {
            let mut states = [(0, 0, matched); 2];
            states[owner] = (requests, 0, 0);
            let choice = choose_with(&key, &states, share);
            assert_eq!(choice.index == owner, at_owner, "{requests} {matched} {share}");
        }
        let certain = choose_with(&key, &[(0, 0, 0); 2], 1.0);
        assert_eq!((certain.uncached_tokens, certain.reason), (16, Reason::RendezvousOwner));
    }

    #[test]
    fn without_a_prefix_equal_workers_share_the_load() {
        let policy = CacheAware::default();
        let all = workers(&[(0, 0, 0); 4]);
        let mut chosen = [0; 4];
        for _ in 0..4000 {
            let choice = policy.choose(&PolicyRequest::default(), &all).expect("workers");
            assert_eq!((choice.uncached_tokens, choice.reason), (16, Reason::NoPrefix));
            assert_eq!(choice.at_owner, None);
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|requests| (700..=1300).contains(requests)), "{chosen:?}");
    }

    /// Sends one prompt for each entry of `groups` at once to eight workers. 2,048 of its 2,176 tokens are common
    /// to its group. Returns the requests of each worker, and how many times a prefix was computed.
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
    fn burst_of_groups_is_spread_with_few_prefixes_computed_twice() {
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
    fn least_loaded_worker_is_never_over_the_bound() {
        for states in [&[(0, 0, 0); 1][..], &[(9, 0, 0); 7], &[(u32::MAX, 0, 0); 300]] {
            let workers = workers(states);
            assert!(
                Fleet::of(&workers).request_limit(&workers[0]) > u64::from(states[0].0),
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
    fn slower_worker_gets_less_load_and_noise_has_no_effect() {
        let mut workers = workers(&[(0, 0, 0); 2]);
        let key = prompt(1, 100);
        let request = PolicyRequest { key: Some(&key), ..PolicyRequest::default() };
        let policy = CacheAware::default();
        let owner = policy.choose(&request, &workers).expect("two").index;
        let chosen = |workers: &[Candidate]| policy.choose(&request, workers).expect("two").index;
        (workers[owner].token_seconds, workers[1 - owner].token_seconds) =
            (Some(1.4e-4), Some(1e-4));
        assert_eq!(chosen(&workers), owner, "nearly as fast");
        workers[owner].token_seconds = Some(3e-4);
        assert_eq!(chosen(&workers), 1 - owner, "three times slower");
        workers[1 - owner].token_seconds = None;
        assert_eq!(chosen(&workers), owner, "nothing to compare it to");
        workers[1 - owner].token_seconds = Some(1e-4);
        workers[1 - owner].requests = 30;
        assert_eq!(chosen(&workers), owner, "it is not left idle");
    }

    #[test]
    fn the_owner_follows_from_the_part_behind_a_system_prompt_and_only_unknown_tokens_count() {
        let chained = |group: u64| {
            let blocks = (0..100).map(|block| if block < 50 { block } else { group << 32 | block });
            RouteKey { blocks: blocks.collect(), prompt_tokens: 1600, ..RouteKey::default() }
        };
        let mut chosen = [0; 8];
        for group in 1..=400 {
            let choice = choose_with(&chained(group), &[(0, 0, 50); 8], 0.75);
            assert_eq!((choice.reason, choice.at_owner), (Reason::CacheHit, Some(true)));
            assert_eq!(choice.uncached_tokens, 200, "a quarter of the other fifty blocks");
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|groups| (25..=80).contains(groups)), "{chosen:?}");
        // An owner without the system prompt has to compute it anyway.
        let owner = choose(&chained(1), &[(0, 0, 50); 8]).index;
        let mut states = [(0, 0, 50); 8];
        states[owner].2 = 0;
        let choice = choose_with(&chained(1), &states, 0.75);
        let chosen = (choice.index, choice.uncached_tokens, choice.at_owner);
        assert_eq!(chosen, (owner, 800 + 200, None));
        assert_ne!(choose(&chained(1), &states).index, owner);
        // A worker is known to hold more. That says nothing about other routers.
        states[owner].2 = 50;
        states[(owner + 1) % 8].2 = 60;
        let choice = choose_with(&chained(1), &states, 0.75);
        assert_eq!((choice.index, choice.at_owner), (owner, None));
        let choice = choose(&chained(1), &states);
        assert_eq!((choice.index, choice.at_owner), ((owner + 1) % 8, None));
    }

    #[test]
    fn many_answers_go_to_the_least_load_and_not_to_the_cache() {
        let states = [(2, 0, 40), (0, 0, 0)];
        assert_eq!(choose(&prompt(1, 40), &states).index, 0);
        let batch = RouteKey { more_answers: 63, ..prompt(1, 40) };
        assert_eq!(choose(&batch, &states).index, 1);
    }

    #[test]
    fn largest_numbers_do_not_overflow() {
        let key = RouteKey { prompt_tokens: u64::MAX, more_answers: u32::MAX, ..prompt(1, 1) };
        let choice = choose(&key, &[(u32::MAX, u64::MAX, 0), (0, 0, 0)]);
        assert_eq!((choice.index, choice.uncached_tokens), (1, u32::MAX));
    }
}
