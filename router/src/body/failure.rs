//! Why a response that has begun ends early, and how its client learns of it.

use std::time::Duration;

use bytes::Bytes;
use thiserror::Error;

use crate::{
    error,
    fleet::worker::{Booking, Outcome},
    metrics::UpstreamFailure,
    router::Router,
};

/// A response that cannot go on.
#[derive(Debug, Error)]
pub enum Failure {
    #[error("the worker's connection broke in the response")]
    Broken(#[source] hyper::Error),
    #[error("the worker's stream ended without its last event")]
    Truncated,
    #[error("the worker ended the stream: it is going down")]
    WorkerEnded,
    #[error("the worker has sent nothing for {0:?}")]
    Stuck(Duration),
    #[error("the worker sent an event without end")]
    Endless,
    #[error("the worker broke and no other could continue: {0}")]
    NotContinued(String),
    #[error("the request outlived --request-timeout-secs")]
    Timeout,
    #[error("the router is shutting down")]
    Stopping,
}

impl Failure {
    /// Stable names for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Broken(_) | Self::Truncated | Self::WorkerEnded => "stream_broken",
            Self::Stuck(_) => "stream_stuck",
            Self::Endless => "bad_stream",
            Self::NotContinued(_) => "stream_not_continued",
            Self::Timeout => "timeout",
            Self::Stopping => "shutting_down",
        }
    }

    /// Another worker may do better with the rest of the stream.
    pub fn is_of_worker(&self) -> bool {
        matches!(self, Self::Broken(_) | Self::Truncated | Self::WorkerEnded | Self::Stuck(_))
    }

    /// Lets the fleet know what this says about the worker.
    pub fn blame(&self, router: &Router, booking: &mut Booking) {
        match self {
            Self::Broken(_) | Self::WorkerEnded => {
                booking.record(Outcome::Failed);
                router.suspect(booking.worker(), UpstreamFailure::Body, self);
            }
            Self::Truncated | Self::Endless => {
                booking.record(Outcome::Failed);
                router.metrics.upstream_error(UpstreamFailure::Body);
            }
            Self::Stuck(pause) => {
                booking.record(Outcome::Late(*pause));
                router.suspect(booking.worker(), UpstreamFailure::Stuck, self);
            }
            Self::Timeout => router.metrics.upstream_error(UpstreamFailure::Timeout),
            Self::NotContinued(_) | Self::Stopping => {}
        }
    }

    /// The last event of a stream that failed, in OpenAI's error shape. `[DONE]` never follows it: a
    /// client can tell a broken answer from a complete one.
    pub fn to_event(&self) -> Bytes {
        let error = error::openai(self, "server_error", None, self.code());
        Bytes::from(format!("data: {error}\n\n"))
    }
}
