//! The active health check of one backend. It takes the backend out of rotation, brings it back, and detects a restart.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use thiserror::Error;
use tokio::time::{Instant, timeout};

use super::{
    backend::Backend,
    check_timeout::CheckTimeout,
    health_state::Phase,
    registry::{Registry, replicas_of},
};
use crate::{
    config::Config,
    engine::{WorkerInfo, health::HealthReport},
    metrics::Ejection,
    tree::PrefixTree,
    upstream::{Connection, UpstreamError, call::Call},
};

/// The last worker in rotation stays there despite late checks, until it has been silent for this multiple of
/// --health-check-timeout-secs.
const LAST_WORKER_MULTIPLE: u32 = 10;

/// Maximum lateness of a timer, as a share of its length. A later timer shows that the router itself did not run.
const MAX_LATENESS: f64 = 0.25;

/// Maximum number of ranks of one backend; the router ignores further ones.
const MAX_RANKS: u32 = 256;

/// The failure of a check.
#[derive(Debug, Error)]
enum CheckError {
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("its health check says that its engine makes no progress")]
    Stuck,
    #[error("its health check answered {0}")]
    Status(StatusCode),
    #[error("it has no {0}: --health-check-endpoint is the path of its health check")]
    NotFound(String),
    #[error(transparent)]
    Broken(#[from] UpstreamError),
}

/// The health check of one backend.
pub struct HealthCheck {
    backend: Arc<Backend>,
    /// Used by the checks only, and kept open between them. A restart between two checks closes it, so the worker's
    /// information is read again only after a reconnect.
    connection: Option<Connection>,
    check_timeout: CheckTimeout,
    failures: u32,
    successes: u32,
    /// Send time of the first failed check of the present series.
    failing_since: Option<Instant>,
    /// Whether a connection has broken since the worker was last healthy: the process may have ended.
    connection_broke: bool,
}

impl HealthCheck {
    pub fn new(backend: Arc<Backend>, config: &Config) -> Self {
        Self {
            backend,
            connection: None,
            check_timeout: CheckTimeout::new(config.health_check_timeout_secs.get()),
            failures: 0,
            successes: 0,
            failing_since: None,
            connection_broke: false,
        }
    }

    /// Runs one check and applies its result to the backend, to the registry, and to the shares of its replicas in the
    /// tree.
    pub async fn tick(&mut self, config: &Config, registry: &Registry, tree: &PrefixTree) {
        let (sent, kept) = (Instant::now(), self.opened_at());
        match self.ask(config).await {
            Ok(()) => {
                self.check_timeout.answered(sent.elapsed());
                let reconnected = self.opened_at() != kept;
                self.connection_broke |= reconnected && kept.is_some();
                self.good(config, registry, tree, reconnected).await;
            }
            Err(CheckError::Broken(error)) if error.is_local() => {
                tracing::debug!("worker {} was not checked: {error}", self.backend.url);
            }
            Err(error) => {
                if matches!(error, CheckError::Silent(_)) {
                    self.check_timeout.missed();
                }
                match self.reason_to_keep(config, registry, sent, &error) {
                    Some(why) => {
                        tracing::debug!("worker {}: {error}, but {why}", self.backend.url);
                    }
                    None => self.bad(config, registry, sent, &error),
                }
            }
        }
        self.backend.pool.sweep();
    }

    /// Returns a reason to keep a worker in rotation although its check timed out: slowness alone does not count as a
    /// failure. `None` if there is no such reason.
    fn reason_to_keep(
        &mut self,
        config: &Config,
        registry: &Registry,
        sent: Instant,
        error: &CheckError,
    ) -> Option<&'static str> {
        let CheckError::Silent(limit) = error else { return None };
        if self.backend.phase() != Phase::Healthy {
            return None;
        }
        if self.backend.received_since(sent) {
            self.failing_since = None;
            return Some("bytes of its responses have come meanwhile");
        }
        if sent.elapsed() > limit.mul_f64(1.0 + MAX_LATENESS) {
            // It has not seen whether the worker was silent all the time.
            self.failing_since = None;
            return Some("the router itself was late");
        }
        let failing_since = *self.failing_since.get_or_insert(sent);
        let longest = config.health_check_timeout_secs.get().saturating_mul(LAST_WORKER_MULTIPLE);
        let is_last = !registry.has_other(&self.backend);
        (is_last && failing_since.elapsed() < longest).then_some("it is the last one in rotation")
    }

    async fn ask(&mut self, config: &Config) -> Result<(), CheckError> {
        let limit = self.check_timeout.limit();
        let call = Call::get(config.health_check_endpoint.as_str());
        match timeout(limit, call.over(&mut self.connection, &self.backend.pool)).await {
            Ok(Ok((status, body))) if status.is_success() => {
                self.backend.set_health_covers_engine(HealthReport::parse(&body).covers_engine());
                Ok(())
            }
            Ok(Ok((_, body))) if HealthReport::parse(&body).is_stuck() => Err(CheckError::Stuck),
            Ok(Ok((StatusCode::NOT_FOUND, _))) => {
                Err(CheckError::NotFound(config.health_check_endpoint.as_str().to_owned()))
            }
            Ok(Ok((status, _))) => Err(CheckError::Status(status)),
            Ok(Err(error)) => Err(CheckError::Broken(error)),
            Err(_) => Err(CheckError::Silent(limit)),
        }
    }

    /// Time of opening, which identifies the connection.
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
        if self.backend.is_removed() {
            return;
        }
        if self.backend.phase() == Phase::Healthy {
            if may_be_new {
                self.learn(config, registry, tree).await;
            }
        } else if self.successes >= config.health_success_threshold {
            // The information comes before the traffic: after a restart the tree must forget the old cache first.
            self.learn(config, registry, tree).await;
            self.backend.set_phase(Phase::Healthy);
            registry.announce();
            tracing::info!("worker {} is up", self.backend.url);
        }
    }

    fn bad(&mut self, config: &Config, registry: &Registry, sent: Instant, error: &CheckError) {
        let backend = &self.backend;
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        self.connection_broke |= matches!(error, CheckError::Broken(_));
        let failing_since = *self.failing_since.get_or_insert(sent);
        let was = backend.phase();
        backend.record_failure(error);
        let is_down = self.failures >= config.health_failure_threshold;
        if was == Phase::Healthy {
            backend.counters.ejections.increment(Ejection::HealthCheck);
        }
        if is_down && matches!(was, Phase::Healthy | Phase::Suspect) {
            backend.set_phase(Phase::Down);
            backend.pool.clear();
            registry.announce();
            tracing::warn!("worker {} is down: {error}", backend.url);
        } else if backend.health.suspect() {
            registry.announce();
            tracing::warn!("worker {} out of rotation: {error}", backend.url);
        } else if was == Phase::Starting && self.failures == 1 {
            tracing::info!("waiting for worker {}: {error}", backend.url);
        } else {
            tracing::debug!("worker {}: {error}", backend.url);
        }
        // A busy worker may fail a check while it sends responses, and so does a worker that drains. The length of the
        // silence is no evidence: the first request may have come after the check was sent.
        let silent = !backend.received_since(failing_since);
        let frozen = matches!(error, CheckError::Silent(_) | CheckError::Stuck)
            && registry.has_other(backend);
        if silent && (frozen || is_down) {
            backend.health.mark_lost();
        }
    }

    /// Reads the worker's information. Another process (`boot_id`) has empty caches, so their shares of the tree are
    /// dropped. An engine without a `boot_id` may have restarted if its connection broke.
    async fn learn(&mut self, config: &Config, registry: &Registry, tree: &PrefixTree) {
        let answered = self.ask_info(config).await;
        let backend = &self.backend;
        if backend.is_removed() {
            return; // the shares of the tree are gone
        }
        let info = match answered {
            Some(info) => info,
            // The worker is busy. The connection is closed, so the next check reads the information again.
            None if !self.connection_broke => return,
            None => WorkerInfo::default(),
        };
        let before = backend.info.load_full();
        let restarted = before.boot_id.is_some() && info.boot_id != before.boot_id;
        let connection_broke = std::mem::take(&mut self.connection_broke);
        let was_away = matches!(backend.phase(), Phase::Suspect | Phase::Down);
        if restarted || info.boot_id.is_none() && connection_broke && was_away {
            for replica in replicas_of(&registry.replicas(), backend) {
                replica.learned.forget(tree, replica.id);
            }
            tracing::info!("worker {} has restarted: its cache is empty", backend.url);
        }
        if config.dp_aware {
            let ranks = info.dp_size.unwrap_or(1).clamp(1, MAX_RANKS);
            for replica in registry.set_ranks(backend, ranks, config) {
                replica.retire();
                tree.remove_worker(replica.id);
            }
        }
        if let Some(tokens) = info.max_total_num_tokens {
            for replica in replicas_of(&registry.replicas(), backend) {
                replica.learned.set_capacity(tree, replica.id, tokens);
            }
        }
        if info.models != before.models {
            // Names come from the worker: none may begin another line.
            let models = info.models.join(", ");
            tracing::info!("worker {} serves {}", backend.url, models.escape_debug());
        }
        // Stored last: a reader of the new information must find the tree up to date.
        backend.info.store(Arc::new(info));
        registry.announce();
    }

    /// Reads the worker's information from its endpoints. `None` if an answer did not come in time.
    async fn ask_info(&mut self, config: &Config) -> Option<WorkerInfo> {
        let mut info = WorkerInfo::parse(&self.read(config, "/get_server_info").await?);
        if info.runtime.is_none() {
            // SGLang's newer path.
            info = WorkerInfo::parse(&self.read(config, "/server_info").await?);
        }
        if info.runtime.is_none() {
            info = info.with_metrics(&self.read(config, "/metrics").await.unwrap_or_default());
        }
        Some(info.with_models(&self.read(config, "/v1/models").await?))
    }

    /// Returns the body of a response: empty if its status is an error, `None` if it did not come in time.
    async fn read(&mut self, config: &Config, path: &str) -> Option<bytes::Bytes> {
        let limit = config.health_check_timeout_secs.get();
        let call = Call::get(path);
        match timeout(limit, call.over(&mut self.connection, &self.backend.pool)).await {
            Ok(Ok((status, body))) if status.is_success() => Some(body),
            Ok(Ok(_)) => Some(bytes::Bytes::new()),
            _ => None,
        }
    }
}
