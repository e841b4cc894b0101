//! The approximate prefix caches of all workers, in one radix tree over block hashes.
//!
//! The router asks no worker for its cache. The prompt of each request will be in the cache of its worker, so the
//! router inserts it when it chooses the worker. The capacity of the worker's KV cache bounds the blocks that it owns
//! in the tree: an insertion evicts the least recently used leaves, which the worker would evict as well.
//!
//! Each worker is a tenant of the tree, and owns the nodes that it holds. An operation takes the shared lock of the
//! tenant table and then the lock of one shard, never of two: so there is no lock order to keep. No lock is held
//! across an await.

mod lru_tick;
mod nodes;
mod ownership;
mod shard;
mod slab;
mod tenants;

use crate::{
    key::RouteKey,
    names::WorkerId,
    sync::{AtomicU32, Mutex, Ordering, RwLock, RwLockReadGuard},
};
pub use lru_tick::LruTick;
use shard::{Inserted, Shard};
use tenants::Tenants;

/// Number of shards. The first block of a prompt selects its shard.
const SHARDS: usize = 32;

/// Blocks that are evicted while locks are held: a tenth of a millisecond. Choices of workers go on between two
/// batches, also when the capacity of a worker shrinks by millions of blocks.
const EVICTION_BATCH: u64 = 1 << 10;

/// The tree. All methods may be called from any thread.
#[derive(Debug)]
pub struct PrefixTree {
    shards: [Mutex<Shard>; SHARDS],
    tenants: RwLock<Tenants>,
    /// The LRU clock: the number of insertions.
    clock: AtomicU32,
}

/// The result of an insertion. It is needed to take the insertion back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InsertReceipt {
    /// Leading blocks of the key that the worker owned before.
    pub held: u32,
    /// Previous use of the last of these blocks.
    pub last_used: Option<LruTick>,
    /// Tick of this insertion.
    pub tick: LruTick,
}

/// The size of the tree, summed over its shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeStats {
    /// Distinct blocks.
    pub blocks: u64,
    /// Blocks, counted once for each worker that owns them.
    pub held: u64,
    pub nodes: u64,
    /// Pairs of tenant and node, including leftovers of purged tenants.
    pub ownerships: u64,
    pub bytes: u64,
}

impl PrefixTree {
    /// An empty tree. A worker may own `default_capacity` blocks until `set_capacity` changes that.
    pub fn new(default_capacity: u64) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::new(Shard::new())),
            tenants: RwLock::new(Tenants::new(default_capacity)),
            clock: AtomicU32::new(0),
        }
    }

    /// Fills `out` with the workers that own a prefix of `key`, each with the number of blocks of its longest prefix.
    pub fn lookup(&self, key: &RouteKey, out: &mut Vec<(WorkerId, u32)>) {
        out.clear();
        let Some(index) = shard_of(&key.blocks) else {
            return;
        };
        let tenants = self.tenants.read();
        let mut shard = self.shards[index].lock();
        shard.sync(&tenants);
        shard.lookup(&key.blocks, &tenants, out);
    }

    /// Makes `worker` an owner of `key`, or of as many leading blocks as its capacity allows.
    pub fn insert(&self, key: &RouteKey, worker: WorkerId) -> InsertReceipt {
        let Some(index) = shard_of(&key.blocks) else {
            return InsertReceipt { tick: self.next_tick(), ..InsertReceipt::default() };
        };
        let (tenants, tenant) = self.registered(worker);
        let quota = tenants.quota(tenant);
        let fitting = quota.capacity().min(key.blocks.len() as u64) as usize;
        if fitting == 0 {
            return InsertReceipt { tick: self.next_tick(), ..InsertReceipt::default() };
        }
        let mut shard = self.shards[index].lock();
        shard.sync(&tenants);
        // Taken under the lock, so that the LRU lists of a shard are in the order of the clock.
        let tick = self.next_tick();
        let Inserted { held, last_used } =
            shard.insert(&key.blocks[..fitting], tenant, tick, &tenants);
        // In this order: another thread that sees the excess must find the oldest blocks.
        quota.set_oldest(index, shard.oldest(tenant));
        let added = fitting as u64 - held;
        // A prompt that was there writes nothing: the count stays in the caches of the other threads.
        if added > 0 {
            quota.used.fetch_add(added, Ordering::Relaxed);
        }
        drop(shard); // the oldest blocks may be in another shard
        self.evict_excess(&tenants, tenant, fitting as u64 + EVICTION_BATCH);
        InsertReceipt { held: held as u32, last_used, tick }
    }

    /// Takes back the insertion of `key` that returned `receipt`: removes the blocks that the worker did not own
    /// before, except those that another request has used since.
    pub fn retract(&self, key: &RouteKey, worker: WorkerId, receipt: &InsertReceipt) {
        let (Some(index), tenants) = (shard_of(&key.blocks), self.tenants.read()) else {
            return;
        };
        let Some(tenant) = tenants.tenant(worker) else {
            return;
        };
        let quota = tenants.quota(tenant);
        let mut shard = self.shards[index].lock();
        shard.sync(&tenants);
        let freed = shard.retract(&key.blocks, tenant, receipt.tick, u64::from(receipt.held));
        quota.free(index, freed, shard.oldest(tenant));
    }

    /// Evicts all blocks of `worker` that it has not used after `tick`. Returns their number.
    pub fn evict_unused(&self, worker: WorkerId, tick: LruTick) -> u64 {
        let mut freed = 0;
        for index in 0..SHARDS {
            while let Some(batch) = self.evict_unused_from(index, worker, tick) {
                freed += batch;
            }
        }
        freed
    }

    /// Sets the capacity of `worker` in blocks, and evicts the excess at once.
    pub fn set_capacity(&self, worker: WorkerId, blocks: u64) {
        let (tenants, tenant) = self.registered(worker);
        tenants.quota(tenant).set_capacity(blocks);
        drop(tenants);
        while self.evict_batch(worker) {}
    }

    /// Empties the share of `worker`, as after its restart. Its capacity stays. Takes constant time: the worker
    /// becomes a new tenant, and later insertions sweep the nodes of the old one.
    pub fn purge_worker(&self, worker: WorkerId) {
        self.tenants.write().purge(worker);
    }

    /// Removes `worker`, in constant time like `purge_worker`.
    pub fn remove_worker(&self, worker: WorkerId) {
        self.tenants.write().close(worker);
    }

    /// Number of blocks that `worker` owns.
    pub fn owned_by(&self, worker: WorkerId) -> u64 {
        let tenants = self.tenants.read();
        tenants.tenant(worker).map_or(0, |tenant| tenants.quota(tenant).used())
    }

    /// The tick in the middle between the oldest use of `worker` and now.
    pub fn middle(&self, worker: WorkerId) -> Option<LruTick> {
        let tenants = self.tenants.read();
        let (_, oldest, _) = tenants.quota(tenants.tenant(worker)?).oldest_shard()?;
        let now = LruTick(self.clock.load(Ordering::Relaxed));
        Some(LruTick(oldest.0.wrapping_add(now.since(oldest) / 2)))
    }

    pub fn stats(&self) -> TreeStats {
        let tenants = self.tenants.read();
        let held = tenants.quotas.iter().filter(|quota| quota.worker.is_some());
        let mut stats =
            TreeStats { held: held.map(tenants::Quota::used).sum(), ..TreeStats::default() };
        for shard in &self.shards {
            shard.lock().add_to(&mut stats);
        }
        stats
    }

    fn next_tick(&self) -> LruTick {
        LruTick(self.clock.fetch_add(1, Ordering::Relaxed))
    }

    /// The tenant table, and the tenant of `worker`, which is registered on first use.
    fn registered(&self, worker: WorkerId) -> (RwLockReadGuard<'_, Tenants>, u32) {
        loop {
            let tenants = self.tenants.read();
            if let Some(tenant) = tenants.tenant(worker) {
                return (tenants, tenant);
            }
            drop(tenants);
            self.tenants.write().register(worker);
        }
    }

    /// Evicts the excess of a tenant, at most about `limit` blocks, unless another thread is evicting: that thread
    /// checks for excess again after it has released the lock, so no excess is left behind.
    fn evict_excess(&self, tenants: &Tenants, tenant: u32, mut limit: u64) {
        let quota = tenants.quota(tenant);
        while quota.excess() > 0
            && let Some(evicting) = quota.evicting.try_lock()
        {
            let freed = self.evict(tenants, tenant, limit);
            drop(evicting);
            if freed == 0 {
                return; // the limit is reached, or the worker was purged meanwhile
            }
            limit = limit.saturating_sub(freed);
        }
    }

    /// Evicts one batch of the excess of `worker`. Returns whether there is more.
    fn evict_batch(&self, worker: WorkerId) -> bool {
        let tenants = self.tenants.read();
        let Some(tenant) = tenants.tenant(worker) else {
            return false;
        };
        let quota = tenants.quota(tenant);
        let evicting = quota.evicting.lock();
        self.evict(&tenants, tenant, EVICTION_BATCH);
        drop(evicting);
        // Checked after the lock is released: an insertion that found the lock taken relies on this check.
        quota.excess() > 0
    }

    /// Evicts the excess of a tenant, at most `limit` blocks, oldest blocks of all shards first. Returns their
    /// number. The caller holds the quota's `evicting` lock, so that two threads do not evict for the same excess.
    fn evict(&self, tenants: &Tenants, tenant: u32, limit: u64) -> u64 {
        let quota = tenants.quota(tenant);
        let mut taken = 0;
        loop {
            let excess = quota.excess().min(limit.saturating_sub(taken));
            let Some((index, _, next)) = quota.oldest_shard().filter(|_| excess > 0) else {
                return taken;
            };
            let mut shard = self.shards[index].lock();
            shard.sync(tenants);
            let freed = shard.evict(tenant, excess, next);
            quota.free(index, freed, shard.oldest(tenant));
            taken += freed;
        }
    }

    /// Evicts one batch from one shard. `None` if nothing is left.
    fn evict_unused_from(&self, index: usize, worker: WorkerId, tick: LruTick) -> Option<u64> {
        let tenants = self.tenants.read();
        let tenant = tenants.tenant(worker)?;
        let quota = tenants.quota(tenant);
        quota.oldest(index).filter(|oldest| !tick.is_before(*oldest))?;
        let mut shard = self.shards[index].lock();
        shard.sync(&tenants);
        let freed = shard.evict(tenant, EVICTION_BATCH, Some(tick));
        quota.free(index, freed, shard.oldest(tenant));
        Some(freed)
    }
}

fn shard_of(blocks: &[u64]) -> Option<usize> {
    // The upper half of the hash: the table of a shard uses the lower bits.
    blocks.first().map(|first| (first >> 32) as usize % SHARDS)
}

#[cfg(test)]
mod tests {
    use super::{SHARDS, shard_of};

    #[test]
    fn prompts_are_spread_over_all_shards() {
        let mut sizes = [0; SHARDS];
        for number in 0..100 * SHARDS as u64 {
            let first = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sizes[shard_of(&[first]).expect("a block")] += 1;
        }
        assert!(sizes.iter().all(|size| (50..200).contains(size)), "{sizes:?}");
        assert_eq!(shard_of(&[]), None);
    }
}
