//! The check of one worker's engine, where its health check says nothing of it: an engine may have frozen behind an
//! HTTP server that answers. Engines tell in one of two ways that they live. `/health_generate` (SGLang) generates a
//! token, or waits for a sign of the scheduler; the counts in `/metrics` (vLLM) go up. While a worker with work to
//! do is silent, both are looked at; an engine that knows neither is known by its silence alone
//! (`proxy::waiting`).

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use tokio::time::{Instant, timeout};

use super::{
    breaker::BreakerState,
    engine_load::EngineLoad,
    registry::Registry,
    worker::{Phase, Worker},
};
use crate::upstream::{Connection, call::Call};

/// An engine that takes longer for its figures, or for its first canary, has no time for them.
const PATIENCE: Duration = Duration::from_secs(5);

/// After such a silence of a worker its engine is looked at.
const QUIET: Duration = Duration::from_secs(1);

/// Least limit of a canary. That of SGLang takes a second, or two if a step takes longer than that.
const CANARY: Duration = Duration::from_millis(2200);

/// Ticks from one look at the figures to the next,
const OFTEN: u32 = 4;

/// and where the engine has no such page: the next process may have one.
const SELDOM: u32 = 120;

/// Ticks of work in which the longest silence is learned.
const PERIOD: u32 = 60;

/// Whether the engine answers `/health_generate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Canary {
    Unknown,
    Missing,
    Known,
}

/// What is known of one worker's engine.
pub struct EngineCheck {
    worker: Arc<Worker>,
    /// No other request goes over it.
    connection: Option<Connection>,
    canary: Canary,
    /// The counts in its figures have gone up while it worked.
    counts: bool,
    /// Ticks until the figures are looked at.
    figures_in: u32,
    /// Ticks with work since the rhythm was last noted.
    worked: u32,
}

impl EngineCheck {
    pub fn new(worker: Arc<Worker>) -> Self {
        Self {
            worker,
            connection: None,
            canary: Canary::Unknown,
            counts: false,
            figures_in: OFTEN,
            worked: 0,
        }
    }

    /// To be called twice in each period of health checks.
    pub async fn tick(&mut self, registry: &Registry) {
        self.figures_in = self.figures_in.saturating_sub(1);
        if self.worker.phase() != Phase::Healthy {
            self.worker.engine_load.store(Arc::default());
            return;
        }
        if self.figures_in == 0 || self.counts && self.is_quiet() {
            self.look_at_figures().await;
        }
        self.note_rhythm();
        if self.canary == Canary::Unknown && !self.worker.is_vouched_for() {
            self.send_canary(PATIENCE).await;
        } else if self.is_quiet() && !self.lives().await && self.is_quiet() {
            self.convict(registry);
        }
    }

    /// Nothing comes from it although it has work.
    fn is_quiet(&self) -> bool {
        let worker = &self.worker;
        worker.requests() > 0 && !worker.is_vouched_for() && worker.silent_for() >= QUIET
    }

    async fn look_at_figures(&mut self) {
        self.figures_in = OFTEN;
        let load = match self.ask("/metrics", PATIENCE).await {
            Some((status, page)) if status.is_success() => EngineLoad::parse(&page),
            _ => EngineLoad::default(),
        };
        if load.is_empty() {
            self.figures_in = SELDOM;
        }
        if load.is_ahead_of(&self.worker.engine_load.load()) {
            // Also while no byte of a response comes: it is busy with answers in one piece.
            self.worker.heard(Instant::now());
            self.counts = true;
        }
        self.worker.engine_load.store(Arc::new(load));
    }

    fn note_rhythm(&mut self) {
        self.worked += u32::from(self.worker.requests() > 0 && !self.is_quiet());
        if self.worked == PERIOD {
            self.worked = 0;
            self.worker.rhythm.turn();
        }
    }

    /// Whether a quiet engine can still be believed to work.
    async fn lives(&mut self) -> bool {
        match self.canary {
            Canary::Known => {
                let limit = self.worker.canary_limit(CANARY);
                self.send_canary(limit).await
            }
            _ => !self.counts || self.worker.silent_for() < self.worker.silence_limit(),
        }
    }

    /// False if it was not answered well in time.
    async fn send_canary(&mut self, limit: Duration) -> bool {
        match self.ask("/health_generate", limit).await {
            Some((status, _)) if status.is_success() => {
                self.canary = Canary::Known;
                self.worker.heard(Instant::now());
                true
            }
            None | Some((StatusCode::SERVICE_UNAVAILABLE, _)) => false,
            Some(_) => {
                self.canary = Canary::Missing;
                true
            }
        }
    }

    /// The engine has frozen: requests go elsewhere, if there is another worker.
    fn convict(&self, registry: &Registry) {
        let worker = &self.worker;
        let is_known = worker.is_frozen() && worker.breaker() == BreakerState::Open;
        if is_known || !registry.has_other(worker) {
            return;
        }
        tracing::warn!("worker {}: its engine gives no sign of life", worker.url);
        worker.freeze();
        registry.announce();
    }

    /// `None` if there was no answer in time.
    async fn ask(&mut self, path: &str, limit: Duration) -> Option<(StatusCode, bytes::Bytes)> {
        let call = Call::get(path);
        timeout(limit, call.over(&mut self.connection, &self.worker.pool)).await.ok()?.ok()
    }
}
