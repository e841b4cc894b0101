//! An engine process: its address, its connections, its health, and its learned response times. Its KV caches and
//! their loads are its replicas.

use std::{
    fmt::Display,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::{task::AbortHandle, time::Instant};

use super::{
    breaker::{Breaker, BreakerState, DISABLED},
    counters::BackendCounters,
    health_state::{HealthState, Phase},
    last_activity::{CLOCK_RESOLUTION, LastActivity},
    last_failure::{FailureLog, LastFailure},
    latency_limits::LatencyLimits,
    speed::Speed,
};
use crate::{
    config::Config,
    engine::{EngineLoad, WorkerInfo},
    metrics::Ejection,
    names::{ModelName, WorkerUrl},
    upstream::Pool,
};

/// Reason that is shown for a withheld worker.
const NOT_READY: &str = "its discovery source reports it as not ready";

/// The process behind a URL. Its replicas, the requests on them and its health check share it.
#[derive(Debug)]
pub struct Backend {
    pub url: WorkerUrl,
    pub pool: Pool,
    pub info: ArcSwap<WorkerInfo>,
    pub counters: BackendCounters,
    /// The latest figures of the engine; empty if it reports none.
    pub engine_load: ArcSwap<EngineLoad>,
    pub(super) last_activity: LastActivity,
    pub limits: LatencyLimits,
    pub(super) speed: Speed,
    pub(super) breaker: Breaker,
    pub health: HealthState,
    failures: FailureLog,
    /// Whether a good health check covers the engine, and not only the HTTP server.
    health_covers_engine: AtomicBool,
    /// Time when the engine was last found frozen behind good health checks.
    pub(super) frozen: Mutex<Option<Instant>>,
    /// Whether its discovery source reports it as not ready.
    withheld: AtomicBool,
    removed: AtomicBool,
    health_check: OnceLock<AbortHandle>,
}

impl Backend {
    pub fn new(url: WorkerUrl, pool: Pool, config: &Config) -> Self {
        Self {
            url,
            pool,
            info: ArcSwap::default(),
            counters: BackendCounters::default(),
            engine_load: ArcSwap::default(),
            last_activity: LastActivity::new(Instant::now()),
            limits: LatencyLimits::new(config.first_token_timeout_secs.get()),
            speed: Speed::default(),
            breaker: Breaker::new(
                if config.disable_circuit_breaker { DISABLED } else { config.cb_failure_threshold },
                config.cb_timeout_duration_secs.get(),
            ),
            health: HealthState::new(),
            failures: FailureLog::default(),
            health_covers_engine: AtomicBool::new(false),
            frozen: Mutex::default(),
            withheld: AtomicBool::new(false),
            removed: AtomicBool::new(false),
            health_check: OnceLock::new(),
        }
    }

    pub fn phase(&self) -> Phase {
        self.health.phase()
    }

    /// Whether the worker is healthy and not withheld.
    pub fn is_in_rotation(&self) -> bool {
        self.phase() == Phase::Healthy && !self.is_withheld()
    }

    pub fn is_withheld(&self) -> bool {
        self.withheld.load(Ordering::Relaxed)
    }

    pub(crate) fn withhold(&self, withheld: bool) {
        self.withheld.store(withheld, Ordering::Relaxed);
        if withheld {
            self.record_failure(&NOT_READY);
        } else if self.is_well() {
            self.clear_failures();
        }
    }

    /// Whether the worker is in rotation and its breaker admits a request. If there is no such worker, the router
    /// uses the workers in rotation despite their breakers.
    pub fn takes_requests(&self) -> bool {
        let admits = || self.breaker.is_closed() || self.breaker.admits(Instant::now());
        self.is_in_rotation() && admits()
    }

    /// Whether the worker may get a request for a model. `known` is the model if some worker serves it (see
    /// `registry::known`); without it every worker may.
    pub fn may_serve(&self, known: Option<ModelName>) -> bool {
        known.is_none_or(|model| self.info.load().serves(model))
    }

    /// Takes the worker out of rotation until its next good health check, and requests that check now. Returns false if
    /// the worker was out of rotation already.
    pub fn suspect(&self) -> bool {
        let was_in = self.health.suspect();
        if was_in {
            self.counters.ejections.increment(Ejection::Request);
        }
        self.health.probe_now();
        was_in
    }

    /// The reason why the worker gets no requests; `None` while it gets requests.
    pub fn last_failure(&self) -> Option<LastFailure> {
        if self.is_well() { None } else { self.failures.latest(Instant::now()) }
    }

    /// Whether the worker is in rotation with a closed breaker.
    fn is_well(&self) -> bool {
        self.is_in_rotation() && self.breaker() == BreakerState::Closed
    }

    /// Records why a request or a health check has failed on the worker.
    pub fn record_failure(&self, reason: &dyn Display) {
        self.failures.record(reason, Instant::now());
    }

    /// Forgets the failures. A withheld worker keeps the reason for that.
    pub(super) fn clear_failures(&self) {
        self.failures.clear();
        if self.is_withheld() {
            self.record_failure(&NOT_READY);
        }
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        if phase == Phase::Healthy {
            self.clear_failures();
        }
        self.health.set_phase(phase);
    }

    /// Number of requests on the backend.
    pub fn requests(&self) -> u32 {
        self.last_activity.requests()
    }

    /// Records that a byte of some response has arrived.
    pub fn received(&self, now: Instant) {
        self.limits.silence_limit.observe(self.last_activity.record_byte(now));
    }

    /// Whether the worker has been silent for `limit`, and no health check shows that its engine makes progress.
    pub fn is_silent_for(&self, limit: Duration) -> bool {
        !self.makes_progress() && self.silent_for() + CLOCK_RESOLUTION >= limit
    }

    /// Whether a byte of some response has arrived after `then`.
    pub fn received_since(&self, then: Instant) -> bool {
        self.last_activity.received_since(then)
    }

    /// Time since the last byte of any response, counted only while the worker has requests.
    pub fn silent_for(&self) -> Duration {
        self.last_activity.silent_for(Instant::now())
    }

    /// Whether a good health check covers the engine.
    pub(super) fn health_covers_engine(&self) -> bool {
        self.health_covers_engine.load(Ordering::Relaxed)
    }

    /// Whether the worker itself reports that its engine makes progress. A wait there is slow, not stuck.
    pub fn makes_progress(&self) -> bool {
        self.health_covers_engine() && self.phase() == Phase::Healthy
    }

    pub(super) fn set_health_covers_engine(&self, covers: bool) {
        self.health_covers_engine.store(covers, Ordering::Relaxed);
    }

    pub fn breaker(&self) -> BreakerState {
        self.breaker.state(Instant::now())
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Relaxed)
    }

    /// Attaches the health check task. [`Backend::stop`] aborts it.
    pub fn attach_health_check(&self, task: AbortHandle) {
        self.health_check.set(task).expect("contract: one health check for each backend");
    }

    /// Marks the backend as removed from the registry. Requests in flight finish on their connections, and the health
    /// check goes on until they have.
    pub fn retire(&self) {
        self.removed.store(true, Ordering::Relaxed);
        self.health.probe_now();
        self.pool.clear();
    }

    /// Ends the backend at shutdown: aborts its health check and closes idle connections.
    pub fn stop(&self) {
        if let Some(task) = self.health_check.get() {
            task.abort();
        }
        self.retire();
    }
}
