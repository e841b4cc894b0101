//! The active health check of one worker: takes it out of rotation, brings it back, and notices when
//! it is another process than before.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use thiserror::Error;
use tokio::time::{Instant, timeout};

use crate::{
    config::Config,
    fleet::{
        patience::Patience,
        registry::Registry,
        worker::{Phase, Worker, WorkerInfo},
    },
    metrics::Ejection,
    tree::PrefixTree,
    upstream::{Connection, UpstreamError, call::Call},
};

/// The last worker in rotation stays there, however late its answers are, until it has been silent for
/// this many times --health-check-timeout-secs.
const LAST_ONE: u32 = 10;

/// A limit that was exceeded by more than this share of it: the router itself did not get to run.
const LATENESS: f64 = 0.25;

/// Why a check has failed.
#[derive(Debug, Error)]
enum Trouble {
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("its health check says that its engine makes no progress")]
    Stuck,
    #[error("its health check answered {0}")]
    Status(http::StatusCode),
    #[error(transparent)]
    Broken(#[from] UpstreamError),
}

/// The body of a health check, as far as the worker sends one that says something. Ours does.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Report {
    status: String,
    /// Seconds since its scheduler was last seen to make progress.
    last_step_age: Option<f64>,
}

impl Report {
    fn parse(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }
}

/// What is known from one worker's checks so far.
pub struct HealthCheck {
    worker: Arc<Worker>,
    /// Kept from check to check, and no other request goes over it. That it had to be opened anew is
    /// the sign of a restart between two checks, so that the worker's information need not be asked
    /// for at every one.
    connection: Option<Connection>,
    patience: Patience,
    failures: u32,
    successes: u32,
    /// When the first check of the present row of failures was sent.
    failing_since: Option<Instant>,
    /// Since it was last healthy something broke that does not break in a process that lives on.
    severed: bool,
}

impl HealthCheck {
    pub fn new(worker: Arc<Worker>, config: &Config) -> Self {
        Self {
            worker,
            connection: None,
            patience: Patience::new(config.health_check_timeout_secs.get()),
            failures: 0,
            successes: 0,
            failing_since: None,
            severed: false,
        }
    }

    /// One check, and what follows from it for the worker, for those who wait for one, and for the
    /// worker's share of the tree.
    pub async fn tick(&mut self, config: &Config, registry: &Registry, tree: &PrefixTree) {
        let (sent, kept) = (Instant::now(), self.opened_at());
        match self.ask(config).await {
            Ok(()) => {
                self.patience.answered(sent.elapsed());
                let reconnected = self.opened_at() != kept;
                self.severed |= reconnected && kept.is_some();
                self.good(config, registry, tree, reconnected).await;
            }
            Err(Trouble::Broken(error)) if error.is_local() => {
                tracing::debug!("worker {} was not checked: {error}", self.worker.url);
            }
            Err(trouble) => {
                if matches!(trouble, Trouble::Silent(_)) {
                    self.patience.missed();
                }
                match self.excuse(config, registry, sent, &trouble) {
                    Some(why) => {
                        tracing::debug!("worker {}: {trouble}, but {why}", self.worker.url);
                    }
                    None => self.bad(config, registry, sent, &trouble),
                }
            }
        }
        self.worker.pool.sweep();
    }

    /// Why a worker in rotation that has not answered in time stays there: slowness alone is no
    /// reason to take it out. `None` if it goes.
    fn excuse(
        &mut self,
        config: &Config,
        registry: &Registry,
        sent: Instant,
        trouble: &Trouble,
    ) -> Option<&'static str> {
        let Trouble::Silent(limit) = trouble else { return None };
        if self.worker.phase() != Phase::Healthy {
            return None;
        }
        if self.worker.heard_since(sent) {
            self.failing_since = None;
            return Some("bytes of its responses have come meanwhile");
        }
        if sent.elapsed() > limit.mul_f64(1.0 + LATENESS) {
            return Some("the router itself was late");
        }
        let failing_since = *self.failing_since.get_or_insert(sent);
        let longest = config.health_check_timeout_secs.get().saturating_mul(LAST_ONE);
        let is_last = !registry.has_other(&self.worker);
        (is_last && failing_since.elapsed() < longest).then_some("it is the last one in rotation")
    }

    async fn ask(&mut self, config: &Config) -> Result<(), Trouble> {
        let limit = self.patience.limit();
        let call = Call::get(config.health_check_endpoint.as_str());
        match timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await {
            Ok(Ok((status, body))) if status.is_success() => {
                self.worker.set_vouched(Report::parse(&body).last_step_age.is_some());
                Ok(())
            }
            Ok(Ok((_, body))) if Report::parse(&body).status == "stuck" => Err(Trouble::Stuck),
            Ok(Ok((status, _))) => Err(Trouble::Status(status)),
            Ok(Err(error)) => Err(Trouble::Broken(error)),
            Err(_) => Err(Trouble::Silent(limit)),
        }
    }

    /// Tells one connection from the next.
    fn opened_at(&self) -> Option<std::time::Instant> {
        self.connection.as_ref().map(Connection::opened_at)
    }

    async fn good(
        &mut self,
        config: &Config,
        registry: &Registry,
        tree: &PrefixTree,
        may_be_new: bool,
    ) {
        self.failures = 0;
        self.failing_since = None;
        self.successes = self.successes.saturating_add(1);
        if self.worker.is_removed() {
            return;
        }
        if self.worker.phase() == Phase::Healthy {
            if may_be_new {
                self.learn(config, registry, tree).await;
            }
        } else if self.successes >= config.health_success_threshold {
            // First what it is, then traffic: the tree must not claim what a restart has emptied.
            self.learn(config, registry, tree).await;
            self.worker.set_phase(Phase::Healthy);
            registry.announce();
            tracing::info!("worker {} is up", self.worker.url);
        }
    }

    fn bad(&mut self, config: &Config, registry: &Registry, sent: Instant, trouble: &Trouble) {
        let worker = &self.worker;
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        self.severed |= matches!(trouble, Trouble::Broken(_));
        let failing_since = *self.failing_since.get_or_insert(sent);
        let was = worker.phase();
        worker.note_trouble(trouble);
        let is_down = self.failures >= config.health_failure_threshold;
        if was == Phase::Healthy {
            worker.counters.ejections.increment(Ejection::HealthCheck);
        }
        if is_down && matches!(was, Phase::Healthy | Phase::Suspect) {
            worker.set_phase(Phase::Down);
            worker.pool.clear();
            registry.announce();
            tracing::warn!("worker {} is down: {trouble}", worker.url);
        } else if worker.rotation.suspect() {
            registry.announce();
            tracing::warn!("worker {} out of rotation: {trouble}", worker.url);
        } else if was == Phase::Starting && self.failures == 1 {
            tracing::info!("waiting for worker {}: {trouble}", worker.url);
        } else {
            tracing::debug!("worker {}: {trouble}", worker.url);
        }
        // A worker that is alive and busy may fail a check while its responses flow; and one that
        // shuts down in order answers badly, or not at all, until it has finished what it has.
        // The length of its silence says less: its first request may have come after the check was sent.
        let silent = !worker.heard_since(failing_since);
        let frozen =
            matches!(trouble, Trouble::Silent(_) | Trouble::Stuck) && registry.has_other(worker);
        if silent && (frozen || is_down) {
            worker.give_up();
        }
    }

    /// Asks the worker what it is. Who it is decides whether the tree still knows its cache: another
    /// process starts empty, and so, perhaps, does an engine that does not tell and was severed.
    async fn learn(&mut self, config: &Config, registry: &Registry, tree: &PrefixTree) {
        let told = self.ask_info(config).await;
        let worker = &self.worker;
        if worker.is_removed() {
            return; // meanwhile, and its share of the tree is gone
        }
        let info = match told {
            Some(info) => info,
            // It is busy. The next check asks again, since the connection is gone.
            None if !self.severed => return,
            None => WorkerInfo::default(),
        };
        let before = worker.info.load_full();
        let restarted = before.boot_id.is_some() && info.boot_id != before.boot_id;
        let severed = std::mem::take(&mut self.severed);
        let was_away = matches!(worker.phase(), Phase::Suspect | Phase::Down);
        if restarted || info.boot_id.is_none() && severed && was_away {
            worker.learned.forget(tree, worker.id);
            tracing::info!("worker {} has restarted: its cache is empty", worker.url);
        }
        if let Some(tokens) = info.max_total_num_tokens {
            worker.learned.set_capacity(tree, worker.id, tokens);
        }
        if info.models != before.models {
            tracing::info!("worker {} serves {}", worker.url, info.models.join(", "));
        }
        // Last, so that who sees the new information finds the tree in accord with it.
        worker.info.store(Arc::new(info));
        registry.announce();
    }

    /// What the worker says of itself; `None` if it has not answered in time.
    async fn ask_info(&mut self, config: &Config) -> Option<WorkerInfo> {
        let mut info = WorkerInfo::parse(&self.read(config, "/get_server_info").await?);
        if info.runtime.is_none() {
            // SGLang's newer name.
            info = WorkerInfo::parse(&self.read(config, "/server_info").await?);
        }
        if info.runtime.is_none() {
            info = info.with_metrics(&self.read(config, "/metrics").await.unwrap_or_default());
        }
        Some(info.with_models(&self.read(config, "/v1/models").await?))
    }

    /// The body of an answer, empty if it is not a good one; `None` if there was none in time.
    async fn read(&mut self, config: &Config, path: &str) -> Option<bytes::Bytes> {
        let limit = config.health_check_timeout_secs.get();
        let call = Call::get(path);
        match timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await {
            Ok(Ok((status, body))) if status.is_success() => Some(body),
            Ok(Ok(_)) => Some(bytes::Bytes::new()),
            _ => None,
        }
    }
}
