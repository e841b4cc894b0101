//! Which tenant owns which node, and the LRU order of each tenant.
//!
//! An ownership is a pair of tenant and node. It is in two lists: the owners of the node, and the LRU list of the
//! tenant. A use of a path renews its ownerships from the leaf up. So an ancestor is always more recent than its
//! descendants, and the oldest ownership of a tenant is a leaf of the tenant's part of the tree. Eviction takes the
//! end of a list and never searches.

use super::{
    lru_tick::LruTick,
    slab::{NIL, Slab},
};

/// One tenant owns one node.
#[derive(Debug)]
pub(super) struct Ownership {
    pub(super) node: u32,
    pub(super) tenant: u32,
    /// The next owner of the same node.
    pub(super) sibling: u32,
    /// Neighbours in the LRU list of the tenant.
    newer: u32,
    older: u32,
    /// The last use.
    pub(super) tick: LruTick,
}

/// The LRU list of one tenant in one shard.
#[derive(Debug)]
pub(super) struct Lru {
    newest: u32,
    oldest: u32,
}

impl Lru {
    pub(super) const EMPTY: Self = Self { newest: NIL, oldest: NIL };

    pub(super) fn oldest(&self) -> u32 {
        self.oldest
    }

    /// Inserts ownership `id`, which is in no list, on the newer side of `older`, or as the newest if `older` is `NIL`.
    pub(super) fn link(&mut self, ownerships: &mut Slab<Ownership>, id: u32, older: u32) {
        let older = if older == NIL { self.newest } else { older };
        let newer = if older == NIL { NIL } else { ownerships[older].newer };
        ownerships[id].older = older;
        ownerships[id].newer = newer;
        match older {
            NIL => self.oldest = id,
            older => ownerships[older].newer = id,
        }
        match newer {
            NIL => self.newest = id,
            newer => ownerships[newer].older = id,
        }
    }

    pub(super) fn unlink(&mut self, ownerships: &mut Slab<Ownership>, id: u32) {
        let (older, newer) = (ownerships[id].older, ownerships[id].newer);
        match older {
            NIL => self.oldest = newer,
            older => ownerships[older].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => ownerships[newer].older = older,
        }
    }
}

impl Ownership {
    /// An ownership that is in no list.
    pub(super) fn new(node: u32, tenant: u32, tick: LruTick) -> Self {
        Self { node, tenant, sibling: NIL, newer: NIL, older: NIL, tick }
    }
}
