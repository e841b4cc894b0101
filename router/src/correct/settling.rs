//! From when on a worker's share of the tree may be taken at its word.
//!
//! A prompt is noted in the tree when its worker is chosen, and is in the worker's cache when it has
//! been computed. A request that comes in between and finds less cached than the tree says has found
//! no error. So one must know which notes are older than every prompt that is still being computed.
//!
//! As in RCU: a request counts in the epoch in which it was booked, which is the current one or the
//! one before. When the one before has drained, all notes older than the current epoch are settled,
//! and the next epoch begins.

use crate::tree::{Note, Stamp};

/// The epoch in which a request was booked.
#[derive(Debug)]
pub struct Epoch(usize);

#[derive(Debug, Default)]
pub(super) struct Settling {
    current: usize,
    /// Prompts not yet computed, of the current epoch and the one before.
    pending: [u32; 2],
    /// When the current epoch began.
    began: Option<Stamp>,
    /// What was noted before this is computed.
    settled: Option<Stamp>,
    /// After the last note. No time is before all others, so until the first one there is none.
    now: Option<Stamp>,
}

impl Settling {
    /// A request is booked; only afterwards may it be noted in the tree.
    pub(super) fn begin(&mut self) -> Epoch {
        self.turn();
        self.pending[self.current] += 1;
        Epoch(self.current)
    }

    /// A request is noted. Returns whether all that it can have found has been computed.
    pub(super) fn noted(&mut self, note: &Note) -> bool {
        // Requests are noted in the order of the tree's clock. A comparison would be wrong after a pause
        // of half its circle.
        self.now = Some(note.stamp.next());
        note.last_used.zip(self.settled).is_some_and(|(used, settled)| used.is_before(settled))
    }

    /// A request's prompt is computed, or never will be.
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
        /// Books and notes prompt `number`; returns whether what it found was settled.
        fn send(&mut self, number: u64) -> (Epoch, bool) {
            let epoch = self.settling.begin();
            let key = RouteKey { blocks: vec![number], ..RouteKey::default() };
            let note = self.tree.insert(&key, WorkerId(0));
            (epoch, self.settling.noted(&note))
        }
    }

    #[test]
    fn a_note_is_settled_when_its_prompt_and_all_before_are_computed() {
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
    fn a_worker_that_comes_when_the_clock_is_beyond_half_its_circle_settles_like_any_other() {
        let mut settling = Settling::default();
        let mut send = |ticks: u32| {
            let epoch = settling.begin();
            let last_used = Some(Stamp::at(ticks - 1));
            let note = Note { held: 1, stamp: Stamp::at(ticks), last_used };
            let is_settled = settling.noted(&note);
            settling.end(&epoch);
            is_settled
        };
        let half = 1 << 31;
        let settled: Vec<_> = (half + 10..half + 20).map(&mut send).collect();
        assert!(settled[3..].iter().all(|&is_settled| is_settled), "{settled:?}");
    }

    /// Prompts `0..50`, of which four at a time are being computed; returns what is left of them.
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
