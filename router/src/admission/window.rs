//! Counts events of the last ten seconds.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;

/// Length of the window in seconds. The present second counts as a full one.
pub(super) const SECONDS: u64 = 10;

/// A ring of counts, one for each second. An addition is one load and one atomic addition.
#[derive(Debug)]
pub(super) struct Window {
    begun: Instant,
    /// Each entry has its second in the upper half and its count in the lower half.
    slots: [AtomicU64; SECONDS as usize],
}

impl Window {
    pub(super) fn new(now: Instant) -> Self {
        Self { begun: now, slots: Default::default() }
    }

    pub(super) fn add(&self, now: Instant) {
        let second = self.second(now);
        let slot = &self.slots[(second % SECONDS) as usize];
        let found = slot.load(Relaxed);
        let stale = found >> 32 != second;
        if stale && slot.compare_exchange(found, second << 32 | 1, Relaxed, Relaxed).is_ok() {
            return;
        }
        // Another thread may have started the entry of the present second meanwhile.
        slot.fetch_add(1, Relaxed);
    }

    pub(super) fn sum(&self, now: Instant) -> u64 {
        let second = self.second(now);
        let slots = self.slots.iter().map(|slot| slot.load(Relaxed));
        let recent = slots.filter(|slot| second.saturating_sub(slot >> 32) < SECONDS);
        recent.map(|slot| slot & u64::from(u32::MAX)).sum()
    }

    /// Number of events since `then`, to the second, and the time over which they were counted, at most the window.
    pub(super) fn since(&self, then: Instant, now: Instant) -> (u64, Duration) {
        let (first, last) = (self.second(then), self.second(now));
        let slots = self.slots.iter().map(|slot| slot.load(Relaxed));
        let recent = slots.filter(|slot| {
            let second = slot >> 32;
            second >= first && last.saturating_sub(second) < SECONDS
        });
        let sum = recent.map(|slot| slot & u64::from(u32::MAX)).sum();
        (sum, now.saturating_duration_since(then).min(Duration::from_secs(SECONDS)))
    }

    /// Number of the second. It starts at [`SECONDS`], so that an unwritten entry is always stale.
    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.begun).as_secs() + SECONDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_count_for_ten_seconds() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let window = Window::new(begun);
        assert_eq!(window.sum(at(0)), 0);
        for second in 0..30 {
            for _ in 0..3 {
                window.add(at(second));
            }
            assert_eq!(window.sum(at(second)), 3 * (second + 1).min(SECONDS));
        }
        assert_eq!(window.sum(at(34)), 15);
        assert_eq!(window.sum(at(39)), 0);
        assert_eq!(window.since(at(28), at(34)), (6, Duration::from_secs(6)));
        assert_eq!(window.since(at(0), at(34)), (15, Duration::from_secs(10)));
        window.add(at(1000));
        assert_eq!(window.sum(at(1000)), 1);
    }

    #[test]
    fn threads_lose_nothing_within_a_second() {
        let begun = Instant::now();
        let window = Window::new(begun);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| window.add(begun)));
            }
        });
        assert_eq!(window.sum(begun), 40_000);
    }
}
