//! Who holds which node, and in which order each worker would give it up.
//!
//! A hold is one (worker, node) pair. It lies in two lists: the node's holders, and the worker's
//! least-recently-used order. A use of a path renews its holds from the leaf up, so an ancestor is
//! always more recent than its descendants and the oldest hold of a worker is always a leaf of the
//! worker's share. So eviction takes the end of a list and never searches.

use super::{
    slab::{NIL, Slab},
    stamp::Stamp,
};

#[derive(Debug)]
pub(super) struct Hold {
    pub(super) node: u32,
    pub(super) slot: u32,
    /// The next holder of the same node.
    pub(super) sibling: u32,
    newer: u32,
    older: u32,
    /// When the hold was last used.
    pub(super) stamp: Stamp,
}

/// The holds of one slot in order of use.
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

    /// Puts hold `id`, which is in no list, next to `older` on its newer side; `NIL` as `older`
    /// stands for the newest.
    pub(super) fn link(&mut self, holds: &mut Slab<Hold>, id: u32, older: u32) {
        let older = if older == NIL { self.newest } else { older };
        let newer = if older == NIL { NIL } else { holds[older].newer };
        holds[id].older = older;
        holds[id].newer = newer;
        match older {
            NIL => self.oldest = id,
            older => holds[older].newer = id,
        }
        match newer {
            NIL => self.newest = id,
            newer => holds[newer].older = id,
        }
    }

    pub(super) fn unlink(&mut self, holds: &mut Slab<Hold>, id: u32) {
        let (older, newer) = (holds[id].older, holds[id].newer);
        match older {
            NIL => self.oldest = newer,
            older => holds[older].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => holds[newer].older = older,
        }
    }
}

impl Hold {
    /// A hold that is in no list yet.
    pub(super) fn new(node: u32, slot: u32, stamp: Stamp) -> Self {
        Self { node, slot, sibling: NIL, newer: NIL, older: NIL, stamp }
    }
}
