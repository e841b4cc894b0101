//! The prefixes that a worker is computing. An engine that gets several prompts with the same new prefix
//! computes it for each that comes before the first is done, unless it looks for that itself. So the
//! first is sent, and the others when its first byte says that the prefix is cached. It costs them
//! nothing: in the engine's queue they would be behind the first, too.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

use crate::key::RouteKey;

/// Shorter prefixes, of 256 tokens, are computed again sooner than an answer has come from one machine
/// to another.
const LEAST_BLOCKS: usize = 16;

/// Of one worker.
#[derive(Debug, Default)]
pub(super) struct Computing(Mutex<Vec<Prefix>>);

#[derive(Debug)]
struct Prefix {
    /// The place of the first block that is not cached yet, and its hash, which covers all before it.
    first: usize,
    hash: u64,
    /// Closes when it is computed, or never will be.
    computed: watch::Receiver<()>,
}

/// Held by the request that has its prompt computed, until it is.
#[derive(Debug)]
pub(super) struct Promise(
    #[expect(dead_code, reason = "dropping it is the news")] watch::Sender<()>,
);

/// What a request waits for before it is sent.
#[derive(Debug)]
pub(super) struct Awaited(watch::Receiver<()>);

impl Awaited {
    /// Returns when the prefix is cached, or will not be by this request, or takes longer than that.
    pub(super) async fn within(mut self, limit: Duration) {
        // Closed or late, it is all the same.
        let _ended = timeout(limit, self.0.changed()).await;
    }
}

impl Computing {
    /// What the prompt `key` has to wait for, if the worker has its first `held` blocks or is just
    /// computing them.
    pub(super) fn awaited(&self, key: &RouteKey, held: u32) -> Option<Awaited> {
        let mut prefixes = self.0.lock();
        prefixes.retain(|prefix| prefix.computed.has_changed().is_ok());
        let shared = |prefix: &&Prefix| {
            prefix.first + LEAST_BLOCKS <= held as usize
                && key.blocks.get(prefix.first) == Some(&prefix.hash)
        };
        // The one that goes furthest may itself wait for others.
        let furthest = prefixes.iter().filter(shared).max_by_key(|prefix| prefix.first);
        furthest.map(|prefix| Awaited(prefix.computed.clone()))
    }

    /// The prompt `key` will be computed from its block `held` on. `None` if that is not worth a wait.
    pub(super) fn promise(&self, key: &RouteKey, held: u32) -> Option<Promise> {
        let first = held as usize;
        let hash = *key.blocks.get(first)?;
        if key.blocks.len() - first < LEAST_BLOCKS {
            return None;
        }
        let (promise, computed) = watch::channel(());
        self.0.lock().push(Prefix { first, hash, computed });
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
        assert!(waits(computing.awaited(&sibling, 40)).await);
        assert!(!waits(computing.awaited(&prompt(2, 40, 60, 3), 40)).await, "another group");
        assert!(!waits(computing.awaited(&sibling, 15)).await, "too little in common");
        let awaited = computing.awaited(&sibling, 40);
        drop(promise);
        assert!(!waits(awaited).await);
        assert!(computing.awaited(&sibling, 40).is_none(), "it is computed");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_cached_before_is_not_waited_for() {
        let computing = Computing::default();
        // The first has 30 blocks of the group already, and computes ten more and its own twenty.
        let _promise = computing.promise(&prompt(1, 40, 60, 1), 30).expect("thirty blocks");
        assert!(!waits(computing.awaited(&prompt(1, 40, 60, 2), 40)).await, "ten blocks");
        assert!(!waits(computing.awaited(&prompt(1, 30, 60, 3), 30)).await, "nothing new");
        assert!(waits(computing.awaited(&prompt(1, 40, 60, 1), 60)).await, "the same prompt");
        assert!(computing.promise(&prompt(1, 40, 60, 4), 45).is_none(), "fifteen blocks");
        assert!(computing.promise(&prompt(1, 40, 60, 4), 60).is_none(), "nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn of_several_the_one_that_goes_furthest_is_waited_for() {
        let computing = Computing::default();
        let first = computing.promise(&prompt(1, 100, 100, 0), 0);
        let second = computing.promise(&prompt(1, 100, 100, 0), 50);
        let awaited = computing.awaited(&prompt(1, 100, 120, 7), 100);
        drop(first);
        assert!(waits(awaited).await);
        let awaited = computing.awaited(&prompt(1, 100, 120, 7), 100);
        drop(second);
        assert!(!waits(awaited).await);
    }
}
