//! Evidence for or against a worker: the outcomes of its requests, and a frozen engine.

use std::time::Duration;

use tokio::time::Instant;

use super::{backend::Backend, breaker::BreakerState, health_state::Phase};
use crate::metrics::Ejection;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The response has started. It may still break.
    Begun,
    /// The response is complete: 2xx, or 4xx, which is an error of the request.
    Answered,
    /// 429 or 503: backpressure. It says nothing about the next request.
    Busy,
    /// Another 5xx, a broken connection, or a response that is not an answer of the API.
    Failed,
    /// No byte came within this limit. The worker is stuck if no byte of any response came.
    Late(Duration),
}

impl Backend {
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

    /// Marks the engine as frozen although its HTTP server answers. Requests that wait for a first byte go to
    /// other workers.
    pub(super) fn freeze(&self) {
        *self.frozen.lock() = Some(Instant::now());
        // Good health checks bring the worker back into rotation, so the breaker must keep it out.
        self.record(Outcome::Late(Duration::ZERO), true);
        self.suspect();
        self.health.mark_lost();
    }

    /// Whether no byte has arrived since the engine was found frozen.
    pub fn is_frozen(&self) -> bool {
        self.frozen.lock().is_some_and(|since| !self.received_since(since))
    }
}
