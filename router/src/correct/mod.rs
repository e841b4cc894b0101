//! Corrects the tree by the reports of the workers. The tree predicts the cached tokens of a prompt; the response
//! reports them.
//!
//! A worker reports the prompt tokens and the cached tokens: this project's workers in response headers with the first
//! byte, other engines in `usage`. Without a report nothing is learned. A prompt is inserted into the tree when its
//! worker is chosen, so that the next request finds it. Once the prompt is computed, the insertion is right. So the
//! path of the prompt itself needs no correction, and a report gives information about the rest of the cache:
//!
//! - Fewer cached tokens than predicted: the worker has evicted the prefix. Its cache is LRU, so everything that it
//!   used less recently is gone too. That part is removed from its share of the tree. The remaining part is the
//!   learned capacity.
//! - All predicted tokens cached after a long time, or tokens cached that the tree has forgotten: the capacity may
//!   grow.
//! - No cached tokens several times in a row: the cache was lost by a restart or a flush. Everything inserted
//!   before the first of these prompts is removed. That says nothing about the capacity.
//!
//! The learned capacity stays below the reported size of the KV cache: answers, running requests and prompts of
//! other routers take room that this router does not see.
//!
//! Reports that would be false evidence:
//!
//! - An earlier request may still be computing a prefix that is in the tree already. Only prefixes that had been
//!   computed before the request count ([`settling`]).
//! - Workers cache whole pages and compute at least one token. Small differences do not count.
//! - The router counts bytes and the worker counts tokens, including the chat template. So shares of the same prompt
//!   are compared; the ratio cancels out. The ratio is learned as well, because the capacity is reported in tokens.
//! - The router cannot count the tokens of a batch, or of a prompt with images. Nothing is learned from such prompts.
//! - A request that ends before its prompt is computed leaves a false insertion. The insertion is taken back, unless
//!   another request has computed the same prompt.

mod capacity;
mod learned;
mod owner_share;
mod settling;

pub use learned::{Finding, LearnedCache, Prediction, Report};
pub use owner_share::OwnerShare;
pub use settling::Epoch;

/// The report of a worker on a prompt, from response headers or `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    /// `None` if the worker does not report it, which differs from zero.
    pub cached_tokens: Option<u64>,
}
