//! One shard: a path-compressed radix tree over block hashes.
//!
//! A block's hash covers all blocks before it, which keeps the tree plain. One table from hash to
//! node replaces a map of children in every node, and whether a whole run of blocks matches is told
//! by its last hash. All holders of a node hold its whole run, and hold all of its ancestors.

use hashbrown::HashTable;

use super::{
    holds::{Hold, Lru},
    slab::{NIL, Slab},
    workers::{NEVER, Workers},
};
use crate::fleet::worker_id::WorkerId;

/// Stale holds freed by each insert: more than it makes, so leftovers of purged workers vanish
/// with the traffic and no request pays for a sweep.
const SWEEP: usize = 16;

#[derive(Debug)]
struct Node {
    parent: u32,
    /// The first of the node's holds. A node without holders is freed at once.
    holders: u32,
    /// The hashes of consecutive blocks; never empty. Boxed, since runs differ in length.
    run: Box<[u64]>,
}

/// One worker slot as the shard knows it.
#[derive(Debug)]
struct Slot {
    generation: u32,
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

#[derive(Debug)]
pub(super) struct Shard {
    nodes: Slab<Node>,
    holds: Slab<Hold>,
    /// Nodes by the hash of their first block.
    index: HashTable<u32>,
    slots: Vec<Slot>,
    stale: Lru,
    epoch: u64,
    lookups: u64,
    blocks: u64,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self {
            nodes: Slab::new(),
            holds: Slab::new(),
            index: HashTable::new(),
            slots: Vec::new(),
            stale: Lru::EMPTY,
            epoch: 0,
            lookups: 0,
            blocks: 0,
        }
    }

    /// Learns of purges since the last call: moves what they voided aside, whole lists at a time.
    pub(super) fn sync(&mut self, workers: &Workers) {
        if self.epoch == workers.epoch {
            return;
        }
        self.epoch = workers.epoch;
        for (index, quota) in workers.quotas.iter().enumerate() {
            let generation = quota.generation;
            match self.slots.get_mut(index) {
                None => self.slots.push(Slot { generation, holds: Lru::EMPTY, reported: 0 }),
                Some(slot) if slot.generation != generation => {
                    slot.generation = generation;
                    self.stale.append(&mut self.holds, &mut slot.holds);
                }
                Some(_) => {}
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
            let mut id = self.nodes[at].holders;
            while id != NIL {
                let hold = &self.holds[id];
                let slot = &mut self.slots[hold.slot as usize];
                if hold.generation == slot.generation && slot.reported != self.lookups {
                    slot.reported = self.lookups;
                    out.push((workers.quota(hold.slot).worker, depth as u32));
                }
                id = hold.sibling;
            }
            let node = &self.nodes[at];
            depth -= node.run.len() - beyond;
            beyond = 0;
            at = node.parent;
        }
    }

    /// Makes `slot` a holder of all of `key`, as its most recently used part, and returns how many
    /// blocks it did not hold before.
    pub(super) fn insert(&mut self, key: &[u64], slot: u32, stamp: u64) -> u64 {
        self.sweep();
        let Match { node: mut at, depth, beyond } = self.descend(key);
        if beyond > 0 {
            at = self.split(at, beyond);
        }
        if depth < key.len() {
            at = self.add_node(at, key[depth..].into());
        }
        let mut added = 0;
        while at != NIL {
            added += self.renew(at, slot, stamp);
            at = self.nodes[at].parent;
        }
        added
    }

    /// Takes the least recently used blocks from `slot`: `wanted` of them, fewer if the rest was
    /// used after `limit`, more if that saves splitting a node that others hold, too.
    pub(super) fn evict(&mut self, slot: u32, wanted: u64, limit: u64) -> u64 {
        let mut freed = 0;
        while freed < wanted {
            let id = self.slots[slot as usize].holds.oldest();
            if id == NIL || self.holds[id].stamp > limit {
                break;
            }
            let node = &mut self.nodes[self.holds[id].node];
            let length = node.run.len() as u64;
            let excess = wanted - freed;
            // The oldest hold is a leaf of the worker's share: with no other holder it is a leaf
            // of the tree and can be cut anywhere, from the end as a paged cache does.
            if length > excess && node.holders == id && self.holds[id].sibling == NIL {
                let mut run = std::mem::take(&mut node.run).into_vec();
                run.truncate((length - excess) as usize);
                node.run = run.into();
                self.blocks -= excess;
                freed += excess;
            } else {
                self.release(id);
                freed += length;
            }
        }
        freed
    }

    /// When the least recently used hold of `slot` was used.
    pub(super) fn oldest(&self, slot: u32) -> u64 {
        match self.slots[slot as usize].holds.oldest() {
            NIL => NEVER,
            id => self.holds[id].stamp,
        }
    }

    pub(super) fn add_to(&self, stats: &mut super::TreeStats) {
        stats.blocks += self.blocks;
        stats.nodes += self.nodes.len() as u64;
        stats.holds += self.holds.len() as u64;
        // An index bucket is the id and one control byte, a run's allocation has 8 bytes of header.
        let index = self.index.capacity() * 8 / 7 * 5;
        let runs = self.blocks as usize * size_of::<u64>() + self.nodes.len() * 8;
        stats.bytes += (self.nodes.bytes() + self.holds.bytes() + index + runs) as u64;
    }

    fn child(&self, parent: u32, first: u64) -> Option<u32> {
        // The parent is compared, too: should two hashes ever collide, the tree stays a tree.
        let is_child = |id: &u32| {
            let node = &self.nodes[*id];
            node.run[0] == first && node.parent == parent
        };
        self.index.find(first, is_child).copied()
    }

    fn descend(&self, key: &[u64]) -> Match {
        let mut found = Match { node: NIL, depth: 0, beyond: 0 };
        while found.beyond == 0 && found.depth < key.len() {
            let Some(child) = self.child(found.node, key[found.depth]) else {
                break;
            };
            let common = common_prefix(&self.nodes[child].run, &key[found.depth..]);
            found.depth += common;
            found.beyond = self.nodes[child].run.len() - common;
            found.node = child;
        }
        found
    }

    fn add_node(&mut self, parent: u32, run: Box<[u64]>) -> u32 {
        self.blocks += run.len() as u64;
        let first = run[0];
        let id = self.nodes.insert(Node { parent, holders: NIL, run });
        self.add_to_index(first, id);
        id
    }

    fn add_to_index(&mut self, first: u64, id: u32) {
        let nodes = &self.nodes;
        self.index.insert_unique(first, id, |id| nodes[*id].run[0]);
    }

    fn remove_from_index(&mut self, first: u64, id: u32) {
        let entry = self.index.find_entry(first, |other| *other == id);
        entry.expect("every node is in the index").remove();
    }

    /// Cuts the last `beyond` blocks of a node off and returns the new node of those before. The
    /// old node becomes the lower part, so that its children need not be found.
    fn split(&mut self, lower: u32, beyond: usize) -> u32 {
        let mut head = std::mem::take(&mut self.nodes[lower].run).into_vec();
        let tail = head.split_off(head.len() - beyond);
        let (first, second) = (head[0], tail[0]);
        let parent = self.nodes[lower].parent;
        self.nodes[lower].run = tail.into();
        let upper = self.nodes.insert(Node { parent, holders: NIL, run: head.into() });
        self.nodes[lower].parent = upper;
        self.remove_from_index(first, lower);
        self.add_to_index(first, upper);
        self.add_to_index(second, lower);
        let mut id = self.nodes[lower].holders;
        while id != NIL {
            let Hold { slot, generation, stamp, sibling, .. } = self.holds[id];
            self.hold(upper, slot, generation, stamp, id);
            id = sibling;
        }
        upper
    }

    /// Adds a hold, next to `older` in the order of use.
    fn hold(&mut self, node: u32, slot: u32, generation: u32, stamp: u64, older: u32) {
        let mut hold = Hold::new(node, slot, generation, stamp);
        hold.sibling = self.nodes[node].holders;
        let id = self.holds.insert(hold);
        self.nodes[node].holders = id;
        let list = list_of(&mut self.slots, &mut self.stale, slot, generation);
        list.link(&mut self.holds, id, older);
    }

    /// Makes the hold of `slot` on `node` its newest; returns the blocks that this adds.
    fn renew(&mut self, node: u32, slot: u32, stamp: u64) -> u64 {
        let generation = self.slots[slot as usize].generation;
        let mut id = self.nodes[node].holders;
        while id != NIL && !self.holds[id].belongs_to(slot, generation) {
            id = self.holds[id].sibling;
        }
        if id == NIL {
            self.hold(node, slot, generation, stamp, NIL);
            return self.nodes[node].run.len() as u64;
        }
        let list = &mut self.slots[slot as usize].holds;
        list.unlink(&mut self.holds, id);
        list.link(&mut self.holds, id, NIL);
        self.holds[id].stamp = stamp;
        0
    }

    /// Ends a hold, and with the last one its node.
    fn release(&mut self, id: u32) {
        let Hold { node, slot, generation, sibling, .. } = self.holds[id];
        list_of(&mut self.slots, &mut self.stale, slot, generation).unlink(&mut self.holds, id);
        if self.nodes[node].holders == id {
            self.nodes[node].holders = sibling;
        } else {
            let mut before = self.nodes[node].holders;
            while self.holds[before].sibling != id {
                before = self.holds[before].sibling;
            }
            self.holds[before].sibling = sibling;
        }
        self.holds.remove(id);
        if self.nodes[node].holders == NIL {
            // No child is left: its holders would hold this node as well.
            self.remove_from_index(self.nodes[node].run[0], node);
            let run = std::mem::take(&mut self.nodes[node].run);
            self.blocks -= run.len() as u64;
            self.nodes.remove(node);
        }
    }

    fn sweep(&mut self) {
        for _ in 0..SWEEP {
            match self.stale.oldest() {
                NIL => break,
                id => self.release(id),
            }
        }
    }
}

/// The list that a hold is in: its worker's, or that of the stale.
fn list_of<'a>(
    slots: &'a mut [Slot],
    stale: &'a mut Lru,
    slot: u32,
    generation: u32,
) -> &'a mut Lru {
    let slot = &mut slots[slot as usize];
    if slot.generation == generation { &mut slot.holds } else { stale }
}

/// How many leading blocks a run and a key share. Equal last hashes tell that all are equal.
fn common_prefix(run: &[u64], key: &[u64]) -> usize {
    let length = run.len().min(key.len());
    if run[length - 1] == key[length - 1] {
        return length;
    }
    let mut pairs = run.iter().zip(key);
    pairs.position(|(ours, theirs)| ours != theirs).expect("the last pair differs")
}
