//! The last failure of a worker: why it gets no requests, and since when.

use std::{fmt::Display, sync::Arc};

use arc_swap::ArcSwapOption;
use serde::Serialize;
use tokio::time::Instant;

/// The latest failure of a worker that is out of rotation or whose breaker is not closed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LastFailure {
    pub reason: String,
    /// Seconds since the first failure after the worker last took requests.
    pub for_s: f64,
}

/// Holds the last failure. Failures are rare, so each one allocates a new entry.
#[derive(Debug, Default)]
pub(super) struct FailureLog(ArcSwapOption<Entry>);

#[derive(Debug)]
struct Entry {
    reason: String,
    since: Instant,
}

impl FailureLog {
    /// Records a failure. The time of the first one since `clear` stays.
    pub(super) fn record(&self, reason: &dyn Display, now: Instant) {
        let reason = reason.to_string();
        self.0.rcu(|before| {
            let since = before.as_ref().map_or(now, |before| before.since);
            Some(Arc::new(Entry { reason: reason.clone(), since }))
        });
    }

    pub(super) fn clear(&self) {
        self.0.store(None);
    }

    pub(super) fn latest(&self, now: Instant) -> Option<LastFailure> {
        let entry = self.0.load();
        let Entry { reason, since } = entry.as_deref()?;
        let for_s = now.saturating_duration_since(*since).as_secs_f64();
        Some(LastFailure { reason: reason.clone(), for_s })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_reason_is_the_latest_and_the_time_the_first() {
        let (failures, start) = (FailureLog::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        assert_eq!(failures.latest(at(0)), None);
        failures.record(&"cannot connect", at(0));
        failures.record(&"no answer", at(3));
        let latest = LastFailure { reason: "no answer".to_owned(), for_s: 5.0 };
        assert_eq!(failures.latest(at(5)), Some(latest));
        failures.clear();
        assert_eq!(failures.latest(at(6)), None);
    }
}
