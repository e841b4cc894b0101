//! Single-flight prefill: the prefixes that a worker is computing.
//!
//! Many engines compute a new prefix once for each prompt that arrives with it. So the router sends the first of these
//! prompts, and sends the others when the first byte of its answer shows that the prefix is cached. They lose no time:
//! in the queue of the engine they would also wait for the first prompt.
//!
//! Later requests with other prefixes overtake the waiting ones, up to [`MAX_OVERTAKING`] tokens. Then they wait as
//! well, so that the earlier requests are sent first.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

use crate::key::RouteKey;

/// Minimum length of a prefix: 256 tokens. Shorter ones are recomputed in less time than a response needs to arrive.
const MIN_BLOCKS: usize = 16;

/// Prompt tokens that may overtake the requests that wait for a prefix, counted from the first waiting request. An
/// engine computes as many in one step, so it stays busy.
const MAX_OVERTAKING: u64 = 8192;

/// The prefixes that one worker is computing. Each request takes the lock, so it has a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct SingleFlight(Mutex<Vec<Prefix>>);

#[derive(Debug)]
struct Prefix {
    /// Index of the first block that is not cached yet.
    first: usize,
    /// Hash of that block. It covers all blocks before it.
    hash: u64,
    /// Prompt tokens that have overtaken the waiting requests; `None` while no request waits for the prefix.
    overtaking: Option<u64>,
    /// Closes when the prefix is computed, or its request has ended.
    computed: watch::Receiver<()>,
}

/// Held by the request whose prompt computes the prefix. Dropping the ticket wakes the waiters.
#[derive(Debug)]
pub(super) struct PrefillTicket(
    #[expect(dead_code, reason = "dropping it wakes the waiters")] watch::Sender<()>,
);

/// The prefixes that a request waits for before it is sent.
#[derive(Debug)]
pub(super) struct PrefillWaiter(Vec<watch::Receiver<()>>);

impl PrefillWaiter {
    /// Returns when the tickets of all prefixes are dropped, or after `limit`.
    pub(super) async fn within(self, limit: Duration) {
        let all = async {
            for mut computed in self.0 {
                // The channel sends nothing: an error means that it is closed.
                let _closed = computed.changed().await;
            }
        };
        // The caller sends the request in both cases.
        let _ended = timeout(limit, all).await;
    }
}

impl SingleFlight {
    /// Returns a waiter for the prompt `key`, or `None` if the prompt can be sent now. `held` is the number of
    /// leading blocks that the worker has or is computing, `tokens` the number of tokens to compute. The waiter
    /// covers the prefix of the prompt itself. If enough tokens have overtaken some waiting request, it covers all
    /// awaited prefixes.
    pub(super) fn waiter(&self, key: &RouteKey, held: u32, tokens: u64) -> Option<PrefillWaiter> {
        let mut prefixes = self.0.lock();
        prefixes.retain(|prefix| prefix.computed.has_changed().is_ok());
        let shared = |prefix: &Prefix| {
            prefix.first + MIN_BLOCKS <= held as usize
                && key.blocks.get(prefix.first) == Some(&prefix.hash)
        };
        // The longest prefix is enough: its own request may wait for the shorter ones.
        let own = (0..prefixes.len())
            .filter(|&place| shared(&prefixes[place]))
            .max_by_key(|&place| prefixes[place].first);
        let is_full = |prefix: &Prefix| {
            prefix.overtaking.is_some_and(|overtaking| overtaking >= MAX_OVERTAKING)
        };
        if prefixes.iter().any(is_full) {
            let waited_for = prefixes
                .iter()
                .enumerate()
                .filter(|(place, prefix)| own == Some(*place) || prefix.overtaking.is_some());
            let waiter = waited_for.map(|(_, prefix)| prefix.computed.clone()).collect();
            if let Some(own) = own {
                prefixes[own].overtaking.get_or_insert(0);
            }
            return Some(PrefillWaiter(waiter));
        }
        if let Some(own) = own {
            prefixes[own].overtaking.get_or_insert(0);
            return Some(PrefillWaiter(vec![prefixes[own].computed.clone()]));
        }
        for overtaking in prefixes.iter_mut().filter_map(|prefix| prefix.overtaking.as_mut()) {
            *overtaking += tokens;
        }
        None
    }

    /// Returns a ticket for the prompt `key`, which the worker computes from block `held` on. `None` if too few
    /// blocks are new.
    pub(super) fn ticket(&self, key: &RouteKey, held: u32) -> Option<PrefillTicket> {
        let first = held as usize;
        let hash = *key.blocks.get(first)?;
        if key.blocks.len() - first < MIN_BLOCKS {
            return None;
        }
        let (ticket, computed) = watch::channel(());
        self.0.lock().push(Prefix { first, hash, overtaking: None, computed });
        Some(PrefillTicket(ticket))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    /// A prompt of `blocks` blocks. It shares the first `shared` blocks with its group.
    fn prompt(group: u64, shared: u64, blocks: u64, number: u64) -> RouteKey {
        let block = |block| if block < shared { group << 32 | block } else { number << 48 | block };
        RouteKey { blocks: (0..blocks).map(block).collect(), ..RouteKey::default() }
    }

    async fn waits(waiter: Option<PrefillWaiter>) -> bool {
        let begun = Instant::now();
        if let Some(waiter) = waiter {
            waiter.within(LONG).await;
        }
        begun.elapsed() >= LONG
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_with_a_new_shared_prefix_waits_until_it_is_computed() {
        let flight = SingleFlight::default();
        let ticket = flight.ticket(&prompt(1, 40, 60, 1), 0).expect("a long prompt");
        let sibling = prompt(1, 40, 60, 2);
        assert!(waits(flight.waiter(&sibling, 40, 0)).await);
        assert!(!waits(flight.waiter(&prompt(2, 40, 60, 3), 40, 0)).await, "another group");
        assert!(!waits(flight.waiter(&sibling, 15, 0)).await, "too little in common");
        let waiter = flight.waiter(&sibling, 40, 0);
        drop(ticket);
        assert!(!waits(waiter).await);
        assert!(flight.waiter(&sibling, 40, 0).is_none(), "it is computed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefix_that_was_cached_before_is_not_awaited() {
        let flight = SingleFlight::default();
        // The first has 30 blocks of the group already, and computes ten more and its own twenty.
        let _ticket = flight.ticket(&prompt(1, 40, 60, 1), 30).expect("thirty blocks");
        assert!(!waits(flight.waiter(&prompt(1, 40, 60, 2), 40, 0)).await, "ten blocks");
        assert!(!waits(flight.waiter(&prompt(1, 30, 60, 3), 30, 0)).await, "nothing new");
        assert!(waits(flight.waiter(&prompt(1, 40, 60, 1), 60, 0)).await, "the same prompt");
        assert!(flight.ticket(&prompt(1, 40, 60, 4), 45).is_none(), "fifteen blocks");
        assert!(flight.ticket(&prompt(1, 40, 60, 4), 60).is_none(), "nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn later_requests_overtake_waiting_ones_by_one_step_at_most() {
        let flight = SingleFlight::default();
        let first = flight.ticket(&prompt(1, 40, 60, 1), 0).expect("a long prompt");
        let other = || prompt(2, 40, 60, 3);
        let goes_ahead = || flight.waiter(&other(), 40, MAX_OVERTAKING / 2).is_none();
        assert!((0..5).all(|_| goes_ahead()), "no request waits yet");
        assert!(waits(flight.waiter(&prompt(1, 40, 60, 2), 40, 320)).await);
        assert!(goes_ahead() && goes_ahead(), "a step");
        let (held, sibling) =
            (flight.waiter(&other(), 40, 960), flight.waiter(&prompt(1, 40, 60, 4), 40, 320));
        assert!(held.is_some(), "more than a step");
        drop(first);
        assert!(!waits(held).await && !waits(sibling).await, "the first is done");
        assert!((0..5).all(|_| goes_ahead()), "no request waits any more");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_held_back_waits_for_all_awaited_prefixes() {
        let flight = SingleFlight::default();
        let tickets = [1, 2, 3].map(|group| flight.ticket(&prompt(group, 40, 60, group), 0));
        for group in [1, 2] {
            assert!(flight.waiter(&prompt(group, 40, 60, 8), 40, 320).is_some());
        }
        assert!(flight.waiter(&prompt(4, 40, 60, 9), 40, MAX_OVERTAKING).is_none());
        let held = || flight.waiter(&prompt(5, 40, 60, 9), 40, 960);
        let ([one, two, _three], before) = (tickets, held());
        drop(one);
        assert!(waits(before).await, "the second is not done");
        let before = held();
        drop(two);
        assert!(!waits(before).await, "no request waits for the third");
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_of_several_prefixes_is_awaited() {
        let flight = SingleFlight::default();
        let first = flight.ticket(&prompt(1, 100, 100, 0), 0);
        let second = flight.ticket(&prompt(1, 100, 100, 0), 50);
        let waiter = flight.waiter(&prompt(1, 100, 120, 7), 100, 0);
        drop(first);
        assert!(waits(waiter).await);
        let waiter = flight.waiter(&prompt(1, 100, 120, 7), 100, 0);
        drop(second);
        assert!(!waits(waiter).await);
    }
}
