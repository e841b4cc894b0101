//! The set of workers. Every request reads it without a lock; a change replaces the whole set.

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    backend::Backend,
    health_state::Phase,
    replica::{Replica, WorkerView},
};
use crate::{
    config::Config,
    error::Error,
    names::{ModelName, WorkerId, WorkerUrl},
    upstream::Pool,
};

/// All replicas; those of one backend are neighbours.
pub type Snapshot = Vec<Arc<Replica>>;

#[derive(Debug, Default)]
pub struct Registry {
    replicas: ArcSwap<Snapshot>,
    /// The next worker id. Its lock serialises changes of the set; readers never take it.
    next_id: Mutex<u32>,
    /// Notified when the set or the phase of a worker changes: requests may wait for a healthy worker.
    changed: Notify,
    /// Whether the workers serve different models, so the model of a request matters.
    mixed: AtomicBool,
    /// Held while `mixed` is determined: an older result must not replace a newer one.
    announcing: Mutex<()>,
}

impl Registry {
    pub fn replicas(&self) -> Guard<Arc<Snapshot>> {
        self.replicas.load()
    }

    /// The workers for `/workers` and the bindings.
    pub fn views(&self) -> Vec<WorkerView> {
        self.replicas().iter().map(|replica| replica.view()).collect()
    }

    /// Whether another process can take the requests of `backend` now.
    pub fn has_other(&self, backend: &Backend) -> bool {
        let info = backend.info.load();
        backends(&self.replicas()).any(|other| {
            !ptr::eq(&raw const **other, backend)
                && other.takes_requests()
                && info.shares_model(&other.info.load())
        })
    }

    /// Whether the model of a request decides which workers can take it.
    pub fn is_mixed(&self) -> bool {
        self.mixed.load(Ordering::Relaxed)
    }

    pub fn add(&self, url: WorkerUrl, pool: Pool, config: &Config) -> Result<Arc<Replica>, Error> {
        let mut next_id = self.next_id.lock();
        let mut replicas = Snapshot::clone(&self.replicas());
        if backends(&replicas).any(|backend| backend.url == url) {
            return Err(Error::WorkerExists(url.to_string()));
        }
        let backend = Arc::new(Backend::new(url, pool, config));
        let replica = Arc::new(Replica::new(WorkerId(*next_id), backend, None, config));
        *next_id += 1;
        replicas.push(Arc::clone(&replica));
        self.replicas.store(Arc::new(replicas));
        self.announce();
        Ok(replica)
    }

    /// Removes the backend with this URL. Returns its replicas.
    pub fn remove(&self, url: &WorkerUrl) -> Result<Snapshot, Error> {
        let _changing = self.next_id.lock();
        let (removed, replicas): (Snapshot, Snapshot) =
            self.replicas().iter().cloned().partition(|replica| replica.backend.url == *url);
        if removed.is_empty() {
            return Err(Error::WorkerUnknown(url.to_string()));
        }
        self.replicas.store(Arc::new(replicas));
        self.announce();
        Ok(removed)
    }

    /// Gives `backend` a replica for each of its `count` data-parallel ranks. Returns the replicas that these replace:
    /// none if it has them already, or was removed.
    pub fn set_ranks(&self, backend: &Arc<Backend>, count: u32, config: &Config) -> Snapshot {
        let mut next_id = self.next_id.lock();
        let mut replicas = Snapshot::clone(&self.replicas());
        let own = replicas_of(&replicas, backend);
        let (Some(first), false) = (own.first(), own.len() == count as usize) else {
            return Snapshot::new();
        };
        let at = replicas.iter().position(|replica| replica.id == first.id).unwrap_or_default();
        let places = at..at + own.len();
        let ranks = (0..count).map(|rank| {
            let rank = (count > 1).then_some(rank);
            let replica = Replica::new(WorkerId(*next_id), Arc::clone(backend), rank, config);
            *next_id += 1;
            Arc::new(replica)
        });
        let replaced = replicas.splice(places, ranks).collect();
        self.replicas.store(Arc::new(replicas));
        self.announce();
        replaced
    }

    /// Notifies the waiting requests that the set or the phase of a worker has changed.
    pub fn announce(&self) {
        let announcing = self.announcing.lock();
        let replicas = self.replicas();
        let mut backends = backends(&replicas);
        let mixed = backends.next().is_some_and(|first| {
            let first = first.info.load();
            backends.any(|other| other.info.load().models != first.models)
        });
        self.mixed.store(mixed, Ordering::Relaxed);
        drop(announcing);
        self.changed.notify_waiters();
    }

    /// Resolves when `holds` is true of the workers; at once if it is true now.
    pub async fn wait_until(&self, holds: impl Fn(&[Arc<Replica>]) -> bool) {
        loop {
            // Made before the test: from now on it is woken, also by a notification before its first poll.
            let changed = self.changed.notified();
            if holds(&self.replicas()) {
                return;
            }
            changed.await;
        }
    }
}

/// The backends of `replicas`, each once.
pub fn backends(replicas: &[Arc<Replica>]) -> impl Iterator<Item = &Arc<Backend>> {
    replicas_by_backend(replicas).map(|replicas| &replicas[0].backend)
}

/// The replicas of each backend.
fn replicas_by_backend(replicas: &[Arc<Replica>]) -> impl Iterator<Item = &[Arc<Replica>]> {
    replicas.chunk_by(|one, next| Arc::ptr_eq(&one.backend, &next.backend))
}

/// The replicas of `backend`; empty if it was removed.
pub fn replicas_of<'a>(replicas: &'a [Arc<Replica>], backend: &Backend) -> &'a [Arc<Replica>] {
    let is_own = |replicas: &&[Arc<Replica>]| ptr::eq(&raw const *replicas[0].backend, backend);
    replicas_by_backend(replicas).find(is_own).unwrap_or_default()
}

/// Whether a worker in rotation can take a request for `model`.
pub fn any_healthy(replicas: &[Arc<Replica>], model: Option<ModelName>) -> bool {
    let only = known(replicas, model);
    backends(replicas).any(|backend| backend.is_in_rotation() && backend.may_serve(only))
}

/// Whether a worker for `model` is healthy or suspect. A suspect worker has failed once; its next health check may
/// bring it back.
pub fn any_expected(replicas: &[Arc<Replica>], model: Option<ModelName>) -> bool {
    let only = known(replicas, model);
    backends(replicas).any(|backend| {
        let is_up = matches!(backend.phase(), Phase::Healthy | Phase::Suspect);
        is_up && !backend.is_withheld() && backend.may_serve(only)
    })
}

/// Returns `model` if some worker serves it: then only such workers get the request. Otherwise any worker gets it, and
/// decides on the unknown model itself.
pub fn known(replicas: &[Arc<Replica>], model: Option<ModelName>) -> Option<ModelName> {
    model.filter(|model| backends(replicas).any(|backend| backend.info.load().serves(*model)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::WorkerInfo, router::Router};

    fn serving(model: &str) -> Arc<WorkerInfo> {
        let list = format!(r#"{{"data":[{{"id":"{model}"}}]}}"#);
        Arc::new(WorkerInfo::default().with_models(list.as_bytes()))
    }

    #[tokio::test]
    async fn an_announcement_that_began_earlier_does_not_hide_a_new_model() {
        let urls = (0..100).map(|number| format!("http://w{number}:1").parse().expect("a URL"));
        let config = Config { worker_urls: urls.collect(), ..Config::default() };
        let router = Router::new(config).expect("a config to start with");
        let registry = &router.registry;
        let backends: Vec<_> = backends(&registry.replicas()).cloned().collect();
        let (one, other, done) = (serving("one"), serving("other"), AtomicBool::new(false));
        for backend in &backends {
            backend.info.store(Arc::clone(&one));
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    registry.announce();
                }
            });
            let mut hidden = 0;
            for _ in 0..2000 {
                backends[1].info.store(Arc::clone(&other));
                registry.announce();
                hidden += (0..1000).filter(|_| !registry.is_mixed()).count();
                backends[1].info.store(Arc::clone(&one));
                registry.announce();
            }
            done.store(true, Ordering::SeqCst);
            assert_eq!(hidden, 0);
        });
        router.retire();
    }
}
