//! The approximate prefix caches of all workers, in one radix tree over block hashes.
//!
//! No worker is asked: a request sent to a worker will be in that worker's cache, so inserting its
//! key is knowing. What a worker may hold is bounded by its own KV capacity at insert, by evicting
//! what the worker itself would evict: its least recently used leaves.
//!
//! An operation takes the shared lock of the worker table and then the lock of one shard; never two
//! shards, so there is no order to keep. Both are parking_lot locks: nothing is awaited under them.

mod holds;
mod nodes;
mod shard;
mod slab;
mod stamp;
mod workers;

use crate::{
    key::RouteKey,
    names::WorkerId,
    sync::{AtomicU32, Mutex, Ordering, RwLock, RwLockReadGuard},
};
use shard::{Inserted, Shard};
pub use stamp::Stamp;
use workers::Workers;

/// Prompts go to shards by their first block. More shards than cores of a large host would help
/// only prompts that differ in their first 64 bytes.
const SHARDS: usize = 32;

/// Blocks evicted while locks are held: a tenth of a millisecond. Between two batches choices go on, so
/// that a worker whose capacity shrinks by millions does not stop the traffic.
const EVICTION_BATCH: u64 = 1 << 10;

/// The tree. All methods may be called from any thread.
#[derive(Debug)]
pub struct PrefixTree {
    shards: [Mutex<Shard>; SHARDS],
    workers: RwLock<Workers>,
    /// Counts inserts: the time by which recency is told. One increment per request, next to the
    /// worker table's lock that each request takes anyway.
    clock: AtomicU32,
}

/// What an insert found and left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Leading blocks of the key that the tree believed the worker to hold before.
    pub held: u32,
    /// When the last of those had been used before.
    pub last_used: Option<Stamp>,
    /// When this was.
    pub stamp: Stamp,
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

impl PrefixTree {
    /// A worker may hold `default_capacity` blocks until `set_capacity` says otherwise.
    pub fn new(default_capacity: u64) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::new(Shard::new())),
            workers: RwLock::new(Workers::new(default_capacity)),
            clock: AtomicU32::new(0),
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
    pub fn insert(&self, key: &RouteKey, worker: WorkerId) -> Note {
        let Some(index) = shard_of(&key.blocks) else {
            return Note { stamp: self.tick(), ..Note::default() };
        };
        let (workers, slot) = self.registered(worker);
        let quota = workers.quota(slot);
        let fitting = quota.capacity().min(key.blocks.len() as u64) as usize;
        if fitting == 0 {
            return Note { stamp: self.tick(), ..Note::default() };
        }
        let mut shard = self.shards[index].lock();
        shard.sync(&workers);
        // Drawn under the lock, so that the order of a shard's lists is that of the clock.
        let stamp = self.tick();
        let Inserted { held, last_used } =
            shard.insert(&key.blocks[..fitting], slot, stamp, &workers);
        // In this order: what is in excess can be found.
        quota.set_oldest(index, shard.oldest(slot));
        quota.used.fetch_add(fitting as u64 - held, Ordering::Relaxed);
        drop(shard); // the oldest blocks may be in any shard
        self.evict_excess(&workers, slot, fitting as u64 + EVICTION_BATCH);
        Note { held: held as u32, last_used, stamp }
    }

    /// Takes back what `insert` noted of `key`, of which it returned `note`: what the worker has not
    /// held before, and what no other request has used since.
    pub fn retract(&self, key: &RouteKey, worker: WorkerId, note: &Note) {
        let (Some(index), workers) = (shard_of(&key.blocks), self.workers.read()) else {
            return;
        };
        let Some(slot) = workers.slot(worker) else {
            return;
        };
        let quota = workers.quota(slot);
        let mut shard = self.shards[index].lock();
        shard.sync(&workers);
        let freed = shard.retract(&key.blocks, slot, note.stamp, u64::from(note.held));
        quota.used.fetch_sub(freed, Ordering::Relaxed);
        quota.set_oldest(index, shard.oldest(slot));
    }

    /// Takes from `worker` all that it has not used after `stamp`; returns how many blocks.
    pub fn evict_unused(&self, worker: WorkerId, stamp: Stamp) -> u64 {
        let mut freed = 0;
        for index in 0..SHARDS {
            while let Some(batch) = self.evict_unused_from(index, worker, stamp) {
                freed += batch;
            }
        }
        freed
    }

    /// One batch of it from one shard; `None` if there is nothing left.
    fn evict_unused_from(&self, index: usize, worker: WorkerId, stamp: Stamp) -> Option<u64> {
        let workers = self.workers.read();
        let slot = workers.slot(worker)?;
        let quota = workers.quota(slot);
        quota.oldest(index).filter(|oldest| !stamp.is_before(*oldest))?;
        let mut shard = self.shards[index].lock();
        shard.sync(&workers);
        let freed = shard.evict(slot, EVICTION_BATCH, Some(stamp));
        quota.used.fetch_sub(freed, Ordering::Relaxed);
        quota.set_oldest(index, shard.oldest(slot));
        Some(freed)
    }

    /// Bounds what `worker` may hold, from now on and at once.
    pub fn set_capacity(&self, worker: WorkerId, blocks: u64) {
        let (workers, slot) = self.registered(worker);
        workers.quota(slot).set_capacity(blocks);
        drop(workers);
        while self.evict_batch(worker) {}
    }

    /// Takes what a worker has above its capacity, at most about `limit` blocks, unless another thread
    /// does: that thread looks again after it has given back the lock, so no excess is left to nobody.
    fn evict_excess(&self, workers: &Workers, slot: u32, mut limit: u64) {
        let quota = workers.quota(slot);
        while quota.excess() > 0
            && limit > 0
            && let Some(turn) = quota.evicting.try_lock()
        {
            let freed = self.evict(workers, slot, limit);
            drop(turn);
            if freed == 0 {
                return; // a purge has taken it
            }
            limit = limit.saturating_sub(freed);
        }
    }

    /// Takes a batch of what `worker` has above its capacity; whether there is more.
    fn evict_batch(&self, worker: WorkerId) -> bool {
        let workers = self.workers.read();
        let Some(slot) = workers.slot(worker) else {
            return false;
        };
        let quota = workers.quota(slot);
        let turn = quota.evicting.lock();
        self.evict(&workers, slot, EVICTION_BATCH);
        drop(turn);
        // After that: an insert that has found the lock taken counts on this look.
        quota.excess() > 0
    }

    /// Forgets what `worker` holds, as after its restart; its capacity stays. Takes the same time
    /// whatever it holds: its share ends, and what that leaves is swept by later inserts.
    pub fn purge_worker(&self, worker: WorkerId) {
        self.workers.write().purge(worker);
    }

    /// Forgets `worker`, as fast as `purge_worker`.
    pub fn remove_worker(&self, worker: WorkerId) {
        self.workers.write().close(worker);
    }

    /// Blocks that the tree believes `worker` to hold.
    pub fn held_by(&self, worker: WorkerId) -> u64 {
        let workers = self.workers.read();
        workers.slot(worker).map_or(0, |slot| workers.quota(slot).used())
    }

    /// Up to when `worker` used the older half of its share, going by the number of inserts.
    pub fn middle(&self, worker: WorkerId) -> Option<Stamp> {
        let workers = self.workers.read();
        let (_, oldest, _) = workers.quota(workers.slot(worker)?).oldest_shard()?;
        let now = Stamp(self.clock.load(Ordering::Relaxed));
        Some(Stamp(oldest.0.wrapping_add(now.since(oldest) / 2)))
    }

    pub fn stats(&self) -> TreeStats {
        let workers = self.workers.read();
        let held = workers.quotas.iter().filter(|quota| quota.worker.is_some());
        let mut stats =
            TreeStats { held: held.map(workers::Quota::used).sum(), ..TreeStats::default() };
        for shard in &self.shards {
            shard.lock().add_to(&mut stats);
        }
        stats
    }

    fn tick(&self) -> Stamp {
        Stamp(self.clock.fetch_add(1, Ordering::Relaxed))
    }

    /// The worker table and the slot of `worker`, which gets one on first sight.
    fn registered(&self, worker: WorkerId) -> (RwLockReadGuard<'_, Workers>, u32) {
        loop {
            let workers = self.workers.read();
            if let Some(slot) = workers.slot(worker) {
                return (workers, slot);
            }
            drop(workers);
            self.workers.write().register(worker);
        }
    }

    /// Brings a worker back to its capacity, oldest blocks of all shards first, by at most `limit`
    /// blocks; returns how many. The caller holds the quota's `evicting`, or two would evict for the same
    /// excess.
    fn evict(&self, workers: &Workers, slot: u32, limit: u64) -> u64 {
        let quota = workers.quota(slot);
        let mut taken = 0;
        loop {
            let excess = quota.excess().min(limit.saturating_sub(taken));
            let Some((index, _, next)) = quota.oldest_shard().filter(|_| excess > 0) else {
                return taken;
            };
            let mut shard = self.shards[index].lock();
            shard.sync(workers);
            let freed = shard.evict(slot, excess, next);
            quota.used.fetch_sub(freed, Ordering::Relaxed);
            quota.set_oldest(index, shard.oldest(slot));
            taken += freed;
        }
    }
}

fn shard_of(blocks: &[u64]) -> Option<usize> {
    // The upper half: the index within a shard uses both ends of the hash.
    blocks.first().map(|first| (first >> 32) as usize % SHARDS)
}
