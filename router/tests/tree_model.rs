//! Tests the prefix tree against a simple model: for each worker a map from every prefix that it owns to the time
//! of its last use.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use mla_router::{
    key::RouteKey,
    names::WorkerId,
    tree::{InsertReceipt, PrefixTree, TreeStats},
};
use proptest::prelude::*;

/// A prompt whose blocks differ from the blocks of every other prefix.
fn key(symbols: &[u8]) -> RouteKey {
    let chain = symbols.iter().scan(7_u64, |chain, symbol| {
        *chain = (*chain ^ u64::from(*symbol)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        Some(*chain)
    });
    RouteKey { blocks: chain.collect(), ..RouteKey::default() }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u8, Vec<u8>),
    Lookup(Vec<u8>),
    Capacity(u8, u64),
    Purge(u8),
    Remove(u8),
    /// Takes back an earlier insertion, counted backwards.
    Retract(usize),
    /// Evicts the blocks that a worker has not used since an earlier insertion, counted backwards.
    EvictUnused(u8, usize),
}

fn prompt() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0..3_u8, 0..14)
}

fn steps(workers: u8) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..workers, prompt()).prop_map(|(worker, prompt)| Step::Insert(worker, prompt)),
        6 => prompt().prop_map(Step::Lookup),
        1 => (0..workers, 0..40_u64).prop_map(|(worker, blocks)| Step::Capacity(worker, blocks)),
        1 => (0..workers).prop_map(Step::Purge),
        1 => (0..workers).prop_map(Step::Remove),
        2 => (0..6_usize).prop_map(Step::Retract),
        1 => (0..workers, 0..12_usize).prop_map(|(worker, ago)| Step::EvictUnused(worker, ago)),
    ];
    prop::collection::vec(step, 1..120)
}

/// An insertion in the model: worker, prompt, number of known leading blocks, and time.
type Insert = (u8, Vec<u8>, usize, u64);

#[derive(Default)]
struct Model {
    held: BTreeMap<u8, BTreeMap<Vec<u8>, u64>>,
    capacity: BTreeMap<u8, u64>,
    inserts: Vec<Insert>,
}

impl Model {
    fn capacity(&self, worker: u8) -> usize {
        self.capacity.get(&worker).map_or(usize::MAX, |blocks| *blocks as usize)
    }

    fn insert(&mut self, worker: u8, prompt: &[u8]) {
        let clock = self.inserts.len() as u64;
        let fitting = prompt.len().min(self.capacity(worker));
        let held = self.held.entry(worker).or_default();
        let known = (1..=fitting).take_while(|length| held.contains_key(&prompt[..*length]));
        self.inserts.push((worker, prompt.to_vec(), known.count(), clock));
        for length in 1..=fitting {
            held.insert(prompt[..length].to_vec(), clock);
        }
    }

    fn retract(&mut self, ago: usize) {
        let Some((worker, prompt, known, clock)) = self.inserts.iter().nth_back(ago) else {
            return;
        };
        let held = self.held.entry(*worker).or_default();
        for length in known + 1..=prompt.len() {
            if held.get(&prompt[..length]) == Some(clock) {
                held.remove(&prompt[..length]);
            }
        }
    }

    fn evict_unused(&mut self, worker: u8, ago: usize) {
        if let Some((.., clock)) = self.inserts.iter().nth_back(ago) {
            self.held.entry(worker).or_default().retain(|_, tick| *tick > *clock);
        }
    }

    /// Evicts the least recently used blocks first, and the deepest ones of the same use first.
    fn evict(&mut self, worker: u8) {
        let capacity = self.capacity(worker);
        let held = self.held.entry(worker).or_default();
        while held.len() > capacity {
            let oldest = held.iter().min_by_key(|(path, tick)| (**tick, usize::MAX - path.len()));
            let oldest = oldest.expect("more than the capacity is held").0.clone();
            held.remove(&oldest);
        }
    }

    fn lookup(&self, prompt: &[u8]) -> Vec<(WorkerId, u32)> {
        let matched = |held: &BTreeMap<Vec<u8>, u64>| {
            (1..=prompt.len()).take_while(|length| held.contains_key(&prompt[..*length])).count()
        };
        let all = self
            .held
            .iter()
            .map(|(worker, held)| (WorkerId(u32::from(*worker)), matched(held) as u32));
        all.filter(|(_, blocks)| *blocks > 0).collect()
    }

    fn apply(&mut self, step: &Step, evicting: bool) {
        match step {
            Step::Insert(worker, prompt) => self.insert(*worker, prompt),
            Step::Capacity(worker, blocks) => drop(self.capacity.insert(*worker, *blocks)),
            Step::Purge(worker) => drop(self.held.remove(worker)),
            Step::Remove(worker) => {
                self.held.remove(worker);
                self.capacity.remove(worker);
            }
            Step::Retract(ago) if evicting => self.retract(*ago),
            Step::EvictUnused(worker, ago) if evicting => self.evict_unused(*worker, *ago),
            Step::Lookup(_) | Step::Retract(_) | Step::EvictUnused(..) => {}
        }
        if let (true, Step::Insert(worker, _) | Step::Capacity(worker, _)) = (evicting, step) {
            self.evict(*worker);
        }
    }
}

/// The tree, and its insertions with their receipts.
struct Subject {
    tree: PrefixTree,
    inserts: Vec<(WorkerId, RouteKey, InsertReceipt)>,
}

impl Subject {
    fn new() -> Self {
        Self { tree: PrefixTree::new(1 << 18), inserts: Vec::new() }
    }

    fn apply(&mut self, step: &Step) {
        let (tree, id) = (&self.tree, |worker: &u8| WorkerId(u32::from(*worker)));
        match step {
            Step::Insert(worker, prompt) => {
                let (worker, key) = (id(worker), key(prompt));
                let receipt = tree.insert(&key, worker);
                self.inserts.push((worker, key, receipt));
            }
            Step::Capacity(worker, blocks) => tree.set_capacity(id(worker), *blocks),
            Step::Purge(worker) => tree.purge_worker(id(worker)),
            Step::Remove(worker) => tree.remove_worker(id(worker)),
            Step::Retract(ago) => {
                if let Some((worker, key, receipt)) = self.inserts.iter().nth_back(*ago) {
                    tree.retract(key, *worker, receipt);
                }
            }
            Step::EvictUnused(worker, ago) => {
                if let Some((.., receipt)) = self.inserts.iter().nth_back(*ago) {
                    let before = tree.owned_by(id(worker));
                    let freed = tree.evict_unused(id(worker), receipt.tick);
                    assert_eq!(tree.owned_by(id(worker)), before - freed);
                }
            }
            Step::Lookup(_) => {}
        }
    }
}

fn lookup(tree: &PrefixTree, prompt: &[u8]) -> Vec<(WorkerId, u32)> {
    let mut found = Vec::new();
    tree.lookup(&key(prompt), &mut found);
    found.sort_unstable();
    found
}

proptest! {
    /// The share of a single worker equals the model, including evictions.
    #[test]
    fn one_worker_is_exact(steps in steps(1)) {
        let (mut subject, mut model) = (Subject::new(), Model::default());
        for step in &steps {
            subject.apply(step);
            model.apply(step, true);
            if let (Step::Insert(..), Some((.., receipt)), Some((.., known, _))) =
                (step, subject.inserts.last(), model.inserts.last())
            {
                prop_assert_eq!(receipt.held as usize, *known);
                prop_assert_eq!(receipt.last_used.is_some(), *known > 0);
            }
            prop_assert_eq!(subject.tree.owned_by(WorkerId(0)), model.held.get(&0).map_or(0, |h| h.len() as u64));
            if let Step::Lookup(prompt) = step {
                prop_assert_eq!(lookup(&subject.tree, prompt), model.lookup(prompt));
            }
        }
    }

    /// Without capacities the shares of all workers equal the model.
    #[test]
    fn many_workers_without_eviction_are_exact(steps in steps(5)) {
        let (mut subject, mut model) = (Subject::new(), Model::default());
        for step in steps.iter().filter(|step| !matches!(step, Step::Capacity(..))) {
            subject.apply(step);
            model.apply(step, true);
            if let Step::Lookup(prompt) = step {
                prop_assert_eq!(lookup(&subject.tree, prompt), model.lookup(prompt));
            }
        }
    }

    /// With capacities a node with several owners is evicted completely, so shares may be smaller than in the
    /// model. They never exceed the capacity or the insertions, and they have the last insertion.
    #[test]
    fn many_workers_stay_within_bounds(steps in steps(5)) {
        let (mut subject, mut inserted) = (Subject::new(), Model::default());
        for step in &steps {
            subject.apply(step);
            inserted.apply(step, false);
            for worker in 0..5 {
                let held = subject.tree.owned_by(WorkerId(u32::from(worker)));
                prop_assert!(held as usize <= inserted.capacity(worker));
            }
            match step {
                Step::Lookup(prompt) => {
                    let upper: BTreeMap<_, _> = inserted.lookup(prompt).into_iter().collect();
                    for (worker, blocks) in lookup(&subject.tree, prompt) {
                        prop_assert!(upper.get(&worker).is_some_and(|most| blocks <= *most));
                    }
                }
                Step::Insert(worker, prompt) => {
                    let blocks = prompt.len().min(inserted.capacity(*worker)) as u32;
                    let entry = (WorkerId(u32::from(*worker)), blocks);
                    prop_assert!(blocks == 0 || lookup(&subject.tree, prompt).contains(&entry));
                }
                _ => {}
            }
        }
    }

    /// Later insertions sweep the leftovers of purged workers: nothing leaks.
    #[test]
    fn purged_shares_are_swept(steps in steps(5)) {
        let mut subject = Subject::new();
        // A worker with a capacity of one block sweeps each shard of the prompts.
        subject.tree.set_capacity(WorkerId(9), 1);
        for step in &steps {
            subject.apply(step);
        }
        let tree = subject.tree;
        for worker in 0..5 {
            tree.remove_worker(WorkerId(worker));
        }
        for _ in 0..200 {
            for symbol in 0..3 {
                tree.insert(&key(&[symbol]), WorkerId(9));
            }
        }
        let TreeStats { blocks, held, nodes, ownerships, .. } = tree.stats();
        prop_assert_eq!((blocks, held, nodes, ownerships), (1, 1, 1, 1));
    }
}

/// After concurrent insertions, look-ups and purges all counts are consistent.
#[test]
fn concurrent_threads_leave_consistent_counts() {
    let tree = PrefixTree::new(1 << 18);
    std::thread::scope(|scope| {
        for worker in 0..4_u8 {
            let tree = &tree;
            scope.spawn(move || {
                let id = WorkerId(u32::from(worker));
                tree.set_capacity(id, 50);
                for round in 0..2000_u32 {
                    let prompt: Vec<u8> =
                        (0..12).map(|i| (round.wrapping_mul(31 + i) >> 3) as u8 % 3).collect();
                    tree.insert(&key(&prompt), id);
                    assert!(lookup(tree, &prompt).contains(&(id, 12)));
                    assert!(tree.owned_by(id) <= 50);
                    if round % 500 == 499 {
                        tree.purge_worker(id);
                    }
                }
            });
        }
    });
    for worker in 0..4 {
        tree.remove_worker(WorkerId(worker));
    }
    assert_eq!(tree.stats().held, 0);
}
