//! How long something takes, counted by ranges.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use super::page::Page;

/// Latencies in buckets of a factor of about 2 to 2.5, from 1 us to 100 s.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS.len()],
    sum_ns: AtomicU64,
    count: AtomicU64,
}

/// Upper bounds in nanoseconds, and as the label says it.
const BOUNDS: [(u64, &str); 25] = [
    (1_000, "0.000001"),
    (2_500, "0.0000025"),
    (5_000, "0.000005"),
    (10_000, "0.00001"),
    (25_000, "0.000025"),
    (50_000, "0.00005"),
    (100_000, "0.0001"),
    (250_000, "0.00025"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_500_000, "0.0025"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (25_000_000, "0.025"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (250_000_000, "0.25"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1"),
    (2_500_000_000, "2.5"),
    (5_000_000_000, "5"),
    (10_000_000_000, "10"),
    (25_000_000_000, "25"),
    (50_000_000_000, "50"),
    (100_000_000_000, "100"),
];

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|(bound, _)| *bound < ns);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Relaxed);
        }
        self.sum_ns.fetch_add(ns, Relaxed);
        self.count.fetch_add(1, Relaxed);
    }

    pub(super) fn write(&self, page: &mut Page, name: &'static str, help: &str) {
        page.family(name, "histogram", help);
        let mut cumulative = 0;
        for ((_, bound), bucket) in BOUNDS.iter().zip(&self.buckets) {
            cumulative += bucket.load(Relaxed);
            page.series("_bucket", &[("le", bound)], format_args!("{cumulative}"));
        }
        // Observations go on meanwhile, and no bucket may exceed the total.
        let count = self.count.load(Relaxed).max(cumulative);
        page.series("_bucket", &[("le", "+Inf")], format_args!("{count}"));
        let seconds = Duration::from_nanos(self.sum_ns.load(Relaxed)).as_secs_f64();
        page.series("_sum", &[], format_args!("{seconds}"));
        page.series("_count", &[], format_args!("{count}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_cumulative_and_whole() {
        let histogram = Histogram::default();
        for micros in [1, 2, 2, 300_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let mut page = Page::default();
        histogram.write(&mut page, "x_seconds", "Help.");
        let text = page.finish();
        for line in [
            "# HELP mla_router_x_seconds Help.",
            "# TYPE mla_router_x_seconds histogram",
            "mla_router_x_seconds_bucket{le=\"0.000001\"} 1",
            "mla_router_x_seconds_bucket{le=\"0.0000025\"} 3",
            "mla_router_x_seconds_bucket{le=\"100\"} 3",
            "mla_router_x_seconds_bucket{le=\"+Inf\"} 4",
            "mla_router_x_seconds_sum 300.000005",
            "mla_router_x_seconds_count 4",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} not in\n{text}");
        }
    }
}
