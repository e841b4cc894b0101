//! The labels of the router's counters. All label values are written here, so clients cannot create series.

use super::labels;

labels! {
    /// The failure of a request to a worker.
    pub enum UpstreamFailure {
        Connect => "connect",
        /// The connection broke before the response.
        Reset => "reset",
        /// Health checks found the worker dead or frozen.
        Lost => "lost",
        /// 429 or 503 from the worker.
        Busy => "busy",
        /// 500, 502 or 504 from the worker.
        Status => "status",
        /// Status 200 with a body that is not an answer of the API.
        Garbage => "garbage",
        /// The response broke off after its first byte.
        Body => "body",
        Timeout => "timeout",
        /// The stream and its worker were silent for too long.
        Stuck => "stuck",
    }
}

labels! {
    /// The outcome of an attempt to continue a stream.
    pub enum ReplayOutcome {
        /// Another worker continued the stream.
        Continued => "continued",
        /// The next worker did not send a continuation.
        Refused => "refused",
        /// No worker answered.
        Failed => "failed",
        /// The stream had broken too often already.
        GivenUp => "given_up",
    }
}

labels! {
    /// The origin of the connection for a request.
    pub enum ConnectionSource {
        Opened => "opened",
        Reused => "reused",
    }
}

labels! {
    /// The cause for taking a worker out of rotation.
    pub enum Ejection {
        HealthCheck => "health_check",
        /// A request could not reach the worker, or its connection broke.
        Request => "request",
        /// The breaker opened: requests keep failing, or the worker is stuck.
        Breaker => "breaker",
    }
}

labels! {
    /// The end of a wait for a worker.
    pub enum QueueEnd {
        Served => "served",
        /// The queue was full.
        Full => "full",
        /// The expected wait was too long.
        Slow => "slow",
        /// The wait exceeded --queue-timeout-secs.
        Timeout => "timeout",
        /// The operator aborted all requests.
        Aborted => "aborted",
    }
}

labels! {
    /// The outcome of the export of a trace.
    pub enum TraceOutcome {
        Sent => "sent",
        /// Too many traces were waiting for the collector.
        Dropped => "dropped",
        /// The collector did not accept the trace.
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
