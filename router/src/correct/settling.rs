//! Determines which insertions of a worker are settled: their prompts have been computed.
//!
//! A prompt is inserted into the tree when its worker is chosen, and is in the cache of the worker once it is
//! computed. A request in between finds fewer cached tokens than predicted, which is not an error of the prediction. So
//! the router must know which insertions are older than every prompt that is still being computed.
//!
//! The method is that of RCU. A request belongs to the epoch in which it was reserved: the present or the previous
//! one. When the previous epoch has no open requests, all insertions before the present epoch are settled, and the
//! next epoch starts.

use crate::tree::{InsertReceipt, LruTick};

/// The epoch of a request.
#[derive(Debug)]
pub struct Epoch(usize);

#[derive(Debug, Default)]
pub(super) struct Settling {
    current: usize,
    /// Prompts that are not computed yet, of the present and the previous epoch.
    pending: [u32; 2],
    /// Start of the present epoch.
    began: Option<LruTick>,
    /// All prompts inserted before this tick are computed.
    settled: Option<LruTick>,
    /// The tick after the last insertion; `None` before the first one, because no tick is before all others.
    now: Option<LruTick>,
}

impl Settling {
    /// Opens a request. Its prompt may be inserted into the tree only afterwards.
    pub(super) fn begin(&mut self) -> Epoch {
        self.turn();
        self.pending[self.current] += 1;
        Epoch(self.current)
    }

    /// Records an insertion. Returns whether the prefix that it found in the tree is settled.
    pub(super) fn inserted(&mut self, receipt: &InsertReceipt) -> bool {
        // Insertions come in the order of the clock. A comparison would fail after a pause of half its range.
        self.now = Some(receipt.tick.next());
        receipt.last_used.zip(self.settled).is_some_and(|(used, settled)| used.is_before(settled))
    }

    /// Closes a request: its prompt is computed, or the request has ended before.
    pub(super) fn end(&mut self, epoch: &Epoch) {
        self.pending[epoch.0] -= 1;
        self.turn();
    }

    fn turn(&mut self) {
        let other = 1 - self.current;
        if self.pending[other] == 0 {
            (self.settled, self.began) = (self.began, self.now);
            self.current = other;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::{key::RouteKey, names::WorkerId, tree::PrefixTree};

    struct Worker {
        tree: PrefixTree,
        settling: Settling,
    }

    impl Worker {
        /// Opens and inserts prompt `number`. Returns its epoch, and whether the prefix that it found was settled.
        fn send(&mut self, number: u64) -> (Epoch, bool) {
            let epoch = self.settling.begin();
            let key = RouteKey { blocks: vec![number], ..RouteKey::default() };
            let receipt = self.tree.insert(&key, WorkerId(0));
            (epoch, self.settling.inserted(&receipt))
        }
    }

    #[test]
    fn an_insertion_is_settled_when_its_prompt_and_all_before_are_computed() {
        let mut worker = Worker { tree: PrefixTree::new(100), settling: Settling::default() };
        let (first, found) = worker.send(1);
        assert!(!found, "nothing was there");
        let (second, found) = worker.send(1);
        assert!(!found, "the first is still being computed");
        worker.settling.end(&first);
        let (third, found) = worker.send(1);
        assert!(!found, "the second is still being computed");
        worker.settling.end(&second);
        worker.settling.end(&third);
        let (fourth, found) = worker.send(1);
        assert!(found, "all three are done");
        let (fifth, found) = worker.send(2);
        assert!(!found, "never seen");
        worker.settling.end(&fifth);
        assert!(!worker.send(1).1, "the fourth is still being computed");
        worker.settling.end(&fourth);
    }

    #[test]
    fn a_worker_added_after_half_the_range_of_the_clock_settles_like_any_other() {
        let mut settling = Settling::default();
        let mut send = |ticks: u32| {
            let epoch = settling.begin();
            let last_used = Some(LruTick::at(ticks - 1));
            let receipt = InsertReceipt { held: 1, tick: LruTick::at(ticks), last_used };
            let is_settled = settling.inserted(&receipt);
            settling.end(&epoch);
            is_settled
        };
        let half = 1 << 31;
        let settled: Vec<_> = (half + 10..half + 20).map(&mut send).collect();
        assert!(settled[3..].iter().all(|&is_settled| is_settled), "{settled:?}");
    }

    /// Sends prompts `0..50`, four of them open at a time. Returns the open ones.
    fn stream(worker: &mut Worker) -> VecDeque<Epoch> {
        let mut open = VecDeque::new();
        for number in 0..50 {
            open.push_back(worker.send(number).0);
            if open.len() > 4 {
                worker.settling.end(&open.pop_front().expect("five"));
            }
        }
        open
    }

    #[test]
    fn traffic_without_a_pause_settles_all_the_same() {
        let mut worker = Worker { tree: PrefixTree::new(100), settling: Settling::default() };
        let _open = stream(&mut worker);
        assert!(worker.send(30).1, "long done");
        assert!(!worker.send(49).1, "just sent");
    }

    #[test]
    fn one_prompt_that_takes_long_leaves_all_later_ones_open() {
        let mut worker = Worker { tree: PrefixTree::new(100), settling: Settling::default() };
        let (endless, _) = worker.send(100);
        let mut open = stream(&mut worker);
        let (next, found) = worker.send(30);
        assert!(!found);
        open.extend([endless, next]);
        for epoch in open {
            worker.settling.end(&epoch);
        }
        assert!(worker.send(30).1);
    }
}
