//! The set of workers. Every request reads it without a lock; a change replaces the whole set.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    health_state::Phase,
    worker::{Worker, WorkerView},
};
use crate::{
    config::Config,
    error::Error,
    names::{ModelName, WorkerId, WorkerUrl},
    upstream::Pool,
};

pub type Snapshot = Vec<Arc<Worker>>;

#[derive(Debug, Default)]
pub struct Registry {
    workers: ArcSwap<Snapshot>,
    /// The next worker id. Its lock serialises changes of the set; readers never take it.
    next_id: Mutex<u32>,
    /// Notified when the set or the phase of a worker changes: requests may wait for a healthy worker.
    changed: Notify,
    /// Whether the workers serve different models, so the model of a request matters.
    mixed: AtomicBool,
}

impl Registry {
    pub fn workers(&self) -> Guard<Arc<Snapshot>> {
        self.workers.load()
    }

    /// The workers for `/workers` and the bindings.
    pub fn views(&self) -> Vec<WorkerView> {
        self.workers().iter().map(|worker| worker.view()).collect()
    }

    /// Whether another worker can take the requests of `worker` now.
    pub fn has_other(&self, worker: &Worker) -> bool {
        let info = worker.info.load();
        self.workers().iter().any(|other| {
            other.id != worker.id && other.takes_requests() && info.shares_model(&other.info.load())
        })
    }

    /// Whether the model of a request decides which workers can take it.
    pub fn is_mixed(&self) -> bool {
        self.mixed.load(Ordering::Relaxed)
    }

    pub fn add(&self, url: WorkerUrl, pool: Pool, config: &Config) -> Result<Arc<Worker>, Error> {
        let mut next_id = self.next_id.lock();
        let mut workers = Snapshot::clone(&self.workers());
        if workers.iter().any(|worker| worker.url == url) {
            return Err(Error::WorkerExists(url.to_string()));
        }
        let worker = Arc::new(Worker::new(WorkerId(*next_id), url, pool, config));
        *next_id += 1;
        workers.push(Arc::clone(&worker));
        self.workers.store(Arc::new(workers));
        self.announce();
        Ok(worker)
    }

    pub fn remove(&self, url: &WorkerUrl) -> Result<Arc<Worker>, Error> {
        let _changing = self.next_id.lock();
        let mut workers = Snapshot::clone(&self.workers());
        let Some(index) = workers.iter().position(|worker| worker.url == *url) else {
            return Err(Error::WorkerUnknown(url.to_string()));
        };
        // `remove` and not `swap_remove`: round robin and readers of the list rely on the order.
        let worker = workers.remove(index);
        self.workers.store(Arc::new(workers));
        self.announce();
        Ok(worker)
    }

    /// Notifies the waiting requests that the set or the phase of a worker has changed.
    pub fn announce(&self) {
        let mut mixed = false;
        if let [first, others @ ..] = &self.workers()[..] {
            let first = first.info.load();
            mixed = others.iter().any(|worker| worker.info.load().models != first.models);
        }
        self.mixed.store(mixed, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Resolves when `holds` is true of the workers; at once if it is true now.
    pub async fn wait_until(&self, holds: impl Fn(&[Arc<Worker>]) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the test: a notification in between would be lost otherwise.
            changed.as_mut().enable();
            if holds(&self.workers()) {
                return;
            }
            changed.await;
        }
    }
}

/// Whether a worker in rotation can take a request for `model`.
pub fn any_healthy(workers: &[Arc<Worker>], model: Option<ModelName>) -> bool {
    let only = known(workers, model);
    workers.iter().any(|worker| worker.is_in_rotation() && worker.may_serve(only))
}

/// Whether a worker for `model` is healthy or suspect. A suspect worker has failed once; its next health check may
/// bring it back.
pub fn any_expected(workers: &[Arc<Worker>], model: Option<ModelName>) -> bool {
    let only = known(workers, model);
    workers.iter().any(|worker| {
        let is_up = matches!(worker.phase(), Phase::Healthy | Phase::Suspect);
        is_up && !worker.is_withheld() && worker.may_serve(only)
    })
}

/// Returns `model` if some worker serves it: then only such workers get the request. Otherwise any worker gets it, and
/// decides on the unknown model itself.
pub fn known(workers: &[Arc<Worker>], model: Option<ModelName>) -> Option<ModelName> {
    model.filter(|model| workers.iter().any(|worker| worker.info.load().serves(*model)))
}
