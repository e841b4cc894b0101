//! The prefixes that a worker is computing. An engine that gets several prompts with the same new prefix
//! computes it for each that comes before the first is done, unless it looks for that itself. So the
//! first is sent, and the others when its first byte says that the prefix is cached. In the engine's queue
//! they would be behind the first, too.
//!
//! Requests that come later and need another prefix go ahead of those that wait, up to
//! [`MOST_OVERTAKING`]. From then on they wait as well, so that those that came first are sent first.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

use crate::key::RouteKey;

/// Shorter prefixes, of 256 tokens, are computed again sooner than an answer has come from one machine
/// to another.
const LEAST_BLOCKS: usize = 16;

/// Prompt tokens that may go ahead of requests that wait for a prefix, counted from the first of them on. An
/// engine computes as many in a step, so it has enough to do while later requests keep their places.
const MOST_OVERTAKING: u64 = 8192;

/// Of one worker.
#[derive(Debug, Default)]
pub(super) struct Computing(Mutex<Vec<Prefix>>);

#[derive(Debug)]
struct Prefix {
    /// The place of the first block that is not cached yet, and its hash, which covers all before it.
    first: usize,
    hash: u64,
    /// Prompt tokens that have gone ahead of those who wait for it; `None` while nobody does.
    overtaking: Option<u64>,
    /// Closes when it is computed, or never will be.
    computed: watch::Receiver<()>,
}

/// Held by the request that has its prompt computed, until it is.
#[derive(Debug)]
pub(super) struct Promise(
    #[expect(dead_code, reason = "dropping it is the news")] watch::Sender<()>,
);

/// What a request waits for before it is sent: one prefix or several.
#[derive(Debug)]
pub(super) struct Awaited(Vec<watch::Receiver<()>>);

impl Awaited {
    /// Returns when the prefixes are cached, or will not be by these requests, or take longer than that.
    pub(super) async fn within(self, limit: Duration) {
        let all = async {
            for mut computed in self.0 {
                // Closed is the news.
                let _closed = computed.changed().await;
            }
        };
        // Over or late, it is all the same.
        let _ended = timeout(limit, all).await;
    }
}

impl Computing {
    /// What the prompt `key`, of which `tokens` are to be computed, has to wait for, if the worker has its
    /// first `held` blocks or is just computing them: its own prefix, and, when enough has gone ahead of
    /// some request that waits, all that is waited for.
    pub(super) fn awaited(&self, key: &RouteKey, held: u32, tokens: u64) -> Option<Awaited> {
        let mut prefixes = self.0.lock();
        prefixes.retain(|prefix| prefix.computed.has_changed().is_ok());
        let shared = |prefix: &Prefix| {
            prefix.first + LEAST_BLOCKS <= held as usize
                && key.blocks.get(prefix.first) == Some(&prefix.hash)
        };
        // The one that goes furthest may itself wait for others.
        let own = (0..prefixes.len())
            .filter(|&place| shared(&prefixes[place]))
            .max_by_key(|&place| prefixes[place].first);
        let is_full = |prefix: &Prefix| {
            prefix.overtaking.is_some_and(|overtaking| overtaking >= MOST_OVERTAKING)
        };
        if prefixes.iter().any(is_full) {
            let waited_for = prefixes
                .iter()
                .enumerate()
                .filter(|(place, prefix)| own == Some(*place) || prefix.overtaking.is_some());
            let awaited = waited_for.map(|(_, prefix)| prefix.computed.clone()).collect();
            if let Some(own) = own {
                prefixes[own].overtaking.get_or_insert(0);
            }
            return Some(Awaited(awaited));
        }
        if let Some(own) = own {
            prefixes[own].overtaking.get_or_insert(0);
            return Some(Awaited(vec![prefixes[own].computed.clone()]));
        }
        for overtaking in prefixes.iter_mut().filter_map(|prefix| prefix.overtaking.as_mut()) {
            *overtaking += tokens;
        }
        None
    }

    /// The prompt `key` will be computed from its block `held` on. `None` if that is not worth a wait.
    pub(super) fn promise(&self, key: &RouteKey, held: u32) -> Option<Promise> {
        let first = held as usize;
        let hash = *key.blocks.get(first)?;
        if key.blocks.len() - first < LEAST_BLOCKS {
            return None;
        }
        let (promise, computed) = watch::channel(());
        self.0.lock().push(Prefix { first, hash, overtaking: None, computed });
        Some(Promise(promise))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    /// A prompt of so many blocks, of which the first `shared` are those of its group.
    fn prompt(group: u64, shared: u64, blocks: u64, number: u64) -> RouteKey {
        let block = |block| if block < shared { group << 32 | block } else { number << 48 | block };
        RouteKey { blocks: (0..blocks).map(block).collect(), ..RouteKey::default() }
    }

    async fn waits(awaited: Option<Awaited>) -> bool {
        let begun = Instant::now();
        if let Some(awaited) = awaited {
            awaited.within(LONG).await;
        }
        begun.elapsed() >= LONG
    }

    #[tokio::test(start_paused = true)]
    async fn who_shares_a_new_prefix_waits_until_it_is_computed() {
        let computing = Computing::default();
        let promise = computing.promise(&prompt(1, 40, 60, 1), 0).expect("a long prompt");
        let sibling = prompt(1, 40, 60, 2);
        assert!(waits(computing.awaited(&sibling, 40, 0)).await);
        assert!(!waits(computing.awaited(&prompt(2, 40, 60, 3), 40, 0)).await, "another group");
        assert!(!waits(computing.awaited(&sibling, 15, 0)).await, "too little in common");
        let awaited = computing.awaited(&sibling, 40, 0);
        drop(promise);
        assert!(!waits(awaited).await);
        assert!(computing.awaited(&sibling, 40, 0).is_none(), "it is computed");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_cached_before_is_not_waited_for() {
        let computing = Computing::default();
        // The first has 30 blocks of the group already, and computes ten more and its own twenty.
        let _promise = computing.promise(&prompt(1, 40, 60, 1), 30).expect("thirty blocks");
        assert!(!waits(computing.awaited(&prompt(1, 40, 60, 2), 40, 0)).await, "ten blocks");
        assert!(!waits(computing.awaited(&prompt(1, 30, 60, 3), 30, 0)).await, "nothing new");
        assert!(waits(computing.awaited(&prompt(1, 40, 60, 1), 60, 0)).await, "the same prompt");
        assert!(computing.promise(&prompt(1, 40, 60, 4), 45).is_none(), "fifteen blocks");
        assert!(computing.promise(&prompt(1, 40, 60, 4), 60).is_none(), "nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn later_requests_go_ahead_of_those_that_wait_only_up_to_a_step() {
        let computing = Computing::default();
        let first = computing.promise(&prompt(1, 40, 60, 1), 0).expect("a long prompt");
        let other = || prompt(2, 40, 60, 3);
        let goes_ahead = || computing.awaited(&other(), 40, MOST_OVERTAKING / 2).is_none();
        assert!((0..5).all(|_| goes_ahead()), "nobody waits yet");
        assert!(waits(computing.awaited(&prompt(1, 40, 60, 2), 40, 320)).await);
        assert!(goes_ahead() && goes_ahead(), "a step");
        let (held, sibling) = (
            computing.awaited(&other(), 40, 960),
            computing.awaited(&prompt(1, 40, 60, 4), 40, 320),
        );
        assert!(held.is_some(), "more than a step");
        drop(first);
        assert!(!waits(held).await && !waits(sibling).await, "the first is done");
        assert!((0..5).all(|_| goes_ahead()), "and nobody waits any more");
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_held_back_waits_for_all_prefixes_that_others_wait_for() {
        let computing = Computing::default();
        let promises = [1, 2, 3].map(|group| computing.promise(&prompt(group, 40, 60, group), 0));
        for group in [1, 2] {
            assert!(computing.awaited(&prompt(group, 40, 60, 8), 40, 320).is_some());
        }
        assert!(computing.awaited(&prompt(4, 40, 60, 9), 40, MOST_OVERTAKING).is_none());
        let held = || computing.awaited(&prompt(5, 40, 60, 9), 40, 960);
        let ([one, two, _three], before) = (promises, held());
        drop(one);
        assert!(waits(before).await, "the second is not done");
        let before = held();
        drop(two);
        assert!(!waits(before).await, "nobody waits for the third");
    }

    #[tokio::test(start_paused = true)]
    async fn of_several_the_one_that_goes_furthest_is_waited_for() {
        let computing = Computing::default();
        let first = computing.promise(&prompt(1, 100, 100, 0), 0);
        let second = computing.promise(&prompt(1, 100, 100, 0), 50);
        let awaited = computing.awaited(&prompt(1, 100, 120, 7), 100, 0);
        drop(first);
        assert!(waits(awaited).await);
        let awaited = computing.awaited(&prompt(1, 100, 120, 7), 100, 0);
        drop(second);
        assert!(!waits(awaited).await);
    }
}
