//! The load figures in an engine's `/metrics`, under the names of SGLang and vLLM. This project's workers have both.

use serde::Serialize;

/// The latest figures of one engine. A figure that the engine does not report is `None`. Counts start with the engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineLoad {
    /// Requests in the batch.
    pub running: Option<f64>,
    /// Requests in the engine's own queue.
    pub waiting: Option<f64>,
    /// Share of the KV cache that requests use, 0 to 1.
    pub kv_usage: Option<f64>,
    pub prompt_tokens: Option<f64>,
    pub output_tokens: Option<f64>,
    /// Sum of the pauses between two tokens of an answer, in seconds.
    pub pauses_s: Option<f64>,
    /// Number of these pauses.
    pub pauses: Option<f64>,
}

/// The field of [`EngineLoad`] for a sample.
#[derive(Clone, Copy)]
enum Meaning {
    Running,
    Waiting,
    KvUsage,
    PromptTokens,
    OutputTokens,
    PausesSum,
    Pauses,
}

use Meaning::{KvUsage, OutputTokens, Pauses, PausesSum, PromptTokens, Running, Waiting};

/// The known metrics. If a page has several names with the same meaning, the first of this list counts.
const NAMES: [(&str, Meaning); 17] = [
    ("sglang:num_running_reqs", Running),
    ("vllm:num_requests_running", Running),
    ("sglang:num_queue_reqs", Waiting),
    ("vllm:num_requests_waiting", Waiting),
    ("sglang:token_usage", KvUsage),
    ("vllm:kv_cache_usage_perc", KvUsage),
    ("vllm:gpu_cache_usage_perc", KvUsage),
    ("sglang:prompt_tokens_total", PromptTokens),
    ("vllm:prompt_tokens_total", PromptTokens),
    ("sglang:generation_tokens_total", OutputTokens),
    ("vllm:generation_tokens_total", OutputTokens),
    ("sglang:inter_token_latency_seconds_sum", PausesSum),
    ("vllm:inter_token_latency_seconds_sum", PausesSum),
    ("vllm:time_per_output_token_seconds_sum", PausesSum),
    ("sglang:inter_token_latency_seconds_count", Pauses),
    ("vllm:inter_token_latency_seconds_count", Pauses),
    ("vllm:time_per_output_token_seconds_count", Pauses),
];

/// The series of one metric. An engine with several ranks has one series for each rank.
#[derive(Clone, Copy, Default)]
struct Series {
    sum: f64,
    count: u32,
}

impl EngineLoad {
    /// Parses a page in Prometheus' text format. Unknown metrics are skipped.
    pub fn parse(page: &[u8]) -> Self {
        let mut found = [Series::default(); NAMES.len()];
        for line in String::from_utf8_lossy(page).lines() {
            if let Some((name, value)) = sample(line)
                && let Some(at) = NAMES.iter().position(|(known, _)| *known == name)
            {
                found[at].sum += value;
                found[at].count += 1;
            }
        }
        let mut load = Self::default();
        for ((_, meaning), series) in NAMES.iter().zip(found).filter(|(_, found)| found.count > 0) {
            let (field, value) = match meaning {
                Running => (&mut load.running, series.sum),
                Waiting => (&mut load.waiting, series.sum),
                KvUsage => (&mut load.kv_usage, series.sum / f64::from(series.count)),
                PromptTokens => (&mut load.prompt_tokens, series.sum),
                OutputTokens => (&mut load.output_tokens, series.sum),
                PausesSum => (&mut load.pauses_s, series.sum),
                Pauses => (&mut load.pauses, series.sum),
            };
            field.get_or_insert(value);
        }
        load
    }

    /// Whether the engine has computed tokens since `before`.
    pub fn is_ahead_of(&self, before: &Self) -> bool {
        let more = |now: Option<f64>, then: Option<f64>| {
            now.zip(then).is_some_and(|(now, then)| now > then)
        };
        more(self.output_tokens, before.output_tokens)
            || more(self.prompt_tokens, before.prompt_tokens)
    }

    /// Whether no figure is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns name and value of a sample; `None` for a comment. The value of a label may have spaces and braces.
fn sample(line: &str) -> Option<(&str, f64)> {
    let name = line.split(['{', ' ']).next()?;
    let behind = match line.rfind('}') {
        Some(labels_end) => &line[labels_end + 1..],
        None => &line[name.len()..],
    };
    let value: f64 = behind.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && !name.starts_with('#')).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_sglang_and_vllm() {
        let sglang = br#"# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a {b} c",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="a"} 2.0
sglang:token_usage{model_name="a"} 0.25
sglang:prompt_tokens_total{model_name="a"} 1.5e3
sglang:generation_tokens_total{model_name="a"} 40.0
sglang:inter_token_latency_seconds_bucket{le="0.1",model_name="a"} 39.0
sglang:inter_token_latency_seconds_sum{model_name="a"} 0.8
sglang:inter_token_latency_seconds_count{model_name="a"} 39.0
"#;
        let load = EngineLoad {
            running: Some(3.0),
            waiting: Some(2.0),
            kv_usage: Some(0.25),
            prompt_tokens: Some(1500.0),
            output_tokens: Some(40.0),
            pauses_s: Some(0.8),
            pauses: Some(39.0),
        };
        assert_eq!(EngineLoad::parse(sglang), load);
        let vllm = br#"vllm:num_requests_running{engine="0",model_name="m"} 1
vllm:num_requests_running{engine="1",model_name="m"} 2
vllm:num_requests_waiting{engine="0"} 0 1395066363000
vllm:num_requests_waiting{engine="1"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.3
vllm:prompt_tokens_total 1500
vllm:generation_tokens_total 40
vllm:time_per_output_token_seconds_sum 0.8
vllm:time_per_output_token_seconds_count 39
"#;
        assert_eq!(EngineLoad::parse(vllm), load);
        let later = EngineLoad { output_tokens: Some(41.0), ..load.clone() };
        assert!(later.is_ahead_of(&load) && !load.is_ahead_of(&load));
        assert!(!later.is_ahead_of(&EngineLoad::default()), "nothing to compare with");
        let both = [&sglang[..], &vllm[..]].concat();
        assert_eq!(EngineLoad::parse(&both), load, "no figure counts twice");
    }

    #[test]
    fn other_pages_have_no_figures() {
        for page in ["", "{}", "<html>", "\u{fffd}", "up 1", "vllm:num_requests_running NaN"] {
            assert!(EngineLoad::parse(page.as_bytes()).is_empty(), "{page}");
        }
    }
}
