//! The learned capacity of a worker's cache: the blocks of prompts that this router may expect in it.

use crate::key::{BLOCK_TOKENS, Measure, RouteKey};

/// One miss shrinks the capacity at most by this factor. Small steps are enough for a cache that is smaller than
/// reported, because misses repeat. The first misses after a restart look the same, and must not cost much.
pub(super) const SHRINK: f64 = 0.9;

/// Factor by which one sign of more room grows the capacity.
pub(super) const GROW: f64 = 17.0 / 16.0;

/// Factor by which each request reduces the weight of the earlier ones in the mean of tokens per block.
const DECAY: f64 = 0.99;

#[derive(Debug)]
pub(super) struct Capacity {
    /// Tokens and blocks of the prompts so far, decayed.
    tokens: f64,
    blocks: f64,
    /// Size of the KV cache in tokens, if the worker reports it.
    reported_tokens: Option<u64>,
    /// Size in blocks for a worker that does not report it.
    default_blocks: u64,
    /// Share of the cache that this router's prompts have. Answers, running requests and other routers take the rest.
    share: f64,
    /// Capacity in blocks that was last set in the tree.
    applied: u64,
}

impl Capacity {
    pub(super) fn new(default_blocks: u64) -> Self {
        Self {
            tokens: 0.0,
            blocks: 0.0,
            reported_tokens: None,
            default_blocks,
            share: 1.0,
            applied: default_blocks,
        }
    }

    /// The capacity in the tree, in blocks.
    pub(super) fn applied(&self) -> u64 {
        self.applied
    }

    pub(super) fn share(&self) -> f64 {
        self.share
    }

    pub(super) fn tokens_per_block(&self, measure: Measure) -> f64 {
        let usual = f64::from(BLOCK_TOKENS);
        match measure {
            // The tokens of a few short prompts are mostly those of the template.
            Measure::Text if self.blocks >= 64.0 => {
                (self.tokens / self.blocks).clamp(usual / 8.0, usual * 8.0)
            }
            _ => usual,
        }
    }

    /// Whether `owned` blocks fill the capacity, or almost.
    pub(super) fn is_filled_by(&self, owned: u64) -> bool {
        owned >= self.applied - self.applied / 8
    }

    /// Sets the reported size of the cache. Like all changes, it returns whether the capacity must be set in the tree.
    pub(super) fn report(&mut self, tokens: u64) -> bool {
        self.reported_tokens = Some(tokens);
        self.resize()
    }

    /// Counts the reported `tokens` of a prompt.
    pub(super) fn measure(&mut self, key: &RouteKey, tokens: u64) -> bool {
        if key.measure == Measure::Unknown {
            return false;
        }
        self.tokens = self.tokens * DECAY + tokens as f64;
        self.blocks = self.blocks * DECAY + blocks_of(key);
        self.resize()
    }

    /// Shrinks to the `blocks` that are left.
    pub(super) fn shrink(&mut self, blocks: u64) -> bool {
        let holds = blocks as f64 / self.full();
        self.share = self.share.min(holds.max(self.share * SHRINK));
        self.resize()
    }

    pub(super) fn grow(&mut self) -> bool {
        self.set_share((self.share * GROW).min(1.0))
    }

    /// Sets the share of the cache.
    pub(super) fn set_share(&mut self, share: f64) -> bool {
        self.share = share;
        self.resize()
    }

    /// Blocks that the whole cache could hold.
    fn full(&self) -> f64 {
        let reported =
            self.reported_tokens.map(|tokens| tokens as f64 / self.tokens_per_block(Measure::Text));
        reported.unwrap_or(self.default_blocks as f64).max(1.0)
    }

    /// Updates the capacity. Returns whether it has changed enough to be set in the tree, which may evict.
    fn resize(&mut self) -> bool {
        let blocks = whole(self.full() * self.share);
        let changed = blocks.abs_diff(self.applied) > self.applied / 64;
        if changed {
            self.applied = blocks;
        }
        changed
    }
}

#[expect(clippy::cast_sign_loss, reason = "counts are not negative")]
pub(super) fn whole(count: f64) -> u64 {
    count as u64
}

/// Blocks of a prompt, including the partial block at its end.
pub(super) fn blocks_of(key: &RouteKey) -> f64 {
    key.prompt_tokens as f64 / f64::from(BLOCK_TOKENS)
}
