//! The active health check of one worker: takes it out of rotation, brings it back, and notices when
//! it is another process than before.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use thiserror::Error;
use tokio::time::{sleep_until, timeout};

use crate::{
    fleet::worker::{Phase, Worker, WorkerInfo},
    metrics::Ejection,
    router::Router,
    upstream::{Connection, UpstreamError, call::Call},
};

/// Checks `worker` until the router is gone, or it is removed and has finished what it was serving:
/// until then, who waits for it wants to know if it dies.
pub async fn run(router: Weak<Router>, worker: Arc<Worker>) {
    let mut check = HealthCheck::new(worker);
    loop {
        let began = tokio::time::Instant::now();
        let period = {
            let Some(router) = router.upgrade() else {
                return;
            };
            check.tick(&router).await;
            router.config.health_check_interval_secs.get()
        };
        // A little early, each at its own time: many routers must not ask one worker in step, and
        // period and timeout together stay within two seconds.
        let next = began + period.mul_f64(0.9 + 0.1 * fastrand::f64());
        tokio::select! {
            () = sleep_until(next) => {}
            () = check.worker.doubted() => {}
        }
        if check.worker.is_removed() && check.worker.requests() == 0 {
            return;
        }
    }
}

/// Why a check has failed.
#[derive(Debug, Error)]
enum Trouble {
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("it answered {0}")]
    Status(http::StatusCode),
    #[error(transparent)]
    Broken(#[from] UpstreamError),
}

struct HealthCheck {
    worker: Arc<Worker>,
    /// Kept from check to check, and no other request goes over it. That it had to be opened anew is
    /// the sign of a restart between two checks, so that the worker's information need not be asked
    /// for at every one.
    connection: Option<Connection>,
    failures: u32,
    successes: u32,
    /// When the first check of the present row of failures was sent.
    failing_since: Option<Instant>,
    /// Since it was last healthy something broke that does not break in a process that lives on.
    severed: bool,
}

impl HealthCheck {
    fn new(worker: Arc<Worker>) -> Self {
        Self {
            worker,
            connection: None,
            failures: 0,
            successes: 0,
            failing_since: None,
            severed: false,
        }
    }

    async fn tick(&mut self, router: &Router) {
        let (sent, kept) = (Instant::now(), self.opened_at());
        match self.ask(router).await {
            Ok(()) => {
                let reconnected = self.opened_at() != kept;
                self.severed |= reconnected && kept.is_some();
                self.good(router, reconnected).await;
            }
            Err(trouble) => self.bad(router, sent, &trouble),
        }
        self.worker.pool.sweep();
    }

    async fn ask(&mut self, router: &Router) -> Result<(), Trouble> {
        let limit = router.config.health_check_timeout_secs.get();
        let call = Call::get(router.config.health_check_endpoint.as_str());
        match timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await {
            Ok(Ok((status, _))) if status.is_success() => Ok(()),
            Ok(Ok((status, _))) => Err(Trouble::Status(status)),
            Ok(Err(error)) => Err(Trouble::Broken(error)),
            Err(_) => Err(Trouble::Silent(limit)),
        }
    }

    /// Tells one connection from the next.
    fn opened_at(&self) -> Option<Instant> {
        self.connection.as_ref().map(Connection::opened_at)
    }

    async fn good(&mut self, router: &Router, may_be_new: bool) {
        self.failures = 0;
        self.failing_since = None;
        self.successes = self.successes.saturating_add(1);
        if self.worker.is_removed() {
            return;
        }
        if self.worker.phase() == Phase::Healthy {
            if may_be_new {
                self.learn(router).await;
            }
        } else if self.successes >= router.config.health_success_threshold {
            // First what it is, then traffic: the tree must not claim what a restart has emptied.
            self.learn(router).await;
            self.worker.set_phase(Phase::Healthy);
            router.registry.announce();
            tracing::info!("worker {} is up", self.worker.url);
        }
    }

    fn bad(&mut self, router: &Router, sent: Instant, trouble: &Trouble) {
        let worker = &self.worker;
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        self.severed |= matches!(trouble, Trouble::Broken(_));
        let failing_since = *self.failing_since.get_or_insert(sent);
        let was = worker.phase();
        let is_down = self.failures >= router.config.health_failure_threshold;
        if was == Phase::Healthy {
            worker.counters.ejections.increment(Ejection::HealthCheck);
        }
        if is_down && matches!(was, Phase::Healthy | Phase::Suspect) {
            worker.set_phase(Phase::Down);
            worker.pool.clear();
            router.registry.announce();
            tracing::warn!("worker {} is down: {trouble}", worker.url);
        } else if worker.rotation.suspect() {
            router.registry.announce();
            tracing::warn!("worker {} out of rotation: {trouble}", worker.url);
        } else if was == Phase::Starting && self.failures == 1 {
            tracing::warn!("worker {} is not up yet: {trouble}", worker.url);
        } else {
            tracing::debug!("worker {}: {trouble}", worker.url);
        }
        // A worker that is alive and busy may fail a check while its responses flow; and one that
        // shuts down in order answers badly, or not at all, until it has finished what it has.
        let silent = worker.silent_for() >= failing_since.elapsed();
        let frozen = matches!(trouble, Trouble::Silent(_)) && router.registry.any_takes_requests();
        if silent && (frozen || is_down) {
            worker.give_up();
        }
    }

    /// Asks the worker what it is. Who it is decides whether the tree still knows its cache: another
    /// process starts empty, and so, perhaps, does an engine that does not tell and was severed.
    async fn learn(&mut self, router: &Router) {
        let info = WorkerInfo::parse(&self.read(router, "/get_server_info").await);
        let info = info.with_models(&self.read(router, "/v1/models").await);
        let worker = &self.worker;
        if worker.is_removed() {
            return; // meanwhile, and its share of the tree is gone
        }
        let before = worker.info.load_full();
        let restarted = before.boot_id.is_some() && info.boot_id != before.boot_id;
        let severed = std::mem::take(&mut self.severed);
        let was_away = matches!(worker.phase(), Phase::Suspect | Phase::Down);
        if restarted || info.boot_id.is_none() && severed && was_away {
            router.tree.purge_worker(worker.id);
            tracing::info!("worker {} has restarted: its cache is empty", worker.url);
        }
        if let Some(tokens) = info.max_total_num_tokens {
            router.set_capacity(worker, tokens);
        }
        if info.models != before.models {
            tracing::info!("worker {} serves {}", worker.url, info.models.join(", "));
        }
        // Last, so that who sees the new information finds the tree in accord with it.
        worker.info.store(Arc::new(info));
        router.registry.announce();
    }

    /// The body of a good answer, or nothing.
    async fn read(&mut self, router: &Router, path: &str) -> bytes::Bytes {
        let limit = router.config.health_check_timeout_secs.get();
        let call = Call::get(path);
        match timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await {
            Ok(Ok((status, body))) if status.is_success() => body,
            _ => bytes::Bytes::new(),
        }
    }
}
