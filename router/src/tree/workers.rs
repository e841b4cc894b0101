//! The workers' shares of the tree: how much each may hold, holds, and where its oldest part lies.

use rustc_hash::FxHashMap;

use super::{SHARDS, stamp::Stamp};
use crate::{
    names::WorkerId,
    sync::{AtomicU64, Mutex, Ordering},
};

/// One worker's share of the tree. A purge gives it a new one and leaves the old one to be swept.
#[derive(Debug)]
pub(super) struct Quota {
    /// `None` once purged.
    pub(super) worker: Option<WorkerId>,
    capacity: AtomicU64,
    /// Blocks held over all shards. Changed under the shards' locks only, read by any thread.
    pub(super) used: AtomicU64,
    /// When the least recently used hold in each shard was used, `NEVER` where there is none. So
    /// that eviction finds the oldest of all shards without locking them.
    oldest: [AtomicU64; SHARDS],
    /// Held by who brings the worker back to its capacity; taken before any shard's lock.
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

    pub(super) fn set_oldest(&self, shard: usize, stamp: Option<Stamp>) {
        let stamp = stamp.map_or(NEVER, |stamp| u64::from(stamp.0));
        self.oldest[shard].store(stamp, Ordering::Relaxed);
    }

    pub(super) fn oldest(&self, shard: usize) -> Option<Stamp> {
        let stamp = self.oldest[shard].load(Ordering::Relaxed);
        (stamp != NEVER).then_some(Stamp(stamp as u32))
    }

    /// The shard that holds the least recently used part and the stamp of that part, and the stamp
    /// of the next shard's: what is older may be evicted from the first without looking at the
    /// others again.
    pub(super) fn oldest_shard(&self) -> Option<(usize, Stamp, Option<Stamp>)> {
        let (mut first, mut next) = (None, None);
        for shard in 0..SHARDS {
            let Some(stamp) = self.oldest(shard) else {
                continue;
            };
            match first {
                Some((_, oldest)) if !stamp.is_before(oldest) => {
                    next = Some(next.map_or(stamp, |next: Stamp| next.earlier(stamp)));
                }
                _ => {
                    next = first.map(|(_, oldest)| oldest);
                    first = Some((shard, stamp));
                }
            }
        }
        first.map(|(shard, oldest)| (shard, oldest, next))
    }
}

/// All shares. Their numbers, the slots, are small and used again, so that shards can keep one list
/// per slot in a plain array however many workers come and go.
#[derive(Debug)]
pub(super) struct Workers {
    slots: FxHashMap<WorkerId, u32>,
    pub(super) quotas: Vec<Quota>,
    /// Grows with each change of the set, so that a shard sees at a glance that it is behind.
    pub(super) epoch: u64,
    /// Blocks that a worker may hold that has not told its capacity.
    default_capacity: u64,
}

impl Workers {
    pub(super) fn new(default_capacity: u64) -> Self {
        Self { slots: FxHashMap::default(), quotas: Vec::new(), epoch: 0, default_capacity }
    }

    pub(super) fn slot(&self, worker: WorkerId) -> Option<u32> {
        self.slots.get(&worker).copied()
    }

    pub(super) fn quota(&self, slot: u32) -> &Quota {
        &self.quotas[slot as usize]
    }

    /// Gives `worker` a share if it has none.
    pub(super) fn register(&mut self, worker: WorkerId) {
        if self.slot(worker).is_none() {
            self.open(worker, self.default_capacity);
        }
    }

    fn open(&mut self, worker: WorkerId, capacity: u64) {
        self.epoch += 1;
        let quota = Quota::new(worker, capacity);
        // What a purged worker has left is gone when its blocks are.
        let swept = |quota: &Quota| quota.worker.is_none() && quota.used() == 0;
        let slot = if let Some(slot) = self.quotas.iter().position(swept) {
            self.quotas[slot] = quota;
            slot
        } else {
            self.quotas.push(quota);
            self.quotas.len() - 1
        };
        self.slots.insert(worker, u32::try_from(slot).expect("fewer than 2^32 workers"));
    }

    /// Ends the share of `worker`, however much it holds, and opens an empty one.
    pub(super) fn purge(&mut self, worker: WorkerId) {
        if let Some(capacity) = self.close(worker) {
            self.open(worker, capacity);
        }
    }

    /// Ends the share of `worker`; returns the capacity that it had.
    pub(super) fn close(&mut self, worker: WorkerId) -> Option<u64> {
        let slot = self.slots.remove(&worker)?;
        self.epoch += 1;
        let quota = &mut self.quotas[slot as usize];
        quota.worker = None;
        Some(quota.capacity())
    }
}
