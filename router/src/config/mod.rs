//! All settings of the router, written once: the command line, the Python bindings and the docs are
//! derived from this struct. Names are SGLang's where it has one.

mod values;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

pub use values::{ApiKey, Seconds, UrlPath};

use crate::worker_url::WorkerUrl;

/// Route LLM requests to the worker that will finish them soonest.
#[derive(Clone, Debug, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "mla-router", version)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Workers to start with, as http://HOST:PORT, separated by spaces. More can be added at run time
    #[arg(long, value_name = "URL", num_args = 0..)]
    pub worker_urls: Vec<WorkerUrl>,

    /// Address to listen on
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 30000)]
    pub port: u16,

    /// How a worker is chosen
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = PolicyName::CacheAware)]
    pub policy: PolicyName,

    /// Largest request body in bytes; a larger one is answered with 413
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20)]
    pub max_payload_size: usize,

    /// Longest life of a request, from its last body byte to the last byte of the response
    #[arg(long, value_name = "SECONDS", default_value = "1800")]
    pub request_timeout_secs: Seconds,

    /// Longest time to open a connection to a worker
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    pub connect_timeout_secs: Seconds,

    /// Idle connections to a worker are closed after this. Must be below the worker's own keep-alive
    /// (75 for ours, 5 for uvicorn), or requests race with the worker closing the connection
    #[arg(long, value_name = "SECONDS", default_value = "4")]
    pub upstream_idle_timeout_secs: Seconds,

    /// Time between two health checks of a worker
    #[arg(long, value_name = "SECONDS", default_value = "1")]
    pub health_check_interval_secs: Seconds,

    /// A health check that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    pub health_check_timeout_secs: Seconds,

    /// Failed health checks in a row that take a worker out of rotation
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub health_failure_threshold: u32,

    /// Good health checks in a row that bring a worker into rotation
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub health_success_threshold: u32,

    /// Path of a worker's health check
    #[arg(long, value_name = "PATH", default_value = "/health")]
    pub health_check_endpoint: UrlPath,

    /// Further workers to try when one fails before the first byte of its response
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub max_retries: u32,

    /// Requests that may wait while no worker is healthy; more are refused with 503
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub queue_size: usize,

    /// Longest wait for a healthy worker; then 503
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    pub queue_timeout_secs: Seconds,

    /// On SIGTERM, time for the requests in flight to finish
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    pub shutdown_grace_period_secs: Seconds,

    /// Key that clients must send as `Authorization: Bearer KEY`, on all paths but the health checks
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<ApiKey>,

    /// How much to log on stderr
    #[arg(long, value_enum, value_name = "LEVEL", default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
}

impl Default for Config {
    /// The defaults of the flags, so that there is no second place for them.
    fn default() -> Self {
        Self::try_parse_from(["mla-router"]).expect("contract: every flag has a default")
    }
}

/// The policies by name; `policy::by_name` makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// Where the request costs the least waiting; learns the workers' prefix caches
    CacheAware,
    /// Each worker in turn
    RoundRobin,
}

impl PolicyName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CacheAware => "cache_aware",
            Self::RoundRobin => "round_robin",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(argv: &[&str]) -> Result<Config, String> {
        let argv = std::iter::once(&"mla-router").chain(argv);
        Config::try_parse_from(argv).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_and_serde_agree() {
        let flags = ["--worker-urls", "http://a:1", "http://b:2", "--policy", "round_robin"];
        let config = parse(&flags).expect("valid flags");
        let json = serde_json::to_string(&config).expect("serializable");
        assert_eq!(serde_json::from_str::<Config>(&json).expect("round trip"), config);
        assert_eq!(serde_json::from_str::<Config>("{}").expect("defaults"), Config::default());
    }

    #[test]
    fn a_bad_value_names_its_flag() {
        for (flag, value) in [
            ("--port", "70000"),
            ("--policy", "magic"),
            ("--worker-urls", "https://a"),
            ("--request-timeout-secs", "0"),
            ("--request-timeout-secs", "nan"),
            ("--health-failure-threshold", "0"),
            ("--health-check-endpoint", "health"),
            ("--api-key", "two words"),
        ] {
            let error = parse(&[flag, value]).expect_err(value);
            assert!(error.contains(flag), "{flag} {value}: {error}");
        }
    }

    #[test]
    fn every_policy_name_has_a_policy_and_is_its_flag() {
        for name in PolicyName::value_variants() {
            let policy = crate::policy::by_name(name.as_str()).expect("exists");
            assert_eq!(policy.name(), name.as_str());
            let config = parse(&["--policy", policy.name()]).expect("a value of the flag");
            assert_eq!(config.policy, *name);
        }
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let error = serde_json::from_str::<Config>(r#"{"prot": 1}"#).expect_err("typo");
        assert!(error.to_string().contains("prot"), "{error}");
    }

    #[test]
    fn the_key_is_not_printed() {
        let config = parse(&["--api-key", "sesame"]).expect("valid");
        assert!(!format!("{config:?}").contains("sesame"));
    }
}
