//! What workers say about their caches, and what the router makes of it.

mod settling;

use parking_lot::Mutex;

use crate::{
    fleet::worker::Booking,
    key::{BLOCK_TOKENS, RouteKey},
    router::Router,
    tree::Note,
};
pub use settling::Epoch;
use settling::Settling;

/// Blocks by which cached tokens may fall short of the tree's word: a worker caches whole pages only,
/// and computes at least the last token.
const SLACK: u64 = 6;

/// What a worker says about a request's prompt, in a response's headers or its `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    /// `None` if the worker does not say, which is not the same as none.
    pub cached_tokens: Option<u64>,
}

/// What the tree said of a request's worker, part of the request's booking.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prediction {
    /// `None` under a policy without a tree, and once there is nothing to take back.
    note: Option<Note>,
    /// Whether all that the tree promised had been computed by then.
    settled: bool,
    /// Whether the worker has told cached tokens.
    told: bool,
}

/// What the router has learned about one worker.
#[derive(Debug, Default)]
pub struct Learned {
    settling: Mutex<Settling>,
}

impl Learned {
    /// A request is booked; only afterwards may it be noted in the tree.
    pub fn begin(&self) -> Epoch {
        self.settling.lock().begin()
    }

    /// The tree has noted the request.
    pub fn predict(&self, note: Note) -> Prediction {
        let settled = self.settling.lock().noted(&note);
        Prediction { note: Some(note), settled, told: false }
    }

    /// The request's prompt is computed, or never will be.
    pub fn end(&self, epoch: &Epoch) {
        self.settling.lock().end(epoch);
    }
}

impl Router {
    /// Takes in what a worker says of a request's prompt, as often as it says something: the first
    /// time that it tells cached tokens counts.
    pub fn learn(&self, key: &RouteKey, booking: &mut Booking, usage: Usage) {
        let Some(cached) = usage.cached_tokens else {
            return;
        };
        if std::mem::replace(&mut booking.prediction.told, true) {
            return;
        }
        let settled = booking.prediction.settled;
        let note = booking.prediction.note.take().unwrap_or_default();
        let held = u64::from(note.held);
        let prompt = usage.prompt_tokens.unwrap_or(key.prompt_tokens);
        let predicted = (held * u64::from(BLOCK_TOKENS)).min(prompt);
        booking.worker().counters.cache(booking.reason, prompt, predicted, cached);
        let blocks =
            cached.saturating_mul(key.prompt_tokens) / prompt.max(1) / u64::from(BLOCK_TOKENS);
        if let (true, Some(last_used)) =
            (settled && held > blocks + held / 8 + SLACK, note.last_used)
        {
            // Evicted there, and by LRU all that was used less recently, too.
            self.tree.evict_unused(booking.worker().id, last_used);
        }
    }

    /// A request has ended without its prompt being computed: what the tree noted of it when its
    /// worker was chosen is not so. Without effect once the worker has told cached tokens.
    pub fn unlearn(&self, key: &RouteKey, booking: &mut Booking) {
        if let Some(note) = booking.prediction.note.take() {
            self.tree.retract(key, booking.worker().id, &note);
        }
    }
}
