//! The tree says what a worker's cache should hold; its answers say what it did hold. This is where
//! the one is made to follow the other.
//!
//! A worker reports a prompt's tokens and how many of them were cached: ours in response headers with
//! the first byte, others in `usage`. What is not reported is unknown, and teaches nothing. A request
//! is noted in the tree when its worker is chosen, so that the next one finds it; once it is computed
//! the note is true, whatever the worker had before. So there is nothing to repair on the prompt's own
//! path, and what a report teaches is about the rest:
//!
//! - Less cached than the tree said: the worker has evicted it, and being an LRU cache it has evicted
//!   all that it used less recently, too. That goes from its share of the tree, and what remains is
//!   all that its cache has room for.
//! - All there, although it had not been used for long: there is room for a little more. The same if
//!   something is there that the tree has forgotten.
//! - Nothing there, several times in a row: the cache has been lost, by a restart or a flush, and all
//!   that was noted before the first of them goes. It says nothing about the cache's size.
//!
//! The capacity so learned stays below what the worker has told: answers, running requests and other
//! routers' prompts take room of which this router knows nothing.
//!
//! What would be false evidence:
//!
//! - A prefix that an earlier request is still computing is in the tree but not yet in the cache. Only
//!   a shortfall of what had been computed before counts ([`settling`]).
//! - Workers cache whole pages and compute at least one token: small differences count for nothing.
//! - The router counts bytes and the worker tokens, with a template's around them. Compared are shares
//!   of the same prompt, in which the ratio cancels out. It is learned all the same, since a capacity
//!   is told in tokens.
//! - Of a batch or a prompt with images the router cannot tell the tokens: such prompts teach nothing.
//! - A request that ends before its prompt is computed leaves a note that is not true: it is taken
//!   back, unless another request has made it true.

mod home;
mod learned;
mod settling;

pub use home::HomeShare;
pub use learned::{Finding, Learned, Prediction, Report};
pub use settling::Epoch;

/// What a worker says about a request's prompt, in a response's headers or its `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    /// `None` if the worker does not say, which is not the same as none.
    pub cached_tokens: Option<u64>,
}
