//! The choice of a worker: a snapshot of the workers, the prefix match of each, the choice of the policy, and the
//! reservation that makes the choice visible to the next request.

use std::sync::Arc;

use tokio::time::Instant;

use super::Router;
use crate::{
    fleet::{LoadGuard, Replica, registry::known},
    heap::boxed,
    key::RouteKey,
    names::{ModelName, WorkerId},
    policy::{Candidate, Choice, PolicyRequest, Reason, least_loaded},
    tree::PrefixTree,
};

/// The class of a request, for the choice of a worker.
#[derive(Clone, Copy)]
pub enum RouteClass<'a> {
    /// A prompt, for the policy. Without a key if the router cannot read the prompt.
    Policy(Option<&'a RouteKey>),
    /// Work for an engine without a prompt: the least loaded worker gets it.
    LeastLoaded,
    /// A request that needs no engine, such as `/v1/models`.
    Light,
}

/// The result of [`Router::select`].
pub enum Placement {
    /// One worker serves the whole request; its load is reserved. Boxed, because it is passed on often.
    Worker(Box<LoadGuard>),
    /// There are healthy workers, and the request has been tried on each of them.
    AllTried,
    /// No worker in rotation can take the request.
    NoneHealthy,
}

/// Buffers that are reused, so that a choice allocates nothing.
#[derive(Default)]
pub struct Scratch {
    candidates: Vec<Candidate>,
    /// Index of each candidate in the snapshot of the registry.
    places: Vec<usize>,
    /// Prefix matches from the tree: leading blocks of the prompt that each worker probably has.
    matches: Vec<(WorkerId, u32)>,
    /// The matches by worker id. All zero between two choices.
    held: Vec<u32>,
}

impl Scratch {
    /// Looks up the prefix matches of `key`.
    fn look_up(&mut self, tree: &PrefixTree, key: Option<&RouteKey>) {
        self.matches.clear();
        if let Some(key) = key {
            tree.lookup(key, &mut self.matches);
        }
    }

    /// Collects the candidates: the workers in rotation for `model` that are not in `tried`. Returns whether there are
    /// workers in rotation, also if all of them are in `tried`.
    fn collect(
        &mut self,
        replicas: &[Arc<Replica>],
        model: Option<ModelName>,
        tried: &[WorkerId],
        now: Instant,
    ) -> bool {
        let Self { candidates, places, matches, held } = self;
        for (id, blocks) in &*matches {
            let id = id.0 as usize;
            held.resize(held.len().max(id + 1), 0);
            held[id] = *blocks;
        }
        // If the breakers of all remaining workers are open, an attempt is better than a refusal.
        let respect_breakers = replicas.iter().any(|replica| {
            let backend = &replica.backend;
            backend.takes_requests() && backend.may_serve(model) && !tried.contains(&replica.id)
        });
        candidates.clear();
        places.clear();
        let mut any_healthy = false;
        for (place, replica) in replicas.iter().enumerate() {
            let backend = &replica.backend;
            if !backend.is_in_rotation()
                || respect_breakers && !backend.takes_requests()
                || !backend.may_serve(model)
            {
                continue;
            }
            any_healthy = true;
            if !tried.contains(&replica.id) {
                let blocks = held.get(replica.id.0 as usize).copied().unwrap_or(0);
                candidates.push(replica.candidate(blocks, now));
                places.push(place);
            }
        }
        for (id, _) in &*matches {
            held[id.0 as usize] = 0;
        }
        any_healthy
    }
}

impl Router {
    /// Chooses among the healthy workers that are not in `tried`, and reserves the load of the request.
    pub fn select(
        &self,
        class: RouteClass<'_>,
        model: Option<ModelName>,
        tried: &[WorkerId],
        now: Instant,
    ) -> Placement {
        let key = match class {
            RouteClass::Policy(Some(key)) if self.policy.uses_tree() => Some(key),
            _ => None,
        };
        let replicas = self.registry.replicas();
        let model = known(&replicas, model);
        // One choice at a time, from the look-up in the tree to the insertion: two requests with the same new
        // prefix that arrive together must not both find it cold.
        let mut scratch = self.choosing.lock();
        scratch.look_up(&self.tree, key);
        let any_healthy = scratch.collect(&replicas, model, tried, now);
        match self.choose(class, &scratch.candidates, now) {
            Some(choice) => {
                let replica = &replicas[scratch.places[choice.index]];
                Placement::Worker(boxed(|| self.reserve(replica, class, key, &choice)))
            }
            None if any_healthy => Placement::AllTried,
            None => Placement::NoneHealthy,
        }
    }

    /// The choice of the policy, or the least loaded worker if the policy has no say. `None` without a candidate.
    fn choose(
        &self,
        class: RouteClass<'_>,
        candidates: &[Candidate],
        now: Instant,
    ) -> Option<Choice> {
        let choice = match class {
            RouteClass::Policy(key) => {
                let owner_share = self.owner_share.share(now);
                self.policy.choose(&PolicyRequest { key, owner_share }, candidates)
            }
            RouteClass::LeastLoaded | RouteClass::Light => None,
        };
        choice.or_else(|| {
            let index = least_loaded(candidates)?;
            Some(Choice { index, uncached_tokens: 0, reason: Reason::NoPrefix, at_owner: None })
        })
    }

    /// Reserves the load of a request on `replica`, and inserts its prompt, `key`, into the tree.
    fn reserve(
        &self,
        replica: &Arc<Replica>,
        class: RouteClass<'_>,
        key: Option<&RouteKey>,
        choice: &Choice,
    ) -> LoadGuard {
        let (tokens, reason) = (u64::from(choice.uncached_tokens), choice.reason);
        let mut guard = match class {
            RouteClass::Light => replica.reserve_light(tokens, reason),
            _ => replica.reserve(tokens, reason),
        };
        replica.counters.selections.increment(reason);
        if let RouteClass::Policy(Some(key)) = class {
            guard.add_answers(key.more_answers);
        }
        if let Some(key) = key {
            let receipt = self.tree.insert(key, replica.id);
            guard.at_owner = choice.at_owner;
            guard.share_prefix(key, receipt.held);
            guard.prediction = replica.learned.predict(receipt);
            // The replica was removed meanwhile, and its share dropped before this insertion: drop it again.
            if replica.is_removed() {
                self.tree.remove_worker(replica.id);
            }
        }
        guard
    }
}
