//! Rates, ratios and quantiles of the last ten seconds, from counters.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::figure::{Figure, Sample};
use crate::metrics::Buckets;

/// Shortest time for a rate, in seconds. An engine is read every two seconds, so shorter rates are noise.
const SHORTEST_S: f64 = 3.0;

/// Length of the window in samples.
pub(super) const LENGTH: usize = 10;

/// Counts at one time. `None` if a count is not reported.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub requests: Option<f64>,
    pub errors: Option<f64>,
    pub prompt_tokens: Option<f64>,
    pub output_tokens: Option<f64>,
    /// Prompt tokens of the requests with a report of cached tokens.
    pub reported: Option<f64>,
    /// Tokens among these that were cached.
    pub cached: Option<f64>,
    /// Tokens among these that the router predicted to be cached.
    pub predicted: Option<f64>,
    /// Sum of the pauses between two tokens, in seconds.
    pub pauses_s: Option<f64>,
    /// Number of these pauses.
    pub pauses: Option<f64>,
    /// Times to the first byte of streamed answers.
    pub first_token: Buckets,
}

type Field = fn(&mut Counts) -> &mut Option<f64>;

/// The counts of workers. Their total is the sum over all workers.
const OF_WORKERS: [Field; 7] = [
    |counts| &mut counts.prompt_tokens,
    |counts| &mut counts.output_tokens,
    |counts| &mut counts.reported,
    |counts| &mut counts.cached,
    |counts| &mut counts.predicted,
    |counts| &mut counts.pauses_s,
    |counts| &mut counts.pauses,
];

impl Counts {
    /// Adds the growth of a worker's counts from `before` to `now`. A worker that has restarted at zero adds nothing.
    pub(super) fn add(&mut self, mut before: Self, mut now: Self) {
        for field in OF_WORKERS {
            if let (Some(before), Some(now)) = (*field(&mut before), *field(&mut now)) {
                *field(self).get_or_insert(0.0) += (now - before).max(0.0);
            }
        }
    }
}

/// The last counts, oldest first.
#[derive(Debug, Default)]
pub(super) struct Window(VecDeque<(Instant, Counts)>);

impl Window {
    pub(super) fn push(&mut self, at: Instant, counts: Counts) {
        if self.0.len() > LENGTH {
            self.0.pop_front();
        }
        self.0.push_back((at, counts));
    }

    pub(super) fn latest(&self) -> Option<&Counts> {
        self.0.back().map(|(_, counts)| counts)
    }

    /// The figures of the window. Other figures of the sample are unknown.
    pub(super) fn sample(&self) -> Sample {
        let mut sample = Sample::default();
        for (figure, value) in [
            (Figure::Requests, self.rate(|counts| counts.requests)),
            (Figure::Errors, self.rate(|counts| counts.errors)),
            (Figure::PromptTokens, self.rate(|counts| counts.prompt_tokens)),
            (Figure::OutputTokens, self.rate(|counts| counts.output_tokens)),
            (Figure::Cached, self.ratio(|counts| counts.cached, |counts| counts.reported)),
            (Figure::Predicted, self.ratio(|counts| counts.predicted, |counts| counts.reported)),
            (Figure::Pause, self.ratio(|counts| counts.pauses_s, |counts| counts.pauses)),
        ] {
            sample.set(figure, value);
        }
        if let (Some((_, first)), Some((_, last))) = (self.0.front(), self.0.back()) {
            let times = last.first_token.since(&first.first_token);
            sample.set(Figure::FirstToken, times.quantile(0.5));
            sample.set(Figure::FirstToken99, times.quantile(0.99));
        }
        sample
    }

    /// The growth of a count within the window, and the seconds since its first value there.
    fn growth(&self, read: fn(&Counts) -> Option<f64>) -> Option<(f64, f64)> {
        let (now, last) = self.0.back().and_then(|(at, counts)| Some((at, read(counts)?)))?;
        let (then, first) = self.0.iter().find_map(|(at, counts)| Some((at, read(counts)?)))?;
        Some(((last - first).max(0.0), now.duration_since(*then).as_secs_f64()))
    }

    fn rate(&self, read: fn(&Counts) -> Option<f64>) -> Option<f64> {
        self.growth(read)
            .filter(|(_, time)| *time >= SHORTEST_S)
            .map(|(growth, time)| growth / time)
    }

    fn ratio(
        &self,
        part: fn(&Counts) -> Option<f64>,
        whole: fn(&Counts) -> Option<f64>,
    ) -> Option<f64> {
        let ((part, _), (whole, _)) = (self.growth(part)?, self.growth(whole)?);
        (whole > 0.0).then(|| part / whole)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn window(outputs: impl IntoIterator<Item = Option<f64>>) -> Window {
        let (start, mut window) = (Instant::now(), Window::default());
        for (second, output_tokens) in outputs.into_iter().enumerate() {
            let at = start + Duration::from_secs(second as u64);
            window.push(at, Counts { output_tokens, ..Counts::default() });
        }
        window
    }

    fn rate(outputs: impl IntoIterator<Item = Option<f64>>) -> Option<f32> {
        window(outputs).sample().get(Figure::OutputTokens)
    }

    #[test]
    fn a_rate_covers_the_last_ten_seconds() {
        assert_eq!(rate([]), None);
        assert_eq!(rate([Some(5.0), Some(5.0), Some(9.0)]), None, "two seconds");
        assert_eq!(rate([Some(5.0), Some(5.0), Some(5.0), Some(17.0)]), Some(4.0));
        assert_eq!(rate((0..60).map(|second| Some(f64::from(second).powi(2)))), Some(108.0));
    }

    #[test]
    fn missing_counts_are_unknown_and_restarted_ones_are_not_negative() {
        assert_eq!(rate([None, None]), None);
        let counts = [5.0, 5.0, 5.0, 17.0].map(Some);
        assert_eq!(rate([None, None].into_iter().chain(counts)), Some(4.0));
        assert_eq!(rate(counts.into_iter().chain([None])), None);
        assert_eq!(rate([500.0, 600.0, 700.0, 9.0].map(Some)), Some(0.0));
    }

    #[test]
    fn the_sum_of_workers_does_not_fall_when_one_restarts() {
        let tokens = |count| Counts { output_tokens: Some(count), ..Counts::default() };
        let mut all = Counts::default();
        all.add(Counts::default(), tokens(100.0));
        assert_eq!(all.output_tokens, None, "counts before the first sample");
        all.add(tokens(100.0), tokens(130.0));
        all.add(tokens(130.0), tokens(10.0));
        all.add(tokens(10.0), tokens(15.0));
        assert_eq!(all.output_tokens, Some(35.0));
        assert_eq!(all.pauses, None);
    }
}
