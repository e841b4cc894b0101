//! Which worker takes a request: a snapshot of the workers, the tree's word on each, the policy's
//! choice, and the booking that makes the choice visible to the next request.

use tokio::time::Instant;

use super::Router;
use crate::{
    fleet::{registry::known, worker::Booking},
    key::RouteKey,
    names::{ModelName, WorkerId},
    policy::{Candidate, Choice, PolicyRequest, Reason, least_loaded},
};

/// What a request brings to the choice.
#[derive(Clone, Copy)]
pub enum Wish<'a> {
    /// A prompt; without a key when the body could not be read as one.
    Policy(Option<&'a RouteKey>),
    /// Nothing that a cache could help with.
    LeastLoaded,
    /// Nor anything that an engine would be needed for.
    Light,
}

/// Outcome of one look at the workers.
pub enum Selection {
    Booked(Booking),
    /// There are healthy workers, and the request has failed on each of them.
    AllTried,
    NoneHealthy,
}

/// Reused between choices, so that a choice allocates nothing.
#[derive(Default)]
pub struct Scratch {
    candidates: Vec<Candidate>,
    /// The place in the registry's snapshot of each candidate.
    places: Vec<usize>,
    /// The tree's word: the blocks of the prompt that each worker probably has.
    matches: Vec<(WorkerId, u32)>,
    /// The same by the worker's number, 0 between two choices.
    held: Vec<u32>,
}

impl Router {
    /// Chooses among the healthy workers that are not in `tried` and books the request there.
    pub fn select(
        &self,
        wish: Wish<'_>,
        model: Option<ModelName>,
        tried: &[WorkerId],
    ) -> Selection {
        let key = match wish {
            Wish::Policy(Some(key)) if self.policy.uses_tree() => Some(key),
            _ => None,
        };
        let workers = self.registry.workers();
        let now = Instant::now();
        let mut healthy = 0;
        // One choice at a time, from the look at the tree to the note in it: two requests of a new
        // group that arrive together must not both find it cold. It takes about a microsecond.
        let mut choosing = self.choosing.lock();
        let Scratch { candidates, places, matches, held } = &mut *choosing;
        matches.clear();
        if let Some(key) = key {
            self.tree.lookup(key, matches);
        }
        for (id, blocks) in &*matches {
            let id = id.0 as usize;
            held.resize(held.len().max(id + 1), 0);
            held[id] = *blocks;
        }
        let model = known(&workers, model);
        // When every breaker of those that are left is open, trying is better than refusing.
        let heed_breakers = workers.iter().any(|worker| {
            worker.takes_requests() && worker.may_serve(model) && !tried.contains(&worker.id)
        });
        candidates.clear();
        places.clear();
        for (place, worker) in workers.iter().enumerate() {
            if !worker.is_in_rotation()
                || heed_breakers && !worker.takes_requests()
                || !worker.may_serve(model)
            {
                continue;
            }
            healthy += 1;
            if !tried.contains(&worker.id) {
                let blocks = held.get(worker.id.0 as usize).copied().unwrap_or(0);
                candidates.push(worker.candidate(blocks, now));
                places.push(place);
            }
        }
        for (id, _) in &*matches {
            held[id.0 as usize] = 0;
        }
        let choice = match wish {
            Wish::Policy(key) => {
                let home_share = self.home.share(now);
                self.policy.choose(&PolicyRequest { key, home_share }, candidates)
            }
            Wish::LeastLoaded | Wish::Light => None,
        };
        let Choice { index, uncached_tokens, reason, at_home } = match choice {
            Some(choice) => choice,
            None => match least_loaded(candidates) {
                Some(index) => {
                    Choice { index, uncached_tokens: 0, reason: Reason::NoPrefix, at_home: None }
                }
                None if healthy > 0 => return Selection::AllTried,
                None => return Selection::NoneHealthy,
            },
        };
        let worker = &workers[places[index]];
        let mut booking = match wish {
            Wish::Light => worker.book_light(u64::from(uncached_tokens), reason),
            _ => worker.book(u64::from(uncached_tokens), reason),
        };
        worker.counters.selections.increment(reason);
        if let Wish::Policy(Some(key)) = wish {
            booking.add_answers(key.more_answers);
        }
        if let Some(key) = key {
            let note = self.tree.insert(key, worker.id);
            booking.at_home = at_home;
            booking.share_prefix(key, note.held);
            booking.prediction = worker.learned.predict(note);
            // Removed meanwhile: its share was dropped before this insert, so drop it again.
            if worker.is_removed() {
                self.tree.remove_worker(worker.id);
            }
        }
        drop(choosing);
        Selection::Booked(booking)
    }
}
