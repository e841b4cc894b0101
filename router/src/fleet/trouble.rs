//! Why a worker gets no requests, and for how long.

use std::{fmt::Display, sync::Arc};

use arc_swap::ArcSwapOption;
use serde::Serialize;
use tokio::time::Instant;

/// The latest failure of a worker that is out of rotation or whose breaker is not closed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trouble {
    pub reason: String,
    /// Seconds since the first failure after the worker was last well.
    pub for_s: f64,
}

/// The place where failures are noted. They are rare, so each writes a new note.
#[derive(Debug, Default)]
pub(super) struct Troubles(ArcSwapOption<Note>);

#[derive(Debug)]
struct Note {
    reason: String,
    since: Instant,
}

impl Troubles {
    /// Notes a failure. The time of the first one stays.
    pub(super) fn note(&self, reason: &dyn Display, now: Instant) {
        let reason = reason.to_string();
        self.0.rcu(|before| {
            let since = before.as_ref().map_or(now, |before| before.since);
            Some(Arc::new(Note { reason: reason.clone(), since }))
        });
    }

    pub(super) fn clear(&self) {
        self.0.store(None);
    }

    pub(super) fn latest(&self, now: Instant) -> Option<Trouble> {
        let note = self.0.load();
        let Note { reason, since } = note.as_deref()?;
        let for_s = now.saturating_duration_since(*since).as_secs_f64();
        Some(Trouble { reason: reason.clone(), for_s })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_reason_is_the_latest_and_the_time_the_first() {
        let (troubles, start) = (Troubles::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        assert_eq!(troubles.latest(at(0)), None);
        troubles.note(&"cannot connect", at(0));
        troubles.note(&"no answer", at(3));
        let latest = Trouble { reason: "no answer".to_owned(), for_s: 5.0 };
        assert_eq!(troubles.latest(at(5)), Some(latest));
        troubles.clear();
        assert_eq!(troubles.latest(at(6)), None);
    }
}
