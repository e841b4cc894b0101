//! The approximate prefix caches of all workers, in one radix tree over block hashes.
//!
//! No worker is asked: a request sent to a worker will be in that worker's cache, so inserting its
//! key is knowing. What a worker may hold is bounded by its own KV capacity at insert, by evicting
//! what the worker itself would evict: its least recently used leaves.
//!
//! An operation takes the shared lock of the worker table and then the lock of one shard; never two
//! shards, so there is no order to keep. Both are parking_lot locks: nothing is awaited under them.

mod holds;
mod shard;
mod slab;
mod workers;

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{fleet::worker_id::WorkerId, key::RouteKey};
use shard::Shard;
use workers::Workers;

/// Prompts go to shards by their first block. More shards than cores of a large host would help
/// only prompts that differ in their first 64 bytes.
const SHARDS: usize = 32;

/// Blocks evicted under one hold of a shard's lock, so that a worker whose capacity shrinks by
/// millions does not stop the traffic.
const EVICTION_BATCH: u64 = 1 << 14;

/// The tree. All methods may be called from any thread.
#[derive(Debug)]
pub struct PrefixTree {
    shards: [Mutex<Shard>; SHARDS],
    workers: RwLock<Workers>,
    /// Counts inserts: the time by which recency is told. One increment per request, next to the
    /// worker table's lock that each request takes anyway.
    clock: AtomicU64,
}

/// What the tree holds, summed over its shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeStats {
    /// Distinct blocks.
    pub blocks: u64,
    /// Blocks, counted once for each worker that holds them.
    pub held: u64,
    pub nodes: u64,
    /// Pairs of worker and node, leftovers of purged workers included.
    pub holds: u64,
    pub bytes: u64,
}

impl Default for PrefixTree {
    fn default() -> Self {
        Self::new()
    }
}

impl PrefixTree {
    pub fn new() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::new(Shard::new())),
            workers: RwLock::default(),
            clock: AtomicU64::new(0),
        }
    }

    /// Replaces the contents of `out` by the workers that hold a prefix of `key`, each with the
    /// number of blocks of the longest.
    pub fn lookup(&self, key: &RouteKey, out: &mut Vec<(WorkerId, u32)>) {
        out.clear();
        let Some(index) = shard_of(&key.blocks) else {
            return;
        };
        let workers = self.workers.read();
        let mut shard = self.shards[index].lock();
        shard.sync(&workers);
        shard.lookup(&key.blocks, &workers, out);
    }

    /// Notes that `worker` now holds `key`, or as much of it as its capacity allows.
    pub fn insert(&self, key: &RouteKey, worker: WorkerId) {
        let Some(index) = shard_of(&key.blocks) else {
            return;
        };
        let (workers, slot) = self.registered(worker);
        let quota = workers.quota(slot);
        let fitting = quota.capacity.min(key.blocks.len() as u64) as usize;
        if fitting == 0 {
            return;
        }
        let mut shard = self.shards[index].lock();
        shard.sync(&workers);
        // Drawn under the lock, so that the order of a shard's lists is that of the clock.
        let stamp = self.clock.fetch_add(1, Ordering::Relaxed);
        let added = shard.insert(&key.blocks[..fitting], slot, stamp);
        quota.used.fetch_add(added, Ordering::Relaxed);
        quota.set_oldest(index, shard.oldest(slot));
        drop(shard); // the oldest blocks may be in any shard
        self.evict(&workers, slot);
    }

    /// Bounds what `worker` may hold, from now on and at once.
    pub fn set_capacity(&self, worker: WorkerId, blocks: u64) {
        let mut workers = self.workers.write();
        let slot = workers.set_capacity(worker, blocks);
        self.evict(&RwLockWriteGuard::downgrade(workers), slot);
    }

    /// Forgets what `worker` holds, as after its restart; its capacity stays. Takes the same time
    /// whatever it holds: its generation ends, and what it leaves is swept by later inserts.
    pub fn purge_worker(&self, worker: WorkerId) {
        self.workers.write().purge(worker);
    }

    /// Forgets `worker`, as fast as `purge_worker`.
    pub fn remove_worker(&self, worker: WorkerId) {
        self.workers.write().remove(worker);
    }

    /// Blocks that the tree believes `worker` to hold.
    pub fn held_by(&self, worker: WorkerId) -> u64 {
        let workers = self.workers.read();
        let slot = workers.slot(worker);
        slot.map_or(0, |slot| workers.quota(slot).used.load(Ordering::Relaxed))
    }

    pub fn stats(&self) -> TreeStats {
        let workers = self.workers.read();
        let held = workers.quotas.iter().map(|quota| quota.used.load(Ordering::Relaxed)).sum();
        let mut stats = TreeStats { held, ..TreeStats::default() };
        for shard in &self.shards {
            shard.lock().add_to(&mut stats);
        }
        stats
    }

    /// The worker table and the slot of `worker`, which gets one on first sight.
    fn registered(&self, worker: WorkerId) -> (RwLockReadGuard<'_, Workers>, u32) {
        let workers = self.workers.read();
        if let Some(slot) = workers.slot(worker) {
            return (workers, slot);
        }
        drop(workers);
        let mut workers = self.workers.write();
        let slot = workers.register(worker);
        (RwLockWriteGuard::downgrade(workers), slot)
    }

    /// Brings a worker back to its capacity, oldest blocks of all shards first.
    fn evict(&self, workers: &Workers, slot: u32) {
        let quota = workers.quota(slot);
        loop {
            let excess = quota.excess();
            let Some((index, limit)) = quota.oldest_shard().filter(|_| excess > 0) else {
                return;
            };
            let mut shard = self.shards[index].lock();
            shard.sync(workers);
            let freed = shard.evict(slot, excess.min(EVICTION_BATCH), limit);
            quota.used.fetch_sub(freed, Ordering::Relaxed);
            quota.set_oldest(index, shard.oldest(slot));
        }
    }
}

fn shard_of(blocks: &[u64]) -> Option<usize> {
    // The upper half: the index within a shard uses both ends of the hash.
    blocks.first().map(|first| (first >> 32) as usize % SHARDS)
}
