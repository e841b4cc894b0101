//! Histograms of latencies.

use std::time::Duration;

use super::{
    buckets::{BOUNDS, BOUNDS_NS, Buckets},
    counter::Counter,
    page::{Family, Page},
};
use crate::cores::PerCore;

/// A histogram. All histograms have the same buckets: from 1 us to 1,000 s, in steps of a factor of 1.3 to 1.7.
#[derive(Debug, Default)]
pub struct Histogram(PerCore<Observations>);

/// The observations of one thread.
#[derive(Debug)]
struct Observations {
    /// The last one is for times over all bounds.
    buckets: [Counter; BOUNDS + 1],
    sum_ns: Counter,
}

impl Default for Observations {
    fn default() -> Self {
        let buckets = std::array::from_fn(|_| Counter::default());
        Self { buckets, sum_ns: Counter::default() }
    }
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let own = self.0.own();
        own.buckets[BOUNDS_NS.partition_point(|bound| *bound < ns)].increment();
        own.sum_ns.add(ns);
    }

    /// The sum of a counter over the threads.
    fn total(&self, counter: impl Fn(&Observations) -> &Counter) -> u64 {
        self.0.iter().map(|of_thread| counter(of_thread).get()).sum()
    }

    pub fn count(&self) -> u64 {
        (0..=BOUNDS).map(|at| self.total(|of_thread| &of_thread.buckets[at])).sum()
    }

    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.total(|of_thread| &of_thread.sum_ns))
    }

    /// The observations so far.
    pub fn buckets(&self) -> Buckets {
        Buckets::new(|at| self.total(|of_thread| &of_thread.buckets[at]))
    }

    /// Pairs of bound in seconds and number of observations up to it.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let mut sum = 0;
        BOUNDS_NS.iter().enumerate().map(move |(at, bound)| {
            sum += self.total(|of_thread| &of_thread.buckets[at]);
            (Duration::from_nanos(*bound).as_secs_f64(), sum)
        })
    }

    pub(super) fn write(&self, page: &mut Page, family: &'static Family) {
        page.family(family);
        let mut cumulative = 0;
        for (bound, count) in self.cumulative() {
            cumulative = count;
            page.part("_bucket", Some(&bound.to_string()), count);
        }
        // Observations may be added meanwhile. No bucket may exceed the total.
        let count = self.count().max(cumulative);
        page.part("_bucket", Some("+Inf"), count);
        page.part("_sum", None, self.sum().as_secs_f64());
        page.part("_count", None, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILY: Family = Family::histogram("x_seconds", "Help.");

    #[test]
    fn a_histogram_is_cumulative_and_whole() {
        let histogram = Histogram::default();
        for micros in [1, 2, 2, 3_000_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let mut page = Page::default();
        histogram.write(&mut page, &FAMILY);
        let (text, _) = page.finish();
        for line in [
            "# HELP x_seconds Help.",
            "# TYPE x_seconds histogram",
            "x_seconds_bucket{le=\"0.000001\"} 1",
            "x_seconds_bucket{le=\"0.0000015\"} 1",
            "x_seconds_bucket{le=\"0.000002\"} 3",
            "x_seconds_bucket{le=\"0.7\"} 3",
            "x_seconds_bucket{le=\"1000\"} 3",
            "x_seconds_bucket{le=\"+Inf\"} 4",
            "x_seconds_sum 3000.000005",
            "x_seconds_count 4",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} not in\n{text}");
        }
    }

    #[test]
    fn bounds_grow() {
        assert!(BOUNDS_NS.windows(2).all(|pair| pair[0] < pair[1]), "{BOUNDS_NS:?}");
    }
}
