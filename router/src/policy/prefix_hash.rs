//! A hash of the prompt's first 256 tokens selects the worker, unless that worker has more than 5/4 of the mean load:
//! consistent hashing with bounded loads (arXiv:1608.01350).
//!
//! It needs no tree and no memory, and all routers agree. It does not know which prefixes are cached.

use super::{
    Candidate, Choice, Policy, PolicyRequest, Reason, least_load::least_loaded, rendezvous,
};

/// Blocks of the prompt that are hashed: 256 tokens.
const BLOCKS: usize = 16;

/// The largest load of a worker relative to the mean: 5/4.
const LOAD_FACTOR: (u64, u64) = (5, 4);

#[derive(Debug)]
pub struct PrefixHash;

impl Policy for PrefixHash {
    fn name(&self) -> &'static str {
        "prefix_hash"
    }

    fn choose(&self, request: &PolicyRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        // The hash of a block covers all blocks before it.
        let blocks = request.key.map_or(&[][..], |key| &key.blocks);
        let Some(prefix) = blocks.get(BLOCKS - 1).or(blocks.last()) else {
            return Some(request.choice(workers, least_loaded(workers)?, Reason::NoPrefix));
        };
        let total: u64 = workers.iter().map(|worker| u64::from(worker.requests)).sum();
        // The present request is included. Rounded up, so that some worker is always below the limit.
        let count = workers.len() as u64;
        let limit = ((total + 1) * LOAD_FACTOR.0).div_ceil((count * LOAD_FACTOR.1).max(1));
        let has_room = |worker: &Candidate| u64::from(worker.requests) < limit;
        let index = rendezvous::highest_of(*prefix, workers, has_room)?;
        let owner = rendezvous::highest(*prefix, workers);
        let reason = if owner == Some(index) { Reason::Hash } else { Reason::Balance };
        Some(request.choice(workers, index, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{prompt, workers};

    fn choose(group: u64, blocks: u64, workers: &[Candidate]) -> Choice {
        let key = prompt(group, blocks);
        PrefixHash
            .choose(&PolicyRequest { key: Some(&key), ..PolicyRequest::default() }, workers)
            .expect("workers")
    }

    #[test]
    fn the_first_256_tokens_decide() {
        let idle = workers(&[(0, 0, 0); 8]);
        let mut chosen = [0; 8];
        for group in 0..400 {
            let choice = choose(group, 16, &idle);
            assert_eq!(choice.index, choose(group, 90, &idle).index);
            assert_eq!(choice.reason, Reason::Hash);
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|groups| (25..=80).contains(groups)), "{chosen:?}");
    }

    #[test]
    fn single_prefix_keeps_the_load_bound() {
        let mut workers = workers(&[(0, 0, 0); 8]);
        for sent in 1..=1000 {
            let choice = choose(7, 20, &workers);
            workers[choice.index].requests += 1;
            let most = workers.iter().map(|worker| worker.requests).max().expect("eight");
            assert!(u64::from(most) <= (sent * 5_u64).div_ceil(8 * 4), "{most} of {sent}");
        }
        assert_eq!(choose(7, 20, &workers).reason, Reason::Balance);
    }

    #[test]
    fn without_a_prefix_the_least_loaded_worker_takes_it() {
        let choice = choose(1, 0, &workers(&[(2, 0, 0), (1, 0, 0)]));
        assert_eq!((choice.index, choice.reason), (1, Reason::NoPrefix));
    }
}
