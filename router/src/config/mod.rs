//! All settings of the router, written once: the command line, the Python bindings and the docs are
//! derived from this struct. Names are SGLang's where it has one.

mod collector;
mod ignored;
mod sites;
mod values;

use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum, builder::Resettable};
use serde::{Deserialize, Serialize};

pub use collector::CollectorUrl;
pub use ignored::Ignored;
pub use sites::{AllowedHost, AllowedOrigin};
pub use values::{ApiKey, AtMost, HeaderField, Network, Ratio, Seconds, Share, UrlPath};

use crate::{key::BLOCK_BYTES, names::WorkerUrl};

/// Headings of `--help`.
const WORKERS: &str = "Workers";
const SERVING: &str = "Serving clients";
const ROUTING: &str = "Choosing a worker";
const FAILURES: &str = "When something fails";
const OBSERVING: &str = "Seeing what happens";

/// Route LLM requests to the worker that will finish them soonest.
#[derive(Clone, Debug, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "mla-router", version)]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Config {
    /// Workers to start with, as http(s)://HOST:PORT, separated by spaces. More can be added at run time
    #[arg(long, value_name = "URL", num_args = 0.., help_heading = WORKERS)]
    pub worker_urls: Vec<WorkerUrl>,

    /// File with one worker URL a line; the router follows its changes
    #[arg(long, value_name = "FILE", help_heading = WORKERS)]
    pub worker_urls_file: Option<PathBuf>,

    /// Find workers among the pods of a Kubernetes cluster
    #[arg(long, help_heading = WORKERS)]
    pub service_discovery: bool,

    /// Labels of the pods that are workers, as KEY=VALUE
    #[arg(long, value_name = "LABEL", num_args = 0.., help_heading = WORKERS)]
    pub selector: Vec<String>,

    /// Port on which those pods serve
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = WORKERS)]
    pub service_discovery_port: u16,

    /// Namespace of those pods; the router's own if not given
    #[arg(long, value_name = "NAME", help_heading = WORKERS)]
    pub service_discovery_namespace: Option<String>,

    /// Networks in which a worker that is added over HTTP must lie; others are refused. Loopback and
    /// private networks if none is given
    #[arg(long, value_name = "CIDR", num_args = 0.., help_heading = WORKERS)]
    pub worker_networks: Vec<Network>,

    /// Key that the router sends to workers instead of its client's
    #[arg(long, value_name = "KEY", help_heading = WORKERS)]
    pub worker_api_key: Option<ApiKey>,

    /// Key for the workers' own paths that change them for everybody, such as /flush_cache (their
    /// --admin-api-key); --worker-api-key if not given
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_WORKER_ADMIN_API_KEY", hide_env_values = true, help_heading = WORKERS)]
    pub worker_admin_api_key: Option<ApiKey>,

    /// Secret that the workers have as well (the same flag or variable of theirs): the router signs with it
    /// the requests by which one worker continues another's broken stream. Without it such streams end
    /// with an error
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_REPLAY_KEY", hide_env_values = true, help_heading = WORKERS)]
    pub replay_key: Option<ApiKey>,

    /// Certificates (PEM) that workers with https:// URLs are checked against; the system's if not given
    #[arg(long, value_name = "FILE", help_heading = WORKERS)]
    pub worker_ca_cert_path: Option<PathBuf>,

    /// Speak HTTP/2 with the workers, without TLS by prior knowledge (h2c)
    #[arg(long, help_heading = WORKERS)]
    pub upstream_http2: bool,

    /// Longest time to open a connection to a worker
    #[arg(long, value_name = "SECONDS", default_value = "5", help_heading = WORKERS)]
    pub connect_timeout_secs: Seconds,

    /// Idle connections to a worker are closed after this. Must be below the worker's own keep-alive
    /// (75 for ours, 5 for uvicorn), or requests race with the worker closing the connection
    #[arg(long, value_name = "SECONDS", default_value = "4", help_heading = WORKERS)]
    pub upstream_idle_timeout_secs: Seconds,

    /// Address to listen on
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = SERVING)]
    pub host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 30000, help_heading = SERVING)]
    pub port: u16,

    /// Share the port with one other router of this user: a new one takes over from an old one, which
    /// then gets SIGTERM
    #[arg(long, help_heading = SERVING)]
    pub reuse_port: bool,

    /// Certificate chain (PEM) to serve HTTPS with, followed when it is renewed; needs --tls-key-path
    #[arg(long, value_name = "FILE", requires = "tls_key_path", help_heading = SERVING)]
    pub tls_cert_path: Option<PathBuf>,

    /// Private key (PEM) of --tls-cert-path
    #[arg(long, value_name = "FILE", requires = "tls_cert_path", help_heading = SERVING)]
    pub tls_key_path: Option<PathBuf>,

    /// Keys, one of which clients must send as `Authorization: Bearer KEY`, on all paths but the
    /// health checks. An argument can be read by other users of the machine, the environment cannot
    #[arg(long, value_name = "KEY", num_args = 0.., env = "MLA_ROUTER_API_KEY", hide_env_values = true, help_heading = SERVING)]
    pub api_key: Vec<ApiKey>,

    /// Key for the paths that change or show the router (/workers, /metrics and the like); those of
    /// --api-key if not given
    #[arg(long, value_name = "KEY", env = "MLA_ROUTER_ADMIN_API_KEY", hide_env_values = true, help_heading = SERVING)]
    pub admin_api_key: Option<ApiKey>,

    /// Listen on an address that others can reach although no key is set
    #[arg(long, help_heading = SERVING)]
    pub insecure: bool,

    /// Names, beside localhost and addresses, by which clients may address the router (* for any); without
    /// a key, a router on loopback refuses others, since a web page could use them to reach it
    #[arg(long, value_name = "NAME", num_args = 0.., help_heading = SERVING)]
    pub allowed_hosts: Vec<AllowedHost>,

    /// Origins, such as https://chat.example.com, whose web pages may use the models (* for all)
    #[arg(long, value_name = "ORIGIN", num_args = 0.., help_heading = SERVING)]
    pub cors_allowed_origins: Vec<AllowedOrigin>,

    /// Largest request body in bytes; a larger one is answered with 413
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20, help_heading = SERVING)]
    pub max_payload_size: usize,

    /// Connections that may be open at a time. For more, idle ones are closed; where none is idle, further
    /// ones get health checks, /v1/models and the router's own paths alone, and 429 for the rest
    #[arg(long, value_name = "N", default_value_t = 16384, help_heading = SERVING)]
    pub max_connections: usize,

    /// Longest time for a request's head to arrive; then 408
    #[arg(long, value_name = "SECONDS", default_value = "10", help_heading = SERVING)]
    pub header_read_timeout_secs: Seconds,

    /// Longest pause within a request's body; then 408
    #[arg(long, value_name = "SECONDS", default_value = "30", help_heading = SERVING)]
    pub body_read_timeout_secs: Seconds,

    /// Least bytes a second at which a request's body must come on the whole, beyond
    /// --body-read-timeout-secs; then 408
    #[arg(long, value_name = "BYTES", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..), help_heading = SERVING)]
    pub body_min_rate: u32,

    /// Pause in a stream after which its client gets a comment line, so that proxies keep it open
    #[arg(long, value_name = "SECONDS", default_value = "15", help_heading = SERVING)]
    pub sse_keepalive_secs: Seconds,

    /// On SIGTERM, time for the requests in flight to finish
    #[arg(long, value_name = "SECONDS", default_value = "30", help_heading = SERVING)]
    pub shutdown_grace_period_secs: Seconds,

    /// How a worker is chosen
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = PolicyName::CacheAware, help_heading = ROUTING)]
    pub policy: PolicyName,

    /// cache_aware_threshold: share of the prompt that a worker must hold to be chosen for it
    #[arg(long, value_name = "SHARE", default_value = "0.5", help_heading = ROUTING)]
    pub cache_threshold: Share,

    /// cache_aware_threshold: workers are out of balance if their requests differ by more than this
    /// and by more than --balance-rel-threshold; then the least loaded is chosen
    #[arg(long, value_name = "N", default_value_t = 32, help_heading = ROUTING)]
    pub balance_abs_threshold: u32,

    /// cache_aware_threshold: the same as a ratio of the most to the least loaded worker
    #[arg(long, value_name = "RATIO", default_value = "1.0001", allow_negative_numbers = true, help_heading = ROUTING)]
    pub balance_rel_threshold: Ratio,

    /// Characters of prompts remembered for a worker that does not tell the size of its cache
    #[arg(long, value_name = "N", default_value_t = 1 << 24, help_heading = ROUTING)]
    pub max_tree_size: u64,

    /// Requests that may be on the workers at a time; more wait in the queue. -1: as many as come
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true, help_heading = ROUTING)]
    pub max_concurrent_requests: AtMost,

    /// Requests that may wait until a worker can take them; more are refused with 429, or with 503 if all
    /// workers are down. 0: what the workers refuse is refused at once
    #[arg(long, value_name = "N", default_value_t = 1024, help_heading = ROUTING)]
    pub queue_size: usize,

    /// Order of the queue
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = QueuePolicy::Fcfs, help_heading = ROUTING)]
    pub queue_policy: QueuePolicy,

    /// Longest wait for a worker; then 503. A request that would wait longer, by the rate of the last ten
    /// seconds, gets 429 at once
    #[arg(long, value_name = "SECONDS", default_value = "60", help_heading = ROUTING)]
    pub queue_timeout_secs: Seconds,

    /// Longest life of a request, from its last body byte to the last byte of the response
    #[arg(long, value_name = "SECONDS", default_value = "1800", help_heading = FAILURES)]
    pub request_timeout_secs: Seconds,

    /// Least time that a streamed request waits for its first byte before another worker gets it; a
    /// long prompt or queue has more
    #[arg(long, value_name = "SECONDS", default_value = "10", help_heading = FAILURES)]
    pub first_token_timeout_secs: Seconds,

    /// Least pause in a stream before its worker counts as stuck; slow streams have more
    #[arg(long, value_name = "SECONDS", default_value = "5", help_heading = FAILURES)]
    pub inter_token_timeout_secs: Seconds,

    /// Further workers to try when one fails before the first byte of its response
    #[arg(long, alias = "retry-max-retries", value_name = "N", default_value_t = 3, help_heading = FAILURES)]
    pub max_retries: u32,

    /// Try no other worker when one fails
    #[arg(long, help_heading = FAILURES)]
    pub disable_retries: bool,

    /// Pause before the first retry after a worker has refused or was slow; doubled for each further one
    #[arg(long, value_name = "MS", default_value_t = 20, help_heading = FAILURES)]
    pub retry_initial_backoff_ms: u64,

    /// Longest such pause
    #[arg(long, value_name = "MS", default_value_t = 640, help_heading = FAILURES)]
    pub retry_max_backoff_ms: u64,

    /// Share of the requests of the last ten seconds that may be retried because workers refuse or
    /// are slow; ten a second are always allowed
    #[arg(long, value_name = "SHARE", default_value = "0.2", help_heading = FAILURES)]
    pub retry_budget: Share,

    /// End a broken stream with an error instead of continuing it on another worker
    #[arg(long, help_heading = FAILURES)]
    pub disable_replay: bool,

    /// Leave workers in rotation however many requests fail on them
    #[arg(long, help_heading = FAILURES)]
    pub disable_circuit_breaker: bool,

    /// Failed requests in a row that take a worker out of rotation although it looks healthy
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..), help_heading = FAILURES)]
    pub cb_failure_threshold: u32,

    /// For how long, the first time; each further time twice as long, up to 16 times
    #[arg(long, value_name = "SECONDS", default_value = "5", help_heading = FAILURES)]
    pub cb_timeout_duration_secs: Seconds,

    /// Time between two health checks of a worker
    #[arg(long, value_name = "SECONDS", default_value = "1", help_heading = FAILURES)]
    pub health_check_interval_secs: Seconds,

    /// A health check that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value = "1", help_heading = FAILURES)]
    pub health_check_timeout_secs: Seconds,

    /// Failed health checks in a row after which a worker is down. The first one already takes it out
    /// of rotation. Its cache is remembered if it comes back as the same process
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..), help_heading = FAILURES)]
    pub health_failure_threshold: u32,

    /// Good health checks in a row that bring a worker into rotation
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = FAILURES)]
    pub health_success_threshold: u32,

    /// Path of a worker's health check
    #[arg(long, value_name = "PATH", default_value = "/health", help_heading = FAILURES)]
    pub health_check_endpoint: UrlPath,

    /// How much to log on stderr
    #[arg(long, value_enum, value_name = "LEVEL", default_value_t = LogLevel::Info, help_heading = OBSERVING)]
    pub log_level: LogLevel,

    /// Log as JSON, one object a line
    #[arg(long, help_heading = OBSERVING)]
    pub log_json: bool,

    /// Log a line for each request
    #[arg(long, help_heading = OBSERVING)]
    pub access_log: bool,

    /// Headers in which a client may send the name of its request; the first present is used in
    /// logs and traces, and sent on
    #[arg(long, value_name = "HEADER", num_args = 0.., default_values = ["x-request-id", "x-correlation-id"], help_heading = OBSERVING)]
    pub request_id_headers: Vec<HeaderField>,

    /// Send traces to this OpenTelemetry collector, as http://HOST:PORT (OTLP over HTTP, usually port
    /// 4318)
    #[arg(long, value_name = "URL", help_heading = OBSERVING)]
    pub otlp_traces_endpoint: Option<CollectorUrl>,

    #[command(flatten)]
    #[serde(skip)]
    pub ignored: Ignored,
}

impl Config {
    /// Blocks of prompts remembered for a worker that does not tell the size of its cache.
    pub fn default_cache_blocks(&self) -> u64 {
        self.max_tree_size / BLOCK_BYTES as u64
    }

    /// Further workers to try.
    pub fn retries(&self) -> u32 {
        if self.disable_retries { 0 } else { self.max_retries }
    }

    /// The key that the router's own requests to workers carry.
    pub fn worker_key(&self) -> Option<&ApiKey> {
        self.worker_api_key.as_ref().or(self.api_key.first())
    }

    /// Whether a client's `Authorization` is meant for the router and not for the workers.
    pub fn has_keys(&self) -> bool {
        self.worker_key().is_some() || self.admin_api_key.is_some()
    }
}

impl Default for Config {
    /// The defaults of the flags, so that there is no second place for them. The environment has no
    /// say here: what a program does not ask for must not depend on where it runs.
    fn default() -> Self {
        let command = Self::command().mut_args(|flag| flag.env(Resettable::Reset));
        let defaults = command.try_get_matches_from(["mla-router"]);
        defaults
            .and_then(|defaults| Self::from_arg_matches(&defaults))
            .expect("contract: every flag has a default")
    }
}

/// Whose turn it is in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueuePolicy {
    /// First come, first served
    Fcfs,
    /// The clients take turns, and none fills more than half of the queue; a client is an API key, or
    /// an address where no --api-key is set
    Fair,
}

/// The policies by name; `policy::of` makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// Where the request costs the least waiting; learns the workers' prefix caches
    CacheAware,
    /// SGLang's rule: the longest match, unless it is short or the load out of balance
    CacheAwareThreshold,
    /// By hash of the session: header x-mla-session, else the body's `user`
    #[value(alias = "consistent_hashing")]
    #[serde(alias = "consistent_hashing")]
    ConsistentHash,
    /// The worker with the fewest requests
    LeastLoad,
    /// Where the session was before: header x-mla-session, else the body's `user`
    Manual,
    /// The less loaded of two workers drawn by lot
    PowerOfTwo,
    /// By hash of the prompt's first 256 tokens, within 5/4 of the mean load
    PrefixHash,
    /// By lot
    Random,
    /// Each worker in turn
    RoundRobin,
}

impl PolicyName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CacheAware => "cache_aware",
            Self::CacheAwareThreshold => "cache_aware_threshold",
            Self::ConsistentHash => "consistent_hash",
            Self::LeastLoad => "least_load",
            Self::Manual => "manual",
            Self::PowerOfTwo => "power_of_two",
            Self::PrefixHash => "prefix_hash",
            Self::Random => "random",
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
            ("--worker-urls", "ftp://a"),
            ("--request-timeout-secs", "0"),
            ("--request-timeout-secs", "nan"),
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
        ] {
            let error = parse(&[flag, value]).expect_err(value);
            assert!(error.contains(flag), "{flag} {value}: {error}");
        }
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
    fn flags_that_mean_nothing_here_are_taken_and_told() {
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
