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
//! - Nothing there, several times in a row: the cache has been lost, by a restart or a flush, and the
//!   whole share goes. It says nothing about the cache's size.
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
//!   back ([`Router::unlearn`]), unless another request has made it true.

mod home;
mod learned;
mod settling;

pub use home::HomeShare;
pub use learned::{Finding, Learned, Prediction, Report};
pub use settling::Epoch;

use crate::{
    fleet::worker::{Booking, Worker},
    key::RouteKey,
    policy::Reason,
    router::Router,
};

/// What a worker says about a request's prompt, in a response's headers or its `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    /// `None` if the worker does not say, which is not the same as none.
    pub cached_tokens: Option<u64>,
}

impl Router {
    /// Takes in what a worker says of a request's prompt, as often as it says something: the first
    /// time that it tells cached tokens counts.
    pub fn learn(&self, key: &RouteKey, booking: &mut Booking, usage: Usage) {
        let worker = std::sync::Arc::clone(booking.worker());
        let prediction = &mut booking.prediction;
        let (report, finding) = worker.learned.learn(&self.tree, worker.id, key, prediction, usage);
        if let Some(Report { prompt, predicted, cached }) = report {
            worker.counters.cache(booking.reason, prompt, predicted, cached);
            if let Reason::Home | Reason::Cold = booking.reason {
                self.home.observe(booking.reason == Reason::Home, prompt, cached);
            }
        }
        let url = &worker.url;
        match finding {
            Some(Finding::Evicted { blocks }) => {
                worker.counters.evicted_blocks.add(blocks);
                let capacity = worker.learned.capacity();
                tracing::debug!("worker {url} has evicted {blocks} blocks, keeps about {capacity}");
            }
            Some(Finding::Emptied) => {
                worker.counters.emptied.increment();
                tracing::warn!(
                    "worker {url} has lost its cache: nothing of the last prompts was there"
                );
            }
            Some(Finding::NoCache) => {
                worker.counters.emptied.increment();
                tracing::debug!("worker {url} never has anything cached: is its prefix cache off?");
            }
            None => {}
        }
    }

    /// A request has ended without its prompt being computed: what the tree noted of it when its
    /// worker was chosen is not so. Without effect once the worker has told cached tokens.
    pub fn unlearn(&self, key: &RouteKey, booking: &mut Booking) {
        if let Some(note) = booking.prediction.note.take() {
            self.tree.retract(key, booking.worker().id, &note);
        }
    }

    /// A worker says how many tokens its cache holds.
    pub fn set_capacity(&self, worker: &Worker, tokens: u64) {
        worker.learned.set_capacity(&self.tree, worker.id, tokens);
    }
}
