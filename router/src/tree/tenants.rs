//! The tenants of the tree: one for each worker, with its capacity, its size, and its oldest ownership in each shard.

use rustc_hash::FxHashMap;

use super::{SHARDS, lru_tick::LruTick};
use crate::{
    names::WorkerId,
    sync::{AtomicU64, Mutex, Ordering},
};

/// The quota of a tenant. A purge gives the worker a new tenant; later insertions sweep the old one.
#[derive(Debug)]
pub(super) struct Quota {
    /// `None` once purged.
    pub(super) worker: Option<WorkerId>,
    capacity: AtomicU64,
    /// Blocks owned in all shards. Written only under the lock of a shard, read by any thread.
    pub(super) used: AtomicU64,
    /// Tick of the least recently used ownership in each shard; `NEVER` without one. Eviction finds the oldest
    /// shard by it, without a lock.
    oldest: [AtomicU64; SHARDS],
    /// Held by the thread that evicts the excess. Taken before the lock of a shard.
    pub(super) evicting: Mutex<()>,
}

const NEVER: u64 = u64::MAX;

impl Quota {
    fn new(worker: WorkerId, capacity: u64) -> Self {
        Self {
            worker: Some(worker),
            capacity: AtomicU64::new(capacity),
            used: AtomicU64::new(0),
            oldest: std::array::from_fn(|_| AtomicU64::new(NEVER)),
            evicting: Mutex::new(()),
        }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    pub(super) fn set_capacity(&self, blocks: u64) {
        self.capacity.store(blocks, Ordering::Relaxed);
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn excess(&self) -> u64 {
        self.used().saturating_sub(self.capacity())
    }

    /// Counts blocks that were freed in `shard`, whose oldest ownership is now `oldest`.
    pub(super) fn free(&self, shard: usize, blocks: u64, oldest: Option<LruTick>) {
        self.used.fetch_sub(blocks, Ordering::Relaxed);
        self.set_oldest(shard, oldest);
    }

    pub(super) fn set_oldest(&self, shard: usize, tick: Option<LruTick>) {
        let tick = tick.map_or(NEVER, |tick| u64::from(tick.0));
        // Usually it is the same, and other threads keep it in their caches.
        if self.oldest[shard].load(Ordering::Relaxed) != tick {
            self.oldest[shard].store(tick, Ordering::Relaxed);
        }
    }

    pub(super) fn oldest(&self, shard: usize) -> Option<LruTick> {
        let tick = self.oldest[shard].load(Ordering::Relaxed);
        (tick != NEVER).then_some(LruTick(tick as u32))
    }

    /// Returns the shard with the oldest ownership, its tick, and the oldest tick of the other shards. Everything
    /// older than the latter may be evicted from the first shard without another look at the others.
    pub(super) fn oldest_shard(&self) -> Option<(usize, LruTick, Option<LruTick>)> {
        let (mut first, mut next) = (None, None);
        for shard in 0..SHARDS {
            let Some(tick) = self.oldest(shard) else {
                continue;
            };
            match first {
                Some((_, oldest)) if !tick.is_before(oldest) => {
                    next = Some(next.map_or(tick, |next: LruTick| next.earlier(tick)));
                }
                _ => {
                    next = first.map(|(_, oldest)| oldest);
                    first = Some((shard, tick));
                }
            }
        }
        first.map(|(shard, oldest)| (shard, oldest, next))
    }
}

/// All tenants. Their numbers are small and reused, so a shard keeps one list for each number in an array.
#[derive(Debug)]
pub(super) struct Tenants {
    numbers: FxHashMap<WorkerId, u32>,
    pub(super) quotas: Vec<Quota>,
    /// Incremented by each change of the table. A shard compares it with its own epoch.
    pub(super) epoch: u64,
    /// Capacity in blocks of a worker that has not reported its own.
    default_capacity: u64,
}

impl Tenants {
    pub(super) fn new(default_capacity: u64) -> Self {
        Self { numbers: FxHashMap::default(), quotas: Vec::new(), epoch: 0, default_capacity }
    }

    pub(super) fn tenant(&self, worker: WorkerId) -> Option<u32> {
        self.numbers.get(&worker).copied()
    }

    pub(super) fn quota(&self, tenant: u32) -> &Quota {
        &self.quotas[tenant as usize]
    }

    /// Makes `worker` a tenant if it is none.
    pub(super) fn register(&mut self, worker: WorkerId) {
        if self.tenant(worker).is_none() {
            self.open(worker, self.default_capacity);
        }
    }

    fn open(&mut self, worker: WorkerId, capacity: u64) {
        self.epoch += 1;
        let quota = Quota::new(worker, capacity);
        // A purged tenant without blocks has been swept: its number is free.
        let swept = |quota: &Quota| quota.worker.is_none() && quota.used() == 0;
        let tenant = if let Some(tenant) = self.quotas.iter().position(swept) {
            self.quotas[tenant] = quota;
            tenant
        } else {
            self.quotas.push(quota);
            self.quotas.len() - 1
        };
        self.numbers.insert(worker, u32::try_from(tenant).expect("fewer than 2^32 workers"));
    }

    /// Ends the tenancy of `worker`, in constant time, and makes it a new tenant.
    pub(super) fn purge(&mut self, worker: WorkerId) {
        if let Some(capacity) = self.close(worker) {
            self.open(worker, capacity);
        }
    }

    /// Ends the tenancy of `worker`. Returns its capacity.
    pub(super) fn close(&mut self, worker: WorkerId) -> Option<u64> {
        let tenant = self.numbers.remove(&worker)?;
        self.epoch += 1;
        let quota = &mut self.quotas[tenant as usize];
        quota.worker = None;
        Some(quota.capacity())
    }
}
