//! The prompt as chained block hashes.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// 64 bytes of text, or 16 token ids of 4 bytes: about 16 tokens either way.
pub(super) const BLOCK_BYTES: usize = 64;

/// Four megabytes of text, longer than any model's context. What lies beyond is not keyed, so that
/// a hostile body costs neither memory nor time under the tree's lock.
const MAX_BLOCKS: usize = 1 << 16;

/// Cuts a stream of bytes into blocks. A tail shorter than a block is never keyed: the prompts of
/// two requests may differ right after it.
pub(super) struct Blocks {
    hashes: Vec<u64>,
    /// Hash of all blocks so far, and the seed of the next one's: equal hashes mean equal prefixes.
    chain: u64,
    tail: [u8; BLOCK_BYTES],
    filled: usize,
    length: usize,
}

impl Blocks {
    /// `expected` bytes are reserved for; a guess that is too small costs a reallocation, no more.
    pub(super) fn new(root: u64, expected: usize) -> Self {
        Self {
            hashes: Vec::with_capacity((expected / BLOCK_BYTES).min(MAX_BLOCKS)),
            chain: root,
            tail: [0; BLOCK_BYTES],
            filled: 0,
            length: 0,
        }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        self.length += bytes.len();
        if self.filled > 0 {
            let (head, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.filled));
            self.tail[self.filled..self.filled + head.len()].copy_from_slice(head);
            self.filled += head.len();
            if self.filled < BLOCK_BYTES {
                return;
            }
            let block = self.tail;
            self.seal(&block);
            bytes = rest;
        }
        let mut whole = bytes.chunks_exact(BLOCK_BYTES);
        for block in &mut whole {
            self.seal(block);
        }
        let rest = whole.remainder();
        self.tail[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    fn seal(&mut self, block: &[u8]) {
        if self.hashes.len() < MAX_BLOCKS {
            self.chain = xxh3_64_with_seed(block, self.chain);
            self.hashes.push(self.chain);
        }
    }

    /// The block hashes, and how many bytes were pushed in all.
    pub(super) fn finish(self) -> (Vec<u64>, usize) {
        (self.hashes, self.length)
    }
}
