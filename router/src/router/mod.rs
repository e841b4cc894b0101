//! Everything that lives as long as the router: what each request and each health check shares.

mod engine_watch;
mod learn;
mod sampling;
pub mod select;
mod watch;

use std::{fmt::Display, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tokio::runtime;

use crate::{
    admission::{BodyMemory, Budget, Queue},
    config::{ApiKey, Config},
    correct::HomeShare,
    error::{Error, StartError},
    fleet::{
        registry::{self, Registry},
        worker::Worker,
    },
    history::History,
    metrics::{Metrics, UpstreamFailure},
    names::WorkerUrl,
    policy::{self, Policy},
    shutdown::Gate,
    telemetry::Tracer,
    tree::PrefixTree,
    upstream::{
        Dialer, Pool,
        address::{Networks, WorkerAddress},
    },
};
use select::Scratch;

pub struct Router {
    pub config: Config,
    pub registry: Registry,
    pub tree: PrefixTree,
    pub policy: Box<dyn Policy>,
    /// What other routers have cached for this one.
    home: HomeShare,
    pub metrics: Arc<Metrics>,
    pub history: History,
    pub gate: Arc<Gate>,
    pub started: Instant,
    /// If traces are wanted.
    pub tracer: Option<Arc<Tracer>>,
    pub queue: Arc<Queue>,
    pub budget: Budget,
    pub bodies: Arc<BodyMemory>,
    dialer: Arc<Dialer>,
    /// Makes choosing and booking one step: without it, requests that arrive together would all see
    /// the same idle worker and all go there.
    choosing: Mutex<Scratch>,
    /// Health checks run here, whatever thread adds the worker.
    runtime: runtime::Handle,
}

impl Router {
    /// Must be called within a tokio runtime. The workers of the config are registered at once.
    pub fn new(config: Config) -> Result<Arc<Self>, StartError> {
        let policy = policy::of(&config);
        Self::with_policy(config, policy)
    }

    /// The same with a policy of the caller's instead of the config's.
    pub fn with_policy(config: Config, policy: Box<dyn Policy>) -> Result<Arc<Self>, StartError> {
        let metrics = Arc::<Metrics>::default();
        let collector = config.otlp_traces_endpoint.clone();
        let tracer = collector.map(|url| Tracer::start(url, Arc::clone(&metrics)));
        let router = Arc::new(Self {
            registry: Registry::default(),
            tree: PrefixTree::new(config.default_cache_blocks()),
            policy,
            home: HomeShare::default(),
            gate: Arc::default(),
            started: Instant::now(),
            queue: Arc::new(Queue::new(&config, Arc::clone(&metrics))),
            metrics,
            history: History::default(),
            tracer,
            dialer: Arc::new(Dialer::new(&config)?),
            bodies: Arc::new(BodyMemory::new(config.max_payload_size)),
            budget: Budget::new(config.retry_budget.get()),
            choosing: Mutex::default(),
            runtime: runtime::Handle::current(),
            config,
        });
        for url in &router.config.worker_urls {
            if let Err(error) = router.add_worker(WorkerAddress::trusted(url.clone())) {
                tracing::warn!("--worker-urls: {error}");
            }
        }
        router.runtime.spawn(sampling::run(Arc::downgrade(&router)));
        Ok(router)
    }

    /// Registers a worker. It takes requests after its first good health check, which starts now.
    pub fn add_worker(self: &Arc<Self>, address: WorkerAddress) -> Result<Arc<Worker>, Error> {
        let url = address.url().clone();
        let pool = Pool::new(
            address,
            Arc::clone(&self.dialer),
            self.config.upstream_idle_timeout_secs.get(),
            self.config.worker_key().map(ApiKey::bearer),
        );
        let worker = self.registry.add(url, pool, &self.config)?;
        let check = watch::run(Arc::downgrade(self), Arc::clone(&worker));
        worker.attach_health_check(self.runtime.spawn(check).abort_handle());
        self.runtime.spawn(engine_watch::run(Arc::downgrade(self), Arc::clone(&worker)));
        Ok(worker)
    }

    /// Registers a worker that a client has named, if it lies where workers may lie.
    pub async fn add_named_worker(self: &Arc<Self>, url: WorkerUrl) -> Result<Arc<Worker>, Error> {
        let networks = Networks::new(&self.config.worker_networks);
        let limit = self.config.connect_timeout_secs.get();
        self.add_worker(WorkerAddress::checked(url, networks, limit).await?)
    }

    /// Takes a worker out for good. What it is serving now it may finish.
    pub fn remove_worker(&self, url: &WorkerUrl) -> Result<(), Error> {
        let worker = self.registry.remove(url)?;
        worker.retire();
        self.tree.remove_worker(worker.id);
        tracing::info!("worker {url} removed");
        Ok(())
    }

    /// Whether a worker should get no requests for now, whatever its health.
    pub fn withhold(&self, url: &WorkerUrl, withheld: bool) {
        if let Some(worker) = self.find(url) {
            worker.withhold(withheld);
            self.registry.announce();
            let state = if withheld { "not ready: no requests for now" } else { "ready again" };
            tracing::info!("worker {url} is {state}");
        }
    }

    /// A request has failed on a worker in a way that speaks against the worker.
    pub fn suspect(&self, worker: &Worker, failure: UpstreamFailure, error: &dyn Display) {
        self.metrics.upstream_error(failure);
        if worker.suspect() {
            worker.note_trouble(error);
            self.registry.announce();
            let url = &worker.url;
            tracing::warn!("worker {url} out of rotation until a good health check: {error}");
        }
    }

    pub fn find(&self, url: &WorkerUrl) -> Option<Arc<Worker>> {
        self.registry.workers().iter().find(|worker| worker.url == *url).cloned()
    }

    /// Ends the health checks and closes idle connections.
    pub fn retire(&self) {
        for worker in self.registry.workers().iter() {
            worker.stop();
        }
    }

    pub fn is_ready(&self) -> bool {
        !self.gate.is_draining() && registry::any_healthy(&self.registry.workers(), None)
    }
}
