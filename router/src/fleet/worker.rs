//! One worker as the router sees it: its address, its health, the load booked on it, its connections.

use std::{
    fmt::Display,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::{task::AbortHandle, time::Instant};

pub use crate::fleet::{
    booking::Booking,
    breaker::{BreakerState, Outcome},
    info::{Runtime, WorkerInfo},
    phase::Phase,
    trouble::Trouble,
};
use crate::{
    config::Config,
    correct::Learned,
    fleet::{
        booking::Load,
        breaker::{Breaker, NEVER},
        computing::Computing,
        engine_load::EngineLoad,
        longest::Longest,
        metrics::WorkerCounters,
        others::Others,
        pace::Pace,
        phase::Rotation,
        pulse::{GRAIN, Pulse},
        rhythm::Rhythm,
        speed::Speed,
        trouble::Troubles,
    },
    metrics::Ejection,
    names::{ModelName, WorkerId, WorkerUrl},
    policy::Candidate,
    upstream::Pool,
};

/// Engines that tell of themselves by themselves do so in each step.
const LEAST_SILENCE: Duration = Duration::from_millis(2500);

/// Shared by the registry, the requests it serves and its health check.
#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub url: WorkerUrl,
    pub pool: Arc<Pool>,
    pub info: ArcSwap<WorkerInfo>,
    pub counters: WorkerCounters,
    /// What its engine last said of its work; empty if it does not say.
    pub engine_load: ArcSwap<EngineLoad>,
    /// What its answers have taught about its cache.
    pub learned: Learned,
    hash_seed: u64,
    pub(super) load: Load,
    pub(super) pulse: Pulse,
    pub(super) rhythm: Rhythm,
    pub(super) pace: Pace,
    pub(super) speed: Speed,
    pub(super) others: Others,
    pub(super) computing: Computing,
    pub(super) breaker: Breaker,
    pub(super) rotation: Rotation,
    troubles: Troubles,
    /// Its good health checks mean that its engine makes progress, and not only that HTTP answers.
    vouched: AtomicBool,
    /// When its engine was last found frozen behind good health checks.
    frozen: Mutex<Option<Instant>>,
    /// Seconds that its answers have taken, the longest of late.
    pub(super) longest_answer: Longest,
    first_token_timeout: Duration,
    /// Its source wants it to get no requests for now.
    withheld: AtomicBool,
    /// Set once, before its tree share is dropped for good: an insert that comes later sees it.
    removed: AtomicBool,
    health_check: OnceLock<AbortHandle>,
}

impl Worker {
    pub fn new(id: WorkerId, url: WorkerUrl, pool: Pool, config: &Config) -> Self {
        Self {
            id,
            hash_seed: url.hash_seed(),
            url,
            pool: Arc::new(pool),
            info: ArcSwap::default(),
            counters: WorkerCounters::default(),
            engine_load: ArcSwap::default(),
            learned: Learned::new(config.default_cache_blocks()),
            load: Load::default(),
            pulse: Pulse::new(Instant::now()),
            rhythm: Rhythm::default(),
            pace: Pace::default(),
            speed: Speed::default(),
            others: Others::default(),
            computing: Computing::default(),
            breaker: Breaker::new(
                if config.disable_circuit_breaker { NEVER } else { config.cb_failure_threshold },
                config.cb_timeout_duration_secs.get(),
            ),
            rotation: Rotation::new(),
            troubles: Troubles::default(),
            vouched: AtomicBool::new(false),
            frozen: Mutex::default(),
            longest_answer: Longest::default(),
            first_token_timeout: config.first_token_timeout_secs.get(),
            withheld: AtomicBool::new(false),
            removed: AtomicBool::new(false),
            health_check: OnceLock::new(),
        }
    }

    pub fn phase(&self) -> Phase {
        self.rotation.phase()
    }

    /// Healthy, and not withheld.
    pub fn is_in_rotation(&self) -> bool {
        self.phase() == Phase::Healthy && !self.is_withheld()
    }

    pub fn is_withheld(&self) -> bool {
        self.withheld.load(Ordering::Relaxed)
    }

    pub(crate) fn withhold(&self, withheld: bool) {
        self.withheld.store(withheld, Ordering::Relaxed);
    }

    /// In rotation, and its breaker lets a request through. When that is true of no worker, those
    /// that are in rotation are asked all the same.
    pub fn takes_requests(&self) -> bool {
        let lets_through = || self.breaker.is_closed() || self.breaker.lets_through(Instant::now());
        self.is_in_rotation() && lets_through()
    }

    /// Whether a request may go to it, of which the model is known to be served somewhere.
    pub fn may_serve(&self, known: Option<ModelName>) -> bool {
        known.is_none_or(|model| self.info.load().serves(model))
    }

    /// Takes the worker out of rotation until its next good health check, which is due at once. False
    /// if it was out already.
    pub fn suspect(&self) -> bool {
        let was_in = self.rotation.suspect();
        if was_in {
            self.counters.ejections.increment(Ejection::Request);
        }
        self.rotation.doubt();
        was_in
    }

    /// Why it gets no requests; `None` while it does.
    pub fn trouble(&self) -> Option<Trouble> {
        let well = self.phase() == Phase::Healthy && self.breaker() == BreakerState::Closed;
        if well { None } else { self.troubles.latest(Instant::now()) }
    }

    /// A request or a health check has failed on it.
    pub fn note_trouble(&self, reason: &dyn Display) {
        self.troubles.note(reason, Instant::now());
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        if phase == Phase::Healthy {
            self.troubles.clear();
        }
        self.rotation.set_phase(phase);
    }

    /// Resolves when a request has failed on the worker since the last call.
    pub async fn doubted(&self) {
        self.rotation.doubted().await;
    }

    /// It is dead or frozen: see [`Worker::lost`].
    pub(super) fn give_up(&self) {
        self.rotation.give_up();
    }

    /// Resolves when the worker turns out to be dead or frozen: requests that still wait for a first
    /// byte should go elsewhere. Streams that go on, go on.
    pub async fn lost(&self) {
        self.rotation.lost().await;
    }

    /// It has turned out to be dead or frozen.
    pub fn is_lost(&self) -> bool {
        self.rotation.is_lost()
    }

    /// Asks for a health check soon.
    pub fn doubt(&self) {
        self.rotation.doubt();
    }

    /// A byte of some response has come from it.
    pub fn heard(&self, now: Instant) {
        self.rhythm.observe(self.pulse.beat(now));
    }

    /// Nothing has come from it for so long, and it does not say itself that it makes progress.
    pub fn is_silent_for(&self, limit: Duration) -> bool {
        !self.makes_progress() && self.silent_for() + GRAIN >= limit
    }

    /// Whether a byte of some response has come from it after `then`.
    pub fn heard_since(&self, then: Instant) -> bool {
        self.pulse.heard_since(then)
    }

    /// How long it has said nothing although it had something to do.
    pub fn silent_for(&self) -> Duration {
        self.pulse.silent_for(Instant::now())
    }

    /// What a first byte behind so many prompt tokens may take: --first-token-timeout-secs, or more
    /// if this worker's pace says so.
    pub fn first_token_limit(&self, tokens_ahead: u64) -> Duration {
        self.pace.limit(tokens_ahead, self.first_token_timeout)
    }

    /// How long an answer that comes in one piece may be waited for while the worker sends nothing
    /// at all: some times --first-token-timeout-secs, or more if its answers take longer.
    pub fn answer_limit(&self) -> Duration {
        self.longest_answer.limit(self.first_token_timeout)
    }

    /// How long its engine may give no sign of life although it has work, where it gives them by itself.
    pub(super) fn silence_limit(&self) -> Duration {
        let limit = self.rhythm.limit(LEAST_SILENCE, self.first_token_timeout);
        self.pace.limit(self.pending_tokens(), limit)
    }

    /// What a question to its engine may take: at least `least`, or more if prompts are ahead of it.
    pub(super) fn canary_limit(&self, least: Duration) -> Duration {
        self.pace.limit(self.pending_tokens(), least)
    }

    /// Its engine has frozen behind an HTTP server that answers: what waits for a first byte goes elsewhere.
    pub(super) fn freeze(&self) {
        *self.frozen.lock() = Some(Instant::now());
        // Its health checks are good and bring it back into rotation; the breaker keeps it out.
        self.record(Outcome::Late(Duration::ZERO), true);
        self.suspect();
        self.give_up();
    }

    /// Nothing has come from it since its engine was found frozen.
    pub fn is_frozen(&self) -> bool {
        self.frozen.lock().is_some_and(|since| !self.heard_since(since))
    }

    /// Its good health checks speak for its engine.
    pub(super) fn is_vouched_for(&self) -> bool {
        self.vouched.load(Ordering::Relaxed)
    }

    /// Its engine makes progress, by its own word: what takes long there is slow, and not stuck.
    pub fn makes_progress(&self) -> bool {
        self.is_vouched_for() && self.phase() == Phase::Healthy
    }

    pub(super) fn set_vouched(&self, vouched: bool) {
        self.vouched.store(vouched, Ordering::Relaxed);
    }

    pub fn breaker(&self) -> BreakerState {
        self.breaker.state(Instant::now())
    }

    /// See [`Booking::record`].
    pub(super) fn record(&self, outcome: Outcome, on_trial: bool) {
        let stuck = match outcome {
            // Of the others it is not known yet whether they will break.
            Outcome::Begun if !on_trial => return,
            Outcome::Begun | Outcome::Answered => {
                let closes = match outcome {
                    Outcome::Begun => self.breaker.begin(),
                    _ => self.breaker.succeed(),
                };
                if closes {
                    self.counters.breaker.increment(BreakerState::Closed);
                    if self.phase() == Phase::Healthy {
                        self.troubles.clear();
                    }
                    tracing::info!("worker {} answers again: breaker closed", self.url);
                }
                return;
            }
            Outcome::Busy if on_trial => return self.breaker.leave_trial(),
            Outcome::Busy => return,
            Outcome::Failed => false,
            Outcome::Late(limit) => {
                // A check finds out whether it is frozen, and then all others that wait may go, too.
                self.rotation.doubt();
                if !self.is_silent_for(limit) {
                    if on_trial {
                        self.breaker.leave_trial();
                    }
                    return;
                }
                true
            }
        };
        if let Some(time) = self.breaker.fail(on_trial, stuck, Instant::now()) {
            self.counters.breaker.increment(BreakerState::Open);
            self.counters.ejections.increment(Ejection::Breaker);
            let why = if stuck { "is stuck" } else { "keeps failing" };
            self.note_trouble(&format_args!("it {why}; the circuit breaker is open for {time:?}"));
            tracing::warn!("worker {} {why}: breaker open for {time:?}", self.url);
        }
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    /// Ends with [`Worker::stop`] at the latest.
    pub fn attach_health_check(&self, task: AbortHandle) {
        self.health_check.set(task).expect("contract: one health check per worker");
    }

    /// Out of the registry for good. Requests in flight finish on the connections they hold, and the
    /// health check goes on until they have.
    pub fn retire(&self) {
        self.removed.store(true, Ordering::SeqCst);
        self.rotation.doubt();
        self.pool.clear();
    }

    /// The router ends.
    pub fn stop(&self) {
        if let Some(task) = self.health_check.get() {
            task.abort();
        }
        self.retire();
    }

    pub fn requests(&self) -> u32 {
        self.load.requests()
    }

    pub fn pending_tokens(&self) -> u64 {
        self.load.pending_tokens()
    }

    /// It reports how many requests it has, of all routers.
    pub fn has_requests(&self, requests: u32) {
        self.others.observe(requests, self.requests(), Instant::now());
    }

    pub fn candidate(&self, matched_blocks: u32, now: Instant) -> Candidate {
        Candidate {
            id: self.id,
            requests: self.requests(),
            others: self.others.requests(now),
            pending_tokens: self.pending_tokens(),
            matched_blocks,
            hash_seed: self.hash_seed,
            token_seconds: self.speed.token_seconds(),
        }
    }

    pub fn view(&self) -> WorkerView {
        let info = self.info.load();
        WorkerView {
            id: self.id.0,
            url: self.url.to_string(),
            phase: self.phase(),
            healthy: self.is_in_rotation(),
            is_healthy: self.is_in_rotation(),
            breaker: self.breaker(),
            trouble: self.trouble(),
            requests: self.requests(),
            pending_tokens: self.pending_tokens(),
            models: info.models.clone(),
            boot_id: info.boot_id.clone(),
            max_total_num_tokens: info.max_total_num_tokens,
            runtime: info.runtime,
            unreported_answers: self.counters.unreported.get(),
        }
    }
}

/// A worker as `/workers` and the Python bindings show it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerView {
    pub id: u32,
    pub url: String,
    pub phase: Phase,
    pub healthy: bool,
    /// The same, as SMG calls it.
    pub is_healthy: bool,
    pub breaker: BreakerState,
    /// Absent while it gets requests.
    pub trouble: Option<Trouble>,
    pub requests: u32,
    pub pending_tokens: u64,
    pub models: Vec<String>,
    pub boot_id: Option<String>,
    pub max_total_num_tokens: Option<u64>,
    pub runtime: Option<Runtime>,
    /// Answers that have not said how many tokens of their prompts were cached.
    pub unreported_answers: u64,
}
