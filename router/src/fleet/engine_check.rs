//! The check of one backend's engine. It is for workers whose health check says nothing about the engine: an engine
//! may freeze behind an HTTP server that answers.
//!
//! An engine shows progress in one of two ways. `/health_generate` (SGLang) generates a token, or waits for a sign
//! of the scheduler. The token counts in `/metrics` (vLLM) increase. The router looks at both while a worker with
//! requests is silent. For an engine without either, only the silence counts (`proxy::waiting`).

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use tokio::time::{Instant, timeout};

use super::{
    backend::Backend,
    breaker::BreakerState,
    health_state::Phase,
    registry::{Registry, replicas_of},
};
use crate::{
    engine::{EngineLoad, health::GENERATE_PATH},
    upstream::{Connection, call::Call},
};

/// Time limit for reading the figures, and for the first canary request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Silence of a worker after which its engine is checked.
const MIN_SILENCE: Duration = Duration::from_secs(1);

/// Minimum limit for a canary request. SGLang answers after one second, or after two if a step takes longer than one.
const MIN_CANARY_TIMEOUT: Duration = Duration::from_millis(2200);

/// Ticks between two reads of the figures.
const READ_PERIOD: u32 = 4;

/// Ticks between two reads if the engine has no such page. Its next process may have one.
const RETRY_PERIOD: u32 = 120;

/// Ticks with work in a period for which the longest silence is learned.
const LEARNING_PERIOD: u32 = 60;

/// Whether the engine answers `/health_generate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Canary {
    Unknown,
    Missing,
    Known,
}

/// The engine check of one backend.
pub struct EngineCheck {
    backend: Arc<Backend>,
    /// Used by these checks only.
    connection: Option<Connection>,
    canary: Canary,
    /// Whether its token counts have ever increased. Only then they show progress.
    counts: bool,
    /// Ticks until the next read of the figures.
    figures_in: u32,
    /// Ticks with work in the present period.
    worked: u32,
}

impl EngineCheck {
    pub fn new(backend: Arc<Backend>) -> Self {
        Self {
            backend,
            connection: None,
            canary: Canary::Unknown,
            counts: false,
            figures_in: READ_PERIOD,
            worked: 0,
        }
    }

    /// Runs one tick. The caller ticks twice in each period of health checks.
    pub async fn tick(&mut self, registry: &Registry) {
        self.figures_in = self.figures_in.saturating_sub(1);
        if self.backend.phase() != Phase::Healthy {
            self.backend.engine_load.store(Arc::default());
            return;
        }
        if self.figures_in == 0 || self.counts && self.is_silent() {
            self.read_figures().await;
        }
        self.learn_silence();
        if self.canary == Canary::Unknown && !self.backend.health_covers_engine() {
            self.send_canary(REQUEST_TIMEOUT).await;
        } else if self.is_silent() && !self.may_be_working(registry).await && self.is_silent() {
            self.mark_frozen(registry);
        }
    }

    /// Whether the worker is silent although it has requests.
    fn is_silent(&self) -> bool {
        let backend = &self.backend;
        backend.requests() > 0
            && !backend.health_covers_engine()
            && backend.silent_for() >= MIN_SILENCE
    }

    async fn read_figures(&mut self) {
        self.figures_in = READ_PERIOD;
        let load = match self.ask("/metrics", REQUEST_TIMEOUT).await {
            Some((status, page)) if status.is_success() => EngineLoad::parse(&page),
            _ => EngineLoad::default(),
        };
        let before = self.backend.engine_load.load();
        // A single failed read, such as that of a busy worker, does not show that the engine has no such page.
        if load.is_empty() && before.is_empty() {
            self.figures_in = RETRY_PERIOD;
        }
        if load.is_ahead_of(&before) {
            // The engine works on answers in one piece: no byte of a response arrives.
            self.backend.received(Instant::now());
            self.counts = true;
        }
        self.backend.engine_load.store(Arc::new(load));
    }

    fn learn_silence(&mut self) {
        self.worked += u32::from(self.backend.requests() > 0 && !self.is_silent());
        if self.worked == LEARNING_PERIOD {
            self.worked = 0;
            self.backend.limits.silence_limit.end_period();
        }
    }

    /// Whether a silent engine may still be working.
    async fn may_be_working(&mut self, registry: &Registry) -> bool {
        let backend = &self.backend;
        let replicas = registry.replicas();
        let pending =
            replicas_of(&replicas, backend).iter().map(|replica| replica.pending_tokens());
        let pending = pending.max().unwrap_or(0);
        drop(replicas);
        match self.canary {
            Canary::Known => {
                let limit = backend.limits.first_byte_time.limit(pending, MIN_CANARY_TIMEOUT);
                self.send_canary(limit).await
            }
            _ => !self.counts || backend.silent_for() < backend.limits.silence(pending),
        }
    }

    /// Sends a canary request. Returns false if the engine did not answer it well in time.
    async fn send_canary(&mut self, limit: Duration) -> bool {
        match self.ask(GENERATE_PATH, limit).await {
            Some((status, _)) if status.is_success() => {
                self.canary = Canary::Known;
                self.backend.received(Instant::now());
                true
            }
            None | Some((StatusCode::SERVICE_UNAVAILABLE, _)) => false,
            Some(_) => {
                self.canary = Canary::Missing;
                true
            }
        }
    }

    /// Marks the engine as frozen, if another worker can take its requests.
    fn mark_frozen(&self, registry: &Registry) {
        let backend = &self.backend;
        let is_known = backend.is_frozen() && backend.breaker() == BreakerState::Open;
        if is_known || !registry.has_other(backend) {
            return;
        }
        tracing::warn!("worker {}: its engine gives no sign of life", backend.url);
        backend.freeze();
        registry.announce();
    }

    /// Sends a GET request. `None` if there was no response in time.
    async fn ask(&mut self, path: &str, limit: Duration) -> Option<(StatusCode, bytes::Bytes)> {
        let call = Call::get(path);
        timeout(limit, call.over(&mut self.connection, &self.backend.pool)).await.ok()?.ok()
    }
}
