//! The buckets of a histogram, at one time or between two times.

use std::time::Duration;

/// Bounds within a decade, in tenths.
const STEPS: [u64; 6] = [10, 15, 20, 30, 50, 70];
const DECADES: usize = 9;
pub(super) const BOUNDS: usize = STEPS.len() * DECADES + 1;

/// Upper bounds of the buckets in nanoseconds: 1 us to 1,000 s.
pub(super) const BOUNDS_NS: [u64; BOUNDS] = {
    let mut bounds = [0; BOUNDS];
    let mut unit = 100;
    let mut index = 0;
    while index < BOUNDS {
        bounds[index] = STEPS[index % STEPS.len()] * unit;
        index += 1;
        if index.is_multiple_of(STEPS.len()) {
            unit *= 10;
        }
    }
    bounds
};

/// Number of observations in each bucket. Observations above the last bound are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets([u64; BOUNDS]);

impl Default for Buckets {
    fn default() -> Self {
        Self([0; BOUNDS])
    }
}

impl Buckets {
    pub(super) fn new(count: impl FnMut(usize) -> u64) -> Self {
        Self(std::array::from_fn(count))
    }

    /// The observations since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at].saturating_sub(before.0[at])))
    }

    /// The `q` quantile in seconds, interpolated within its bucket. `None` without observations.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let rank = q * self.0.iter().sum::<u64>() as f64;
        let mut below = 0.0;
        for (at, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            if below + count >= rank {
                let lower = at.checked_sub(1).map_or(0, |before| BOUNDS_NS[before]) as f64;
                let ns = lower + (BOUNDS_NS[at] as f64 - lower) * (rank - below) / count;
                return Some(ns / Duration::from_secs(1).as_nanos() as f64);
            }
            below += count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Histogram;

    #[test]
    fn quantiles_lie_in_the_bucket_of_their_observation() {
        let histogram = Histogram::default();
        assert_eq!(histogram.buckets().quantile(0.5), None);
        for millis in 1..=100 {
            histogram.observe(Duration::from_millis(millis));
        }
        let before = histogram.buckets();
        let median = before.quantile(0.5).expect("observations");
        assert!((0.045..=0.055).contains(&median), "{median}");
        for _ in 0..100 {
            histogram.observe(Duration::from_secs(9));
        }
        let since = histogram.buckets().since(&before);
        for q in [0.01, 0.5, 0.99] {
            let time = since.quantile(q).expect("observations");
            assert!((7.0..=10.0).contains(&time), "{time}");
        }
        assert_eq!(before.since(&before).quantile(0.5), None);
    }
}
