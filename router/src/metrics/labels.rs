//! The labels of the router's counters. Values are written here and nowhere else: whatever clients
//! send, the number of series stays the same.

use super::labels;

labels! {
    /// How a request to a worker went wrong.
    pub enum UpstreamFailure {
        Connect => "connect",
        /// The connection broke before there was an answer.
        Reset => "reset",
        /// The worker is dead or frozen, as its health checks have found.
        Lost => "lost",
        /// 429 or 503 from the worker.
        Busy => "busy",
        /// 500, 502 or 504 from the worker.
        Status => "status",
        /// A 200 that makes no sense.
        Garbage => "garbage",
        /// The response broke off after its first byte.
        Body => "body",
        Timeout => "timeout",
        /// The stream and its worker were silent for too long.
        Stuck => "stuck",
    }
}

labels! {
    /// What became of a stream whose worker broke and that could be continued.
    pub enum ReplayOutcome {
        /// Another worker went on.
        Continued => "continued",
        /// The next worker answered with something else.
        Refused => "refused",
        /// No worker answered.
        Failed => "failed",
        /// It had broken too often already.
        GivenUp => "given_up",
    }
}

labels! {
    /// Where the connection for a request to a worker came from.
    pub enum ConnectionSource {
        Opened => "opened",
        Reused => "reused",
    }
}

labels! {
    /// What has taken a worker out of rotation.
    pub enum Ejection {
        HealthCheck => "health_check",
        /// A request could not reach it, or its connection broke.
        Request => "request",
        /// Its breaker has opened: requests keep failing, or it is stuck.
        Breaker => "breaker",
    }
}

labels! {
    /// How the wait for a worker ended.
    pub enum QueueEnd {
        Served => "served",
        /// The queue was full.
        Full => "full",
        /// By the rate at which requests left the queue, its wait would have been too long.
        Slow => "slow",
        /// --queue-timeout-secs was over.
        Timeout => "timeout",
    }
}

labels! {
    /// What became of the trace of a request.
    pub enum TraceOutcome {
        Sent => "sent",
        /// Too many were waiting for the collector.
        Dropped => "dropped",
        /// The collector did not take it.
        Failed => "failed",
    }
}

labels! {
    /// The first digit of a status.
    pub enum StatusClass {
        Informational => "1xx",
        Success => "2xx",
        Redirection => "3xx",
        ClientError => "4xx",
        ServerError => "5xx",
    }
}

impl From<http::StatusCode> for StatusClass {
    fn from(status: http::StatusCode) -> Self {
        match status.as_u16() / 100 {
            0 | 1 => Self::Informational,
            2 => Self::Success,
            3 => Self::Redirection,
            4 => Self::ClientError,
            _ => Self::ServerError,
        }
    }
}
