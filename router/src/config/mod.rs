//! All settings of the router. They are written once: the command line, the Python bindings and the docs are made
//! from this struct. Names are SGLang's where it has one.

mod choices;
mod collector;
mod ignored;
mod sites;
mod values;

use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser, builder::Resettable};
use serde::{Deserialize, Serialize};

pub use choices::{LogLevel, PolicyName, QueuePolicy};
pub use collector::CollectorUrl;
pub use ignored::Ignored;
pub use sites::{AllowedHost, AllowedOrigin};
pub use values::{ApiKey, AtMost, HeaderField, Network, Ratio, Seconds, Share, UrlPath};

use crate::{key::BLOCK_BYTES, names::WorkerUrl};

/// Headings of `--help`.
const WORKERS: &str = "Workers";
const SERVING: &str = "Server";
const ROUTING: &str = "Routing";
const FAILURES: &str = "Failures";
const OBSERVING: &str = "Observability";

/// Route LLM requests to the worker that will finish them soonest.
#[derive(Clone, Debug, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "mla-router", version, allow_negative_numbers = true)]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_excessive_bools, reason = "independent flags")]
pub struct Config {
    /// Workers to start with, as http(s)://HOST:PORT, separated by spaces. More can be added at run time
    #[arg(long, value_name = "URL", num_args = 0.., help_heading = WORKERS)]
    pub worker_urls: Vec<WorkerUrl>,

    /// File with one worker a line, as a URL or as {"url": URL, "api_key": KEY}; the router follows its
    /// changes
    #[arg(long, value_name = "FILE", help_heading = WORKERS)]
    pub worker_urls_file: Option<PathBuf>,

    /// Find workers among the pods of a Kubernetes cluster
    #[arg(long, help_heading = WORKERS)]
    pub service_discovery: bool,

    /// Labels of the pods that are workers, as KEY=VALUE
    #[arg(long, value_name = "LABEL", num_args = 1.., help_heading = WORKERS)]
    pub selector: Vec<String>,

    /// Port of these pods. The annotation `mla-router/ports` of a pod, such as 31000,31001, replaces it
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = WORKERS)]
    pub service_discovery_port: u16,

    /// Namespace of these pods; the router's own if not given
    #[arg(long, value_name = "NAME", help_heading = WORKERS)]
    pub service_discovery_namespace: Option<String>,

    /// Allowed networks of workers that are added over HTTP; loopback and private networks if none is given
    #[arg(long, value_name = "CIDR", num_args = 1.., help_heading = WORKERS)]
    pub worker_networks: Vec<Network>,

    /// Key for requests to workers; it replaces the key of the client
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_WORKER_API_KEY", hide_env_values = true, help_heading = WORKERS)]
    pub worker_api_key: Option<ApiKey>,

    /// Key for the admin paths of workers, such as /flush_cache (their --admin-api-key); --worker-api-key if
    /// not given
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_WORKER_ADMIN_API_KEY", hide_env_values = true, help_heading = WORKERS)]
    pub worker_admin_api_key: Option<ApiKey>,

    /// Secret shared with the workers, which have the same flag and variable. The router signs requests that
    /// continue a broken stream on another worker. Without it, broken streams end with an error
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_REPLAY_KEY", hide_env_values = true, help_heading = WORKERS)]
    pub replay_key: Option<ApiKey>,

    /// CA certificates (PEM) for workers with https:// URLs; the system's if not given
    #[arg(long, value_name = "FILE", help_heading = WORKERS)]
    pub worker_ca_cert_path: Option<PathBuf>,

    /// Choose among the data-parallel ranks of a worker: each has a prefix cache of its own. For SGLang with a
    /// `dp_size` above 1; a request names its rank in the header X-Data-Parallel-Rank
    #[arg(long, help_heading = WORKERS)]
    pub dp_aware: bool,

    /// Use HTTP/2 for requests to workers; without TLS by prior knowledge (h2c)
    #[arg(long, help_heading = WORKERS)]
    pub upstream_http2: bool,

    /// Time limit for opening a connection to a worker
    #[arg(long, value_name = "SECONDS", default_value = "5", help_heading = WORKERS)]
    pub connect_timeout_secs: Seconds,

    /// Idle time after which a connection to a worker is closed. Must be below the keep-alive time of the worker
    /// (this project: 75, uvicorn: 5); otherwise a request may meet a closing connection
    #[arg(long, value_name = "SECONDS", default_value = "4", help_heading = WORKERS)]
    pub upstream_idle_timeout_secs: Seconds,

    /// Address to listen on
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = SERVING)]
    pub host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 30000, help_heading = SERVING)]
    pub port: u16,

    /// Share the port with one other router of this user: a new router takes over from an old one, which then
    /// gets SIGTERM
    #[arg(long, help_heading = SERVING)]
    pub reuse_port: bool,

    /// Certificate chain (PEM) for HTTPS; changes of the file are followed. Needs --tls-key-path
    #[arg(long, value_name = "FILE", requires = "tls_key_path", help_heading = SERVING)]
    pub tls_cert_path: Option<PathBuf>,

    /// Private key (PEM) of --tls-cert-path
    #[arg(long, value_name = "FILE", requires = "tls_cert_path", help_heading = SERVING)]
    pub tls_key_path: Option<PathBuf>,

    /// Keys of clients. A client must send one of them as `Authorization: Bearer KEY` on all paths except
    /// health checks. Other users of the machine can read arguments, but not the environment
    #[arg(long, value_name = "KEY", num_args = 1.., env = "MLA_ROUTER_API_KEY", hide_env_values = true, help_heading = SERVING)]
    pub api_key: Vec<ApiKey>,

    /// Key for the admin paths (such as /workers and /metrics); --api-key if not given
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_ADMIN_API_KEY", hide_env_values = true, help_heading = SERVING)]
    pub admin_api_key: Option<ApiKey>,

    /// Allow to listen without a key on an address that other machines can reach
    #[arg(long, help_heading = SERVING)]
    pub insecure: bool,

    /// Host names of the router, in addition to localhost and IP addresses (* for any). Without a key, a router on
    /// loopback refuses other names, because web pages could reach it by them
    #[arg(long, value_name = "NAME", num_args = 1.., help_heading = SERVING)]
    pub allowed_hosts: Vec<AllowedHost>,

    /// Origins of web pages that may use the models, such as https://chat.example.com (* for all)
    #[arg(long, value_name = "ORIGIN", num_args = 1.., help_heading = SERVING)]
    pub cors_allowed_origins: Vec<AllowedOrigin>,

    /// Largest request body in bytes; a larger one gets 413
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20, help_heading = SERVING)]
    pub max_payload_size: usize,

    /// Largest number of open connections. An idle one is closed for a new one. If none is idle, new connections
    /// may only use health checks, /v1/models and admin paths, and get 429 for other requests
    #[arg(long, value_name = "N", default_value_t = 16384, help_heading = SERVING)]
    pub max_connections: usize,

    /// Time limit for the head of a request; then 408
    #[arg(long, value_name = "SECONDS", default_value = "10", help_heading = SERVING)]
    pub header_read_timeout_secs: Seconds,

    /// Longest pause within the body of a request; then 408
    #[arg(long, value_name = "SECONDS", default_value = "30", help_heading = SERVING)]
    pub body_read_timeout_secs: Seconds,

    /// Minimum mean rate of a request body in bytes a second, beyond --body-read-timeout-secs; then 408
    #[arg(long, value_name = "BYTES", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..), help_heading = SERVING)]
    pub body_min_rate: u32,

    /// Pause in a stream after which the client gets a comment line, so that proxies keep the connection open
    #[arg(long, value_name = "SECONDS", default_value = "15", help_heading = SERVING)]
    pub sse_keepalive_secs: Seconds,

    /// Time for the requests in flight to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value = "30", help_heading = SERVING)]
    pub shutdown_grace_period_secs: Seconds,

    /// Routing policy
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = PolicyName::CacheAware, help_heading = ROUTING)]
    pub policy: PolicyName,

    /// cache_aware_threshold: share of the prompt that must be cached on a worker for a cache hit
    #[arg(long, value_name = "SHARE", default_value = "0.5", help_heading = ROUTING)]
    pub cache_threshold: Share,

    /// cache_aware_threshold: the workers are out of balance if their numbers of requests differ by more than
    /// this and by more than --balance-rel-threshold; then the least loaded one is chosen
    #[arg(long, value_name = "N", default_value_t = 32, help_heading = ROUTING)]
    pub balance_abs_threshold: u32,

    /// cache_aware_threshold: the same limit, as a ratio between the most and the least loaded worker
    #[arg(long, value_name = "RATIO", default_value = "1.0001", allow_negative_numbers = true, help_heading = ROUTING)]
    pub balance_rel_threshold: Ratio,

    /// Size of the cache of a worker that does not report it, in characters of prompts
    #[arg(long, value_name = "N", default_value_t = 1 << 24, help_heading = ROUTING)]
    pub max_tree_size: u64,

    /// Largest number of requests on the workers; further ones wait in the queue. -1: no limit
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true, help_heading = ROUTING)]
    pub max_concurrent_requests: AtMost,

    /// Largest number of waiting requests; further ones get 429, or 503 if all workers are down. 0: no request
    /// waits
    #[arg(long, value_name = "N", default_value_t = 1024, help_heading = ROUTING)]
    pub queue_size: usize,

    /// Order of the queue
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = QueuePolicy::Fcfs, help_heading = ROUTING)]
    pub queue_policy: QueuePolicy,

    /// Longest wait for a worker; then 503. A request whose expected wait, by the rate of the last ten seconds, is
    /// longer gets 429 at once
    #[arg(long, value_name = "SECONDS", default_value = "60", help_heading = ROUTING)]
    pub queue_timeout_secs: Seconds,

    /// Time limit for a request, from its last byte to the last byte of the response
    #[arg(long, value_name = "SECONDS", default_value = "1800", help_heading = FAILURES)]
    pub request_timeout_secs: Seconds,

    /// Minimum wait for the first byte of a stream before another worker gets the request; a long prompt or a long
    /// queue extends it
    #[arg(long, value_name = "SECONDS", default_value = "10", help_heading = FAILURES)]
    pub first_token_timeout_secs: Seconds,

    /// Pause after which a stream counts as stuck; two fifths of it if the worker sends other streams. The limit is
    /// longer for slow streams
    #[arg(long, value_name = "SECONDS", default_value = "5", help_heading = FAILURES)]
    pub inter_token_timeout_secs: Seconds,

    /// Largest number of retries on other workers before the first byte of the response
    #[arg(long, alias = "retry-max-retries", value_name = "N", default_value_t = 3, help_heading = FAILURES)]
    pub max_retries: u32,

    /// Disable retries
    #[arg(long, help_heading = FAILURES)]
    pub disable_retries: bool,

    /// Pause before the first retry after an error status or a late first byte; it doubles with each retry
    #[arg(long, value_name = "MS", default_value_t = 20, help_heading = FAILURES)]
    pub retry_initial_backoff_ms: u64,

    /// Longest pause before a retry
    #[arg(long, value_name = "MS", default_value_t = 640, help_heading = FAILURES)]
    pub retry_max_backoff_ms: u64,

    /// Largest share of the requests of the last ten seconds that may be retried after an error status or a late
    /// first byte; ten retries a second are always allowed
    #[arg(long, value_name = "SHARE", default_value = "0.2", help_heading = FAILURES)]
    pub retry_budget: Share,

    /// Disable the continuation of broken streams on another worker; they end with an error
    #[arg(long, help_heading = FAILURES)]
    pub disable_replay: bool,

    /// Disable the circuit breakers
    #[arg(long, help_heading = FAILURES)]
    pub disable_circuit_breaker: bool,

    /// Consecutive failed requests that open the circuit breaker of a worker
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..), help_heading = FAILURES)]
    pub cb_failure_threshold: u32,

    /// First open time of a circuit breaker; it doubles with each opening, up to 16 times
    #[arg(long, value_name = "SECONDS", default_value = "5", help_heading = FAILURES)]
    pub cb_timeout_duration_secs: Seconds,

    /// Time between two health checks of a worker
    #[arg(long, value_name = "SECONDS", default_value = "1", help_heading = FAILURES)]
    pub health_check_interval_secs: Seconds,

    /// Time limit for a health check
    #[arg(long, value_name = "SECONDS", default_value = "1", help_heading = FAILURES)]
    pub health_check_timeout_secs: Seconds,

    /// Consecutive failed health checks after which a worker is down. The first one already takes it out of
    /// rotation. The router keeps the state of its cache if the same process comes back
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..), help_heading = FAILURES)]
    pub health_failure_threshold: u32,

    /// Consecutive good health checks that bring a worker into rotation
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = FAILURES)]
    pub health_success_threshold: u32,

    /// Path of a worker's health check
    #[arg(long, value_name = "PATH", default_value = "/health", help_heading = FAILURES)]
    pub health_check_endpoint: UrlPath,

    /// Level of the log on stderr
    #[arg(long, value_enum, value_name = "LEVEL", default_value_t = LogLevel::Info, help_heading = OBSERVING)]
    pub log_level: LogLevel,

    /// Log as JSON, one object a line
    #[arg(long, help_heading = OBSERVING)]
    pub log_json: bool,

    /// Log a line for each request
    #[arg(long, help_heading = OBSERVING)]
    pub access_log: bool,

    /// Headers with the request id of the client. The first one present is used in logs and traces, and sent to
    /// the worker
    #[arg(long, value_name = "HEADER", num_args = 0.., default_values = ["x-request-id", "x-correlation-id"], help_heading = OBSERVING)]
    pub request_id_headers: Vec<HeaderField>,

    /// OpenTelemetry collector for traces, as http://HOST:PORT (OTLP over HTTP, usually port 4318)
    #[arg(long, value_name = "URL", help_heading = OBSERVING)]
    pub otlp_traces_endpoint: Option<CollectorUrl>,

    #[command(flatten)]
    #[serde(skip)]
    pub ignored: Ignored,
}

impl Config {
    /// Capacity in blocks of a worker that does not report the size of its cache.
    pub fn default_cache_blocks(&self) -> u64 {
        self.max_tree_size / BLOCK_BYTES as u64
    }

    /// Largest number of retries.
    pub fn retries(&self) -> u32 {
        if self.disable_retries { 0 } else { self.max_retries }
    }

    /// The key for requests to workers.
    pub fn worker_key(&self) -> Option<&ApiKey> {
        self.worker_api_key.as_ref().or(self.api_key.first())
    }

    /// Whether the `Authorization` of a client is for the router. Otherwise it is passed on to the workers.
    pub fn has_keys(&self) -> bool {
        self.worker_key().is_some() || self.admin_api_key.is_some()
    }
}

impl Default for Config {
    /// The defaults of the flags. Environment variables are ignored: the defaults of a program must not depend on
    /// where it runs.
    fn default() -> Self {
        let command = Self::command().mut_args(|flag| flag.env(Resettable::Reset));
        let defaults = command.try_get_matches_from(["mla-router"]);
        defaults
            .and_then(|defaults| Self::from_arg_matches(&defaults))
            .expect("contract: every flag has a default")
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

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
            ("--worker-urls", "ftp://a"),
            ("--request-timeout-secs", "0"),
            ("--max-concurrent-requests", "0"),
            ("--max-concurrent-requests", "-7"),
            ("--max-concurrent-requests", "1.5"),
            ("--balance-rel-threshold", "nan"),
            ("--balance-rel-threshold", "inf"),
            ("--balance-rel-threshold", "-1"),
            ("--balance-rel-threshold", "0.5"),
            ("--health-failure-threshold", "0"),
            ("--health-check-endpoint", "health"),
            ("--api-key", "two words"),
            ("--api-key", ""),
            ("--queue-size", "-5"),
        ] {
            let error = parse(&[flag, value]).expect_err(value);
            assert!(error.contains(flag), "{flag} {value}: {error}");
        }
    }

    #[test]
    fn only_a_list_that_may_be_empty_needs_no_value() {
        for flag in ["--api-key", "--allowed-hosts", "--worker-networks", "--selector"] {
            assert!(parse(&[flag]).expect_err(flag).contains(flag));
        }
        // `--worker-urls $URLS` of a script.
        assert!(parse(&["--worker-urls"]).expect("no workers yet").worker_urls.is_empty());
    }

    #[test]
    fn a_policy_is_its_flag_and_has_sglangs_spelling() {
        for name in PolicyName::value_variants() {
            assert_eq!(parse(&["--policy", name.as_str()]).expect("a value").policy, *name);
        }
        let hashing = parse(&["--policy", "consistent_hashing"]).expect("an alias");
        assert_eq!(hashing.policy, PolicyName::ConsistentHash);
    }

    #[test]
    fn ignored_flags_are_accepted_and_reported() {
        let argv = ["--eviction-interval", "60", "--prometheus-port", "29000"];
        let config = parse(&argv).expect("SGLang's flags");
        let given: Vec<_> = config.ignored.given().map(|(flag, _)| flag).collect();
        assert_eq!(given, ["--eviction-interval", "--prometheus-port"]);
        assert_eq!(parse(&[]).expect("nothing").ignored.given().count(), 0);
        assert_eq!(Config { ignored: Ignored::default(), ..config }, Config::default());
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
