//! Cuts a prompt into blocks and hashes them.

use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a block: 64 bytes of text or 16 token ids of 4 bytes, which is about 16 tokens in both cases.
pub const BLOCK_BYTES: usize = 64;

/// Maximum number of blocks: 4 MB of text, longer than any context. Further text is not hashed, so that a hostile
/// body costs neither memory nor time under the lock of the tree.
const MAX_BLOCKS: usize = 1 << 16;

/// Cuts a stream of bytes into blocks. An incomplete last block is not hashed: other prompts may continue it
/// differently.
pub(super) struct Blocks {
    hashes: Vec<u64>,
    /// Hash of all blocks so far.
    chain: u64,
    tail: [u8; BLOCK_BYTES],
    filled: usize,
    length: usize,
    /// Whether media were pushed: their bytes do not tell their tokens.
    media: bool,
}

impl Blocks {
    /// Reserves room for `expected` bytes. More bytes cost a reallocation.
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

    /// Pushes media, such as an image, by the hash of its data.
    pub(super) fn push_media(&mut self, hash: u64) {
        self.media = true;
        self.push(&hash.to_le_bytes());
    }

    /// Pushes a token id. A prompt is either ids or text, so an id is never split between two blocks.
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

    /// Pushes bytes that complete at least one block.
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
            self.chain = chain(self.chain, xxh3_64(block));
            self.hashes.push(self.chain);
        }
    }

    /// Returns the block hashes, the number of pushed bytes, and whether media were pushed.
    pub(super) fn finish(self) -> (Vec<u64>, usize, bool) {
        (self.hashes, self.length, self.media)
    }
}

/// The hash of a block and all blocks before it. The hash of the block itself does not depend on those before: the
/// processor computes several at once.
fn chain(before: u64, block: u64) -> u64 {
    /// 2^64 divided by the golden ratio, as in Fibonacci hashing.
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    // Each of the two values alone is mapped one to one.
    (before.rotate_left(32) ^ block).wrapping_mul(ODD)
}
