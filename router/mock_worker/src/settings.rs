//! The settings of a mock engine: its kind and its speed.

use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::fault::Fault;

/// The default size and speed are those of SGLang 0.4 with Llama 3.1 8B on an A100. They reproduce the throughputs
/// and hit rates in the announcement of SGLang's router.
#[derive(Clone, Debug, Parser)]
pub struct Settings {
    /// Tokens of KV cache
    #[arg(long, value_name = "N", default_value_t = 65_536)]
    pub kv_tokens: usize,

    /// Tokens of a page, the unit of sharing
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub page_size: usize,

    /// Prompt tokens computed a second; inf for no time at all
    #[arg(long, value_name = "N", default_value_t = 10_700.0)]
    pub prefill_rate: f64,

    /// Most prompt tokens computed in one step
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub chunked_prefill_size: usize,

    /// Time of a decode step, without its requests
    #[arg(long, value_name = "MS", default_value_t = 10.0)]
    pub decode_base_ms: f64,

    /// Additional time for each request in a decode step
    #[arg(long, value_name = "MS", default_value_t = 0.2)]
    pub decode_per_request_ms: f64,

    /// Requests that run at a time; more wait
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub max_running_requests: usize,

    /// Requests that may wait; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    pub max_queued_requests: usize,

    /// A request waits for another one that is computing its prefix
    #[arg(long)]
    pub in_batch_sharing: bool,

    /// Tokens of one event of a stream
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub stream_interval: usize,

    /// HTTP contract of the engine
    #[arg(long, value_enum, value_name = "NAME", default_value_t = Flavour::Mla)]
    pub flavour: Flavour,

    /// Name of the model
    #[arg(long, value_name = "NAME", default_value = "mock")]
    pub model: String,

    /// First fault, as JSON; see `POST /mock/fault`
    #[arg(long, value_name = "JSON", value_parser = Fault::parse)]
    pub fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Flavour {
    /// Our own workers: counts in headers before the first byte, streams that can be continued
    Mla,
    /// SGLang: counts in `usage` alone, no `boot_id`
    Sglang,
    /// vLLM: counts in `usage` alone, no `/get_server_info`, no `/generate`
    Vllm,
}

impl Default for Settings {
    fn default() -> Self {
        Self::try_parse_from(["mla-mock-worker"]).expect("contract: every flag has a default")
    }
}

impl Settings {
    /// Settings without delays, for tests.
    pub fn instant() -> Self {
        Self {
            prefill_rate: f64::INFINITY,
            decode_base_ms: 0.0,
            decode_per_request_ms: 0.0,
            ..Self::default()
        }
    }

    /// Time of a step with these prompt tokens and decoding requests.
    pub fn step_time(&self, prefill_tokens: usize, decoding: usize) -> Duration {
        let prefill = prefill_tokens as f64 / self.prefill_rate;
        let decode = match decoding {
            0 => 0.0,
            _ => self.decode_base_ms + self.decode_per_request_ms * decoding as f64,
        };
        Duration::from_secs_f64(prefill + decode / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_time_of_its_prefill_and_of_its_decodes() {
        let settings = Settings {
            prefill_rate: 1000.0,
            decode_base_ms: 10.0,
            decode_per_request_ms: 0.5,
            ..Settings::default()
        };
        assert_eq!(settings.step_time(100, 0), Duration::from_millis(100));
        assert_eq!(settings.step_time(0, 20), Duration::from_millis(20));
        assert_eq!(settings.step_time(100, 20), Duration::from_millis(120));
        assert_eq!(Settings::instant().step_time(4096, 64), Duration::ZERO);
    }
}
