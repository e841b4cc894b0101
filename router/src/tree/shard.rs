//! One shard: a path-compressed radix tree over block hashes.
//!
//! A block's hash covers all blocks before it, which keeps the tree plain. One table from hash to
//! node replaces a map of children in every node, and whether a whole run of blocks matches is told
//! by its last hash. All holders of a node hold its whole run, and hold all of its ancestors.

use super::{
    holds::{Hold, Lru},
    nodes::Nodes,
    slab::{NIL, Slab},
    stamp::Stamp,
    workers::Workers,
};
use crate::{names::WorkerId, sync::Ordering::Relaxed};

/// Holds of purged workers freed by each insert: more than it makes, so leftovers vanish with the
/// traffic and no request pays for a sweep.
const SWEEP: usize = 16;

/// One slot as the shard knows it.
#[derive(Debug)]
struct Slot {
    /// Whether a worker has it; otherwise its holds are leftovers.
    alive: bool,
    holds: Lru,
    /// The last lookup that reported the worker.
    reported: u64,
}

/// Where the descent along a key ended.
struct Match {
    /// The deepest node that shares blocks with the key.
    node: u32,
    /// Blocks of the key found.
    depth: usize,
    /// Blocks of `node` beyond those.
    beyond: usize,
}

/// What an insert found.
pub(super) struct Inserted {
    /// Leading blocks that the worker had, and when the last of them was used.
    pub(super) held: u64,
    pub(super) last_used: Option<Stamp>,
}

#[derive(Debug)]
pub(super) struct Shard {
    nodes: Nodes,
    holds: Slab<Hold>,
    slots: Vec<Slot>,
    /// Slots without a worker that still have holds here.
    leftovers: Vec<u32>,
    epoch: u64,
    lookups: u64,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self {
            nodes: Nodes::new(),
            holds: Slab::new(),
            slots: Vec::new(),
            leftovers: Vec::new(),
            epoch: 0,
            lookups: 0,
        }
    }

    /// Learns which slots have got or lost their worker since the last call.
    pub(super) fn sync(&mut self, workers: &Workers) {
        if self.epoch == workers.epoch {
            return;
        }
        self.epoch = workers.epoch;
        self.leftovers.clear();
        let new = || Slot { alive: true, holds: Lru::EMPTY, reported: 0 };
        self.slots.resize_with(workers.quotas.len(), new);
        for (index, (slot, quota)) in self.slots.iter_mut().zip(&workers.quotas).enumerate() {
            slot.alive = quota.worker.is_some();
            if !slot.alive && slot.holds.oldest() != NIL {
                self.leftovers.push(index as u32);
            }
        }
    }

    /// Appends each worker that holds a prefix of `key`, with the longest one's length.
    pub(super) fn lookup(
        &mut self,
        key: &[u64],
        workers: &Workers,
        out: &mut Vec<(WorkerId, u32)>,
    ) {
        self.lookups += 1;
        let Match { node: mut at, mut depth, mut beyond } = self.descend(key);
        while at != NIL {
            let mut id = self.nodes.holders(at);
            while id != NIL {
                let hold = &self.holds[id];
                let slot = &mut self.slots[hold.slot as usize];
                if slot.alive && slot.reported != self.lookups {
                    slot.reported = self.lookups;
                    let worker = workers.quota(hold.slot).worker;
                    out.extend(worker.map(|worker| (worker, depth as u32)));
                }
                id = hold.sibling;
            }
            depth -= self.nodes.length(at) - beyond;
            beyond = 0;
            at = self.nodes.parent(at);
        }
    }

    /// Makes `slot` a holder of all of `key`, as its most recently used part.
    pub(super) fn insert(
        &mut self,
        key: &[u64],
        slot: u32,
        stamp: Stamp,
        workers: &Workers,
    ) -> Inserted {
        self.sweep(workers);
        let Match { node: mut at, depth, beyond } = self.descend(key);
        if beyond > 0 {
            at = self.split(at, beyond);
        }
        if depth < key.len() {
            at = self.nodes.add(at, &key[depth..]);
        }
        let (mut held, mut last_used) = (key.len() as u64, None);
        while at != NIL {
            match self.hold_of(at, slot) {
                NIL => {
                    self.hold(at, slot, stamp, NIL);
                    held -= self.nodes.length(at) as u64;
                }
                id => {
                    last_used = last_used.or(Some(self.holds[id].stamp));
                    let list = &mut self.slots[slot as usize].holds;
                    list.unlink(&mut self.holds, id);
                    list.link(&mut self.holds, id, NIL);
                    self.holds[id].stamp = stamp;
                }
            }
            at = self.nodes.parent(at);
        }
        Inserted { held, last_used }
    }

    /// Takes from `slot` what it holds of `key` beyond the first `kept` blocks and has not used since
    /// `stamp`, when it got it; returns how many blocks.
    pub(super) fn retract(&mut self, key: &[u64], slot: u32, stamp: Stamp, kept: u64) -> u64 {
        let Match { node: mut at, depth, beyond } = self.descend(key);
        let mut end = (depth + beyond) as u64;
        let mut freed = 0;
        // From the end: what a later request holds further down, it holds here as well, and it has
        // renewed it, as it has all before.
        while at != NIL {
            let (id, length) = (self.hold_of(at, slot), self.nodes.length(at) as u64);
            if end < kept + length {
                break;
            }
            end -= length;
            at = self.nodes.parent(at);
            if id != NIL {
                if self.holds[id].stamp != stamp {
                    break;
                }
                self.release(id);
                freed += length;
            }
        }
        freed
    }

    /// Takes the least recently used blocks from `slot`: `wanted` of them, fewer if the rest was
    /// used after `limit`, more if that saves splitting a node that others hold, too.
    pub(super) fn evict(&mut self, slot: u32, wanted: u64, limit: Option<Stamp>) -> u64 {
        let mut freed = 0;
        while freed < wanted {
            let id = self.slots[slot as usize].holds.oldest();
            if id == NIL || limit.is_some_and(|limit| limit.is_before(self.holds[id].stamp)) {
                break;
            }
            let node = self.holds[id].node;
            let length = self.nodes.length(node) as u64;
            let excess = wanted - freed;
            // The oldest hold is a leaf of the worker's share: with no other holder it is a leaf
            // of the tree and can be cut anywhere, from the end as a paged cache does.
            let alone = self.nodes.holders(node) == id && self.holds[id].sibling == NIL;
            if length > excess && alone {
                self.nodes.truncate(node, (length - excess) as usize);
                freed += excess;
            } else {
                self.release(id);
                freed += length;
            }
        }
        freed
    }

    /// When the least recently used hold of `slot` was used.
    pub(super) fn oldest(&self, slot: u32) -> Option<Stamp> {
        match self.slots[slot as usize].holds.oldest() {
            NIL => None,
            id => Some(self.holds[id].stamp),
        }
    }

    pub(super) fn add_to(&self, stats: &mut super::TreeStats) {
        stats.blocks += self.nodes.blocks();
        stats.nodes += self.nodes.len() as u64;
        stats.holds += self.holds.len() as u64;
        stats.bytes += (self.nodes.bytes() + self.holds.bytes()) as u64;
    }

    fn descend(&self, key: &[u64]) -> Match {
        let mut found = Match { node: NIL, depth: 0, beyond: 0 };
        while found.beyond == 0 && found.depth < key.len() {
            let Some(child) = self.nodes.child(found.node, key[found.depth]) else {
                break;
            };
            let common = self.nodes.common_prefix(child, &key[found.depth..]);
            found.depth += common;
            found.beyond = self.nodes.length(child) - common;
            found.node = child;
        }
        found
    }

    /// Splits a node; both parts have its holders, in the same order of use.
    fn split(&mut self, lower: u32, beyond: usize) -> u32 {
        let upper = self.nodes.split(lower, beyond);
        let mut id = self.nodes.holders(lower);
        while id != NIL {
            let Hold { slot, stamp, sibling, .. } = self.holds[id];
            self.hold(upper, slot, stamp, id);
            id = sibling;
        }
        upper
    }

    /// The hold of `slot` on a node, or `NIL`.
    fn hold_of(&self, node: u32, slot: u32) -> u32 {
        let mut id = self.nodes.holders(node);
        while id != NIL && self.holds[id].slot != slot {
            id = self.holds[id].sibling;
        }
        id
    }

    /// Adds a hold, next to `older` in the order of use.
    fn hold(&mut self, node: u32, slot: u32, stamp: Stamp, older: u32) {
        let mut hold = Hold::new(node, slot, stamp);
        hold.sibling = self.nodes.holders(node);
        let id = self.holds.insert(hold);
        self.nodes.set_holders(node, id);
        self.slots[slot as usize].holds.link(&mut self.holds, id, older);
    }

    /// Ends a hold, and with the last one its node.
    fn release(&mut self, id: u32) {
        let Hold { node, slot, sibling, .. } = self.holds[id];
        self.slots[slot as usize].holds.unlink(&mut self.holds, id);
        if self.nodes.holders(node) == id {
            self.nodes.set_holders(node, sibling);
        } else {
            let mut before = self.nodes.holders(node);
            while self.holds[before].sibling != id {
                before = self.holds[before].sibling;
            }
            self.holds[before].sibling = sibling;
        }
        self.holds.remove(id);
        if self.nodes.holders(node) == NIL {
            // No child is left: its holders would hold this node as well.
            self.nodes.remove(node);
        }
    }

    /// Frees some of what purged workers have left here.
    fn sweep(&mut self, workers: &Workers) {
        for _ in 0..SWEEP {
            let Some(slot) = self.leftovers.last().copied() else {
                return;
            };
            match self.slots[slot as usize].holds.oldest() {
                NIL => drop(self.leftovers.pop()),
                id => {
                    let length = self.nodes.length(self.holds[id].node) as u64;
                    self.release(id);
                    workers.quota(slot).used.fetch_sub(length, Relaxed);
                }
            }
        }
    }
}
