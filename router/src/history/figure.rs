//! The figures of one second, for one worker or for all together.

use serde::Serialize;

use crate::metrics::{Label, labels};

labels! {
    /// A figure. Rates and latencies cover the last ten seconds; counts of requests are present values.
    pub enum Figure {
        /// Per second.
        Requests => "requests",
        /// Responses with 5xx and failed attempts, per second.
        Errors => "errors",
        /// Per second.
        PromptTokens => "prompt_tokens",
        /// Per second.
        OutputTokens => "output_tokens",
        /// Share of the prompt tokens that were cached.
        Cached => "cached",
        /// Share of the prompt tokens that the router predicted to be cached.
        Predicted => "predicted",
        /// Requests in the engine's batch; for all workers together, requests in the router.
        Running => "running",
        /// Requests in the engine's queue; for all workers together, also those in the router's queue.
        Waiting => "waiting",
        /// Median time to the first byte of a streamed answer, in seconds.
        FirstToken => "first_token",
        /// 99th percentile of that time, in seconds.
        FirstToken99 => "first_token_p99",
        /// Mean time between two tokens of an answer, in seconds.
        Pause => "pause",
        /// Share of the KV cache that requests use; for all workers together, the mean.
        KvUsage => "kv_usage",
    }
}

/// A value for each [`Figure`]. An unknown value is NaN, which is `null` in JSON.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample([f32; Figure::ALL.len()]);

impl Default for Sample {
    fn default() -> Self {
        Self([f32::NAN; Figure::ALL.len()])
    }
}

impl Sample {
    pub fn get(&self, figure: Figure) -> Option<f32> {
        Some(self.0[figure.index()]).filter(|value| !value.is_nan())
    }

    /// Sets a value, rounded to four digits: enough for a chart, and short in JSON.
    pub fn set(&mut self, figure: Figure, value: Option<f64>) {
        self.0[figure.index()] = value.map_or(f32::NAN, four_digits);
    }
}

fn four_digits(value: f64) -> f32 {
    if value == 0.0 || !value.is_finite() {
        return value as f32;
    }
    let scale = 10f64.powf(3.0 - value.abs().log10().floor());
    ((value * scale).round() / scale) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_short_and_unknown_values_are_null() {
        let mut sample = Sample::default();
        sample.set(Figure::Requests, Some(12.345_678));
        sample.set(Figure::Errors, Some(0.0));
        sample.set(Figure::PromptTokens, Some(123_456.789));
        sample.set(Figure::FirstToken, Some(0.000_123_456));
        let json = serde_json::to_string(&sample).expect("numbers");
        assert_eq!(json, "[12.35,0.0,123500.0,null,null,null,null,null,0.0001235,null,null,null]");
        assert_eq!(sample.get(Figure::KvUsage), None);
    }
}
