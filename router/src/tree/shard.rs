//! One shard: a path-compressed radix tree over block hashes.
//!
//! The hash of a block covers all blocks before it, which keeps the tree simple. One table from hash to node
//! replaces a map of children in each node, and the last hash of a run tells whether the whole run matches. All
//! owners of a node own its whole run and all its ancestors.

use super::{
    lru_tick::LruTick,
    nodes::Nodes,
    ownership::{Lru, Ownership},
    slab::{NIL, Slab},
    tenants::Tenants,
};
use crate::{names::WorkerId, sync::Ordering::Relaxed};

/// Ownerships of purged tenants that each insertion frees. An insertion makes fewer, so leftovers vanish with the
/// traffic and no request pays for a full sweep.
const SWEEP: usize = 16;

/// The state of one tenant in this shard.
#[derive(Debug)]
struct Tenant {
    /// Whether a worker is this tenant. Otherwise its ownerships are leftovers.
    alive: bool,
    ownerships: Lru,
    /// Number of the last look-up that reported the worker.
    reported: u64,
}

/// The end of a descent along a key.
struct Match {
    /// The deepest node that shares blocks with the key.
    node: u32,
    /// Number of blocks of the key that were found.
    depth: usize,
    /// Number of further blocks of `node`.
    beyond: usize,
}

/// The result of an insertion.
pub(super) struct Inserted {
    /// Leading blocks that the tenant owned before.
    pub(super) held: u64,
    /// Previous use of the last of them.
    pub(super) last_used: Option<LruTick>,
}

#[derive(Debug)]
pub(super) struct Shard {
    nodes: Nodes,
    ownerships: Slab<Ownership>,
    tenants: Vec<Tenant>,
    /// Tenants without a worker that still have ownerships here.
    leftovers: Vec<u32>,
    epoch: u64,
    lookups: u64,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self {
            nodes: Nodes::new(),
            ownerships: Slab::new(),
            tenants: Vec::new(),
            leftovers: Vec::new(),
            epoch: 0,
            lookups: 0,
        }
    }

    /// Updates the tenants after a change of the tenant table.
    pub(super) fn sync(&mut self, tenants: &Tenants) {
        if self.epoch == tenants.epoch {
            return;
        }
        self.epoch = tenants.epoch;
        self.leftovers.clear();
        let new = || Tenant { alive: true, ownerships: Lru::EMPTY, reported: 0 };
        self.tenants.resize_with(tenants.quotas.len(), new);
        for (index, (tenant, quota)) in self.tenants.iter_mut().zip(&tenants.quotas).enumerate() {
            tenant.alive = quota.worker.is_some();
            if !tenant.alive && tenant.ownerships.oldest() != NIL {
                self.leftovers.push(index as u32);
            }
        }
    }

    /// Appends each worker that owns a prefix of `key`, with the length of its longest prefix in blocks.
    pub(super) fn lookup(
        &mut self,
        key: &[u64],
        tenants: &Tenants,
        out: &mut Vec<(WorkerId, u32)>,
    ) {
        self.lookups += 1;
        let Match { node: mut at, mut depth, mut beyond } = self.descend(key);
        while at != NIL {
            let mut id = self.nodes.owners(at);
            while id != NIL {
                let ownership = &self.ownerships[id];
                let tenant = &mut self.tenants[ownership.tenant as usize];
                if tenant.alive && tenant.reported != self.lookups {
                    tenant.reported = self.lookups;
                    let worker = tenants.quota(ownership.tenant).worker;
                    out.extend(worker.map(|worker| (worker, depth as u32)));
                }
                id = ownership.sibling;
            }
            depth -= self.nodes.length(at) - beyond;
            beyond = 0;
            at = self.nodes.parent(at);
        }
    }

    /// Makes `tenant` an owner of all of `key`, as its most recently used part.
    pub(super) fn insert(
        &mut self,
        key: &[u64],
        tenant: u32,
        tick: LruTick,
        tenants: &Tenants,
    ) -> Inserted {
        self.sweep(tenants);
        let Match { node: mut at, depth, beyond } = self.descend(key);
        if beyond > 0 {
            at = self.split(at, beyond);
        }
        if depth < key.len() {
            at = self.nodes.add(at, &key[depth..]);
        }
        let (mut held, mut last_used) = (key.len() as u64, None);
        while at != NIL {
            match self.ownership_of(at, tenant) {
                NIL => {
                    self.add_ownership(at, tenant, tick, NIL);
                    held -= self.nodes.length(at) as u64;
                }
                id => {
                    last_used = last_used.or(Some(self.ownerships[id].tick));
                    let list = &mut self.tenants[tenant as usize].ownerships;
                    list.unlink(&mut self.ownerships, id);
                    list.link(&mut self.ownerships, id, NIL);
                    self.ownerships[id].tick = tick;
                }
            }
            at = self.nodes.parent(at);
        }
        Inserted { held, last_used }
    }

    /// Takes back an insertion at `tick`: removes the blocks of `key` after the first `kept` ones from `tenant`,
    /// except those used since. Returns their number.
    pub(super) fn retract(&mut self, key: &[u64], tenant: u32, tick: LruTick, kept: u64) -> u64 {
        let Match { node: mut at, depth, beyond } = self.descend(key);
        let mut end = (depth + beyond) as u64;
        let mut freed = 0;
        // From the end: a later request that owns a deeper node has renewed all nodes before it.
        while at != NIL {
            let (id, length) = (self.ownership_of(at, tenant), self.nodes.length(at) as u64);
            if end < kept + length {
                break;
            }
            end -= length;
            at = self.nodes.parent(at);
            if id != NIL {
                if self.ownerships[id].tick != tick {
                    break;
                }
                self.remove_ownership(id);
                freed += length;
            }
        }
        freed
    }

    /// Evicts the least recently used blocks of `tenant`. Returns their number: `wanted`, fewer if the rest was
    /// used after `limit`, more if that avoids the split of a node with other owners.
    pub(super) fn evict(&mut self, tenant: u32, wanted: u64, limit: Option<LruTick>) -> u64 {
        let mut freed = 0;
        while freed < wanted {
            let id = self.tenants[tenant as usize].ownerships.oldest();
            if id == NIL || limit.is_some_and(|limit| limit.is_before(self.ownerships[id].tick)) {
                break;
            }
            let node = self.ownerships[id].node;
            let length = self.nodes.length(node) as u64;
            let excess = wanted - freed;
            // The oldest ownership is a leaf of the tenant's part. Without another owner it is a leaf of the tree,
            // and can be cut anywhere from its end, as in a paged cache.
            let alone = self.nodes.owners(node) == id && self.ownerships[id].sibling == NIL;
            if length > excess && alone {
                self.nodes.truncate(node, (length - excess) as usize);
                freed += excess;
            } else {
                self.remove_ownership(id);
                freed += length;
            }
        }
        freed
    }

    /// Tick of the least recently used ownership of `tenant`.
    pub(super) fn oldest(&self, tenant: u32) -> Option<LruTick> {
        match self.tenants[tenant as usize].ownerships.oldest() {
            NIL => None,
            id => Some(self.ownerships[id].tick),
        }
    }

    pub(super) fn add_to(&self, stats: &mut super::TreeStats) {
        stats.blocks += self.nodes.blocks();
        stats.nodes += self.nodes.len() as u64;
        stats.ownerships += self.ownerships.len() as u64;
        stats.bytes += (self.nodes.bytes() + self.ownerships.bytes()) as u64;
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

    /// Splits a node. Both parts have its owners, at the same places in their LRU lists.
    fn split(&mut self, lower: u32, beyond: usize) -> u32 {
        let upper = self.nodes.split(lower, beyond);
        let mut id = self.nodes.owners(lower);
        while id != NIL {
            let Ownership { tenant, tick, sibling, .. } = self.ownerships[id];
            self.add_ownership(upper, tenant, tick, id);
            id = sibling;
        }
        upper
    }

    /// The ownership of a node by `tenant`, or `NIL`.
    fn ownership_of(&self, node: u32, tenant: u32) -> u32 {
        let mut id = self.nodes.owners(node);
        while id != NIL && self.ownerships[id].tenant != tenant {
            id = self.ownerships[id].sibling;
        }
        id
    }

    /// Adds an ownership, next to `older` in the LRU list.
    fn add_ownership(&mut self, node: u32, tenant: u32, tick: LruTick, older: u32) {
        let mut ownership = Ownership::new(node, tenant, tick);
        ownership.sibling = self.nodes.owners(node);
        let id = self.ownerships.insert(ownership);
        self.nodes.set_owners(node, id);
        self.tenants[tenant as usize].ownerships.link(&mut self.ownerships, id, older);
    }

    /// Removes an ownership, and with the last one its node.
    fn remove_ownership(&mut self, id: u32) {
        let Ownership { node, tenant, sibling, .. } = self.ownerships[id];
        self.tenants[tenant as usize].ownerships.unlink(&mut self.ownerships, id);
        if self.nodes.owners(node) == id {
            self.nodes.set_owners(node, sibling);
        } else {
            let mut before = self.nodes.owners(node);
            while self.ownerships[before].sibling != id {
                before = self.ownerships[before].sibling;
            }
            self.ownerships[before].sibling = sibling;
        }
        self.ownerships.remove(id);
        if self.nodes.owners(node) == NIL {
            // The node has no child: owners of a child would own this node as well.
            self.nodes.remove(node);
        }
    }

    /// Frees some leftovers of purged tenants.
    fn sweep(&mut self, tenants: &Tenants) {
        for _ in 0..SWEEP {
            let Some(tenant) = self.leftovers.last().copied() else {
                return;
            };
            match self.tenants[tenant as usize].ownerships.oldest() {
                NIL => drop(self.leftovers.pop()),
                id => {
                    let length = self.nodes.length(self.ownerships[id].node) as u64;
                    self.remove_ownership(id);
                    tenants.quota(tenant).used.fetch_sub(length, Relaxed);
                }
            }
        }
    }
}
