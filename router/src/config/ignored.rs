//! Flags of SGLang's router without effect here. They are accepted, so that a command line for SGLang's router
//! works, and logged with the reason.

use clap::Args;

#[derive(Clone, Debug, Default, PartialEq, Args)]
pub struct Ignored {
    #[arg(long, alias = "eviction-interval-secs", hide = true)]
    eviction_interval: Option<String>,
    #[arg(long, alias = "max-idle-time", hide = true)]
    max_idle_secs: Option<String>,
    #[arg(long, hide = true)]
    assignment_mode: Option<String>,
    #[arg(long, hide = true)]
    retry_backoff_multiplier: Option<String>,
    #[arg(long, hide = true)]
    retry_jitter_factor: Option<String>,
    #[arg(long, hide = true)]
    cb_success_threshold: Option<String>,
    #[arg(long, hide = true)]
    cb_window_duration_secs: Option<String>,
    #[arg(long, alias = "worker-startup-timeout", hide = true)]
    worker_startup_timeout_secs: Option<String>,
    #[arg(long, hide = true)]
    worker_startup_check_interval: Option<String>,
    #[arg(long, hide = true)]
    prometheus_port: Option<String>,
    #[arg(long, hide = true)]
    prometheus_host: Option<String>,
    #[arg(long, hide = true)]
    log_dir: Option<String>,
}

impl Ignored {
    /// The given flags, each with the reason why it has no effect.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let given = self.all().into_iter().filter(|(_, value, _)| value.is_some());
        given.map(|(flag, _, why)| (flag, why))
    }

    /// All flags, each with its value and the reason.
    pub fn all(&self) -> [(&'static str, Option<&str>, &'static str); 12] {
        const BACKOFF: &str = "each pause is twice the previous one, with jitter";
        const BREAKER: &str =
            "a breaker counts consecutive failures, and one complete answer closes it";
        const STARTUP: &str =
            "a worker may start at any time; it is checked every --health-check-interval-secs";
        const METRICS: &str = "metrics are at /metrics on the router's own port";
        [
            (
                "--eviction-interval",
                self.eviction_interval.as_deref(),
                "the tree is bounded as it grows",
            ),
            (
                "--max-idle-secs",
                self.max_idle_secs.as_deref(),
                "the table of sessions is bounded by its size",
            ),
            (
                "--assignment-mode",
                self.assignment_mode.as_deref(),
                "a new session goes to the least load",
            ),
            ("--retry-backoff-multiplier", self.retry_backoff_multiplier.as_deref(), BACKOFF),
            ("--retry-jitter-factor", self.retry_jitter_factor.as_deref(), BACKOFF),
            ("--cb-success-threshold", self.cb_success_threshold.as_deref(), BREAKER),
            ("--cb-window-duration-secs", self.cb_window_duration_secs.as_deref(), BREAKER),
            ("--worker-startup-timeout-secs", self.worker_startup_timeout_secs.as_deref(), STARTUP),
            (
                "--worker-startup-check-interval",
                self.worker_startup_check_interval.as_deref(),
                STARTUP,
            ),
            ("--prometheus-port", self.prometheus_port.as_deref(), METRICS),
            ("--prometheus-host", self.prometheus_host.as_deref(), METRICS),
            ("--log-dir", self.log_dir.as_deref(), "the log goes to stderr"),
        ]
    }
}
