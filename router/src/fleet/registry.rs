//! The set of workers: read on every request without a lock, replaced whole when it changes.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    config::Config,
    error::Error,
    fleet::worker::{Phase, Worker, WorkerView},
    names::{ModelName, WorkerId, WorkerUrl},
    upstream::Pool,
};

pub type Snapshot = Vec<Arc<Worker>>;

#[derive(Debug, Default)]
pub struct Registry {
    workers: ArcSwap<Snapshot>,
    /// The next id. Changes of the set are serialised by it; readers never take it.
    next_id: Mutex<u32>,
    /// Rings when the set or a worker's phase changes: requests may be waiting for a healthy one.
    changed: Notify,
    /// The workers do not all serve the same models, so that it matters what a request names.
    mixed: AtomicBool,
}

impl Registry {
    pub fn workers(&self) -> Guard<Arc<Snapshot>> {
        self.workers.load()
    }

    /// The workers as people see them.
    pub fn views(&self) -> Vec<WorkerView> {
        self.workers().iter().map(|worker| worker.view()).collect()
    }

    /// Whether a request that leaves `worker` now has somewhere to go.
    pub fn has_other(&self, worker: &Worker) -> bool {
        let info = worker.info.load();
        self.workers().iter().any(|other| {
            other.id != worker.id && other.takes_requests() && info.shares_model(&other.info.load())
        })
    }

    /// Whether it depends on its model which workers can take a request.
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
        // `remove` and not `swap_remove`: round robin and people count on the order.
        let worker = workers.remove(index);
        self.workers.store(Arc::new(workers));
        self.announce();
        Ok(worker)
    }

    /// Tells whoever waits that a worker's phase or the set has changed.
    pub fn announce(&self) {
        let mut mixed = false;
        if let [first, others @ ..] = &self.workers()[..] {
            let first = first.info.load();
            mixed = others.iter().any(|worker| worker.info.load().models != first.models);
        }
        self.mixed.store(mixed, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Resolves when `holds` is true of the workers, at once if it is.
    pub async fn wait_until(&self, holds: impl Fn(&[Arc<Worker>]) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Listen before looking, or an announcement in between is lost.
            changed.as_mut().enable();
            if holds(&self.workers()) {
                return;
            }
            changed.await;
        }
    }
}

/// Whether some worker is in rotation that can take a request for `model`.
pub fn any_healthy(workers: &[Arc<Worker>], model: Option<ModelName>) -> bool {
    let only = known(workers, model);
    workers.iter().any(|worker| worker.is_in_rotation() && worker.may_serve(only))
}

/// Whether a worker for `model` is in rotation or suspect: a suspect worker has failed once, and its next health
/// check may bring it back.
pub fn any_expected(workers: &[Arc<Worker>], model: Option<ModelName>) -> bool {
    let only = known(workers, model);
    workers.iter().any(|worker| {
        let is_up = matches!(worker.phase(), Phase::Healthy | Phase::Suspect);
        is_up && !worker.is_withheld() && worker.may_serve(only)
    })
}

/// The model, if a worker says that it serves it: then no other worker will do. If none does, any
/// worker may say what it thinks of the request.
pub fn known(workers: &[Arc<Worker>], model: Option<ModelName>) -> Option<ModelName> {
    model.filter(|model| workers.iter().any(|worker| worker.info.load().serves(*model)))
}
