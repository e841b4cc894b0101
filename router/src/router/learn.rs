//! What the answers of workers change: the tree, what is known of their caches, what is counted.

use std::sync::Arc;

use tokio::time::Instant;

use super::Router;
use crate::{
    correct::{Finding, Report, Usage},
    fleet::worker::Booking,
    key::{Measure, RouteKey},
};

impl Router {
    /// Takes in what a worker says of a request's prompt, as often as it says something: the first
    /// time that it tells cached tokens counts.
    pub fn learn(&self, key: &RouteKey, booking: &mut Booking, usage: Usage) {
        let worker = Arc::clone(booking.worker());
        let prediction = &mut booking.prediction;
        let (report, finding) = worker.learned.learn(&self.tree, worker.id, key, prediction, usage);
        if let Some(Report { prompt, predicted, cached }) = report {
            worker.counters.cache(booking.reason, prompt, predicted, cached);
            booking.computed(prompt - cached);
            // A prompt whose beginning the router does not see may be known to a worker all the same.
            let at_home = booking.at_home.filter(|_| key.measure != Measure::Unknown);
            if let Some(at_home) = at_home {
                let (unknown, found) = (prompt - predicted, cached.saturating_sub(predicted));
                self.home.observe(at_home, unknown, found, Instant::now());
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
        if let Some(note) = booking.prediction.take_note() {
            self.tree.retract(key, booking.worker().id, &note);
        }
    }
}
