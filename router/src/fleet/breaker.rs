//! The circuit breaker of one worker. After consecutive failed requests it opens: the worker gets no requests for a
//! time, despite good health checks. Each opening lasts longer than the one before.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::metrics::labels;

/// The open time doubles with each opening, up to 16 times the first one.
const MAX_DOUBLINGS: u32 = 4;

labels! {
    /// The state of a breaker.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum BreakerState {
        Closed => "closed",
        /// Admits no request until its time is over.
        Open => "open",
        /// Admits one trial request. Its outcome decides.
        HalfOpen => "half_open",
    }
}

/// The threshold of a disabled breaker.
pub(super) const DISABLED: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    first: Duration,
    /// Whether a request has failed since the last success. Usually it is false, and no lock is taken.
    has_failures: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Consecutive failures.
    failures: u32,
    /// Openings since the last success.
    openings: u32,
    open_until: Option<Instant>,
    /// Whether the trial request of the half-open state is in flight.
    on_trial: bool,
}

impl Breaker {
    /// A breaker that opens after `threshold` consecutive failures, the first time for `first`.
    pub(super) fn new(threshold: u32, first: Duration) -> Self {
        Self { threshold, first, has_failures: AtomicBool::new(false), state: Mutex::default() }
    }

    /// Whether the breaker is closed. Reads neither the clock nor the lock, so it may return false for a closed
    /// breaker.
    pub(super) fn is_closed(&self) -> bool {
        !self.has_failures.load(Ordering::Acquire)
    }

    pub(super) fn state(&self, now: Instant) -> BreakerState {
        self.state.lock().at(now)
    }

    pub(super) fn admits(&self, now: Instant) -> bool {
        let state = self.state.lock();
        match state.at(now) {
            BreakerState::Closed => true,
            BreakerState::Open => false,
            BreakerState::HalfOpen => !state.on_trial,
        }
    }

    /// Registers a request that is being sent. Returns true if it is the trial request.
    pub(super) fn enter(&self, now: Instant) -> bool {
        if self.is_closed() {
            return false;
        }
        let mut state = self.state.lock();
        let on_trial = state.at(now) == BreakerState::HalfOpen && !state.on_trial;
        state.on_trial |= on_trial;
        on_trial
    }

    /// Ends the trial without evidence for or against the worker: the next request is on trial.
    pub(super) fn leave_trial(&self) {
        self.state.lock().on_trial = false;
    }

    /// Records the start of the trial's response, which may last for minutes. Other requests are admitted, but the next
    /// failure opens the breaker again. Returns true if the breaker was not closed.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.failures = self.threshold.saturating_sub(1);
        state.on_trial = false;
        state.open_until.take().is_some()
    }

    /// Records a complete response, which resets the breaker. Returns true if the breaker was not closed.
    pub(super) fn succeed(&self) -> bool {
        if self.is_closed() {
            return false;
        }
        let mut state = self.state.lock();
        let was_open = state.open_until.is_some();
        *state = State::default();
        self.has_failures.store(false, Ordering::Release);
        was_open
    }

    /// Records a failure. Returns the open time if the breaker opens now. With `at_once` one failure is enough.
    pub(super) fn fail(&self, on_trial: bool, at_once: bool, now: Instant) -> Option<Duration> {
        if self.threshold == DISABLED {
            return None;
        }
        let mut state = self.state.lock();
        self.has_failures.store(true, Ordering::Release);
        state.failures = state.failures.saturating_add(1);
        // Failures of requests that were in flight at the opening do not count again.
        let open = state.at(now) != BreakerState::Closed;
        let opens = if open { on_trial } else { at_once || state.failures >= self.threshold };
        if !opens {
            return None;
        }
        let duration = self.first * (1 << state.openings.min(MAX_DOUBLINGS));
        state.openings = state.openings.saturating_add(1);
        state.open_until = Some(now + duration);
        state.on_trial = false;
        Some(duration)
    }
}

impl State {
    fn at(&self, now: Instant) -> BreakerState {
        match self.open_until {
            None => BreakerState::Closed,
            Some(until) if now < until => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(5);

    fn failing(breaker: &Breaker, now: Instant) -> Option<Duration> {
        let on_trial = breaker.enter(now);
        breaker.fail(on_trial, false, now)
    }

    #[test]
    fn only_failures_in_a_row_open_it() {
        let (breaker, now) = (Breaker::new(3, FIRST), Instant::now());
        for _ in 0..10 {
            assert_eq!(failing(&breaker, now), None);
            assert_eq!(failing(&breaker, now), None);
            assert!(breaker.admits(now));
            assert!(!breaker.succeed(), "it was closed all the time");
        }
        assert_eq!(failing(&breaker, now), None);
        assert_eq!(failing(&breaker, now), None);
        assert_eq!(failing(&breaker, now), Some(FIRST));
        assert!(!breaker.admits(now));
        assert_eq!(breaker.state(now), BreakerState::Open);
    }

    #[test]
    fn the_outcome_of_the_trial_request_decides() {
        let (breaker, mut now) = (Breaker::new(1, FIRST), Instant::now());
        for doublings in [0, 1, 2, 3, 4, 4, 4] {
            let duration = FIRST * (1 << doublings);
            assert_eq!(failing(&breaker, now), Some(duration));
            now += duration;
            assert_eq!(breaker.state(now), BreakerState::HalfOpen);
            assert!(breaker.admits(now));
            // One trial without evidence; then the next request is on trial and a third one must wait.
            assert!(breaker.enter(now));
            breaker.leave_trial();
            assert!(breaker.admits(now));
            assert!(breaker.enter(now));
            assert!(!breaker.admits(now));
            breaker.leave_trial();
        }
        assert!(breaker.enter(now));
        assert!(breaker.succeed());
        assert_eq!(breaker.state(now), BreakerState::Closed);
        assert_eq!(failing(&breaker, now), Some(FIRST), "a good answer forgets the doublings");
    }

    #[test]
    fn the_start_of_a_response_ends_the_trial_and_a_break_opens_it_again() {
        let (breaker, mut now) = (Breaker::new(5, FIRST), Instant::now());
        assert_eq!(breaker.fail(false, true, now), Some(FIRST));
        for duration in [FIRST * 2, FIRST * 4] {
            now += FIRST * 4;
            assert!(breaker.enter(now));
            assert!(breaker.begin());
            assert_eq!(breaker.state(now), BreakerState::Closed);
            assert_eq!(failing(&breaker, now), Some(duration), "its pauses are not forgotten");
        }
        now += FIRST * 4;
        assert!(breaker.enter(now));
        assert!(breaker.begin());
        assert!(!breaker.succeed(), "it was closed already");
        assert_eq!(failing(&breaker, now), None);
    }

    #[test]
    fn requests_in_flight_at_the_opening_do_not_prolong_it() {
        let (breaker, now) = (Breaker::new(2, FIRST), Instant::now());
        assert_eq!(failing(&breaker, now), None);
        assert_eq!(failing(&breaker, now), Some(FIRST));
        for _ in 0..10 {
            assert_eq!(breaker.fail(false, true, now), None);
        }
        assert_eq!(breaker.state(now + FIRST), BreakerState::HalfOpen);
        assert_eq!(breaker.fail(false, false, now + FIRST), None, "an old request, late");
        assert!(breaker.admits(now + FIRST));
    }

    #[test]
    fn a_stuck_worker_opens_it_at_once() {
        let (breaker, now) = (Breaker::new(5, FIRST), Instant::now());
        assert_eq!(breaker.fail(false, true, now), Some(FIRST));
    }
}
