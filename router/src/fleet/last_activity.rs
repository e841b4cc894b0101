//! The requests in flight on an engine process, and the time of its last sign of life: a byte of any response.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use tokio::time::Instant;

/// Measured silences may be too short by this much.
pub(super) const CLOCK_RESOLUTION: Duration = Duration::from_millis(1);

/// Written for every frame, by any thread: so it has a cache line of its own, and a value that would not change is not
/// written. All times are milliseconds since `born`.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct LastActivity {
    /// Time of the last byte.
    last_byte: AtomicU64,
    /// Time at which the worker, idle before, got a request.
    busy_since: AtomicU64,
    requests: AtomicU32,
    born: Instant,
}

impl LastActivity {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            last_byte: AtomicU64::new(0),
            busy_since: AtomicU64::new(0),
            requests: AtomicU32::new(0),
            born: now,
        }
    }

    /// Records a byte. Returns the length in milliseconds of the silence that it ends.
    pub(super) fn record_byte(&self, now: Instant) -> u64 {
        let at = self.millis(now);
        if self.last_byte.load(Ordering::Relaxed) >= at {
            return 0;
        }
        // Another thread may have recorded a later byte meanwhile.
        let before = self.last_byte.fetch_max(at, Ordering::Relaxed);
        at.saturating_sub(before.max(self.busy_since.load(Ordering::Relaxed)))
    }

    /// Records the start of a request. An idle process is not silent: its silence starts with its first request.
    pub(super) fn request_started(&self, now: Instant) {
        // The time comes first: with a request, but without its time, an idle process would look silent.
        if self.requests.load(Ordering::Relaxed) == 0 {
            self.busy_since.fetch_max(self.millis(now), Ordering::Relaxed);
        }
        self.requests.fetch_add(1, Ordering::Release);
    }

    pub(super) fn request_ended(&self) {
        self.requests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Number of requests in flight.
    pub(super) fn requests(&self) -> u32 {
        self.requests.load(Ordering::Acquire)
    }

    pub(super) fn silent_for(&self, now: Instant) -> Duration {
        let last_byte = self.last_byte.load(Ordering::Relaxed);
        let last = last_byte.max(self.busy_since.load(Ordering::Relaxed));
        Duration::from_millis(self.millis(now).saturating_sub(last))
    }

    /// Whether a byte has arrived after `then`.
    pub(super) fn received_since(&self, then: Instant) -> bool {
        self.last_byte.load(Ordering::Relaxed) > self.millis(then)
    }

    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.born).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_counted_from_the_last_sign() {
        let born = Instant::now();
        let at = |millis| born + Duration::from_millis(millis);
        let activity = LastActivity::new(born);
        assert_eq!(activity.silent_for(at(40)), Duration::from_millis(40));
        assert_eq!(activity.record_byte(at(50)), 50);
        assert_eq!(activity.record_byte(at(30)), 0, "another thread, a little late");
        assert_eq!(activity.silent_for(at(70)), Duration::from_millis(20));
        assert_eq!(activity.silent_for(at(10)), Duration::ZERO);
    }

    #[test]
    fn a_new_request_begins_a_silence_and_is_no_sign_of_life() {
        let born = Instant::now();
        let at = |millis| born + Duration::from_millis(millis);
        let activity = LastActivity::new(born);
        activity.record_byte(at(10));
        activity.request_started(at(50));
        activity.request_started(at(60));
        assert_eq!(activity.silent_for(at(70)), Duration::from_millis(20));
        assert_eq!(activity.record_byte(at(15)), 0, "it was idle until then");
        assert!(activity.received_since(at(5)) && !activity.received_since(at(20)));
    }

    #[test]
    fn a_recorded_byte_is_not_forgotten_for_an_earlier_one() {
        let born = Instant::now();
        let activity = LastActivity::new(born);
        let clock = AtomicU64::new(1);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..300_000 {
                        let now =
                            born + Duration::from_millis(clock.fetch_add(1, Ordering::Relaxed));
                        activity.record_byte(now);
                        assert_eq!(activity.silent_for(now), Duration::ZERO);
                    }
                });
            }
        });
    }

    #[test]
    fn a_process_with_a_new_request_never_looks_silent_for_the_time_it_was_idle() {
        let born = Instant::now();
        let at = |round| born + Duration::from_secs(round);
        let (activity, round) = (LastActivity::new(born), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for next in 1..500_000 {
                    round.store(next, Ordering::SeqCst);
                    activity.request_started(at(next));
                    activity.request_ended();
                }
                round.store(u64::MAX, Ordering::SeqCst);
            });
            loop {
                // A request that is seen now has begun in this round or later.
                let now = round.load(Ordering::SeqCst);
                if now == u64::MAX {
                    break;
                }
                if activity.requests() > 0 {
                    assert_eq!(activity.silent_for(at(now)), Duration::ZERO);
                }
            }
        });
    }
}
