//! The circuit breaker of one worker: requests that fail in a row take it out of rotation although
//! its health checks are good, each time for longer.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::metrics::labels;

/// Each time out is twice as long as the last, up to 16 times the first.
const MOST_DOUBLINGS: u32 = 4;

/// How a request went, as far as it speaks for or against its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The beginning of an answer, which may still break.
    Begun,
    /// A whole answer: 2xx, or a 4xx, which speaks against the request.
    Answered,
    /// 429 or 503: back-pressure, which says nothing about the next request.
    Busy,
    /// Another 5xx, a connection that broke, an answer that makes no sense.
    Failed,
    /// No byte came within the limit. If the whole worker was silent as long, it is stuck.
    Late(Duration),
}

labels! {
    /// Where a breaker stands, as people see it.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum BreakerState {
        Closed => "closed",
        /// Lets nothing through until its time is over.
        Open => "open",
        /// Lets one request through; its outcome decides.
        HalfOpen => "half_open",
    }
}

/// The threshold of a breaker that is switched off.
pub(super) const NEVER: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Breaker {
    threshold: u32,
    first: Duration,
    /// False while all is well, which is nearly always: then nobody needs the lock.
    troubled: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In a row.
    failures: u32,
    /// Times it has opened since it was last closed.
    openings: u32,
    open_until: Option<Instant>,
    /// The one request of the half-open state is under way.
    on_trial: bool,
}

impl Breaker {
    /// Opens after `threshold` failures in a row, for `first` at first.
    pub(super) fn new(threshold: u32, first: Duration) -> Self {
        Self { threshold, first, troubled: AtomicBool::new(false), state: Mutex::default() }
    }

    /// All is well, as far as can be told without a look at the clock.
    pub(super) fn is_closed(&self) -> bool {
        !self.troubled.load(Ordering::Acquire)
    }

    pub(super) fn state(&self, now: Instant) -> BreakerState {
        self.state.lock().at(now)
    }

    pub(super) fn lets_through(&self, now: Instant) -> bool {
        let state = self.state.lock();
        match state.at(now) {
            BreakerState::Closed => true,
            BreakerState::Open => false,
            BreakerState::HalfOpen => !state.on_trial,
        }
    }

    /// A request is being sent. True if it is the one on trial.
    pub(super) fn enter(&self, now: Instant) -> bool {
        if self.is_closed() {
            return false;
        }
        let mut state = self.state.lock();
        let on_trial = state.at(now) == BreakerState::HalfOpen && !state.on_trial;
        state.on_trial |= on_trial;
        on_trial
    }

    /// The request on trial has ended without a word for or against the worker: the next one may try.
    pub(super) fn leave_trial(&self) {
        self.state.lock().on_trial = false;
    }

    /// The request on trial is being answered, which may take minutes: others may come, but the next
    /// failure opens it again. Only a whole answer tells that all is well. True if it was not closed.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.failures = self.threshold.saturating_sub(1);
        state.on_trial = false;
        state.open_until.take().is_some()
    }

    /// All is well again. True if it was not closed.
    pub(super) fn succeed(&self) -> bool {
        if self.is_closed() {
            return false;
        }
        let mut state = self.state.lock();
        let was_open = state.open_until.is_some();
        *state = State::default();
        self.troubled.store(false, Ordering::Release);
        was_open
    }

    /// Counts a failure; returns for how long the breaker has opened, if it has. `at_once` does not
    /// wait for more.
    pub(super) fn fail(&self, on_trial: bool, at_once: bool, now: Instant) -> Option<Duration> {
        if self.threshold == NEVER {
            return None;
        }
        let mut state = self.state.lock();
        self.troubled.store(true, Ordering::Release);
        state.failures = state.failures.saturating_add(1);
        // Requests that were under way when it opened tell nothing new.
        let open = state.at(now) != BreakerState::Closed;
        let opens = if open { on_trial } else { at_once || state.failures >= self.threshold };
        if !opens {
            return None;
        }
        let duration = self.first * (1 << state.openings.min(MOST_DOUBLINGS));
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
            assert!(breaker.lets_through(now));
            assert!(!breaker.succeed(), "it was closed all the time");
        }
        assert_eq!(failing(&breaker, now), None);
        assert_eq!(failing(&breaker, now), None);
        assert_eq!(failing(&breaker, now), Some(FIRST));
        assert!(!breaker.lets_through(now));
        assert_eq!(breaker.state(now), BreakerState::Open);
    }

    #[test]
    fn half_open_lets_one_through_whose_outcome_decides() {
        let (breaker, mut now) = (Breaker::new(1, FIRST), Instant::now());
        for doublings in [0, 1, 2, 3, 4, 4, 4] {
            let duration = FIRST * (1 << doublings);
            assert_eq!(failing(&breaker, now), Some(duration));
            now += duration;
            assert_eq!(breaker.state(now), BreakerState::HalfOpen);
            assert!(breaker.lets_through(now));
            // One request that says nothing, then the next is on trial and the third must wait.
            assert!(breaker.enter(now));
            breaker.leave_trial();
            assert!(breaker.lets_through(now));
            assert!(breaker.enter(now));
            assert!(!breaker.lets_through(now));
            breaker.leave_trial();
        }
        assert!(breaker.enter(now));
        assert!(breaker.succeed());
        assert_eq!(breaker.state(now), BreakerState::Closed);
        assert_eq!(failing(&breaker, now), Some(FIRST), "a good answer forgets the doublings");
    }

    #[test]
    fn an_answer_that_begins_ends_the_trial_and_one_that_breaks_opens_it_again() {
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
    fn who_was_under_way_when_it_opened_does_not_prolong_it() {
        let (breaker, now) = (Breaker::new(2, FIRST), Instant::now());
        assert_eq!(failing(&breaker, now), None);
        assert_eq!(failing(&breaker, now), Some(FIRST));
        for _ in 0..10 {
            assert_eq!(breaker.fail(false, true, now), None);
        }
        assert_eq!(breaker.state(now + FIRST), BreakerState::HalfOpen);
        assert_eq!(breaker.fail(false, false, now + FIRST), None, "an old request, late");
        assert!(breaker.lets_through(now + FIRST));
    }

    #[test]
    fn a_stuck_worker_opens_it_at_once() {
        let (breaker, now) = (Breaker::new(5, FIRST), Instant::now());
        assert_eq!(breaker.fail(false, true, now), Some(FIRST));
    }
}
