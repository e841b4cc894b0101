//! The state of the router, shared by all requests and health checks.

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
    correct::OwnerShare,
    error::{Error, StartError},
    fleet::{
        Backend, Replica, WorkerSpec,
        registry::{self, Registry},
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
    /// Share of unknown prompts that were cached at their rendezvous owner.
    owner_share: OwnerShare,
    pub metrics: Arc<Metrics>,
    pub history: History,
    pub gate: Gate,
    pub started: Instant,
    /// `None` if traces are off.
    pub tracer: Option<Arc<Tracer>>,
    pub queue: Arc<Queue>,
    pub budget: Budget,
    pub bodies: Arc<BodyMemory>,
    dialer: Arc<Dialer>,
    /// Makes the choice of a worker and the reservation one atomic step. Otherwise requests that arrive together would
    /// all choose the same idle worker.
    choosing: Mutex<Scratch>,
    /// Runtime of the health checks. Any thread may add a worker.
    runtime: runtime::Handle,
}

impl Router {
    /// Creates a router and registers the workers of the config. Must be called within a tokio runtime.
    pub fn new(config: Config) -> Result<Arc<Self>, StartError> {
        let policy = policy::of(&config);
        Self::with_policy(config, policy)
    }

    /// Creates a router with `policy` instead of the policy of the config.
    pub fn with_policy(config: Config, policy: Box<dyn Policy>) -> Result<Arc<Self>, StartError> {
        let metrics = Arc::<Metrics>::default();
        let collector = config.otlp_traces_endpoint.clone();
        let tracer = collector.map(|url| Tracer::start(url, Arc::clone(&metrics)));
        let router = Arc::new(Self {
            registry: Registry::default(),
            tree: PrefixTree::new(config.default_cache_blocks()),
            policy,
            owner_share: OwnerShare::default(),
            gate: Gate::default(),
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
            if let Err(error) = router.add_worker(url.clone().into()) {
                tracing::warn!("--worker-urls: {error}");
            }
        }
        router.runtime.spawn(sampling::run(Arc::downgrade(&router)));
        Ok(router)
    }

    /// Registers a worker of the operator. It may lie in any network.
    pub fn add_worker(self: &Arc<Self>, spec: WorkerSpec) -> Result<Arc<Replica>, Error> {
        self.register(WorkerAddress::trusted(spec.url), spec.api_key.as_ref())
    }

    /// Registers a worker by a client's request. Its addresses must lie within --worker-networks.
    pub async fn add_named_worker(
        self: &Arc<Self>,
        spec: WorkerSpec,
    ) -> Result<Arc<Replica>, Error> {
        let networks = Networks::new(&self.config.worker_networks);
        let limit = self.config.connect_timeout_secs.get();
        let address = WorkerAddress::checked(spec.url, networks, limit).await?;
        self.register(address, spec.api_key.as_ref())
    }

    /// Registers a worker and starts its health check. It takes requests after the first good check.
    fn register(
        self: &Arc<Self>,
        address: WorkerAddress,
        api_key: Option<&ApiKey>,
    ) -> Result<Arc<Replica>, Error> {
        let url = address.url().clone();
        let pool = Pool::new(
            address,
            Arc::clone(&self.dialer),
            self.config.upstream_idle_timeout_secs.get(),
            api_key.or(self.config.worker_key()).map(ApiKey::bearer),
        );
        let replica = self.registry.add(url, pool, &self.config)?;
        let backend = &replica.backend;
        let check = watch::health(Arc::downgrade(self), Arc::clone(backend));
        backend.attach_health_check(self.runtime.spawn(check).abort_handle());
        self.runtime.spawn(watch::engine(Arc::downgrade(self), Arc::clone(backend)));
        Ok(replica)
    }

    /// Removes a worker. Its requests in flight finish.
    pub fn remove_worker(&self, url: &WorkerUrl) -> Result<(), Error> {
        let replicas = self.registry.remove(url)?;
        for replica in &replicas {
            replica.retire();
            self.tree.remove_worker(replica.id);
        }
        replicas[0].backend.retire();
        tracing::info!("worker {url} removed");
        Ok(())
    }

    /// Starts or stops withholding requests from a worker, independently of its health.
    pub fn withhold(&self, url: &WorkerUrl, withheld: bool) {
        if let Some(backend) = self.find(url) {
            backend.withhold(withheld);
            self.registry.announce();
            let state = if withheld { "not ready: no requests for now" } else { "ready again" };
            tracing::info!("worker {url} is {state}");
        }
    }

    /// Takes a worker out of rotation after a request failed on it by its fault.
    pub fn suspect(&self, backend: &Backend, failure: UpstreamFailure, error: &dyn Display) {
        self.metrics.upstream_error(failure);
        if backend.suspect() {
            backend.record_failure(error);
            self.registry.announce();
            let url = &backend.url;
            tracing::warn!("worker {url} out of rotation until a good health check: {error}");
        }
    }

    pub fn find(&self, url: &WorkerUrl) -> Option<Arc<Backend>> {
        registry::backends(&self.registry.replicas()).find(|backend| backend.url == *url).cloned()
    }

    /// Stops the health checks and closes idle connections.
    pub fn retire(&self) {
        for backend in registry::backends(&self.registry.replicas()) {
            backend.stop();
        }
    }

    pub fn is_ready(&self) -> bool {
        !self.gate.is_draining() && registry::any_healthy(&self.registry.replicas(), None)
    }
}
