//! The failure of a response that has started, and its error event for the client.

use std::{io, time::Duration};

use bytes::Bytes;
use thiserror::Error;

use crate::{
    endpoint::Endpoint,
    error,
    fleet::{LoadGuard, Outcome},
    metrics::UpstreamFailure,
    router::Router,
};

/// Why a response cannot be completed.
#[derive(Debug, Error)]
pub enum Failure {
    #[error("the worker's connection broke in the response")]
    Broken(#[source] io::Error),
    #[error("the worker's stream ended without its last event")]
    Truncated,
    #[error("the worker ended the stream: it is going down")]
    WorkerEnded,
    #[error("the worker has sent nothing for {0:?}")]
    Stuck(Duration),
    #[error("the worker has sent no byte of this stream for {0:?}, but bytes of other responses")]
    Starved(Duration),
    #[error("the worker sent an event without end")]
    EventTooLong,
    #[error("the worker broke and no other could continue: {0}")]
    NotContinued(String),
    #[error("the request took longer than --request-timeout-secs")]
    Timeout,
    #[error("the router is shutting down")]
    Stopping,
}

impl Failure {
    /// The error code for clients. Codes are stable.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Broken(_) | Self::Truncated | Self::WorkerEnded => "stream_broken",
            Self::Stuck(_) | Self::Starved(_) => "stream_stuck",
            Self::EventTooLong => "bad_stream",
            Self::NotContinued(_) => "stream_not_continued",
            Self::Timeout => "timeout",
            Self::Stopping => "shutting_down",
        }
    }

    /// Whether the failure is the fault of the worker, so that another worker may continue the stream.
    pub fn is_worker_fault(&self) -> bool {
        matches!(
            self,
            Self::Broken(_)
                | Self::Truncated
                | Self::WorkerEnded
                | Self::Stuck(_)
                | Self::Starved(_)
        )
    }

    /// Records the failure on the worker.
    pub fn record_on_worker(&self, router: &Router, guard: &mut LoadGuard) {
        match self {
            Self::Broken(_) | Self::WorkerEnded => {
                guard.record(Outcome::Failed);
                router.suspect(guard.backend(), UpstreamFailure::Body, self);
            }
            Self::Truncated | Self::EventTooLong => {
                guard.record(Outcome::Failed);
                router.metrics.upstream_error(UpstreamFailure::Body);
            }
            Self::Stuck(pause) => {
                guard.record(Outcome::Late(*pause));
                router.suspect(guard.backend(), UpstreamFailure::Stuck, self);
            }
            Self::Starved(pause) => {
                // A lower bound: the pause has not ended.
                guard.backend().limits.stream_paused(*pause);
                router.metrics.upstream_error(UpstreamFailure::Stuck);
            }
            Self::Timeout => router.metrics.upstream_error(UpstreamFailure::Timeout),
            Self::NotContinued(_) | Self::Stopping => {}
        }
    }

    /// The last event of a failed stream, in OpenAI's error shape. `[DONE]` never follows it, so a client can tell
    /// a broken answer from a complete one. Clients of the Messages API skip events without a name.
    pub fn to_event(&self, endpoint: Endpoint) -> Bytes {
        let mut error = error::openai(self, "server_error", None, self.code());
        if endpoint != Endpoint::Messages {
            return Bytes::from(format!("data: {error}\n\n"));
        }
        error["type"] = "error".into();
        Bytes::from(format!("event: error\ndata: {error}\n\n"))
    }
}
