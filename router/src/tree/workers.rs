//! The workers' shares of the tree: how much each may hold, holds, and where its oldest part lies.

use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use super::SHARDS;
use crate::fleet::worker_id::WorkerId;

/// Four million tokens, for a worker that has not told its capacity: enough not to forget what a
/// real one keeps, little enough that a hundred such workers stay below a gigabyte.
pub(super) const DEFAULT_CAPACITY: u64 = 1 << 18;

/// One worker's quota.
#[derive(Debug)]
pub(super) struct Quota {
    pub(super) worker: WorkerId,
    /// Grows with each purge: holds of an older generation are void.
    pub(super) generation: u32,
    pub(super) capacity: u64,
    /// Blocks held over all shards. Changed under the shards' locks only, read by any thread.
    pub(super) used: AtomicU64,
    /// When the least recently used hold in each shard was used, `NEVER` where there is none. So
    /// that eviction finds the oldest of all shards without locking them.
    oldest: [AtomicU64; SHARDS],
}

pub(super) const NEVER: u64 = u64::MAX;

impl Quota {
    fn new(worker: WorkerId, generation: u32) -> Self {
        Self {
            worker,
            generation,
            capacity: DEFAULT_CAPACITY,
            used: AtomicU64::new(0),
            oldest: [const { AtomicU64::new(NEVER) }; SHARDS],
        }
    }

    pub(super) fn set_oldest(&self, shard: usize, stamp: u64) {
        self.oldest[shard].store(stamp, Ordering::Relaxed);
    }

    /// The shard that holds the least recently used part, and the stamp of the next shard's: what
    /// is older may be evicted from the first without looking at the others again.
    pub(super) fn oldest_shard(&self) -> Option<(usize, u64)> {
        let (mut first, mut next) = ((NEVER, 0), NEVER);
        for (shard, stamp) in self.oldest.iter().enumerate() {
            let stamp = stamp.load(Ordering::Relaxed);
            if stamp < first.0 {
                next = first.0;
                first = (stamp, shard);
            } else {
                next = next.min(stamp);
            }
        }
        (first.0 != NEVER).then_some((first.1, next))
    }

    pub(super) fn excess(&self) -> u64 {
        self.used.load(Ordering::Relaxed).saturating_sub(self.capacity)
    }
}

/// All shares, by slot. A slot is a small number that a later worker takes over, so that shards can
/// keep one list per slot in a plain array however many workers come and go.
#[derive(Debug, Default)]
pub(super) struct Workers {
    slots: FxHashMap<WorkerId, u32>,
    pub(super) quotas: Vec<Quota>,
    free: Vec<u32>,
    /// Grows with every change of a generation, so that a shard sees at a glance that it is behind.
    pub(super) epoch: u64,
}

impl Workers {
    pub(super) fn slot(&self, worker: WorkerId) -> Option<u32> {
        self.slots.get(&worker).copied()
    }

    pub(super) fn quota(&self, slot: u32) -> &Quota {
        &self.quotas[slot as usize]
    }

    /// The slot of `worker`, which gets one if it has none.
    pub(super) fn register(&mut self, worker: WorkerId) -> u32 {
        if let Some(slot) = self.slot(worker) {
            return slot;
        }
        self.epoch += 1;
        let slot = if let Some(slot) = self.free.pop() {
            let generation = self.quota(slot).generation;
            self.quotas[slot as usize] = Quota::new(worker, generation);
            slot
        } else {
            self.quotas.push(Quota::new(worker, 0));
            u32::try_from(self.quotas.len() - 1).expect("fewer than 2^32 workers")
        };
        self.slots.insert(worker, slot);
        slot
    }

    pub(super) fn set_capacity(&mut self, worker: WorkerId, blocks: u64) -> u32 {
        let slot = self.register(worker);
        self.quotas[slot as usize].capacity = blocks;
        slot
    }

    /// Voids all that `worker` holds, however much, by one number.
    pub(super) fn purge(&mut self, worker: WorkerId) {
        if let Some(slot) = self.slot(worker) {
            self.epoch += 1;
            let quota = &mut self.quotas[slot as usize];
            let (generation, capacity) = (quota.generation.wrapping_add(1), quota.capacity);
            *quota = Quota { capacity, ..Quota::new(worker, generation) };
        }
    }

    /// Purges `worker` and forgets it.
    pub(super) fn remove(&mut self, worker: WorkerId) {
        self.purge(worker);
        self.free.extend(self.slots.remove(&worker));
    }
}
