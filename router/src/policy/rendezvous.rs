//! Rendezvous hashing: each worker has a bid for an item, and the highest bidder owns the item. All routers with
//! the same workers find the same owner. A worker that is added or removed moves only its own items.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Candidate;

/// The bid of `worker` for `item`.
pub(super) fn bid(item: u64, worker: &Candidate) -> u64 {
    xxh3_64_with_seed(&item.to_le_bytes(), worker.hash_seed)
}

/// The owner of `item`: the index of the highest bidder.
pub(super) fn highest(item: u64, workers: &[Candidate]) -> Option<usize> {
    highest_of(item, workers, |_| true)
}

/// The index of the highest bidder for `item` among the workers that `admits` accepts.
pub(super) fn highest_of(
    item: u64,
    workers: &[Candidate],
    admits: impl Fn(&Candidate) -> bool,
) -> Option<usize> {
    let admitted = (0..workers.len()).filter(|index| admits(&workers[*index]));
    admitted.max_by_key(|index| bid(item, &workers[*index]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::workers;

    #[test]
    fn lost_worker_moves_only_its_own_items() {
        let all = workers(&[(0, 0, 0); 8]);
        let mut items = [0; 8];
        for item in 0..4000 {
            let owner = highest(item, &all).expect("workers");
            items[owner] += 1;
            for lost in 0..8 {
                let heir =
                    highest_of(item, &all, |worker| worker.id != all[lost].id).expect("seven");
                assert_eq!(heir == owner, lost != owner);
            }
        }
        assert!(items.iter().all(|items| (400..=600).contains(items)), "{items:?}");
    }
}
