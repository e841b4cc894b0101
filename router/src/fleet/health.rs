//! The active health check of one worker: takes it out of rotation, brings it back, and notices when
//! it is another process than before.

use std::{
    sync::{Arc, Weak},
    time::Instant,
};

use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::{
    fleet::worker::{Phase, Worker, WorkerInfo},
    key::BLOCK_TOKENS,
    router::Router,
    upstream::Connection,
    upstream::call::Call,
};

/// Checks `worker` until it is removed or the router is gone.
pub async fn run(router: Weak<Router>, worker: Arc<Worker>) {
    let Some(period) = router.upgrade().map(|r| r.config.health_check_interval_secs.get()) else {
        return;
    };
    let mut ticks = interval(period);
    // After a check that took long, the worker needs a pause more than we need the missed ones.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut check = HealthCheck { worker, connection: None, failures: 0, successes: 0 };
    loop {
        ticks.tick().await;
        let Some(router) = router.upgrade() else {
            return;
        };
        check.tick(&router).await;
    }
}

struct HealthCheck {
    worker: Arc<Worker>,
    /// Kept from check to check. That it had to be opened anew is the sign of a restart between two
    /// checks, so that the worker's information need not be asked for at every one.
    connection: Option<Connection>,
    failures: u32,
    successes: u32,
}

impl HealthCheck {
    async fn tick(&mut self, router: &Router) {
        match self.probe(router).await {
            Ok(reconnected) => self.good(router, reconnected).await,
            Err(reason) => self.bad(router, &reason),
        }
        self.worker.pool.sweep();
    }

    /// Asks the worker. `Ok` tells whether the connection is another than the one before.
    async fn probe(&mut self, router: &Router) -> Result<bool, String> {
        let limit = router.config.health_check_timeout_secs.get();
        let path = router.config.health_check_endpoint.as_str();
        let before = self.opened_at();
        let call = Call::get(path);
        let asked = timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await;
        match asked {
            Ok(Ok((status, _))) if status.is_success() => Ok(self.opened_at() != before),
            Ok(Ok((status, _))) => Err(format!("{path} answered {status}")),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("{path} did not answer within {limit:?}")),
        }
    }

    /// Tells one connection from the next.
    fn opened_at(&self) -> Option<Instant> {
        self.connection.as_ref().map(Connection::opened_at)
    }

    async fn good(&mut self, router: &Router, may_be_new: bool) {
        let (worker, config) = (Arc::clone(&self.worker), &router.config);
        self.failures = 0;
        self.successes = self.successes.saturating_add(1);
        let phase = worker.phase();
        if phase == Phase::Healthy {
            if may_be_new {
                self.learn(router, phase).await;
            }
        } else if self.successes >= config.health_success_threshold {
            // First what it is, then traffic: the tree must not claim what a restart has emptied.
            self.learn(router, phase).await;
            worker.set_phase(Phase::Healthy);
            router.registry.announce();
            tracing::info!("worker {} is up", worker.url);
        }
    }

    fn bad(&mut self, router: &Router, reason: &str) {
        let worker = &self.worker;
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        let down = match worker.phase() {
            Phase::Healthy => self.failures >= router.config.health_failure_threshold,
            // A request has failed on it already; this confirms it.
            Phase::Suspect => true,
            Phase::Starting | Phase::Down => false,
        };
        if down {
            worker.set_phase(Phase::Down);
            router.registry.announce();
            worker.pool.clear();
            router.tree.purge_worker(worker.id);
            tracing::warn!("worker {} is down: {reason}", worker.url);
        } else {
            tracing::debug!("worker {}: {reason}", worker.url);
        }
    }

    /// Reads the worker's identity and cache size. Engines without such an endpoint keep the
    /// defaults, and count as restarted whenever they were away.
    async fn learn(&mut self, router: &Router, phase: Phase) {
        let limit = router.config.health_check_timeout_secs.get();
        let call = Call::get("/get_server_info");
        let asked = timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await;
        let info = match asked {
            Ok(Ok((status, body))) if status.is_success() => WorkerInfo::parse(&body),
            _ => WorkerInfo::default(),
        };
        let worker = &self.worker;
        let before = worker.info.load_full();
        let same = info.boot_id.is_some() && info.boot_id == before.boot_id;
        let was_away = phase == Phase::Suspect;
        let restarted = before.boot_id.is_some() && !same;
        if was_away && !same || restarted {
            router.tree.purge_worker(worker.id);
        }
        if restarted {
            tracing::info!("worker {} has restarted: its cache is empty", worker.url);
        }
        if let Some(tokens) = info.max_total_num_tokens {
            router.tree.set_capacity(worker.id, tokens / u64::from(BLOCK_TOKENS));
        }
        // Last, so that who sees the new information finds the tree in accord with it.
        worker.info.store(Arc::new(info));
        router.registry.announce();
    }
}
