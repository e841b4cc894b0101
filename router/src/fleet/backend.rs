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
    breaker::{Breaker, BreakerState, DISABLED, Outcome},
    counters::BackendCounters,
    health_state::{HealthState, Phase},
    last_activity::{CLOCK_RESOLUTION, LastActivity},
    last_failure::{FailureLog, LastFailure},
    latency_limits::{FirstByteTime, LongestTime},
    silence_limit::SilenceLimit,
    speed::Speed,
};
use crate::{
    config::Config,
    engine::{EngineLoad, WorkerInfo},
    metrics::Ejection,
    names::{ModelName, WorkerUrl},
    upstream::Pool,
};

/// Minimum limit for the silence of an engine that reports its progress in each step.
const MIN_SILENCE_LIMIT: Duration = Duration::from_millis(2500);

/// Minimum limit for an answer in one piece, as a multiple of --first-token-timeout-secs: an answer has many tokens.
const MIN_ANSWER_MULTIPLE: u32 = 6;

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
    pub(super) silence_limit: SilenceLimit,
    pub(super) first_byte_time: FirstByteTime,
    pub(super) speed: Speed,
    pub(super) breaker: Breaker,
    pub health: HealthState,
    failures: FailureLog,
    /// Whether a good health check covers the engine, and not only the HTTP server.
    health_covers_engine: AtomicBool,
    /// Time when the engine was last found frozen behind good health checks.
    frozen: Mutex<Option<Instant>>,
    pub(super) longest_answer: LongestTime,
    /// Pauses of streams of at least a second.
    pub(super) longest_pause: LongestTime,
    first_token_timeout: Duration,
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
            silence_limit: SilenceLimit::default(),
            first_byte_time: FirstByteTime::default(),
            speed: Speed::default(),
            breaker: Breaker::new(
                if config.disable_circuit_breaker { DISABLED } else { config.cb_failure_threshold },
                config.cb_timeout_duration_secs.get(),
            ),
            health: HealthState::new(),
            failures: FailureLog::default(),
            health_covers_engine: AtomicBool::new(false),
            frozen: Mutex::default(),
            longest_answer: LongestTime::default(),
            longest_pause: LongestTime::default(),
            first_token_timeout: config.first_token_timeout_secs.get(),
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
    fn clear_failures(&self) {
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
        self.silence_limit.observe(self.last_activity.record_byte(now));
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

    /// The limit for a first byte behind `tokens_ahead` prompt tokens: --first-token-timeout-secs, or more if the
    /// worker has been slow.
    pub fn first_token_limit(&self, tokens_ahead: u64) -> Duration {
        self.first_byte_time.limit(tokens_ahead, self.first_token_timeout)
    }

    /// The limit for the silence of the worker while an answer in one piece is awaited: a multiple of
    /// --first-token-timeout-secs, or more if its answers take longer.
    pub fn answer_limit(&self) -> Duration {
        self.longest_answer.limit(self.first_token_timeout.saturating_mul(MIN_ANSWER_MULTIPLE))
    }

    /// Records a pause in one of its streams.
    pub fn stream_paused(&self, pause: Duration) {
        self.longest_pause.observe(pause);
    }

    /// The limit for a pause in one of its streams: at least `least`, more if its streams had long pauses recently.
    pub fn pause_limit(&self, least: Duration) -> Duration {
        self.longest_pause.limit(least)
    }

    /// The limit for the silence of an engine that reports its progress by itself and has `pending_tokens` prompt
    /// tokens to compute.
    pub(super) fn silence_limit(&self, pending_tokens: u64) -> Duration {
        let limit = self.silence_limit.limit(MIN_SILENCE_LIMIT, self.first_token_timeout);
        self.first_byte_time.limit(pending_tokens, limit)
    }

    /// Marks the engine as frozen although its HTTP server answers. Requests that wait for a first byte go to
    /// other workers.
    pub(super) fn freeze(&self) {
        *self.frozen.lock() = Some(Instant::now());
        // Good health checks bring the worker back into rotation, so the breaker must keep it out.
        self.record(Outcome::Late(Duration::ZERO), true);
        self.suspect();
        self.health.abort_waiters();
    }

    /// Whether no byte has arrived since the engine was found frozen.
    pub fn is_frozen(&self) -> bool {
        self.frozen.lock().is_some_and(|since| !self.received_since(since))
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

    /// Passes the outcome of a request to the breaker. See [`LoadGuard::record`](super::LoadGuard::record).
    pub(super) fn record(&self, outcome: Outcome, on_trial: bool) {
        match outcome {
            // The start of a response proves nothing unless the request is on trial: the response may still break.
            Outcome::Begun => {
                if on_trial && self.breaker.begin() {
                    self.breaker_closed();
                }
            }
            Outcome::Answered => {
                if self.breaker.succeed() {
                    self.breaker_closed();
                }
            }
            Outcome::Failed => self.fail(on_trial, false),
            Outcome::Late(limit) => {
                // The check finds out whether the worker is frozen. If so, all waiting requests may move.
                self.health.probe_now();
                if self.is_silent_for(limit) {
                    self.fail(on_trial, true);
                } else if on_trial {
                    self.breaker.leave_trial();
                }
            }
            Outcome::Busy => {
                if on_trial {
                    self.breaker.leave_trial();
                }
            }
        }
    }

    fn breaker_closed(&self) {
        self.counters.breaker.increment(BreakerState::Closed);
        if self.phase() == Phase::Healthy {
            self.clear_failures();
        }
        tracing::info!("worker {} answers again: breaker closed", self.url);
    }

    /// Passes a failure to the breaker. One failure of a `stuck` worker opens it.
    fn fail(&self, on_trial: bool, stuck: bool) {
        if let Some(time) = self.breaker.fail(on_trial, stuck, Instant::now()) {
            self.counters.breaker.increment(BreakerState::Open);
            self.counters.ejections.increment(Ejection::Breaker);
            let why = if stuck { "is stuck" } else { "keeps failing" };
            self.record_failure(&format_args!(
                "it {why}; the circuit breaker is open for {time:?}"
            ));
            tracing::warn!("worker {} {why}: breaker open for {time:?}", self.url);
        }
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
