//! The nodes of a shard, and the table that finds a node by the hash of its first block.
//!
//! It is a linear hash table whose chains run through the nodes. It grows by one bucket at a time: it splits one
//! chain of about one node. A table that rehashes when it is full would stall all requests behind the shard's lock,
//! for tens of milliseconds at a million nodes.

use super::slab::{NIL, Slab};

#[derive(Debug)]
struct Node {
    /// Hash of the first block. Look-ups read it, so it is in the node itself.
    first: u64,
    /// Index in `rests` of the hashes of the further blocks; `NIL` if there are none.
    rest: u32,
    parent: u32,
    /// First ownership of the node.
    owners: u32,
    /// Next node of the same bucket.
    next: u32,
}

#[derive(Debug)]
pub(super) struct Nodes {
    records: Slab<Node>,
    rests: Slab<Box<[u64]>>,
    /// First node of each bucket. There are as many buckets as there were nodes at most.
    heads: Slab<u32>,
    blocks: u64,
}

impl Nodes {
    pub(super) fn new() -> Self {
        let mut heads = Slab::new();
        heads.insert(NIL);
        Self { records: Slab::new(), rests: Slab::new(), heads, blocks: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    /// Number of blocks of all nodes.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn bytes(&self) -> usize {
        let rests = (self.blocks as usize - self.records.len()) * size_of::<u64>();
        self.records.bytes() + self.rests.bytes() + self.heads.bytes() + rests
    }

    pub(super) fn parent(&self, id: u32) -> u32 {
        self.records[id].parent
    }

    pub(super) fn owners(&self, id: u32) -> u32 {
        self.records[id].owners
    }

    pub(super) fn set_owners(&mut self, id: u32, ownership: u32) {
        self.records[id].owners = ownership;
    }

    fn rest(&self, id: u32) -> &[u64] {
        match self.records[id].rest {
            NIL => &[],
            rest => &self.rests[rest],
        }
    }

    /// Number of blocks of the node, at least one.
    pub(super) fn length(&self, id: u32) -> usize {
        1 + self.rest(id).len()
    }

    pub(super) fn child(&self, parent: u32, first: u64) -> Option<u32> {
        let mut id = self.heads[self.bucket(first)];
        while id != NIL {
            let node = &self.records[id];
            // The parent is compared as well: the tree stays a tree even if two hashes collide.
            if node.first == first && node.parent == parent {
                return Some(id);
            }
            id = node.next;
        }
        None
    }

    /// Number of leading blocks that the node shares with `key`. Their first blocks are equal.
    pub(super) fn common_prefix(&self, id: u32, key: &[u64]) -> usize {
        let (run, key) = (self.rest(id), &key[1..]);
        let length = run.len().min(key.len());
        // A hash covers all blocks before it: if the last hashes are equal, all are.
        if length == 0 || run[length - 1] == key[length - 1] {
            return 1 + length;
        }
        let mut pairs = run.iter().zip(key);
        1 + pairs.position(|(ours, theirs)| ours != theirs).expect("the last pair differs")
    }

    /// Adds a node with the blocks `run`, at least one.
    pub(super) fn add(&mut self, parent: u32, run: &[u64]) -> u32 {
        self.blocks += run.len() as u64;
        self.add_counted(parent, run)
    }

    fn add_counted(&mut self, parent: u32, run: &[u64]) -> u32 {
        let rest = self.add_rest(&run[1..]);
        let id = self.records.insert(Node { first: run[0], rest, parent, owners: NIL, next: NIL });
        self.link(id);
        if self.records.len() > self.heads.places() {
            self.grow();
        }
        id
    }

    fn add_rest(&mut self, run: &[u64]) -> u32 {
        if run.is_empty() { NIL } else { self.rests.insert(run.into()) }
    }

    fn remove_rest(&mut self, rest: u32) {
        if rest != NIL {
            self.rests[rest] = Box::default();
            self.rests.remove(rest);
        }
    }

    pub(super) fn remove(&mut self, id: u32) {
        self.blocks -= self.length(id) as u64;
        self.unlink(id);
        self.remove_rest(self.records[id].rest);
        self.records.remove(id);
    }

    /// Shortens a leaf to its first `length` blocks, at least one.
    pub(super) fn truncate(&mut self, id: u32, length: usize) {
        self.blocks -= (self.length(id) - length) as u64;
        let kept: Box<[u64]> = self.rest(id)[..length - 1].into();
        self.remove_rest(self.records[id].rest);
        self.records[id].rest = self.add_rest(&kept);
    }

    /// Splits a node before its last `beyond` blocks. Returns the new node, which has the blocks before them. The
    /// old node becomes the lower part, so its children keep their parent.
    pub(super) fn split(&mut self, lower: u32, beyond: usize) -> u32 {
        self.unlink(lower);
        let Node { first, rest, parent, .. } = self.records[lower];
        let run = std::mem::take(&mut self.rests[rest]);
        self.rests.remove(rest);
        let (head, tail) = run.split_at(run.len() - beyond);
        let mut upper = Vec::with_capacity(1 + head.len());
        upper.push(first);
        upper.extend_from_slice(head);
        let upper = self.add_counted(parent, &upper);
        let rest = self.add_rest(&tail[1..]);
        let node = &mut self.records[lower];
        (node.first, node.rest, node.parent) = (tail[0], rest, upper);
        self.link(lower);
        upper
    }

    /// The bucket of a hash. A bucket that was not split yet in the present doubling also has the nodes of its
    /// later half.
    fn bucket(&self, hash: u64) -> u32 {
        let buckets = self.heads.places();
        let all = buckets.next_power_of_two();
        let bucket = hash as usize & (all - 1);
        (if bucket < buckets { bucket } else { bucket & (all / 2 - 1) }) as u32
    }

    fn link(&mut self, id: u32) {
        let bucket = self.bucket(self.records[id].first);
        self.records[id].next = std::mem::replace(&mut self.heads[bucket], id);
    }

    fn unlink(&mut self, id: u32) {
        let Node { first, next, .. } = self.records[id];
        let bucket = self.bucket(first);
        if self.heads[bucket] == id {
            self.heads[bucket] = next;
            return;
        }
        let mut before = self.heads[bucket];
        while self.records[before].next != id {
            before = self.records[before].next;
        }
        self.records[before].next = next;
    }

    /// Adds a bucket, and moves its nodes from the one bucket that had them.
    fn grow(&mut self) {
        let added = self.heads.places();
        let old = (added & !(1 << added.ilog2())) as u32;
        let mut id = std::mem::replace(&mut self.heads[old], NIL);
        self.heads.insert(NIL);
        while id != NIL {
            let next = self.records[id].next;
            self.link(id);
            id = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::{NIL, Nodes};

    /// A hash with random low bits, which the table uses.
    fn hash(index: u64) -> u64 {
        index.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    }

    fn longest_chain(nodes: &Nodes) -> usize {
        let node = |id: u32| (id != NIL).then_some(id);
        let chain = |head| iter::successors(node(head), |id| node(nodes.records[*id].next));
        let heads = (0..nodes.heads.places() as u32).map(|bucket| nodes.heads[bucket]);
        heads.map(|head| chain(head).count()).max().unwrap_or(0)
    }

    #[test]
    fn every_node_is_found_while_the_table_grows() {
        let mut nodes = Nodes::new();
        let mut ids = Vec::new();
        for index in 0..1000 {
            ids.push(nodes.add(NIL, &[hash(index), 1, 2]));
            for (known, id) in ids.iter().enumerate() {
                assert_eq!(nodes.child(NIL, hash(known as u64)), Some(*id));
            }
            assert_eq!(nodes.heads.places(), nodes.len(), "buckets");
        }
        assert!(longest_chain(&nodes) < 10, "{}", longest_chain(&nodes));
        for (index, id) in ids.iter().enumerate() {
            nodes.remove(*id);
            assert_eq!(nodes.child(NIL, hash(index as u64)), None);
        }
        assert_eq!((nodes.len(), nodes.blocks()), (0, 0));
    }

    #[test]
    fn each_block_of_a_long_run_takes_eight_bytes() {
        let bytes = |length| {
            let mut nodes = Nodes::new();
            nodes.add(NIL, &vec![7; length]);
            nodes.bytes()
        };
        assert_eq!(bytes(1002) - bytes(2), 8 * 1000);
    }

    #[test]
    fn a_node_of_one_block_takes_its_record_alone() {
        let mut nodes = Nodes::new();
        let bytes = [1, 2].map(|block| {
            nodes.add(NIL, &[block]);
            nodes.bytes()
        });
        assert_eq!(bytes[0], bytes[1], "both records are in one chunk");
    }

    #[test]
    fn places_of_shortened_and_removed_nodes_are_used_again() {
        let mut nodes = Nodes::new();
        let mut bytes = Vec::new();
        for _ in 0..1000 {
            let id = nodes.add(NIL, &[1, 2, 3, 4]);
            nodes.truncate(id, 3);
            nodes.truncate(id, 1);
            nodes.remove(id);
            bytes.push(nodes.bytes());
        }
        assert_eq!(bytes.first(), bytes.last());
    }

    #[test]
    fn a_split_node_is_two() {
        let mut nodes = Nodes::new();
        for beyond in 1..5 {
            let run: Vec<u64> = (0..5).map(|block| hash(beyond * 10 + block)).collect();
            let lower = nodes.add(NIL, &run);
            let upper = nodes.split(lower, beyond as usize);
            let cut = 5 - beyond as usize;
            assert_eq!(nodes.child(NIL, run[0]), Some(upper));
            assert_eq!(nodes.child(upper, run[cut]), Some(lower));
            assert_eq!((nodes.length(upper), nodes.length(lower)), (cut, 5 - cut));
            assert_eq!(nodes.common_prefix(upper, &run), cut);
            assert_eq!(nodes.common_prefix(lower, &run[cut..]), 5 - cut);
        }
        assert_eq!((nodes.len(), nodes.blocks()), (8, 20));
    }
}
