//! Model checking of the tree: runs its threads in many interleavings.
//!
//! The source of the tree is compiled here again with the locks and atomics of shuttle (`crate::sync`). shuttle
//! decides at each of them which thread continues. So the library has no test code, and the test runs with the
//! others.

#![forbid(unsafe_code)]
#![allow(
    unreachable_pub,
    dead_code,
    reason = "as a module of a test the tree has no users outside"
)]

use mla_router::{key, names};
use shuttle::{sync::Arc, thread};

use crate::{key::RouteKey, names::WorkerId, tree::PrefixTree};

#[path = "../src/tree/mod.rs"]
mod tree;

mod sync {
    pub(crate) use shuttle::sync::{
        MutexGuard, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    };

    const WHOLE: &str = "a thread that panics ends the test";

    #[derive(Debug)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect(WHOLE)
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    #[derive(Debug)]
    pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().expect(WHOLE)
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().expect(WHOLE)
        }
    }
}

const ONE: WorkerId = WorkerId(1);
const TWO: WorkerId = WorkerId(2);

/// Four blocks below one of two roots in different shards.
fn prompt(root: u64, own: u64) -> RouteKey {
    let root = (root + 1) << 32;
    let blocks = vec![root, root + 1, root + 10 * (own + 1), root + 10 * (own + 1) + 1];
    RouteKey { blocks, ..RouteKey::default() }
}

/// Purges all workers and checks that the tree becomes empty: a wrong count or a left-over list entry would show.
fn assert_sound(tree: &PrefixTree) {
    for worker in [ONE, TWO] {
        tree.remove_worker(worker);
    }
    let sweeper = WorkerId(9);
    tree.set_capacity(sweeper, 1);
    for _ in 0..3 {
        for root in 0..2 {
            let key = RouteKey { blocks: vec![(root + 1) << 32], ..RouteKey::default() };
            tree.insert(&key, sweeper);
        }
    }
    let stats = tree.stats();
    assert_eq!((stats.blocks, stats.held, stats.nodes, stats.ownerships), (1, 1, 1, 1));
}

fn held(tree: &PrefixTree, key: &RouteKey, worker: WorkerId) -> u32 {
    let mut found = Vec::new();
    tree.lookup(key, &mut found);
    found.iter().find(|(id, _)| *id == worker).map_or(0, |(_, blocks)| *blocks)
}

/// Runs the threads in many interleavings, each followed by `after`.
fn check(threads: &[fn(&PrefixTree)], after: fn(&PrefixTree)) {
    let threads = threads.to_vec();
    let run = move || {
        let tree = Arc::new(PrefixTree::new(100));
        let handles: Vec<_> = threads
            .iter()
            .map(|thread| {
                let (tree, thread) = (Arc::clone(&tree), *thread);
                thread::spawn(move || thread(&tree))
            })
            .collect();
        for handle in handles {
            handle.join().expect("a thread's assertions hold");
        }
        after(&tree);
        assert_sound(&tree);
    };
    shuttle::check_random(run.clone(), 100);
    shuttle::check_pct(run, 100, 3);
}

#[test]
fn inserts_of_one_worker_stay_within_its_capacity() {
    check(
        &[
            |tree| {
                tree.set_capacity(ONE, 6);
                tree.insert(&prompt(0, 0), ONE);
                tree.insert(&prompt(1, 1), ONE);
            },
            |tree| {
                tree.set_capacity(ONE, 6);
                tree.insert(&prompt(1, 0), ONE);
                tree.insert(&prompt(0, 1), ONE);
            },
        ],
        |tree| assert!((4..=6).contains(&tree.owned_by(ONE)), "{}", tree.owned_by(ONE)),
    );
}

#[test]
fn purge_removes_existing_blocks_only() {
    check(
        &[
            |tree| {
                tree.insert(&prompt(0, 0), ONE);
                tree.insert(&prompt(0, 0), TWO);
                tree.purge_worker(ONE);
                tree.insert(&prompt(1, 0), ONE);
                assert_eq!(held(tree, &prompt(0, 0), TWO), 4);
            },
            |tree| {
                tree.insert(&prompt(0, 1), TWO);
                tree.insert(&prompt(1, 1), TWO);
            },
        ],
        |tree| {
            assert_eq!((tree.owned_by(ONE), held(tree, &prompt(1, 0), ONE)), (4, 4));
            assert_eq!((tree.owned_by(TWO), held(tree, &prompt(0, 0), ONE)), (10, 0));
        },
    );
}

#[test]
fn retracted_blocks_stay_if_used_by_another_request() {
    check(
        &[
            |tree| {
                let receipt = tree.insert(&prompt(0, 0), ONE);
                tree.retract(&prompt(0, 0), ONE, &receipt);
            },
            |tree| {
                tree.insert(&prompt(0, 1), ONE);
            },
            |tree| {
                tree.insert(&prompt(0, 1), TWO);
            },
        ],
        |tree| {
            for worker in [ONE, TWO] {
                assert_eq!(held(tree, &prompt(0, 1), worker), 4);
            }
            // The retraction may come between the two insertions. The shared blocks stay in any order.
            assert_eq!((tree.owned_by(ONE), tree.owned_by(TWO)), (4, 4));
        },
    );
}

#[test]
fn removed_workers_leave_no_blocks() {
    check(
        &[
            |tree| {
                tree.insert(&prompt(0, 0), ONE);
                tree.remove_worker(ONE);
            },
            |tree| {
                let receipt = tree.insert(&prompt(0, 1), TWO);
                tree.evict_unused(TWO, receipt.tick);
                tree.insert(&prompt(1, 1), TWO);
            },
            |tree| {
                tree.insert(&prompt(1, 0), ONE);
                tree.remove_worker(TWO);
            },
        ],
        |_| {},
    );
}
