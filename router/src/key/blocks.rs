//! The prompt as chained block hashes.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// 64 bytes of text, or 16 token ids of 4 bytes: about 16 tokens either way.
pub const BLOCK_BYTES: usize = 64;

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
    /// Whether something went in whose tokens its bytes do not tell.
    media: bool,
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
            media: false,
        }
    }

    #[inline]
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.length += bytes.len();
        let filled = self.filled + bytes.len();
        if filled < BLOCK_BYTES {
            self.tail[self.filled..filled].copy_from_slice(bytes);
            self.filled = filled;
        } else {
            self.push_over(bytes);
        }
    }

    /// Pushes an image or the like, by the hash of its data.
    pub(super) fn push_media(&mut self, hash: u64) {
        self.media = true;
        self.push(&hash.to_le_bytes());
    }

    /// Pushes a token id; a prompt is either ids or text, so ids never lie across two blocks.
    pub(super) fn push_id(&mut self, id: u32) {
        self.length += 4;
        self.tail[self.filled..self.filled + 4].copy_from_slice(&id.to_le_bytes());
        self.filled += 4;
        if self.filled == BLOCK_BYTES {
            self.filled = 0;
            let block = self.tail;
            self.seal(&block);
        }
    }

    /// Pushes what completes at least one block.
    fn push_over(&mut self, mut bytes: &[u8]) {
        if self.filled > 0 {
            let (head, rest) = bytes.split_at(BLOCK_BYTES - self.filled);
            self.tail[self.filled..].copy_from_slice(head);
            let block = self.tail;
            self.seal(&block);
            bytes = rest;
        }
        let (whole, rest) = bytes.as_chunks::<BLOCK_BYTES>();
        for block in whole {
            self.seal(block);
        }
        self.tail[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    fn seal(&mut self, block: &[u8; BLOCK_BYTES]) {
        if self.hashes.len() < MAX_BLOCKS {
            self.chain = xxh3_64_with_seed(block, self.chain);
            self.hashes.push(self.chain);
        }
    }

    /// The block hashes, how many bytes were pushed in all, and whether media were among them.
    pub(super) fn finish(self) -> (Vec<u64>, usize, bool) {
        (self.hashes, self.length, self.media)
    }
}
