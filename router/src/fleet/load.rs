//! The load of a replica: its requests in flight and its prompt tokens that are not computed yet.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The sums of all reservations on one replica (`LoadGuard`). Every request writes them, from any thread, so they have
/// a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Load {
    /// Requests in flight. A request counts once for each completion that it asks for: an engine runs them in parallel.
    requests: AtomicU32,
    /// Prompt tokens that are reserved and not computed yet.
    pending_tokens: AtomicU64,
}

impl Load {
    pub(super) fn requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(super) fn pending_tokens(&self) -> u64 {
        self.pending_tokens.load(Ordering::Relaxed)
    }

    pub(super) fn add_requests(&self, count: u32) {
        self.requests.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn remove_requests(&self, count: u32) {
        self.requests.fetch_sub(count, Ordering::Relaxed);
    }

    /// Adds `count` prompt tokens. Returns the number of pending tokens before.
    pub(super) fn add_tokens(&self, count: u64) -> u64 {
        self.pending_tokens.fetch_add(count, Ordering::Relaxed)
    }

    pub(super) fn remove_tokens(&self, count: u64) {
        self.pending_tokens.fetch_sub(count, Ordering::Relaxed);
    }
}
